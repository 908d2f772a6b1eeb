"""The wire: every endpoint, the order of events, tokens, faults, refusals, sessions, recording."""

import ast
import asyncio
import gc
import inspect
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytrio as trio
from pytrio.config.config import configuration, control_api_url
from pytrio.errors.actor import ActorAPIError
from pytrio.errors.base import PyTrioError
from pytrio.errors.control import ControlAPIError
from pytrio.errors.event import EventFailedError
from pytrio.observability.transport import TELEMETRY_EVENT_PATH, TelemetryTransport
from pytrio.protocol.actor.events.event import (
    EventFailedResponse,
    EventResponse,
    EventStatus,
    EventType,
    unpack_event_response,
)
from pytrio.protocol.actor.events.trainer.end_run import TrainerEndRunPayload
from pytrio.protocol.actor.events.trainer.init_run import TrainerInitRunPayload
from pytrio.protocol.actor.sampling_run.sample import SampleRequest
from pytrio.protocol.control.actor.credentials import ActorConnectionInfo, ActorJWT
from pytrio.transport.actor.http_client import ActorHTTPClient
from pytrio.transport.connectivity import probe_base_url_connectivity
from pytrio.transport.control.http_client import ControlHTTPClient
from pytrio.transport.download import Downloader, DownloadSource
from safetensors.numpy import load_file

from conftest import KEY, Backend
from wire import (
    BASE_MODEL,
    LORA,
    QUICK_RETRIES,
    Run,
    Wire,
    actor_error,
    floats_of,
    forward_payload,
    ids_of,
    optimize_payload,
    read_trace,
    sample_body,
    save_payload,
)

INIT, FORWARD = EventType.TRAINER_INIT_RUN, EventType.TRAINER_FORWARD
FORWARD_BACKWARD = EventType.TRAINER_FORWARD_BACKWARD
OPTIMIZE, SAVE = EventType.TRAINER_OPTIMIZE_STEP, EventType.TRAINER_SAVE_STATE
SEQUENCES = [[20, 21, 22, 23, 24], [30, 31, 32], [40, 41, 42, 43]]
SHORT_SAMPLE = trio.SamplingParams(max_tokens=3, seed=1)
PROMPT = trio.ModelInput.from_ints([10, 11, 12])


@pytest.fixture(autouse=True)
def sdk_settings_restored() -> Iterator[None]:
    """`trio.configure` is process-wide; what one test sets must not reach another."""
    before = configuration.model_copy()
    yield
    for name in type(configuration).model_fields:
        setattr(configuration, name, getattr(before, name))


@pytest.fixture
def wire(backend: Backend) -> Wire:
    return Wire(backend.url)


def datum(tokens: list[int]) -> trio.Datum:
    """One sequence trained on its own next tokens."""
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:]},
    )


def failure_of(response: EventResponse) -> str:
    """The code of a failed event."""
    assert isinstance(response, EventFailedResponse), response
    assert response.error.message
    return response.error.code


# -- every endpoint the SDK can call ---------------------------------------------------------------

HTTP_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
# Addresses that the SDK's source holds in a variable, and what they are on our backend.
VARIABLE_PATHS = {
    "active_source.url": "/download/{checkpoint}",
    "self._url": TELEMETRY_EVENT_PATH,
    "origin": "/",
}
# The probe asks only whether anybody answers.
PROBE = ("HEAD", "/")


def path_text(node: ast.expr, prefix: str) -> str:
    """A call's path argument as a template; unknown forms fail the test."""
    if isinstance(node, ast.Constant):
        return prefix + str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [str(p.value) if isinstance(p, ast.Constant) else "{id}" for p in node.values]
        return prefix + "".join(parts)
    text = ast.unparse(node)
    assert text in VARIABLE_PATHS, f"the SDK calls an address this test does not know: {text}"
    return VARIABLE_PATHS[text]


def endpoints_in_sdk() -> set[tuple[str, str]]:
    """(method, path template) of every HTTP call in the installed SDK's source."""
    root = Path(trio.__file__).parent
    found = set()
    for file in sorted(root.rglob("*.py")):
        prefix = "/api/" if "control" in file.relative_to(root).parts else "/"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            verb, receiver = node.func.attr.upper(), ast.unparse(node.func.value)
            if verb in HTTP_METHODS and receiver.endswith("client"):
                found.add((verb, path_text(node.args[0], prefix)))
            for method, path in zip(node.args, node.args[1:], strict=False):
                if isinstance(method, ast.Constant) and method.value in HTTP_METHODS:
                    found.add((method.value, path_text(path, prefix)))
    return found


