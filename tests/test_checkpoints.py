"""Checkpoints through the real SDK: what is saved, found, refused, downloaded, and survives."""

import hashlib
import random
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pytrio import (
    ModelInput,
    PyTrioError,
    SamplingClient,
    ServiceClient,
    TrainingClient,
)
from pytrio.types import Checkpoint
from safetensors.torch import load_file

from conftest import Backend, start_backend
from helpers import (
    BASE_MODEL,
    LARGE_MODEL,
    Tensors,
    adapted_model,
    adapter_tensors,
    checkpoint_id,
    downloaded,
    logprobs_of,
    random_sequences,
    run_id_of,
    saved_adapter,
    service_on,
    supervised_datum,
    train_step,
)
from trio_local import store as store_module
from trio_local.store import CheckpointStore

PROMPT = [11, 12, 13, 14, 15]
WITH_OPTIMIZER = "create_training_client_from_state_with_optimizer"


@pytest.fixture(scope="module")
def service(backend: Backend) -> Iterator[ServiceClient]:
    with service_on(backend) as opened:
        yield opened


def new_run(service: ServiceClient, seed: int = 1, **lora: Any) -> TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, **({"rank": 8, "seed": seed} | lora))


def train(client: TrainingClient, steps: range) -> None:
    """Steps that are told apart by their number: data and learning rate follow from it."""
    for step in steps:
        data = [supervised_datum(tokens) for tokens in random_sequences(step, [9, 14, 11])]
        train_step(client, data, learning_rate=1e-3 * (step + 1), weight_decay=0.01)


def prompt_logprobs(sampler: SamplingClient) -> list[float]:
    """A fingerprint of the weights behind a sampler."""
    return sampler.compute_logprobs(ModelInput.from_ints(PROMPT)).result()[1:]


def listed_paths(service: ServiceClient) -> list[str]:
    rest = service.create_rest_client()
    return [c.path for c in rest.list_user_checkpoints(limit=1000).result().checkpoints]


def refusal(call: Callable[[], Any]) -> str:
    """The message with which a call is refused."""
    with pytest.raises(PyTrioError) as refused:
        call()
    return refused.value.message


def assert_equal(one: Tensors, other: Tensors) -> None:
    """The same tensors bit for bit."""
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# -- resuming --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unbroken:
    """Six steps in one go, and a checkpoint of the same run after three."""

    halfway: str
    halfway_adapter: Tensors
    final_adapter: Tensors
    final_optimizer: Tensors


