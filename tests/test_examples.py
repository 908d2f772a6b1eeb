"""Every example as a newcomer runs it: help, mistakes, the dry run, and kill -9 in the middle.

Adding an example is adding an entry to EXAMPLES.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from conftest import DRYRUN, SKILL


@dataclass(frozen=True)
class Example:
    """What is expected of one example's dry run."""

    file: str
    variants: Sequence[tuple[str, ...]]
    """Arguments besides `--data sample`, one tuple per run that must learn."""
    metric: str
    """Key in metrics.jsonl, averaged over the last `last` steps."""
    least: float
    """What that average must reach."""
    at_first: float
    """What the first step must stay below: otherwise nothing was learnt."""
    last: int = 5
    seeds: Sequence[int] = (0, 1)
    seconds: float = 120
    short: tuple[str, ...] = ("--no-eval-base",)
    """Flags that leave out what a test of the loop does not need."""
    gold_answers: bool = False
    """Takes `--check-reward` and rows with a `#### N` answer."""


EXAMPLES = [
    Example(
        file="grpo-gsm8k.py",
        variants=[
            ("--loss", "importance_sampling"),
            ("--loss", "ppo"),
            ("--loss", "cispo"),
            ("--loss", "dro"),
        ],
        metric="reward",
        least=0.9,
        at_first=0.7,
        gold_answers=True,
    ),
]
RUNS = [
    pytest.param(example, variant, seed, id="-".join([example.file, *variant[1:], str(seed)]))
    for example in EXAMPLES
    for variant in example.variants
    for seed in example.seeds
]
ALL = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.file)
WITH_GOLD = pytest.mark.parametrize(
    "example", [e for e in EXAMPLES if e.gold_answers], ids=lambda example: example.file
)


