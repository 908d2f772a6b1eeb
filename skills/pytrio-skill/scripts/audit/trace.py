"""Reading a recording: MessagePack records become typed objects over numpy arrays.

All arrays of one datum have the same length and speak of targets: entry t is about the token that
follows `inputs[: t + 1]`. A call with `auto_shift` is brought into that form.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from trio_local.recording import FORMAT, VERSION, picture_id

IGNORED_TARGET = -100


class TraceError(Exception):
    """A recording that cannot be audited, in one line."""


@dataclass(frozen=True)
class Chat:
    """How a model's template frames a turn; all lists are token ids."""

    folder: str
    generation_prompts: list[list[int]]
    opening: list[int]
    closing: list[int]
    end_ids: list[int]

    @property
    def header(self) -> list[int]:
        """What every assistant's turn begins with, earlier ones (without thinking) included."""
        openings = [*self.generation_prompts, *([self.opening] if self.opening else [])]
        if not self.generation_prompts:
            return []
        shortest = min(openings, key=len)
        length = 0
        while length < len(shortest) and all(ids[length] == shortest[length] for ids in openings):
            length += 1
        return shortest[:length]


@dataclass(eq=False)
class Datum:
    """One training sample as the server saw it."""

    call: "Call"
    number: int
    inputs: np.ndarray  # int32 [positions]
    targets: np.ndarray  # int32 [positions]
    served: np.ndarray  # float32 [positions], log-probabilities of the targets in this call
    weights: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    advantages: np.ndarray | None = None

    @property
    def signal(self) -> np.ndarray:
        """What scales each target's gradient: advantages, or weights (1 when none were given)."""
        if self.advantages is not None:
            return self.advantages
        if self.weights is not None:
            return self.weights
        return np.ones(len(self.targets), np.float32)

    @property
    def active(self) -> np.ndarray:
        """Positions [bool] that carry gradient."""
        return (self.signal != 0) & (self.targets != IGNORED_TARGET)

    @property
    def tokens(self) -> np.ndarray:
        """The whole sequence: the inputs and the token after the last one, unless its target is
        a placeholder (0 or -100 without signal)."""
        last = int(self.targets[-1]) if len(self.targets) else IGNORED_TARGET
        if last != IGNORED_TARGET and (last or self.active[-1]):
            return np.append(self.inputs, self.targets[-1])
        return self.inputs


@dataclass(eq=False)
class Call:
    """One logical call of the loop, put together again from the events the SDK split it into.

    `kind` is `sft`, `policy`, `custom` (the backward of forward_backward_custom; its forward is
    `custom_forward`) or `score` (a forward alone).
    """

    number: int
    kind: str
    run: str
    loss: str
    steps_before: int
    started: float
    finished: float
    totals: dict[str, int]
    metrics: dict[str, float]
    data: list[Datum] = field(default_factory=list)
    is_backward: bool = True
    auto_shift: bool = False


@dataclass(eq=False)
class Step:
    """One optimiser step; `calls` are the backward calls since the one before."""

    run: str
    number: int
    started: float
    finished: float
    params: dict[str, Any]
    metrics: dict[str, float]
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Save:
    """One checkpoint written."""

    run: str
    uri: str
    step: int
    is_temporary: bool
    ttl_seconds: int | None


@dataclass(frozen=True)
class Resume:
    """A training run that began from a checkpoint."""

    run: str
    uri: str
    type: str
    step: int
    with_optimizer: bool
    history: list[list[int]]


@dataclass(frozen=True)
class TrainingRun:
    id: str
    base_model: str
    folder: str
    source: str


@dataclass(frozen=True)
class Sampler:
    """One sampling client: a frozen set of weights. `training_run` is empty for a base model."""

    id: str
    base_model: str
    folder: str
    snapshot: str
    training_run: str
    step: int


@dataclass(eq=False)
class Request:
    """One sampling request; `prompt_logprobs` are of `prompt[1:]`."""

    number: int
    sampler: Sampler
    prompt: np.ndarray
    params: dict[str, Any]
    started: float
    finished: float
    prompt_logprobs: np.ndarray | None
    sequences: "list[Sequence]" = field(default_factory=list)

    @property
    def is_score(self) -> bool:
        """What compute_logprobs sends: one token, for the sake of the prompt's values."""
        return self.prompt_logprobs is not None and self.params.get("max_tokens") == 1


@dataclass(eq=False)
class Sequence:
    """One sampled completion."""

    request: Request
    index: int
    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: str
    is_forced: bool = False  # a demonstration's

    @property
    def length(self) -> int:
        """Of prompt and completion together."""
        return len(self.request.prompt) + len(self.tokens)


@dataclass
class Trace:
    """A whole recording in the order of time."""

    path: Path
    header: dict[str, Any]
    is_complete: bool = False
    totals: dict[str, Any] = field(default_factory=dict)
    chats: dict[str, Chat] = field(default_factory=dict)
    runs: dict[str, TrainingRun] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    unapplied: dict[str, list[Call]] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    failed_events: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)

    def chat_of_run(self, run: str) -> Chat | None:
        """The template of the model that a training run adapts."""
        known = self.runs.get(run)
        return self.chats.get(known.folder) if known else None


