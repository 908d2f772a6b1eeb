"""The actor plane: trainer events with long polling, sampling, heartbeat.

Events are MessagePack. Each run executes its events in the order of their index, whatever the
order of arrival; an event id is accepted once.
"""

import asyncio
import hashlib
import json
import time
from concurrent.futures import Future
from typing import Any, cast

from pydantic import ValidationError
from pytrio.client.builders.training import CHECKPOINT_NAME_MAX_LENGTH as NAME_MAX_LENGTH
from pytrio.client.builders.training import CHECKPOINT_NAME_PATTERN as NAME_PATTERN
from pytrio.protocol.actor.events.codec import payload_model_for_event
from pytrio.protocol.actor.events.event import (
    EVENT_PROTOCOL_VERSION,
    EventEnvelope,
    EventStatus,
    EventType,
)
from pytrio.protocol.actor.sampling_run.sample import SampleRequest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from trio_local.http import json_body, raw_body, require_content_type
from trio_local.protocol import ApiError, check_nesting, pack, unpack, validation_message
from trio_local.recording import (
    packed_floats,
    packed_ids,
    packed_picture,
    picture_id,
    prompt_mark,
)
from trio_local.state import (
    ENDED_STATUSES,
    MAX_EVENTS_AHEAD,
    Event,
    Limits,
    SamplingRun,
    State,
    TrainingRun,
    now,
)

DEFAULT_WAIT_SECONDS = 30.0
MAX_WAIT_SECONDS = 60.0
HEARTBEAT_MS = 60_000
# A sampling answer begins with white space while the work lasts: JSON allows it, and the SDK's
# idle timeout sees a living connection.
KEEP_ALIVE_SECONDS = 10.0
# A local choice: all samples of a request are in memory at once.
MAX_SAMPLES_PER_REQUEST = 1024
# Of what a run was trained on, kept in its saved states to recognise repeated data.
HISTORY_STEPS, HISTORY_MARKS_PER_STEP = 256, 64


# -- events ----------------------------------------------------------------------------------------


def event_response(event: Event) -> Response:
    """The event's state as the SDK's event models read it."""
    body: dict[str, Any] = {
        "version": EVENT_PROTOCOL_VERSION,
        "event_id": event.envelope.event_id,
        "type": event.envelope.type.value,
        "status": event.status.value,
    }
    if event.status is EventStatus.SUCCEEDED:
        body.update(result=event.result or {}, usage=event.usage)
    elif event.status is EventStatus.FAILED:
        error = cast(ApiError, event.error)
        body.update(error={"code": error.code, "message": error.message}, usage=event.usage)
    return Response(pack(body), media_type="application/msgpack")


async def submit_event(request: Request) -> Response:
    state: State = request.app.state.backend
    run = state.training_run(run_of(request, state))
    require_content_type(request, "application/msgpack")
    raw = unpack(await raw_body(request))
    try:
        envelope = EventEnvelope.model_validate(raw)
    except ValidationError as error:
        raise ApiError(422, "invalid_event", validation_message(error)) from None
    # The samples have a shape that is checked when the event runs, and are the bulk of it.
    check_nesting({name: part for name, part in envelope.payload.items() if name != "data"})
    if envelope.version != EVENT_PROTOCOL_VERSION:
        raise ApiError(422, "invalid_event", f"event version {envelope.version} is not supported")
    if envelope.metadata.run_id != run.cuid:
        raise ApiError(403, "run_mismatch", "the token belongs to another run than the event")
    if run.status in ENDED_STATUSES:
        raise ApiError(409, "run_ended", f"the training run has ended ({run.status})")
    if envelope.event_id in run.events:
        raise ApiError(409, "event_exists", f"event {envelope.event_id} was already submitted")
    index = envelope.metadata.index
    if index < run.next_index or index in run.early:
        raise ApiError(409, "event_index_conflict", f"event index {index} is already taken")
    if index > run.next_index + MAX_EVENTS_AHEAD:
        raise ApiError(
            422, "event_index_gap", f"event index {index} is too far ahead of {run.next_index}"
        )
    event = Event(envelope)
    run.events[envelope.event_id] = event
    run.early[index] = event
    run.updated = now()
    while run.next_index in run.early:
        start_event(state, run, run.early.pop(run.next_index))
        run.next_index += 1
    return event_response(event)