@pytest.fixture(scope="module")
def unbroken(service: ServiceClient, tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """The run that is saved halfway is a second one: saving must not disturb."""
    folder = tmp_path_factory.mktemp("unbroken")
    client, saved = new_run(service), new_run(service)
    train(client, range(6))
    final = downloaded(service, client.save_state("final").result().path, folder / "final")
    train(saved, range(3))
    halfway = saved.save_state("halfway").result().path
    train(saved, range(3, 6))
    of_saved = downloaded(service, saved.save_state("final").result().path, folder / "saved")
    assert_equal(adapter_tensors(of_saved), adapter_tensors(final))
    return Unbroken(
        halfway,
        adapter_tensors(downloaded(service, halfway, folder / "halfway")),
        adapter_tensors(final),
        load_file(final / "optimizer.safetensors"),
    )


def resumed(service: ServiceClient, path: str, way: str) -> TrainingClient:
    """A client on a checkpoint by one of the SDK's four ways."""
    if way.startswith("create"):
        return getattr(service, way)(path)
    client = new_run(service, seed=99)
    getattr(client, way)(path).result()
    return client


@pytest.mark.parametrize("way", [WITH_OPTIMIZER, "load_state_with_optimizer"])
def test_resuming_with_optimizer_equals_an_unbroken_run(
    service: ServiceClient, unbroken: Unbroken, tmp_path: Path, way: str
) -> None:
    client = resumed(service, unbroken.halfway, way)
    train(client, range(3, 6))
    final = downloaded(service, client.save_state("final").result().path, tmp_path)
    assert_equal(adapter_tensors(final), unbroken.final_adapter)
    assert_equal(load_file(final / "optimizer.safetensors"), unbroken.final_optimizer)


def test_resuming_without_optimizer_restores_weights_only(
    service: ServiceClient, unbroken: Unbroken, tmp_path: Path
) -> None:
    finals = []
    for way in ("create_training_client_from_state", "load_state"):
        client = resumed(service, unbroken.halfway, way)
        loaded = saved_adapter(service, client, "loaded", tmp_path / way)
        assert_equal(loaded, unbroken.halfway_adapter)
        train(client, range(3, 6))
        finals.append(saved_adapter(service, client, "final", tmp_path / way))
    assert_equal(*finals)
    for name, tensor in unbroken.final_adapter.items():
        moved = (tensor - unbroken.halfway_adapter[name]).norm()
        assert (finals[0][name] - tensor).norm() > 0.01 * moved, name


def test_a_state_is_loaded_before_the_first_operation_or_not_at_all(
    service: ServiceClient, unbroken: Unbroken
) -> None:
    client = new_run(service)
    train(client, range(1))
    assert "after training has started" in refusal(lambda: client.load_state(unbroken.halfway))


@pytest.mark.parametrize(
    ("base_model", "lora", "named"),
    [
        (BASE_MODEL, {"rank": 4}, "lora_rank (target=4, source=8)"),
        (BASE_MODEL, {"rank": 8, "train_mlp": False}, "train_mlp (target=False, source=True)"),
        (LARGE_MODEL, {"rank": 8}, "base_model (target="),
        # The tokenizer is the same, which is all that the SDK can see.
        ("Qwen/Qwen3-32B", {"rank": 8}, f"the checkpoint adapts {BASE_MODEL}, not Qwen/Qwen3-32B"),
    ],
)
def test_a_mismatching_configuration_is_refused(
    service: ServiceClient, unbroken: Unbroken, base_model: str, lora: dict[str, Any], named: str
) -> None:
    client = service.create_lora_training_client(base_model, **lora)
    assert named in refusal(lambda: client.load_state(unbroken.halfway))
    train(client, range(1))


def test_a_sampler_needs_the_base_of_its_checkpoint(
    service: ServiceClient, unbroken: Unbroken
) -> None:
    message = refusal(lambda: service.create_sampling_client(LARGE_MODEL, unbroken.halfway))
    assert f"the checkpoint adapts {BASE_MODEL}, not {LARGE_MODEL}" in message


def test_sampler_weights_hold_no_optimizer(
    service: ServiceClient, unbroken: Unbroken, tmp_path: Path
) -> None:
    client = service.create_training_client_from_state(unbroken.halfway)
    path = client.save_weights_for_sampler("weights").result().path
    for way in (WITH_OPTIMIZER, "load_state_with_optimizer"):
        message = refusal(lambda way=way: train(resumed(service, path, way), range(1)))
        assert "sampler weights without optimiser state; resume from a save_state" in message
    by_weights = service.create_training_client_from_state(path)
    assert_equal(saved_adapter(service, by_weights, "again", tmp_path), unbroken.halfway_adapter)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", ".hidden", "-dash", "ends.", "a/b", "..", "r\u00e9sum\u00e9", "tab\t"]
)
def test_names_the_sdk_refuses(service: ServiceClient, name: str) -> None:
    client = new_run(service)
    for save in (client.save_state, client.save_weights_for_sampler):
        assert "checkpoint name must match" in refusal(lambda save=save: save(name))


def test_names_the_sdk_changes(service: ServiceClient) -> None:
    """Spaces become hyphens; over 200 characters, the first 180 and twenty of the digest stay."""
    client = new_run(service)
    exact, long = "n" * 200, "step." + "x" * 300
    digest = hashlib.sha256(long.encode("ascii")).hexdigest()
    for name, stored in [
        ("after epoch 2", "after-epoch-2"),
        ("v1.0_final-x", "v1.0_final-x"),
        (exact, exact),
        (long, long[:180] + digest[:20]),
    ]:
        path = client.save_state(name).result().path
        assert path == f"trio://{client.training_run_cuid}/state/{stored}"
        assert path in listed_paths(service)
        service.create_training_client_from_state(path).forward([supervised_datum(PROMPT)]).result()


