"""Distillation by fine-tuning on a teacher's conversations: every answer of every one is trained.

Rows {"messages": [{"role", "content"}, ...]} whose assistant messages hold the teacher's thinking,
<think>...</think>, and its answer. Chat templates drop the thinking of earlier turns, so what turn
2 is asked with is not what turn 1 ended with; each answer is trained after the prompt that serving
will give it, in the same sequence as the turn before only where the ids go on unchanged:

    loss = -sum_t w_t log p(token_t | tokens_<t) / sum_t w_t,   w_t = 1 on every answer

Dry run (free, offline):
    python scripts/dryrun.py run examples/sft-distill-conversation-async.py -- --data sample
On the cloud (billed):
    PYTRIO_API_KEY=... python examples/sft-distill-conversation-async.py
Expected in the dry run:
    loss 3.3 to 0.12 (last five of 17 steps); on held-out turns 3.10 to 0.10, closed thinking 0.69
    to 1.00, the teacher's answer 0.00 to 0.56; about 25 s of one core; seed 1: 2.9 to 0.15, 0.53
`--ahead` steps are submitted before the oldest is waited for, so that the server never waits for
this side, and the untrained model is asked while training goes on. The order of events, and so the
weights, are those of the version without async.
An interrupted run continues when the same command is given again.
"""

import asyncio
import hashlib
import importlib
import json
import math
import os
import random
import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NoReturn

import pytrio as trio
import tyro
from tqdm import tqdm

NAME = "sft-distill-conversation-async"
SKILL = "pytrio-skill 0.1.0"
HUB_DATA = "angrygiraffe/claude-opus-4.6-4.7-reasoning-8.7k"
HUB_REVISION: str | None = None  # no tested commit: set the one you train on
END = "<|im_end|>"  # what the chat template writes after an answer
# Thinking first, then an answer, and nothing that could be taken for the template's own marks.
THOUGHT_OUT = re.compile(r"\s*<think>(?P<thinking>.+?)</think>(?P<answer>.+)", re.DOTALL)
MARKS = re.compile(r"</?think>|<\|im_(start|end)\|>")


