"""Bad requests: always a 4xx in the SDK's error shape, never a 5xx, a hang or a broken server."""

import copy
import http.client
import json
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytrio.protocol.actor.events.event import EventStatus, EventType, generate_event_id
from starlette.testclient import TestClient

from conftest import KEY, Backend, start_backend
from trio_local.app import build_app
from trio_local.catalogue import Catalogue
from trio_local.faults import Faults
from trio_local.recording import Recorder
from trio_local.state import Limits, State
from trio_local.store import CheckpointStore
from wire import (
    BASE_MODEL,
    V1,
    Run,
    Wire,
    forward_payload,
    optimize_payload,
    sample_body,
    save_payload,
)

TIMEOUT_SECONDS = 20
JSON, MSGPACK = "application/json", "application/msgpack"
MANY = settings(
    max_examples=400,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@dataclass(repr=False)
class Target:
    """A backend that takes one key only, and something of every kind on it."""

    backend: Backend
    wire: Wire
    session: str
    closable: str
    trainer: Run
    pending: Run
    sampler: Run
    checkpoint: dict[str, Any]
    connection: http.client.HTTPConnection
    expected: tuple[Any, Any]
    next_index: int = 3
    statuses: Counter[int] = field(default_factory=Counter)

    def work(self) -> tuple[Any, Any]:
        """What a small training run and a sampling request of fresh runs give."""
        run = self.wire.training_run()
        run.execute(EventType.TRAINER_INIT_RUN, run.init(), 1)
        sequences = forward_payload([[20, 21, 22, 23]])
        step = run.execute(EventType.TRAINER_FORWARD_BACKWARD, sequences, 2)
        run.execute(EventType.TRAINER_OPTIMIZE_STEP, optimize_payload(), 3)
        after = run.execute(EventType.TRAINER_FORWARD, sequences, 4)
        sampled = self.wire.sampling_run().sample(num_samples=2).json()["sequences"]
        return (step.result, after.result), sampled


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    os.environ["TRIO_DRYRUN_KEY"] = KEY
    try:
        backend = start_backend(tmp_path_factory.mktemp("bad"), "--max-batch-size", "8")
    finally:
        del os.environ["TRIO_DRYRUN_KEY"]
    wire = Wire(backend.url)
    session = wire.session()
    trainer, sampler = wire.training_run(session), wire.sampling_run(session)
    trainer.execute(EventType.TRAINER_INIT_RUN, trainer.init(), 1)
    saved = trainer.execute(EventType.TRAINER_SAVE_STATE, save_payload("state"), 2)
    address = urlsplit(backend.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, TIMEOUT_SECONDS)
    made = Target(
        backend=backend,
        wire=wire,
        session=session,
        closable=wire.session(),
        trainer=trainer,
        pending=wire.training_run(session),
        sampler=sampler,
        checkpoint=saved.result["checkpoint"],
        connection=connection,
        expected=((), ()),
    )
    made.expected = made.work()
    yield made
    # Whatever was sent above: the backend computes what it computed before.
    assert made.work() == made.expected
    assert not [status for status in made.statuses if status >= 500]
    backend.stop()
    assert backend.process.returncode == 0


# -- requests --------------------------------------------------------------------------------------


def state_in_process(folder: Path, **limits: Any) -> State:
    """A backend's state without a process or an engine: enough for what never computes."""
    return State(
        catalogue=Catalogue({}),
        store=CheckpointStore(folder / "store"),
        engine=cast(Any, None),
        recorder=Recorder(folder / "record", {}),
        faults=Faults(),
        limits=Limits(max_batch_size=8, max_tokens_per_request=None, **limits),
        api_key=None,
        seed=0,
        sdk_version="",
    )


@dataclass
class Request:
    """One HTTP request, byte for byte."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def with_changes(self, **changes: Any) -> "Request":
        return Request(**{**vars(copy.deepcopy(self)), **changes})

    def without(self, header: str) -> "Request":
        return self.with_changes(headers={k: v for k, v in self.headers.items() if k != header})


def exchange(target: Target, request: Request) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Send a request as it is; a server that does not answer in time fails the test."""
    connection = target.connection
    try:
        connection.putrequest(request.method, request.path, skip_accept_encoding=True)
        for name, value in {"Content-Length": str(len(request.body)), **request.headers}.items():
            connection.putheader(name, value)
        connection.endheaders(request.body or None)
        response = connection.getresponse()
        answer = response.read()
    except BaseException:
        connection.close()
        raise
    target.statuses[response.status] += 1
    return response.status, response.headers, answer


def error_of(request: Request, headers: http.client.HTTPMessage, answer: bytes) -> dict[str, str]:
    """Code and message of a refusal, whose shape and encoding must be what the SDK reads."""
    is_actor = request.path.startswith("/v1/")
    wants_msgpack = MSGPACK in request.headers.get("Accept", "") and is_actor
    if wants_msgpack and not request.path.endswith("/sample"):
        assert headers["content-type"] == MSGPACK, (headers["content-type"], answer)
        value = msgpack.unpackb(answer)
    else:
        assert headers["content-type"] == JSON, (headers["content-type"], answer)
        value = json.loads(answer)
    if is_actor:
        assert set(value) == {"error"}
        value = value["error"]
    assert set(value) == {"code", "message"}
    assert all(isinstance(text, str) and text for text in value.values())
    return value


def refuse(target: Target, request: Request) -> None:
    """The request is answered 4xx in the SDK's shape."""
    status, headers, answer = exchange(target, request)
    assert 400 <= status < 500, (status, answer)
    if request.method != "HEAD":
        error_of(request, headers, answer)


def tolerate(target: Target, request: Request) -> None:
    """The request may be good by chance; if it is refused, then properly."""
    status, headers, answer = exchange(target, request)
    assert 200 <= status < 300 or 400 <= status < 500, (status, answer)
    if status >= 400:
        error_of(request, headers, answer)


def control(target: Target, method: str, path: str, body: object = None) -> Request:
    headers = {"X-API-Key": KEY}
    if body is None:
        return Request(method, path, headers)
    return Request(method, path, {**headers, "Content-Type": JSON}, json.dumps(body).encode())


def envelope(target: Target, kind: EventType, payload: dict[str, Any]) -> dict[str, Any]:
    """The next event of the target's training run."""
    return {
        "version": 1,
        "event_id": generate_event_id(),
        "type": kind.value,
        "metadata": {
            "index": target.next_index,
            "step": 0,
            "timestamp": 0,
            "sdk": "pytrio",
            "sdk_version": "0.2.9",
            "run_id": target.trainer.cuid,
        },
        "payload": payload,
    }


def event_request(target: Target, body: bytes) -> Request:
    headers = {**target.trainer.authorization, "Content-Type": MSGPACK, "Accept": MSGPACK}
    return Request("POST", "/v1/events", headers, body)


def sample_request(target: Target, body: bytes) -> Request:
    path = f"/v1/sampling-runs/{target.sampler.cuid}/sample"
    headers = {**target.sampler.authorization, "Content-Type": JSON, "Accept": JSON}
    return Request("POST", path, headers, body)


def good_requests(target: Target) -> dict[str, Request]:
    """A valid request for every endpoint (some would end things, so none is sent as it is)."""
    session, run = f"{V1}/service-sessions/{target.session}", target.trainer.cuid
    pending, closable = f"{session}/training-runs/{target.pending.cuid}", target.closable
    checkpoint = f"{V1}/checkpoints/{target.checkpoint['checkpoint_cuid']}"
    lora = {"lora_rank": 8, "train_mlp": True, "train_attn": True, "train_unembed": True}
    restore = {"source_checkpoint_uri": target.checkpoint["uri"], "restore_optimizer": True}
    event = envelope(target, EventType.TRAINER_OPTIMIZE_STEP, optimize_payload().model_dump())
    heartbeat = Request(
        "POST",
        "/v1/client/heartbeat",
        {**target.trainer.authorization, "Content-Type": JSON},
        b'{"sdk": "pytrio"}',
    )
    polled = Request(
        "GET",
        f"/v1/events/{generate_event_id()}",
        {**target.trainer.authorization, "Accept": MSGPACK, "Prefer": "wait=0"},
    )
    return {
        "create_session": control(
            target, "POST", f"{V1}/service-sessions", {"sdk_version": "0.2.9"}
        ),
        "create_training": control(
            target, "POST", f"{session}/training-runs", {"base_model": BASE_MODEL, **lora}
        ),
        "create_sampling": control(
            target, "POST", f"{session}/sampling-runs", {"base_model": BASE_MODEL}
        ),
        "bind": control(target, "PATCH", pending, restore),
        "close": control(
            target, "POST", f"{V1}/service-sessions/{closable}/close", {"status": "ENDED"}
        ),
        "heartbeat": heartbeat,
        "sample": sample_request(target, json.dumps(sample_body()).encode()),
        "event": event_request(target, msgpack.packb(event)),
        "poll": polled,
        "verify": control(target, "GET", f"{V1}/api-key/verify"),
        "models": control(target, "GET", "/api/models"),
        "sessions": control(target, "GET", f"{V1}/service-sessions"),
        "session": control(target, "GET", session),
        "renew_session": control(target, "POST", f"{session}/renew"),
        "training_runs": control(target, "GET", f"{V1}/training-runs"),
        "training_run": control(target, "GET", f"{V1}/training-runs/{run}"),
        "renew_training": control(target, "POST", f"{V1}/training-runs/{run}/renew"),
        "run_checkpoints": control(target, "GET", f"{V1}/training-runs/{run}/checkpoints"),
        "by_uri": control(
            target,
            "GET",
            f"{V1}/training-runs/by-checkpoint-uri?checkpoint_uri={target.checkpoint['uri']}",
        ),
        "sampling_run": control(target, "GET", f"{V1}/sampling-runs/{target.sampler.cuid}"),
        "renew_sampling": control(
            target, "POST", f"{V1}/sampling-runs/{target.sampler.cuid}/renew"
        ),
        "checkpoints": control(target, "GET", f"{V1}/checkpoints"),
        "delete_checkpoint": control(target, "DELETE", checkpoint),
        "download_url": control(target, "GET", f"{checkpoint}/download-url"),
    }


READS_JSON = ("create_session", "create_training", "create_sampling", "bind", "close", "sample")
ALL = (
    *READS_JSON, "heartbeat", "event", "poll", "verify", "models", "sessions", "session",
    "renew_session", "training_runs", "training_run", "renew_training", "run_checkpoints",
    "by_uri", "sampling_run", "renew_sampling", "checkpoints", "delete_checkpoint", "download_url",
)  # fmt: skip
HAS_ID = (
    "create_training", "create_sampling", "bind", "close", "sample", "poll", "session",
    "renew_session", "training_run", "renew_training", "run_checkpoints", "sampling_run",
    "renew_sampling", "delete_checkpoint", "download_url",
)  # fmt: skip
PAGED = ("models", "sessions", "training_runs", "run_checkpoints", "checkpoints")


def test_every_route_is_attacked(target: Target, tmp_path: Path) -> None:
    routes = build_app(state_in_process(tmp_path)).routes
    requests = good_requests(target)
    assert set(requests) == set(ALL)
    sent = {(r.method, r.path.partition("?")[0]) for r in requests.values()}
    for route in routes:
        if route.path in ("/api/sdk/bootstrap", "/api/telemetry/event", "/download/{checkpoint}"):
            continue  # these take anything from anybody; see the test of open endpoints
        assert any(m in route.methods and route.path_regex.match(p) for m, p in sent), route.path


# -- requests that are certainly bad ---------------------------------------------------------------

ID = re.compile(r"(?:sess|train|samp|ckpt)[0-9a-f]{20}|event_\w{12}")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "HEAD")
garbage_ids = st.one_of(
    st.text("abcdefghijklmnopqrstuvwxyz0123456789-_.~", min_size=1, max_size=40),
    st.sampled_from(
        ["..", ".", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%00", "%ff%fe", "%F0%9F%98%80", "'--",
         "%ED%A0%80", "%3F", "%23", "a" * 5000, "..%5c..%5cx", "trio:%2F%2Fx", "*", "%25", "%"]
    ),
)  # fmt: skip
NOT_JSON = (
    b"{", b"}", b"[1,", b'{"a": }', b"nul", b'"\\x"', b"{'a': 1}", b'{"a": NaN}',
    b'{"a": Infinity}', b'{"a": -Infinity}', b"\xff\xfe\x00", b'{"a": "\xc3\x28"}', b"\x00",
    b'{"a": 1} trailing', b"[" * 100_000, b'{"a":' * 50_000, b'{"a": ' + b"9" * 5000 + b"}",
    b"\x1f\x8b\x08\x00zip", b'{"a": "\\ud800"}', b'{"a": "\xed\xa0\x80"}', "{}".encode("utf-16"),
)  # fmt: skip
NOT_OBJECTS = (b"[]", b"null", b"1", b'"text"', b"true", b"[{}]", b"-0.5", b"1e400")
NOT_MSGPACK = (
    b"", b"\xc1", b"\x81", b"\x81\xa1a", b"\x93\x01", b"\xdb\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x81\xa2\xff\xfe\x01", b"\x81\x01\x02",
    b"\x91" * 5000, b"\x81\xa1a" * 3000 + b"\x01", msgpack.packb([1, 2]), msgpack.packb(None),
    msgpack.packb("text"), msgpack.packb(msgpack.ExtType(5, b"x")),
    msgpack.packb({"a": 1}) + b"\x00", msgpack.packb(msgpack.Timestamp(1, 1)), msgpack.packb({}),
)  # fmt: skip


