"""Vision GRPO on GeoQA: several answers to a question about a picture, right ones reinforced.

Paper: DeepSeekMath, arXiv:2402.03300; without the division by the deviation as in Dr. GRPO,
arXiv:2503.20783. With r_i in {0, 1} the reward of completion i of a group of G:

    A_i  = r_i - mean(r_1 ... r_G)
    loss = -sum_i sum_t ratio_it * A_i,   ratio_it = exp(logprob now - logprob when sampled)

The picture is a chunk of the model input, between the text before and after its place in the chat
template. `--sft` trains on the right answers of the same data instead.

Dry run (free, offline):
    python scripts/dryrun.py run --model '*=vl' examples/vision-grpo.py -- --data sample
On the cloud (billed):     PYTRIO_API_KEY=... python examples/vision-grpo.py
Expected in the dry run:   held-out accuracy 0.56 to 0.95 after 14 steps, with exchanged pictures
                           0.25 to 0.30 (chance), about 45 s on one core; seed 1 to 0.94
An interrupted run continues when the same command is given again.
"""

import hashlib
import importlib
import io
import json
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NoReturn

import pytrio as trio
import tyro
from PIL import Image, ImageDraw
from pytrio.types import EncodedTextChunk
from tqdm import tqdm
from transformers import AutoImageProcessor

NAME = "vision-grpo"
SKILL = "pytrio-skill 0.1.0"
HUB_DATA, HUB_REVISION = "hz2475/geoQA", "main"  # public runs did not pin it either
INSTRUCTION = "Answer with the letter in \\boxed{}."
STOP = ["<|im_end|>"]
LETTERS = "ABCD"
# What Qwen's image processors refuse, with room for making a picture smaller.
MOST_ASPECT, SMALLEST_SIDE = 100, 8


