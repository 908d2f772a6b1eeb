#!/usr/bin/env python3
"""Check the skill's folder and zip it reproducibly.

    python scripts/package.py                check, then write dist/pytrio-skill-VERSION.zip
    python scripts/package.py --check        check only
    python scripts/package.py --verify ZIP   is this zip the one that these files give

The root of the zip is SKILL.md, references/, examples/ and scripts/. Same files, same bytes, on
every Python and every system: entries are sorted, carry a fixed time and are stored as they are,
because zlib's builds compress differently. Exit codes: 0 done, 1 a rule is broken.
"""

import argparse
import hashlib
import re
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKILL = ROOT / "skills" / "pytrio-skill"
TOP_LEVEL = {"SKILL.md", "references", "examples", "scripts"}
SUFFIXES = {".md", ".py", ".txt", ".json", ".jinja", ".safetensors"}
ALLOWED_FIELDS = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
MAX_ZIP_BYTES = 25 * 1024 * 1024
MAX_SKILL_LINES = 200
MAX_NOTE_LINES = 250
MAX_NAME_LENGTH = 120  # Windows gives 260 characters to the whole path
MAX_DESCRIPTION, MAX_COMPATIBILITY, SEEN_DESCRIPTION = 1024, 500, 200
EXECUTABLE = {"scripts/dryrun.py"}
# What zipfile raises for damaged fields besides its own errors.
UNREADABLE = (NotImplementedError, OSError, ValueError)
ENTRY_TIME = (2020, 1, 1, 0, 0, 0)
# Names that Windows keeps for devices, with any suffix.
DEVICES = re.compile(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)")


def shipped_files() -> list[Path]:
    """Files of the skill that git knows or would know; caches and scratch files are not shipped."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."]
    try:
        done = subprocess.run(command, cwd=SKILL, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(f"{SKILL} is not in a git repository; package from a clone") from None
    files = {SKILL / name for name in done.stdout.decode().split("\0") if name}
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


def folded(value: str) -> str:
    """A field's text on one line, without the mark of a folded block."""
    return " ".join(value.replace(">-", "").split())


def version_in(text: str) -> str:
    """`metadata.version` in the text of a SKILL.md, empty when there is none."""
    match = re.search(r'version:\s*"([^"]+)"', frontmatter(text).get("metadata", ""))
    return match[1] if match else ""


def skill_version() -> str:
    """`metadata.version` of the skill."""
    return version_in((SKILL / "SKILL.md").read_text(encoding="utf-8"))


def name_problems(name: str) -> list[str]:
    """What is wrong with a file's name inside the skill; POSIX, relative to its root."""
    found = []
    parts = name.split("/")
    if parts[0] not in TOP_LEVEL or (len(parts) == 1 and name != "SKILL.md"):
        found.append(f"{name}: only {', '.join(sorted(TOP_LEVEL))} belong into the skill")
    if not name.isascii():
        found.append(f"{name}: file names must be ASCII")
    if any(part.startswith((".", "_")) for part in parts):
        found.append(f"{name}: installers drop names that begin with _ or .")
    if parts[-1] in ("README.md", "metadata.json"):
        found.append(f"{name}: installers drop files of this name")
    if parts[-1].lower() == "skill.md" and name != "SKILL.md":
        found.append(f"{name}: there must be one SKILL.md")
    if Path(name).suffix not in SUFFIXES:
        found.append(f"{name}: only {', '.join(sorted(SUFFIXES))} files are shipped")
    if re.search(r'[<>:"|?*\\]', name) or any(p.endswith((".", " ")) for p in parts):
        found.append(f"{name}: Windows refuses this name")
    if any(DEVICES.match(part) for part in parts):
        found.append(f"{name}: Windows keeps this name for a device")
    if len(name) > MAX_NAME_LENGTH:
        found.append(f"{name}: {len(name)} characters, at most {MAX_NAME_LENGTH}")
    return found


def twins(names: Iterable[str]) -> list[str]:
    """Names that are one file where case does not count."""
    seen: dict[str, str] = {}
    found = []
    for name in names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            found.append(f"{name}: is the same file as {other} on macOS and Windows")
    return found


def problems() -> list[str]:
    """Every broken rule of the skill's folder, in words."""
    files = shipped_files()
    names = {path: path.relative_to(SKILL).as_posix() for path in files}
    found = twins(names.values())
    for path, name in names.items():
        if path.is_symlink():
            found.append(f"{name}: is a symlink; installers copy or drop links")
            continue
        found += name_problems(name)
        content = path.read_bytes()
        if path.suffix != ".safetensors" and b"\r" in content:
            found.append(f"{name}: has CR line endings")
        if path.suffix == ".md" and path.parent.name == "references" and path.name != "api.md":
            lines = content.count(b"\n")
            if lines > MAX_NOTE_LINES:
                found.append(f"{name}: {lines} lines, a note may have {MAX_NOTE_LINES}")
    if SKILL / "SKILL.md" not in files:
        return [*found, "SKILL.md is missing"]
    return found + skill_problems(set(names.values()))


