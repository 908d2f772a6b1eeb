#!/usr/bin/env python3
"""Check the skill's folder and zip it reproducibly.

    python scripts/package.py            check, then write dist/pytrio-skill-VERSION.zip
    python scripts/package.py --check    check only

The root of the zip is SKILL.md, references/, examples/ and scripts/. Same files, same bytes:
entries are sorted and carry a fixed time. Exit codes: 0 done, 1 a rule is broken.
"""

import argparse
import hashlib
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKILL = ROOT / "skills" / "pytrio-skill"
TOP_LEVEL = {"SKILL.md", "references", "examples", "scripts"}
ALLOWED_FIELDS = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
MAX_ZIP_BYTES = 25 * 1024 * 1024
MAX_SKILL_LINES = 200
MAX_NOTE_LINES = 250
EXECUTABLE = {"scripts/dryrun.py"}


def shipped_files() -> list[Path]:
    """Files of the skill that git knows or would know; caches and scratch files are not shipped."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."]
    listed = subprocess.run(command, cwd=SKILL, check=True, capture_output=True, text=True).stdout
    files = {SKILL / name for name in listed.split("\0") if name}
    return sorted(path for path in files if path.exists() or path.is_symlink())


def frontmatter(text: str) -> dict[str, str]:
    """Top-level fields of the YAML head, block style only; nested lines stay in their field."""
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if match is None:
        return {}
    fields: dict[str, str] = {}
    name = ""
    for line in match[1].splitlines():
        top = re.match(r"([a-z-]+):\s*(.*)", line)
        if top:
            name = top[1]
            fields[name] = top[2]
        else:
            fields[name] = fields.get(name, "") + "\n" + line
    return fields


def skill_version() -> str:
    """`metadata.version` of SKILL.md, empty when there is none."""
    fields = frontmatter((SKILL / "SKILL.md").read_text(encoding="utf-8"))
    match = re.search(r'version:\s*"([^"]+)"', fields.get("metadata", ""))
    return match[1] if match else ""


def problems() -> list[str]:
    """Every broken rule of the skill's folder, in words."""
    found: list[str] = []
    files = shipped_files()
    for path in files:
        name = path.relative_to(SKILL).as_posix()
        if path.is_symlink():
            found.append(f"{name}: is a symlink; installers copy or drop links")
            continue
        if name.split("/")[0] not in TOP_LEVEL:
            found.append(f"{name}: only {', '.join(sorted(TOP_LEVEL))} belong into the skill")
        if not name.isascii():
            found.append(f"{name}: file names must be ASCII")
        if any(part.startswith((".", "_")) for part in name.split("/")):
            found.append(f"{name}: installers drop names that begin with _ or .")
        if path.name in ("README.md", "metadata.json"):
            found.append(f"{name}: installers drop files of this name")
        if path.name == "SKILL.md" and path.parent != SKILL:
            found.append(f"{name}: there must be one SKILL.md")
        if path.suffix in (".md", ".py", ".txt", ".json", ".jinja"):
            content = path.read_bytes()
            if b"\r" in content:
                found.append(f"{name}: has CR line endings")
        if path.suffix == ".md" and path.parent.name == "references" and path.name != "api.md":
            lines = path.read_text(encoding="utf-8").count("\n")
            if lines > MAX_NOTE_LINES:
                found.append(f"{name}: {lines} lines, a note may have {MAX_NOTE_LINES}")
    if SKILL / "SKILL.md" not in files:
        return [*found, "SKILL.md is missing"]
    return found + skill_problems(files)


def skill_problems(files: list[Path]) -> list[str]:
    """Rules of SKILL.md itself and of the files it routes to."""
    found: list[str] = []
    text = (SKILL / "SKILL.md").read_text(encoding="utf-8")
    fields = frontmatter(text)
    unknown = set(fields) - ALLOWED_FIELDS
    if unknown:
        found.append(f"SKILL.md: fields not allowed: {', '.join(sorted(unknown))}")
    if fields.get("name") != SKILL.name:
        found.append(f"SKILL.md: name must be {SKILL.name}")
    description = " ".join(fields.get("description", "").replace(">-", "").split())
    if not 1 <= len(description) <= 1024:
        found.append(f"SKILL.md: description has {len(description)} characters, 1 to 1024 allowed")
    if re.search(r": |[<>]", description):
        found.append("SKILL.md: description must not hold `: `, < or >")
    if not re.fullmatch(r"\d+\.\d+\.\d+", skill_version()):
        found.append('SKILL.md: metadata.version must be a quoted version such as "0.1.0"')
    if text.count("\n") > MAX_SKILL_LINES:
        found.append(f"SKILL.md: {text.count(chr(10))} lines, at most {MAX_SKILL_LINES}")
    names = {path.relative_to(SKILL).as_posix() for path in files}
    routed = set(re.findall(r"(?:references|examples)/[A-Za-z0-9_.-]+\.(?:md|py)", text))
    for name in sorted(routed - names):
        found.append(f"SKILL.md: routes to {name}, which does not exist")
    existing = {n for n in names if n.startswith(("references/", "examples/"))}
    for name in sorted(existing - routed):
        found.append(f"SKILL.md: does not route to {name}")
    return found


def write_zip(target: Path) -> None:
    """The archive: sorted names, one fixed time, permissions 644 or 755."""
    target.parent.mkdir(exist_ok=True)
    part = target.with_suffix(".zip.part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in shipped_files():
            name = path.relative_to(SKILL).as_posix()
            entry = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
            mode = 0o755 if name in EXECUTABLE else 0o644
            entry.external_attr = (stat.S_IFREG | mode) << 16
            entry.create_system = 3
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes(), compresslevel=9)
    part.replace(target)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="check only, write nothing")
    options = parser.parse_args()
    found = problems()
    for problem in found:
        print(problem, file=sys.stderr)
    if found:
        return 1
    if options.check:
        print(f"skill {skill_version()}: {len(shipped_files())} files, all rules hold")
        return 0
    target = ROOT / "dist" / f"pytrio-skill-{skill_version()}.zip"
    write_zip(target)
    size = target.stat().st_size
    if size > MAX_ZIP_BYTES:
        print(f"{target.name} has {size} bytes, at most {MAX_ZIP_BYTES}", file=sys.stderr)
        return 1
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    print(f"{target.relative_to(ROOT)}  {size:,} bytes  sha256 {digest}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