@dataclass(frozen=True)
class Config:
    data: str = "hub"
    """`hub` (HUB_DATA on the Hugging Face hub), `sample` (generated rows, no network, smaller
    defaults), or a .jsonl file of {"messages": [{"role": "user", "content": "..."}, ...]}."""
    base_model: str = "Qwen/Qwen3.5-4B"
    """Model to adapt; the one of nearly all public PyTRIO runs."""
    epochs: int = 1
    """Passes over the conversations; 1 in the public script."""
    steps: int | None = None
    """Optimiser steps; without it as many as the epochs have."""
    batch_size: int = 4
    """Conversations per step; 4 in the public script."""
    learning_rate: float = 1e-4
    """Learning rate of AdamW; 1e-4 in every public PyTRIO SFT script."""
    rank: int = 32
    """LoRA rank, 4 to 64; 32 is the SDK's default."""
    ahead: int = 4
    """Steps submitted before the oldest is waited for: an error shows this many steps late at
    most. 1 waits for each."""
    max_length: int = 4096
    """Longer turns (prompt and answer) are reported and left out; 4096 in the public script, which
    cuts them and with them their end tokens."""
    max_tokens: int = 1024
    """Longest answer in the evaluation. Raise it when `truncated` is above 0.1."""
    seed: int = 0
    """Order of data and initial weights."""
    eval_rows: int = 32
    """Held-out conversations: their loss at every checkpoint, each turn asked before and after."""
    eval_base: bool = True
    """Evaluate the untrained model, too."""
    save_every: int = 100
    """Steps between checkpoints: what a killed run does again at most."""
    run_dir: Path = Path("runs/sft-distill-conversation-async")
    """Folder of metrics.jsonl, answers-*.jsonl, run_state.json and SwanLab's files."""
    fresh: bool = False
    """Discard the run in --run-dir instead of resuming it."""
    swanlab: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when SWANLAB_API_KEY is set and offline otherwise."""


# What `--data sample` replaces; a flag on the command line still wins.
SAMPLE: dict[str, Any] = {"learning_rate": 1e-3, "batch_size": 8, "epochs": 1, "eval_rows": 16}
SAMPLE |= {"max_tokens": 64, "save_every": 10}
# What may differ when a run is resumed; any other change makes it another run.
FREE_TO_CHANGE = {
    "epochs",
    "steps",
    "save_every",
    "ahead",
    "run_dir",
    "fresh",
    "swanlab",
    "eval_base",
}


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


Message = dict[str, str]
Row = list[Message]


def sample_rows(count: int) -> list[Row]:
    """Sums, the second and third of which need the answer before; some rows lack the thinking."""
    rng = random.Random(0)
    rows: dict[str, Row] = {}
    while len(rows) < count:
        row = [{"role": "system", "content": "Answer briefly."}] if rng.random() < 0.3 else []
        value, added = rng.randint(2, 20), rng.randint(2, 9)
        question = f"What is {value} + {added}?"
        is_thought_out = rng.random() < 0.9
        for _ in range(rng.randint(1, 3)):
            thinking = f"<think>\n{value} + {added} = {value + added}.\n</think>\n\n"
            answer = f"It is {value + added}."
            row.append({"role": "user", "content": question})
            row.append({"role": "assistant", "content": thinking * is_thought_out + answer})
            value, added = value + added, rng.randint(2, 9)
            question = f"Add {added} to that."
        rows[json.dumps(row)] = row
    return list(rows.values())


def check_messages(messages: Any, name: str) -> Row:
    """Roles and contents of a conversation. Raises SystemExit where it has no answer to train."""
    try:
        row = [{key: message[key] + "" for key in ("role", "content")} for message in messages]
    except (KeyError, TypeError) as error:
        stop(f"{name} is no row of messages with role and content: {error!r}")
    if not any(m["role"] == "assistant" and m["content"].strip() for m in row):
        stop(f"{name} has no assistant message with an answer")
    return row


def read_jsonl(path: Path) -> list[Row]:
    """Conversations of a file, none twice."""
    rows: dict[str, Row] = {}
    try:
        # Not splitlines(): JSON strings may hold other line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {path} ({error}); --data takes hub, sample or a .jsonl file")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                messages = json.loads(line)["messages"]
            except (ValueError, KeyError, TypeError) as error:
                stop(f"{path} line {number} is no row of messages: {error!r}")
            row = check_messages(messages, f"{path} line {number}")
            rows[json.dumps(row)] = row
    return list(rows.values())


def read_hub() -> list[Row]:
    try:
        from datasets import load_dataset

        split = load_dataset(HUB_DATA, split="train", revision=HUB_REVISION)
    except Exception as error:  # no package, no network, no such revision
        reason = (str(error) or repr(error)).splitlines()[0]
        stop(f"cannot load {HUB_DATA} ({reason}); --data sample needs no network")
    rows = [check_messages(r["messages"], f"{HUB_DATA} row {n}") for n, r in enumerate(split)]
    return list({json.dumps(row): row for row in rows}.values())


def is_thought_out(row: Row) -> bool:
    """Whether every answer has one complete think block before it, and no message fakes a mark."""
    for message in row:
        parts = [message["content"]]
        if message["role"] == "assistant":
            found = THOUGHT_OUT.fullmatch(message["content"])
            parts = [found["thinking"], found["answer"]] if found else [""]
        if any(MARKS.search(part) or not part.strip() for part in parts):
            return False
    return True


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """Training and held-out conversations; no first question is in both."""
    if config.data == "sample":
        found = sample_rows(160 + config.eval_rows)
    else:
        found = read_hub() if config.data == "hub" else read_jsonl(Path(config.data))
    rows = [row for row in found if is_thought_out(row)]
    if len(rows) < 5:
        line = f"{config.data} has {len(found)} different conversations"
        stop(f"{line}, {len(rows)} of them with complete thinking; give at least 5")
    if len(rows) < len(found):
        print(f"left out: {len(found) - len(rows)} of {len(found)} without complete thinking")
    random.Random(0).shuffle(rows)
    border = min(config.eval_rows, max(1, len(rows) // 5))
    held_out = rows[:border]
    asked = {first_question(row) for row in held_out}
    train_rows = [row for row in rows[border:] if first_question(row) not in asked]
    if not train_rows:
        stop(f"{config.data} asks one first question only: nothing is left to hold out")
    return train_rows, held_out


def first_question(row: Row) -> str:
    return next((m["content"] for m in row if m["role"] == "user"), "")


@lru_cache(maxsize=2)
def order_of_epoch(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def batch_of_step(items: Sequence[Any], step: int, size: int, seed: int) -> tuple[int, list[Any]]:
    """Epoch and items of a step: a function of its number, so that resuming needs nothing else.

    The last rows of an epoch share a batch with the first of the next: none is left out.
    """
    places = [divmod(position, len(items)) for position in range(step * size, (step + 1) * size)]
    return places[0][0], [items[order_of_epoch(len(items), seed, e)[i]] for e, i in places]


@dataclass(frozen=True)
class Turn:
    question: str
    prompt: list[int]  # everything before the answer, as the template writes it when serving
    completion: list[int]  # thinking, answer and end token


def encode_answer(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Ids of the prompt that asks for the last message, and of that message with its end token.

    Both come from the model's own template, so training sees what serving will: earlier turns
    without their thinking, and `<think>` in the prompt where the generation prompt opens it. They
    are encoded apart, as the sampler has them.
    """
    try:
        prompt = tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        whole = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=False, enable_thinking=True
        )
    except Exception as error:  # jinja: a role or an order that the model does not know
        stop(f"the chat template refuses {messages[-2:]}: {error}")
    # The template writes a newline after the end token; the model must not.
    completion, end, rest = whole[len(prompt) :].partition(END)
    if not whole.startswith(prompt) or not end or rest.strip():
        stop(f"the chat template does not write {prompt[-40:]!r}, then the answer, then {END}")
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    return prompt_ids, tokenizer.encode(completion + end, add_special_tokens=False)