def test_a_name_is_taken_once(service: ServiceClient) -> None:
    client, other = new_run(service), new_run(service)
    client.save_state("one").result()
    client.save_weights_for_sampler("one").result()
    for save in (client.save_state, client.save_weights_for_sampler):
        message = refusal(lambda save=save: save("one").result())
        assert "checkpoint 'one' exists in this training run" in message
    assert "choose another name" in message
    client.save_state("one", overwrite=True).result()
    other.save_state("one").result()
    train(client, range(1))


def test_state_and_sampler_weights_of_one_name_are_two_checkpoints(
    service: ServiceClient, tmp_path: Path
) -> None:
    client = new_run(service)
    state = client.save_state("same").result().path
    train(client, range(1))
    weights = client.save_weights_for_sampler("same").result().path
    assert state != weights
    assert {state, weights} <= set(listed_paths(service))
    of_state = adapter_tensors(downloaded(service, state, tmp_path / "state"))
    of_weights = adapter_tensors(downloaded(service, weights, tmp_path / "weights"))
    assert any(not torch.equal(of_state[name], of_weights[name]) for name in of_state)
    rest = service.create_rest_client()
    rest.delete_checkpoint(run_id_of(state), checkpoint_id(service, state)).result()
    assert state not in listed_paths(service)
    assert weights in listed_paths(service)


# -- overwriting -----------------------------------------------------------------------------------


def test_overwriting_replaces_and_leaves_old_samplers_alone(
    service: ServiceClient, tmp_path: Path
) -> None:
    client = new_run(service)
    train(client, range(1))
    path = client.save_state("latest").result().path
    old_id = checkpoint_id(service, path)
    sampler = service.create_sampling_client(BASE_MODEL, path)
    unused = service.create_sampling_client(BASE_MODEL, path)
    before = prompt_logprobs(sampler)
    train(client, range(1, 4))
    assert client.save_state("latest", overwrite=True).result().path == path
    assert listed_paths(service).count(path) == 1
    assert checkpoint_id(service, path) != old_id
    newer = prompt_logprobs(service.create_sampling_client(BASE_MODEL, path))
    assert max(abs(a - b) for a, b in zip(newer, before, strict=True)) > 1e-3
    assert prompt_logprobs(sampler) == before
    assert prompt_logprobs(unused) == before
    current = saved_adapter(service, client, "current", tmp_path)
    assert_equal(adapter_tensors(downloaded(service, path, tmp_path / "latest")), current)


def test_a_checkpoint_can_be_read_at_any_moment_of_being_overwritten(
    service: ServiceClient,
) -> None:
    client = new_run(service)
    train(client, range(1))
    path = client.save_state("latest").result().path
    saves = [client.save_state("latest", overwrite=True) for _ in range(60)]
    reads = 0
    while not saves[-1].done():
        service.create_sampling_client(BASE_MODEL, path)
        assert listed_paths(service).count(path) == 1
        reads += 1
    assert {save.result().path for save in saves} == {path}
    assert reads > 5


# -- lifetime --------------------------------------------------------------------------------------


def test_time_to_live(service: ServiceClient) -> None:
    client = new_run(service)
    train(client, range(1))
    kept = [
        client.save_state("kept").result().path,
        client.save_weights_for_sampler("kept").result().path,
    ]
    started = time.time()
    short = [
        client.save_state("short", ttl_seconds=1).result().path,
        client.save_weights_for_sampler("short", ttl_seconds=1).result().path,
    ]
    sampler = service.create_sampling_client(BASE_MODEL, short[1])
    before = prompt_logprobs(sampler)
    rest = service.create_rest_client()
    checkpoints = rest.list_checkpoints(client.training_run_cuid).result().checkpoints
    expiry = {c.path: c.expires_at for c in checkpoints}
    assert set(expiry) >= set(kept)
    assert [expiry[path] for path in kept] == [None, None]
    ids = {c.path: c.checkpoint_id for c in checkpoints}
    for path in set(short) & set(expiry):
        assert expiry[path].timestamp() == pytest.approx(started + 1, abs=1)
    time.sleep(max(0.0, started + 2.5 - time.time()))
    assert set(listed_paths(service)) & {*kept, *short} == set(kept)
    for path in short:
        assert "has expired" in refusal(
            lambda path=path: service.create_training_client_from_state(path)
        )
        assert "has expired" in refusal(
            lambda path=path: service.create_sampling_client(BASE_MODEL, path)
        )
        if path in ids:
            message = refusal(
                lambda path=path: rest.get_checkpoint_download_url(ids[path]).result()
            )
            assert "has expired" in message
    assert prompt_logprobs(sampler) == before
    # The name is free again, and what has no time to live stays.
    assert client.save_weights_for_sampler("short").result().path == short[1]
    service.create_training_client_from_state(kept[0]).forward([supervised_datum(PROMPT)]).result()