@dataclass(frozen=True)
class Config:
    data: str = "geoqa"
    """`geoqa` (Hugging Face hub), `sample` (drawn pictures, no network, smaller defaults), or a
    .jsonl file of {"image": "path", "subject": "...", "choices": [4 texts], "label": 0}."""
    sft: bool = False
    """Train on the right answers instead of rewards: the datum of multimodal fine-tuning."""
    base_model: str = "Qwen/Qwen3.5-4B"
    """Model to adapt; it must read images."""
    steps: int = 100
    """Optimiser steps; 100 in the public run."""
    prompts_per_step: int = 8
    """Questions per step; 8 in the public run."""
    group_size: int = 8
    """Completions per question; 8 in the public run."""
    learning_rate: float = 4e-5
    """Learning rate of AdamW; 4e-5 in the public run."""
    rank: int = 32
    """LoRA rank, 4 to 64; 32 is the SDK's default."""
    max_tokens: int = 1024
    """Longest completion; 1024 in the public run, 64 were too few."""
    max_prompt_tokens: int = 4096
    """Longer prompts, visual tokens included, are reported and left out."""
    max_side: int = 1024
    """Larger pictures are made smaller once, before anything else: training and evaluation see the
    same."""
    seed: int = 0
    """Order of data, initial weights. Sampling gets none: one seed repeats the same completions."""
    eval_rows: int = 100
    """Held-out questions; 100 in the public run. The standard error is 5 points at worst."""
    eval_temperature: float = 0.0
    """0 as published; 1 shows the policy that is trained."""
    eval_base: bool = True
    """Evaluate the untrained model, too."""
    save_every: int = 25
    """Steps between checkpoints: what a killed run does again at most."""
    run_dir: Path = Path("runs/vision-grpo")
    """Folder of metrics.jsonl, run_state.json and SwanLab's files."""
    fresh: bool = False
    """Discard the run in --run-dir instead of resuming it."""
    swanlab: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when SWANLAB_API_KEY is set and offline otherwise."""
    check_reward: bool = False
    """Only score a table of tricky answers; needs no model."""


# What `--data sample` replaces; a flag on the command line still wins.
SAMPLE: dict[str, Any] = {"steps": 14, "learning_rate": 4e-4, "max_tokens": 48, "eval_rows": 64}
SAMPLE |= {"eval_temperature": 1.0, "save_every": 5}
# What may differ when a run is resumed; any other change makes it another run.
FREE_TO_CHANGE = {"steps", "save_every", "run_dir", "fresh", "swanlab", "check_reward", "eval_base"}


def stop(line: str) -> NoReturn:
    """End with one line that says what is wrong and what to do."""
    raise SystemExit(f"{NAME}: {line}")


def check_config(config: Config) -> None:
    lowest = {"group_size": 2, "rank": 4, "seed": 0, "max_side": 28}
    for name, value in asdict(config).items():
        if type(value) is int and value < lowest.get(name, 1):
            flag = "--" + name.replace("_", "-")
            stop(f"{flag} must be at least {lowest.get(name, 1)}, got {value}")
    if not 0 < config.learning_rate < 1:
        stop(f"--learning-rate must be between 0 and 1, got {config.learning_rate}")
    if not 0 <= config.eval_temperature <= 2:
        stop(f"--eval-temperature must be between 0 and 2, got {config.eval_temperature}")
    if config.swanlab == "online" and not os.environ.get("SWANLAB_API_KEY"):
        stop("--swanlab online needs SWANLAB_API_KEY in the environment; offline does not")


@dataclass(frozen=True)
class Row:
    """A question about a picture; `png` is what is sent, wherever the picture came from."""

    png: bytes
    subject: str
    choices: tuple[str, ...]
    label: int


def to_png(image: Image.Image, max_side: int) -> bytes:
    """The picture on white, in RGB, no side longer than `max_side`: one resize for all uses."""
    if image.mode in ("RGBA", "LA", "P") or "transparency" in image.info:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image.convert("RGB")
    image.thumbnail((max_side, max_side))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def to_row(raw: dict[str, Any], image: Image.Image, max_side: int, place: str) -> Row:
    """Our row of a raw one. SystemExit names the place of one that is none."""
    subject, choices, label = raw.get("subject"), raw.get("choices"), raw.get("label")
    texts = list(choices) if isinstance(choices, (list, tuple)) else []
    if not isinstance(subject, str) or len(texts) != 4 or label not in (0, 1, 2, 3):
        stop(f"{place} is no row of subject, 4 choices and a label from 0 to 3")
    if max(image.size) > MOST_ASPECT * min(image.size) or min(image.size) < SMALLEST_SIDE:
        stop(f"{place} has a picture of {image.width} x {image.height}: no processor takes that")
    return Row(to_png(image, max_side), subject, tuple(map(str, texts)), int(label))


KINDS: dict[str, tuple[str, list[str]]] = {
    "colour": ("What colour is the shape?", ["red", "blue", "green", "yellow"]),
    "shape": ("What kind of shape is this?", ["circle", "square", "triangle", "star"]),
    "count": ("How many shapes are there?", ["1", "2", "3", "4"]),
    "bars": ("Which bar is the highest?", ["first", "second", "third", "fourth"]),
}
COLOURS = [(215, 40, 40), (45, 70, 215), (40, 165, 60), (235, 205, 40)]


def draw_shape(pen: ImageDraw.ImageDraw, kind: int, at: tuple[float, float], radius: float,
               colour: tuple[int, ...]) -> None:  # fmt: skip
    if kind == 0:
        pen.circle(at, radius, colour)
        return
    corners, turn = [(4, math.pi / 4), (3, 0.0), (10, 0.0)][kind - 1]
    points = []
    for i in range(corners):
        far = radius * (0.5 if corners == 10 and i % 2 else 1.2)
        angle = turn + 2 * math.pi * i / corners
        points.append((at[0] + far * math.sin(angle), at[1] - far * math.cos(angle)))
    pen.polygon(points, colour)


def sample_rows(count: int) -> list[Row]:
    """Drawn pictures of 64 x 64 in GeoQA's schema, each with a question; the choices of a kind of
    question always stand in the same order."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        kind, (subject, choices) = rng.choice(list(KINDS.items()))
        label = rng.randrange(4)
        tint = tuple(rng.randint(226, 254) for _ in range(3))
        image = Image.new("RGB", (64, 64), tint)
        pen = ImageDraw.Draw(image)
        colour: tuple[int, ...] = COLOURS[label if kind == "colour" else rng.randrange(4)]
        colour = tuple(max(0, min(255, c + rng.randint(-15, 15))) for c in colour)
        if kind in ("colour", "shape"):
            radius = rng.uniform(13, 20)
            at = rng.uniform(28, 36), rng.uniform(28, 36)
            draw_shape(pen, label if kind == "shape" else rng.randrange(4), at, radius, colour)
        elif kind == "count":
            what, places = (
                rng.randrange(4),
                rng.sample([(x, y) for x in (16, 46) for y in (16, 46)], label + 1),
            )
            for x, y in places:
                at = x + rng.uniform(-5, 5), y + rng.uniform(-5, 5)
                draw_shape(pen, what, at, rng.uniform(6, 8), colour)
        else:
            top = rng.randint(26, 46)
            for bar in range(4):
                height = top if bar == label else rng.randint(5, top - 8)
                pen.rectangle((6 + 13 * bar, 58 - height, 14 + 13 * bar, 58), fill=colour)
            pen.line((4, 58, 58, 58), (60, 60, 60))
        rows.append(Row(to_png(image, 64), subject, tuple(choices), label))
    return rows


