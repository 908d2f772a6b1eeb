"""The suite of seeded bugs; `make mutation` runs all of it, a slow test every twelfth mutant and
every second loop."""

import subprocess
import sys
from pathlib import Path

import pytest

from catalogue import MUTANTS, loop_source, mutated_source
from conftest import ROOT, SKILL

RUN = ROOT / "tests" / "mutants" / "run.py"
EVERY = 12


def test_every_mutant_changes_its_loop() -> None:
    assert len(MUTANTS) >= 150
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        source = mutated_source(mutant)
        assert source != loop_source(mutant.loop), mutant.name
        compile(source, mutant.name, "exec")


def test_expected_codes_exist() -> None:
    """A mutant that expects a misspelt code could never be caught."""
    from audit.rules import RULES as AUDIT_RULES
    from lint.rules import RULES as LINT_RULES

    known = {rule.code for rule in AUDIT_RULES.values()} | {rule.code for rule in LINT_RULES}
    for mutant in MUTANTS:
        assert mutant.expect and set(mutant.expect) <= known, mutant.name


def test_the_note_explains_every_code() -> None:
    """Each finding links to a heading of the note."""
    from audit.rules import RULES

    headings = {
        line.removeprefix("### ").strip().lower()
        for line in (SKILL / "references" / "audit.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("### ")
    }
    assert {rule.reference.partition("#")[2] for rule in RULES.values()} <= headings


@pytest.mark.slow
def test_loops_are_clean_and_mutants_are_caught(tmp_path: Path) -> None:
    names = [mutant.name for mutant in MUTANTS[::EVERY]]
    loops = sorted(path.stem for path in (RUN.parent / "loops").glob("*.py"))[::2]
    command = [sys.executable, str(RUN), "--keep", str(tmp_path / "kept"), "--only"]
    done = subprocess.run(
        [*command, *loops, *names], capture_output=True, text=True, timeout=1800, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