async def get_event(request: Request) -> Response:
    state: State = request.app.state.backend
    run = state.training_run(run_of(request, state))
    event_id = request.path_params["event"]
    event = run.events.get(event_id)
    if event is None:
        raise ApiError(404, "event_not_found", f"no event {event_id!r} in this run")
    try:
        await asyncio.wait_for(event.done.wait(), wait_seconds(request))
    except asyncio.TimeoutError:
        return event_response(event)
    if event.status is EventStatus.SUCCEEDED and event.result is None:
        raise ApiError(410, "event_result_gone", f"the result of {event_id} is no longer kept")
    run.remember_fetched(event_id)
    return event_response(event)


def wait_seconds(request: Request) -> float:
    """Seconds asked for with `Prefer: wait=N`, within limits."""
    name, _, value = request.headers.get("prefer", "").partition("=")
    try:
        wanted = float(value) if name.strip() == "wait" else DEFAULT_WAIT_SECONDS
    except ValueError:
        wanted = DEFAULT_WAIT_SECONDS
    # Answer a little before the client gives up on the connection.
    return min(MAX_WAIT_SECONDS, max(0.0, wanted - 5.0)) if wanted == wanted else 0.0


def start_event(state: State, run: TrainingRun, event: Event) -> None:
    """Hand an event to the compute thread; called in index order."""
    loop = asyncio.get_running_loop()
    event.status = EventStatus.RUNNING
    submitted = time.time()
    future = state.engine.submit(lambda: execute_event(state, run, event))
    future.add_done_callback(
        lambda done: loop.call_soon_threadsafe(finish_event, state, run, event, done, submitted)
    )


def execute_event(state: State, run: TrainingRun, event: Event) -> dict[str, Any]:
    """Run one event on the compute thread. Raises ApiError when it fails."""
    kind = event.envelope.type
    try:
        payload = payload_model_for_event(kind).model_validate(event.envelope.payload)
    except ValidationError as error:
        raise ApiError(422, "invalid_event", validation_message(error)) from None
    if run.corrupted_reason is not None:
        raise ApiError(409, "training_run_corrupted", run.corrupted_reason)
    if run.trainer is None and kind is not EventType.TRAINER_INIT_RUN:
        raise ApiError(409, "run_not_initialized", "the first event of a run must be init_run")
    try:
        return HANDLERS[kind](state, run, event, payload)
    except ApiError as error:
        if is_part_of_split_call(kind, payload):
            run.corrupted_reason = (
                f"a chunk of a split forward_backward failed ({error.message}), "
                "so the accumulated gradient is incomplete"
            )
        raise


def is_part_of_split_call(kind: EventType, payload: Any) -> bool:
    """Whether the client split one logical batch and this event is one of its chunks."""
    if kind is not EventType.TRAINER_FORWARD_BACKWARD:
        return False
    return payload.gradient_accumulation.total_samples > len(payload.data)


def init_run(state: State, run: TrainingRun, event: Event, payload: Any) -> dict[str, Any]:
    from trio_local.loading import LoraSpec
    from trio_local.trainer import Trainer

    if run.trainer is not None:
        raise ApiError(409, "already_initialized", "the run is already initialised")
    for name, value in payload.lora_config.model_dump(exclude={"seed"}).items():
        if value != run.lora[name]:
            raise ApiError(
                422,
                "invalid_lora_config",
                f"{name} is {value} in init_run and {run.lora[name]} in the training run",
            )
    if payload.base_model != run.served.model_id:
        raise ApiError(422, "model_mismatch", "init_run names another base model than the run")
    if (payload.checkpoint_uri or "") != run.source_uri:
        raise ApiError(422, "checkpoint_mismatch", "init_run names another checkpoint than the run")
    if payload.load_optimizer != run.restore_optimizer:
        raise ApiError(
            422,
            "checkpoint_mismatch",
            f"load_optimizer is {payload.load_optimizer} in init_run and "
            f"{run.restore_optimizer} in the training run",
        )
    seed = run.lora["seed"] if run.lora["seed"] is not None else state.seed + run.index
    spec = LoraSpec(
        rank=run.lora["rank"],
        seed=seed,
        train_mlp=run.lora["train_mlp"],
        train_attn=run.lora["train_attn"],
        train_unembed=run.lora["train_unembed"],
    )
    behaviour = state.engine.behaviour
    trainer = Trainer(state.engine.model(run.served), spec, state.engine.reduction, behaviour)
    if run.source_uri:
        restores = {"never": False, "always": True}.get(behaviour.resume, run.restore_optimizer)
        has_optimizer = state.store.find(run.source_uri).type == "TRAINING"
        source, adapter, optimizer = state.store.read(run.source_uri, restores and has_optimizer)
        trainer.load(adapter, optimizer)
        run.optimizer_steps = source.step if run.restore_optimizer else 0
        run.history = state.store.history(source)
        state.recorder.write(
            "resume",
            run=run.cuid,
            uri=source.uri,
            type=source.type,
            step=source.step,
            with_optimizer=run.restore_optimizer,
            history=run.history,
        )
    run.trainer = trainer
    run.status = "RUNNING"
    state.recorder.model(run.served.model_id, state.engine.chat(run.served))
    return {}


