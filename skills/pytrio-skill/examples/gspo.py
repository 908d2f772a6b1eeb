"""GSPO on maths: the ratio, its clip and the weight belong to whole sequences, not to tokens.

Paper: Group Sequence Policy Optimization, arXiv:2507.18071. With y_i one of the G completions of a
question, r_i its reward, and the mean and deviation those of its group:

    A_i  = (r_i - mean) / deviation
    s_i  = exp(mean over t of (logprob now - logprob when sampled))     the geometric mean
    loss = -1/N * sum_i min(s_i * A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) * A_i)

N counts every sampled completion, also those of groups with equal rewards, which are not sent.
No built-in loss does this: forward_backward_custom, which bills a second pass over the data.

Dry run (free, offline):   python scripts/dryrun.py run examples/gspo.py -- --data sample
On the cloud (billed):     PYTRIO_API_KEY=... python examples/gspo.py
Expected in the dry run:   reward 0.63 to 0.93 (last five of 10 steps), held-out accuracy 0.91 to
                           1.00, about 30 s on one core; seed 1 from 0.66 to 0.93
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NoReturn

import pytrio as trio
import torch
import tyro
from math_verify import parse, verify
from tqdm import tqdm

NAME = "gspo"
SKILL = "pytrio-skill 0.1.0"
DATA_SET = "BytedTsinghua-SIA/DAPO-Math-17k"
REVISION = "65877096c24ffa7abc4e4fa5edb95cf3413a5674"
# What stands around each question in that data set. Its answer format is not the one we ask for.
WRAPPER = (
    "Solve the following math problem step by step. The last line of your response should be of the"
    " form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:".',
)
INSTRUCTION = "Reason step by step. Put the final answer, a number without units, in \\boxed{}."
STOP = ["<|im_end|>"]


@dataclass(frozen=True)
class Config:
    data: str = "dapo-math"
    """`dapo-math` (Hugging Face hub), `sample` (generated rows, no network, smaller defaults), or a
    .jsonl file of {"prompt": [{"content": "..."}], "reward_model": {"ground_truth": "42"}}."""
    base_model: str = "Qwen/Qwen3.5-4B"
    """Model to adapt; the one of nearly all public PyTRIO runs."""
    clip_low: float = 3e-4
    """Sequences with a negative advantage get no gradient below a ratio of 1 minus this."""
    clip_high: float = 4e-4
    """Sequences with a positive advantage get none above 1 plus this. Both are the paper's."""
    updates_per_step: int = 1
    """Optimiser steps on one step's completions, each on a part of the groups; 4 in the paper, 1 in
    public runs, where the clip reacts only to sampler and trainer not agreeing."""
    steps: int = 100
    """Rollout steps; 100 in a public run (2 h 22 min)."""
    prompts_per_step: int = 8
    """Questions per step; 8 in a public run."""
    group_size: int = 8
    """Completions per question; 8 in a public run."""
    learning_rate: float = 4e-5
    """Learning rate of AdamW; 4e-5 in a public run."""
    rank: int = 32
    """LoRA rank, 4 to 64; 32 is the SDK's default."""
    max_tokens: int = 4096
    """Longest completion; 4096 in a public run, which made answers shorter and not better: look at
    `rollout/truncated` first, above 0.1 raise it."""
    max_prompt_tokens: int = 2048
    """Longer prompts are reported and left out."""
    seed: int = 0
    """Order of data, initial weights. Sampling gets none: one seed repeats the same completions."""
    eval_rows: int = 100
    """Held-out questions, answered greedily; the standard error is 5 points at worst."""
    eval_base: bool = True
    """Evaluate the untrained model, too."""
    save_every: int = 20
    """Steps between checkpoints: what a killed run does again at most."""
    run_dir: Path = Path("runs/gspo")
    """Folder of metrics.jsonl, run_state.json and SwanLab's files."""
    fresh: bool = False
    """Discard the run in --run-dir instead of resuming it."""
    swanlab: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when SWANLAB_API_KEY is set and offline otherwise."""
    check_reward: bool = False
    """Only score all gold answers and a table of tricky ones; needs no model."""


# What `--data sample` replaces; a flag on the command line still wins.
SAMPLE: dict[str, Any] = {"steps": 10, "prompts_per_step": 8, "learning_rate": 4e-4}
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
    for name in ("learning_rate", "clip_low", "clip_high"):
        if not 0 < getattr(config, name) < 1:
            flag = "--" + name.replace("_", "-")
            stop(f"{flag} must be between 0 and 1, got {getattr(config, name)}")
    if config.swanlab == "online" and not os.environ.get("SWANLAB_API_KEY"):
        stop("--swanlab online needs SWANLAB_API_KEY in the environment; offline does not")


Row = dict[str, str]


def sample_rows(count: int) -> list[dict[str, Any]]:
    """Small word problems in the data set's schema, no question twice."""
    rng = random.Random(0)
    rows: dict[str, dict[str, Any]] = {}
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
        rows[question] = {
            "prompt": [{"role": "user", "content": WRAPPER[0] + question + WRAPPER[1]}],
            "reward_model": {"ground_truth": str(answer), "style": "rule"},
        }
    return list(rows.values())


