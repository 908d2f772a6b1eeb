"""On-policy self-distillation: the model that has read the solution teaches the one that has not.

Paper: OPSD, arXiv:2601.18734; here per sampled token, not over the whole vocabulary. Student and
teacher are one model; the teacher stays at the initial weights and has the solution in its prompt.
With s_t and q_t the log-probabilities that student and teacher give token t of a completion that
the student sampled from the plain prompt:

    reverse KL = mean_t (s_t - q_t)
    A_t = q_t - s_t,   loss = -sum_t ratio_t * A_t,   ratio_t = exp(logprob now - s_t)

The solution is never a target and never sampled from: it only changes what the teacher expects.

Dry run (free, offline):   python scripts/dryrun.py run examples/opsd.py -- --data sample
On the cloud (billed):     PYTRIO_API_KEY=... python examples/opsd.py
Expected in the dry run:   held-out reverse KL 0.117 to 0.023, accuracy 0.36 to 0.97 after 10 steps
                           (0.94 with the solution shown), about 30 s on one core; seed 1 to 0.026
                           and 0.91
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
from math_verify.errors import TimeoutException
from tqdm import tqdm

NAME = "opsd"
SKILL = "pytrio-skill 0.1.0"
DATA_REVISION = "1f33e9dc2e8a1c639ca74f8024ad4a9f1f5eae62"
INSTRUCTION = "Reason step by step. Put the final answer in \\boxed{}."
# What the teacher reads instead. A marked solution and the wish for another derivation: copied
# word for word it would teach to recite.
PRIVILEGED = (
    "{question}\n\nHere is a reference solution.\n--- begin ---\n{solution}\n--- end ---\n"
    "Now solve the problem again in your own words. {instruction}"
)
STOP = ["<|im_end|>"]
# Mean |s_t - q_t| when both are one model: the audit's limit for a ratio that ought to be 1.
SELF_TEST_LIMIT = 0.1


@dataclass(frozen=True)
class Config:
    data: str = "openthoughts"
    """`openthoughts` (Hugging Face hub), `sample` (generated rows, no network, smaller defaults),
    or a .jsonl file of {"problem": "...", "solution": "... \\\\boxed{42}"}."""
    base_model: str = "Qwen/Qwen3.5-4B"
    """Model to adapt, and its own teacher; the one of the public PyTRIO run."""
    steps: int = 100
    """Optimiser steps; 100 in the public run."""
    prompts_per_step: int = 32
    """Problems per step; 32 in the public run."""
    group_size: int = 1
    """Completions per problem; 1 in the public run. There is no group mean that needs more."""
    learning_rate: float = 5e-6
    """Learning rate of AdamW; 5e-6 in the public run."""
    rank: int = 64
    """LoRA rank, 4 to 64; 64 in the public run."""
    max_tokens: int = 1024
    """Longest completion; 1024 in the public run. Raise it when `rollout/truncated` > 0.1."""
    max_prompt_tokens: int = 4096
    """Longer prompts are reported and left out; the teacher's, with the solution, counts."""
    seed: int = 0
    """Order of data, initial weights. Sampling gets none: one seed repeats the same completions."""
    eval_rows: int = 200
    """Held-out problems, one sampled completion each, for reverse KL and accuracy."""
    eval_base: bool = True
    """Evaluate the untrained student and the teacher, too."""
    save_every: int = 10
    """Steps between checkpoints: what a killed run does again at most."""
    run_dir: Path = Path("runs/opsd")
    """Folder of metrics.jsonl, run_state.json and SwanLab's files."""
    fresh: bool = False
    """Discard the run in --run-dir instead of resuming it."""
    swanlab: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when SWANLAB_API_KEY is set and offline otherwise."""


# What `--data sample` replaces; a flag on the command line still wins.
SAMPLE: dict[str, Any] = {"steps": 10, "prompts_per_step": 16, "learning_rate": 5e-4}
SAMPLE |= {"rank": 32, "max_tokens": 72, "max_prompt_tokens": 512, "eval_rows": 64, "save_every": 4}
# What may differ when a run is resumed; any other change makes it another run.
FREE_TO_CHANGE = {"steps", "save_every", "run_dir", "fresh", "swanlab", "eval_base"}


def stop(line: str) -> NoReturn:
    """End with one line that says what is wrong and what to do."""
    raise SystemExit(f"{NAME}: {line}")


def check_config(config: Config) -> None:
    lowest = {"rank": 4, "seed": 0}
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
    """Small word problems with worked solutions, no problem twice."""
    rng = random.Random(0)
    rows: dict[str, Row] = {}
    while len(rows) < count:
        who, other = rng.sample(["Ana", "Ben", "Dora", "Finn", "Iris", "Jack", "Mia", "Noah"], 2)
        what = rng.choice(["apples", "books", "pens", "coins", "cards", "eggs", "balls", "cups"])
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        ask = f"How many {what}"
        kinds = [
            (f"{who} has {a} {what} and buys {b} more. {ask} does {who} have now?",
             f"{who} has {a} + {b} = {a + b} {what}.", a + b),
            (f"{who} has {a + b} {what} and loses {b}. {ask} are left?",
             f"{who} has {a + b} - {b} = {a} {what}.", a),
            (f"There are {a} boxes with {b} {what} each. {ask} are there in total?",
             f"There are {a} * {b} = {a * b} {what}.", a * b),
            (f"{who} puts {a * b} {what} into {a} bags equally. {ask} are in each?",
             f"Each has {a * b} / {a} = {b} {what}.", b),
            (f"{who} has {a} {what}. {other} has twice as many. {ask} does {other} have?",
             f"{other} has {a} * 2 = {a * 2} {what}.", a * 2),
        ]  # fmt: skip
        problem, steps, answer = rng.choice(kinds)
        rows[problem] = {"problem": problem, "solution": f"{steps}\n\\boxed{{{answer}}}"}
    return list(rows.values())


def read_jsonl(path: Path) -> list[Row]:
    """Rows of a file, no question twice."""
    rows: dict[str, Row] = {}
    try:
        # Not splitlines(): JSON strings may hold other line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {path} ({error}); --data takes openthoughts, sample or a .jsonl file")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
                row = {key: row[key].strip() for key in ("problem", "solution")}
                if not row["problem"] or last_boxed(row["solution"]) is None:
                    raise ValueError("the problem is empty or the solution has no \\boxed{}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                stop(f"{path} line {number} is no row of problem and solution: {error!r}")
            rows[row["problem"]] = row
    return list(rows.values())


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows; no question is in both."""
    if config.data == "openthoughts":
        name = "siyanzhao/Openthoughts_math_30k_opsd"
        try:
            from datasets import load_dataset

            table = load_dataset(name, revision=DATA_REVISION, split="train")
            table = table.select_columns(["problem", "solution"])
        except Exception as error:  # no package, no network, no such revision
            reason = (str(error) or repr(error)).splitlines()[0]
            stop(f"cannot load {name} ({reason}); --data sample needs no network")
        rows = list({r["problem"]: dict(r) for r in table if last_boxed(r["solution"])}.values())
    elif config.data == "sample":
        rows = sample_rows(5 * config.eval_rows)
    else:
        rows = read_jsonl(Path(config.data))
    if len(rows) < 5:
        stop(f"{config.data} has {len(rows)} different problems; give at least 5")
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
# Towers of powers and factorials: hours of arithmetic that no time limit interrupts.
UNDECIDED = re.compile(r"\^[^+\-=]*\^|\^\s*\{?\s*\d{4}|(?<!\\)!|\*\*")
LONGEST_ANSWER = 200
# math-verify's own limit works by signals: POSIX, main thread.
SECONDS = 5 if os.name == "posix" else None
logging.getLogger("math_verify").setLevel(logging.ERROR)


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


