"""GRPO on GSM8K: several answers to each question, right ones reinforced against the group's mean.

Paper: DeepSeekMath, arXiv:2402.03300; without the division by the deviation as in Dr. GRPO,
arXiv:2503.20783. With r_i in {0, 1} the reward of completion i of a group of G:

    A_i  = r_i - mean(r_1 ... r_G)
    loss = -sum_i sum_t ratio_it * A_i,   ratio_it = exp(logprob now - logprob when sampled)

`--loss` takes that (importance_sampling) or a variant that limits the ratio: ppo, cispo, dro.

Dry run (free, offline):   python scripts/dryrun.py run examples/grpo-gsm8k.py -- --data sample
On the cloud (billed):     PYTRIO_API_KEY=... python examples/grpo-gsm8k.py
Expected in the dry run:   reward 0.55 to 0.98 (last five of 16 steps), held-out accuracy 0.84 to
                           1.00, about 30 s on one core; seed 1 from 0.39 to 0.96; every loss
                           above 0.9
An interrupted run continues when the same command is given again.
"""

import hashlib
import importlib
import json
import logging
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal, NoReturn

import pytrio as trio
import tyro
from math_verify import parse, verify
from tqdm import tqdm

NAME = "grpo-gsm8k"
SKILL = "pytrio-skill 0.1.0"
GSM8K_REVISION = "cc7b047b6e5bb11b4f1af84efc572db110a51b3c"
INSTRUCTION = "Put the final answer, a number without units, in \\boxed{}."
STOP = ["<|im_end|>"]
IGNORED_TARGET = -100
# Bounds are of the ratio, not distances from 1. All are stated: the cloud's defaults are unknown.
LOSS_CONFIGS: dict[str, dict[str, float]] = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},  # DAPO, arXiv:2503.14476
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},  # public PyTRIO scripts
    "dro": {"beta": 0.05},
}


@dataclass(frozen=True)
class Config:
    data: str = "gsm8k"
    """`gsm8k` (Hugging Face hub), `sample` (generated rows, no network, smaller defaults), or a
    .jsonl file of {"question": "...", "answer": "... #### 42"}."""
    base_model: str = "Qwen/Qwen3.5-4B"
    """Model to adapt; the one of nearly all public PyTRIO runs."""
    loss: Literal["importance_sampling", "ppo", "cispo", "dro"] = "importance_sampling"
    """Built-in loss; its settings stand in LOSS_CONFIGS."""
    steps: int = 110
    """Optimiser steps; a public run took about 110."""
    prompts_per_step: int = 4
    """Questions per step; 4 in public runs. More when `frac_degenerate` stays above 0.5."""
    group_size: int = 8
    """Completions per question; 8 in public runs."""
    learning_rate: float = 4e-5
    """Learning rate of AdamW; 4e-5 in public GRPO runs."""
    rank: int = 32
    """LoRA rank, 4 to 64; 32 is the SDK's default."""
    max_tokens: int = 1024
    """Longest completion; 512 to 1024 in public runs. Raise it when `rollout/truncated` > 0.1."""
    max_prompt_tokens: int = 512
    """Longer prompts are reported and left out."""
    divide_by_std: bool = False
    """Divide advantages by the group's deviation, as the first GRPO did."""
    seed: int = 0
    """Order of data, initial weights. Sampling gets none: one seed repeats the same completions."""
    eval_rows: int = 200
    """Held-out questions, answered greedily; the standard error is 3.5 points at worst."""
    eval_base: bool = True
    """Evaluate the untrained model, too."""
    save_every: int = 10
    """Steps between checkpoints: what a killed run does again at most."""
    run_dir: Path = Path("runs/grpo-gsm8k")
    """Folder of metrics.jsonl, run_state.json and SwanLab's files."""
    fresh: bool = False
    """Discard the run in --run-dir instead of resuming it."""
    swanlab: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when SWANLAB_API_KEY is set and offline otherwise."""
    check_reward: bool = False
    """Only score all gold answers and a table of tricky ones; needs no model."""


# What `--data sample` replaces; a flag on the command line still wins.
SAMPLE: dict[str, Any] = {"steps": 16, "prompts_per_step": 8, "learning_rate": 2e-4}
SAMPLE |= {"max_tokens": 72, "eval_rows": 64, "save_every": 4}
# What may differ when a run is resumed; any other change makes it another run.
FREE_TO_CHANGE = {"steps", "save_every", "run_dir", "fresh", "swanlab", "check_reward", "eval_base"}


def stop(line: str) -> NoReturn:
    """End with one line that says what is wrong and what to do."""
    raise SystemExit(f"{NAME}: {line}")


def check_config(config: Config) -> None:
    lowest = {"group_size": 2, "rank": 4, "seed": 0}
    for name, value in asdict(config).items():
        if type(value) is int and value < lowest.get(name, 1):
            flag = "--" + name.replace("_", "-")
            stop(f"{flag} must be at least {lowest.get(name, 1)}, got {value}")
    if not 0 < config.learning_rate < 1:
        stop(f"--learning-rate must be between 0 and 1, got {config.learning_rate}")
    if config.swanlab == "online" and not os.environ.get("SWANLAB_API_KEY"):
        stop("--swanlab online needs SWANLAB_API_KEY in the environment; offline does not")


Row = dict[str, str]


def sample_rows(count: int) -> list[Row]:
    """Small word problems in GSM8K's schema, no question twice."""
    rng = random.Random(0)
    rows: dict[str, Row] = {}
    while len(rows) < count:
        who, other = rng.sample(["Ana", "Ben", "Dora", "Finn", "Iris", "Jack", "Mia", "Noah"], 2)
        what = rng.choice(["apples", "books", "pens", "coins", "cards", "eggs", "balls", "cups"])
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        ask = f"How many {what}"
        kinds = [
            (f"{who} has {a} {what} and buys {b} more. {ask} does {who} have now?", a + b),
            (f"{who} has {a + b} {what} and loses {b}. {ask} are left?", a),
            (f"There are {a} boxes with {b} {what} each. {ask} are there in total?", a * b),
            (f"{who} puts {a * b} {what} into {a} bags equally. {ask} are in each?", b),
            (f"{who} has {a} {what}. {other} has twice as many. {ask} does {other} have?", a * 2),
        ]
        question, answer = rng.choice(kinds)
        rows[question] = {"question": question, "answer": f"It is {answer}.\n#### {answer}"}
    return list(rows.values())


