"""scale-out.md and doc-index.md: PyTRIO's side of the map is real, no local file is left out."""

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import pytrio as trio
import torch

from conftest import SKILL, Backend
from helpers import BASE_MODEL, Tensors, random_sequences, saved_adapter, service_on
from trio_local.losses import LOSSES

NOTE = (SKILL / "references" / "scale-out.md").read_text(encoding="utf-8")
INDEX = (SKILL / "references" / "doc-index.md").read_text(encoding="utf-8")
CLIENTS = (trio.ServiceClient, trio.TrainingClient, trio.SamplingClient, trio.RestClient)
RECORDS = {r.__name__: r for r in (trio.AdamParams, trio.Datum, trio.SamplingParams)}

# With a huge eps a step of Adam is linear in the gradient, so steps can be compared by direction.
LINEAR_STEP = trio.AdamParams(learning_rate=1e10, beta1=0.0, beta2=0.0, eps=1e6)


def section(note: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    return note.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def map_entries() -> list[str]:
    """The code spans of the concept map's first column, which is PyTRIO's."""
    rows = [line for line in section(NOTE, "Concept map").splitlines() if line.startswith("| ")]
    return [span for row in rows[1:] for span in re.findall(r"`([^`]+)`", row.split("|")[1])]


def accepted(name: str) -> set[str]:
    """Fields of a record, or parameters of a client's method; empty when there is no such name."""
    if name in RECORDS:
        return set(RECORDS[name].model_fields)
    methods = [getattr(client, name) for client in CLIENTS if hasattr(client, name)]
    return set(inspect.signature(methods[0]).parameters) if methods else set()


def unknown_names(entry: str) -> list[str]:
    """What an entry of the map names that the installed SDK does not have."""
    tree = ast.parse(entry, mode="eval").body
    if isinstance(tree, ast.Attribute):
        return [] if tree.attr in accepted(ast.unparse(tree.value)) else [entry]
    assert isinstance(tree, ast.Call), entry
    name = ast.unparse(tree.func)
    known = accepted(name)
    wrong = [] if known else [name]
    for argument in tree.args:
        text = ast.unparse(argument)
        if isinstance(argument, ast.Call):
            wrong += unknown_names(text)
        elif text not in known:
            wrong.append(text)
    return wrong


@pytest.mark.parametrize("entry", [e for e in map_entries() if "[" not in e])
def test_calls_of_the_map_exist(entry: str) -> None:
    """Every call, argument and field in PyTRIO's column is one of the installed SDK."""
    assert not unknown_names(entry)


def test_map_check_can_fail() -> None:
    """Misspelled methods, arguments and fields are found."""
    wrong = ["optimizer_step(AdamParams(lr))", "sample(prompt, n)", "SamplingParams.max_new_tokens"]
    wrong += ["optim_step(AdamParams(lr))"]
    assert all(unknown_names(entry) for entry in wrong)
    assert len(map_entries()) >= 12


def test_clip_keys_of_the_map_exist() -> None:
    """The settings named for clipping are the ones that both clipping losses read."""
    keys = {key for entry in map_entries() for key in re.findall(r'\["(clip_\w+)"\]', entry)}
    assert keys == set(LOSSES["ppo"].defaults) == set(LOSSES["cispo"].defaults)


def policy_datum(tokens: list[int], logprobs: list[float], advantages: list[float]) -> trio.Datum:
    """A datum whose every target carries an advantage."""
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": logprobs,
            "advantages": advantages,
        },
    )