# Calls of the SDK's transport clients that reach no endpoint of their own.
NOT_ENDPOINTS = {
    "aclose", "renew", "renew_if_needed", "schedule_renewal_if_needed", "update_credentials"
}  # fmt: skip


async def call_all(client: object, values: dict[str, object], only: str = "") -> None:
    """Call every public coroutine method of a transport client, those that end things last."""
    last = ("get_event", "close_service_session", "delete_checkpoint")
    for name in sorted(dir(client), key=lambda name: (name in last, name)):
        call = getattr(client, name)
        if name.startswith("_") or not inspect.iscoroutinefunction(call) or name in NOT_ENDPOINTS:
            continue
        if not re.fullmatch(only or ".*", name):
            continue
        needed = [
            parameter.name
            for parameter in inspect.signature(call).parameters.values()
            if parameter.default is inspect.Parameter.empty
        ]
        unknown = set(needed) - set(values)
        assert not unknown, f"the SDK's {name} takes {unknown}: teach this test"
        await call(**{parameter: values[parameter] for parameter in needed})


def test_every_endpoint_of_the_sdk_is_served(
    backend: Backend, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = wire.training_run()
    saved.execute(INIT, saved.init(), 1)
    kept = saved.execute(SAVE, save_payload("kept"), 2).result["checkpoint"]
    deleted = saved.execute(SAVE, save_payload("deleted"), 3).result["checkpoint"]
    envelope = saved.envelope(FORWARD, forward_payload(SEQUENCES), 4)
    session = wire.session()
    run, sampling = wire.training_run(session), wire.sampling_run(session)
    values: dict[str, object] = {
        "service_session_cuid": session,
        "training_run_cuid": run.cuid,
        "sampling_run_cuid": sampling.cuid,
        "checkpoint_cuid": deleted["checkpoint_cuid"],
        "checkpoint_uri": kept["uri"],
        "source_checkpoint_uri": kept["uri"],
        "restore_optimizer": True,
        "base_model": BASE_MODEL,
        "lora_rank": LORA["rank"],
        "train_mlp": True,
        "train_attn": True,
        "train_unembed": True,
        "status": "ENDED",
        "envelope": envelope,
        "event_id": envelope.event_id,
        "request": SampleRequest.model_validate(sample_body()),
    }
    seen: list[tuple[str, str, int]] = []
    send = httpx.AsyncClient.send

    async def recorded_send(self: Any, request: httpx.Request, **options: Any) -> httpx.Response:
        response = await send(self, request, **options)
        seen.append((request.method, request.url.path, response.status_code))
        return response

    monkeypatch.setattr(httpx.AsyncClient, "send", recorded_send)

    async def call_everything() -> None:
        hour = datetime.now(timezone.utc) + timedelta(hours=1)
        http = httpx.AsyncClient(base_url=control_api_url(backend.url), headers={"X-API-Key": KEY})
        control = ControlHTTPClient(api_key=KEY, http_client=http)
        await call_all(control, values)
        for token, calls in ((sampling.token, "sample"), (saved.token, "(?!sample$).*")):
            address = ActorConnectionInfo(
                actor_cuid="a", endpoint=backend.url, connect_mode="direct", tls_enabled=False
            )
            await call_all(
                ActorHTTPClient(address, ActorJWT(token=token, expires_at=hour)), values, calls
            )
        link = await control.get_checkpoint_download_url(kept["checkpoint_cuid"])
        source = DownloadSource(link.url, hour, "object_storage")
        await Downloader().download(source, tmp_path / "archive.zip", resume=False)
        assert (await TelemetryTransport(base_url=backend.url, api_key=KEY).send(b"{}")).ok
        assert (await probe_base_url_connectivity(backend.url)).status == "reachable"

    trio.configure(**QUICK_RETRIES)
    asyncio.run(call_everything())
    endpoints = endpoints_in_sdk()
    assert len(endpoints) >= 28
    for method, template in sorted(endpoints):
        pattern = re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(template)))
        statuses = [s for m, path, s in seen if m == method and pattern.fullmatch(path)]
        assert statuses, f"{method} {template} was never called by this test"
        if (method, template) != PROBE:
            assert max(statuses) < 400, f"{method} {template} is answered {statuses}"


# -- events over the wire --------------------------------------------------------------------------


def one_step(run: Run) -> list[Any]:
    """The envelopes of init, two accumulated gradients, a step, one more, and a forward."""
    return [
        run.envelope(INIT, run.init(), 1),
        run.envelope(FORWARD_BACKWARD, forward_payload(SEQUENCES[:1]), 2),
        run.envelope(FORWARD_BACKWARD, forward_payload(SEQUENCES[1:]), 3),
        run.envelope(OPTIMIZE, optimize_payload(), 4),
        run.envelope(FORWARD_BACKWARD, forward_payload(SEQUENCES), 5),
        run.envelope(OPTIMIZE, optimize_payload(), 6),
        run.envelope(FORWARD, forward_payload(SEQUENCES), 7),
    ]