def forward(state: State, run: TrainingRun, event: Event, payload: Any) -> dict[str, Any]:
    backward = event.envelope.type is EventType.TRAINER_FORWARD_BACKWARD
    if backward and state.faults.value("fail_chunk") is not None:
        if state.faults.hit("fail_chunk") == state.faults.value("fail_chunk"):
            raise ApiError(500, "trainer_failed", "fault: this forward_backward event fails")
    tokens = sum(len(datum.target_ids) for datum in payload.data)
    check_limits(state.limits, len(payload.data), tokens)
    result = run.trainer.forward(payload, backward)
    if backward:
        run.batch.update(prompt_marks(payload))
    event.usage["input_tokens"] = tokens
    event.usage["train_tokens"] = tokens if backward else 0
    return result


def prompt_marks(payload: Any) -> set[int]:
    """The marks of a call's samples: after a resume they tell whether the data went on."""
    marks = set()
    for datum in payload.data:
        tokens: list[int] = []
        for chunk in datum.model_input.chunks:
            if chunk.type == "encoded_text":
                tokens += chunk.tokens
            else:
                count = chunk.expected_tokens or 0
                tokens += [picture_id(packed_picture(chunk.data, count)["image"])] * count
        signal = datum.weights if datum.advantages is None else datum.advantages
        marks.add(prompt_mark(tokens, signal or ()))
    return marks


def check_limits(limits: Limits, samples: int, tokens: int) -> None:
    """Raises ApiError 422 for an event over the limits that the SDK was told."""
    for what, count, limit in (
        ("samples", samples, limits.max_batch_size),
        ("tokens", tokens, limits.max_tokens_per_request),
    ):
        if limit is not None and count > limit:
            raise ApiError(422, "batch_too_large", f"{count} {what} in one event, limit {limit}")


def optimize(state: State, run: TrainingRun, event: Event, payload: Any) -> dict[str, Any]:
    metrics = run.trainer.optimize(payload.adam_params)
    run.optimizer_steps += 1
    run.history.append(sorted(run.batch)[:HISTORY_MARKS_PER_STEP])
    run.batch.clear()
    return {"metrics": metrics}


def save(state: State, run: TrainingRun, event: Event, payload: Any) -> dict[str, Any]:
    is_state = event.envelope.type is EventType.TRAINER_SAVE_STATE
    if payload.ttl_seconds is not None and payload.ttl_seconds < 1:
        raise ApiError(422, "invalid_ttl", f"ttl_seconds must be 1 or more: {payload.ttl_seconds}")
    if not NAME_PATTERN.fullmatch(payload.name) or len(payload.name) > NAME_MAX_LENGTH:
        raise ApiError(422, "invalid_checkpoint_name", f"invalid checkpoint name {payload.name!r}")
    behaviour = state.engine.behaviour
    stale = None if is_state else run.trainer.adapter_before_step
    checkpoint = state.store.save(
        training_run=run.cuid,
        name=payload.name,
        type="TRAINING" if is_state else "SAMPLER",
        step=run.optimizer_steps,
        base_model=run.served.name,
        kind=run.served.kind,
        lora=run.lora,
        visibility=payload.visibility,
        ttl_seconds=behaviour.save_ttl if payload.ttl_seconds is None else payload.ttl_seconds,
        overwrite=payload.overwrite or behaviour.same_name == "replaces",
        adapter=run.trainer.adapter() if stale is None else stale,
        adapter_config=run.trainer.adapter_config(),
        optimizer=run.trainer.optimizer_state() if is_state else None,
        history=run.history[-HISTORY_STEPS:] if is_state else None,
    )
    return {
        "checkpoint": {
            "uri": checkpoint.uri,
            "checkpoint_cuid": checkpoint.cuid,
            "model_id": run.served.model_id,
            "size_bytes": checkpoint.size_bytes,
        }
    }