@pytest.mark.parametrize("seconds", [0, -5])
def test_a_lifetime_is_at_least_a_second(service: ServiceClient, seconds: int) -> None:
    client = new_run(service)
    message = refusal(lambda: client.save_state("short", ttl_seconds=seconds).result())
    assert f"ttl_seconds must be 1 or more: {seconds}" in message


# -- RestClient ------------------------------------------------------------------------------------


def test_rest_client_knows_runs_and_sessions(service: ServiceClient) -> None:
    client = new_run(service, rank=16)
    weights = client.save_weights_for_sampler("weights").result().path
    sampler = client.create_sampling_client(weights)
    of_base = service.create_sampling_client(BASE_MODEL)
    rest = service.create_rest_client()
    run = rest.get_training_run(client.training_run_cuid).result()
    assert (run.training_run_id, run.base_model) == (client.training_run_cuid, BASE_MODEL)
    assert (run.is_lora, run.lora_rank, run.corrupted) == (True, 16, False)
    first_page = rest.list_training_runs(limit=1).result()
    assert [r.training_run_id for r in first_page.training_runs] == [client.training_run_cuid]
    assert (first_page.cursor.offset, first_page.cursor.limit) == (0, 1)
    total = first_page.cursor.total_count
    everything = rest.list_training_runs(limit=1000).result().training_runs
    assert len({r.training_run_id for r in everything}) == total
    assert rest.list_training_runs(offset=total).result().training_runs == []
    session = rest.get_session(service.service_session_cuid).result()
    assert client.training_run_cuid in session.training_run_ids
    assert {sampler.sampling_run_cuid, of_base.sampling_run_cuid} <= set(session.sampler_ids)
    assert service.service_session_cuid in rest.list_sessions(limit=1000).result().sessions
    found = rest.get_sampler(sampler.sampling_run_cuid).result()
    assert (found.base_model, found.model_path) == (BASE_MODEL, weights)
    assert rest.get_sampler(of_base.sampling_run_cuid).result().model_path is None
    for ask in (rest.get_training_run, rest.get_session, rest.get_sampler):
        assert "'nowhere'" in refusal(lambda ask=ask: ask("nowhere").result())


def test_rest_client_lists_checkpoints_newest_first(service: ServiceClient) -> None:
    client = new_run(service)
    states = [client.save_state(f"s{i}").result() for i in range(3)]
    weights = client.save_weights_for_sampler("w").result()
    rest = service.create_rest_client()
    checkpoints = rest.list_checkpoints(client.training_run_cuid).result().checkpoints
    expected = [weights.path, *(state.path for state in reversed(states))]
    assert [c.path for c in checkpoints] == expected
    assert [c.checkpoint_type for c in checkpoints] == ["sampler"] + ["training"] * 3
    sizes = [weights.size, *(state.size for state in reversed(states))]
    assert [c.size_bytes for c in checkpoints] == sizes
    pages = [rest.list_user_checkpoints(limit=2, offset=i).result() for i in (0, 2)]
    assert [c.path for page in pages for c in page.checkpoints] == expected
    assert all(page.cursor is not None and page.cursor.limit == 2 for page in pages)
    assert "'nowhere'" in refusal(lambda: rest.list_checkpoints("nowhere").result())