def results_of(run: Run, envelopes: list[Any]) -> list[dict[str, Any]]:
    states = [run.result(envelope) for envelope in envelopes]
    assert all(state.status is EventStatus.SUCCEEDED for state in states), states
    return [state.result for state in states]


def test_events_execute_in_index_order_whatever_their_arrival(wire: Wire) -> None:
    ordered, scrambled = wire.training_run(), wire.training_run()
    envelopes = one_step(ordered)
    for envelope in envelopes:
        assert ordered.submit(envelope).status_code == 200
    expected = results_of(ordered, envelopes)
    envelopes = one_step(scrambled)
    for position in (3, 6, 1, 5, 4, 2, 0):
        response = scrambled.submit(envelopes[position])
        assert response.status_code == 200
        # Nothing starts before its turn.
        state = unpack_event_response(response.content).status
        assert (state is EventStatus.ACCEPTED) == (position != 0)
    assert results_of(scrambled, envelopes) == expected
    # The order matters for these numbers, so equality above proves it.
    assert expected[4]["metrics"]["loss_sum"] != expected[6]["metrics"]["loss_sum"]


def test_event_id_is_idempotent_and_index_is_taken_once(wire: Wire) -> None:
    once, repeated = wire.training_run(), wire.training_run()
    norms = []
    for run, submits in ((once, 1), (repeated, 3)):
        run.execute(INIT, run.init(), 1)
        step = run.envelope(FORWARD_BACKWARD, forward_payload(SEQUENCES), 2)
        answers = [run.submit(step) for _ in range(submits)]
        assert answers[0].status_code == 200
        for answer in answers[1:]:
            assert answer.status_code == 409
            assert actor_error(answer)["code"] == "event_exists"
        run.result(step)
        # Still known when finished, and its result can be fetched again and again.
        assert actor_error(run.submit(step))["code"] == "event_exists"
        polls = {run.poll(step.event_id).content for _ in range(4)}
        assert len(polls) == 1
        norms.append(run.execute(OPTIMIZE, optimize_payload(), 3).result["metrics"]["grad_norm"])
    assert norms[0] == norms[1] > 0
    for index, status, code in (
        (2, 409, "event_index_conflict"),
        (3, 409, "event_index_conflict"),
        (10_000, 422, "event_index_gap"),
    ):
        answer = once.submit(once.envelope(OPTIMIZE, optimize_payload(), index))
        assert (answer.status_code, actor_error(answer)["code"]) == (status, code)
    early = once.envelope(OPTIMIZE, optimize_payload(), 6)
    assert once.submit(early).status_code == 200
    answer = once.submit(once.envelope(OPTIMIZE, optimize_payload(), 6))
    assert (answer.status_code, actor_error(answer)["code"]) == (409, "event_index_conflict")
    # None of these refusals has disturbed the run.
    assert once.execute(FORWARD, forward_payload(SEQUENCES), 4).status is EventStatus.SUCCEEDED


def test_long_poll_waits_and_wakes(backend: Backend, wire: Wire) -> None:
    run = wire.training_run()
    run.execute(INIT, run.init(), 1)
    second = run.envelope(FORWARD, forward_payload(SEQUENCES), 3)
    run.submit(second)
    started = time.monotonic()
    waiting = unpack_event_response(run.poll(second.event_id, wait=6).content)
    assert waiting.status is EventStatus.ACCEPTED
    assert 0.9 < time.monotonic() - started < 4
    woken: list[EventResponse] = []
    poller = Run(Wire(backend.url).http, run.cuid, run.session, run.model_id, run.token)
    thread = threading.Thread(target=lambda: woken.append(poller.result(second)))
    started = time.monotonic()
    thread.start()
    time.sleep(0.3)
    assert not woken
    run.submit(run.envelope(FORWARD, forward_payload(SEQUENCES), 2))
    thread.join(20)
    assert woken and woken[0].status is EventStatus.SUCCEEDED
    assert time.monotonic() - started < 15


def test_answers_are_not_held_back(wire: Wire) -> None:
    times = [wire.control("GET", "/api-key/verify").elapsed.total_seconds() for _ in range(40)]
    # Nagle's algorithm and delayed acknowledgements would make it 40 ms and more.
    assert min(times[20:]) < 0.03


