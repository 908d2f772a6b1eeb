"""DPO on Anthropic's HH-RLHF: of two answers to one prompt, make the chosen one likelier.

Paper: Direct Preference Optimization, arXiv:2305.18290; data: arXiv:2204.05862. With pi and ref
the log-probability of a whole answer (summed over its tokens) now and under the base model:

    reward = beta * (pi - ref)
    loss   = -mean log sigmoid(reward of the chosen answer - reward of the rejected one)

The service has no DPO loss; `forward_backward_custom` computes this one here. Policy and reference
are equal before the first step, so the first loss is ln 2. If it is not, nothing is trained.

Dry run (free, offline):   python scripts/dryrun.py run examples/dpo-hh-rlhf.py -- --data sample
On the cloud (billed):     PYTRIO_API_KEY=... python examples/dpo-hh-rlhf.py
Expected in the dry run:   first loss 0.6931, last 0.07 (12 steps); accuracy on held-out pairs from
                           0.5 (a tie) to 1.0 on seeds 0 and 1; about 25 s on one core
An interrupted run continues when the same command is given again.
"""

import hashlib
import importlib
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NoReturn

import pytrio as trio
import torch
import tyro
from tqdm import tqdm

NAME = "dpo-hh-rlhf"
SKILL = "pytrio-skill 0.1.0"
HH_RLHF_REVISION = "09be8c5bbc57cb3887f3a9732ad6aa7ec602a1fa"  # of 2023, the last one
END_OF_TURN = "<|im_end|>"
FIRST_LOSS_TOLERANCE = 0.01  # around ln 2; leaves room for sampler and trainer differing a little
TIE = 1e-4  # margins this small are rounding: half right, so equal models have accuracy 0.5


@dataclass(frozen=True)
class Config:
    data: str = "hh-rlhf"
    """`hh-rlhf` (Hugging Face hub), `sample` (generated rows, no network, smaller defaults), or a
    .jsonl file of {"chosen": "\\n\\nHuman: ... \\n\\nAssistant: ...", "rejected": "..."}."""
    subset: str = "helpful-base"
    """Part of HH-RLHF: helpful-base, helpful-online, helpful-rejection-sampled, harmless-base."""
    base_model: str = "Qwen/Qwen3.5-4B"
    """Model to adapt, and the reference; the one of nearly all public PyTRIO runs."""
    beta: float = 0.1
    """How strongly the reference holds back; 0.1 in public runs and in the paper."""
    rows: int = 1000
    """Pairs drawn for training; 1000 in public runs."""
    steps: int = 100
    """Optimiser steps. Public examples stop after 10, which only shows that the loop works."""
    pairs_per_step: int = 8
    """Pairs per step; public examples take 2, too few for a steady accuracy."""
    learning_rate: float = 1e-5
    """Learning rate of AdamW; 1e-5 in public DPO runs, ten times less than for SFT."""
    rank: int = 32
    """LoRA rank, 4 to 64; 32 is the SDK's default."""
    max_length: int = 2048
    """Pairs with a longer side (prompt and answer) are reported and left out."""
    max_tokens: int = 256
    """Longest answer when the evaluation samples; training samples nothing."""
    seed: int = 0
    """Order of data and initial weights."""
    eval_rows: int = 100
    """Held-out pairs; the standard error of their accuracy is 5 points at worst."""
    eval_base: bool = True
    """Evaluate the untrained model, too."""
    save_every: int = 10
    """Steps between checkpoints: what a killed run does again at most."""
    run_dir: Path = Path("runs/dpo-hh-rlhf")
    """Folder of metrics.jsonl, run_state.json, reference.jsonl and SwanLab's files."""
    fresh: bool = False
    """Discard the run in --run-dir instead of resuming it."""
    swanlab: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when SWANLAB_API_KEY is set and offline otherwise."""


# What `--data sample` replaces; a flag on the command line still wins.
SAMPLE: dict[str, Any] = {"steps": 12, "learning_rate": 1e-4, "max_tokens": 32}
SAMPLE |= {"rows": 96, "eval_rows": 32, "save_every": 3}
# What may differ when a run is resumed; any other change makes it another run.
FREE_TO_CHANGE = {"steps", "save_every", "run_dir", "fresh", "swanlab", "eval_base", "max_tokens"}


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
    if not 0 < config.beta < math.inf:
        stop(f"--beta must be greater than 0, got {config.beta}")
    if config.swanlab == "online" and not os.environ.get("SWANLAB_API_KEY"):
        stop("--swanlab online needs SWANLAB_API_KEY in the environment; offline does not")


Row = dict[str, str]


def sample_rows(count: int) -> list[Row]:
    """Polite against curt answers in HH-RLHF's schema, of one or two exchanges, no row twice."""
    rng = random.Random(0)
    what = ["a cat", "a dog", "rain", "snow", "a river", "a book", "a tree", "bread", "music",
            "a school", "a doctor", "a farmer", "water", "a clock", "gold", "a king"]  # fmt: skip
    who = ["Ana", "Ben", "Dora", "Finn", "Iris", "Jack", "Mia", "Noah"]
    curt = ["No idea.", "I do not care.", "Ask someone else.", "Whatever.", "Maybe."]
    rows: dict[str, Row] = {}
    while len(rows) < count:
        thing, name = rng.choice(what), rng.choice(who)
        exchanges = [
            (f"What is {thing}?", f"Good question! You can read about {thing} in a book."),
            (f"Tell me about {thing}.", f"I am happy to help. What about {thing} do you like?"),
            (f"My name is {name}.", f"Nice to meet you, {name}! How can I help you today?"),
            (f"Is {name} a doctor?", f"I am sorry, I do not know {name}. Can you tell me more?"),
        ]
        first, second = rng.sample(exchanges, 2)
        start = f"\n\nHuman: {first[0]}"
        if rng.random() < 0.5:
            start += f"\n\nAssistant: {first[1]}\n\nHuman: {second[0]}"
            first = second
        start += "\n\nAssistant: "
        rows[start] = {"chosen": start + first[1], "rejected": start + rng.choice(curt)}
    return list(rows.values())