def compact(answer: str) -> str:
    """Without spaces, dollars, sizes and text marks, so that equal answers are equal strings."""
    answer = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", answer).replace("\\dfrac", "\\frac")
    return re.sub(r"\\left|\\right|\\[,;! ]|[\s$]", "", answer).rstrip(".").lower()


def is_right(completion: str, gold: str) -> bool | None:
    """None when it cannot be told: that must not count as wrong."""
    boxed = last_boxed(completion)
    if boxed is None:
        return False
    answer, wanted = compact(boxed), compact(gold)
    if answer == wanted:
        return True
    if NUMBER.fullmatch(answer) and NUMBER.fullmatch(wanted):
        return Fraction(answer.replace(",", "")) == Fraction(wanted.replace(",", ""))
    if wanted.isalpha() or len(answer) > LONGEST_ANSWER:  # yes, no, x
        return False
    if UNDECIDED.search(answer) or UNDECIDED.search(wanted):
        return None
    try:
        gold_forms, forms = (
            parse(f"\\boxed{{{text}}}", parsing_timeout=SECONDS, raise_on_error=True)
            for text in (gold, boxed)
        )
        if not gold_forms:
            return None
        return verify(gold_forms, forms, timeout_seconds=SECONDS, raise_on_error=True)
    except (Exception, TimeoutException):
        return None


