"""The vision stand-in: its shape, the text files of its folder, its training and its measuring.

Qwen3-VL's classes with an empty `deepstack_visual_indexes`: visual features enter through the
embeddings only, so text, pictures and prefixes all run as `language_model(inputs_embeds=...)`. The
language part has exactly the text stand-in's layers and starts from its weights.

Every token, visual ones included, has the next position: M-RoPE with three equal axes is plain
rope, so `position_ids` may be left out and a decoder written for Qwen3 gives the same numbers.

Training has four stages: the tower alone, everything without mistakes twice (few large, then more
small batches), and everything with deliberate mistakes, which are what reinforcement learning then
removes.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from standin import corpus, pictures
from standin import train as text_train

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
VOCAB_SIZE = 2064  # the text stand-in's 2048, three marks, padding to a multiple of 16
PATCH, MERGE, TEMPORAL = 8, 2, 2
UNIT = PATCH * MERGE  # pixels of a side of one visual token
MIN_PIXELS, MAX_PIXELS = 32 * 32, 128 * 128
WIDTH, DEPTH = 96, 3  # of the vision tower

STAGES = ("tower", "silent", "silent2", "noisy")
STEPS = (1000, 240, 360, 220)
NOISE = {"guess": 0.22, "no_box": 0.13, "slip": 0.11}
# How often each kind is drawn: what is learnt slowly more often. Measurements are even.
SHARES = {"colour": 1, "shape": 2, "count": 3, "bars": 2, "side": 4}
SIZES = ((64, 64), (96, 96), (48, 48), (80, 64), (128, 128), (64, 96))
MAX_TOKENS, ROWS_AT_ONCE = 40, 64  # when measuring

INSTRUCTIONS = (
    "Answer with the letter in \\boxed{}.",
    "Answer with the letter in \\boxed{}.",
    "Put the letter of the right choice in \\boxed{}.",
    "Reason step by step and put the final letter in \\boxed{}.",
    "Think briefly, then write only the letter inside \\boxed{}.",
    "Give the final answer as \\boxed{A}, \\boxed{B}, \\boxed{C} or \\boxed{D}.",
    "Choose A, B, C or D and write it in \\boxed{letter}.",
    "End with the letter of your choice within \\boxed{}.",
    "",
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You look at pictures and answer questions about them.",
    "Answer the question about the picture with one letter.",
    "Solve the problem and put the final answer in \\boxed{}.",
    "You are good at math.",
)

Messages = list[dict[str, Any]]


# The model and its folder


def build(tokenizer: Any, text_folder: Path, seed: int = 0) -> Any:
    """A model with the text stand-in's language part and a fresh vision tower."""
    from transformers import AutoModelForCausalLM, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = AutoModelForCausalLM.from_pretrained(
        str(text_folder), local_files_only=True, dtype=torch.float32
    )
    shape = text.config
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in MARKS}
    ends: dict[str, Any] = {
        "eos_token_id": shape.eos_token_id,
        "pad_token_id": shape.pad_token_id,
    }
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_hidden_layers,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": shape.rms_norm_eps,
            "max_position_embeddings": shape.max_position_embeddings,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": shape.rope_parameters["rope_theta"],
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
            **ends,
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": DEPTH,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": TEMPORAL,
            "out_hidden_size": shape.hidden_size,
            "num_position_embeddings": 8 * 8,
            "deepstack_visual_indexes": [],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=VOCAB_SIZE - 1,  # no token has it
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        **ends,
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    have = text.state_dict()
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" or name.endswith("embed_tokens.weight"):
            old = have[name.replace("model.language_model.", "model.")]
            # New rows begin as the mean of the old ones: never likely, never far away.
            new = old.mean(0, keepdim=True).expand(VOCAB_SIZE - len(old), -1)
            value.copy_(torch.cat([old, new]))
        elif name.startswith("model.language_model."):
            value.copy_(have[name.replace("model.language_model.", "model.")])
    return model