def read_jsonl(path: Path) -> list[Row]:
    """Rows of a file, no question twice."""
    rows: dict[str, Row] = {}
    try:
        # Not splitlines(): JSON strings may hold other line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {path} ({error}); --data takes gsm8k, sample or a .jsonl file")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
                rows[row["question"]] = {key: row[key] + "" for key in ("question", "answer")}
            except (ValueError, KeyError, TypeError) as error:
                stop(f"{path} line {number} is no row of question and answer: {error!r}")
    return list(rows.values())


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows; no question is in both."""
    if config.data == "gsm8k":
        try:
            from datasets import load_dataset

            splits = load_dataset("openai/gsm8k", "main", revision=GSM8K_REVISION)
        except Exception as error:  # no package, no network, no such revision
            reason = (str(error) or repr(error)).splitlines()[0]
            stop(f"cannot load openai/gsm8k ({reason}); --data sample needs no network")
        train, held_out = [dict(r) for r in splits["train"]], [dict(r) for r in splits["test"]]
        random.Random(0).shuffle(held_out)
        held_out = held_out[: config.eval_rows]
        held_out_questions = {row["question"] for row in held_out}
        train = [row for row in train if row["question"] not in held_out_questions]
    else:
        is_sample = config.data == "sample"
        rows = sample_rows(256 + config.eval_rows) if is_sample else read_jsonl(Path(config.data))
        if len(rows) < 5:
            stop(f"{config.data} has {len(rows)} different questions; give at least 5")
        random.Random(0).shuffle(rows)
        border = min(config.eval_rows, max(1, len(rows) // 5))
        train, held_out = rows[border:], rows[:border]
    return train, held_out


@lru_cache(maxsize=2)
def order_of_epoch(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def batch_of_step(items: Sequence[Any], step: int, size: int, seed: int) -> tuple[int, list[Any]]:
    """Epoch and items of a step: a function of its number, so that resuming needs nothing else."""
    places = [divmod(position, len(items)) for position in range(step * size, (step + 1) * size)]
    return places[0][0], [items[order_of_epoch(len(items), seed, e)[i]] for e, i in places]


NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?")
# What math-verify is shown. Its time limit works by signals (POSIX, main thread only) and is off;
# sums and fractions of this length take milliseconds, powers and factorials can take hours.
ARITHMETIC = re.compile(
    r"([\d\s.,+\-*/(){}$%]|\\([dt]?frac|cdot|times|div|left|right|text\s*\{[^{}\d]*\}|[$%,;:! ]))+"
)
UNDECIDED = re.compile(r"\^|(?<!\\)!|\*\*|\\(sqrt|binom|sum|prod|log)")
LONGEST_ANSWER = 60
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit


def gold_of(row: Row) -> str:
    """The number after the last `####`, without thousands separators."""
    text = row["answer"].rpartition("####")[2].strip().replace(",", "")
    if "####" not in row["answer"] or not NUMBER.fullmatch(text):
        stop(f"the answer to {row['question'][:60]!r} has no number after `####`")
    return text


def last_boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{...} after the thinking, braces balanced."""
    text = text.rpartition("</think>")[2]
    boxes = [] if "<think>" in text else list(re.finditer(r"\\f?box(ed)?\s*\{", text))
    for box in reversed(boxes):
        depth = 1
        for end in range(box.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[box.end() : end].strip()
    return None


def reward_of(completion: str, gold: str) -> float | None:
    """1.0 right, 0.0 wrong, None when it cannot be told: that must not count as wrong."""
    answer = last_boxed(completion)
    if answer is None or len(answer) > LONGEST_ANSWER:
        return 0.0
    answer = re.sub(r"^[A-Za-z]\s*=\s*", "", answer).rstrip(".")
    if NUMBER.fullmatch(answer):
        return float(Fraction(answer.replace(",", "")) == Fraction(gold))
    if UNDECIDED.search(answer):
        return None
    if not ARITHMETIC.fullmatch(answer):
        return 0.0
    try:
        found = parse(f"\\boxed{{{answer}}}", parsing_timeout=None, raise_on_error=True)
        wanted = parse(gold, parsing_timeout=None, raise_on_error=True)
        return float(verify(wanted, found, timeout_seconds=None, raise_on_error=True))
    except Exception:
        return None


# How completions score when 18 is right; the cases are those that parsers get wrong.
TRICKY: dict[float | None, list[str]] = {
    1.0: [r"So \boxed{18}.", r"\boxed{18.00}", r"\boxed{\$18}", r"\boxed{18\text{ apples}}",
          r"\boxed{\frac{36}{2}}", r"\boxed {x = 18}", r"First \boxed{17}, no: \boxed{18}",
          r"<think>\boxed{17}</think>\boxed{18}"],
    0.0: ["It is 18.", r"\boxed{18", r"\boxed{}", r"\boxed{-18}", r"\boxed{180}", r"\boxed{1,8}",
          r"\boxed{17 or 18}", r"\boxed{17, 18}", r"\boxed{17 = 18}", r"\boxed{18 thousand}",
          r"\boxed{18}, no: \boxed{17}", r"\boxed{\frac{18}{2}}", r"<think>\boxed{18}",
          r"<think>\boxed{18}</think>No idea."],
    None: [r"\boxed{9^{9^{9^{9}}}}"],
}  # fmt: skip


def check_reward(rows: Sequence[Row]) -> None:
    """Before anything is paid: every gold answer scores 1, its neighbour 0, the table as stated."""
    cases = [(text, "18", expected) for expected, texts in TRICKY.items() for text in texts]
    for row in rows:
        gold, solution = gold_of(row), row["answer"].rpartition("####")[0]
        cases.append((f"{solution}\\boxed{{{gold}}}", gold, 1.0))
        cases.append((f"{solution}\\boxed{{{Fraction(gold) + 1}}}", gold, 0.0))
    for text, gold, expected in cases:
        if reward_of(text, gold) != expected:
            stop(f"{text[-80:]!r} for {gold} scores {reward_of(text, gold)}, not {expected}")


@dataclass(frozen=True)
class Item:
    prompt: list[int]
    gold: str


@dataclass(frozen=True)
class Completion:
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    reward: float | None  # None is neither trained on nor part of a mean


def encode_prompts(tokenizer: Any, rows: Sequence[Row], limit: int) -> list[Item]:
    """Rows through the model's own chat template, thinking off, without those over the limit."""
    items, longest = [], 0
    for row in rows:
        messages = [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}]
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        prompt = tokenizer.encode(text, add_special_tokens=False)
        longest = max(longest, len(prompt))
        if len(prompt) <= limit:
            items.append(Item(prompt, gold_of(row)))
    if len(items) < len(rows):
        dropped = f"{len(rows) - len(items)} of {len(rows)} prompts"
        line = f"{dropped} are longer than --max-prompt-tokens {limit}, the longest {longest}"
        if not items:
            stop(line)
        print(f"left out: {line}")
    return items