@dataclass(frozen=True)
class Item:
    prompt: list[int]
    teacher_prompt: list[int]
    gold: str


@dataclass(frozen=True)
class Completion:
    """A sampled completion and what the teacher says of its ids; all lists have one length."""

    item: Item
    tokens: list[int]
    logprobs: list[float]
    teacher_logprobs: list[float]
    stop_reason: str

    @property
    def gaps(self) -> list[float]:
        """Student minus teacher per token; the mean over many tokens is the reverse KL."""
        return [s - q for s, q in zip(self.logprobs, self.teacher_logprobs, strict=True)]


def encode_prompts(tokenizer: Any, rows: Sequence[Row], limit: int) -> list[Item]:
    """Rows through the model's own chat template, thinking off for both, without those over the
    limit."""

    def render(content: str, add_generation_prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=False,
        )

    text = render("x", True)
    opening = tokenizer.encode(text[len(render("x", False)) :], add_special_tokens=False)
    items, longest = [], 0
    for row in rows:
        question = f"{row['problem']} {INSTRUCTION}"
        privileged = PRIVILEGED.format(
            question=question, solution=row["solution"], instruction=INSTRUCTION
        )
        prompt, teacher_prompt = (
            tokenizer.encode(render(content, True), add_special_tokens=False)
            for content in (question, privileged)
        )
        # The completion begins after the same tokens for both: header and empty think block.
        assert prompt[-len(opening) :] == teacher_prompt[-len(opening) :] == opening
        size = max(len(prompt), len(teacher_prompt))
        longest = max(longest, size)
        if size <= limit:
            items.append(Item(prompt, teacher_prompt, str(last_boxed(row["solution"]))))
    if len(items) < len(rows):
        dropped = f"{len(rows) - len(items)} of {len(rows)} prompts"
        line = f"{dropped} are longer than --max-prompt-tokens {limit}, the longest {longest}"
        if not items:
            stop(line)
        print(f"left out: {line}")
    return items


def sample_and_score(
    student: trio.SamplingClient,
    teacher: trio.SamplingClient,
    items: Sequence[Item],
    count: int,
    max_tokens: int,
    vocabulary: int,
) -> list[Completion]:
    """`count` completions of every item by the student, scored by the teacher."""
    # Only at temperature 1, without top-p and top-k, are the log-probabilities that come back those
    # of the distribution that was sampled from, and comparable with the teacher's.
    params = trio.SamplingParams(
        max_tokens=max_tokens, temperature=1.0, top_p=1.0, top_k=-1, stop=STOP
    )
    # All requests are under way before the first answer is waited for.
    futures = [student.sample(trio.ModelInput.from_ints(i.prompt), count, params) for i in items]
    scorings = []
    for item, future in zip(items, futures, strict=True):
        for sequence in future.result().sequences:
            # The model's vocabulary is padded: ids the tokenizer does not have cannot be trained.
            if sequence.tokens and max(sequence.tokens) < vocabulary:
                # The sampled ids after the teacher's prompt; text is never encoded again. This runs
                # while the next prompts are still being sampled.
                ids = trio.ModelInput.from_ints(item.teacher_prompt + sequence.tokens)
                scorings.append((item, sequence, teacher.compute_logprobs(ids)))
    completions = []
    for item, sequence, future in scorings:
        # Element i belongs to id i: the completion's begin where the teacher's prompt ends.
        scores = future.result()[len(item.teacher_prompt) :]
        tokens, logprobs, reason = sequence.tokens, sequence.logprobs, sequence.stop_reason
        lengths = [len(tokens), len(logprobs), len(scores)]
        assert len(set(lengths)) == 1, f"tokens, logprobs, teacher's logprobs: {lengths}"
        completions.append(Completion(item, tokens, logprobs, scores, reason))
    return completions