def end_run(state: State, run: TrainingRun, event: Event, payload: Any) -> dict[str, Any]:
    run.status = "ENDED"
    return {}


HANDLERS = {
    EventType.TRAINER_INIT_RUN: init_run,
    EventType.TRAINER_FORWARD: forward,
    EventType.TRAINER_FORWARD_BACKWARD: forward,
    EventType.TRAINER_OPTIMIZE_STEP: optimize,
    EventType.TRAINER_SAVE_STATE: save,
    EventType.TRAINER_SAVE_WEIGHTS: save,
    EventType.TRAINER_END_RUN: end_run,
}


def finish_event(
    state: State, run: TrainingRun, event: Event, future: Future, submitted: float
) -> None:
    """Publish an event's result and record it; runs on the event loop."""
    error = future.exception()
    if error is None:
        event.result, event.status = future.result(), EventStatus.SUCCEEDED
    else:
        if not isinstance(error, ApiError):
            # Some kinds of damage (a half-done backward) cannot be told from others.
            run.corrupted_reason = f"an event failed inside the trainer: {error!r}"
            error = ApiError(500, "trainer_failed", f"{type(error).__name__}: {error}")
        event.error, event.status = error, EventStatus.FAILED
    event.done.set()
    record_event(state, run, event, submitted)


def record_event(state: State, run: TrainingRun, event: Event, submitted: float) -> None:
    """Write what was asked and what came of it, tensors packed."""
    envelope, payload = event.envelope, event.envelope.payload
    fields: dict[str, Any] = {
        "run": run.cuid,
        "event": envelope.event_id,
        "type": envelope.type.value,
        "index": envelope.metadata.index,
        "step": envelope.metadata.step,
        "optimizer_steps": run.optimizer_steps,
        "seconds": round(time.time() - submitted, 6),
        "status": event.status.value,
    }
    if event.error is not None:
        fields["error"] = {"code": event.error.code, "message": event.error.message}
    succeeded = event.status is EventStatus.SUCCEEDED
    if envelope.type in (EventType.TRAINER_FORWARD, EventType.TRAINER_FORWARD_BACKWARD):
        if succeeded:
            outputs = event.result["loss_fn_outputs"] if event.result else []
            fields.update(
                data=[
                    packed_datum(datum, output)
                    for datum, output in zip(payload["data"], outputs, strict=True)
                ],
                loss=payload["loss"],
                auto_shift=payload.get("auto_shift", False),
                totals=payload["gradient_accumulation"],
                metrics=event.result["metrics"] if event.result else {},
            )
            if envelope.type is EventType.TRAINER_FORWARD_BACKWARD and event.result:
                state.recorder.losses.append(event.result["metrics"]["loss_mean"])
            usage = event.usage
            state.recorder.add_tokens(
                train=usage["train_tokens"], prefill=usage["input_tokens"] - usage["train_tokens"]
            )
    else:
        fields.update(payload=payload, result=event.result)
    state.recorder.write("event", **fields)
    if succeeded and envelope.type is EventType.TRAINER_OPTIMIZE_STEP:
        state.recorder.write("optimizer_step", run=run.cuid, step=run.optimizer_steps)
    if succeeded and event.result and "checkpoint" in event.result:
        state.recorder.write(
            "checkpoint",
            run=run.cuid,
            uri=event.result["checkpoint"]["uri"],
            visibility=payload.get("visibility", "WORKSPACE"),
            ttl_seconds=payload.get("ttl_seconds"),
        )