def skill_problems(names: set[str]) -> list[str]:
    """Rules of SKILL.md itself and of the files it routes to."""
    text = (SKILL / "SKILL.md").read_text(encoding="utf-8")
    found = head_problems(frontmatter(text))
    if not re.fullmatch(r"\d+\.\d+\.\d+", skill_version()):
        found.append('SKILL.md: metadata.version must be a quoted version such as "0.1.0"')
    if text.count("\n") > MAX_SKILL_LINES:
        found.append(f"SKILL.md: {text.count(chr(10))} lines, at most {MAX_SKILL_LINES}")
    routed = set(re.findall(r"(?:references|examples)/[A-Za-z0-9_.-]+\.(?:md|py)", text))
    for name in sorted(routed - names):
        found.append(f"SKILL.md: routes to {name}, which does not exist")
    existing = {n for n in names if n.startswith(("references/", "examples/"))}
    for name in sorted(existing - routed):
        found.append(f"SKILL.md: does not route to {name}")
    return found


def head_problems(fields: dict[str, str]) -> list[str]:
    """Rules of the YAML head: what clients refuse, cut or read differently."""
    found = []
    unknown = set(fields) - ALLOWED_FIELDS
    if unknown:
        found.append(f"SKILL.md: fields not allowed: {', '.join(sorted(unknown))}")
    if fields.get("name") != SKILL.name:
        found.append(f"SKILL.md: name must be {SKILL.name}")
    description = folded(fields.get("description", ""))
    if not 1 <= len(description) <= MAX_DESCRIPTION:
        found.append(
            f"SKILL.md: description has {len(description)} characters, "
            f"1 to {MAX_DESCRIPTION} allowed"
        )
    if re.search(r": |[<>]", description):
        found.append("SKILL.md: description must not hold `: `, < or >")
    if "PyTRIO" not in description[:SEEN_DESCRIPTION]:
        found.append(f"SKILL.md: description must name PyTRIO in its first {SEEN_DESCRIPTION}")
    if len(folded(fields.get("compatibility", ""))) > MAX_COMPATIBILITY:
        found.append(f"SKILL.md: compatibility may have {MAX_COMPATIBILITY} characters")
    return found


def contents() -> dict[str, bytes]:
    """What the zip holds: bytes by name."""
    return {path.relative_to(SKILL).as_posix(): path.read_bytes() for path in shipped_files()}


def write_zip(target: Path) -> None:
    """The archive: sorted names, one fixed time, permissions 644 or 755, nothing compressed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(contents().items()):
            entry = zipfile.ZipInfo(name, date_time=ENTRY_TIME)
            mode = 0o755 if name in EXECUTABLE else 0o644
            entry.external_attr = (stat.S_IFREG | mode) << 16
            entry.create_system = 3
            archive.writestr(entry, content)
    part.replace(target)


def archive_problems(archive: Path, expected: dict[str, bytes]) -> list[str]:
    """What distinguishes a zip from one of `expected` (bytes by name), in words."""
    if not archive.is_file():
        return [f"{archive.name}: does not exist"]
    if archive.stat().st_size > MAX_ZIP_BYTES:
        return [f"{archive.name}: {archive.stat().st_size} bytes, at most {MAX_ZIP_BYTES}"]
    found = []
    try:
        with zipfile.ZipFile(archive) as opened:
            entries = opened.infolist()
            # What is compressed is refused below, unread: it may be of any size.
            held = {
                entry.filename: opened.read(entry)
                if entry.compress_type == zipfile.ZIP_STORED
                else b""
                for entry in entries
            }
    except (zipfile.BadZipFile, zipfile.LargeZipFile, RuntimeError, EOFError, *UNREADABLE) as error:
        return [f"{archive.name}: cannot be read: {error}"]
    names = [entry.filename for entry in entries]
    for name in names:
        found += name_problems(name)
    found += [f"{name}: is in the zip twice" for name in sorted(held) if names.count(name) > 1]
    found += twins(held)
    if names != sorted(names):
        found.append(f"{archive.name}: entries are not sorted")
    for entry in entries:
        if not stat.S_ISREG(entry.external_attr >> 16):
            found.append(f"{entry.filename}: is not a regular file")
        if entry.date_time != ENTRY_TIME or entry.compress_type != zipfile.ZIP_STORED:
            found.append(f"{entry.filename}: was not written by scripts/package.py")
    found += [f"{name}: is missing from the zip" for name in sorted(set(expected) - set(held))]
    found += [f"{name}: does not belong into the zip" for name in sorted(set(held) - set(expected))]
    for name in sorted(set(held) & set(expected)):
        if held[name] != expected[name]:
            found.append(f"{name}: differs from the repository's")
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="check only, write nothing")
    mode.add_argument("--verify", metavar="ZIP", type=Path, help="compare a zip with the folder")
    options = parser.parse_args()
    found = problems()
    target: Path = options.verify or ROOT / "dist" / f"{SKILL.name}-{skill_version()}.zip"
    if not found and not options.check:
        if not options.verify:
            try:
                write_zip(target)
            except OSError as error:
                print(f"cannot write {target}: {error.strerror}", file=sys.stderr)
                return 1
        found = archive_problems(target, contents())
    for problem in found:
        print(problem, file=sys.stderr)
    if found:
        return 1
    if options.check:
        print(f"skill {skill_version()}: {len(shipped_files())} files, all rules hold")
        return 0
    digest = sha256(target)
    if not options.verify:
        checksum = target.with_name(target.name + ".sha256")
        checksum.write_text(f"{digest}  {target.name}\n", encoding="utf-8", newline="\n")
    print(f"{target}  {target.stat().st_size:,} bytes  sha256 {digest}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