def test_deleting(service: ServiceClient) -> None:
    client = new_run(service)
    train(client, range(1))
    path = client.save_state("gone").result().path
    sampler = service.create_sampling_client(BASE_MODEL, path)
    identity = checkpoint_id(service, path)
    rest = service.create_rest_client()
    rest.delete_checkpoint(client.training_run_cuid, identity).result()
    assert path not in listed_paths(service)
    for call in (
        lambda: service.create_training_client_from_state(path),
        lambda: service.create_sampling_client(BASE_MODEL, path),
        lambda: rest.get_checkpoint_archive_url(identity).result(),
        lambda: rest.delete_checkpoint(client.training_run_cuid, identity).result(),
    ):
        assert "no checkpoint" in refusal(call)
    # A sampler holds its weights; a first request after the deletion still finds them.
    assert len(prompt_logprobs(sampler)) == len(PROMPT) - 1
    client.save_state("gone").result()


def test_downloading_whole_and_resumed(service: ServiceClient, tmp_path: Path) -> None:
    client = new_run(service)
    train(client, range(1))
    rest = service.create_rest_client()
    contents = {
        client.save_state("s").result().path: {"optimizer.safetensors"},
        client.save_weights_for_sampler("w").result().path: set(),
    }
    for path, more in contents.items():
        identity = checkpoint_id(service, path)
        target = tmp_path / f"{identity}.zip"
        whole = rest.download_checkpoint(identity, target).result()
        content = target.read_bytes()
        assert (whole.bytes_written, whole.file_size_bytes) == (len(content), len(content))
        assert not whole.resumed
        with zipfile.ZipFile(target) as archive:
            assert archive.testzip() is None
            expected = {"adapter_config.json", "adapter_model.safetensors"} | more
            assert set(archive.namelist()) == expected
        target.write_bytes(content[:1000])
        rest_of_it = rest.download_checkpoint(identity, target).result()
        assert (rest_of_it.bytes_written, rest_of_it.resumed) == (len(content) - 1000, True)
        assert target.read_bytes() == content
        complete = rest.download_checkpoint(identity, target).result()
        assert (complete.bytes_written, complete.file_size_bytes) == (0, len(content))
        target.write_bytes(b"something else")
        anew = rest.download_checkpoint(identity, target, resume=False).result()
        assert (anew.bytes_written, anew.resumed) == (len(content), False)
        assert target.read_bytes() == content