def packed_datum(datum: dict[str, Any], output: dict[str, Any]) -> dict[str, Any]:
    """A wire datum with its lists as bytes, and the log-probabilities it was answered with."""
    packed: dict[str, Any] = {
        "input": [
            packed_ids(chunk["tokens"])
            if chunk.get("type", "encoded_text") == "encoded_text"
            else packed_picture(chunk["data"], chunk.get("expected_tokens") or 0)
            for chunk in datum["model_input"]["chunks"]
        ],
        "target_ids": packed_ids(datum["target_ids"]),
        "served_logprobs": output["logprobs"]["data"],
    }
    for name in ("weights", "logprobs", "advantages"):
        if datum.get(name) is not None:
            packed[name] = packed_floats(datum[name])
    return packed


# -- sampling --------------------------------------------------------------------------------------


async def sample(request: Request) -> Response:
    state: State = request.app.state.backend
    token_run = run_of(request, state)
    run = state.sampling_run(request.path_params["run"])
    if token_run != run.cuid:
        raise ApiError(403, "run_mismatch", "the token belongs to another run")
    try:
        body = SampleRequest.model_validate(await json_body(request))
    except ValidationError as error:
        raise ApiError(422, "invalid_request", validation_message(error)) from None
    run.requests += 1
    lost_after = state.faults.value("lost_actor")
    if lost_after is not None and run.requests > lost_after:
        raise ApiError(404, "sampling_run_not_found", "fault: the actor of this run is gone")
    if state.faults.strikes("sample_503"):
        raise ApiError(503, "sampler_unavailable", "fault: sampler unavailable")
    future = asyncio.wrap_future(queue_sample(state, run, body))
    answer = asyncio.ensure_future(sample_answer(state, run, body, future))
    done, _ = await asyncio.wait({answer}, timeout=KEEP_ALIVE_SECONDS)
    if done:
        return Response(answer.result(), media_type="application/json")
    return StreamingResponse(keep_alive(answer), media_type="application/json")


async def keep_alive(answer: "asyncio.Future[bytes]") -> Any:
    while not answer.done():
        yield b" "
        await asyncio.wait({answer}, timeout=KEEP_ALIVE_SECONDS)
    yield answer.result()


def queue_sample(state: State, run: SamplingRun, body: SampleRequest) -> Future:
    """Put a request into the batch of its snapshot."""
    if body.num_samples > MAX_SAMPLES_PER_REQUEST:
        raise ApiError(
            422,
            "too_many_samples",
            f"num_samples is {body.num_samples}, at most {MAX_SAMPLES_PER_REQUEST} are sampled "
            "at once",
        )
    # Without a seed the stream depends on what is asked and how often, not on when it arrives,
    # so that a concurrent loop is reproducible.
    whole_request = body.model_dump_json(exclude={"request_id"})
    asked = hashlib.sha256(whole_request.encode("utf-8")).hexdigest()
    repeat = run.repeats[asked] = run.repeats.get(asked, 0) + 1

    def make_job(loaded: Any, future: Future) -> Any:
        from trio_local.sampler import SampleJob, sampling_spec, stream_seed

        prompt, pictures = loaded.read_input(body.prompt.chunks, "the prompt")
        check_prompt(prompt, loaded.vocabulary_size)
        if body.topk_prompt_logprobs > loaded.vocabulary_size:
            raise ApiError(
                422,
                "invalid_sampling_params",
                f"topk_prompt_logprobs is {body.topk_prompt_logprobs}, the vocabulary has "
                f"{loaded.vocabulary_size}",
            )
        spec = sampling_spec(body.sampling_params, loaded, len(prompt))
        unseeded = (state.seed, run.index, asked, repeat)

        def is_seeded(spec: Any) -> bool:
            return spec.seed is not None and state.engine.behaviour.same_seed == "repeats"

        def finish(outcome: Any) -> None:
            if future.done():
                return  # a failing batch tells its requests more than once
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        return SampleJob(
            prompt=prompt,
            pictures=pictures,
            spec=spec,
            num_samples=body.num_samples,
            want_prompt_logprobs=body.return_prompt_logprobs,
            topk_prompt_logprobs=body.topk_prompt_logprobs,
            stream_seed=stream_seed(spec.seed) if is_seeded(spec) else stream_seed(*unseeded),
            finish=finish,
        )

    adapter, snapshot = None, run.snapshot
    if run.adapter is not None and run.checkpoint is not None:
        tensors, scale = run.adapter, run.served.lora_alpha / run.checkpoint.lora["rank"]
        trained = state.training_runs.get(run.checkpoint.training_run)
        if state.engine.behaviour.snapshot == "live" and trained is not None:
            tensors = trained.trainer.adapter()
            snapshot = f"{trained.cuid}:{trained.optimizer_steps}"
        adapter = tensors, scale
    return state.engine.sample(run.served, snapshot, adapter, make_job)