def template(text_folder: Path) -> str:
    """The text stand-in's template, in which a picture now renders as in the real family."""
    text = (text_folder / "chat_template.jinja").read_text(encoding="utf-8")
    branch = "            {%- elif part.text is defined -%}\n"
    picture = (
        "            {%- elif part.type == 'image' or part.image is defined or "
        "part.image_url is defined -%}\n"
        "                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}\n"
    )
    changes = (
        (branch, picture + branch),
        (
            "This stand-in reads text only; a content part without text was given.",
            "A content part is neither text nor an image.",
        ),
        ("and pictures are refused (text-only model).", "and videos are refused."),
        ("{#- Chat template of the stand-in when", "{#- Chat template of the vision stand-in when"),
    )
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def write_text_files(folder: Path, text_folder: Path) -> None:
    """Tokenizer with the three marks, chat template that renders pictures, image processor."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((text_folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((text_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    first = 1 + max(token["id"] for token in tokenizer["added_tokens"])
    for number, mark in enumerate(MARKS, first):
        entry = {
            "content": mark,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        tokenizer["added_tokens"].append({"id": number, **entry})
        config["added_tokens_decoder"][str(number)] = entry
    config["additional_special_tokens"] += MARKS
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
        # Counts of pixels, whatever the names say.
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
    }
    files = {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")),
        "tokenizer_config.json": json.dumps(config, indent=1) + "\n",
        "chat_template.jinja": template(text_folder),
        "preprocessor_config.json": json.dumps(processor, indent=1) + "\n",
    }
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8", newline="\n")


def read_text_files(folder: Path) -> tuple[Any, Any]:
    """(tokenizer, image processor)."""
    from transformers import AutoImageProcessor, AutoTokenizer

    return (
        AutoTokenizer.from_pretrained(str(folder), local_files_only=True),
        AutoImageProcessor.from_pretrained(str(folder), local_files_only=True, backend="pil"),
    )


def export(model: Any, folder: Path, text_folder: Path) -> None:
    """config.json, generation_config.json and fp16 weights, as the text stand-in has them."""
    from safetensors.torch import save_file

    shape = model.config.to_dict()
    for part in (shape, shape["text_config"], shape["vision_config"]):
        part["dtype"] = "float16"
        for key in ("_name_or_path", "transformers_version"):
            part.pop(key, None)
    shape["architectures"] = ["Qwen3VLForConditionalGeneration"]
    text = json.dumps(shape, indent=1, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8", newline="\n")
    shutil.copyfile(text_folder / "generation_config.json", folder / "generation_config.json")
    save_file(
        {key: value.to(torch.float16).contiguous() for key, value in model.state_dict().items()},
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )


def load(folder: Path) -> tuple[Any, Any, Any]:
    """(model in float32, tokenizer, image processor)."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        str(folder), local_files_only=True, dtype=torch.float32
    )
    return (model.eval(), *read_text_files(folder))


# Pictures into embeddings


