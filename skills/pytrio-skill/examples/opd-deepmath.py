"""On-policy distillation on DeepMath: the student samples, a larger teacher scores the very ids.

Post: thinkingmachines.ai/blog/on-policy-distillation; papers: GKD, arXiv:2306.13649, and MiniLLM,
arXiv:2306.08543. With s_t and q_t the log-probabilities that student and teacher give token t of a
completion that the student sampled:

    reverse KL = mean_t (s_t - q_t)
    A_t = q_t - s_t,   loss = -sum_t ratio_t * A_t,   ratio_t = exp(logprob now - s_t)

There is no reward and no group baseline: the teacher judges every token, and never samples.

Dry run (free, offline):   python scripts/dryrun.py run examples/opd-deepmath.py -- --data sample
On the cloud (billed):     PYTRIO_API_KEY=... python examples/opd-deepmath.py
Expected in the dry run:   held-out reverse KL 1.15 to 0.04, accuracy 0.55 to 0.83 after 10 steps,
                           about 30 s on one core; seed 1 to 0.03 and 0.84
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

NAME = "opd-deepmath"
SKILL = "pytrio-skill 0.1.0"
DEEPMATH_SHARD = "data/train-00000-of-00010.parquet"  # one of ten, about 0.2 GB
# No commit is known to us: write one here when others shall be able to repeat the run.
DEEPMATH_REVISION = "main"
INSTRUCTION = "Reason step by step. Put the final answer in \\boxed{}."
STOP = ["<|im_end|>"]
# Mean |s_t - q_t| when both are one model: the audit's limit for a ratio that ought to be 1.
SELF_TEST_LIMIT = 0.1


@dataclass(frozen=True)
class Config:
    data: str = "deepmath"
    """`deepmath` (Hugging Face hub), `sample` (generated rows, no network, smaller defaults), or a
    .jsonl file of {"question": "...", "final_answer": "..."}."""
    base_model: str = "Qwen/Qwen3.5-4B"
    """Student; the one of the public PyTRIO distillation runs."""
    teacher_model: str = "Qwen/Qwen3.6-27B"
    """Teacher; the one of the public DeepMath script. It must have the student's tokenizer."""
    teacher_path: str | None = None
    """Sampler weights of a teacher that was trained itself, over --teacher-model."""
    rows: int = 1000
    """Questions to train on; 1000 in the public script. Their answers are not read."""
    steps: int = 300
    """Optimiser steps; 300 in the one public run with published scores (medical questions)."""
    prompts_per_step: int = 4
    """Questions per step; 4 in that run."""
    group_size: int = 4
    """Completions per question; 4 in that run. They are only more data: there is no group mean."""
    learning_rate: float = 4e-5
    """Learning rate of AdamW; 4e-5 in public runs."""
    rank: int = 32
    """LoRA rank, 4 to 64; 32 is the SDK's default and that of the DeepMath script."""
    max_tokens: int = 512
    """Longest completion; 512 in the DeepMath script. Raise it when `rollout/truncated` > 0.1."""
    max_prompt_tokens: int = 512
    """Longer prompts are reported and left out."""
    seed: int = 0
    """Order of data, initial weights. Sampling gets none: one seed repeats the same completions."""
    eval_rows: int = 200
    """Held-out questions, one sampled completion each, for reverse KL and accuracy."""
    eval_base: bool = True
    """Evaluate the untrained student, too."""
    save_every: int = 10
    """Steps between checkpoints: what a killed run does again at most."""
    run_dir: Path = Path("runs/opd-deepmath")
    """Folder of metrics.jsonl, run_state.json and SwanLab's files."""
    fresh: bool = False
    """Discard the run in --run-dir instead of resuming it."""
    swanlab: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when SWANLAB_API_KEY is set and offline otherwise."""


# What `--data sample` replaces; a flag on the command line still wins.
SAMPLE: dict[str, Any] = {"steps": 10, "prompts_per_step": 8, "group_size": 2}
SAMPLE |= {"learning_rate": 3e-4, "max_tokens": 72, "eval_rows": 64, "save_every": 4}
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
    """Small integer problems in DeepMath's schema, no question twice."""
    rng = random.Random(0)
    rows: dict[str, Row] = {}
    while len(rows) < count:
        a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 9)
        kinds = [
            (f"Compute {c} + {a} * {b}.", c + a * b),
            (f"Find the value of ({a} + {b}) * {c}.", (a + b) * c),
            (f"Evaluate {a}^2 - {c}.", a * a - c),
            (f"What is the remainder when {a * b + c % a} is divided by {a}?", c % a),
            (f"Solve for x: x + {a} = {a + b + c}.", b + c),
            (f"Solve for x: {a} * x = {a * b}.", b),
        ]
        question, answer = rng.choice(kinds)
        rows[question] = {"question": question, "final_answer": str(answer)}
    return list(rows.values())