def sample(
    sampler: trio.SamplingClient,
    tokenizer: Any,
    items: Sequence[Item],
    count: int,
    params: trio.SamplingParams,
) -> list[list[Completion]]:
    """`count` judged completions of every item."""
    # All requests are under way before the first answer is waited for.
    futures = [sampler.sample(trio.ModelInput.from_ints(i.prompt), count, params) for i in items]
    groups: list[list[Completion]] = []
    for item, future in zip(items, futures, strict=True):
        groups.append([])
        for sequence in future.result().sequences:
            tokens, logprobs = sequence.tokens, sequence.logprobs
            assert len(tokens) == len(logprobs), f"{len(tokens)} tokens, {len(logprobs)} logprobs"
            reward = None
            # The model's vocabulary is padded: ids the tokenizer does not have cannot be trained.
            if tokens and max(tokens) < len(tokenizer):
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                reward = reward_of(text, item.gold)
            groups[-1].append(Completion(tokens, logprobs, sequence.stop_reason, reward))
    return groups


def group_advantages(rewards: Sequence[float | None], divide_by_std: bool) -> list[float]:
    """Reward minus the mean of the judged ones; all 0 for a group that teaches nothing."""
    judged = [reward for reward in rewards if reward is not None]
    if len(judged) < 2 or max(judged) - min(judged) < 1e-6:
        return [0.0] * len(rewards)
    mean, scale = fmean(judged), pstdev(judged) if divide_by_std else 1.0
    return [0.0 if reward is None else (reward - mean) / scale for reward in rewards]