def environment(**variables: str) -> dict[str, str]:
    """Ours without keys: a test must not reach SwanLab or the cloud."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SWANLAB_", "PYTRIO_"))}
    return {**kept, "COLUMNS": "100", "PYTHONDONTWRITEBYTECODE": "1", **variables}


def run_alone(path: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The example without any backend: it must end before it needs one."""
    return subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def dryrun_command(path: Path, *arguments: str, record: str = "record") -> list[str]:
    command = [sys.executable, str(DRYRUN), "run", "--store", "store", "--record", record]
    return [*command, str(path), "--", "--data", "sample", *arguments]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("runs/*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assert_one_line(done: subprocess.CompletedProcess[str], complaint: str) -> None:
    assert done.returncode != 0
    assert re.search(complaint, done.stderr), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@ALL
def test_a_copy_shows_its_help(example: Example, tmp_path: Path) -> None:
    """From another folder, from a copy outside the skill, and nothing is written."""
    copy = tmp_path / "copies" / example.file
    copy.parent.mkdir()
    shutil.copyfile(SKILL / "examples" / example.file, copy)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    done = run_alone(copy, "--help", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "--run-dir" in done.stdout and "--data" in done.stdout
    assert not list(folder.iterdir())


@ALL
def test_it_names_the_skill_version(example: Example) -> None:
    """The version that runs are labelled with is the skill's own."""
    text = (SKILL / "examples" / example.file).read_text(encoding="utf-8")
    skill = re.search(r'version: "([^"]+)"', (SKILL / "SKILL.md").read_text(encoding="utf-8"))
    assert skill is not None
    assert f'"pytrio-skill {skill[1]}"' in text


@WITH_GOLD
def test_the_reward_is_checked(example: Example, tmp_path: Path) -> None:
    path = SKILL / "examples" / example.file
    done = run_alone(path, "--data", "sample", "--check-reward", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "as it must" in done.stdout
    assert not list(tmp_path.iterdir())


@ALL
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--data", "none.jsonl"], "cannot read none.jsonl"),
        (["--data", "empty.jsonl"], "empty.jsonl has 0"),
        (["--data", "half.jsonl"], "half.jsonl line 2"),
        (["--data", "sample", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["--data", "sample", "--swanlab", "online"], "needs SWANLAB_API_KEY"),
    ],
)
def test_a_mistake_is_one_line(
    example: Example, arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "half.jsonl").write_text('\n{"question": "How"}\n', encoding="utf-8")
    assert_one_line(
        run_alone(SKILL / "examples" / example.file, *arguments, folder=tmp_path), complaint
    )


@WITH_GOLD
def test_a_row_without_an_answer_is_named(example: Example, tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(9)]
    rows.append({"question": "What is it?", "answer": "It depends."})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    path = SKILL / "examples" / example.file
    done = run_alone(path, "--data", "rows.jsonl", folder=tmp_path)
    assert_one_line(done, "'What is it\\?' has no number after `####`")


@ALL
def test_an_unknown_flag_is_named(example: Example, tmp_path: Path) -> None:
    done = run_alone(SKILL / "examples" / example.file, "--no-such-flag", folder=tmp_path)
    assert done.returncode == 2
    assert "no-such-flag" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("example", "variant", "seed"), RUNS)
def test_it_learns(example: Example, variant: tuple[str, ...], seed: int, tmp_path: Path) -> None:
    start = time.monotonic()
    path = SKILL / "examples" / example.file
    done = subprocess.run(
        dryrun_command(path, *variant, "--seed", str(seed)),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=3 * example.seconds,
        check=False,
    )
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    values = [row[example.metric] for row in metrics_of(tmp_path)]
    print(f"{example.file} {variant} seed {seed}: {values} in {seconds:.0f} s")
    assert "Traceback" not in done.stderr and "failed" not in done.stdout
    assert values[0] < example.at_first
    assert fmean(values[-example.last :]) >= example.least
    assert seconds < example.seconds


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    """A dry run in a process group of its own, so that it can be killed with its script."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_rows(process: subprocess.Popen[str], path: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"no row {count} in {path} after 120 s"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.parametrize("seed", [0, 1])
@ALL
def test_it_survives_kill_9(example: Example, seed: int, tmp_path: Path) -> None:
    """Killed at random moments and started again, it ends with every step once, from one chain of
    checkpoints."""
    rng = random.Random(seed)
    run = tmp_path / "runs" / "r"
    arguments = (*example.short, "--steps", "8", "--save-every", "2", "--run-dir", "runs/r")
    path = SKILL / "examples" / example.file
    resumed_from = 0
    for rows_at_kill in (rng.randint(1, 4), rng.randint(5, 7)):
        record = f"record-until-{rows_at_kill}"
        process = start(dryrun_command(path, *arguments, record=record), tmp_path)
        wait_for_rows(process, run / "metrics.jsonl", rows_at_kill)
        time.sleep(rng.uniform(0, 1))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        state = json.loads((run / "run_state.json").read_text(encoding="utf-8"))
        print(f"killed after row {rows_at_kill}, last checkpoint {state['step']}")
        assert state["step"] >= max(resumed_from, 2 * ((rows_at_kill - 1) // 2))
        resumed_from = state["step"]
    process = start(dryrun_command(path, *arguments), tmp_path)
    output, errors = process.communicate(timeout=3 * example.seconds)
    assert process.returncode == 0, errors
    assert f"resuming after step {resumed_from} " in output or resumed_from == 8
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 9))
    state = json.loads((run / "run_state.json").read_text(encoding="utf-8"))
    assert state["step"] == 8 and state["weights"]
    # The process that finished took the steps after that checkpoint, each once.
    summary = json.loads((tmp_path / "record" / "summary.json").read_text(encoding="utf-8"))
    taken = sum(row["step"] > resumed_from and row["datums"] > 0 for row in rows)
    assert summary["optimizer_steps"] == taken


@pytest.mark.slow
@ALL
def test_other_settings_are_another_run(example: Example, tmp_path: Path) -> None:
    """A run folder is never overwritten silently."""
    folder = tmp_path / "runs" / "r"
    path = SKILL / "examples" / example.file
    arguments = [*example.short, "--steps", "1", "--run-dir", "runs/r"]
    for extra, code, complaint in [
        ([], 0, ""),
        (["--seed", "5"], 1, "seed was 0, is 5"),
        (["--seed", "5", "--fresh"], 0, ""),
        (
            ["--seed", "5", "--max-prompt-tokens", "9", "--run-dir", "other"],
            1,
            "prompts are longer",
        ),
    ]:
        done = subprocess.run(
            dryrun_command(path, *arguments, *extra),
            cwd=tmp_path,
            env=environment(SWANLAB_PROJECT="plain"),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert complaint in done.stderr
        assert "Traceback" not in done.stderr and "failed" not in done.stdout
    assert json.loads((folder / "run_state.json").read_text("utf-8"))["config"]["seed"] == 5
