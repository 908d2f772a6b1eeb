"""`make package`: rules of the skill's folder, and a zip that is the same every time."""

import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import strictyaml
import yaml

import package
from conftest import ROOT, SKILL
from shipping import make_project


def test_rules_hold() -> None:
    assert package.problems() == []


def test_the_zip_is_complete(tmp_path: Path) -> None:
    """Everything the skill needs, nothing else; the unpacked skill answers `doctor` by itself."""
    archive = tmp_path / "skill.zip"
    package.write_zip(archive)
    assert package.archive_problems(archive, package.contents()) == []
    assert archive.stat().st_size < package.MAX_ZIP_BYTES
    with zipfile.ZipFile(archive) as opened:
        names = opened.namelist()
        opened.extractall(tmp_path / "skill")
    assert {name.split("/")[0] for name in names} == package.TOP_LEVEL
    done = subprocess.run(
        [sys.executable, str(tmp_path / "skill" / "scripts" / "dryrun.py"), "doctor"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert f"skill        {package.skill_version()}" in done.stdout


def zip_by_the_book(files: dict[str, bytes]) -> bytes:
    """A zip written field by field (PKWARE's APPNOTE 4.3), without Python's zipfile or zlib's
    compressor: what depends on neither is the same everywhere."""
    year, month, day, hour, minute, second = package.ENTRY_TIME
    time = hour << 11 | minute << 5 | second // 2
    date = (year - 1980) << 9 | month << 5 | day
    body, directory = b"", b""
    for name, content in sorted(files.items()):
        mode = 0o100755 if name in package.EXECUTABLE else 0o100644
        size, raw = len(content), name.encode("ascii")
        # Version 2.0, no flags, stored.
        common = struct.pack("<HHHHHLLLHH", 20, 0, 0, time, date, zlib.crc32(content), size, size,
                             len(raw), 0)  # fmt: skip
        directory += b"PK\x01\x02" + struct.pack("<BB", 20, 3) + common
        directory += struct.pack("<HHHLL", 0, 0, 0, mode << 16, len(body)) + raw
        body += b"PK\x03\x04" + common + raw + content
    end = struct.pack("<HHHHLLH", 0, 0, len(files), len(files), len(directory), len(body), 0)
    return body + directory + b"PK\x05\x06" + end


def test_the_zip_is_reproducible(tmp_path: Path) -> None:
    """Two builds have the same bytes, and they are those that the format demands."""
    first, second = tmp_path / "a.zip", tmp_path / "b.zip"
    package.write_zip(first)
    package.write_zip(second)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() == zip_by_the_book(package.contents())


def other_pythons() -> dict[str, str]:
    """Other versions of Python on this machine, by version."""
    beside = Path(sys.base_prefix).resolve()  # as pyenv and the runners of GitHub lay them out
    places = [Path("/usr/bin/python3"), *beside.parent.glob("3.*/bin/python3")]
    places += beside.parent.parent.glob("3.*/*/bin/python3")
    places += [Path(found) for n in range(10, 15) if (found := shutil.which(f"python3.{n}"))]
    version = "import platform; print(platform.python_version())"
    found = {}
    for place in filter(Path.exists, places):
        done = subprocess.run([place, "-c", version], capture_output=True, text=True, check=False)
        numbers = done.stdout.split(".")[:2]
        if done.returncode == 0 and int(numbers[1]) >= 10:
            found[".".join(numbers)] = str(place)
    found.pop(".".join(map(str, sys.version_info[:2])), None)
    return found


def test_another_python_gives_the_same_zip(tmp_path: Path) -> None:
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no second Python here; release.yml compares two")
    here = tmp_path / "here.zip"
    package.write_zip(here)
    for version, python in pythons.items():
        code = "import sys, pathlib, package; package.write_zip(pathlib.Path(sys.argv[1]))"
        there = tmp_path / f"{version}.zip"
        subprocess.run(
            [python, "-c", code, str(there)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "PYTHONDONTWRITEBYTECODE": "1"},
            check=True,
        )
        assert there.read_bytes() == here.read_bytes(), version


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("scripts/trio_local/__init__.py", "installers drop names"),
        ("scripts/_util.py", "installers drop names"),
        ("scripts/.hidden/a.py", "installers drop names"),
        ("references/README.md", "installers drop files of this name"),
        ("scripts/trio_local/weights/metadata.json", "installers drop files of this name"),
        ("notes/extra.md", "belong into the skill"),
        ("LICENSE.txt", "belong into the skill"),
        ("references/unrouted.md", "does not route to"),
        ("examples/SKILL.md", "there must be one SKILL.md"),
        ("scripts/skill.md", "there must be one SKILL.md"),
        ("scripts/trace.msgpack", "files are shipped"),
        ("scripts/nul.py", "for a device"),
        ("scripts/a:b.py", "Windows refuses"),
        ("scripts/ende.", "Windows refuses"),
        ("scripts/größe.py", "must be ASCII"),
        ("scripts/DRYRUN.py", "scripts/dryrun.py: is the same file as scripts/DRYRUN.py"),
        (f"scripts/{'long' * 40}.py", "characters, at most"),
    ],
)
def test_bad_files_are_named(name: str, reason: str, other_skill: Path) -> None:
    """A file that installers would drop, or that nothing routes to, fails the check."""
    extra = other_skill / name
    extra.parent.mkdir(parents=True, exist_ok=True)
    extra.write_text("x\n", encoding="utf-8")
    found = package.problems()
    assert any(name in problem and reason in problem for problem in found), found


