"""DAPO on maths: sample until enough groups differ, clip higher, count tokens, mind length.

Paper: DAPO, arXiv:2503.14476. Four changes to GRPO, with ratio_it to the sampling's logprobs:

    dynamic sampling   groups that are all right or all wrong are replaced, within a budget
    clip-higher        loss = -sum_it min(ratio_it * A_i, clip(ratio_it, 0.8, 1.28) * A_i)
    token mean         one sum over all tokens of the batch, not a mean of each answer's mean
    overlong penalty   r_i = +1 or -1, minus up to 1 over the last `overlong_cache` tokens

A_i = (r_i - mean) / deviation over the group. Clip and token mean are what the built-in `ppo`
computes over one call: it divides the summed loss by one number.

Dry run (free, offline):   python scripts/dryrun.py run examples/dapo.py -- --data sample
On the cloud (billed):     PYTRIO_API_KEY=... python examples/dapo.py
Expected in the dry run:   reward 0.64 to 0.97 (last five of 10 steps), held-out accuracy 0.91 to
                           1.00, about 30 s on one core; seed 1 from 0.60 to 0.94
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
from statistics import fmean, stdev
from typing import Any, Literal, NoReturn

import pytrio as trio
import tyro
from math_verify import parse, verify
from tqdm import tqdm

NAME = "dapo"
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
    clip_low_threshold: float = 0.8
    """Lowest ratio that still has a gradient for a negative advantage. A bound, not a distance."""
    clip_high_threshold: float = 1.28
    """Highest ratio that still has one for a positive advantage. Both are the paper's."""
    updates_per_step: int = 1
    """Optimiser steps on one step's completions, each on a part of the groups; 16 in the paper, 1
    in public runs, where the ratio stays 1 and the clip does nothing."""
    max_candidates: int = 2
    """Most candidate groups of a step, as a multiple of `prompts_per_step`; 2 in public runs."""
    token_budget: int = 150_000
    """No more candidates once a step has sampled so many tokens; our choice, a full first batch of
    the defaults is 131,072. At the reported 4.67 CNY per million it costs 0.70."""
    time_budget: float = 900
    """No more candidates after so many seconds; our choice, public steps took 430."""
    overlong_cache: int = 1024
    """Last tokens before `max_tokens`, over which the penalty grows to 1; 1024 in public runs."""
    steps: int = 100
    """Rollout steps; our choice, a public run was stopped at 35 after 4.2 hours."""
    prompts_per_step: int = 4
    """Effective groups to train on per step; 4 in public runs."""
    group_size: int = 8
    """Completions per question; 8 in public runs."""
    learning_rate: float = 4e-5
    """Learning rate of AdamW; 4e-5 in public runs."""
    rank: int = 32
    """LoRA rank, 4 to 64; 32 is the SDK's default."""
    max_tokens: int = 4096
    """Longest completion; 4096 in public runs. Raise it when `rollout/truncated` > 0.1."""
    max_prompt_tokens: int = 512
    """Longer prompts are reported and left out."""
    seed: int = 0
    """Order of data, initial weights. Sampling gets none: one seed repeats the same completions."""
    eval_rows: int = 100
    """Held-out questions, answered greedily; the standard error is 5 points at worst."""
    eval_base: bool = True
    """Evaluate the untrained model, too."""
    save_every: int = 10
    """Steps between checkpoints: what a killed run does again at most."""
    run_dir: Path = Path("runs/dapo")
    """Folder of metrics.jsonl, run_state.json and SwanLab's files."""
    fresh: bool = False
    """Discard the run in --run-dir instead of resuming it."""
    swanlab: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when SWANLAB_API_KEY is set and offline otherwise."""
    check_reward: bool = False
    """Only score all gold answers and a table of tricky ones; needs no model."""


# What `--data sample` replaces; a flag on the command line still wins.
SAMPLE: dict[str, Any] = {"steps": 10, "prompts_per_step": 8, "learning_rate": 4e-4}
SAMPLE |= {"max_tokens": 72, "overlong_cache": 24, "eval_rows": 64, "save_every": 4}
# What may differ when a run is resumed; any other change makes it another run.
FREE_TO_CHANGE = {"steps", "save_every", "run_dir", "fresh", "swanlab", "check_reward", "eval_base"}


def stop(line: str) -> NoReturn:
    """End with one line that says what is wrong and what to do."""
    raise SystemExit(f"{NAME}: {line}")


def check_config(config: Config) -> None:
    lowest = {"group_size": 2, "rank": 4, "seed": 0, "overlong_cache": 0}
    for name, value in asdict(config).items():
        if type(value) is int and value < lowest.get(name, 1):
            flag = "--" + name.replace("_", "-")
            stop(f"{flag} must be at least {lowest.get(name, 1)}, got {value}")
    if not 0 < config.learning_rate < 1:
        stop(f"--learning-rate must be between 0 and 1, got {config.learning_rate}")
    low, high = config.clip_low_threshold, config.clip_high_threshold
    if not 0 <= low < 1 < high:
        stop(f"the clip thresholds are bounds of the ratio around 1, got {low} and {high}")
    if config.time_budget <= 0:
        stop(f"--time-budget must be above 0, got {config.time_budget}")
    if config.overlong_cache >= config.max_tokens:
        line = f"--overlong-cache {config.overlong_cache} must be below --max-tokens"
        stop(f"{line} {config.max_tokens}: the penalty would begin before the first token")
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


def items_from(items: Sequence[Any], cursor: int, count: int, seed: int) -> list[Any]:
    """Items at `count` positions from the cursor: a function of the position alone, so that
    resuming needs the cursor and nothing else."""
    places = [divmod(position, len(items)) for position in range(cursor, cursor + count)]
    return [items[order_of_epoch(len(items), seed, epoch)[i]] for epoch, i in places]


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


def overlong_penalty(length: int, max_tokens: int, cache: int) -> float:
    """0 until `cache` tokens before the limit, from there down to -1 at the limit."""
    return -min(1.0, max(0.0, (length - max_tokens + cache) / cache)) if cache else 0.0


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
    for length, penalty in [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0)]:
        assert overlong_penalty(length, 100, 20) == penalty, f"penalty of {length} tokens"
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


Group = tuple[Item, list[Completion]]


def is_effective(group: Sequence[Completion], size: int) -> bool:
    """Complete, and some right and some wrong. Told by the verdicts: the length penalty makes
    rewards differ in groups that teach nothing but length."""
    judged = {c.reward for c in group if c.reward is not None}
    return len(group) == size and len(judged) > 1


@dataclass
class Candidates:
    """The groups that one step has sampled."""

    groups: list[Group]
    effective: list[Group]
    tokens: int = 0
    waves: int = 0


def collect(
    sampler: trio.SamplingClient,
    tokenizer: Any,
    items: Sequence[Item],
    cursor: int,
    config: Config,
    params: trio.SamplingParams,
) -> Candidates:
    """Groups from the cursor on, in waves, until enough are effective or a budget is spent.

    A wave is as large as the rate of effective groups so far asks for: refilling one by one would
    wait for one long answer after the other. The budgets are looked at before each wave.
    """
    found = Candidates([], [])
    start, wave = time.monotonic(), config.prompts_per_step
    while wave > 0:
        batch = items_from(items, cursor + len(found.groups), wave, config.seed)
        groups = sample(sampler, tokenizer, batch, config.group_size, params)
        for item, group in zip(batch, groups, strict=True):
            found.groups.append((item, group))
            found.tokens += sum(len(completion.tokens) for completion in group)
            if is_effective(group, config.group_size):
                found.effective.append((item, group))
        found.waves += 1
        if time.monotonic() - start > config.time_budget:
            break
        missing = config.prompts_per_step - len(found.effective)
        rate = max(len(found.effective) / len(found.groups), 0.25)
        left = config.max_candidates * config.prompts_per_step - len(found.groups)
        tokens_per_group = max(1.0, found.tokens / len(found.groups))
        affordable = int((config.token_budget - found.tokens) / tokens_per_group)
        wave = min(math.ceil(missing / rate), left, affordable)
    return found


def shaped_reward(completion: Completion, config: Config) -> float | None:
    """+1 right or -1 wrong, less the penalty for its length."""
    if completion.reward is None:
        return None
    length = len(completion.tokens)
    penalty = overlong_penalty(length, config.max_tokens, config.overlong_cache)
    return 2 * completion.reward - 1 + penalty


def group_advantages(rewards: Sequence[float | None]) -> list[float]:
    """Reward minus mean, over the deviation; all 0 for a group that teaches nothing."""
    judged = [reward for reward in rewards if reward is not None]
    if len(judged) < 2 or max(judged) - min(judged) < 1e-6:
        return [0.0] * len(rewards)
    mean, deviation = fmean(judged), stdev(judged)
    return [0.0 if reward is None else (reward - mean) / deviation for reward in rewards]


@dataclass(frozen=True)
class Trained:
    datum: trio.Datum
    completion: Completion
    advantage: float


def build_datum(item: Item, completion: Completion, advantage: float) -> trio.Datum:
    """Position t of the input predicts token t + 1: all lists lose their first, the input its last.

    The prompt's advantages are 0, so it has no gradient.
    """
    tokens, before = item.prompt + completion.tokens, len(item.prompt)
    logprobs = [0.0] * before + completion.logprobs
    advantages = [0.0] * before + [advantage] * len(completion.tokens)
    lengths = [len(tokens), len(logprobs), len(advantages)]
    assert len(set(lengths)) == 1, f"tokens, logprobs, advantages: {lengths}"
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": logprobs[1:],
            "advantages": advantages[1:],
        },
    )


def build_batch(found: Candidates, config: Config) -> tuple[list[list[Trained]], dict[str, float]]:
    """What is trained, by group, and what the rollouts were like."""
    trained_groups = []
    shaped: list[float] = []
    for item, group in found.effective:
        rewards = [shaped_reward(completion, config) for completion in group]
        shaped += [reward for reward in rewards if reward is not None]
        trained_groups.append(
            [
                Trained(build_datum(item, completion, advantage), completion, advantage)
                for completion, advantage in zip(group, group_advantages(rewards), strict=True)
                if completion.reward is not None
            ]
        )
    completions = [completion for _, group in found.groups for completion in group]
    lengths = [len(completion.tokens) for completion in completions]
    verdicts = [c.reward for c in completions if c.reward is not None]
    penalties = [overlong_penalty(n, config.max_tokens, config.overlong_cache) for n in lengths]
    stops = Counter(completion.stop_reason for completion in completions)
    trained = [t for group in trained_groups for t in group]
    return trained_groups, {
        "reward": fmean(verdicts) if verdicts else math.nan,  # share of right answers
        "reward/length_penalty_mean": fmean(penalties),
        "reward/shaped_mean": fmean(shaped) if shaped else math.nan,  # of what is trained
        "datums": len(trained),
        "rollout/candidate_groups": len(found.groups),
        "rollout/effective_groups": len(found.effective),
        "rollout/effective_fill_ratio": len(found.effective) / config.prompts_per_step,
        "rollout/oversample_ratio": len(found.groups) / config.prompts_per_step,
        "rollout/waves": found.waves,
        "rollout/candidate_tokens": found.tokens,
        "rollout/train_tokens": sum(len(t.completion.tokens) for t in trained),
        "frac_degenerate": 1 - len(found.effective) / len(found.groups),
        "rollout/completion_tokens_mean": fmean(lengths),
        "rollout/completion_tokens_max": max(lengths),
        "rollout/truncated": stops["length"] / len(completions),
        "rollout/unjudged": len(completions) - len(verdicts),
        **{f"rollout/stop_{reason}": n / len(completions) for reason, n in stops.items()},
    }


def clip_metrics(part: Sequence[Trained], output: Any, config: Config) -> dict[str, float]:
    """How far the policy has moved from the one that sampled, and where the clip took hold.

    The built-in loss does not say; the log-probabilities that it returns do.
    """
    ratios, lower, upper = [], 0, 0
    for trained, fields in zip(part, output.loss_fn_outputs, strict=True):
        old = trained.completion.logprobs
        now = fields["logprobs"].tolist()[-len(old) :]
        assert len(now) == len(old), f"{len(now)} log-probabilities for {len(old)} tokens"
        of_tokens = [math.exp(n - o) for n, o in zip(now, old, strict=True)]
        ratios += of_tokens
        if trained.advantage < 0:
            lower += sum(ratio < config.clip_low_threshold for ratio in of_tokens)
        else:
            upper += sum(ratio > config.clip_high_threshold for ratio in of_tokens)
    return {
        "loss": output.metrics["loss_mean"],
        "ppo/ratio_mean": fmean(ratios),
        "ppo/clip_fraction": (lower + upper) / len(ratios),
        "ppo/lower_clip_fraction": lower / len(ratios),
        "ppo/upper_clip_fraction": upper / len(ratios),
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
    clip: dict[str, Any] = {
        "clip_low_threshold": config.clip_low_threshold,
        "clip_high_threshold": config.clip_high_threshold,
    }
    first, cursor = state["step"], state.get("cursor", 0)
    bar = tqdm(range(first + 1, config.steps + 1), initial=first, total=config.steps, disable=None)
    for step in bar:
        start = time.monotonic()
        # A sampling client keeps the weights it was made with: each step needs a new one.
        sampler = training.save_weights_and_get_sampling_client()
        found = collect(sampler, tokenizer, items, cursor, config, params)
        epoch = cursor // len(items)
        cursor += len(found.groups)
        trained_groups, metrics = build_batch(found, config)
        pending = []
        count = min(config.updates_per_step, len(trained_groups))
        for number in range(count):
            part = [t for group in trained_groups[number::count] for t in group]
            # One call for the whole part, and its update submitted before anything is waited for.
            backward = training.forward_backward(
                [t.datum for t in part], loss_fn="ppo", loss_fn_config=clip
            )
            pending.append((part, backward, training.optim_step(adam)))
        outputs = []
        for part, backward, update in pending:
            outputs.append(clip_metrics(part, backward.result(), config))
            update.result()
        for key in outputs[0] if outputs else ():
            metrics[key] = fmean(output[key] for output in outputs)
        metrics |= {"epoch": epoch, "learning_rate": config.learning_rate}
        metrics["time/step_seconds"] = time.monotonic() - start
        row = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        log(config, {"step": step, **row})
        bar.write(
            f"step {step:3d}/{config.steps}  reward {metrics['reward']:.3f}"
            f"  effective {len(found.effective)} of {len(found.groups)}  datums {metrics['datums']}"
            f"  clipped {metrics.get('ppo/clip_fraction', math.nan):.3f}"
            f"  tokens {metrics['rollout/completion_tokens_mean']:.0f}"
            f"  truncated {metrics['rollout/truncated']:.2f}"
        )
        if step % config.save_every == 0 or step == config.steps:
            # The state file is written last: it never names a step that is not saved.
            path = training.save_state(f"step-{step}", overwrite=True).result().path
            state |= {"step": step, "checkpoint": path, "weights": None}
            state |= {"epoch": epoch, "cursor": cursor}
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