def encode_rows(tokenizer: Any, rows: Sequence[Row], config: Config) -> list[list[Turn]]:
    """The assistant turns of every conversation, without those over the limit."""
    conversations, dropped, count, longest = [], 0, 0, 0
    for row in rows:
        turns = []
        for index, message in enumerate(row):
            if message["role"] == "assistant":
                prompt, completion = encode_answer(tokenizer, row[: index + 1])
                length = len(prompt) + len(completion)
                longest, count = max(longest, length), count + 1
                if length <= config.max_length:
                    turns.append(Turn(row[index - 1]["content"], prompt, completion))
                else:
                    dropped += 1
        if turns:
            conversations.append(turns)
    if dropped:
        line = f"{dropped} of {count} turns are longer than --max-length {config.max_length}"
        line += f", the longest {longest}"
        if not conversations:
            stop(line)
        print(f"left out: {line}")
    return conversations


def build_data(turns: Sequence[Turn]) -> list[trio.Datum]:
    """The turns of one conversation: one datum as long as each prompt continues the ids before it,
    a new one where the template changed the history."""
    sequences: list[tuple[list[int], list[float]]] = []
    for turn in turns:
        if not sequences or turn.prompt[: len(sequences[-1][0])] != sequences[-1][0]:
            sequences.append(([], []))
        tokens, weights = sequences[-1]
        between = turn.prompt[len(tokens) :]
        tokens += between + turn.completion
        weights += [0.0] * len(between) + [1.0] * len(turn.completion)
    return [build_datum(tokens, weights) for tokens, weights in sequences]


def build_datum(tokens: list[int], weights: list[float]) -> trio.Datum:
    """Position t of the input predicts token t + 1: targets and weights lose their first."""
    assert len(tokens) == len(weights), f"{len(tokens)} tokens, {len(weights)} weights"
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def loss_per_token(data: Sequence[trio.Datum], output: Any) -> float:
    """Mean negative log-probability of the trained tokens, whatever the server divides by."""
    total, count = 0.0, 0.0
    for datum, result in zip(data, output.loss_fn_outputs, strict=True):
        logprobs = result["logprobs"].tolist()
        weights = datum.loss_fn_inputs["weights"].tolist()
        assert len(logprobs) == len(weights), f"{len(logprobs)} logprobs, {len(weights)} weights"
        total -= sum(w * lp for w, lp in zip(weights, logprobs, strict=True))
        count += sum(weights)
    return total / count