def check_prompt(prompt: list[int], vocabulary_size: int) -> None:
    """Raises ApiError 422 for the first id outside the vocabulary."""
    for position, token in enumerate(prompt):
        if not 0 <= token < vocabulary_size:
            raise ApiError(
                422,
                "token_id_out_of_range",
                f"prompt token {token} at position {position} is outside the vocabulary "
                f"of {vocabulary_size}",
            )


async def sample_answer(
    state: State, run: SamplingRun, body: SampleRequest, future: "asyncio.Future[Any]"
) -> bytes:
    """Wait for a request's result, record it, and encode it as the SDK reads it."""
    started = time.time()
    result = await future
    prompt_tokens = result.prompt_tokens
    output_tokens = sum(len(sequence.tokens) for sequence in result.sequences)
    answer: dict[str, Any] = {
        "request_id": body.request_id,
        "sampling_run": run.cuid,
        "sequences": [
            {
                "tokens": sequence.tokens,
                "text": sequence.text if body.return_text else None,
                "logprobs": sequence.logprobs if body.return_token_logprobs else [],
                "stop_reason": sequence.stop_reason,
            }
            for sequence in result.sequences
        ],
        "usage": {"input_tokens": prompt_tokens, "output_tokens": output_tokens},
    }
    if result.prompt_logprobs is not None:
        first = {"0 first": [0.0], "one short": []}
        answer["prompt_logprobs"] = [
            *first.get(state.engine.behaviour.prompt_logprobs, [None]),
            *result.prompt_logprobs[1:],
        ]
    if result.topk_prompt_logprobs is not None:
        answer["topk_prompt_logprobs"] = result.topk_prompt_logprobs
    state.recorder.add_tokens(prefill=prompt_tokens, sample=output_tokens)
    record_sample(state, run, body, result, started)
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def record_sample(
    state: State, run: SamplingRun, body: SampleRequest, result: Any, started: float
) -> None:
    state.recorder.model(run.served.model_id, state.engine.chat(run.served))
    picture_tokens = iter(result.picture_tokens)
    fields: dict[str, Any] = {
        "run": run.cuid,
        "snapshot": run.snapshot,
        "request": body.request_id,
        "prompt": [
            packed_ids(c.tokens)
            if c.type == "encoded_text"
            else packed_picture(c.data, next(picture_tokens))
            for c in body.prompt.chunks
        ],
        "params": body.sampling_params,
        "num_samples": body.num_samples,
        "seconds": round(time.time() - started, 6),
        "sequences": [
            {
                "tokens": packed_ids(s.tokens),
                "logprobs": packed_floats(s.logprobs),
                "stop_reason": s.stop_reason,
                "forced": bool(s.forced),
            }
            for s in result.sequences
        ],
    }
    if result.prompt_logprobs is not None:
        fields["prompt_logprobs"] = packed_floats(result.prompt_logprobs[1:])
    if body.topk_prompt_logprobs:
        fields["topk_prompt_logprobs"] = body.topk_prompt_logprobs
    state.recorder.write("sample", **fields)


# -- heartbeat -------------------------------------------------------------------------------------


async def heartbeat(request: Request) -> Response:
    state: State = request.app.state.backend
    run_of(request, state)
    await json_body(request)
    return JSONResponse({"heartbeat_ms": HEARTBEAT_MS})


def run_of(request: Request, state: State) -> str:
    return state.run_of_token(request.headers.get("authorization", ""))


ROUTES = [
    Route("/v1/events", submit_event, methods=["POST"]),
    Route("/v1/events/{event}", get_event, methods=["GET"]),
    Route("/v1/sampling-runs/{run}/sample", sample, methods=["POST"]),
    Route("/v1/client/heartbeat", heartbeat, methods=["POST"]),
]
