"""The main job, run as a newcomer runs it."""

import re
import subprocess
import sys
from pathlib import Path

from conftest import DRYRUN, SKILL


def test_quickstart_learns(tmp_path: Path) -> None:
    """The loss falls by 90 %, the tuned answer holds the trained sentence, the base one not."""
    done = subprocess.run(
        [sys.executable, str(DRYRUN), "run", str(SKILL / "examples" / "quickstart_sft.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.search(r"first ([\d.]+), last ([\d.]+)", done.stdout).groups())
    assert last <= 0.1 * first
    answers = dict(re.findall(r"^(base|tuned) +(.*)$", done.stdout, re.MULTILINE))
    assert "TRIO trains language models in the cloud" in answers["tuned"]
    assert "TRIO trains language models" not in answers["base"]
    assert answers["base"]
    assert "tokens: prefill" in done.stderr