def read_jsonl(path: Path, max_side: int) -> list[Row]:
    rows = []
    try:
        # Not splitlines(): JSON strings may hold other line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {path} ({error}); --data takes geoqa, sample or a .jsonl file")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path} line {number}"
            try:
                raw = dict(json.loads(line))
                with Image.open(path.parent / raw["image"]) as image:
                    image.load()
            except Exception as error:  # Pillow's readers raise many unrelated types
                stop(f"{place} has no readable row or image: {type(error).__name__}: {error}")
            rows.append(to_row(raw, image, max_side, place))
    return rows


def without_pictures_of(held_out: list[Row], rows: list[Row]) -> list[Row]:
    """Rows about other pictures: one figure often has several questions."""
    known = {row.png for row in held_out}
    return [row for row in rows if row.png not in known]


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows; no picture is in both."""
    if config.data == "geoqa":
        try:
            from datasets import load_dataset

            splits = load_dataset(HUB_DATA, revision=HUB_REVISION)
        except Exception as error:  # no package, no network, no such revision
            reason = (str(error) or repr(error)).splitlines()[0]
            stop(f"cannot load {HUB_DATA} ({reason}); --data sample needs no network")

        def rows_of(split: str) -> list[Row]:
            return [
                to_row(r, r["image"], config.max_side, f"{HUB_DATA} {split}") for r in splits[split]
            ]

        train, held_out = rows_of("train"), rows_of("test")
        random.Random(42).shuffle(held_out)  # as in the public run: the last 100 of this order
        held_out = held_out[-config.eval_rows :]
        return without_pictures_of(held_out, train), held_out
    if config.data == "sample":
        rows = sample_rows(256 + config.eval_rows)
    else:
        rows = read_jsonl(Path(config.data), config.max_side)
    rows = list(dict.fromkeys(rows))
    if len(rows) < 5:
        stop(f"{config.data} has {len(rows)} different questions; give at least 5")
    random.Random(0).shuffle(rows)
    border = min(config.eval_rows, max(1, len(rows) // 5))
    return without_pictures_of(rows[:border], rows[border:]), rows[:border]


@lru_cache(maxsize=2)
def order_of_epoch(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def batch_of_step(items: Sequence[Any], step: int, size: int, seed: int) -> tuple[int, list[Any]]:
    """Epoch and items of a step: a function of its number, so that resuming needs nothing else."""
    places = [divmod(position, len(items)) for position in range(step * size, (step + 1) * size)]
    return places[0][0], [items[order_of_epoch(len(items), seed, e)[i]] for e, i in places]


def reward_of(completion: str, letter: str) -> float:
    """1.0 when the last box after the thinking holds the letter, else 0.0."""
    text = completion.rpartition("</think>")[2]
    rest = text.rpartition("\\boxed")[2].lstrip() if "\\boxed" in text else ""
    content, closed, _ = rest.removeprefix("{").partition("}")
    is_box = rest.startswith("{") and bool(closed) and "<think>" not in text
    return float(is_box and content.strip().upper().strip("().") == letter)


def has_box(completion: str) -> bool:
    return bool(re.findall(r"\\boxed\s*\{\s*\(?[A-Da-d]\)?\s*\}", completion))


# How completions score when B is right.
TRICKY: dict[float, list[str]] = {
    1.0: [r"\boxed{B}", r"So \boxed{b}.", r"\boxed{ B }", r"\boxed{(B)}",
          r"\boxed{A}, no: \boxed{B}", r"<think>\boxed{A}</think>\boxed{B}"],
    0.0: ["B", r"\boxed{A}", r"\boxed{AB}", r"\boxed{}", r"\boxed{B", r"\boxed{B}, no: \boxed{A}",
          r"<think>\boxed{B}", r"\boxed{2}"],
}  # fmt: skip


def check_reward() -> None:
    for expected, texts in TRICKY.items():
        for text in texts:
            if reward_of(text, "B") != expected:
                stop(f"{text!r} for B scores {reward_of(text, 'B')}, not {expected}")


@dataclass(frozen=True)
class Item:
    """A question as it is sent: text, picture, text."""

    prompt: trio.ModelInput
    letter: str
    answer: str


@dataclass(frozen=True)
class Completion:
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    text: str
    reward: float | None  # None is neither trained on nor part of a mean


class Prompter:
    """Turns rows into prompts with the served model's own template and image processor."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # From the tokenizer's folder: another processor would count other tokens.
        self.processor = AutoImageProcessor.from_pretrained(tokenizer.name_or_path, backend="pil")
        template = tokenizer.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}]}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        marks = [m for m in ("<|image_pad|>", "<image>", "<image_soft_token>") if m in template]
        if len(marks) != 1:
            stop("the model's chat template writes no image placeholder: it does not read images")
        self.mark = marks[0]

    def visual_tokens(self, png: bytes) -> int:
        """Tokens that the picture takes: patches of its resized form, `merge_size` squared each."""
        with Image.open(io.BytesIO(png)) as image:
            read = self.processor(images=[image.convert("RGB")], return_tensors="np")
        return int(read["image_grid_thw"].prod()) // self.processor.merge_size**2

    def item(self, row: Row) -> Item:
        lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, row.choices, strict=True)]
        content = [
            {"type": "image"},
            {"type": "text", "text": "\n".join([row.subject, *lines, INSTRUCTION])},
        ]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        before, mark, after = text.partition(self.mark)
        assert mark and self.mark not in after, "one picture, one place"
        ids = [self.tokenizer.encode(part, add_special_tokens=False) for part in (before, after)]
        picture = trio.ImageChunk(
            data=row.png, format="png", expected_tokens=self.visual_tokens(row.png)
        )
        chunks = [EncodedTextChunk(tokens=ids[0]), picture, EncodedTextChunk(tokens=ids[1])]
        letter = LETTERS[row.label]
        answer = f"The answer is {row.choices[row.label]}. \\boxed{{{letter}}}"
        return Item(trio.ModelInput(chunks=chunks), letter, answer)