@st.composite
def certainly_bad(draw: st.DrawFn) -> tuple[str, str, Any]:
    """(endpoint, kind of damage, what the damage needs)."""
    damage = draw(
        st.sampled_from(
            ["method", "credentials", "id", "page", "slash", "json", "object", "type", "msgpack",
             "path"]
        )
    )  # fmt: skip
    choices: dict[str, Any] = {
        "method": (ALL, st.sampled_from(METHODS)),
        "credentials": (
            ALL,
            st.sampled_from(["", "other", "Bearer", "Bearer made-up", "Basic eDp5", "\x80\xff"]),
        ),
        "id": (HAS_ID, garbage_ids),
        "page": (
            PAGED,
            st.sampled_from(
                ["limit=0", "limit=-1", "limit=1001", "limit=x", "offset=-1", "offset=1.5",
                 "offset=", "limit=" + "9" * 5000, "offset=%00", "limit=NaN", "limit=1e3"]
            ),
        ),
        "slash": (ALL, st.sampled_from(["/", "//", "/.", "/x", "%20", "%00", ";a=1"])),
        "json": (
            (*READS_JSON, "heartbeat"),
            st.sampled_from(NOT_JSON) | st.binary(min_size=1).filter(is_not_json),
        ),
        "object": ((*READS_JSON, "heartbeat"), st.sampled_from(NOT_OBJECTS)),
        "type": (
            (*READS_JSON, "heartbeat", "event"),
            st.sampled_from(
                ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
                 "json", "application/octet-stream", "application/cbor", "\xff", "a/b/c;;;="]
            ),
        ),
        "msgpack": (
            ("event",),
            st.sampled_from(NOT_MSGPACK) | st.binary().filter(is_not_map),
        ),
        "path": (
            ("verify",),
            st.sampled_from(
                ["/", "/api", "/api/openapi", "/v1", "/v1/", "/v1/events/", "/favicon.ico", "/docs",
                 "/openapi.json", "//v1/events", "/V1/events", "/v1/sampling-runs/x",
                 "/api/../v1/x", "/%2e%2e/%2e%2e/etc/passwd", "/download/../../x", "/*",
                 "/api/openapi/v2/models", "/download/%2e%2e%2fcheckpoint.json",
                 "/v1/events?x=" + "y" * 9000]
            ),
        ),
    }  # fmt: skip
    endpoints, values = choices[damage]
    return draw(st.sampled_from(endpoints)), damage, draw(values)


