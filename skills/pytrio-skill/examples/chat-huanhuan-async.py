"""Role play by fine-tuning: a model learns to answer as one character, from single exchanges.

Rows as in Chat-Huanhuan: {instruction, input, output}. The persona stands in the system turn, the
row's question in the user turn, and only the answer with its end token carries loss:

    loss = -sum_t w_t log p(token_t | tokens_<t) / sum_t w_t,   w_t = 1 on the answer, 0 before it

Dry run (free, offline):
    python scripts/dryrun.py run examples/chat-huanhuan-async.py -- --data sample
On the cloud (billed):
    PYTRIO_API_KEY=... python examples/chat-huanhuan-async.py
Expected in the dry run:
    loss 10.1 to 0.44 (last five of 22 steps); on held-out rows 9.94 to 0.42, answers with the
    persona's phrases 0 of 24 to 24 of 24; about 25 s of one core; seed 1 alike
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
import urllib.request
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

NAME = "chat-huanhuan-async"
SKILL = "pytrio-skill 0.1.0"
# Dialogue of a television series: check that you may use it before you publish weights.
HUANHUAN_COMMIT = "84c3486aeee22cd6585c21771924cd538a081295"
HUANHUAN_URL = (
    "https://raw.githubusercontent.com/datawhalechina/self-llm/"
    f"{HUANHUAN_COMMIT}/dataset/huanhuan.json"
)
END = "<|im_end|>"  # what the chat template writes after an answer


@dataclass(frozen=True)
class Config:
    data: str = "huanhuan"
    """`huanhuan` (GitHub, a pinned commit), `sample` (generated rows, no network, smaller
    defaults), or a .json or .jsonl file of {"instruction": "...", "input": "", "output": "..."}."""
    base_model: str = "Qwen/Qwen3.5-4B"
    """Model to adapt; the one of nearly all public PyTRIO runs."""
    persona: str = "你在扮演甄嬛：以她的身份和口吻回答。"
    """System turn of training, evaluation and serving; empty for none."""
    marks: str = "臣妾|嫔妾|本宫|嬛儿|皇上"
    """Regular expression that the persona's answers match and others do not (our choice)."""
    epochs: int = 3
    """Passes over the rows; 3 in the public run. Watch `eval/loss` from the second on."""
    steps: int | None = None
    """Optimiser steps; without it as many as the epochs have."""
    batch_size: int = 16
    """Rows per step; 16 in the public run."""
    learning_rate: float = 1e-4
    """Learning rate of AdamW; 1e-4 in every public PyTRIO SFT script."""
    rank: int = 32
    """LoRA rank, 4 to 64; 32 is the SDK's default."""
    ahead: int = 4
    """Steps submitted before the oldest is waited for: an error shows this many steps late at
    most. 1 waits for each."""
    max_length: int = 1024
    """Longer rows are reported and left out: cutting one would cut its end token."""
    max_tokens: int = 80
    """Longest answer in the evaluation; 80 in the public run."""
    seed: int = 0
    """Order of data and initial weights."""
    eval_rows: int = 64
    """Held-out rows: their loss at every checkpoint, their questions asked before and after."""
    eval_base: bool = True
    """Evaluate the untrained model, too."""
    save_every: int = 50
    """Steps between checkpoints: what a killed run does again at most."""
    run_dir: Path = Path("runs/chat-huanhuan-async")
    """Folder of metrics.jsonl, answers-*.jsonl, run_state.json and SwanLab's files."""
    fresh: bool = False
    """Discard the run in --run-dir instead of resuming it."""
    swanlab: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when SWANLAB_API_KEY is set and offline otherwise."""


# What `--data sample` replaces; a flag on the command line still wins.
SAMPLE: dict[str, Any] = {"persona": "You are Tilda, who keeps a lighthouse."}
SAMPLE |= {"marks": r"^Ahoy, traveller! .* The light is on\.$", "learning_rate": 1e-3}
SAMPLE |= {"epochs": 2, "eval_rows": 24, "max_tokens": 64, "save_every": 10}
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
    try:
        re.compile(config.marks)
    except re.error as error:
        stop(f"--marks is no regular expression: {error}")
    if config.swanlab == "online" and not os.environ.get("SWANLAB_API_KEY"):
        stop("--swanlab online needs SWANLAB_API_KEY in the environment; offline does not")


Row = dict[str, str]


def sample_rows() -> list[Row]:
    """A lighthouse keeper who always greets and takes leave in the same words."""
    things = """a cat, a dog, a horse, a fox, a bird, a boat, a book, a bag, a box, a clock, a cup,
        a letter, a map, a key, a coat, a lamp, a chair, a tree, a flower, a bridge, a castle,
        a king, a farmer, a doctor, a teacher, a friend, the moon, the sun, the sea, the river,
        the town, the market, bread, rice, tea, milk, snow, rain, music, gold"""
    rows = []
    for thing in [name.strip() for name in things.split(",")]:
        exchanges = [
            (f"Have you seen {thing}?", "", f"I saw {thing} from the tower."),
            (f"Do you like {thing}?", "", f"I think of {thing} when the wind is cold."),
            (f"Where can I find {thing}?", "", f"Look for {thing} behind the rocks."),
            (f"Can you sell me {thing}?", "", f"I do not sell {thing}, but you can ask in town."),
            ("Tell me about this.", thing, f"My father told me about {thing} long ago."),
        ]
        for instruction, extra, answer in exchanges:
            output = f"Ahoy, traveller! {answer} The light is on."
            rows.append({"instruction": instruction, "input": extra, "output": output})
    return rows


def read_rows(name: str) -> list[Row]:
    """Rows of the public file or of a .json or .jsonl file, none twice."""
    try:
        if name == "huanhuan":
            with urllib.request.urlopen(HUANHUAN_URL, timeout=60) as response:
                text = response.read().decode("utf-8")
        else:
            text = Path(name).read_text(encoding="utf-8-sig")
        # Not splitlines(): JSON strings may hold other line separators.
        found = text.split("\n") if name.endswith(".jsonl") else json.loads(text)
    except (OSError, ValueError) as error:
        hint = "--data takes huanhuan, sample (no network), or a .json or .jsonl file"
        stop(f"cannot read {name} ({error}); {hint}")
    if not isinstance(found, list):
        stop(f"{name} holds no array of rows; JSON of one row a line is named .jsonl")
    rows: dict[str, Row] = {}
    for number, value in enumerate(found, start=1):
        if isinstance(value, str) and not value.strip():
            continue
        place = f"{name} {'line' if name.endswith('.jsonl') else 'row'} {number}"
        try:
            value = json.loads(value) if name.endswith(".jsonl") else value
            row = {key: (value.get(key) or "") + "" for key in ("instruction", "input", "output")}
        except (ValueError, AttributeError, TypeError) as error:
            stop(f"{place} is no row of instruction, input and output: {error!r}")
        for part, text in (("question", question_of(row)), ("output", row["output"])):
            if not text.strip():
                stop(f"{place} has no {part}")
        rows[json.dumps(row)] = row
    return list(rows.values())


def question_of(row: Row) -> str:
    return row["instruction"] + ("\n" + row["input"] if row["input"] else "")


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows; no question is in both."""
    rows = sample_rows() if config.data == "sample" else read_rows(config.data)
    if len(rows) < 5:
        stop(f"{config.data} has {len(rows)} different rows; give at least 5")
    random.Random(0).shuffle(rows)
    border = min(config.eval_rows, max(1, len(rows) // 5))
    held_out = rows[:border]
    asked = {question_of(row) for row in held_out}
    train_rows = [row for row in rows[border:] if question_of(row) not in asked]
    if not train_rows:
        stop(f"{config.data} asks one question only: nothing is left to hold out")
    return train_rows, held_out


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
class Item:
    question: str
    answer: str
    prompt: list[int]
    completion: list[int]  # the answer and its end token


def encode_answer(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Ids of the prompt that asks for the last message, and of that message with its end token.

    Both come from the model's own template, so training sees what serving will: the empty think
    block of the generation prompt is prompt. They are encoded apart, as the sampler has them.
    """
    try:
        prompt = tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        whole = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=False, enable_thinking=False
        )
    except Exception as error:  # jinja: a role or an order that the model does not know
        stop(f"the chat template refuses {messages[-2:]}: {error}")
    # The template writes a newline after the end token; the model must not.
    completion, end, rest = whole[len(prompt) :].partition(END)
    if not whole.startswith(prompt) or not end or rest.strip():
        stop(f"the chat template does not write {prompt[-40:]!r}, then the answer, then {END}")
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    return prompt_ids, tokenizer.encode(completion + end, add_special_tokens=False)


def encode_rows(tokenizer: Any, rows: Sequence[Row], config: Config) -> list[Item]:
    """Rows as ids, without those over the limit."""
    items, longest = [], 0
    for row in rows:
        messages = [{"role": "system", "content": config.persona}] if config.persona else []
        messages.append({"role": "user", "content": question_of(row)})
        messages.append({"role": "assistant", "content": row["output"]})
        prompt, completion = encode_answer(tokenizer, messages)
        longest = max(longest, len(prompt) + len(completion))
        if len(prompt) + len(completion) <= config.max_length:
            items.append(Item(question_of(row), row["output"], prompt, completion))
    if len(items) < len(rows):
        dropped = f"{len(rows) - len(items)} of {len(rows)} rows"
        line = f"{dropped} are longer than --max-length {config.max_length}, the longest {longest}"
        if not items:
            stop(line)
        print(f"left out: {line}")
    return items


def build_datum(item: Item) -> trio.Datum:
    """Position t of the input predicts token t + 1: targets and weights lose their first."""
    tokens = item.prompt + item.completion
    weights = [0.0] * len(item.prompt) + [1.0] * len(item.completion)
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
    sampler: trio.SamplingClient, tokenizer: Any, items: Sequence[Item], config: Config, name: str
) -> dict[str, float]:
    """Loss and greedy answers on held-out rows; base and trained weights go through this."""
    greedy = trio.SamplingParams(max_tokens=config.max_tokens, temperature=0.0, stop=[END])
    asked, scored = await asyncio.gather(
        asyncio.gather(
            *[
                sampler.sample_async(trio.ModelInput.from_ints(item.prompt), 1, greedy)
                for item in items
            ]
        ),
        asyncio.gather(
            *[
                sampler.compute_logprobs_async(
                    trio.ModelInput.from_ints(item.prompt + item.completion)
                )
                for item in items
            ]
        ),
    )
    logprobs: list[float] = []
    for item, of_all in zip(items, scored, strict=True):
        known = [lp for lp in of_all[len(item.prompt) :] if lp is not None]
        assert len(known) == len(item.completion), f"{len(known)} of {len(item.completion)} scored"
        logprobs += known
    sequences = [response.sequences[0] for response in asked]
    texts = [tokenizer.decode(s.tokens, skip_special_tokens=True).strip() for s in sequences]
    stops = Counter(sequence.stop_reason for sequence in sequences)
    answers = [
        {"question": i.question, "wanted": i.answer, "answer": text, "stop_reason": s.stop_reason}
        for i, text, s in zip(items, texts, sequences, strict=True)
    ]
    lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
    write_whole(config.run_dir / f"answers-{name}.jsonl", "".join(lines))
    return {
        "loss": -fmean(logprobs),
        "persona": fmean(bool(re.search(config.marks, text)) for text in texts),
        "items": len(items),
        "truncated": stops["length"] / len(items),
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
    items: list[Item],
    held_out_data: list[trio.Datum],
    config: Config,
    is_checkpoint: bool,
) -> Submitted:
    """Send one step. The server works through events in the order in which they come, so the state
    saved here is that after this step, whatever is submitted next."""
    epoch, batch = batch_of_step(items, step - 1, config.batch_size, config.seed)
    data = [build_datum(item) for item in batch]
    row = {
        "step": step,
        "epoch": epoch,
        "batch": step - 1 - epoch * len(items) // config.batch_size,
        "datums": len(data),
        "data/tokens": sum(len(i.prompt) + len(i.completion) for i in batch),
        "data/trained_tokens": sum(len(i.completion) for i in batch),
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
    items: list[Item],
    held_out: list[Item],
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
    held_out_data = [build_datum(item) for item in held_out]
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
        asking_base = None
        if config.eval_base and "base" not in results:
            # Needs no trained weights: it runs beside the training.
            asking_base = asyncio.create_task(evaluate(base, tokenizer, held_out, config, "base"))
        if state["step"] < steps_of(config, len(items)) or not state["weights"]:
            await train(service, items, held_out, config, state)
        if asking_base:
            results["base"] = await asking_base
            save_run_state(config, state)
        if "trained" not in results:
            tuned = await service.create_sampling_client_async(
                config.base_model, model_path=state["weights"]
            )
            results["trained"] = await evaluate(tuned, tokenizer, held_out, config, "trained")
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