def build_datum(item: Item, completion: Completion, advantage: float, loss: str) -> trio.Datum:
    """Position t of the input predicts token t + 1: all lists lose their first, the input its last.

    The prompt's advantages are 0, so it has no gradient; except in dro, whose distance to
    `logprobs` counts everywhere. There the prompt's targets are switched off.
    """
    tokens, before = item.prompt + completion.tokens, len(item.prompt)
    targets = [IGNORED_TARGET] * before + completion.tokens if loss == "dro" else tokens
    logprobs = [0.0] * before + completion.logprobs
    advantages = [0.0] * before + [advantage] * len(completion.tokens)
    lengths = [len(tokens), len(targets), len(logprobs), len(advantages)]
    assert len(set(lengths)) == 1, f"tokens, targets, logprobs, advantages: {lengths}"
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": targets[1:],
            "logprobs": logprobs[1:],
            "advantages": advantages[1:],
        },
    )


def build_batch(
    items: Sequence[Item], groups: Sequence[Sequence[Completion]], config: Config
) -> tuple[list[trio.Datum], dict[str, float]]:
    """Datums of the groups that differ within, and what the rollouts were like."""
    data, degenerate = [], 0
    for item, group in zip(items, groups, strict=True):
        advantages = group_advantages([c.reward for c in group], config.divide_by_std)
        if len(group) < config.group_size:  # came back short: its mean is not the group's
            advantages = [0.0] * len(group)
        degenerate += not any(advantages)
        for completion, advantage in zip(group, advantages, strict=True):
            if advantage:
                data.append(build_datum(item, completion, advantage, config.loss))
    completions = [completion for group in groups for completion in group]
    lengths = [len(completion.tokens) for completion in completions]
    rewards = [c.reward for c in completions if c.reward is not None]
    stops = Counter(completion.stop_reason for completion in completions)
    return data, {
        "reward": fmean(rewards) if rewards else math.nan,
        "frac_degenerate": degenerate / len(groups),
        "datums": len(data),
        "rollout/completion_tokens_mean": fmean(lengths),
        "rollout/completion_tokens_max": max(lengths),
        "rollout/truncated": stops["length"] / len(completions),
        "rollout/unjudged": len(completions) - len(rewards),
        **{f"rollout/stop_{reason}": n / len(completions) for reason, n in stops.items()},
    }