def is_not_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return True
    return False


def is_not_map(raw: bytes) -> bool:
    try:
        return not isinstance(msgpack.unpackb(raw), dict)
    except Exception:  # msgpack raises many unrelated types
        return True


def damaged(request: Request, damage: str, value: Any, methods: set[str]) -> Request | None:
    """The request with one damage; None when this damage does not apply to it."""
    if damage == "method":
        return None if value in methods else request.with_changes(method=value)
    if damage == "credentials":
        header = "Authorization" if request.path.startswith("/v1/") else "X-API-Key"
        if not value:
            return request.without(header)
        return request.with_changes(headers={**request.headers, header: value})
    if damage == "id":
        last = list(ID.finditer(request.path))[-1]
        return request.with_changes(
            path=request.path[: last.start()] + value + request.path[last.end() :]
        )
    if damage == "page":
        return request.with_changes(path=f"{request.path}?{value}")
    if damage == "slash":
        path, mark, query = request.path.partition("?")
        return request.with_changes(path=path + value + mark + query)
    if damage in ("json", "object", "msgpack"):
        return request.with_changes(body=value)
    if damage == "type":
        if not value:
            return request.without("Content-Type")
        return request.with_changes(headers={**request.headers, "Content-Type": value})
    assert damage == "path"
    return request.with_changes(path=value)