def encode_prompts(prompter: Prompter, rows: Sequence[Row], limit: int) -> list[Item]:
    """Rows as prompts, without those over the limit."""
    items = [prompter.item(row) for row in rows]
    kept = [item for item in items if len(item.prompt) <= limit]
    if len(kept) < len(rows):
        longest = max(len(item.prompt) for item in items)
        dropped = f"{len(rows) - len(kept)} of {len(rows)} prompts"
        line = f"{dropped} are longer than --max-prompt-tokens {limit}, the longest {longest}"
        if not kept:
            stop(line)
        print(f"left out: {line}")
    return kept


def sample(
    sampler: trio.SamplingClient,
    tokenizer: Any,
    items: Sequence[Item],
    count: int,
    params: trio.SamplingParams,
) -> list[list[Completion]]:
    """`count` judged completions of every item."""
    placeholder = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    # All requests are under way before the first answer is waited for.
    futures = [sampler.sample(item.prompt, count, params) for item in items]
    groups: list[list[Completion]] = []
    for item, future in zip(items, futures, strict=True):
        response = future.result()
        # The service counts the picture's tokens itself; another count would shift every target.
        served, local = response.input_tokens, len(item.prompt)
        assert served == local, f"the service counts {served} prompt tokens, here are {local}"
        groups.append([])
        for sequence in response.sequences:
            tokens, logprobs = sequence.tokens, sequence.logprobs
            assert len(tokens) == len(logprobs), f"{len(tokens)} tokens, {len(logprobs)} logprobs"
            text, reward = "", None
            # The model's vocabulary is padded: ids the tokenizer does not have cannot be trained,
            # nor can the placeholder of a picture without one.
            if tokens and max(tokens) < len(tokenizer) and placeholder not in tokens:
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                reward = reward_of(text, item.letter)
            groups[-1].append(Completion(tokens, logprobs, sequence.stop_reason, text, reward))
    return groups