def test_runs_are_isolated_from_each_other(wire: Wire) -> None:
    mine, other, sampling = wire.training_run(), wire.training_run(), wire.sampling_run()
    mine_event = mine.envelope(INIT, mine.init(), 1)
    intruder = Run(wire.http, mine.cuid, mine.session, mine.model_id, other.token)
    answer = intruder.submit(mine_event)
    assert (answer.status_code, actor_error(answer)["code"]) == (403, "run_mismatch")
    mine.submit(mine_event)
    mine.result(mine_event)
    for token, status in ((other.token, 404), (sampling.token, 404), ("made-up", 401)):
        intruder.token = token
        answer = intruder.poll(mine_event.event_id)
        assert (answer.status_code, bool(actor_error(answer)["message"])) == (status, True)
    for token, status in ((other.token, 403), (wire.sampling_run().token, 403), ("made-up", 401)):
        thief = Run(wire.http, sampling.cuid, sampling.session, sampling.model_id, token)
        answer = thief.sample()
        assert (answer.status_code, bool(actor_error(answer)["message"])) == (status, True)
    assert sampling.sample().status_code == 200


# -- faults ----------------------------------------------------------------------------------------


def refusals(backend: Backend) -> list[tuple[str, int, str]]:
    """(path, status, code) of everything the backend has refused so far."""
    records, _ = read_trace(backend.record / "trace.msgpack")
    return [(r["path"], r["status"], r["code"]) for r in records if r["kind"] == "refused"]


def test_capacity_is_waited_for_and_dead_tokens_are_renewed(
    backend_factory: Callable[..., Backend],
) -> None:
    backend = backend_factory("--fault", "capacity=2,token_expiry=1s")
    client = backend.client(actor_capacity_poll_interval_seconds=0.1, **QUICK_RETRIES)
    trainer = client.create_lora_training_client(BASE_MODEL, rank=8)
    codes = [code for _, _, code in refusals(backend)]
    assert codes == ["actor_capacity_exceeded"] * 2
    sampler = client.create_sampling_client(BASE_MODEL)
    run = Wire(backend.url).training_run()
    assert run.execute(INIT, run.init(), 1).status is EventStatus.SUCCEEDED
    started = time.monotonic()
    while time.monotonic() - started < 2.5:
        trainer.forward_backward([datum(tokens) for tokens in SEQUENCES]).result()
        trainer.optim_step(trio.AdamParams(learning_rate=1e-3)).result()
        answer = sampler.sample(PROMPT, sampling_params=SHORT_SAMPLE).result()
        assert len(answer.sequences) == 1
        time.sleep(0.2)
    dead = {path for path, status, code in refusals(backend) if code == "token_expired"}
    assert dead & {"/v1/events"} or any(path.startswith("/v1/events/") for path in dead)
    assert f"/v1/sampling-runs/{sampler.sampling_run_cuid}/sample" in dead
    answer = run.poll("event_000000000000")
    assert (answer.status_code, actor_error(answer)["code"]) == (401, "token_expired")
    assert actor_error(run.submit(run.envelope(OPTIMIZE, optimize_payload(), 2)))["message"]
    renewed = Wire(backend.url).control("POST", f"/training-runs/{run.cuid}/renew").json()
    run.token = renewed["actor_jwt"]["token"]
    assert run.execute(OPTIMIZE, optimize_payload(), 2).status is EventStatus.SUCCEEDED


def test_billing_refusal_reaches_the_script(backend_factory: Callable[..., Backend]) -> None:
    backend = backend_factory("--fault", "billing_409")
    client = backend.client(**QUICK_RETRIES)
    for create in (client.create_lora_training_client, client.create_sampling_client):
        with pytest.raises(ControlAPIError) as caught:
            create(BASE_MODEL)
        assert caught.value.code == "billing_insufficient_balance"
        assert caught.value.status_code == 409


def test_failures_are_final_and_a_killed_recording_is_readable(
    backend_factory: Callable[..., Backend],
) -> None:
    backend = backend_factory("--fault", "fail_chunk=2,lost_actor=2", "--max-batch-size", "2")
    a_failed_chunk_breaks_the_run(backend)
    a_lost_actor_loses_its_sampler(backend)
    gc.collect()
    backend.process.kill()
    backend.process.wait(20)
    records, is_whole = read_trace(backend.record / "trace.msgpack")
    assert not is_whole
    assert records[0]["kind"] == "header"
    assert [r["kind"] for r in records].count("sample") == 3
    failures = [r["error"]["code"] for r in records if r.get("status") == "failed"]
    assert failures == ["trainer_failed", "training_run_corrupted"]
    assert not (backend.record / "summary.json").exists()