async def evaluate(
    sampler: trio.SamplingClient, tokenizer: Any, turns: Sequence[Turn], config: Config, name: str
) -> dict[str, float]:
    """Loss and greedy answers of held-out turns, each after the teacher's own history; base and
    trained weights go through this."""
    greedy = trio.SamplingParams(max_tokens=config.max_tokens, temperature=0.0, stop=[END])
    asked, scored = await asyncio.gather(
        asyncio.gather(
            *[
                sampler.sample_async(trio.ModelInput.from_ints(turn.prompt), 1, greedy)
                for turn in turns
            ]
        ),
        asyncio.gather(
            *[
                sampler.compute_logprobs_async(
                    trio.ModelInput.from_ints(turn.prompt + turn.completion)
                )
                for turn in turns
            ]
        ),
    )
    logprobs: list[float] = []
    for turn, of_all in zip(turns, scored, strict=True):
        known = [lp for lp in of_all[len(turn.prompt) :] if lp is not None]
        assert len(known) == len(turn.completion), f"{len(known)} of {len(turn.completion)} scored"
        logprobs += known
    sequences = [response.sequences[0] for response in asked]
    answers = []
    for turn, sequence in zip(turns, sequences, strict=True):
        wanted = tokenizer.decode(turn.completion, skip_special_tokens=True).strip()
        answer = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
        answers.append({"question": turn.question, "wanted": wanted, "answer": answer})
        answers[-1]["stop_reason"] = sequence.stop_reason
    lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
    write_whole(config.run_dir / f"answers-{name}.jsonl", "".join(lines))
    spoken = [
        (a["wanted"].rpartition("</think>"), a["answer"].rpartition("</think>")) for a in answers
    ]
    stops = Counter(sequence.stop_reason for sequence in sequences)
    return {
        "loss": -fmean(logprobs),
        # A think block that is closed, and an answer after it.
        "format": fmean(bool(closed and said.strip()) for _, (_, closed, said) in spoken),
        # Word for word the teacher's answer; near 0 for prose, whatever was learnt.
        "agreement": fmean(wanted[2].strip() == got[2].strip() for wanted, got in spoken),
        "items": len(turns),
        "truncated": stops["length"] / len(turns),
        **{f"stop_{reason}": count for reason, count in stops.items()},
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


@dataclass(frozen=True)
class Submitted:
    """What is under way for one step: futures that `settle` waits for."""

    row: dict[str, Any]
    data: list[trio.Datum]
    backward: Any
    update: Any
    held_out_pass: Any = None
    saving: Any = None


async def submit(
    training: trio.TrainingClient,
    step: int,
    items: list[list[Turn]],
    held_out_data: list[trio.Datum],
    config: Config,
    is_checkpoint: bool,
) -> Submitted:
    """Send one step. The server works through events in the order in which they come, so the state
    saved here is that after this step, whatever is submitted next."""
    epoch, batch = batch_of_step(items, step - 1, config.batch_size, config.seed)
    data = [datum for turns in batch for datum in build_data(turns)]
    row = {
        "step": step,
        "epoch": epoch,
        "batch": step - 1 - epoch * len(items) // config.batch_size,
        "datums": len(data),
        "data/tokens": sum(len(datum.model_input) for datum in data),
        "data/trained_tokens": sum(len(t.completion) for turns in batch for t in turns),
        "learning_rate": config.learning_rate,
        "time/submitted": time.time(),
    }
    adam = trio.AdamParams(learning_rate=config.learning_rate)
    # This await hands over the request and gives a future; another, in `settle`, gives its result.
    backward = await training.forward_backward_async(data, loss_fn="cross_entropy")
    update = await training.optim_step_async(adam)
    if not is_checkpoint:
        return Submitted(row, data, backward, update)
    held_out_pass = await training.forward_async(held_out_data, loss_fn="cross_entropy")
    saving = await training.save_state_async(f"step-{step}", overwrite=True)
    return Submitted(row, data, backward, update, held_out_pass, saving)


async def settle(
    submitted: Submitted, held_out_data: list[trio.Datum], config: Config, state: dict[str, Any]
) -> None:
    """Wait for one step, log it, and note its checkpoint. Raises what went wrong in it."""
    row = submitted.row
    row["loss"] = loss_per_token(submitted.data, await submitted.backward)
    await submitted.update
    if submitted.held_out_pass:
        row["eval/loss"] = loss_per_token(held_out_data, await submitted.held_out_pass)
    row["time/in_flight_seconds"] = time.time() - row.pop("time/submitted")
    log(config, row)
    held_out_loss = f"  held out {row['eval/loss']:.4f}" if submitted.held_out_pass else ""
    tqdm.write(
        f"step {row['step']:3d}  epoch {row['epoch']}  loss {row['loss']:.4f}{held_out_loss}"
    )
    if submitted.saving:
        # The state file is written last: it never names a step that is not saved and logged.
        saved = await submitted.saving
        state |= {"step": row["step"], "checkpoint": saved.path, "weights": None}
        state |= {"epoch": row["epoch"], "cursor": row["step"] * config.batch_size}
        state["eval"].pop("trained", None)
        save_run_state(config, state)


async def train(
    service: trio.ServiceClient,
    items: list[list[Turn]],
    held_out: list[list[Turn]],
    config: Config,
    state: dict[str, Any],
) -> None:
    """From the state's step to the last; afterwards the state names durable sampler weights.

    The server always has the next steps in its queue while results are fetched and logged here.
    """
    if state["checkpoint"]:
        print(f"resuming after step {state['step']} from {state['checkpoint']}")
        training = await service.create_training_client_from_state_with_optimizer_async(
            state["checkpoint"]
        )
    else:
        training = await service.create_lora_training_client_async(
            config.base_model, rank=config.rank, seed=config.seed
        )
    held_out_data = [datum for turns in held_out for datum in build_data(turns)]
    first, steps = state["step"], steps_of(config, len(items))
    waiting: deque[Submitted] = deque()
    for step in tqdm(range(first + 1, steps + 1), initial=first, total=steps, disable=None):
        if len(waiting) == config.ahead:
            await settle(waiting.popleft(), held_out_data, config, state)
        is_checkpoint = step % config.save_every == 0 or step == steps
        waiting.append(await submit(training, step, items, held_out_data, config, is_checkpoint))
    while waiting:
        await settle(waiting.popleft(), held_out_data, config, state)
    # A state holds the optimiser and cannot be sampled from; these weights can, and are kept.
    saving = await training.save_weights_for_sampler_async(f"{NAME}-step-{steps}")
    saved = await saving
    state["weights"] = saved.path
    save_run_state(config, state)


def steps_of(config: Config, rows: int) -> int:
    return config.steps or math.ceil(config.epochs * rows / config.batch_size)


async def main(config: Config) -> None:
    check_config(config)
    train_rows, held_out_rows = load_rows(config)
    state = open_run(config, train_rows + held_out_rows)
    results = state["eval"]
    service = trio.ServiceClient()
    open_log(config, state["step"])
    try:
        base = await service.create_sampling_client_async(config.base_model)
        tokenizer = base.get_tokenizer()
        items = encode_rows(tokenizer, train_rows, config)
        held_out = encode_rows(tokenizer, held_out_rows, config)
        asked = [turn for turns in held_out for turn in turns]
        asking_base = None
        if config.eval_base and "base" not in results:
            # Needs no trained weights: it runs beside the training.
            asking_base = asyncio.create_task(evaluate(base, tokenizer, asked, config, "base"))
        if state["step"] < steps_of(config, len(items)) or not state["weights"]:
            await train(service, items, held_out, config, state)
        if asking_base:
            results["base"] = await asking_base
            save_run_state(config, state)
        if "trained" not in results:
            tuned = await service.create_sampling_client_async(
                config.base_model, model_path=state["weights"]
            )
            results["trained"] = await evaluate(tuned, tokenizer, asked, config, "trained")
            save_run_state(config, state)
    finally:
        swanlab_call("finish")
    for name, result in results.items():
        numbers = "  ".join(f"{key} {value:.3g}" for key, value in result.items())
        print(f"{name:<8} greedy, held out: {numbers}")
        answers = (config.run_dir / f"answers-{name}.jsonl").read_text(encoding="utf-8")
        for answer in map(json.loads, answers.split("\n")[: min(3, int(result["items"]))]):
            print(f"         {answer['question']!r} -> {answer['answer']!r}")
    print(f"weights  {state['weights']}")


if __name__ == "__main__":
    arguments = tyro.cli(Config)
    if arguments.data == "sample":
        arguments = tyro.cli(Config, default=replace(arguments, **SAMPLE))
    asyncio.run(main(arguments))