def read_jsonl(path: Path) -> list[Row]:
    """Rows of a file, no pair twice."""
    rows: dict[tuple[str, str], Row] = {}
    try:
        # Not splitlines(): JSON strings may hold other line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {path} ({error}); --data takes hh-rlhf, sample or a .jsonl file")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
                row = {key: row[key] + "" for key in ("chosen", "rejected")}
                rows[row["chosen"], row["rejected"]] = row
            except (ValueError, KeyError, TypeError) as error:
                stop(f"{path} line {number} is no row of chosen and rejected: {error!r}")
    return list(rows.values())


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows; no conversation is in both."""
    if config.data == "hh-rlhf":
        try:
            from datasets import load_dataset

            splits = load_dataset(
                "Anthropic/hh-rlhf", data_dir=config.subset, revision=HH_RLHF_REVISION
            )
        except Exception as error:  # no package, no network, no such subset or revision
            reason = (str(error) or repr(error)).splitlines()[0]
            stop(f"cannot load Anthropic/hh-rlhf ({reason}); --data sample needs no network")
        train, held_out = [dict(r) for r in splits["train"]], [dict(r) for r in splits["test"]]
        random.Random(0).shuffle(held_out)
        held_out = held_out[: config.eval_rows]
    else:
        is_sample = config.data == "sample"
        count = config.rows + config.eval_rows
        rows = sample_rows(count) if is_sample else read_jsonl(Path(config.data))
        if len(rows) < 5:
            stop(f"{config.data} has {len(rows)} different pairs; give at least 5")
        random.Random(0).shuffle(rows)
        border = config.eval_rows if is_sample else min(config.eval_rows, len(rows) // 5)
        train, held_out = rows[border:], rows[:border]
    conversations = {row["chosen"].rpartition("\n\nAssistant:")[0] for row in held_out}
    train = [r for r in train if r["chosen"].rpartition("\n\nAssistant:")[0] not in conversations]
    if not train:
        stop(f"{config.data} has 0 conversations besides the held-out ones; give more")
    random.Random(1).shuffle(train)
    return train[: config.rows], held_out


@lru_cache(maxsize=2)
def order_of_epoch(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def batch_of_step(items: Sequence[Any], step: int, size: int, seed: int) -> tuple[int, list[Any]]:
    """Epoch and items of a step: a function of its number, so that resuming needs nothing else."""
    places = [divmod(position, len(items)) for position in range(step * size, (step + 1) * size)]
    return places[0][0], [items[order_of_epoch(len(items), seed, e)[i]] for e, i in places]


Message = dict[str, str]


def messages_of(transcript: str) -> list[Message] | None:
    """The turns of a "\\n\\nHuman: ...\\n\\nAssistant: ..."; None when it is no such transcript."""
    opening, *parts = re.split(r"\n\n(Human|Assistant):", "\n\n" + transcript.lstrip())
    roles = [{"Human": "user", "Assistant": "assistant"}[part] for part in parts[0::2]]
    texts = [part.strip() for part in parts[1::2]]
    if opening or not all(texts) or roles[:1] != ["user"] or roles[-2:] != ["user", "assistant"]:
        return None
    return [{"role": r, "content": text} for r, text in zip(roles, texts, strict=True)]


@dataclass(frozen=True)
class Pair:
    """The two answers share one list of prompt ids; each ends with the end of the turn."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def sides(self) -> list[list[int]]:
        return [self.prompt + self.chosen, self.prompt + self.rejected]