def a_failed_chunk_breaks_the_run(backend: Backend) -> None:
    client = backend.client(**QUICK_RETRIES)
    trainer = client.create_lora_training_client(BASE_MODEL, rank=8)
    batch = [datum(tokens) for tokens in [*SEQUENCES, [50, 51, 52]]]
    with pytest.raises(EventFailedError) as failed:
        trainer.forward_backward(batch).result()
    assert failed.value.code == "trainer_failed"
    adam = trio.AdamParams(learning_rate=1e-3)
    for later in (
        lambda: trainer.optim_step(adam).result(),
        lambda: trainer.forward_backward(batch[:1]).result(),
        lambda: trainer.save_state("after").result(),
    ):
        with pytest.raises(PyTrioError) as broken:
            later()
        assert broken.value.code == "training.run_broken"
    rest = client.create_rest_client()
    assert rest.get_training_run(trainer.training_run_cuid).result(20).corrupted
    # The server itself refuses to go on: a client that missed the failure cannot train on half
    # a gradient.
    wire = Wire(backend.url)
    answer = wire.control("GET", f"/training-runs/{trainer.training_run_cuid}").json()
    assert "chunk" in answer["corrupted_reason"]
    renewed = wire.control("POST", f"/training-runs/{trainer.training_run_cuid}/renew").json()
    run = Run(wire.http, trainer.training_run_cuid, "", "", renewed["actor_jwt"]["token"])
    assert failure_of(run.execute(OPTIMIZE, optimize_payload(), 4)) == "training_run_corrupted"
    # Another run of the same session is not touched.
    healthy = client.create_lora_training_client(BASE_MODEL, rank=8)
    assert healthy.forward_backward(batch).result().metrics["token_count"] == 11


def a_lost_actor_loses_its_sampler(backend: Backend) -> None:
    client = backend.client(**QUICK_RETRIES)
    sampler = client.create_sampling_client(BASE_MODEL)
    for _ in range(2):
        sampler.sample(PROMPT, sampling_params=SHORT_SAMPLE).result()
    with pytest.raises(ActorAPIError) as lost:
        sampler.sample(PROMPT, sampling_params=SHORT_SAMPLE).result()
    assert (lost.value.status_code, lost.value.code) == (404, "sampling_run_not_found")
    fresh = client.create_sampling_client(BASE_MODEL)
    assert fresh.sample(PROMPT, sampling_params=SHORT_SAMPLE).result().sequences


def outcome(call: Callable[[], httpx.Response]) -> str:
    """A request's status, or `cut` when the connection ended without an answer."""
    try:
        return str(call().status_code)
    except httpx.RemoteProtocolError:
        return "cut"


def test_latency_cuts_and_unavailable_samplers_are_survived(
    backend_factory: Callable[..., Backend],
) -> None:
    backend = backend_factory("--fault", "latency=30ms,sample_503=0.3,drop_connection=0.3")
    wire = Wire(backend.url)
    run, sampling = wire.training_run(), wire.sampling_run()
    times = [wire.control("GET", "/service-sessions").elapsed.total_seconds() for _ in range(3)]
    assert min(times) >= 0.03
    polls = [outcome(lambda: run.poll("event_000000000000")) for _ in range(20)]
    assert set(polls) == {"404", "cut"} and 2 < polls.count("cut") < 14
    samples = [outcome(sampling.sample) for _ in range(25)]
    assert set(samples) == {"200", "503", "cut"}
    assert all(samples.count(kind) > 2 for kind in ("200", "503", "cut"))

    client = backend.client(**QUICK_RETRIES)
    trainer = client.create_lora_training_client(BASE_MODEL, rank=8)
    sampler = client.create_sampling_client(BASE_MODEL)
    losses = []
    for _ in range(3):
        output = trainer.forward_backward([datum(tokens) for tokens in SEQUENCES])
        trainer.optim_step(trio.AdamParams(learning_rate=2e-3)).result()
        losses.append(output.result().metrics["loss_mean"])
        answers = [sampler.sample(PROMPT, sampling_params=SHORT_SAMPLE) for _ in range(3)]
        assert all(answer.result().sequences for answer in answers)
    assert losses[-1] < losses[0]
    records, _ = read_trace(backend.record / "trace.msgpack")
    # Cut and repeated requests are executed once each.
    assert [r["kind"] for r in records].count("optimizer_step") == 3


# -- nothing is accepted and ignored ---------------------------------------------------------------


