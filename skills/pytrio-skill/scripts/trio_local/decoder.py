"""One decoding step for all live sequences: the operation where sampling spends its time.

A step of a small model is a few dozen tiny matrix products, and transformers spends about a third
of it between them. For the Llama layout (Llama, Qwen2, Qwen3) the step is therefore written out
here; every other model goes through transformers. A test holds both to the same numbers.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F

from trio_local.loading import Model

if TYPE_CHECKING:
    from trio_local.sampler import SlotCache

# Given the last tokens [sequences] and the cache, the hidden states [sequences, width].
Step: TypeAlias = Callable[[torch.Tensor, "SlotCache"], torch.Tensor]

WRITTEN_OUT = ("llama", "qwen2", "qwen3", "qwen3_vl")


def step_for(model: Model, cache_argument: str) -> Step:
    """The fastest step this model allows."""
    return WrittenOutStep(model) if is_written_out(model) else library_step(model, cache_argument)


def is_written_out(model: Model) -> bool:
    """Whether the model has exactly the layout below, rope without scaling included."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    return (
        model.config.model_type in WRITTEN_OUT
        and layer_types == {"full_attention"}
        and config.hidden_act == "silu"
        and getattr(rotary, "rope_type", "") == "default"
    )


def library_step(model: Model, cache_argument: str) -> Step:
    """The step through transformers' own forward."""

    def step(tokens: torch.Tensor, cache: "SlotCache") -> torch.Tensor:
        output = model.get_decoder()(
            input_ids=tokens[:, None],
            attention_mask=cache.visible[:, None, None],
            position_ids=cache.positions[:, None],
            use_cache=True,
            **{cache_argument: cache},
        )
        return output.last_hidden_state[:, 0]

    return step


class WrittenOutStep:
    """The step of a Llama-like model: pre-norm attention with grouped keys, gated MLP."""

    def __init__(self, model: Model) -> None:
        self.decoder = model.get_decoder()
        config = model.config.get_text_config()
        self.heads = config.num_attention_heads
        self.groups = config.num_key_value_heads
        self.cos = torch.empty(0)
        self.sin = torch.empty(0)

    def rotation(self, cache: "SlotCache", like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin at each sequence's position [sequences, 1, head_dim].

        The sign of the half-rotation is folded into sin: rolling x by half of head_dim and
        multiplying by it is what `rotate_half` does.
        """
        if len(self.cos) < cache.width:
            length = max(256, 2 * cache.width)
            positions = torch.arange(length, device=like.device)[None]
            cos, sin = self.decoder.rotary_emb(like, positions)
            half = cos.shape[-1] // 2
            self.cos = cos[0]
            self.sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        return self.cos[cache.positions][:, None], self.sin[cache.positions][:, None]

    def __call__(self, tokens: torch.Tensor, cache: "SlotCache") -> torch.Tensor:
        rows = len(tokens)
        hidden = self.decoder.embed_tokens(tokens)
        cos, sin = self.rotation(cache, hidden)
        unseen = torch.zeros_like(cache.visible, dtype=hidden.dtype)
        unseen = unseen.masked_fill_(~cache.visible, float("-inf"))[:, None, None]
        for index, layer in enumerate(self.decoder.layers):
            attention = layer.self_attn
            normed = normalised(hidden, layer.input_layernorm)
            query = attention.q_proj(normed).view(rows, self.heads, -1)
            key = attention.k_proj(normed).view(rows, self.groups, -1)
            value = attention.v_proj(normed).view(rows, self.groups, -1)
            if hasattr(attention, "q_norm"):
                query = normalised(query, attention.q_norm)
                key = normalised(key, attention.k_norm)
            half = query.shape[-1] // 2
            query = query * cos + query.roll(half, -1) * sin
            key = key * cos + key.roll(half, -1) * sin
            keys, values = cache.update(key[:, :, None], value[:, :, None], index)
            query = query.view(rows, self.groups, self.heads // self.groups, -1)
            scores = (query @ keys.transpose(-1, -2)).mul_(attention.scaling).add_(unseen)
            seen = torch.softmax(scores, dim=-1) @ values
            hidden = hidden + attention.o_proj(seen.view(rows, -1))
            normed = normalised(hidden, layer.post_attention_layernorm)
            gated = F.silu(layer.mlp.gate_proj(normed)) * layer.mlp.up_proj(normed)
            hidden = hidden + layer.mlp.down_proj(gated)
        return normalised(hidden, self.decoder.norm)


def normalised(x: torch.Tensor, norm: Model) -> torch.Tensor:
    """RMS normalisation over the last dimension; `F.rms_norm` is twice as slow at this size."""
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (x * scale)