def encode_pairs(tokenizer: Any, rows: Sequence[Row], limit: int) -> list[Pair]:
    """Rows as token ids, thinking off, without those that are no pair or over the limit."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    if end is None:
        stop(f"the tokenizer has no {END_OF_TURN}; set END_OF_TURN to this model's end of a turn")
    pairs, longest, no_pair = [], 0, 0
    for row in rows:
        chosen, rejected = messages_of(row["chosen"]), messages_of(row["rejected"])
        if not chosen or not rejected or chosen[:-1] != rejected[:-1] or chosen == rejected:
            no_pair += 1
            continue
        text = tokenizer.apply_chat_template(
            chosen[:-1], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        # Prompt and answers are encoded apart: the prompt's ids must not depend on what follows.
        prompt, *answers = [
            tokenizer.encode(part, add_special_tokens=False)
            for part in (text, chosen[-1]["content"], rejected[-1]["content"])
        ]
        pair = Pair(prompt, answers[0] + [end], answers[1] + [end])
        length = max(len(side) for side in pair.sides)
        longest = max(longest, length)
        if length <= limit:
            pairs.append(pair)
    too_long = len(rows) - no_pair - len(pairs)
    reasons = [
        f"{too_long} of {len(rows)} pairs are longer than --max-length {limit}, the longest "
        f"{longest}",
        f"{no_pair} of {len(rows)} rows are no two different answers to one conversation",
    ]
    line = "; ".join(reason for reason, n in zip(reasons, (too_long, no_pair), strict=True) if n)
    if not pairs:
        stop(line)
    if line:
        print(f"left out: {line}")
    return pairs


def answer_logprobs(sampler: trio.SamplingClient, pairs: Sequence[Pair]) -> list[float]:
    """Log-probability of each answer, chosen and rejected by turns, summed over its tokens."""
    sides = [(side, len(pair.prompt)) for pair in pairs for side in pair.sides]
    # All requests are under way before the first answer is waited for.
    futures = [sampler.compute_logprobs(trio.ModelInput.from_ints(side)) for side, _ in sides]
    sums = []
    for (side, start), future in zip(sides, futures, strict=True):
        logprobs = future.result()
        assert len(logprobs) == len(side), f"{len(logprobs)} logprobs for {len(side)} tokens"
        values = [value for value in logprobs[start:] if value is not None]
        assert len(values) == len(side) - start, f"{len(values)} of {len(side) - start} logprobs"
        sums.append(math.fsum(values))
    return sums


def key_of(base_model: str, side: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps([base_model, list(side)]).encode()).hexdigest()[:24]


def add_references(
    base: trio.SamplingClient, pairs: Sequence[Pair], config: Config
) -> dict[str, float]:
    """Log-probability of every answer under the base model, by `key_of`: the very ids that are
    trained, scored once and kept in reference.jsonl, which is added to as scores arrive."""
    path = config.run_dir / "reference.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    # A line that was being written when the run was killed has no closing brace.
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    known = {row["key"]: row["logprob"] for row in rows}
    missing = {}
    for pair in pairs:
        keys = [key_of(config.base_model, side) for side in pair.sides]
        if not all(key in known for key in keys):
            missing[tuple(keys)] = pair
    for start in tqdm(range(0, len(missing), 16), desc="reference", disable=None):
        part = list(missing.values())[start : start + 16]
        keys = [key_of(config.base_model, side) for pair in part for side in pair.sides]
        scores = dict(zip(keys, answer_logprobs(base, part), strict=True))
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps({"key": k, "logprob": v}) + "\n" for k, v in scores.items())
        known |= scores
    return known


def references_of(known: dict[str, float], pairs: Sequence[Pair], config: Config) -> list[float]:
    return [known[key_of(config.base_model, side)] for pair in pairs for side in pair.sides]


def build_datum(side: Sequence[int]) -> trio.Datum:
    """Position t of the input predicts token t + 1. What counts is decided in the loss."""
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(side[:-1]),
        loss_fn_inputs={"target_tokens": side[1:]},
    )


def accuracy_of(margins: Sequence[float]) -> float:
    return fmean(0.5 if abs(margin) < TIE else float(margin > 0) for margin in margins)


class FirstLossError(ValueError):
    """Policy and reference differ before anything was trained."""


def make_loss(
    pairs: Sequence[Pair], references: Sequence[float], beta: float, is_first: bool
) -> Callable[[list[trio.Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]:
    """The loss of one batch for `forward_backward_custom`: pure, quick, no call of the SDK."""
    # Among the targets an answer begins one place before its place among the tokens.
    starts = [len(pair.prompt) - 1 for pair in pairs for _ in pair.sides]
    lengths = [len(answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]

    def dpo(
        data: list[trio.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        assert len(logprobs) == len(references), f"{len(logprobs)} data, {len(references)} scores"
        sums = []
        for values, start, length in zip(logprobs, starts, lengths, strict=True):
            answer = values[start:]
            assert len(answer) == length, f"{len(answer)} logprobs for {length} answer tokens"
            sums.append(answer.sum())
        rewards = beta * (torch.stack(sums) - torch.tensor(references))
        chosen, rejected = rewards[0::2], rewards[1::2]
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        if is_first and abs(loss.item() - math.log(2)) > FIRST_LOSS_TOLERANCE:
            raise FirstLossError(
                f"the first loss is {loss.item():.4f}, not ln 2 = 0.6931: policy and reference "
                "differ before training. Nothing was trained; --fresh scores the reference again"
            )
        return loss, {
            "dpo/loss": loss.item(),
            "dpo/accuracy": accuracy_of((chosen - rejected).tolist()),
            "dpo/margin": (chosen - rejected).mean().item(),
            "dpo/chosen_reward": chosen.mean().item(),
            "dpo/rejected_reward": rejected.mean().item(),
        }

    return dpo


def evaluate(
    sampler: trio.SamplingClient, pairs: Sequence[Pair], references: Sequence[float], config: Config
) -> dict[str, float]:
    """Held-out pairs by the trained margin, and greedy answers to their prompts; base and trained
    weights go through this."""
    greedy = trio.SamplingParams(max_tokens=config.max_tokens, temperature=0.0, stop=[END_OF_TURN])
    futures = [sampler.sample(trio.ModelInput.from_ints(p.prompt), 1, greedy) for p in pairs]
    scores = answer_logprobs(sampler, pairs)
    answers = [future.result().sequences[0] for future in futures]
    rewards = [config.beta * (pi - ref) for pi, ref in zip(scores, references, strict=True)]
    margins = [c - r for c, r in zip(rewards[0::2], rewards[1::2], strict=True)]
    return {
        "accuracy": accuracy_of(margins),
        "margin": round(fmean(margins), 6),
        "items": len(pairs),
        "answer_tokens": fmean(len(answer.tokens) for answer in answers),
        "truncated": fmean(answer.stop_reason == "length" for answer in answers),
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
    pairs: list[Pair],
    known: dict[str, float],
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
        epoch, batch = batch_of_step(pairs, step - 1, config.pairs_per_step, config.seed)
        data = [build_datum(side) for pair in batch for side in pair.sides]
        references = references_of(known, batch, config)
        loss_fn = make_loss(batch, references, config.beta, is_first=step == 1)
        try:
            # Returns when the loss was computed here and its backward pass is submitted.
            backward = training.forward_backward_custom(data, loss_fn)
        except FirstLossError as error:
            stop(str(error))
        update = training.optim_step(adam)
        metrics = {k: v for k, v in backward.result().metrics.items() if k.startswith("dpo/")}
        update.result()
        metrics |= {"epoch": epoch, "learning_rate": config.learning_rate}
        metrics |= {"datums": len(data), "data/pairs": len(batch)}
        metrics["data/tokens"] = sum(len(side) for pair in batch for side in pair.sides)
        metrics["time/step_seconds"] = time.monotonic() - start
        row = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        log(config, {"step": step, **row})
        bar.write(
            f"step {step:3d}/{config.steps}  loss {metrics['dpo/loss']:.4f}"
            f"  accuracy {metrics['dpo/accuracy']:.2f}  margin {metrics['dpo/margin']:.3f}"
            f"  chosen {metrics['dpo/chosen_reward']:.3f}"
            f"  rejected {metrics['dpo/rejected_reward']:.3f}"
        )
        if step % config.save_every == 0 or step == config.steps:
            # The state file is written last: it never names a step that is not saved.
            path = training.save_state(f"step-{step}", overwrite=True).result().path
            state |= {"step": step, "checkpoint": path, "weights": None}
            state |= {"epoch": epoch, "cursor": step * config.pairs_per_step}
            state["eval"].pop("trained", None)
            save_run_state(config, state)
    saved = training.save_weights_for_sampler(f"{NAME}-step-{state['step']}")
    state["weights"] = saved.result().path
    save_run_state(config, state)


def main(config: Config) -> None:
    check_config(config)
    train_rows, held_out_rows = load_rows(config)
    state = open_run(config, train_rows + held_out_rows)
    if config.fresh:
        (config.run_dir / "reference.jsonl").unlink(missing_ok=True)
    results = state["eval"]
    service = trio.ServiceClient()
    open_log(config, state["step"])
    try:
        base = service.create_sampling_client(config.base_model)
        tokenizer = base.get_tokenizer()
        pairs = encode_pairs(tokenizer, train_rows, config.max_length)
        held_out = encode_pairs(tokenizer, held_out_rows, config.max_length)
        # Only what the remaining steps will train is scored, and the held-out pairs.
        ahead = range(state["step"], config.steps)
        batches = [batch_of_step(pairs, s, config.pairs_per_step, config.seed)[1] for s in ahead]
        needed = [pair for batch in batches for pair in batch]
        known = add_references(base, needed + held_out, config)
        references = references_of(known, held_out, config)
        if config.eval_base and "base" not in results:
            results["base"] = evaluate(base, held_out, references, config)
            save_run_state(config, state)
        if state["step"] < config.steps or not state["weights"]:
            train(service, pairs, known, config, state)
        if "trained" not in results:
            tuned = service.create_sampling_client(config.base_model, model_path=state["weights"])
            results["trained"] = evaluate(tuned, held_out, references, config)
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
