"""Any loss with forward_backward_custom: REINFORCE, CISPO, SAPO, GRPO with a KL term, and twins of
two built-in losses, on the same word problems.

The service runs a forward pass, the loss is computed here with torch from the log-probabilities
that come back, and its gradient goes into a second pass. That costs two passes: take a built-in
loss where one exists. With lp the log-probability of a sampled token now, q when it was sampled,
ref under the base model, r = exp(lp - q), sg = stop-gradient, A = reward - mean of the group:

    reinforce             -A * lp                                           (Williams 1992)
    importance_sampling   -r * A                                            (built-in, too)
    ppo                   -min(r * A, clip(r, 0.8, 1.28) * A)               (built-in, too)
    cispo                 -sg(clip(r, 0, 4)) * A * lp                       arXiv:2506.13585
    sapo                  -sigmoid(tau * (r - 1)) * 4 / tau * A             arXiv:2511.20347
    grpo_kl               ppo + 0.04 * (exp(ref - lp) - (ref - lp) - 1)     arXiv:2402.03300

The loss of a batch is the mean over its sampled tokens. Your own: a function of `Tokens` in
LOSSES, and its formula for one token in FORMULAS; every start compares the two.

Dry run (free, offline):   python scripts/dryrun.py run examples/custom-loss.py -- --data sample
Twins against built-ins:   python scripts/dryrun.py run --accept 'A10=nothing to keep' \\
                               examples/custom-loss.py -- --data sample --check
On the cloud (billed):     PYTRIO_API_KEY=... python examples/custom-loss.py --loss sapo
Expected in the dry run:   reward 0.6 to 0.92-0.97 (last five of 8 steps), held-out accuracy 0.96 to
                           1.00, about 30 s on one core; grpo_kl, held back by its KL term, to 0.87
An interrupted run continues when the same command is given again.
"""

import hashlib
import importlib
import itertools
import json
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
from statistics import fmean, pstdev
from typing import Any, Literal, NoReturn

import pytrio as trio
import torch
import tyro
from tqdm import tqdm

