"""Every example as a newcomer runs it: help, mistakes, the dry run, and kill -9 in the middle.

Adding an example is adding an entry to EXAMPLES.
"""

import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from safetensors.torch import load as load_tensors

from conftest import DRYRUN, EVERY_SEED, SKILL, outcome
from forked import run_forked


@dataclass(frozen=True)
class Example:
    """What is expected of one example's dry run."""

    file: str
    variants: Sequence[tuple[str, ...]]
    """Arguments besides `--data sample`, one tuple per run that must learn."""
    metric: str
    """Key in metrics.jsonl, averaged over the last `last` steps."""
    least: float = -math.inf
    """What that average must reach."""
    at_first: float = math.inf
    """What the first step must stay below: otherwise nothing was learnt."""
    fall: float | None = None
    """Share of the first step's value by which that average must lie below it."""
    also_least: Mapping[str, float] = field(default_factory=dict)
    """Other keys in metrics.jsonl: what their averages must reach."""
    evaluated: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Key of the held-out evaluation: what the base model may reach at most, the trained one must
    at least."""
    evaluated_at_most: Mapping[str, float] = field(default_factory=dict)
    """Key of the held-out evaluation that training must not raise: what both may reach at most."""
    evaluated_falls: Mapping[str, float] = field(default_factory=dict)
    """Key of the held-out evaluation: share of the base's value that the trained one lies below."""
    last: int = 5
    seeds: Sequence[int] = (0, 1)
    seconds: float = 120
    attempts: int = 1
    """Runs, each with the next seed, of which one must do all this: a small policy at a high rate
    now and then collapses late, and recovers after the end."""
    options: tuple[str, ...] = ()
    """Of `dryrun.py run`."""
    short: tuple[str, ...] = ("--no-eval-base",)
    """Flags that leave out what a test of the loop does not need."""
    over_long: tuple[str, str] = ("--max-prompt-tokens", "prompts are longer")
    """Flag that limits lengths, and the complaint when nothing is below it."""
    same_weights: bool = False
    """Nothing is sampled for training: a killed run ends with the weights of an unbroken one."""
    weights_within: float = 0.0
    """How far those weights may be apart: a score depends a little on what it is batched with."""
    from_file: bool = True
    """Takes `--data FILE.jsonl`."""
    checks_reward: bool = False
    """Takes `--check-reward`."""
    gold_answers: bool = False
    """Takes `--check-reward` and rows with a `#### N` answer."""
    dapo_rows: bool = False
    """Takes `--check-reward` and rows in the schema of DAPO-Math."""


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
    Example(
        file="grpo-gsm8k-async.py",
        variants=[(), ("--loss", "ppo", "--staleness", "1")],
        metric="reward",
        least=0.9,
        at_first=0.7,
        seeds=(0,),
        gold_answers=True,
    ),
    Example(
        file="gspo.py",
        variants=[()],
        metric="reward",
        least=0.9,
        at_first=0.7,
        dapo_rows=True,
    ),
    Example(
        file="dapo.py",
        variants=[()],
        metric="reward",
        least=0.9,
        at_first=0.7,
        dapo_rows=True,
    ),
    Example(
        file="chat-huanhuan.py",
        variants=[()],
        metric="loss",
        fall=0.8,
        evaluated={"persona": (0.0, 0.9)},
        over_long=("--max-length", "rows are longer"),
        same_weights=True,
    ),
    Example(
        file="chat-huanhuan-async.py",
        variants=[()],
        metric="loss",
        fall=0.8,
        evaluated={"persona": (0.0, 0.9)},
        seeds=(0,),
        over_long=("--max-length", "rows are longer"),
        same_weights=True,
    ),
    Example(
        file="sft-distill-conversation.py",
        variants=[()],
        metric="loss",
        fall=0.8,
        evaluated={"agreement": (0.1, 0.4)},
        over_long=("--max-length", "turns are longer"),
        same_weights=True,
    ),
    Example(
        file="sft-distill-conversation-async.py",
        variants=[()],
        metric="loss",
        fall=0.8,
        evaluated={"agreement": (0.1, 0.4)},
        seeds=(0,),
        over_long=("--max-length", "turns are longer"),
        same_weights=True,
    ),
    Example(
        file="opd-deepmath.py",
        variants=[()],
        metric="opd/reverse_kl_mean",
        fall=0.5,
        evaluated={"accuracy": (0.65, 0.7)},
        evaluated_falls={"reverse_kl": 0.5},
    ),
    Example(
        file="opd-deepmath-async.py",
        variants=[()],
        metric="opd/reverse_kl_mean",
        fall=0.5,
        evaluated={"accuracy": (0.65, 0.7)},
        evaluated_falls={"reverse_kl": 0.5},
        seeds=(0,),
    ),
    Example(
        file="opsd.py",
        variants=[()],
        metric="opd/reverse_kl_mean",
        evaluated={"accuracy": (0.65, 0.85)},
        evaluated_falls={"reverse_kl": 0.5},
    ),
    Example(
        file="dpo-hh-rlhf.py",
        variants=[()],
        metric="dpo/accuracy",
        least=0.9,
        at_first=0.7,
        evaluated={"accuracy": (0.55, 0.9)},
        over_long=("--max-length", "pairs are longer"),
        same_weights=True,
        weights_within=1e-4,
    ),
    Example(
        file="custom-loss.py",
        variants=[
            ("--loss", "reinforce"),
            ("--loss", "cispo"),
            ("--loss", "sapo"),
            ("--loss", "grpo_kl", "--steps", "14"),  # the KL term holds it back
        ],
        metric="reward",
        least=0.9,
        at_first=0.75,
        short=("--no-eval-base", "--passes", "1"),
        gold_answers=True,
    ),
    Example(
        file="search-r1.py",
        variants=[()],
        metric="reward/correct",
        least=0.85,
        at_first=0.7,
        also_least={"rollout/valid_tool_call_rate": 0.95},
        evaluated={"em": (0.6, 0.85)},
        short=("--no-eval-base", "--prompts-per-step", "4", "--eval-rows", "8"),
        checks_reward=True,
        seconds=180,
    ),
    Example(
        file="retool.py",
        variants=[()],
        metric="reward/correct",
        least=0.85,
        at_first=0.7,
        also_least={"rollout/valid_tool_call_rate": 0.95},
        evaluated={"accuracy": (0.6, 0.85)},
        short=("--no-eval-base", "--prompts-per-step", "4", "--eval-rows", "8"),
        dapo_rows=True,
        seconds=180,
    ),
    Example(
        file="vision-grpo.py",
        variants=[()],
        metric="reward",
        least=0.75,
        at_first=0.7,
        evaluated={"accuracy": (0.6, 0.85)},
        evaluated_at_most={"accuracy_other_picture": 0.4},
        short=("--no-eval-base", "--prompts-per-step", "4", "--eval-rows", "8"),
        options=("--model", "*=vl"),
        checks_reward=True,
        same_weights=False,
    ),
    Example(
        file="alfworld.py",
        variants=[()],
        metric="reward/success_rate",
        least=0.85,
        at_first=0.7,
        last=3,
        evaluated={"seen/success_rate": (0.6, 0.85), "held_out/success_rate": (0.6, 0.85)},
        short=("--no-eval-base", "--games-per-step", "2", "--eval-games", "4"),
        from_file=False,
        seconds=300,
        attempts=2,
    ),
]
# Each variant runs with one of its seeds in turn, or with every one.
RUNS = [
    pytest.param(example, variant, seed, id="-".join([example.file, *variant[1:], str(seed)]))
    for place, example in enumerate(EXAMPLES)
    for number, variant in enumerate(example.variants)
    for seed in (
        example.seeds if EVERY_SEED else [example.seeds[(place + number) % len(example.seeds)]]
    )
]
ALL = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.file)
WITH_GOLD = pytest.mark.parametrize(
    "example", [e for e in EXAMPLES if e.gold_answers], ids=lambda example: example.file
)