def test_what_is_not_implemented_is_refused(backend: Backend, wire: Wire) -> None:
    image = trio.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=2)
    pictured = trio.ModelInput(chunks=[*trio.ModelInput.from_ints([5, 6]).chunks, image])
    client = backend.client(**QUICK_RETRIES)
    with pytest.raises(ActorAPIError) as refused:
        client.create_sampling_client(BASE_MODEL).sample(
            pictured, sampling_params=SHORT_SAMPLE
        ).result()
    assert (refused.value.status_code, refused.value.code) == (422, "images_not_supported")
    run = wire.training_run()
    run.execute(INIT, run.init(), 1)
    with_image = forward_payload(SEQUENCES).model_dump()
    with_image["data"][0]["model_input"]["chunks"].append(
        {"type": "image", "data": b"\x89PNG", "format": "png", "expected_tokens": 1}
    )
    mixed_totals = {"total_samples": 1, "total_active_tokens": 1, "total_advantage_tokens": 0}
    setting = {"type": "cross_entropy", "config": {"label_smoothing": 0.1}}
    ratio = {"type": "ppo", "config": {"clip_low_threshold": 0.2, "clip_high_threshold": 0.1}}
    steps: list[tuple[EventType, Any, str]] = [
        (
            FORWARD_BACKWARD,
            forward_payload(SEQUENCES, data=with_image["data"]),
            "images_not_supported",
        ),
        (FORWARD_BACKWARD, forward_payload(SEQUENCES, loss="grpo"), "unknown_loss"),
        (FORWARD, forward_payload(SEQUENCES, loss=setting), "unknown_loss_config"),
        (FORWARD, forward_payload(SEQUENCES, loss=ratio), "invalid_loss_config"),
        (FORWARD_BACKWARD, forward_payload(SEQUENCES, loss="ppo"), "missing_loss_input"),
        (FORWARD, forward_payload([[5, 99_999]]), "token_id_out_of_range"),
        (
            FORWARD,
            forward_payload(SEQUENCES, gradient_accumulation=mixed_totals),
            "totals_mismatch",
        ),
        (INIT, run.init(), "already_initialized"),
        (OPTIMIZE, optimize_payload(learning_rate=float("nan")), "invalid_adam_params"),
        (OPTIMIZE, optimize_payload(beta1=1.5), "invalid_adam_params"),
        (OPTIMIZE, optimize_payload(grad_clip_norm=-1.0), "invalid_adam_params"),
    ]
    for index, (kind, payload, code) in enumerate(steps, start=2):
        assert failure_of(run.execute(kind, payload, index)) == code
    # A refused event leaves the run as it was.
    healthy = run.execute(FORWARD_BACKWARD, forward_payload(SEQUENCES), len(steps) + 2)
    assert healthy.status is EventStatus.SUCCEEDED
    ended = run.execute(EventType.TRAINER_END_RUN, TrainerEndRunPayload(), len(steps) + 3)
    assert ended.status is EventStatus.SUCCEEDED
    answer = run.submit(run.envelope(OPTIMIZE, optimize_payload(), len(steps) + 4))
    assert (answer.status_code, actor_error(answer)["code"]) == (409, "run_ended")


def test_init_must_repeat_what_the_run_was_created_with(wire: Wire) -> None:
    source = {"checkpoint_uri": "trio://elsewhere/state/x"}
    for changes, code in (
        ({"lora_config": {**LORA, "rank": 16}}, "invalid_lora_config"),
        ({"lora_config": {**LORA, "train_mlp": False}}, "invalid_lora_config"),
        ({"base_model": "another"}, "model_mismatch"),
        (source, "checkpoint_mismatch"),
        ({"load_optimizer": True}, "checkpoint_mismatch"),
    ):
        run = wire.training_run()
        payload = TrainerInitRunPayload.model_validate({**run.init().model_dump(), **changes})
        assert failure_of(run.execute(INIT, payload, 1)) == code
        # The first event must still be a good init.
        early = run.execute(OPTIMIZE, optimize_payload(), 2)
        assert failure_of(early) == "run_not_initialized"
        assert run.execute(INIT, run.init(), 3).status is EventStatus.SUCCEEDED


@pytest.mark.parametrize(
    ("flag", "part", "modules"),
    [
        ("train_mlp", ".mlp.", 12),
        ("train_attn", ".self_attn.", 16),
        ("train_unembed", "lm_head", 1),
    ],
)
def test_lora_flags_select_their_layers(
    backend: Backend, wire: Wire, flag: str, part: str, modules: int
) -> None:
    off = {"train_mlp": False, "train_attn": False, "train_unembed": False}
    run = wire.training_run(**{**off, flag: True})
    run.execute(INIT, run.init(**{**off, flag: True}), 1)
    saved = run.execute(SAVE, save_payload("flags"), 2).result["checkpoint"]
    folder = backend.store / saved["checkpoint_cuid"]
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * modules
    assert all(part in name for name in tensors)
    for name, tensor in tensors.items():
        assert LORA["rank"] in tensor.shape, name
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["r"] == LORA["rank"]