@pytest.mark.parametrize(
    ("flags", "adapted"),
    [
        ({}, {"mlp", "self_attn", "lm_head"}),
        ({"train_mlp": False, "train_unembed": False}, {"self_attn"}),
        ({"train_attn": False, "train_unembed": False}, {"mlp"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_peft_loads_a_download(
    service: ServiceClient, tmp_path: Path, flags: dict[str, bool], adapted: set[str]
) -> None:
    """The adapter sits where the flags say, and peft computes what trainer and sampler do."""
    client = new_run(service, rank=16, **flags)
    train(client, range(3))
    path = client.save_weights_for_sampler("w").result().path
    folder = downloaded(service, path, tmp_path)
    places = {"mlp", "self_attn", "lm_head"}
    names = adapter_tensors(folder)
    assert {place for place in places for name in names if place in name} == adapted
    model = adapted_model(folder)
    with torch.no_grad():
        expected = logprobs_of(model, PROMPT[:-1], PROMPT[1:]).tolist()
        with model.disable_adapter():
            of_base = logprobs_of(model, PROMPT[:-1], PROMPT[1:]).tolist()
    assert expected != pytest.approx(of_base, abs=1e-2)
    output = client.forward([supervised_datum(PROMPT)]).result().loss_fn_outputs[0]
    assert output["logprobs"].data == pytest.approx(expected, abs=1e-4)
    assert prompt_logprobs(client.create_sampling_client(path)) == pytest.approx(expected, abs=1e-4)


# -- across backends -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Restarted:
    """What a first backend left in its store, and a second one on the same store."""

    service: ServiceClient
    halfway: str
    final_adapter: Tensors
    weights: str
    weights_logprobs: list[float]
    temporary: str
    remapped: str
    listed: list[Checkpoint]


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarted]:
    folder = tmp_path_factory.mktemp("restarted")
    store = folder / "store"
    first = start_backend(folder / "first", "--model", "mapped=standin", store=store)
    with service_on(first) as service:
        client = new_run(service)
        train(client, range(3))
        halfway = client.save_state("halfway").result().path
        weights = client.save_weights_for_sampler("weights").result().path
        logprobs = prompt_logprobs(client.create_sampling_client(weights))
        sampler = client.save_weights_and_get_sampling_client()
        assert prompt_logprobs(sampler) == logprobs
        found = service.create_rest_client().get_sampler(sampler.sampling_run_cuid).result()
        train(client, range(3, 6))
        final = saved_adapter(service, client, "final", folder)
        mapped = service.create_lora_training_client("mapped", rank=8)
        remapped = mapped.save_state("remapped").result().path
        listed = service.create_rest_client().list_user_checkpoints().result().checkpoints
        # The address of temporary weights works while their backend lives.
        assert prompt_logprobs(service.create_sampling_client(BASE_MODEL, found.model_path))
    first.stop()
    second = start_backend(folder / "second", "--model", "mapped=large", store=store)
    with service_on(second) as service:
        yield Restarted(
            service, halfway, final, weights, logprobs, str(found.model_path), remapped, listed
        )
    second.stop()


def test_another_backend_resumes_bit_for_bit(restarted: Restarted, tmp_path: Path) -> None:
    client = restarted.service.create_training_client_from_state_with_optimizer(restarted.halfway)
    train(client, range(3, 6))
    final = saved_adapter(restarted.service, client, "final", tmp_path)
    assert_equal(final, restarted.final_adapter)


def test_another_backend_samples_from_saved_weights(restarted: Restarted) -> None:
    sampler = restarted.service.create_sampling_client(BASE_MODEL, restarted.weights)
    assert prompt_logprobs(sampler) == pytest.approx(restarted.weights_logprobs, abs=1e-6)


def test_another_backend_lists_the_same_and_nothing_temporary(restarted: Restarted) -> None:
    paths = [checkpoint.path for checkpoint in restarted.listed]
    assert len(paths) == 4
    assert not any("temp-sampling" in path for path in paths)
    rest = restarted.service.create_rest_client()
    now = {c.path: c for c in rest.list_user_checkpoints().result().checkpoints}
    assert [now[path] for path in paths] == restarted.listed
    of_run = rest.list_checkpoints(run_id_of(restarted.halfway)).result().checkpoints
    assert restarted.halfway in [c.path for c in of_run]


def test_temporary_weights_end_with_their_backend(restarted: Restarted) -> None:
    assert "temp-sampling" in restarted.temporary
    message = refusal(
        lambda: restarted.service.create_sampling_client(BASE_MODEL, restarted.temporary)
    )
    assert "no checkpoint at" in message


def test_a_name_served_by_another_model_now_is_refused(restarted: Restarted) -> None:
    """An adapter fits the model it was trained on, even where the shapes agree."""
    service, path = restarted.service, restarted.remapped
    client = service.create_lora_training_client("mapped", rank=8)
    for call in (
        lambda: service.create_training_client_from_state(path),
        lambda: service.create_sampling_client("mapped", path),
        lambda: client.load_state(path),
    ):
        message = refusal(call)
        assert "standin" in message and "large" in message


# -- killed backends -------------------------------------------------------------------------------


def whole_checkpoints(store: Path) -> set[str]:
    """Addresses of everything listed in a store, once each has been read in full."""
    left = CheckpointStore(store)
    for checkpoint in left.listed():
        left.load(checkpoint, with_optimizer=checkpoint.type == "TRAINING")
    return {checkpoint.uri for checkpoint in left.listed()}


@pytest.mark.slow
def test_a_killed_backend_leaves_only_whole_checkpoints(
    backend_factory: Callable[..., Backend], tmp_path: Path
) -> None:
    """Killed three times at a random moment among many saves, overwrites and deletions: what was
    acknowledged is there, all that is listed can be read, and the next backend goes on with it."""
    chance, store = random.Random(7), tmp_path / "store"
    latest = weights = ""
    in_a_hurry = {
        "training_retry_timeout_seconds": 0.0,
        "control_retry_timeout_seconds": 0.0,
        "training_event_queue_capacity": 200,
    }
    for _ in range(3):
        running = backend_factory(store=store)
        with service_on(running, **in_a_hurry) as service:
            if latest:
                train(resumed(service, latest, WITH_OPTIMIZER), range(1))
                assert prompt_logprobs(service.create_sampling_client(BASE_MODEL, weights))
            client = new_run(service, rank=4, train_mlp=False)
            train(client, range(1))
            rest = service.create_rest_client()
            doomed = [client.save_state(f"doomed{i}").result().path for i in range(3)]
            identities = [checkpoint_id(service, path) for path in doomed]
            saves = []
            for i in range(50):
                saves += [
                    client.save_state(f"s{i}"),
                    client.save_state("latest", overwrite=True),
                    client.save_weights_for_sampler(f"w{i}"),
                ]
            wait([saves[chance.randrange(6, 24)]._future], timeout=60)
            for identity in identities:
                rest.delete_checkpoint(client.training_run_cuid, identity)
            time.sleep(chance.uniform(0, 0.05))
            running.process.kill()
            running.process.wait()
            outcomes = [save.exception(timeout=60) for save in saves]
        kept = [s.result().path for s, error in zip(saves, outcomes, strict=True) if error is None]
        assert 6 < len(kept) < 150, "the kill must fall among the saves"
        assert set(kept) <= whole_checkpoints(store)
        latest, weights = kept[1], kept[2]


def save_directly(store: CheckpointStore, name: str, **more: Any) -> None:
    tensors = {"base_model.model.x.lora_A.weight": torch.zeros(2, 2)}
    facts: dict[str, Any] = {
        "training_run": "run", "name": name, "type": "TRAINING", "step": 0,
        "base_model": BASE_MODEL, "kind": "standin", "lora": {"rank": 4},
        "visibility": "WORKSPACE", "ttl_seconds": None, "overwrite": False,
        "adapter": tensors, "adapter_config": {}, "optimizer": tensors,
    }  # fmt: skip
    store.save(**(facts | more))


def test_a_deletion_cut_short_leaves_nothing_half_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when the first of a checkpoint's files is gone."""
    store = CheckpointStore(tmp_path)
    save_directly(store, "a")
    save_directly(store, "b")

    def cut_short(folder: Path, **_: Any) -> None:
        (Path(folder) / "adapter_model.safetensors").unlink()
        raise SystemExit("killed")

    victim = store.find("trio://run/state/a")
    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(store_module.shutil, "rmtree", cut_short)
        store.delete(victim.cuid)
    later = CheckpointStore(tmp_path)
    assert [checkpoint.name for checkpoint in later.listed()] == ["b"]
    for checkpoint in later.listed():
        later.load(checkpoint, with_optimizer=True)


@pytest.mark.parametrize("cut", ["write_json", "replace", "rmtree"])
def test_an_overwriting_cut_short_leaves_one_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """Killed while the new one is written, before it is renamed, or while the old one goes."""
    store = CheckpointStore(tmp_path)
    save_directly(store, "a", step=1)

    def killed(*_: Any, **__: Any) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        # A killed process tidies nothing up.
        patched.setattr(store_module.shutil, "rmtree", lambda *_, **__: None)
        owner = {"write_json": store_module, "replace": store_module.os}
        patched.setattr(owner.get(cut, store_module.shutil), cut, killed)
        save_directly(store, "a", step=2, overwrite=True)
    later = CheckpointStore(tmp_path)
    [checkpoint] = later.listed()
    assert checkpoint.step == (2 if cut == "rmtree" else 1)
    later.load(checkpoint, with_optimizer=True)


def test_a_backend_that_starts_leaves_the_saves_of_another_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two dry runs in one directory share the default store."""
    store = CheckpointStore(tmp_path)
    write_json = store_module.write_json

    def start_another_first(path: Path, value: dict[str, Any]) -> None:
        CheckpointStore(tmp_path)
        write_json(path, value)

    monkeypatch.setattr(store_module, "write_json", start_another_first)
    save_directly(store, "a")
    assert [checkpoint.name for checkpoint in CheckpointStore(tmp_path).listed()] == ["a"]