def records_of(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """All records of a file and whether its last one closes it. Raises TraceError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    # One buffer for all records: their byte strings stay small.
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(raw), 1), raw=False, strict_map_key=False)
    unpacker.feed(raw)
    records: list[dict[str, Any]] = []
    good = 0
    while True:
        try:
            record = unpacker.unpack()
        except msgpack.OutOfData:
            break
        except Exception as error:  # msgpack raises a dozen types on bad bytes
            raise TraceError(
                f"{path} is damaged after byte {good}: {error or 'bad data'}"
            ) from None
        if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
            what = f"damaged after byte {good}" if records else "no recording of a dry run"
            raise TraceError(f"{path} is {what}")
        records.append(record)
        good = unpacker.tell()
    header = records[0] if records else {}
    if header.get("kind") != "header" or header.get("format") != FORMAT:
        raise TraceError(f"{path} is no recording of a dry run; give a folder made by `run`")
    if header.get("version") != VERSION:
        raise TraceError(
            f"{path} has version {header.get('version')}, this audit reads version {VERSION}; "
            "record the run again"
        )
    return records, records[-1]["kind"] == "end"


def read_trace(path: Path, sessions: Collection[int] = ()) -> Trace:
    """Read `trace.msgpack`, or the one in a folder; raises TraceError with one line.

    `sessions` are the numbers, from 1, of the only sessions to read: a script opens one with every
    ServiceClient. None are all.
    """
    path = path / "trace.msgpack" if path.is_dir() else path
    records, is_complete = records_of(path)
    if sessions:
        records, is_complete = records_of_sessions(path, records, sessions)
    trace = Trace(path, records[0], is_complete)
    events: list[dict[str, Any]] = []
    try:
        for record in records:
            if record["kind"] == "event":
                events.append(record)
            else:
                take_record(trace, record)
        take_events(trace, events)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{path} is damaged: {type(error).__name__} {error}") from None
    trace.requests.sort(key=lambda request: request.started)
    for number, request in enumerate(trace.requests, start=1):
        request.number = number
    return trace


def records_of_sessions(
    path: Path, records: list[dict[str, Any]], numbers: Collection[int]
) -> tuple[list[dict[str, Any]], bool]:
    """The records of some sessions, and whether the script closed them."""
    known = [record["session"] for record in records if record["kind"] == "session"]
    for number in numbers:
        if not 1 <= number <= len(known):
            raise TraceError(f"{path} has {len(known)} sessions, there is no number {number}")
    names = {known[number - 1] for number in numbers}
    runs = {r["run"] for r in records if r.get("session") in names and "run" in r}
    chosen = [
        r
        for r in records
        if r["kind"] in ("header", "model")
        or r.get("session") in names
        or r.get("run") in runs
        # A refused request has no more than its address.
        or (r["kind"] == "refused" and not runs.isdisjoint(r["path"].split("/")))
    ]
    return chosen, sum(r["kind"] == "session_closed" for r in chosen) == len(names)


def take_record(trace: Trace, record: dict[str, Any]) -> None:
    """Add any record but an event."""
    kind = record["kind"]
    if kind == "model":
        trace.chats[record["folder"]] = Chat(
            record["folder"],
            record["generation_prompts"],
            record["opening"],
            record["closing"],
            record["end_ids"],
        )
    elif kind == "training_run":
        trace.runs[record["run"]] = TrainingRun(
            record["run"], record["base_model"], record["folder"], record["source"]
        )
    elif kind == "sampling_run":
        trace.samplers[record["run"]] = Sampler(
            record["run"],
            record["base_model"],
            record["folder"],
            record["snapshot"],
            record["training_run"],
            record["step"],
        )
    elif kind == "resume":
        trace.resumes.append(
            Resume(
                record["run"],
                record["uri"],
                record["type"],
                record["step"],
                record["with_optimizer"],
                record["history"],
            )
        )
    elif kind == "sample":
        trace.requests.append(request_of(trace, record))
    elif kind == "refused":
        trace.refused.append(record)
    elif kind == "end":
        trace.totals = record


def request_of(trace: Trace, record: dict[str, Any]) -> Request:
    """A `sample` record with its sequences."""
    scored = record.get("prompt_logprobs")
    request = Request(
        number=0,
        sampler=trace.samplers[record["run"]],
        prompt=text_ids(record["prompt"]),
        params=record["params"],
        started=record["time"] - record["seconds"],
        finished=record["time"],
        prompt_logprobs=None if scored is None else floats(scored),
    )
    request.sequences = [
        Sequence(
            request,
            index,
            ids(s["tokens"]),
            floats(s["logprobs"]),
            s["stop_reason"],
            s.get("forced", False),
        )
        for index, s in enumerate(record["sequences"])
    ]
    return request


def take_events(trace: Trace, events: list[dict[str, Any]]) -> None:
    """Trainer events, in the order in which each run executed them, become calls and steps."""
    open_calls: dict[str, list[Call]] = {}
    gathering: dict[str, Call] = {}
    # A step that was restored is counted on; one that was not begins at zero, as the server does.
    steps = {r.run: r.step if r.with_optimizer else 0 for r in trace.resumes}
    for event in sorted(events, key=lambda e: (e["run"], e["index"])):
        run, kind = event["run"], event["type"]
        if event["status"] != "succeeded":
            trace.failed_events.append(event)
            continue
        if "data" in event:
            call = gathering.get(run)
            if call is None or not belongs_to(call, event):
                call = gathering[run] = new_call(event, steps.get(run, 0))
                trace.calls.append(call)
                open_calls.setdefault(run, []).append(call)
            extend(call, event)
            continue
        gathering.pop(run, None)
        if kind == "trainer.optimize_step":
            steps[run] = steps.get(run, 0) + 1
            trace.steps.append(
                Step(
                    run=run,
                    number=steps[run],
                    started=event["time"] - event["seconds"],
                    finished=event["time"],
                    params=event["payload"]["adam_params"],
                    metrics=event["result"]["metrics"],
                    calls=[c for c in open_calls.pop(run, []) if c.is_backward],
                )
            )
        elif kind in ("trainer.save_state", "trainer.save_weights"):
            payload, checkpoint = event["payload"], event["result"]["checkpoint"]
            trace.saves.append(
                Save(
                    run=run,
                    uri=checkpoint["uri"],
                    step=steps.get(run, 0),
                    is_temporary=payload.get("visibility") == "TEMPORARY",
                    ttl_seconds=payload.get("ttl_seconds"),
                )
            )
    for run, calls in open_calls.items():
        backward = [c for c in calls if c.is_backward]
        if backward:
            trace.unapplied[run] = backward
    mark_custom_calls(trace.calls)
    trace.calls.sort(key=lambda call: call.started)
    trace.steps.sort(key=lambda step: step.started)
    number = 0
    for call in trace.calls:
        # Both passes of a custom loss are one call of the loop.
        number += call.kind != "custom_forward"
        call.number = number if call.kind != "custom_forward" else number + 1


def belongs_to(call: Call, event: dict[str, Any]) -> bool:
    """Whether an event continues a call that the SDK split."""
    return (
        call.is_backward == event["type"].endswith("forward_backward")
        and call.totals == event["totals"]
        and call.loss == event["loss"]["type"]
        and len(call.data) + len(event["data"]) <= call.totals["total_samples"]
    )


def new_call(event: dict[str, Any], steps_before: int) -> Call:
    is_backward = event["type"].endswith("forward_backward")
    loss = event["loss"]["type"]
    kind = ("sft" if loss == "cross_entropy" else "policy") if is_backward else "score"
    return Call(
        number=0,
        kind=kind,
        run=event["run"],
        loss=loss,
        steps_before=steps_before,
        started=event["time"] - event["seconds"],
        finished=event["time"],
        totals=event["totals"],
        metrics=event["metrics"],
        is_backward=is_backward,
        auto_shift=event["auto_shift"],
    )


def extend(call: Call, event: dict[str, Any]) -> None:
    """Add an event's data to its call."""
    call.finished = event["time"]
    for packed in event["data"]:
        datum = Datum(
            call=call,
            number=len(call.data),
            inputs=text_ids(packed["input"]),
            targets=ids(packed["target_ids"]),
            served=floats(packed["served_logprobs"]),
        )
        names = ("weights", "logprobs", "advantages")
        for name in names:
            if name in packed:
                setattr(datum, name, floats(packed[name]))
        if call.auto_shift:
            # The target at t is predicted from the inputs before t.
            datum.inputs = datum.inputs[:-1]
            for name in ("targets", "served", *names):
                values = getattr(datum, name)
                setattr(datum, name, None if values is None else values[1:])
        call.data.append(datum)


def mark_custom_calls(calls: list[Call]) -> None:
    """Find the pairs of passes that forward_backward_custom makes: a forward, then a backward on
    the same tokens with other weights (minus the gradient of the user's loss)."""
    latest: dict[str, Call] = {}
    for call in calls:
        before = latest.get(call.run)
        latest[call.run] = call
        if before is None or before.kind != "score" or call.kind != "sft":
            continue
        if before.steps_before != call.steps_before or len(before.data) != len(call.data):
            continue
        pairs = list(zip(before.data, call.data, strict=True))
        same_tokens = all(
            np.array_equal(a.inputs, b.inputs) and np.array_equal(a.targets, b.targets)
            for a, b in pairs
        )
        if same_tokens and any(not np.array_equal(a.signal, b.signal) for a, b in pairs):
            call.kind = "custom"
            before.kind = "custom_forward"


def ids(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, "<i4")


def floats(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, "<f4")


def text_ids(chunks: list[Any]) -> np.ndarray:
    """Ids of the text chunks; a picture has none and takes, for each of its tokens, one negative
    number that is its own."""
    parts = [
        ids(chunk)
        if isinstance(chunk, bytes)
        else np.full(chunk["tokens"], picture_id(chunk["image"]), np.int32)
        for chunk in chunks
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