def test_lora_without_any_layer_is_refused(backend: Backend) -> None:
    client = backend.client(**QUICK_RETRIES)
    with pytest.raises(PyTrioError) as refused:
        trainer = client.create_lora_training_client(
            BASE_MODEL, rank=8, train_mlp=False, train_attn=False, train_unembed=False
        )
        trainer.forward_backward([datum(SEQUENCES[0])]).result()
    assert refused.value.code == "invalid_lora_config"


# -- sessions --------------------------------------------------------------------------------------


def test_sessions_are_listed_renewed_and_closed(backend: Backend, wire: Wire) -> None:
    session = wire.session()
    run, sampling = wire.training_run(session), wire.sampling_run(session)
    for opened in (run, sampling):
        answer = wire.http.post("/v1/client/heartbeat", json={}, headers=opened.authorization)
        assert answer.status_code == 200
        assert answer.json()["heartbeat_ms"] > 0
    client = backend.client(**QUICK_RETRIES)
    rest = client.create_rest_client()
    listed = rest.list_sessions(limit=2).result(20)
    assert listed.sessions == [client.service_session_cuid, session]
    known = rest.get_session(session).result(20)
    assert known.training_run_ids == [run.cuid]
    assert known.sampler_ids == [sampling.cuid]
    before = wire.control("GET", f"/service-sessions/{session}").json()
    renewed = wire.control("POST", f"/service-sessions/{session}/renew").json()
    assert renewed["status"] == before["status"] == "RUNNING"
    assert renewed["updated_at"] > before["updated_at"]
    answer = wire.control("POST", f"/service-sessions/{session}/close", json={"status": "GONE"})
    assert answer.status_code == 422
    answer = wire.control(
        "POST", f"/service-sessions/{session}/close", json={"status": "CANCELLED"}
    )
    assert answer.status_code == 200
    assert wire.control("GET", f"/service-sessions/{session}").json()["status"] == "CANCELLED"
    assert wire.control("GET", f"/training-runs/{run.cuid}").json()["status"] == "CANCELLED"
    # Nothing new begins in a closed session.
    answer = run.submit(run.envelope(INIT, run.init(), 1))
    assert (answer.status_code, actor_error(answer)["code"]) == (409, "run_ended")
    for kind in ("training", "sampling"):
        body = {"base_model": BASE_MODEL}
        if kind == "training":
            body |= {"lora_rank": 8, "train_mlp": True, "train_attn": True, "train_unembed": True}
        answer = wire.control("POST", f"/service-sessions/{session}/{kind}-runs", json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, "session_ended")


def test_session_ends_with_its_client(backend: Backend, wire: Wire) -> None:
    client = backend.client(**QUICK_RETRIES)
    session = client.service_session_cuid
    assert wire.control("GET", f"/service-sessions/{session}").json()["status"] == "RUNNING"
    del client
    gc.collect()
    deadline = time.monotonic() + 10
    status = ""
    while status != "ENDED" and time.monotonic() < deadline:
        status = wire.control("GET", f"/service-sessions/{session}").json()["status"]
    assert status == "ENDED"


# -- recording -------------------------------------------------------------------------------------