def group_advantages(rewards: Sequence[float | None]) -> list[float]:
    """Reward minus the mean of the judged ones; all 0 for a group that teaches nothing."""
    judged = [reward for reward in rewards if reward is not None]
    if len(judged) < 2 or max(judged) - min(judged) < 1e-6:
        return [0.0] * len(rewards)
    mean = fmean(judged)
    return [0.0 if reward is None else reward - mean for reward in rewards]


def input_of(prompt: trio.ModelInput, answer: list[int]) -> trio.ModelInput:
    """The chunks of the prompt and all but the last token of the answer: the input of a datum."""
    rest = [EncodedTextChunk(tokens=answer[:-1])] if len(answer) > 1 else []
    return trio.ModelInput(chunks=[*prompt.chunks, *rest])


def build_datum(item: Item, completion: Completion, advantage: float) -> trio.Datum:
    """The prompt's P positions, visual ones included, predict nothing that is trained but the last:
    P - 1 placeholders, then the completion."""
    model_input, before = input_of(item.prompt, completion.tokens), len(item.prompt) - 1
    fields: dict[str, list[Any]] = {
        "target_tokens": [0] * before + completion.tokens,
        "logprobs": [0.0] * before + completion.logprobs,
        "advantages": [0.0] * before + [advantage] * len(completion.tokens),
    }
    lengths = [len(model_input), *map(len, fields.values())]
    assert len(set(lengths)) == 1, f"input, targets, logprobs, advantages: {lengths}"
    return trio.Datum(model_input=model_input, loss_fn_inputs=fields)


def build_sft_datum(tokenizer: Any, item: Item) -> trio.Datum:
    """The right answer behind the same prompt, its end token included; only it has weight."""
    answer = tokenizer.encode(item.answer + STOP[0], add_special_tokens=False)
    model_input, before = input_of(item.prompt, answer), len(item.prompt) - 1
    fields: dict[str, list[Any]] = {
        "target_tokens": [0] * before + answer,
        "weights": [0.0] * before + [1.0] * len(answer),
    }
    lengths = [len(model_input), *map(len, fields.values())]
    assert len(set(lengths)) == 1, f"input, targets, weights: {lengths}"
    return trio.Datum(model_input=model_input, loss_fn_inputs=fields)


def build_batch(
    items: Sequence[Item], groups: Sequence[Sequence[Completion]], config: Config
) -> tuple[list[trio.Datum], dict[str, float]]:
    """Datums of the groups that differ within, and what the rollouts were like."""
    data, degenerate = [], 0
    for item, group in zip(items, groups, strict=True):
        advantages = group_advantages([c.reward for c in group])
        if len(group) < config.group_size:  # came back short: its mean is not the group's
            advantages = [0.0] * len(group)
        degenerate += not any(advantages)
        for completion, advantage in zip(group, advantages, strict=True):
            if advantage:
                data.append(build_datum(item, completion, advantage))
    completions = [completion for group in groups for completion in group]
    lengths = [len(completion.tokens) for completion in completions]
    rewards = [c.reward for c in completions if c.reward is not None]
    stops = Counter(completion.stop_reason for completion in completions)
    return data, {
        "reward": fmean(rewards) if rewards else math.nan,
        "format_rate": fmean(has_box(c.text) for c in completions),
        "degenerate_fraction": degenerate / len(groups),
        "datums": len(data),
        "train_datums": len(data),  # the public runs' name
        "rollout/completion_tokens_mean": fmean(lengths),
        "rollout/completion_tokens_max": max(lengths),
        "rollout/prompt_tokens_mean": fmean(len(item.prompt) for item in items),
        "rollout/truncated": stops["length"] / len(completions),
        "rollout/unjudged": len(completions) - len(rewards),
    }