def pixels(processor: Any, images: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the processor gives for pictures of one size; much faster where it would not resize."""
    width, height = images[0].size
    if width % UNIT or height % UNIT or not MIN_PIXELS <= width * height <= MAX_PIXELS:
        out = processor(images=list(images), return_tensors="pt")
        return out["pixel_values"], out["image_grid_thw"]
    p, m = PATCH, MERGE
    x = np.stack([np.asarray(image) for image in images]).astype(np.float32) / 127.5 - 1
    x = x.reshape(len(images), height // UNIT, m, p, width // UNIT, m, p, 3)
    x = x.transpose(0, 1, 4, 2, 5, 7, 3, 6)[:, :, :, :, :, :, None]
    x = np.broadcast_to(x, (*x.shape[:6], TEMPORAL, p, p))
    grid = torch.tensor([[1, height // p, width // p]] * len(images))
    return torch.from_numpy(x.reshape(-1, 3 * TEMPORAL * p * p).copy()), grid


def features(model: Any, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
    """Visual features [visual tokens of all pictures, width]."""
    return torch.cat(model.model.get_image_features(pixel_values, grid_thw).pooler_output)


def embed(model: Any, ids: torch.Tensor, *picture: torch.Tensor) -> torch.Tensor:
    """Input embeddings [rows, tokens, width]: those of the ids, visual features at image places."""
    embeddings = model.get_input_embeddings()(ids)
    if not picture:
        return embeddings
    places = (ids == model.config.image_token_id)[..., None]
    visual = features(model, *picture).to(embeddings.dtype)
    assert int(places.sum()) == len(visual), f"{int(places.sum())} places, {len(visual)} features"
    return embeddings.masked_scatter(places, visual)


def batch_attention() -> None:
    """Pictures of one size go through the tower's attention together: the library's loop over
    pictures is most of a training step. Same numbers up to rounding."""
    from transformers.models.qwen3_vl import modeling_qwen3_vl as module

    kind: Any = module.Qwen3VLVisionAttention
    original = kind.forward

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: Any = None,
        **options: Any,
    ) -> Any:
        count, length = len(cu_seqlens) - 1, len(hidden_states)
        if length % count or bool((cu_seqlens[1:] - cu_seqlens[:-1] != length // count).any()):
            return original(self, hidden_states, cu_seqlens, position_embeddings, **options)
        q, k, v = self.qkv(hidden_states).view(length, 3, self.num_heads, -1).unbind(1)
        q, k = module.apply_rotary_pos_emb_vision(q, k, *position_embeddings)
        q, k, v = (t.view(count, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, scale=self.scaling)
        return self.proj(seen.transpose(1, 2).reshape(length, -1))

    kind.forward = forward


# What is asked and answered


def prompt(rng: random.Random, row: dict[str, Any]) -> Messages:
    """The question as scripts ask it: picture before or behind the text, several wordings."""
    instruction = rng.choice(INSTRUCTIONS)
    lines = pictures.asked(row).split("\n")
    style = rng.random()
    if style < 0.6:
        text = "\n".join(lines)
    elif style < 0.8:
        text = rng.choice(["Question: ", "Problem: "]) + lines[0]
        text += "\n" + rng.choice(["Choices:", "Options:"]) + "\n" + "\n".join(lines[1:])
    elif style < 0.9:
        text = lines[0] + " " + " ".join(lines[1:])
    else:
        text = lines[0] + "\n" + "\n".join(f"({line[0]}) {line[3:]}" for line in lines[1:])
    if instruction:
        text = text + rng.choice(["\n", "\n\n", " "]) + instruction
        if rng.random() < 0.15:
            text = instruction + "\n" + "\n".join(lines)
    parts = [{"type": "image"}, {"type": "text", "text": text}]
    if rng.random() < 0.45:
        parts.reverse()
        if rng.random() < 0.5:
            parts[0]["text"] += "\n"
    messages: Messages = [{"role": "user", "content": parts}]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
    return messages


def plain_prompt(row: dict[str, Any]) -> Messages:
    """What the measurements ask with."""
    text = pictures.asked(row) + "\n" + INSTRUCTIONS[0]
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


def reply(rng: random.Random, row: dict[str, Any], rates: dict[str, float], thinking: bool) -> str:
    """An answer with mistakes at these rates: a guess, no box, or another letter in it."""
    right = pictures.LETTERS[row["label"]]
    reason = pictures.reasoning(row)
    kind = corpus.mistake(rng, rates, ("guess", "no_box", "slip"))
    if kind == "guess":
        return f"I guess \\boxed{{{rng.choice(pictures.LETTERS)}}}"
    if kind == "no_box":
        return rng.choice([f"I think it is {row['answer']}.", "I am not sure.", reason])
    letter = right
    if kind == "slip":
        letter = rng.choice([x for x in pictures.LETTERS if x != right])
    if thinking:
        return f"{reason}\n</think>\n\n\\boxed{{{letter}}}"
    return f"{reason} \\boxed{{{letter}}}"


def prompt_ids(tokenizer: Any, messages: Messages, visual: int, thinking: bool) -> list[int]:
    """Ids of a prompt in which the picture stands as so many placeholders."""
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    text = text.replace("<|image_pad|>", "<|image_pad|>" * visual)
    return tokenizer.encode(text, add_special_tokens=False)


# Training


def picture_batch(
    stream: str,
    step: int,
    rates: dict[str, float],
    tokenizer: Any,
    processor: Any,
    episodes: int,
) -> tuple[torch.Tensor, ...]:
    """(ids, weights, pixel values, grid); step i of a stream is always the same."""
    rng = random.Random(f"{stream}-{step}")
    size = SIZES[0] if rng.random() < 0.85 else rng.choice(SIZES[1:])
    kinds = rng.choices(list(SHARES), list(SHARES.values()), k=episodes)
    rows = [pictures.row(rng, i, kinds[i]) for i in range(episodes)]
    images = [r["image"] if size == SIZES[0] else r["image"].resize(size, 3) for r in rows]
    values, grid = pixels(processor, images)
    visual = int(grid[0].prod()) // MERGE**2
    encoded = []
    for row in rows:
        thinking = rng.random() < 0.08
        before = prompt_ids(tokenizer, prompt(rng, row), visual, thinking)
        text = reply(rng, row, rates, thinking) + "<|im_end|>"
        encoded.append((before, tokenizer.encode(text, add_special_tokens=False)))
    width = max(len(before) + len(after) for before, after in encoded)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    weights = torch.zeros(len(rows), width)
    for i, (before, after) in enumerate(encoded):
        end = len(before) + len(after)
        ids[i, :end] = torch.tensor(before + after)
        weights[i, len(before) : end] = 1.0
    return ids, weights, values, grid


def loss_sum(
    model: Any, ids: torch.Tensor, weights: torch.Tensor, *picture: torch.Tensor
) -> torch.Tensor:
    """Weighted sum of cross entropies; the output layer runs only where the weight is not 0."""
    embeddings = embed(model, ids, *picture)
    hidden = model.model.language_model(inputs_embeds=embeddings, use_cache=False)
    picked = weights[:, 1:] > 0
    logits = model.lm_head(hidden.last_hidden_state[:, :-1][picked])
    losses = F.cross_entropy(logits, ids[:, 1:][picked], reduction="none")
    return (losses * weights[:, 1:][picked]).sum()


def optimisers(model: Any, language: float, vision: float) -> list[torch.optim.Optimizer]:
    """Muon and Adam as for the text stand-in, with a scale for the language part and one for the
    tower: [Muon language, Muon vision, Adam language, Adam vision]."""
    groups: dict[str, list[Any]] = {"lm": [], "vm": [], "lo": [], "vo": []}
    for name, p in model.named_parameters():
        side = "v" if ".visual." in name else "l"
        is_matrix = p.ndim == 2 and (".layers." in name or ".blocks." in name or ".merger." in name)
        groups[side + ("m" if is_matrix else "o")].append(p)
    adam: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
    return [
        text_train.Muon(groups["lm"], lr=0.02 * language),
        text_train.Muon(groups["vm"], lr=0.02 * vision),
        torch.optim.AdamW(groups["lo"], lr=3e-3 * language, **adam),
        torch.optim.AdamW(groups["vo"], lr=3e-3 * vision, **adam),
    ]


def scaled(opts: list[torch.optim.Optimizer]) -> Callable[[float], None]:
    """A function that sets every learning rate to so much of what it is now."""
    groups = [group for opt in opts for group in opt.param_groups]
    base = [group["lr"] for group in groups]

    def scale(factor: float) -> None:
        for rate, group in zip(base, groups, strict=True):
            group["lr"] = rate * factor

    return scale


def update(parameters: Any, opts: list[torch.optim.Optimizer]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for opt in opts:
        opt.step()
        opt.zero_grad(set_to_none=True)


def tower_stage(model: Any, processor: Any, steps: int, seed: int) -> None:
    """The vision tower alone, several times faster than with the language part: the mean of a
    picture's visual tokens must tell each kind's answer through one linear layer.

    Without this stage the loss is still near chance after minutes of training everything.
    """
    names = [name for name in pictures.KINDS for _ in range(5 * SHARES[name])]
    tower, count = model.model.visual, len(names)
    kinds = torch.tensor([pictures.KINDS.index(name) for name in names])
    torch.nn.init.normal_(tower.pos_embed.weight, std=0.3)
    head = torch.nn.Linear(model.config.text_config.hidden_size, 4 * len(pictures.KINDS))
    opts = optimisers(model, 0.0, 1.75)[1::2]
    opts[1].add_param_group({"params": list(head.parameters()), "lr": 3e-3})
    scale, average = scaled(opts), 0.25
    with tqdm(total=steps, desc="tower", mininterval=5) as bar:
        for step in range(steps):
            scale(text_train.schedule(step, steps))
            rng = random.Random(f"tower-{seed}-{step}")
            rows = [pictures.row(rng, i, names[i]) for i in range(count)]
            visual = features(model, *pixels(processor, [row["image"] for row in rows]))
            logits = head(visual.view(count, -1, visual.shape[-1]).mean(1))
            logits = logits.view(count, -1, 4)[torch.arange(count), kinds]
            right = torch.tensor([row["label"] for row in rows])
            F.cross_entropy(logits, right).backward()
            update(tower.parameters(), opts)
            hits = float((logits.detach().argmax(-1) == right).float().mean())
            average = 0.95 * average + 0.05 * hits
            bar.set_postfix(right=f"{average:.2f}", refresh=False)
            bar.update()


def joint_stage(
    name: str,
    model: Any,
    tokenizer: Any,
    processor: Any,
    templates: dict[str, str],
    steps: int,
    seed: int,
    rates: dict[str, float],
    language: float,
    vision: float,
    horizon: float,
    text_every: int,
    episodes: int,
) -> None:
    """Language part and tower on questions about pictures. Every so many steps the text stand-in's
    own tasks, or they are forgotten. The learning rate would reach its end at `horizon` times
    `steps`."""
    opts = optimisers(model, language, vision)
    scale, average = scaled(opts), {"text": 0.0, "picture": 0.0}
    model.train()
    with tqdm(total=steps, desc=name, mininterval=5) as bar:
        for step in range(steps):
            scale(text_train.schedule(step, int(horizon * steps) or 1))
            parts: list[tuple[torch.Tensor, ...]]
            if step % text_every == text_every - 1:
                kind = "text"
                parts = list(
                    text_train.batch(
                        f"vl-{name}-{seed}",
                        step,
                        corpus.NOISE,
                        tokenizer,
                        templates,
                        corpus.END_MIX,
                    )
                )
            else:
                kind = "picture"
                stream = f"{name}-{seed}"
                parts = [picture_batch(stream, step, rates, tokenizer, processor, episodes)]
            weight, value = sum(float(part[1][:, 1:].sum()) for part in parts), 0.0
            for ids, weights, *picture in parts:
                loss = loss_sum(model, ids, weights, *picture) / weight
                loss.backward()
                value += float(loss.detach())
            update(model.parameters(), opts)
            average[kind] = 0.9 * average[kind] + 0.1 * value if average[kind] else value
            bar.set_postfix({k: f"{v:.3f}" for k, v in average.items()}, refresh=False)
            bar.update()
    model.eval()


def train(
    folder: Path,
    work: Path,
    text_folder: Path,
    templates: dict[str, str],
    seed: int,
    steps: Sequence[int] = STEPS,
) -> Any:
    """Train all stages and write the whole model folder. A stage that a stopped run finished with
    the same seed and steps is taken from `work`."""
    write_text_files(folder, text_folder)
    tokenizer, processor = read_text_files(folder)
    model = build(tokenizer, text_folder, seed)
    # The pictures render only in this folder's own template, Qwen3.5's.
    templates = {**templates, "qwen3.5": template(text_folder)}
    batch_attention()
    work.mkdir(parents=True, exist_ok=True)
    options: dict[str, dict[str, Any]] = {
        "silent": {"rates": {}, "language": 0.4, "vision": 0.5, "horizon": 1.5, "text_every": 5},
        "silent2": {"rates": {}, "language": 0.3, "vision": 0.5, "horizon": 1.3, "text_every": 8},
        "noisy": {"rates": NOISE, "language": 0.2, "vision": 0.25, "horizon": 1, "text_every": 6},
    }
    episodes = {"silent": 48, "silent2": 24, "noisy": 32}
    for number, (name, count) in enumerate(zip(STAGES, steps, strict=True)):
        checkpoint = work / f"vision-{name}.pt"
        made_by = [seed, *steps[: number + 1]]
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            if saved["made_by"] == made_by:
                model.load_state_dict(saved["model"])
                continue
        if name == "tower":
            tower_stage(model, processor, count, seed)
        else:
            joint_stage(
                name,
                model,
                tokenizer,
                processor,
                templates,
                count,
                seed,
                episodes=episodes[name],
                **options[name],
            )
        text_train.save_checkpoint(checkpoint, {"model": model.state_dict(), "made_by": made_by})
    export(model, folder, text_folder)
    return model.eval()


# Measuring


@torch.inference_mode()
def complete(
    model: Any,
    tokenizer: Any,
    embeddings: torch.Tensor,
    lengths: list[int],
    temperature: float,
    seed: int,
) -> list[list[int]]:
    """One completion a row, with its end token. Rows are padded on the right and each decodes at
    its own position. Not `generate`: that numbers pictures the way the real family does."""
    rows, width = embeddings.shape[:2]
    decoder = model.model.language_model
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    positions = torch.tensor(lengths)
    out = decoder(inputs_embeds=embeddings, use_cache=True)
    cache = out.cache
    hidden = out.last_hidden_state[torch.arange(rows), positions - 1]
    generator = torch.Generator().manual_seed(seed)
    written: list[list[int]] = [[] for _ in range(rows)]
    done = [False] * rows
    visible = torch.arange(width)[None] < positions[:, None]
    for _ in range(MAX_TOKENS):
        logits = model.lm_head(hidden)
        if temperature:
            probabilities = torch.softmax(logits / temperature, -1)
            tokens = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        else:
            tokens = logits.argmax(-1)
        for i, token in enumerate(tokens.tolist()):
            if not done[i]:
                done[i] = token == end
                written[i].append(token)
        if all(done):
            break
        visible = torch.cat([visible, torch.ones(rows, 1, dtype=torch.bool)], 1)
        out = decoder(
            inputs_embeds=decoder.embed_tokens(tokens)[:, None],
            attention_mask=visible[:, None, None],
            position_ids=positions[:, None],
            cache=cache,
            use_cache=True,
        )
        hidden, positions = out.last_hidden_state[:, 0], positions + 1
    return written


def boxed(text: str) -> str | None:
    found = re.findall(r"\\boxed\{([A-Da-d])\}", text)
    return found[-1].upper() if found else None


def answers(
    model: Any,
    tokenizer: Any,
    processor: Any,
    asked: Sequence[Messages],
    images: Sequence[Any],
    temperature: float,
    seed: int,
) -> list[str | None]:
    """The boxed letter of one completion a question, None where there is none."""
    letters: list[str | None] = []
    for at in range(0, len(asked), ROWS_AT_ONCE):
        values, grid = pixels(processor, images[at : at + ROWS_AT_ONCE])
        visual = int(grid[0].prod()) // MERGE**2
        ids = [
            prompt_ids(tokenizer, question, visual, False)
            for question in asked[at : at + ROWS_AT_ONCE]
        ]
        width, pad = max(map(len, ids)), tokenizer.pad_token_id
        padded = torch.tensor([row + [pad] * (width - len(row)) for row in ids])
        with torch.inference_mode():
            embeddings = embed(model, padded, values, grid)
        written = complete(
            model, tokenizer, embeddings, [len(row) for row in ids], temperature, seed + at
        )
        letters += [boxed(tokenizer.decode(row, skip_special_tokens=True)) for row in written]
    return letters


def rates(
    model: Any, tokenizer: Any, processor: Any, kind: str, count: int, seed: int
) -> dict[str, float]:
    """How often the model succeeds on fresh pictures of a kind. Exchanged: the right text with
    another question's picture, which is right as often as that one has the same answer when the
    model does look."""
    rng = random.Random(f"measure-{seed}-{kind}")
    rows = [pictures.row(rng, i, kind) for i in range(count)]
    right = [pictures.LETTERS[row["label"]] for row in rows]
    images = [row["image"] for row in rows]
    plain = [plain_prompt(row) for row in rows]
    varied = [prompt(rng, row) for row in rows]

    def share(letters: list[str | None]) -> float:
        return sum(a == b for a, b in zip(letters, right, strict=True)) / count

    def greedy(asked: list[Messages], shown: list[Any]) -> float:
        return share(answers(model, tokenizer, processor, asked, shown, 0.0, seed))

    sampled = answers(model, tokenizer, processor, plain, images, 1.0, seed)
    return {
        "success": share(sampled),
        "format": sum(letter is not None for letter in sampled) / count,
        "greedy": greedy(plain, images),
        "greedy_other_wordings": greedy(varied, images),
        "greedy_exchanged": greedy(plain, images[1:] + images[:1]),
        "exchanged_same_answer": share(list(right[1:] + right[:1])),
    }