def evaluate(
    sampler: trio.SamplingClient, tokenizer: Any, items: Sequence[Item], max_tokens: int
) -> dict[str, float]:
    """Greedy accuracy on held-out questions; base and trained weights go through this."""
    greedy = trio.SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=STOP)
    completions = [group[0] for group in sample(sampler, tokenizer, items, 1, greedy)]
    judged = [c.reward for c in completions if c.reward is not None]
    return {
        "accuracy": fmean(judged) if judged else 0.0,
        "items": len(judged),
        "unjudged": len(completions) - len(judged),
        "truncated": fmean(c.stop_reason == "length" for c in completions),
    }


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing, whenever the process is killed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    os.replace(temporary, path)


def save_run_state(config: Config, state: dict[str, Any]) -> None:
    write_whole(config.run_dir / "run_state.json", json.dumps(state, indent=2) + "\n")


def open_run(config: Config, rows: list[Row]) -> dict[str, Any]:
    """The state to start from: a new run's, or that of the last checkpoint of the run in the
    folder. Raises SystemExit when that one had other settings."""
    path = config.run_dir / "run_state.json"
    settings = {k: v for k, v in asdict(config).items() if k not in FREE_TO_CHANGE}
    settings["rows"] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]
    config.run_dir.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"step": 0, "checkpoint": None, "weights": None, "eval": {}}
    if path.exists() and not config.fresh:
        state = json.loads(path.read_text(encoding="utf-8"))
        old = state["config"]
        changes = [f"{k} was {old.get(k)}, is {v}" for k, v in settings.items() if old.get(k) != v]
        if changes and not state["checkpoint"]:  # nothing trained is lost
            state = {"step": 0, "checkpoint": None, "weights": None, "eval": {}}
        elif changes:
            line = f"{config.run_dir} holds another run ({'; '.join(changes)})"
            stop(f"{line}; choose another --run-dir, or --fresh to discard that run")
    state["config"] = settings
    save_run_state(config, state)
    return state


def swanlab_call(function: str, /, **arguments: Any) -> None:
    """`swanlab.FUNCTION(...)`: a chart that fails is reported, and never stops a paid run."""
    try:
        getattr(importlib.import_module("swanlab"), function)(**arguments)
    except Exception as error:
        print(f"SwanLab {function} failed, metrics.jsonl goes on: {error}")


def open_log(config: Config, last_step: int) -> None:
    """Start SwanLab, and drop the metrics of steps after the checkpoint: they are done again."""
    mode: str = config.swanlab
    if mode == "auto":
        mode = "online" if os.environ.get("SWANLAB_API_KEY") else "offline"
    # swanlab itself stops at a plain value in this variable.
    project = os.environ.pop("SWANLAB_PROJECT", f"pytrio-{NAME}")
    details = asdict(config) | {"sdk": version("pytrio"), "skill": SKILL}
    details = json.loads(json.dumps(details, default=str))
    swanlab_call("init", project=project, name=config.run_dir.name, mode=mode, config=details,
                 log_dir=str(config.run_dir / "swanlab"))  # fmt: skip
    path = config.run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    # A line that was being written when the run was killed has no closing brace.
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    rows = [row for row in rows if row["step"] <= last_step]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        chart(row)


def chart(row: dict[str, Any]) -> None:
    values = {key: float(value) for key, value in row.items() if value is not None}
    swanlab_call("log", data=values, step=row["step"])


def log(config: Config, row: dict[str, Any]) -> None:
    """metrics.jsonl is the record, SwanLab a copy."""
    with (config.run_dir / "metrics.jsonl").open("a", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(row) + "\n")
    chart(row)