def target_logprobs(training: trio.TrainingClient, sequences: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of every target under the weights as they are."""
    data = [
        trio.Datum(
            model_input=trio.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:]},
        )
        for tokens in sequences
    ]
    return [o["logprobs"].tolist() for o in training.forward(data).result().loss_fn_outputs]


@pytest.mark.parametrize(
    ("clip", "learns"), [((0.8, 1.28), True), ((0.2, 0.28), False)], ids=["bounds", "distances"]
)
def test_distances_sent_as_bounds_train_nothing(
    backend: Backend, clip: tuple[float, float], learns: bool
) -> None:
    """Positive advantages get no gradient when the clip is given as distances from one."""
    sequences = random_sequences(7, [12])
    with service_on(backend) as service:
        training = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1)
        before = target_logprobs(training, sequences)
        data = [policy_datum(sequences[0], before[0], [1.0] * 11)]
        config = {"clip_low_threshold": clip[0], "clip_high_threshold": clip[1]}
        step = training.forward_backward(data, "ppo", config)
        training.optim_step(trio.AdamParams(learning_rate=1e-2)).result()
        named = {key for entry in map_entries() for key in re.findall(r'^metrics\["(\w+)"', entry)}
        assert named
        assert named <= set(step.result().metrics)
        after = target_logprobs(training, sequences)
    gain = sum(after[0]) - sum(before[0])
    assert gain > 1.0 if learns else gain == 0.0, gain


def mean_of_means(advantages: list[float]) -> Callable:
    """REINFORCE, each sequence counted once however long it is."""

    def loss(data: list[trio.Datum], logprobs: list[torch.Tensor]) -> tuple:
        terms = [-a * lp.mean() for a, lp in zip(advantages, logprobs, strict=True)]
        return torch.stack(terms).mean(), {}

    return loss


def direction(adapter: Tensors) -> torch.Tensor:
    """The first step's direction: LoRA's B begins at zero and is all that moves."""
    flat = torch.cat([t.flatten() for name, t in sorted(adapter.items()) if "lora_B" in name])
    return flat / flat.norm()


def test_advantage_over_length_is_a_sequence_mean(backend: Backend, tmp_path: Path) -> None:
    """The porting recipe: advantages divided by length give the gradient of a sequence mean."""
    sequences = random_sequences(11, [5, 30, 60])
    advantages = [1.0, -0.5, 0.7]
    directions = {}
    with service_on(backend) as service:
        for recipe in ("custom", "divided", "plain"):
            training = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3)
            before = target_logprobs(training, sequences)
            data = [
                policy_datum(
                    tokens, q, [a / len(q) if recipe == "divided" else a for _ in range(len(q))]
                )
                for tokens, q, a in zip(sequences, before, advantages, strict=True)
            ]
            if recipe == "custom":
                training.forward_backward_custom(data, mean_of_means(advantages)).result()
            else:
                training.forward_backward(data, "importance_sampling").result()
            training.optim_step(LINEAR_STEP).result()
            directions[recipe] = direction(saved_adapter(service, training, recipe, tmp_path))
    assert torch.dot(directions["custom"], directions["divided"]) > 0.9999
    assert torch.dot(directions["custom"], directions["plain"]) < 0.99


def test_rank_above_64_is_refused(backend: Backend) -> None:
    """The limit that the note gives as a reason to leave."""
    with service_on(backend) as service, pytest.raises(trio.PyTrioError, match=r"\[4, 64\]"):
        service.create_lora_training_client(BASE_MODEL, rank=65)


def test_capabilities_tell_the_longest_sequence(backend: Backend) -> None:
    """`training.max_seq_len` is where the note says it is."""
    with service_on(backend) as service:
        models = service.get_server_capabilities().supported_models
    assert models
    assert all(isinstance(model.training.max_seq_len, int) for model in models)


def test_index_lists_every_local_file() -> None:
    """doc-index.md names each note and example, and only those that exist."""
    local = INDEX.split("\n## Official pages\n", 1)[0]
    listed = re.findall(r"`((?:references|examples|scripts)/[^`]+)`", local)
    present = {
        path.relative_to(SKILL).as_posix()
        for folder in ("references", "examples", "scripts")
        for path in (SKILL / folder).iterdir()
        if path.is_file()
    }
    assert set(listed) == present
    assert len(listed) == len(set(listed))


def test_index_points_at_local_notes() -> None:
    """The last column of the table of official pages names notes that exist."""
    rows = [line for line in section(INDEX, "Official pages").splitlines() if line.startswith("| ")]
    notes = {n for row in rows for n in re.findall(r"([\w-]+\.md)", row.split("|")[3])}
    missing = {note for note in notes if not (SKILL / "references" / note).exists()}
    assert len(notes) > 5
    assert not missing