def environment(**variables: str) -> dict[str, str]:
    """Ours without keys: a test must not reach SwanLab or the cloud."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SWANLAB_", "PYTRIO_"))}
    return {**kept, "COLUMNS": "100", "PYTHONDONTWRITEBYTECODE": "1", **variables}


def load(file: str) -> Any:
    """An example as a module, for its functions; its `main` does not run."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, SKILL / "examples" / file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run_alone(path: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The example without any backend: it must end before it needs one."""
    return outcome([sys.executable, str(path), *arguments], folder, environment(), 60)


def dryrun_command(path: Path, *arguments: str, record: str = "record") -> list[str]:
    (options,) = [e.options for e in EXAMPLES if e.file == path.name] or [()]
    command = [sys.executable, str(DRYRUN), "run", "--store", "store", "--record", record, *options]
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


@pytest.mark.parametrize(
    "example",
    [e for e in EXAMPLES if e.gold_answers or e.dapo_rows or e.checks_reward],
    ids=lambda example: example.file,
)
def test_the_reward_is_checked(example: Example, tmp_path: Path) -> None:
    path = SKILL / "examples" / example.file
    done = run_alone(path, "--data", "sample", "--check-reward", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "as it must" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "example", [e for e in EXAMPLES if e.from_file], ids=lambda example: example.file
)
@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("none.jsonl", "cannot read none.jsonl"),
        ("empty.jsonl", "empty.jsonl has 0"),
        ("half.jsonl", "half.jsonl line 2"),
    ],
)
def test_a_bad_file_is_one_line(
    example: Example, file: str, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "half.jsonl").write_text('\n{"question": "How"}\n', encoding="utf-8")
    path = SKILL / "examples" / example.file
    done = run_forked(path, "--data", file, folder=tmp_path, environment=environment())
    assert_one_line(done, complaint)