def evaluate(
    sampler: trio.SamplingClient, tokenizer: Any, items: Sequence[Item], config: Config
) -> dict[str, float]:
    """Accuracy on held-out pictures, and with the pictures exchanged: how much of it they earn."""
    params = trio.SamplingParams(
        max_tokens=config.max_tokens, temperature=config.eval_temperature, stop=STOP
    )
    completions = [group[0] for group in sample(sampler, tokenizer, items, 1, params)]
    judged = [c.reward for c in completions if c.reward is not None]
    pictures = [chunk for item in items for chunk in item.prompt.chunks if chunk.type == "image"]
    others = pictures[1:] + pictures[:1]
    exchanged = []
    for item, picture in zip(items, others, strict=True):
        before, _, after = item.prompt.chunks
        prompt = trio.ModelInput(chunks=[before, picture, after])
        exchanged.append(replace(item, prompt=prompt))
    wrong = [group[0].reward or 0.0 for group in sample(sampler, tokenizer, exchanged, 1, params)]
    return {
        "accuracy": fmean(judged) if judged else 0.0,
        "format_rate": fmean(has_box(c.text) for c in completions),
        "accuracy_other_picture": fmean(wrong),
        "items": len(judged),
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
    settings["rows"] = hashlib.sha256(repr(rows).encode()).hexdigest()[:12]
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
        if config.sft:
            data = [build_sft_datum(tokenizer, item) for item in batch]
            metrics: dict[str, float] = {"datums": len(data)}
        else:
            # A sampling client keeps the weights it was made with: each step needs a new one.
            sampler = training.save_weights_and_get_sampling_client()
            groups = sample(sampler, tokenizer, batch, config.group_size, params)
            data, metrics = build_batch(batch, groups, config)
        if data:
            # One call for the whole batch, and both submitted before either is waited for.
            backward = training.forward_backward(
                data, loss_fn="cross_entropy" if config.sft else "importance_sampling"
            )
            update = training.optim_step(adam)
            metrics["loss"] = backward.result().metrics["loss_mean"]
            update.result()
        metrics |= {"epoch": epoch, "learning_rate": config.learning_rate}
        metrics["time/step_seconds"] = time.monotonic() - start
        row = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        log(config, {"step": step, **row})
        shown = ("loss", "reward", "format_rate", "degenerate_fraction", "datums")
        numbers = "  ".join(f"{key} {metrics[key]:.3g}" for key in shown if key in metrics)
        bar.write(f"step {step:3d}/{config.steps}  {numbers}")
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
    check_reward()
    if config.check_reward:
        print("the reward scores the tricky answers as it must")
        return
    train_rows, held_out_rows = load_rows(config)
    state = open_run(config, train_rows + held_out_rows)
    results = state["eval"]
    service = trio.ServiceClient()
    open_log(config, state["step"])
    try:
        base = service.create_sampling_client(config.base_model)
        tokenizer = base.get_tokenizer()
        prompter = Prompter(tokenizer)
        items = encode_prompts(prompter, train_rows, config.max_prompt_tokens)
        held_out = encode_prompts(prompter, held_out_rows, config.max_prompt_tokens)
        if config.eval_base and "base" not in results:
            results["base"] = evaluate(base, tokenizer, held_out, config)
            save_run_state(config, state)
        if state["step"] < config.steps or not state["weights"]:
            train(service, tokenizer, items, config, state)
        if "trained" not in results:
            tuned = service.create_sampling_client(config.base_model, model_path=state["weights"])
            results["trained"] = evaluate(tuned, tokenizer, held_out, config)
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