def with_solution(items: Sequence[Item]) -> list[Item]:
    """The student gets the teacher's prompt."""
    return [replace(item, prompt=item.teacher_prompt) for item in items]


def self_test(base: trio.SamplingClient, items: Sequence[Item], vocabulary: int) -> None:
    """Mean |s_t - q_t| with the same prompt for both: about 0, or the scoring is wrong."""
    completions = sample_and_score(base, base, with_solution(items[:4]), 2, 32, vocabulary)
    gap = fmean(abs(gap) for completion in completions for gap in completion.gaps)
    if not gap < SELF_TEST_LIMIT:
        stop(f"self-test: a model differs from itself by {gap:.3f} per token, not about 0")
    print(f"self-test: with one prompt, student and teacher differ by {gap:.4f} per token")


def build_datum(completion: Completion) -> trio.Datum:
    """Position t of the input predicts token t + 1: all lists lose their first, the input its last.

    Trained is what follows the plain prompt, whose advantages are 0, so it has no gradient.
    """
    before = len(completion.item.prompt)
    tokens = completion.item.prompt + completion.tokens
    logprobs = [0.0] * before + completion.logprobs
    advantages = [0.0] * before + [-gap for gap in completion.gaps]
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


def describe(completions: Sequence[Completion]) -> dict[str, float]:
    """What the rollouts of a step were like."""
    gaps = [gap for completion in completions for gap in completion.gaps]
    lengths = [len(completion.tokens) for completion in completions]
    stops = Counter(completion.stop_reason for completion in completions)
    return {
        "opd/reverse_kl_mean": fmean(gaps),
        "opd/reverse_kl_std": pstdev(gaps),
        "opd/advantage_mean": -fmean(gaps),
        "opd/student_logprob_mean": fmean(lp for c in completions for lp in c.logprobs),
        "opd/teacher_logprob_mean": fmean(lp for c in completions for lp in c.teacher_logprobs),
        # Far above the mean when the teacher expects another opening: template, thinking.
        "opd/reverse_kl_first": fmean(completion.gaps[0] for completion in completions),
        "datums": len(completions),
        "rollout/completion_tokens_mean": fmean(lengths),
        "rollout/completion_tokens_max": max(lengths),
        "rollout/truncated": stops["length"] / len(completions),
        **{f"rollout/stop_{reason}": n / len(completions) for reason, n in stops.items()},
    }