@ALL
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--data", "sample", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["--data", "sample", "--swanlab", "online"], "needs SWANLAB_API_KEY"),
    ],
)
def test_a_mistake_is_one_line(
    example: Example, arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    path = SKILL / "examples" / example.file
    done = run_forked(path, *arguments, folder=tmp_path, environment=environment())
    assert_one_line(done, complaint)


@WITH_GOLD
def test_a_row_without_an_answer_is_named(example: Example, tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(9)]
    rows.append({"question": "What is it?", "answer": "It depends."})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    path = SKILL / "examples" / example.file
    done = run_alone(path, "--data", "rows.jsonl", folder=tmp_path)
    assert_one_line(done, "'What is it\\?' has no number after `####`")


@pytest.mark.parametrize(
    "example", [e for e in EXAMPLES if e.dapo_rows], ids=lambda example: example.file
)
def test_a_maths_row_is_unwrapped_or_named(example: Example, tmp_path: Path) -> None:
    """Questions once each, without the data set's own answer format; a row without answer stops."""
    module = load(example.file)
    before, after = module.WRAPPER
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{before}So {n} +  1 = ?{after}"}],
            "reward_model": {"ground_truth": str(n + 1)},
        }
        for n in (1, 2, 3, 4, 5, 6, 1)
    ]
    rows[-2]["reward_model"] = {"ground_truth": "\\sqrt{2}"}
    other = {"prompt": rows[1]["prompt"], "reward_model": {"ground_truth": "4"}}
    cleaned = module.clean([module.row_of(row) for row in [*rows, other]])
    assert cleaned == [{"question": f"So {n} + 1 = ?", "answer": f"{n + 1}"} for n in (1, 3, 4, 5)]
    rows.append({"prompt": rows[0]["prompt"], "reward_model": {"ground_truth": " "}})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    path = SKILL / "examples" / example.file
    assert_one_line(run_alone(path, "--data", "rows.jsonl", folder=tmp_path), "line 8 .* is empty")


