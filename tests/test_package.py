"""`make package`: rules of the skill's folder, and a zip that is the same every time."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import package
from conftest import ROOT


def test_rules_hold() -> None:
    assert package.problems() == []


def test_zip_is_reproducible_and_complete(tmp_path: Path) -> None:
    """Two builds have the same bytes; the unpacked skill answers `doctor` by itself."""
    first, second = tmp_path / "a.zip", tmp_path / "b.zip"
    package.write_zip(first)
    package.write_zip(second)
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "skill")
    assert {name.split("/")[0] for name in names} == package.TOP_LEVEL
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "skill" / "scripts" / "dryrun.py"), "doctor"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert f"skill        {package.skill_version()}" in done.stdout


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("scripts/trio_local/__init__.py", "installers drop names"),
        ("references/README.md", "installers drop files of this name"),
        ("notes/extra.md", "belong into the skill"),
        ("references/unrouted.md", "does not route to"),
    ],
)
def test_bad_files_are_named(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that installers would drop, or that nothing routes to, fails the check."""
    extra = tmp_path / "pytrio-skill" / name
    extra.parent.mkdir(parents=True)
    extra.write_text("x\n", encoding="utf-8")
    real = package.shipped_files()
    copies = [tmp_path / "pytrio-skill" / path.relative_to(package.SKILL) for path in real]
    for source, copy in zip(real, copies, strict=True):
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    monkeypatch.setattr(package, "SKILL", tmp_path / "pytrio-skill")
    monkeypatch.setattr(package, "shipped_files", lambda: [*copies, extra])
    found = package.problems()
    assert any(name in problem and reason in problem for problem in found), found


def test_changelog_has_the_version() -> None:
    assert f"## {package.skill_version()}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