def train(
    service: trio.ServiceClient,
    tokenizer: Any,
    items: list[Item],
    config: Config,
    state: dict[str, Any],
) -> None:
    """From the state's step to the last; afterwards the state names durable sampler weights."""
    if state["checkpoint"]:
        print(f"resuming after step {state['step']} from {state['checkpoint']}")
        training = service.create_training_client_from_state_with_optimizer(state["checkpoint"])
    else:
        training = service.create_lora_training_client(
            config.base_model, rank=config.rank, seed=config.seed
        )
    adam = trio.AdamParams(learning_rate=config.learning_rate)
    # Only at temperature 1, without top-p and top-k, are the log-probabilities that come back those
    # of the distribution that was sampled from.
    params = trio.SamplingParams(
        max_tokens=config.max_tokens, temperature=1.0, top_p=1.0, top_k=-1, stop=STOP
    )
    first = state["step"]
    bar = tqdm(range(first + 1, config.steps + 1), initial=first, total=config.steps, disable=None)
    for step in bar:
        start = time.monotonic()
        epoch, batch = batch_of_step(items, step - 1, config.prompts_per_step, config.seed)
        # A sampling client keeps the weights it was made with: each step needs a new one.
        sampler = training.save_weights_and_get_sampling_client()
        groups = sample(sampler, tokenizer, batch, config.group_size, params)
        data, metrics = build_batch(batch, groups, config)
        if data:
            # One call for the whole batch, and both submitted before either is waited for.
            backward = training.forward_backward(
                data, loss_fn=config.loss, loss_fn_config=LOSS_CONFIGS[config.loss]
            )
            update = training.optim_step(adam)
            metrics["loss"] = backward.result().metrics["loss_mean"]
            update.result()
        metrics |= {"epoch": epoch, "learning_rate": config.learning_rate}
        metrics["time/step_seconds"] = time.monotonic() - start
        row = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        log(config, {"step": step, **row})
        bar.write(
            f"step {step:3d}/{config.steps}  reward {metrics['reward']:.3f}"
            f"  degenerate {metrics['frac_degenerate']:.2f}  datums {len(data)}"
            f"  tokens {metrics['rollout/completion_tokens_mean']:.0f}"
            f"  truncated {metrics['rollout/truncated']:.2f}"
        )
        if step % config.save_every == 0 or step == config.steps:
            # The state file is written last: it never names a step that is not saved.
            path = training.save_state(f"step-{step}", overwrite=True).result().path
            state |= {"step": step, "checkpoint": path, "weights": None}
            state |= {"epoch": epoch, "cursor": step * config.prompts_per_step}
            state["eval"].pop("trained", None)
            save_run_state(config, state)
    # The loop's sampler weights expire after hours; these do not.
    saved = training.save_weights_for_sampler(f"{NAME}-{config.loss}-step-{state['step']}")
    state["weights"] = saved.result().path
    save_run_state(config, state)


def main(config: Config) -> None:
    check_config(config)
    train_rows, held_out_rows = load_rows(config)
    rows = train_rows + held_out_rows
    check_reward(rows)
    if config.check_reward:
        print(f"the reward scores {len(rows)} gold answers and the tricky ones as it must")
        return
    state = open_run(config, rows)
    results = state["eval"]
    service = trio.ServiceClient()
    open_log(config, state["step"])
    try:
        base = service.create_sampling_client(config.base_model)
        tokenizer = base.get_tokenizer()
        items = encode_prompts(tokenizer, train_rows, config.max_prompt_tokens)
        held_out = encode_prompts(tokenizer, held_out_rows, config.max_prompt_tokens)
        if config.eval_base and "base" not in results:
            results["base"] = evaluate(base, tokenizer, held_out, config.max_tokens)
            save_run_state(config, state)
        if state["step"] < config.steps or not state["weights"]:
            train(service, tokenizer, items, config, state)
        if "trained" not in results:
            tuned = service.create_sampling_client(config.base_model, model_path=state["weights"])
            results["trained"] = evaluate(tuned, tokenizer, held_out, config.max_tokens)
            save_run_state(config, state)
    finally:
        swanlab_call("finish")
    for name, result in results.items():
        numbers = "  ".join(f"{key} {value:.3g}" for key, value in result.items())
        print(f"{name:<8} greedy, held out: {numbers}")
    print(f"weights  {state['weights']}")


if __name__ == "__main__":
    arguments = tyro.cli(Config)
    if arguments.data == "sample":
        arguments = tyro.cli(Config, default=replace(arguments, **SAMPLE))
    main(arguments)