@pytest.fixture
def other_skill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small skill in a git repository of its own, which `package` then looks at."""
    copy = make_project(tmp_path).root / "skills" / "pytrio-skill"
    monkeypatch.setattr(package, "SKILL", copy)
    assert package.problems() == []
    return copy


def test_what_a_run_leaves_behind_is_never_shipped(other_skill: Path) -> None:
    """Caches of Python and of the tools, recordings, logs: beside the files, not in the zip."""
    before = package.contents()
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", str(other_skill / "scripts" / "audit")],
        check=True,
    )
    assert list(other_skill.rglob("*.pyc"))
    for name in (".mypy_cache/a.json", ".ruff_cache/a", ".trio-local/runs/a/audit.json",
                 "swanlog/run/a.json", ".pytest_cache/README.md"):  # fmt: skip
        path = other_skill / "scripts" / name
        path.parent.mkdir(parents=True)
        path.write_text("x", encoding="utf-8")
    assert package.contents() == before and package.problems() == []


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("license: MIT", "license: MIT\nversion: 1", "fields not allowed: version"),
        ("name: pytrio-skill", "name: other", "name must be pytrio-skill"),
        ('version: "0.1.0"', "version: 0.1.0", "must be a quoted version"),
        ("PyTRIO loops", "PyTRIO: loops", "must not hold `: `"),
        ("Not for trio", "word " * 210, "1 to 1024 allowed"),
        ("Write PyTRIO", "word " * 50 + "PyTRIO", "name PyTRIO in its first 200"),
        ("compatibility: Python", "compatibility: " + "x" * 501, "compatibility may have"),
        ("references/sft.md", "references/none.md", "references/none.md, which does not exist"),
        ("\n## Rules", "\n" * 200 + "## Rules", "at most 200"),
        ("\n", "\r\n", "CR line endings"),
    ],
)
def test_a_bad_head_is_named(old: str, new: str, reason: str, other_skill: Path) -> None:
    path = other_skill / "SKILL.md"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_bytes(text.replace(old, new).encode("utf-8"))
    assert any(reason in problem for problem in package.problems()), package.problems()


def test_links_and_long_notes_are_named(other_skill: Path) -> None:
    note = other_skill / "references" / "sft.md"
    note.write_text("line\n" * 251, encoding="utf-8")
    link = other_skill / "scripts" / "link.py"
    link.symlink_to("dryrun.py")
    found = package.problems()
    assert "references/sft.md: 251 lines, a note may have 250" in found
    assert any("link.py: is a symlink" in problem for problem in found)


def test_two_yaml_parsers_agree() -> None:
    """Clients read the head with different parsers: a lenient, a strict one and ours agree."""
    text = (SKILL / "SKILL.md").read_text(encoding="utf-8")
    head = text.split("---\n")[1]
    lenient, strict = yaml.safe_load(head), strictyaml.load(head).data
    assert lenient == strict
    ours = package.frontmatter(text)
    assert list(ours) == list(lenient)
    assert package.folded(ours["description"]) == lenient["description"].strip()
    assert package.version_in(text) == lenient["metadata"]["version"]
    assert isinstance(lenient["description"], str) and len(lenient["description"]) <= 1024


def test_the_reference_validator_agrees() -> None:
    """The validator of the Agent Skills specification; on a broken copy it complains."""
    command = [sys.executable, "-m", "skills_ref.cli", "validate"]
    done = subprocess.run([*command, str(SKILL)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Valid skill" in done.stdout


def test_the_reference_validator_can_fail(other_skill: Path) -> None:
    path = other_skill / "SKILL.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("license: MIT", "flow: [a, b]"), encoding="utf-8")
    command = [sys.executable, "-m", "skills_ref.cli", "validate", str(other_skill)]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_the_command_prints_size_and_hash(other_skill: Path, tmp_path: Path) -> None:
    """And --verify then knows a good zip from a changed one."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "scripts" / "package.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run()
    assert done.returncode == 0, done.stderr
    archive = tmp_path / "dist" / "pytrio-skill-0.1.0.zip"
    digest = package.sha256(archive)
    assert re.search(rf"{archive.stat().st_size:,} bytes  sha256 {digest}\n$", done.stdout)
    checksum = archive.with_name(archive.name + ".sha256").read_text(encoding="utf-8")
    assert checksum == f"{digest}  {archive.name}\n"
    assert run("--verify", str(archive)).returncode == 0
    archive.write_bytes(archive.read_bytes().replace(b"PyTRIO", b"PyTRIo", 1))
    assert run("--verify", str(archive)).returncode == 1
    (other_skill / "scripts" / "_a.py").touch()
    done = run("--check")
    assert done.returncode == 1 and "scripts/_a.py: installers drop" in done.stderr