def evaluate(
    student: trio.SamplingClient,
    teacher: trio.SamplingClient,
    tokenizer: Any,
    items: Sequence[Item],
    max_tokens: int,
) -> dict[str, float]:
    """Reverse KL and accuracy of one sampled completion per held-out problem; base and trained
    weights go through this. A lower KL does not imply more right answers, so both are told, and
    what was cut off at --max-tokens apart."""
    completions = sample_and_score(student, teacher, items, 1, max_tokens, len(tokenizer))
    texts = [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]
    verdicts = [is_right(t, c.item.gold) for t, c in zip(texts, completions, strict=True)]
    judged = [(v, c) for v, c in zip(verdicts, completions, strict=True) if v is not None]
    finished = [verdict for verdict, c in judged if c.stop_reason != "length"]
    return {
        "reverse_kl": fmean(gap for c in completions for gap in c.gaps),
        "accuracy": fmean(verdict for verdict, _ in judged) if judged else 0.0,
        "accuracy_finished": fmean(finished) if finished else 0.0,
        "items": len(completions),
        "unjudged": len(completions) - len(judged),
        "truncated": fmean(c.stop_reason == "length" for c in completions),
        "tokens": fmean(len(c.tokens) for c in completions),
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
    teacher: trio.SamplingClient,
    vocabulary: int,
    items: list[Item],
    config: Config,
    state: dict[str, Any],
) -> None:
    """From the state's step to the last; afterwards the state names durable sampler weights. The
    teacher has the weights that training began with, also after a resume."""
    if state["checkpoint"]:
        print(f"resuming after step {state['step']} from {state['checkpoint']}")
        training = service.create_training_client_from_state_with_optimizer(state["checkpoint"])
    else:
        training = service.create_lora_training_client(
            config.base_model, rank=config.rank, seed=config.seed
        )
    adam = trio.AdamParams(learning_rate=config.learning_rate)
    first = state["step"]
    bar = tqdm(range(first + 1, config.steps + 1), initial=first, total=config.steps, disable=None)
    for step in bar:
        start = time.monotonic()
        epoch, batch = batch_of_step(items, step - 1, config.prompts_per_step, config.seed)
        # A sampling client keeps the weights it was made with: each step needs a new one.
        student = training.save_weights_and_get_sampling_client()
        completions = sample_and_score(
            student, teacher, batch, config.group_size, config.max_tokens, vocabulary
        )
        if not completions:
            stop(f"step {step}: nothing was sampled that can be trained")
        # One call for the whole batch, and both submitted before either is waited for.
        backward = training.forward_backward(
            [build_datum(c) for c in completions], loss_fn="importance_sampling"
        )
        update = training.optim_step(adam)
        metrics = describe(completions)
        metrics["trainer/loss_mean"] = backward.result().metrics["loss_mean"]
        update.result()
        metrics |= {"epoch": epoch, "learning_rate": config.learning_rate}
        metrics["time/step_seconds"] = time.monotonic() - start
        row = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        log(config, {"step": step, **row})
        bar.write(
            f"step {step:3d}/{config.steps}  reverse KL {metrics['opd/reverse_kl_mean']:.4f}"
            f"  datums {len(completions)}"
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
    state = open_run(config, train_rows + held_out_rows)
    results = state["eval"]
    service = trio.ServiceClient()
    open_log(config, state["step"])
    try:
        base = service.create_sampling_client(config.base_model)
        tokenizer = base.get_tokenizer()
        items = encode_prompts(tokenizer, train_rows, config.max_prompt_tokens)
        held_out = encode_prompts(tokenizer, held_out_rows, config.max_prompt_tokens)
        if not state["step"]:
            self_test(base, items, len(tokenizer))
        if config.eval_base and "base" not in results:
            # What the solution is worth: a teacher that is not clearly better than base teaches
            # nothing. Its reverse KL is 0 because it is compared with itself.
            shown = with_solution(held_out)
            results["teacher"] = evaluate(base, base, tokenizer, shown, config.max_tokens)
            results["base"] = evaluate(base, base, tokenizer, held_out, config.max_tokens)
            save_run_state(config, state)
        if state["step"] < config.steps or not state["weights"]:
            train(service, base, len(tokenizer), items, config, state)
        if "trained" not in results:
            tuned = service.create_sampling_client(config.base_model, model_path=state["weights"])
            results["trained"] = evaluate(tuned, base, tokenizer, held_out, config.max_tokens)
            save_run_state(config, state)
    finally:
        swanlab_call("finish")
    for name, result in results.items():
        numbers = "  ".join(f"{key} {value:.3g}" for key, value in result.items())
        print(f"{name:<8} held out: {numbers}")
    print(f"weights  {state['weights']}")


if __name__ == "__main__":
    arguments = tyro.cli(Config)
    if arguments.data == "sample":
        arguments = tyro.cli(Config, default=replace(arguments, **SAMPLE))
    main(arguments)