def row_of(raw: dict[str, Any]) -> Row:
    """Question without its wrapper and spaces, and the answer. `lstrip` would eat its letters."""
    question = raw["prompt"][0]["content"].removeprefix(WRAPPER[0]).removesuffix(WRAPPER[1])
    answer = (raw["reward_model"]["ground_truth"] + "").strip().replace(",", "")
    if not question.strip() or not answer:
        raise ValueError("question or answer is empty")
    return {"question": " ".join(question.split()), "answer": answer}


def clean(rows: Sequence[Row]) -> list[Row]:
    """Each question once, and only with one answer that is a number."""
    answers: dict[str, set[str]] = {}
    for row in rows:
        answers.setdefault(row["question"], set()).add(row["answer"])
    kept = [
        {"question": question, "answer": next(iter(found))}
        for question, found in answers.items()
        if len(found) == 1 and NUMBER.fullmatch(next(iter(found)))
    ]
    if len(kept) < len(answers):
        left_out = f"{len(answers) - len(kept)} of {len(answers)} questions"
        print(f"left out: {left_out} have several answers or one that is no number")
    return kept


def read_jsonl(path: Path) -> list[Row]:
    rows = []
    try:
        # Not splitlines(): JSON strings may hold other line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {path} ({error}); --data takes dapo-math, sample or a .jsonl file")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(row_of(json.loads(line)))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                stop(f"{path} line {number} is no row of prompt and reward_model: {error!r}")
    return rows


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows; no question is in both."""
    if config.data == "dapo-math":
        try:
            from datasets import load_dataset

            rows = [row_of(raw) for raw in load_dataset(DATA_SET, revision=REVISION, split="train")]
        except Exception as error:  # no package, no network, no such revision
            reason = (str(error) or repr(error)).splitlines()[0]
            stop(f"cannot load {DATA_SET} ({reason}); --data sample needs no network")
    elif config.data == "sample":
        rows = [row_of(raw) for raw in sample_rows(256 + config.eval_rows)]
    else:
        rows = read_jsonl(Path(config.data))
    rows = clean(rows)
    if len(rows) < 5:
        stop(f"{config.data} has {len(rows)} different questions; give at least 5")
    random.Random(0).shuffle(rows)
    border = min(config.eval_rows, max(1, len(rows) // 5))
    return rows[border:], rows[:border]


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
        gold = row["answer"]
        cases.append((f"So \\boxed{{{gold}}}.", gold, 1.0))
        cases.append((f"So \\boxed{{{Fraction(gold) + 1}}}.", gold, 0.0))
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
            items.append(Item(prompt, row["answer"]))
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


@dataclass(frozen=True)
class Trained:
    """A completion that is trained on, and what the loss needs besides its datum."""

    datum: trio.Datum
    logprobs: list[float]  # when sampled, one per completion token
    advantage: float


def group_advantages(rewards: Sequence[float | None]) -> list[float]:
    """Reward minus mean, over the deviation; all 0 for a group that teaches nothing."""
    judged = [reward for reward in rewards if reward is not None]
    if len(judged) < 2 or max(judged) - min(judged) < 1e-6:
        return [0.0] * len(rewards)
    mean, deviation = fmean(judged), stdev(judged)
    return [0.0 if reward is None else (reward - mean) / deviation for reward in rewards]


def build_datum(item: Item, completion: Completion) -> trio.Datum:
    """Position t of the input predicts token t + 1. Nothing else: the rest is in the closure."""
    tokens = item.prompt + completion.tokens
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:]},
    )


def gspo_loss(
    part: Sequence[Trained], sequences: float, config: Config
) -> Callable[..., tuple[torch.Tensor, dict[str, float]]]:
    """The loss over `part`; `sequences` is the N it is divided by.

    The SDK runs it in its own event loop: no SDK call, no file, nothing slow may be in it.
    """

    def loss(
        data: list[trio.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        objectives, ratios, clipped = [], [], 0
        for now, trained in zip(logprobs, part, strict=True):
            old = torch.tensor(trained.logprobs)
            answer = now[-len(old) :]  # the completion is the end of the targets
            assert len(answer) == len(old), f"{len(now)} log-probabilities for {len(old)} tokens"
            ratio = (answer - old).mean().exp()  # a sum here would weigh by length
            bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            # Without the minimum, a sequence that moved the wrong way would get no gradient back.
            objective = torch.minimum(ratio * trained.advantage, bounded * trained.advantage)
            objectives.append(objective)
            ratios.append(ratio.item())
            clipped += bool(objective < ratio * trained.advantage)
        total = -torch.stack(objectives).sum() / sequences
        return total, {
            "gspo/loss": total.item(),
            "gspo/seq_ratio_mean": fmean(ratios),
            "gspo/seq_ratio_min": min(ratios),
            "gspo/seq_ratio_max": max(ratios),
            "gspo/sequence_clip_fraction": clipped / len(ratios),
        }

    return loss


def build_batch(
    items: Sequence[Item], groups: Sequence[Sequence[Completion]], config: Config
) -> tuple[list[list[Trained]], dict[str, float]]:
    """What is trained of each group that differs within, and what the rollouts were like."""
    trained_groups: list[list[Trained]] = []
    for item, group in zip(items, groups, strict=True):
        advantages = group_advantages([c.reward for c in group])
        # One that came back short is left out: its mean is not the group's.
        if any(advantages) and len(group) == config.group_size:
            trained_groups.append(
                [
                    Trained(build_datum(item, completion), completion.logprobs, advantage)
                    for completion, advantage in zip(group, advantages, strict=True)
                    if completion.reward is not None
                ]
            )
    completions = [completion for group in groups for completion in group]
    lengths = [len(completion.tokens) for completion in completions]
    rewards = [c.reward for c in completions if c.reward is not None]
    stops = Counter(completion.stop_reason for completion in completions)
    trained = [t for group in trained_groups for t in group]
    train_tokens = sum(len(t.logprobs) for t in trained)
    return trained_groups, {
        "reward": fmean(rewards) if rewards else math.nan,
        "frac_degenerate": 1 - len(trained_groups) / len(groups),
        "datums": len(trained),
        "gspo/train_sequences": len(trained),
        "gspo/normalization_sequences": len(completions),
        "gspo/active_sequence_fraction": len(trained) / len(completions),
        "gspo/train_tokens": train_tokens,
        "gspo/active_token_fraction": train_tokens / max(1, sum(lengths)),
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
        trained_groups, metrics = build_batch(batch, groups, config)
        pending = []
        count = min(config.updates_per_step, len(trained_groups))
        for number in range(count):
            part = [t for group in trained_groups[number::count] for t in group]
            sequences = metrics["gspo/normalization_sequences"] / count
            # One call for the whole part, and its update submitted before anything is waited for.
            backward = training.forward_backward_custom(
                [t.datum for t in part], gspo_loss(part, sequences, config)
            )
            pending.append((backward, training.optim_step(adam)))
        outputs = []
        for backward, update in pending:
            outputs.append(backward.result().metrics)
            update.result()
        for key in outputs[0] if outputs else ():
            if key.startswith("gspo/"):
                metrics[key] = fmean(output[key] for output in outputs)
        if outputs:
            metrics["loss"] = metrics["gspo/loss"]
        metrics |= {"epoch": epoch, "learning_rate": config.learning_rate}
        metrics["time/step_seconds"] = time.monotonic() - start
        row = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        log(config, {"step": step, **row})
        bar.write(
            f"step {step:3d}/{config.steps}  reward {metrics['reward']:.3f}"
            f"  degenerate {metrics['frac_degenerate']:.2f}  datums {metrics['datums']}"
            f"  clipped {metrics.get('gspo/sequence_clip_fraction', math.nan):.2f}"
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
    saved = training.save_weights_for_sampler(f"{NAME}-step-{state['step']}")
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
