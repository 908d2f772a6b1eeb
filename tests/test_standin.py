"""The shipped stand-ins: sizes, tokenizer and template quirks, and the committed report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, SKILL

WEIGHTS = SKILL / "scripts" / "trio_local" / "weights"
BUILDER = ROOT / "scripts" / "build_standin.py"
REPORT = json.loads((ROOT / "scripts" / "standin_report.json").read_text(encoding="utf-8"))
PRACTISED = ("words", "maths", "chat", "search", "code", "household")


def test_sizes() -> None:
    """One model with its tokenizer stays below 6 MB, all of them below 10 MB."""
    sizes = {
        folder.name: sum(path.stat().st_size for path in folder.iterdir())
        for folder in WEIGHTS.iterdir()
    }
    assert max(sizes.values()) < 6_000_000
    assert sum(sizes.values()) < 10_000_000


def test_one_tokenizer_for_all() -> None:
    """Teacher and student, and both families of names, share one vocabulary."""
    files = [(WEIGHTS / name / "tokenizer.json").read_bytes() for name in ("standin", "large")]
    assert files[0] == files[1] == (WEIGHTS / "qwen3" / "tokenizer.json").read_bytes()


def test_tokenizer_and_template_properties() -> None:
    """Lossless on odd text, loads offline in both loaders, prompts are token prefixes."""
    done = subprocess.run(
        [sys.executable, str(BUILDER), "check", "--conversations", "100"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all properties hold" in done.stdout


@pytest.mark.parametrize("task", PRACTISED)
def test_standin_succeeds_sometimes(task: str) -> None:
    """25 to 70 % success at temperature 1 with valid format in at least 70 %."""
    rates = REPORT["models"]["standin"]["tasks"][task]
    assert 0.25 <= rates["success"] <= 0.70
    assert rates["format"] >= 0.70


@pytest.mark.parametrize("task", PRACTISED)
def test_large_succeeds_nearly_always(task: str) -> None:
    """At least 90 % greedy success."""
    assert REPORT["models"]["large"]["tasks"][task]["greedy_success"] >= 0.90


@pytest.mark.slow
def test_report_is_of_the_shipped_weights(tmp_path: Path) -> None:
    """Measuring a fifth of the prompts again gives the committed rates, within sampling error."""
    subprocess.run(
        [sys.executable, str(BUILDER), "report", "--share", "0.2", "--report-to", str(tmp_path)],
        capture_output=True,
        check=True,
    )
    again = json.loads((tmp_path / "standin_report.json").read_text(encoding="utf-8"))
    for kind, entry in REPORT["models"].items():
        assert entry["parameters"] == again["models"][kind]["parameters"]
        for task, rates in entry["tasks"].items():
            measured = again["models"][kind]["tasks"][task]
            # Groups of 8 share a prompt, so a rate over n samples varies like one over n / 4.
            error = 0.5 / (measured["samples"] / 4) ** 0.5
            difference = abs(measured["success"] - rates["success"])
            assert difference <= 3 * error, (kind, task, measured["success"], rates["success"])