def test_recording_holds_what_was_sent_and_served(
    backend_factory: Callable[..., Backend],
) -> None:
    backend = backend_factory("--seed", "3", "--reduction", "samples")
    client = backend.client(**QUICK_RETRIES)
    trainer = client.create_lora_training_client(BASE_MODEL, rank=8, seed=5)
    supervised = [
        trio.Datum(
            model_input=trio.ModelInput(
                chunks=[
                    *trio.ModelInput.from_ints([20, 21]).chunks,
                    *trio.ModelInput.from_ints([22, 23, 24]).chunks,
                ]
            ),
            loss_fn_inputs={
                "target_tokens": [21, -100, 23, 24, 25],
                "weights": [0.1, 5.0, -0.25, 0.0, 1 / 3],
            },
        ),
        datum([30, 31, 32]),
    ]
    policy = [
        trio.Datum(
            model_input=trio.ModelInput.from_ints([40, 41, 42]),
            loss_fn_inputs={
                "target_tokens": [41, 42, 43],
                "logprobs": [-0.7, -1.3, -2.1],
                "advantages": [1.5, 0.0, -0.3],
            },
        )
    ]
    outputs = [
        trainer.forward_backward(supervised).result(),
        trainer.forward_backward(
            policy, loss_fn="ppo", loss_fn_config={"clip_high_threshold": 1.28}
        ).result(),
        trainer.forward(supervised[1:], auto_shift=True).result(),
    ]
    adam = trio.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)
    metrics = trainer.optim_step(adam).result().metrics
    sampler = trainer.save_weights_and_get_sampling_client()
    params = trio.SamplingParams(max_tokens=6, temperature=0.7, stop=[7])
    answer = sampler.sample(
        PROMPT, num_samples=3, sampling_params=params, include_prompt_logprobs=True
    ).result()
    greedy = client.create_sampling_client(BASE_MODEL).sample(PROMPT, sampling_params=SHORT_SAMPLE)
    answers = [answer, greedy.result()]
    del client, sampler, trainer
    backend.stop()

    records, is_whole = read_trace(backend.record / "trace.msgpack")
    assert is_whole
    header, end = records[0], records[-1]
    assert header["kind"] == "header"
    assert (header["format"], header["version"]) == ("pytrio-skill-trace", 2)
    assert (header["seed"], header["reduction"]) == (3, "samples")
    assert header["sdk_version"] == configuration.version
    times = [record["time"] for record in records]
    assert times == sorted(times) and times[0] >= 0
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_kind.setdefault(record["kind"], []).append(record)
    assert [r["type"] for r in by_kind["event"]] == [
        "trainer.init_run",
        "trainer.forward_backward",
        "trainer.forward_backward",
        "trainer.forward",
        "trainer.optimize_step",
        "trainer.save_weights",
    ]
    (training_run,) = by_kind["training_run"]
    assert training_run["lora"] == {**LORA, "seed": 5}
    assert training_run["base_model"] == BASE_MODEL

    sent_by_call = [supervised, policy, supervised[1:]]
    for record, sent, output in zip(by_kind["event"][1:4], sent_by_call, outputs, strict=True):
        assert len(record["data"]) == len(sent)
        assert record["totals"]["total_samples"] == len(sent)
        assert record["metrics"] == output.metrics
        recorded_of = zip(record["data"], sent, output.loss_fn_outputs, strict=True)
        for recorded, original, served in recorded_of:
            chunks = [ids_of(chunk) for chunk in recorded["input"]]
            assert chunks == [list(chunk.tokens) for chunk in original.model_input.chunks]
            inputs = original.loss_fn_inputs
            assert ids_of(recorded["target_ids"]) == inputs["target_tokens"].data
            assert floats_of(recorded["served_logprobs"]) == served["logprobs"].data
            for name in {"weights", "logprobs", "advantages"} & set(inputs):
                expected = np.asarray(inputs[name].data, dtype=np.float32).tolist()
                assert floats_of(recorded[name]) == expected
    assert by_kind["event"][2]["loss"] == {"type": "ppo", "config": {"clip_high_threshold": 1.28}}
    assert [r["auto_shift"] for r in by_kind["event"][1:4]] == [False, False, True]
    assert by_kind["event"][4]["payload"]["adam_params"] == adam.model_dump()
    assert by_kind["event"][4]["result"]["metrics"] == metrics

    (checkpoint,) = by_kind["checkpoint"]
    tuned, base = by_kind["sampling_run"]
    assert tuned["checkpoint"] == checkpoint["uri"] and tuned["step"] == 1
    assert (base["checkpoint"], base["step"]) == ("", 0)
    assert [r["run"] for r in by_kind["sample"]] == [tuned["run"], base["run"]]
    for record, shown in zip(by_kind["sample"], answers, strict=True):
        assert [ids_of(chunk) for chunk in record["prompt"]] == [[10, 11, 12]]
        assert [ids_of(s["tokens"]) for s in record["sequences"]] == [
            s.tokens for s in shown.sequences
        ]
        assert [floats_of(s["logprobs"]) for s in record["sequences"]] == [
            s.logprobs for s in shown.sequences
        ]
        assert [s["stop_reason"] for s in record["sequences"]] == [
            s.stop_reason for s in shown.sequences
        ]
    sampled = by_kind["sample"][0]
    assert sampled["num_samples"] == 3
    assert sampled["params"] == {
        "max_tokens": 6, "temperature": 0.7, "top_k": -1, "top_p": 1.0, "stop_token_ids": [7]
    }  # fmt: skip
    assert floats_of(sampled["prompt_logprobs"]) == answer.prompt_logprobs[1:]

    summary = json.loads((backend.record / "summary.json").read_text(encoding="utf-8"))
    assert summary == {key: end[key] for key in summary}
    assert summary["optimizer_steps"] == 1 and summary["samples"] == 2
    assert summary["tokens"] == {
        "prefill": 2 + 2 * 3,
        "sample": sum(len(s.tokens) for shown in answers for s in shown.sequences),
        "train": 5 + 2 + 3,
    }
