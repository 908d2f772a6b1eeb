"""The text is true: every Python block runs, every link and every routed file exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import KEY, ROOT, SKILL, Backend

NOTES = [SKILL / "SKILL.md", *sorted((SKILL / "references").glob("*.md"))]
PAGES = [*NOTES, ROOT / "README.md"]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")), 1)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, backend: Backend, tmp_path: Path) -> None:
    """Every fenced Python block runs by itself, with the real SDK against the backend."""
    script = tmp_path / "block.py"
    script.write_text(block, encoding="utf-8")
    environment = {**os.environ, "PYTRIO_BASE_URL": backend.url, "PYTRIO_API_KEY": KEY}
    environment["HOME"] = environment["USERPROFILE"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_there_are_blocks() -> None:
    """The extraction finds the blocks: an empty list would pass everything."""
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page: Path) -> None:
    """Every relative link points at something."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dryrun_options_exist(page: Path) -> None:
    """Every `dryrun.py` option named in the text is one that `run --help` prints."""
    helped = subprocess.run(
        [sys.executable, str(SKILL / "scripts" / "dryrun.py"), "run", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    text = page.read_text(encoding="utf-8")
    lines = [
        line for line in text.splitlines() if "dryrun.py run" in line or line.startswith("| `--")
    ]
    named = {o for line in lines for o in re.findall(r"--[a-z][a-z-]+", line.split(" -- ")[0])}
    assert not {option for option in named if option not in helped}


def test_token_budget() -> None:
    """SKILL.md stays within 2,500 tokens, counted as 3.2 characters each."""
    assert len((SKILL / "SKILL.md").read_text(encoding="utf-8")) / 3.2 < 2500