def read_jsonl(path: Path) -> list[Row]:
    """Rows of a file, no question twice."""
    rows: dict[str, Row] = {}
    try:
        # Not splitlines(): JSON strings may hold other line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {path} ({error}); --data takes deepmath, sample or a .jsonl file")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
                row = {key: row[key].strip() for key in ("question", "final_answer")}
                if not all(row.values()):
                    raise ValueError("one of them is empty")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                stop(f"{path} line {number} is no row of question and final_answer: {error!r}")
            rows[row["question"]] = row
    return list(rows.values())


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows; no question is in both."""
    if config.data == "deepmath":
        try:
            from datasets import load_dataset

            table = load_dataset(
                "zwhe99/DeepMath-103K",
                data_files=DEEPMATH_SHARD,
                revision=DEEPMATH_REVISION,
                split="train",
            ).select_columns(["question", "final_answer"])
        except Exception as error:  # no package, no network, no such revision
            reason = (str(error) or repr(error)).splitlines()[0]
            stop(f"cannot load zwhe99/DeepMath-103K ({reason}); --data sample needs no network")
        rows = list({r["question"]: dict(r) for r in table if r["final_answer"]}.values())
    elif config.data == "sample":
        rows = sample_rows(5 * config.eval_rows)
    else:
        rows = read_jsonl(Path(config.data))
    if len(rows) < 5:
        stop(f"{config.data} has {len(rows)} different questions; give at least 5")
    random.Random(0).shuffle(rows)
    rows = rows[: config.rows + config.eval_rows]
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
            items.append(Item(prompt, row["final_answer"]))
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
                # The sampled ids after the same prompt ids; text is never encoded again. This runs
                # while the next prompts are still being sampled.
                ids = trio.ModelInput.from_ints(item.prompt + sequence.tokens)
                scorings.append((item, sequence, teacher.compute_logprobs(ids)))
    completions = []
    for item, sequence, future in scorings:
        # Element i belongs to id i, so the completion's begin at len(prompt); the first is None.
        scores = future.result()[len(item.prompt) :]
        tokens, logprobs, reason = sequence.tokens, sequence.logprobs, sequence.stop_reason
        lengths = [len(tokens), len(logprobs), len(scores)]
        assert len(set(lengths)) == 1, f"tokens, logprobs, teacher's logprobs: {lengths}"
        completions.append(Completion(item, tokens, logprobs, scores, reason))
    return completions


def check_teacher(teacher: trio.SamplingClient, tokenizer: Any, items: Sequence[Item]) -> None:
    """Teacher and student must read the same ids as the same text."""
    other = teacher.get_tokenizer()
    for item in items[:50]:
        text = tokenizer.decode(item.prompt)
        ids = [t.encode(text, add_special_tokens=False) for t in (tokenizer, other)]
        if ids[0] != ids[1]:
            stop(f"--teacher-model has another tokenizer: to it, {text[:60]!r} is other ids")


def self_test(base: trio.SamplingClient, items: Sequence[Item], vocabulary: int) -> None:
    """Mean |s_t - q_t| with the student as its own teacher: about 0, or the scoring is wrong."""
    completions = sample_and_score(base, base, items[:4], 2, 32, vocabulary)
    gap = fmean(abs(gap) for completion in completions for gap in completion.gaps)
    if not gap < SELF_TEST_LIMIT:
        stop(f"self-test: a model differs from itself by {gap:.3f} per token, not about 0")
    print(f"self-test: the student as its own teacher differs by {gap:.4f} per token")


def build_datum(completion: Completion) -> trio.Datum:
    """Position t of the input predicts token t + 1: all lists lose their first, the input its last.

    The prompt's advantages are 0, so it has no gradient.
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
    """Reverse KL and accuracy of one sampled completion per held-out question; base and trained
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
    """From the state's step to the last; afterwards the state names durable sampler weights."""
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
        teacher = service.create_sampling_client(
            config.teacher_model, model_path=config.teacher_path
        )
        tokenizer = base.get_tokenizer()
        items = encode_prompts(tokenizer, train_rows, config.max_prompt_tokens)
        held_out = encode_prompts(tokenizer, held_out_rows, config.max_prompt_tokens)
        if not state["step"]:
            check_teacher(teacher, tokenizer, items)
            self_test(base, items, len(tokenizer))
        if config.eval_base and "base" not in results:
            results["base"] = evaluate(base, teacher, tokenizer, held_out, config.max_tokens)
            save_run_state(config, state)
        if state["step"] < config.steps or not state["weights"]:
            train(service, teacher, len(tokenizer), items, config, state)
        if "trained" not in results:
            tuned = service.create_sampling_client(config.base_model, model_path=state["weights"])
            results["trained"] = evaluate(tuned, teacher, tokenizer, held_out, config.max_tokens)
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
