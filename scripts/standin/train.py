"""The model's shape and the training loop: one thread, deterministic by seed, resumable."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from standin import corpus
from standin.tokenizer import VOCAB_SIZE

PROMPT_WEIGHT = 0.1  # the prompts are learnt a little too: it helps the embeddings of rare words
EPISODES_PER_STEP = 48
SPREAD = 1.35  # longest to shortest episode in one micro-batch


def config(tokenizer: Any) -> Qwen3Config:
    # Output and input embeddings are not tied, so that LoRA on the output layer leaves the input
    # alone.
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        use_sliding_window=False,
    )


def batch(
    seed: str,
    step: int,
    noise: dict[str, dict[str, float]],
    tokenizer: Any,
    templates: dict[str, str],
    mix: dict[str, float] = corpus.MIX,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of (ids, weights), both [episodes, tokens]; padding on the right weighs 0."""
    rng = random.Random(f"{seed}-{step}")
    encoded = [
        corpus.encode(corpus.episode(rng, noise, mix), tokenizer, templates)
        for _ in range(EPISODES_PER_STEP)
    ]
    encoded.sort(key=lambda pair: len(pair[0]))
    # A group ends where the next episode is much longer than its first one, so that little is
    # padding.
    groups: list[list[tuple[list[int], list[bool]]]] = []
    for ids, trained in encoded:
        if not groups or len(ids) > SPREAD * len(groups[-1][0][0]):
            groups.append([])
        groups[-1].append((ids, trained))
    pad = tokenizer.pad_token_id
    batches = []
    for group in groups:
        width = max(len(ids) for ids, _ in group)
        padded = torch.tensor([row + [pad] * (width - len(row)) for row, _ in group])
        weights = torch.tensor(
            [
                [1.0 if t else PROMPT_WEIGHT for t in trained] + [0.0] * (width - len(trained))
                for _, trained in group
            ]
        )
        # Prompt positions: one in five is looked at, with five times the weight; the rest skips the
        # output layer.
        keep = torch.tensor([[rng.random() < 0.2 for _ in range(width)] for _ in group])
        weights = torch.where(
            weights == PROMPT_WEIGHT, torch.where(keep, PROMPT_WEIGHT * 5, 0.0), weights
        )
        batches.append((padded, weights))
    return batches