@MANY
@given(bad=certainly_bad())
def test_damaged_requests_are_refused(target: Target, bad: tuple[str, str, Any]) -> None:
    endpoint, damage, value = bad
    requests = good_requests(target)
    path = requests[endpoint].path.partition("?")[0]
    methods = {r.method for r in requests.values() if r.path.partition("?")[0] == path}
    request = damaged(requests[endpoint], damage, value, methods | {"HEAD"})
    if request is not None:
        refuse(target, request)


# -- good requests with a bad spot -----------------------------------------------------------------


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 2**64 - 1, "", "x", "5",
    "\x00", "\U0001f600", "x" * 10_000, [], {}, [None], [[]], {"": ""}, {"a": {"b": []}},
    nested(20), nested(100), nested(600), 0.01, 2, 10**15, -1e-9,
)  # fmt: skip
JSON_JUNK = (*JUNK, 10**30, -(10**30), 10**400, "\ud800", ["\udfff"], {"\ud800": 1})
MSGPACK_JUNK = (
    *JUNK, float("nan"), float("inf"), b"", b"\xff\x00", {b"key": 1}, {1: 2}, {"": {2: 3}},
    msgpack.ExtType(7, b"abc"), msgpack.Timestamp(2**33, 5),
)  # fmt: skip


def places_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The address of every node below the root."""
    inside = list(value.items()) if isinstance(value, dict) else []
    inside += list(enumerate(value)) if isinstance(value, list) else []
    found = []
    for key, item in inside:
        found += [(*at, key), *places_in(item, (*at, key))]
    return found


def mutated(value: Any, place: tuple[Any, ...], how: str, junk: Any) -> Any:
    """A copy with the node at `place` replaced, removed, or given a sibling."""
    changed = copy.deepcopy(value)
    parent = changed
    for key in place[:-1]:
        parent = parent[key]
    if how == "remove":
        del parent[place[-1]]
    elif how == "add" and isinstance(parent, dict):
        parent["unknown"] = junk
    elif how == "add":
        parent.append(junk)
    else:
        parent[place[-1]] = junk
    return changed


@st.composite
def mutations(draw: st.DrawFn, junk: tuple[Any, ...]) -> tuple[float, str, Any]:
    """(which node, as a share of all; what happens to it; what comes in)."""
    share = draw(st.floats(0, 0.999, allow_nan=False))
    how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
    return share, how, draw(st.sampled_from(junk))


def with_mutation(value: Any, mutation: tuple[float, str, Any]) -> Any:
    share, how, junk = mutation
    places = places_in(value)
    return mutated(value, places[int(share * len(places))], how, junk)


RICH_SAMPLE = sample_body(
    sampling_params={
        "max_tokens": 3, "seed": 1, "temperature": 0.7, "top_k": 5, "top_p": 0.9,
        "stop": ["end"], "stop_token_ids": [3],
    },
    return_text=True,
    return_token_logprobs=True,
    return_prompt_logprobs=True,
    topk_prompt_logprobs=2,
)  # fmt: skip


@MANY
@given(endpoint=st.sampled_from([*READS_JSON, "sample"]), mutation=mutations(JSON_JUNK))
def test_mutated_bodies_never_hurt(
    target: Target, endpoint: str, mutation: tuple[float, str, Any]
) -> None:
    request = good_requests(target)[endpoint]
    body = RICH_SAMPLE if endpoint == "sample" else json.loads(request.body)
    changed = json.dumps(with_mutation(body, mutation)).encode()
    tolerate(target, request.with_changes(body=changed))


EVENTS = (
    (EventType.TRAINER_FORWARD_BACKWARD, forward_payload([[5, 6, 7], [8, 9]]).model_dump()),
    (
        EventType.TRAINER_FORWARD,
        {
            **forward_payload([[5, 6]], loss={"type": "ppo", "config": {}}).model_dump(),
            "data": [
                {
                    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
                    "target_ids": [6],
                    "logprobs": [-0.5],
                    "advantages": [1.0],
                }
            ],
        },
    ),
    (EventType.TRAINER_OPTIMIZE_STEP, optimize_payload().model_dump()),
    (EventType.TRAINER_SAVE_STATE, {**save_payload("mutated").model_dump(), "overwrite": True}),
    (EventType.TRAINER_SAVE_WEIGHTS, {**save_payload("mutant").model_dump(), "ttl_seconds": 60}),
)


@MANY
@given(event=st.sampled_from(EVENTS), mutation=mutations(MSGPACK_JUNK))
def test_mutated_events_fail_alone(
    target: Target, event: tuple[EventType, dict[str, Any]], mutation: tuple[float, str, Any]
) -> None:
    sent = with_mutation(envelope(target, *event), mutation)
    request = event_request(target, msgpack.packb(sent))
    status, headers, answer = exchange(target, request)
    if status != 200:
        assert 400 <= status < 500, (status, answer)
        error_of(request, headers, answer)
        return
    target.next_index += 1
    state = msgpack.unpackb(target.trainer.poll(sent["event_id"]).content)
    assert state["status"] in ("succeeded", "failed"), state
    if state["status"] == EventStatus.FAILED.value:
        assert state["error"]["code"] != "trainer_failed", state
        assert state["error"]["message"]
    if mutation_broke_run(target):
        target.trainer = target.wire.training_run(target.session)
        target.trainer.execute(EventType.TRAINER_INIT_RUN, target.trainer.init(), 1)
        target.next_index = 2


def mutation_broke_run(target: Target) -> bool:
    """A mutated total makes an event part of a split call, whose failure breaks the run."""
    answer = target.wire.control("GET", f"/training-runs/{target.trainer.cuid}").json()
    return answer["corrupted"]


def test_oversized_work_is_refused(target: Target) -> None:
    long = [5] * 40_000
    chunks = {"chunks": [{"type": "encoded_text", "tokens": long}]}
    for changes, code in (
        ({"prompt": chunks}, "context_length_exceeded"),
        ({"sampling_params": {"max_tokens": 40_000}}, "context_length_exceeded"),
        ({"num_samples": 10**6}, "too_many_samples"),
        ({"topk_prompt_logprobs": 10**6}, "invalid_sampling_params"),
    ):
        request = sample_request(target, json.dumps(sample_body(**changes)).encode())
        status, headers, answer = exchange(target, request)
        assert status == 422
        assert error_of(request, headers, answer)["code"] == code
    run = target.wire.training_run()
    run.execute(EventType.TRAINER_INIT_RUN, run.init(), 1)
    for index, (sequences, code) in enumerate(
        [([long], "sequence_length"), ([[5, 6]] * 9, "batch_too_large")], start=2
    ):
        state = run.execute(EventType.TRAINER_FORWARD_BACKWARD, forward_payload(sequences), index)
        assert state.status is EventStatus.FAILED
        assert state.error.code == code


# -- size, open endpoints, broken HTTP -------------------------------------------------------------


def test_a_body_over_the_limit_is_refused(target: Target, tmp_path: Path) -> None:
    app = TestClient(build_app(state_in_process(tmp_path, max_body_bytes=1000)))
    headers = {"X-API-Key": KEY}
    within = app.post(
        f"{V1}/service-sessions",
        json={"sdk_version": "x", "user_metadata": {"text": "y" * 800}},
        headers=headers,
    )
    assert within.status_code == 200
    session = f"{V1}/service-sessions/{within.json()['service_session_cuid']}"
    run = app.post(
        f"{session}/sampling-runs", json={"base_model": BASE_MODEL}, headers=headers
    ).json()
    actor = {"Authorization": f"Bearer {run['actor_jwt']['token']}"}

    def pieces() -> Iterator[bytes]:
        yield from [b" " * 600] * 3

    big = {"content": b" " * 1001}
    for path, sender, extra in (
        (f"{V1}/service-sessions", headers, big),
        (f"{session}/close", headers, {"content": pieces()}),
        ("/api/telemetry/event", headers, big),
        (f"/v1/sampling-runs/{run['sampling_run_cuid']}/sample", actor, {"content": pieces()}),
        ("/v1/client/heartbeat", actor, big),
    ):
        answer = app.post(path, headers={**sender, "Content-Type": JSON}, **extra)
        assert answer.status_code == 413, path
        error = answer.json()["error"] if path.startswith("/v1/") else answer.json()
        assert error["code"] == "body_too_large" and "1000" in error["message"]
    # On the real limit, a body that says it is too large is refused before it is sent.
    request = good_requests(target)["create_session"]
    announced = request.with_changes(headers={**request.headers, "Content-Length": "9" * 12})
    status, headers, answer = exchange(target, announced.with_changes(body=b""))
    target.connection.close()
    assert status == 413
    assert error_of(announced, headers, answer)["code"] == "body_too_large"


def test_open_endpoints_take_nonsense(target: Target) -> None:
    for query in ("", "?sdk_version=", "?sdk_version=%00%ff", "?locale=" + "x" * 5000):
        status, _, answer = exchange(target, Request("GET", f"/api/sdk/bootstrap{query}"))
        assert status == 200 and json.loads(answer)["compatibility"]["status"] == "compatible"
    for body in (b"", b"\xff\x00", b"[" * 100_000):
        assert exchange(target, Request("POST", "/api/telemetry/event", {}, body))[0] == 202
    for cuid in ("x", "..", "%2e%2e", target.trainer.cuid, "ckpt" + "0" * 20):
        refuse(target, Request("GET", f"/download/{cuid}"))
    for method in ("PUT", "DELETE", "PATCH"):
        for path in ("/api/sdk/bootstrap", "/api/telemetry/event", "/download/x"):
            refuse(target, Request(method, path))


def test_the_log_has_no_traceback(target: Target) -> None:
    """Of all requests so far that were HTTP; what follows is not."""
    log = (target.backend.record.parent / "backend.log").read_text(encoding="utf-8")
    assert "Traceback" not in log, log[-3000:]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",  # the beginning of TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"NONSENSE\r\n\r\n",
        b"GET /api/models HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/events HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\nshort",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000,
        b"GET /v1/events/x HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    ],
)
def test_broken_http_is_dropped(target: Target, raw: bytes) -> None:
    address = urlsplit(target.backend.url)
    with socket.create_connection((address.hostname, address.port), TIMEOUT_SECONDS) as connection:
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1000)
        except OSError:  # the server has hung up already
            answer = b""
    assert not answer or answer.split(b" ")[1][:1] == b"4", answer
    assert target.wire.control("GET", "/service-sessions").status_code == 200