def test_gspo_is_its_formula() -> None:
    """Value and gradient of the loss: mean of log ratios, both branches of the minimum, N."""
    import torch

    module = load("gspo.py")
    config = module.Config(clip_low=0.1, clip_high=0.1)
    old = [[-1.0, -2.0], [-1.0, -2.0, -3.0], [-1.0], [-1.0]]
    moved, advantages = [0.02, 0.5, 0.5, -0.5], [1.0, 1.0, -1.0, 1.0]
    part = [module.Trained(None, o, a) for o, a in zip(old, advantages, strict=True)]
    prompt = [torch.tensor([-9.0, -9.0])] * 4
    now = [
        torch.cat([p, torch.tensor(o) + m]).requires_grad_()
        for p, o, m in zip(prompt, old, moved, strict=True)
    ]
    loss, metrics = module.gspo_loss(part, 8, config)([None] * 4, now)
    # Up where up is wanted is clipped; up where down is wanted and down where up is wanted are not.
    ratios = [math.exp(m) for m in moved]
    expected = -(ratios[0] + 1.1 - ratios[2] + ratios[3]) / 8
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert metrics["gspo/sequence_clip_fraction"] == 0.25
    loss.backward()
    weights = [-n.grad for n in now]
    for weight, ratio, advantage, o in zip(weights, ratios, advantages, old, strict=True):
        assert weight[:2].tolist() == [0, 0]
        size = ratio * advantage / len(o) / 8 if len(o) != 3 else 0.0
        assert weight[2:].tolist() == pytest.approx([size] * len(o), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "groups", "waves"),
    [
        ({}, 8, 2),  # nothing is effective: as many as allowed
        ({"token_budget": 200}, 6, 2),  # 25 tokens a group of 5 tokens each
        ({"token_budget": 60}, 4, 1),
        ({"time_budget": 1e-9}, 4, 1),
        ({"max_candidates": 1}, 4, 1),
    ],
)
def test_dapo_stops_at_its_budgets(
    changes: dict[str, Any], groups: int, waves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("dapo.py")
    wrong = module.Completion([1] * 5, [-1.0] * 5, "stop", 0.0)
    monkeypatch.setattr(module, "sample", lambda s, t, items, n, p: [[wrong] * n for _ in items])
    config = module.Config(group_size=6, **changes)
    found = module.collect(None, None, list(range(9)), 7, config, None)
    assert (len(found.groups), found.waves, found.effective) == (groups, waves, [])
    assert found.tokens == 30 * groups


def test_dapo_tells_effective_groups_by_correctness() -> None:
    """Not by the length penalty, not when one is missing, and an unjudged one is no wrong one."""
    module = load("dapo.py")
    config = module.Config(max_tokens=10, overlong_cache=4)
    good, long, wrong, unknown = (
        module.Completion([1] * n, [-1.0] * n, "stop", reward)
        for n, reward in [(2, 1.0), (10, 1.0), (8, 0.0), (2, None)]
    )
    assert not module.is_effective([good, long], 2)
    assert not module.is_effective([good, unknown], 2)
    assert not module.is_effective([good, wrong], 3)
    assert module.is_effective([good, wrong], 2)
    rewards = [module.shaped_reward(c, config) for c in (good, long, wrong, unknown)]
    assert rewards == [1.0, 0.0, -1.5, None]
    assert sum(module.group_advantages(rewards)) == pytest.approx(0)


@ALL
def test_an_unknown_flag_is_named(example: Example, tmp_path: Path) -> None:
    path = SKILL / "examples" / example.file
    done = run_forked(path, "--no-such-flag", folder=tmp_path, environment=environment())
    assert done.returncode == 2
    assert "no-such-flag" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("example", "variant", "seed"), RUNS)