def loss_sum(model: Qwen3ForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of cross entropies; the output layer runs only where the weight is not 0."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    picked = weights[:, 1:] > 0
    logits = model.lm_head(hidden[picked])
    return (
        F.cross_entropy(logits, ids[:, 1:][picked], reduction="none") * weights[:, 1:][picked]
    ).sum()


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made orthogonal (Newton-Schulz),
    https://kellerjordan.github.io/posts/muon/.

    torch.optim.Muon does the same in bfloat16, which is several times slower on a CPU without
    bfloat16 units. Matrices of one shape are stacked and done together.
    """

    def __init__(
        self, matrices: list[torch.nn.Parameter], lr: float, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, matrices in by_shape.items():
                updates = []
                for p in matrices:
                    assert p.grad is not None  # those without one were left out above
                    velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                    velocity.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(velocity, group["momentum"]))
                x = torch.stack(updates)
                x = orthogonal(x) * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(matrices, x, strict=True):
                    p.add_(update, alpha=-group["lr"])


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps towards singular values of 1; x is [matrices, rows, columns]."""
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


def optimisers(model: Qwen3ForCausalLM, scale: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, Adam for embeddings, output layer and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in name)]
    return [
        Muon(matrices, lr=0.02 * scale),
        torch.optim.AdamW(others, lr=3e-3 * scale, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(step: int, horizon: int) -> float:
    """Short warm-up, then flat, then down to 2 % over the last half before the horizon."""
    return min(1.0, (step + 1) / 40) * min(1.0, 0.02 + 0.98 * (horizon - step) / (0.5 * horizon))


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def train(
    name: str,
    stream: str,
    steps: int,
    seed: int,
    tokenizer: Any,
    templates: dict[str, str],
    work: Path,
    noise: dict[str, dict[str, float]] = corpus.SILENT,
    start_from: dict[str, torch.Tensor] | None = None,
    scale: float = 1.0,
    horizon: int = 0,
    max_minutes: float = 0.0,
    mix: dict[str, float] = corpus.MIX,
) -> Qwen3ForCausalLM:
    """Train for a number of steps, checkpointing into `work` every two minutes; a second call
    goes on from there.

    `stream` names the random stream the episodes are drawn from; step i of a stream is always
    the same batch. The learning rate would reach its end at step `horizon`; a stage that
    another one follows stops before.
    """
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config(tokenizer))
    if start_from is not None:
        model.load_state_dict(start_from)
    opts = optimisers(model, scale)
    base_rates = [group["lr"] for opt in opts for group in opt.param_groups]
    checkpoint, first = work / f"{name}.pt", 0
    work.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["steps"] == steps and state["seed"] == seed:
            model.load_state_dict(state["model"])
            for opt, saved in zip(opts, state["optimisers"], strict=True):
                opt.load_state_dict(saved)
            first = state["step"]
    model.train()
    begun = saved_at = time.time()
    tokens, average = 0, 0.0
    with (
        open(work / f"{name}.jsonl", "a", encoding="utf-8") as log,
        tqdm(total=steps, initial=first, desc=name, mininterval=5) as bar,
    ):
        for step in range(first, steps):
            for rate, group in zip(
                base_rates, [g for opt in opts for g in opt.param_groups], strict=True
            ):
                group["lr"] = rate * schedule(step, horizon or steps)
            parts = batch(f"{stream}-{seed}", step, noise, tokenizer, templates, mix)
            weight = sum(float(w[:, 1:].sum()) for _, w in parts)
            value = 0.0
            for ids, weights in parts:
                part = loss_sum(model, ids, weights) / weight
                part.backward()
                value += float(part.detach())
                tokens += ids.numel()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            average = value if step == first else 0.95 * average + 0.05 * value
            bar.update()
            if step % 20 == 0:
                bar.set_postfix(
                    loss=f"{average:.3f}", tok_s=int(tokens / (time.time() - begun)), refresh=False
                )
                log.write(
                    json.dumps(
                        {
                            "step": step,
                            "loss": round(average, 4),
                            "seconds": round(time.time() - begun, 1),
                        }
                    )
                    + "\n"
                )
                log.flush()
            if time.time() - saved_at > 120 or step + 1 == steps:
                save_checkpoint(
                    checkpoint,
                    {
                        "model": model.state_dict(),
                        "optimisers": [opt.state_dict() for opt in opts],
                        "step": step + 1,
                        "steps": steps,
                        "seed": seed,
                    },
                )
                saved_at = time.time()
            if max_minutes and time.time() - begun > 60 * max_minutes:
                break
    return model.eval()


def export(model: Qwen3ForCausalLM, tokenizer: Any, folder: Path) -> None:
    """config.json, generation_config.json and fp16 weights, each file replaced whole."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shape = model.config.to_dict()
    shape.update(architectures=["Qwen3ForCausalLM"], dtype="float16")
    for key in ("_name_or_path", "transformers_version"):
        shape.pop(key, None)
    end, pad = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.pad_token_id
    generation = {
        "eos_token_id": [end, pad],
        "pad_token_id": pad,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    }
    for file_name, content in (("config.json", shape), ("generation_config.json", generation)):
        temporary = folder / (file_name + ".tmp")
        temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(temporary, folder / file_name)
    save_file(
        {key: value.to(torch.float16).contiguous() for key, value in model.state_dict().items()},
        str(folder / "model.safetensors.tmp"),
        metadata={"format": "pt"},
    )
    os.replace(folder / "model.safetensors.tmp", folder / "model.safetensors")