NAME = "custom-loss"
SKILL = "pytrio-skill 0.1.0"
GSM8K_REVISION = "cc7b047b6e5bb11b4f1af84efc572db110a51b3c"
INSTRUCTION = "Put the final answer, a number without units, in \\boxed{}."
STOP = ["<|im_end|>"]
IGNORED_TARGET = -100
TWIN_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Config:
    data: str = "gsm8k"
    """`gsm8k` (Hugging Face hub), `sample` (generated rows, no network, smaller defaults), or a
    .jsonl file of {"question": "...", "answer": "... #### 42"}."""
    base_model: str = "Qwen/Qwen3.5-4B"
    """Model to adapt; the one of nearly all public PyTRIO runs."""
    loss: Literal["reinforce", "importance_sampling", "ppo", "cispo", "sapo", "grpo_kl"] = "sapo"
    """Which of LOSSES to train with."""
    passes: int = 1
    """Optimiser steps on one batch of completions. With 1, every ratio is 1 and the losses hardly
    differ; with more, clips and gates begin to act."""
    steps: int = 110
    """Batches of completions; a public GRPO run took about 110."""
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
    run_dir: Path = Path("runs/custom-loss")
    """Folder of metrics.jsonl, run_state.json and SwanLab's files."""
    fresh: bool = False
    """Discard the run in --run-dir instead of resuming it."""
    swanlab: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when SWANLAB_API_KEY is set and offline otherwise."""
    check_reward: bool = False
    """Only score all gold answers and a table of tricky ones; needs no model."""
    check: bool = False
    """Only compare three built-in losses with their twins here: two runs, three steps each."""


# What `--data sample` replaces; a flag on the command line still wins.
SAMPLE: dict[str, Any] = {"steps": 8, "passes": 2, "prompts_per_step": 6, "learning_rate": 4e-4}
SAMPLE |= {"max_tokens": 72, "eval_rows": 24, "save_every": 2}
# What may differ when a run is resumed; any other change makes it another run.
FREE_TO_CHANGE = {"steps", "save_every", "run_dir", "fresh", "swanlab", "check_reward", "eval_base"}
FREE_TO_CHANGE |= {"check"}


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


# -- The losses ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """All sampled tokens of a batch one after the other; every tensor has shape [tokens]."""

    now: torch.Tensor  # log-probability under the current weights: the only one with a gradient
    old: torch.Tensor  # ... when the token was sampled, as the sampler returned it
    advantage: torch.Tensor
    reference: torch.Tensor  # ... under the base model; zeros unless the loss is in NEEDS_REFERENCE

    @property
    def ratio(self) -> torch.Tensor:
        return torch.exp(self.now - self.old)


# Bounds of the ratio. Where the loss has none, they only define `custom/clip_fraction`.
BOUNDS = {"cispo": (0.0, 4.0)}  # public PyTRIO scripts
OTHER_BOUNDS = (0.8, 1.28)  # DAPO, arXiv:2503.14476
TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05  # SAPO's paper
KL_BETA = 0.04  # the first GRPO


def reinforce(t: Tokens, low: float, high: float) -> torch.Tensor:
    return -t.advantage * t.now


def importance_sampling(t: Tokens, low: float, high: float) -> torch.Tensor:
    return -t.ratio * t.advantage


def ppo(t: Tokens, low: float, high: float) -> torch.Tensor:
    # Without the minimum, a token that moved the wrong way past a bound would get no gradient back.
    clipped = t.ratio.clamp(low, high)
    return -torch.minimum(t.ratio * t.advantage, clipped * t.advantage)


def cispo(t: Tokens, low: float, high: float) -> torch.Tensor:
    # The ratio is a weight, so its gradient is cut; without detach() this would be another loss.
    return -t.ratio.clamp(low, high).detach() * t.advantage * t.now


def sapo(t: Tokens, low: float, high: float) -> torch.Tensor:
    tau = torch.where(t.advantage > 0, TAU_POSITIVE, TAU_NEGATIVE)
    return -torch.sigmoid(tau * (t.ratio - 1)) * 4 / tau * t.advantage


def grpo_kl(t: Tokens, low: float, high: float) -> torch.Tensor:
    gap = t.reference - t.now
    # k3: never negative. On fresh samples its gradient is that of KL(reference || now).
    return ppo(t, low, high) + KL_BETA * (torch.exp(gap) - gap - 1)


LOSSES: dict[str, Callable[[Tokens, float, float], torch.Tensor]] = {
    "reinforce": reinforce,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "sapo": sapo,
    "grpo_kl": grpo_kl,
}
NEEDS_REFERENCE = {"grpo_kl"}


@dataclass(frozen=True)
class One:
    """One token as plain numbers; `held` is its ratio where the gradient is stopped."""

    lp: float
    q: float
    a: float
    ref: float
    held: float
    low: float
    high: float

    @property
    def r(self) -> float:
        return math.exp(self.lp - self.q)

    def clip(self, ratio: float) -> float:
        return min(max(ratio, self.low), self.high)


# The papers' formulas for one token, without torch, so that a slip above is not repeated here.
FORMULAS: dict[str, Callable[[One], float]] = {
    "reinforce": lambda o: -o.a * o.lp,
    "importance_sampling": lambda o: -o.r * o.a,
    "ppo": lambda o: -min(o.r * o.a, o.clip(o.r) * o.a),
    "cispo": lambda o: -o.clip(o.held) * o.a * o.lp,
    "sapo": lambda o: -o.a * 4 / (t := 1 if o.a > 0 else 1.05) / (1 + math.exp(t - t * o.r)),
    "grpo_kl": lambda o: FORMULAS["ppo"](o) + 0.04 * (math.exp(o.ref - o.lp) - o.ref + o.lp - 1),
}


def check_formulas() -> None:
    """Value and gradient of every loss against its formula and the formula's difference quotient,
    at ratios inside and outside the bounds, both signs of the advantage, both sides of ref."""
    step = 1e-6
    gaps, advantages, others = (-0.9, -0.1, 0.0, 0.1, 0.9, 1.5), (-0.7, 0.4), (-0.5, 0.5)
    for name, gap, a, other in itertools.product(LOSSES, gaps, advantages, others):
        low, high = BOUNDS.get(name, OTHER_BOUNDS)
        one = One(gap - 1.5, -1.5, a, other - 1.5, math.exp(gap), low, high)
        lp = torch.tensor([one.lp], dtype=torch.float64, requires_grad=True)
        fixed = [torch.tensor([x], dtype=torch.float64) for x in (one.q, one.a, one.ref)]
        value = LOSSES[name](Tokens(lp, *fixed), low, high).sum()
        (gradient,) = torch.autograd.grad(value, lp)
        above, below = (FORMULAS[name](replace(one, lp=one.lp + h)) for h in (step, -step))
        off = abs(gradient.item() - (above - below) / (2 * step))
        off = max(off, abs(value.item() - FORMULAS[name](one)))
        if off > 1e-6:
            stop(f"{name} is off its formula by {off:.2g} at {one}")


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


def reward_of(completion: str, gold: str) -> float:
    """1.0 when the last box holds the number, else 0.0. Numbers only: grpo-gsm8k.py reads sums and
    fractions, too, and tells what cannot be judged from what is wrong."""
    answer = re.sub(r"\\text\s*\{[^{}\d]*\}|[\\$%]", "", last_boxed(completion) or "").strip(" .")
    if not NUMBER.fullmatch(answer):
        return 0.0
    return float(Fraction(answer.replace(",", "")) == Fraction(gold))


# How completions score when 18 is right; the cases are those that parsers get wrong.
TRICKY: dict[float, list[str]] = {
    1.0: [r"So \boxed{18}.", r"\boxed{18.00}", r"\boxed{\$18}", r"\boxed{18\text{ apples}}",
          r"First \boxed{17}, no: \boxed{18}", r"<think>\boxed{17}</think>\boxed{18}"],
    0.0: ["It is 18.", r"\boxed{18", r"\boxed{}", r"\boxed{-18}", r"\boxed{180}", r"\boxed{1,8}",
          r"\boxed{17 or 18}", r"\boxed{18}, no: \boxed{17}", r"<think>\boxed{18}",
          r"<think>\boxed{18}</think>No idea."],
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


# -- Batches and the loss's closure ----------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    prompt: list[int]
    completion: Completion
    advantage: float


def build_datum(rollout: Rollout) -> trio.Datum:
    """Position t of the input predicts token t + 1: all lists lose their first, the input its last.

    A custom loss needs `target_tokens` only. The other two are for the built-in losses of --check.
    """
    sampled = rollout.completion.tokens
    tokens, before = rollout.prompt + sampled, len(rollout.prompt)
    targets = [IGNORED_TARGET] * before + sampled
    logprobs = [0.0] * before + rollout.completion.logprobs
    advantages = [0.0] * before + [rollout.advantage] * len(sampled)
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
) -> tuple[list[Rollout], dict[str, float]]:
    """Rollouts of the groups that differ within, and what all of them were like."""
    rollouts, degenerate = [], 0
    for item, group in zip(items, groups, strict=True):
        advantages = group_advantages([c.reward for c in group], config.divide_by_std)
        if len(group) < config.group_size:  # came back short: its mean is not the group's
            advantages = [0.0] * len(group)
        degenerate += not any(advantages)
        for completion, advantage in zip(group, advantages, strict=True):
            if advantage:
                rollouts.append(Rollout(item.prompt, completion, advantage))
    completions = [completion for group in groups for completion in group]
    lengths = [len(completion.tokens) for completion in completions]
    rewards = [c.reward for c in completions if c.reward is not None]
    stops = Counter(completion.stop_reason for completion in completions)
    return rollouts, {
        "reward": fmean(rewards) if rewards else math.nan,
        "frac_degenerate": degenerate / len(groups),
        "datums": len(rollouts),
        "rollout/completion_tokens_mean": fmean(lengths),
        "rollout/completion_tokens_max": max(lengths),
        "rollout/truncated": stops["length"] / len(completions),
        "rollout/unjudged": len(completions) - len(rewards),
        **{f"rollout/stop_{reason}": n / len(completions) for reason, n in stops.items()},
    }


def score_reference(base: trio.SamplingClient, rollouts: Sequence[Rollout]) -> list[list[float]]:
    """Log-probabilities of the sampled tokens under the base model, on the very ids sampled."""
    sequences = [rollout.prompt + rollout.completion.tokens for rollout in rollouts]
    futures = [base.compute_logprobs(trio.ModelInput.from_ints(ids)) for ids in sequences]
    references = []
    for rollout, future in zip(rollouts, futures, strict=True):
        scores = [value for value in future.result()[len(rollout.prompt) :] if value is not None]
        count = len(rollout.completion.tokens)
        assert len(scores) == count, f"{len(scores)} scores for {count} sampled tokens"
        references.append(scores)
    return references


CustomLoss = Callable[[list[trio.Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]


def make_loss(
    name: str,
    rollouts: Sequence[Rollout],
    references: Sequence[Sequence[float]],
    bounds: tuple[float, float],
    exact_scale: bool = False,
) -> CustomLoss:
    """The loss of one batch. Everything but the log-probabilities is kept in the closure, in the
    order of the data. It runs on the SDK's own thread: no call of the SDK, no network, no waiting.
    """
    old = torch.tensor([q for r in rollouts for q in r.completion.logprobs])
    advantage = torch.tensor([r.advantage for r in rollouts for _ in r.completion.tokens])
    reference = torch.tensor([ref for scores in references for ref in scores])
    if name not in NEEDS_REFERENCE:
        reference = torch.zeros_like(old)

    def loss_fn(
        data: list[trio.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        start = time.monotonic()
        assert len(logprobs) == len(rollouts), f"{len(logprobs)} data, {len(rollouts)} rollouts"
        # Target t is token t + 1: the first sampled token is target len(prompt) - 1.
        sampled = [lp[len(r.prompt) - 1 :] for lp, r in zip(logprobs, rollouts, strict=True)]
        now = torch.cat(sampled)
        sizes = [len(now), len(old), len(advantage), len(reference)]
        assert len(set(sizes)) == 1, f"tokens now, old, with advantage, with reference: {sizes}"
        tokens = Tokens(now, old, advantage, reference)
        loss = LOSSES[name](tokens, *bounds).sum() / len(now)
        ratio, gap = tokens.ratio.detach(), (reference - now).detach()
        metrics = {
            "custom/loss": loss.item(),
            "custom/ratio_mean": ratio.mean().item(),
            "custom/ratio_max": ratio.max().item(),
            "custom/clip_fraction": ((ratio < bounds[0]) | (ratio > bounds[1]))
            .float()
            .mean()
            .item(),
            "custom/denominator": float(len(now)),
        }
        if name in NEEDS_REFERENCE:
            metrics["custom/kl"] = (torch.exp(gap) - gap - 1).mean().item()
        if exact_scale:
            # The second pass is a cross_entropy, divided by its active tokens: those that have a
            # gradient here (the dry run's choice; unknown for the cloud). This takes it back.
            gradients = torch.autograd.grad(loss, logprobs, retain_graph=True)
            loss = loss * sum(int(torch.count_nonzero(g)) for g in gradients)
        metrics["time/local_seconds"] = time.monotonic() - start
        return loss, metrics

    return loss_fn


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
    base: trio.SamplingClient,
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
    bounds = BOUNDS.get(config.loss, OTHER_BOUNDS)
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
        rollouts, metrics = build_batch(batch, groups, config)
        if rollouts:
            data = [build_datum(rollout) for rollout in rollouts]
            needed = config.loss in NEEDS_REFERENCE
            references = score_reference(base, rollouts) if needed else []
            loss_fn = make_loss(config.loss, rollouts, references, bounds)
            for _ in range(config.passes):
                before = time.monotonic()
                # Returns when the loss was computed and its backward pass is submitted, so the
                # step is submitted before that pass is waited for.
                backward = training.forward_backward_custom(data, loss_fn)
                update = training.optim_step(adam)
                output = backward.result().metrics
                update.result()
                # Of the last pass: in the first one all ratios are 1.
                metrics |= {k: v for k, v in output.items() if k.startswith(("custom/", "time/"))}
                metrics["custom/active_tokens"] = output["token_count"]
                remote = time.monotonic() - before - metrics["time/local_seconds"]
                metrics["time/remote_seconds"] = remote
        metrics |= {"epoch": epoch, "learning_rate": config.learning_rate}
        metrics["time/step_seconds"] = time.monotonic() - start
        row = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        log(config, {"step": step, **row})
        bar.write(
            f"step {step:3d}/{config.steps}  reward {metrics['reward']:.3f}"
            f"  degenerate {metrics['frac_degenerate']:.2f}  datums {len(rollouts)}"
            f"  truncated {metrics['rollout/truncated']:.2f}"
            f"  ratio {metrics.get('custom/ratio_mean', math.nan):.3f}"
            f"  clipped {metrics.get('custom/clip_fraction', math.nan):.3f}"
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


def check_twins(
    service: trio.ServiceClient, tokenizer: Any, items: Sequence[Item], config: Config
) -> None:
    """Two equal runs, one with a built-in loss and one with its twin, end with the same weights.

    Both first take one step away from the sampled policy, so that ratios are spread and clips act.
    Adam's epsilon is so large that a step is proportional to the gradient: its size shows, too.
    """
    builtin, custom = (
        service.create_lora_training_client(config.base_model, rank=config.rank, seed=config.seed)
        for _ in range(2)
    )
    params = trio.SamplingParams(
        max_tokens=config.max_tokens, temperature=1.0, top_p=1.0, top_k=-1, stop=STOP
    )
    sampler = builtin.save_weights_and_get_sampling_client()
    groups = sample(sampler, tokenizer, items, config.group_size, params)
    rollouts, _ = build_batch(items, groups, config)
    if not rollouts:
        stop("every group is all right or all wrong: nothing to compare; try another --seed")
    data = [build_datum(rollout) for rollout in rollouts]
    low, high = OTHER_BOUNDS

    def logprobs_now(client: trio.TrainingClient) -> torch.Tensor:
        outputs = client.forward(data, loss_fn="cross_entropy").result().loss_fn_outputs
        rows = [torch.tensor(output["logprobs"].tolist()) for output in outputs]
        return torch.cat([row[len(r.prompt) - 1 :] for row, r in zip(rows, rollouts, strict=True)])

    away = trio.AdamParams(learning_rate=1e-3)
    futures: list[Any] = []
    for client in (builtin, custom):
        futures.append(client.forward_backward(data, loss_fn="importance_sampling"))
        futures.append(client.optim_step(away))
    for future in futures:
        future.result()
    before = logprobs_now(builtin)
    linear = trio.AdamParams(learning_rate=1e-3, eps=1e-1)
    for name in ("importance_sampling", "ppo", "cispo"):
        bounds = {"clip_low_threshold": low, "clip_high_threshold": high}
        settings = {} if name == "importance_sampling" else bounds
        loss_fn = make_loss(name, rollouts, [], (low, high), exact_scale=True)
        futures = [
            builtin.forward_backward(data, loss_fn=name, loss_fn_config=settings),
            builtin.optim_step(linear),
            custom.forward_backward_custom(data, loss_fn),
            custom.optim_step(linear),
        ]
        results = [future.result() for future in futures]
        clipped = results[2].metrics["custom/clip_fraction"]
        after, twin = logprobs_now(builtin), logprobs_now(custom)
        moved, off = (after - before).abs().max().item(), (after - twin).abs().max().item()
        size = ((twin - before) @ (after - before) / (after - before).square().sum()).item()
        print(
            f"{name:<20} largest change of a log-probability {moved:.4f}, of its twin's off by "
            f"{off:.1e}, size {size:.4f}, clipped {clipped:.2f}"
        )
        if off > TWIN_TOLERANCE:
            stop(f"{name} and its twin differ by {off:.1e}; a size other than 1 is another divisor")
        before = after


def main(config: Config) -> None:
    check_config(config)
    check_formulas()
    train_rows, held_out_rows = load_rows(config)
    rows = train_rows + held_out_rows
    check_reward(rows)
    if config.check_reward:
        print(f"the reward scores {len(rows)} gold answers and the tricky ones as it must")
        return
    if config.check:
        print(f"{', '.join(LOSSES)}: value and gradient as in their formulas")
        service = trio.ServiceClient()
        tokenizer = service.create_sampling_client(config.base_model).get_tokenizer()
        items = encode_prompts(tokenizer, train_rows[:4], config.max_prompt_tokens)
        check_twins(service, tokenizer, items, config)
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
            train(service, tokenizer, base, items, config, state)
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