def test_it_learns(example: Example, variant: tuple[str, ...], seed: int, tmp_path: Path) -> None:
    for attempt in range(1, example.attempts + 1):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        try:
            assert_learns(example, (*variant, "--seed", str(seed + attempt - 1)), folder)
        except AssertionError as error:
            if attempt == example.attempts:
                raise
            print(f"attempt {attempt}: {error}")
        else:
            return


def assert_learns(example: Example, arguments: tuple[str, ...], folder: Path) -> None:
    start = time.monotonic()
    path = SKILL / "examples" / example.file
    command = dryrun_command(path, *arguments)
    done = outcome(command, folder, environment(), 3 * example.seconds)
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    rows = metrics_of(folder)
    values = [row[example.metric] for row in rows]
    print(f"{example.file} {arguments}: {values} in {seconds:.0f} s")
    assert "Traceback" not in done.stderr and "failed" not in done.stdout
    assert values[0] < example.at_first
    at_last = fmean(values[-example.last :])
    assert at_last >= example.least
    for key, least in example.also_least.items():
        assert fmean(row[key] for row in rows[-example.last :]) >= least, key
    assert example.fall is None or at_last <= (1 - example.fall) * values[0]
    (state,) = folder.glob("runs/*/run_state.json")
    evaluation = json.loads(state.read_text(encoding="utf-8"))["eval"]
    for key, (most, least) in example.evaluated.items():
        assert evaluation["base"][key] <= most and evaluation["trained"][key] >= least
    for key, most in example.evaluated_at_most.items():
        assert max(evaluation["base"][key], evaluation["trained"][key]) <= most
    for key, share in example.evaluated_falls.items():
        assert evaluation["trained"][key] <= (1 - share) * evaluation["base"][key]
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
@pytest.mark.skipif(os.name != "posix", reason="this system has no SIGKILL")
@pytest.mark.parametrize("seed", [0])
@ALL
def test_it_survives_kill_9(example: Example, seed: int, tmp_path: Path) -> None:
    """Killed at a random moment and started again, it ends with every step once, from one chain of
    checkpoints; the first example, and with `SEEDS=all` each one, is killed twice."""
    rng = random.Random(f"{example.file} {seed}")
    is_twice = EVERY_SEED or example is EXAMPLES[0]
    kills = (rng.randint(1, 3), rng.randint(4, 5)) if is_twice else (rng.randint(3, 5),)
    run = tmp_path / "runs" / "r"
    arguments = (*example.short, "--steps", "6", "--save-every", "2", "--run-dir", "runs/r")
    path = SKILL / "examples" / example.file
    resumed_from = 0
    for rows_at_kill in kills:
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
    command = dryrun_command(path, *arguments)
    done = outcome(command, tmp_path, environment(), 3 * example.seconds)
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {resumed_from} " in done.stdout or resumed_from == 6
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 7))
    state = json.loads((run / "run_state.json").read_text(encoding="utf-8"))
    assert state["step"] == 6 and state["weights"]
    # The process that finished took the steps after that checkpoint, each once.
    summary = json.loads((tmp_path / "record" / "summary.json").read_text(encoding="utf-8"))
    taken = sum(row["step"] > resumed_from and row["datums"] > 0 for row in rows)
    assert summary["optimizer_steps"] == taken
    if example.same_weights:
        whole = tmp_path / "whole"
        whole.mkdir()
        done = outcome(command, whole, environment(), 3 * example.seconds)
        assert done.returncode == 0, done.stderr
        keys = ("step", "loss", "eval/loss")
        unbroken = [{key: row.get(key) for key in keys} for row in metrics_of(whole)]
        assert [{key: row.get(key) for key in keys} for row in rows] == unbroken
        resumed, whole_run = final_adapter(tmp_path), final_adapter(whole)
        if example.weights_within:
            pairs = [load_tensors(adapter) for adapter in (resumed, whole_run)]
            off = max(float((pairs[0][k] - v).abs().max()) for k, v in pairs[1].items())
            print(f"weights differ by {off:.1e} at most")
            assert off <= example.weights_within
        else:
            assert resumed == whole_run


