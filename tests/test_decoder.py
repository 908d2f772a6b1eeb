"""The written-out decoding step and transformers' own give the same numbers."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trio_local.decoder import is_written_out, library_step, step_for
from trio_local.sampler import SlotCache

SIZES = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def tiny(model_type: str, **settings: object) -> torch.nn.Module:
    """A random model of an architecture, with biases and norms away from their defaults."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **settings)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_same_hidden_states(model_type: str) -> None:
    """Ten steps of five sequences of different lengths agree, one of them leaving on the way."""
    model = tiny(model_type)
    assert is_written_out(model)
    lengths = torch.tensor([3, 9, 1, 17, 6])
    prompts = torch.randint(0, 300, (5, 17), generator=torch.Generator().manual_seed(1))
    prefill = model.get_decoder()(input_ids=prompts, use_cache=True).cache
    keys, values = [[getattr(layer, n) for layer in prefill.layers] for n in ("keys", "values")]
    caches = [SlotCache(), SlotCache()]
    for cache in caches:
        cache.add(keys, values, torch.arange(5), lengths)
    steps = [step_for(model, "cache"), library_step(model, "cache")]
    for number in range(10):
        if number == 4:
            for cache in caches:
                cache.remove(1)
        tokens = torch.randint(
            0, 300, (caches[0].used,), generator=torch.Generator().manual_seed(number)
        )
        results = []
        for cache, step in zip(caches, steps, strict=True):
            cache.begin_step()
            results.append(step(tokens, cache))
            cache.end_step()
        assert (results[0] - results[1]).abs().max() < 1e-5


def test_other_layouts_are_left_to_the_library() -> None:
    """Scaled rope or another activation is not what the written-out step computes."""
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert not is_written_out(tiny("llama", rope_parameters=scaled))
    assert not is_written_out(tiny("llama", hidden_act="gelu"))
    assert not is_written_out(tiny("phi"))