def final_adapter(folder: Path) -> bytes:
    """The weights that the state of the run in this folder names."""
    state = json.loads((folder / "runs" / "r" / "run_state.json").read_text(encoding="utf-8"))
    for path in (folder / "store").glob("*/checkpoint.json"):
        if json.loads(path.read_text(encoding="utf-8"))["uri"] == state["weights"]:
            return (path.parent / "adapter_model.safetensors").read_bytes()
    raise AssertionError(f"{state['weights']} is not in the store")


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES[:1], ids=lambda example: example.file)
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
            ["--seed", "5", example.over_long[0], "9", "--run-dir", "other"],
            1,
            example.over_long[1],
        ),
    ]:
        command = dryrun_command(path, *arguments, *extra)
        done = outcome(command, tmp_path, environment(SWANLAB_PROJECT="plain"), 120)
        assert done.returncode == code, done.stderr
        assert complaint in done.stderr
        assert "Traceback" not in done.stderr and "failed" not in done.stdout
    assert json.loads((folder / "run_state.json").read_text("utf-8"))["config"]["seed"] == 5


@pytest.mark.slow
def test_an_async_step_is_its_longest_chain(tmp_path: Path) -> None:
    """With latency, an on-policy step takes the update before it and its slowest group, and little
    more; one step off-policy it takes less than that."""
    path = SKILL / "examples" / "grpo-gsm8k-async.py"
    shares = {}
    for staleness in ("0", "1"):
        folder = tmp_path / staleness
        folder.mkdir()
        arguments = ("--no-eval-base", "--steps", "5", "--staleness", staleness)
        command = dryrun_command(path, *arguments)
        command[3:3] = ["--fault", "latency=200ms"]
        done = outcome(command, folder, environment(), 300)
        assert done.returncode == 0, done.stderr
        rows = metrics_of(folder)
        assert [row["rollout/lag"] for row in rows[1:]] == [int(staleness)] * 4
        steps, chains = (
            sum(row[f"time/{name}_seconds"] for row in rows[1:]) for name in ("step", "chain")
        )
        shares[staleness] = steps / chains
    print(shares)
    assert shares["0"] <= 1.25
    assert shares["1"] < 0.9


@pytest.mark.slow
def test_custom_losses_agree_with_their_built_in_twins(tmp_path: Path) -> None:
    """Formulas, and the weights after a step, from ratios that are spread beyond the bounds."""
    command = dryrun_command(SKILL / "examples" / "custom-loss.py", "--check")
    command[3:3] = ["--accept", "A10=a check keeps nothing"]
    done = outcome(command, tmp_path, environment(), 240)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"probability (\S+), of its twin's off by (\S+), size (\S+),", done.stdout)
    assert len(found) == 3
    for moved, off, size in found:
        assert float(moved) > 0.1 and float(off) < 1e-4
        assert float(size) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_a_wrong_reference_is_never_trained_on(tmp_path: Path) -> None:
    """DPO whose reference is not the model it starts from ends before the first step."""
    path = SKILL / "examples" / "dpo-hh-rlhf.py"
    arguments = ("--no-eval-base", "--steps", "1", "--run-dir")
    done = outcome(dryrun_command(path, *arguments, "runs/r"), tmp_path, environment(), 120)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs" / "r" / "reference.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row | {"logprob": row["logprob"] + i % 2} for i, row in enumerate(rows)]
    (tmp_path / "other").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "other" / "reference.jsonl").write_text(text, encoding="utf-8")
    command = dryrun_command(path, *arguments, "other", record="second")
    done = outcome(command, tmp_path, environment(), 120)
    assert done.returncode == 1
    assert "the first loss is 0.6444, not ln 2" in done.stderr and "Traceback" not in done.stderr
    summary = json.loads((tmp_path / "second" / "summary.json").read_text(encoding="utf-8"))
    assert summary["optimizer_steps"] == 0
