"""The control plane: sessions, runs, models, checkpoints. JSON under `/api`."""

from datetime import datetime, timedelta, timezone
from typing import Any

from pydantic import BaseModel, ValidationError
from pytrio.protocol.control.sampling_run.create import SamplingRunCreateRequest
from pytrio.protocol.control.service_session.close import ServiceSessionCloseRequest
from pytrio.protocol.control.service_session.create import ServiceSessionCreateRequest
from pytrio.protocol.control.training_run.create import TrainingRunCreateRequest
from pytrio.protocol.control.training_run.update import TrainingRunUpdateRequest
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from trio_local.catalogue import ServedModel, context_length
from trio_local.http import json_body, raw_body, strict_page
from trio_local.protocol import ApiError, validation_message
from trio_local.state import (
    WORKSPACE,
    SamplingRun,
    Session,
    State,
    TrainingRun,
    new_cuid,
    now,
)
from trio_local.store import Checkpoint

DOWNLOAD_LINK_LIFETIME = timedelta(hours=1)
LORA_RANKS = range(4, 65)
# What torch takes as a seed, less the half that no other library takes.
SEEDS = range(-(2**63), 2**63)


def state_of(request: Request) -> State:
    """The shared state, once the API key has been checked. Raises ApiError 401."""
    state: State = request.app.state.backend
    key = request.headers.get("x-api-key", "")
    if not key:
        raise ApiError(401, "missing_api_key", "no API key was sent")
    if state.api_key is not None and key != state.api_key:
        raise ApiError(
            401,
            "foreign_api_key",
            "the dry run takes only its own key: do not set api_key in code, "
            "leave it to PYTRIO_API_KEY",
        )
    return state


async def parsed(request: Request, model: type[BaseModel]) -> Any:
    """The body as one of the SDK's own request models. Raises ApiError 4xx."""
    try:
        return model.model_validate(await json_body(request))
    except ValidationError as error:
        raise ApiError(422, "invalid_request", validation_message(error)) from None


def iso(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


# -- platform ------------------------------------------------------------------------------------


async def bootstrap(request: Request) -> Response:
    state: State = request.app.state.backend
    sdk_version = request.query_params.get("sdk_version", state.sdk_version)
    compatibility = {"status": "compatible", "sdk_version": sdk_version}
    return JSONResponse({"compatibility": compatibility, "notices": []})


async def verify_key(request: Request) -> Response:
    state_of(request)
    return JSONResponse(
        {
            "api_key_tid": "key-local",
            "api_key_name": "dry run",
            "user_cuid": "user-local",
            "username": "dry-run",
            "display_name": "Dry run",
            "workspace_cuid": WORKSPACE,
            "workspace_name": "dry-run",
            "workspace_type": "PERSONAL",
            "expires_at": None,
        }
    )


async def telemetry(request: Request) -> Response:
    """Accept what the SDK reports about itself and forget it."""
    await raw_body(request)
    return JSONResponse({}, status_code=202)


async def list_models(request: Request) -> Response:
    state = state_of(request)
    offset, limit = strict_page(request, default_limit=100)
    names = state.catalogue.listed()
    items = []
    for name in names[offset : offset + limit]:
        length = context_length(state.catalogue.resolve(name))
        capability = state.limits.capability(length)
        items.append(
            {
                "cuid": f"model-{name}",
                "alias": name,
                "model_id": name,
                "context_length": length,
                "train_available": True,
                "sample_available": True,
                "trainer": capability,
                "sampler": capability,
                "created_at": iso(0),
                "updated_at": iso(0),
            }
        )
    page = {"items": items, "total": len(names), "limit": limit, "offset": offset}
    return JSONResponse(page)


# -- service sessions ----------------------------------------------------------------------------


def session_json(session: Session, with_runs: bool) -> dict[str, Any]:
    value: dict[str, Any] = {
        "service_session_cuid": session.cuid,
        "workspace_cuid": WORKSPACE,
        "status": session.status,
        "sdk_version": session.sdk_version,
        "created_at": session.created.isoformat(),
        "updated_at": session.updated.isoformat(),
    }
    if with_runs:
        value["training_run_cuids"] = session.training_runs
        value["sampling_run_cuids"] = session.sampling_runs
    return value


async def create_session(request: Request) -> Response:
    state = state_of(request)
    body: ServiceSessionCreateRequest = await parsed(request, ServiceSessionCreateRequest)
    session = Session(new_cuid("sess"), body.sdk_version, now(), now())
    state.sessions[session.cuid] = session
    state.recorder.write("session", session=session.cuid, sdk_version=body.sdk_version)
    return JSONResponse(session_json(session, with_runs=False))


async def get_session(request: Request) -> Response:
    session = state_of(request).session(request.path_params["session"])
    return JSONResponse(session_json(session, with_runs=True))


async def list_sessions(request: Request) -> Response:
    sessions = list(state_of(request).sessions.values())[::-1]
    return page_of(request, "service_sessions", sessions, lambda s: session_json(s, False), 20)


async def renew_session(request: Request) -> Response:
    session = state_of(request).session(request.path_params["session"])
    session.updated = now()
    return JSONResponse(session_json(session, with_runs=False))


async def close_session(request: Request) -> Response:
    state = state_of(request)
    session = state.session(request.path_params["session"])
    body: ServiceSessionCloseRequest = await parsed(request, ServiceSessionCloseRequest)
    session.status, session.updated = body.status, now()
    for cuid in session.training_runs:
        state.training_runs[cuid].status = body.status
    state.recorder.write("session_closed", session=session.cuid, status=body.status)
    return JSONResponse(session_json(session, with_runs=False))


# -- training runs -------------------------------------------------------------------------------


def run_is_refused(state: State) -> ApiError | None:
    """What the faults `billing_409` and `capacity` answer to the creation of a run."""
    if state.faults.value("billing_409"):
        return ApiError(409, "billing_insufficient_balance", "fault: workspace balance exhausted")
    refusals = state.faults.value("capacity")
    if refusals is not None and state.faults.hit("capacity") <= refusals:
        return ApiError(429, "actor_capacity_exceeded", "fault: no actor is free")
    return None


def lora_of(body: TrainingRunCreateRequest) -> dict[str, Any]:
    return {
        "rank": body.lora_rank,
        "seed": body.seed,
        "train_mlp": body.train_mlp,
        "train_attn": body.train_attn,
        "train_unembed": body.train_unembed,
    }


def served_of(state: State, checkpoint: Checkpoint) -> ServedModel:
    """The model that a checkpoint adapts. Raises ApiError 422 when another one has its name now:
    an adapter says nothing on other weights, even where the shapes agree."""
    served = state.catalogue.resolve(checkpoint.base_model)
    if served.kind != checkpoint.kind:
        raise ApiError(
            422,
            "checkpoint_mismatch",
            f"{checkpoint.uri} was trained on {checkpoint.kind}, but {served.name} is served by "
            f"{served.kind} now; start with --model {served.name}={checkpoint.kind}",
        )
    return served


def check_restorable(checkpoint: Checkpoint, with_optimizer: bool) -> None:
    """Raises ApiError 422 when an optimiser is asked of weights saved for sampling."""
    if with_optimizer and checkpoint.type != "TRAINING":
        raise ApiError(
            422,
            "optimizer_state_missing",
            f"{checkpoint.uri} holds sampler weights without optimiser state; resume from a "
            "save_state checkpoint",
        )


async def create_training_run(request: Request) -> Response:
    state = state_of(request)
    session = state.open_session(request.path_params["session"])
    body: TrainingRunCreateRequest = await parsed(request, TrainingRunCreateRequest)
    if body.lora_rank not in LORA_RANKS:
        raise ApiError(422, "invalid_lora_rank", f"rank must be 4 to 64, got {body.lora_rank}")
    if body.seed is not None and body.seed not in SEEDS:
        raise ApiError(422, "invalid_seed", "seed must be a 64-bit whole number")
    lora = lora_of(body)
    if body.source_checkpoint_uri:
        source = state.store.find(body.source_checkpoint_uri)
        check_restorable(source, body.restore_optimizer)
        served = served_of(state, source)
        for name in ("rank", "train_mlp", "train_attn", "train_unembed"):
            if lora[name] != source.lora[name]:
                raise ApiError(
                    422,
                    "checkpoint_mismatch",
                    f"{name} is {source.lora[name]} in the checkpoint and {lora[name]} here",
                )
    else:
        served = state.catalogue.resolve(body.base_model)
    refusal = run_is_refused(state)
    if refusal is not None:
        raise refusal
    run = TrainingRun(
        cuid=new_cuid("train"),
        session=session.cuid,
        index=len(session.training_runs) + 1,
        served=served,
        lora=lora,
        source_uri=body.source_checkpoint_uri,
        restore_optimizer=body.restore_optimizer,
        created=now(),
        updated=now(),
    )
    state.training_runs[run.cuid] = run
    session.training_runs.append(run.cuid)
    state.recorder.write(
        "training_run",
        run=run.cuid,
        session=session.cuid,
        base_model=served.name,
        served_by=served.kind,
        folder=served.model_id,
        lora=lora,
        source=run.source_uri,
        restore_optimizer=run.restore_optimizer,
    )
    return JSONResponse(
        {
            "training_run_cuid": run.cuid,
            "service_session_cuid": session.cuid,
            "workspace_cuid": WORKSPACE,
            "status": run.status,
            "run_index": run.index,
            "model_spec_cuid": f"model-{served.name}",
            "model_alias": served.name,
            "model_id": served.model_id,
            "trainer": state.limits.capability(context_length(served)),
            "created_at": run.created.isoformat(),
            **state.issue_token(run.cuid),
        }
    )


async def update_training_run(request: Request) -> Response:
    """Bind a checkpoint before the run's first event (`load_state`)."""
    state = state_of(request)
    run = state.training_run(request.path_params["run"])
    body: TrainingRunUpdateRequest = await parsed(request, TrainingRunUpdateRequest)
    if run.session != request.path_params["session"]:
        raise ApiError(404, "not_found", f"no training run {run.cuid!r} in this session")
    if run.next_index > 1 or run.early:
        raise ApiError(409, "already_initialized", "the run has started; bind a checkpoint before")
    checkpoint = state.store.find(body.source_checkpoint_uri)
    check_restorable(checkpoint, body.restore_optimizer)
    source = served_of(state, checkpoint)
    if source.folder != run.served.folder:
        raise ApiError(
            422,
            "checkpoint_mismatch",
            f"the checkpoint adapts {source.name}, not {run.served.name}",
        )
    run.source_uri = body.source_checkpoint_uri
    run.restore_optimizer = body.restore_optimizer
    run.updated = now()
    return JSONResponse(
        {
            "source_checkpoint_uri": run.source_uri,
            "restore_optimizer": run.restore_optimizer,
            "trainer": state.limits.capability(context_length(run.served)),
            **state.issue_token(run.cuid),
        }
    )


def training_run_json(run: TrainingRun) -> dict[str, Any]:
    lora = {
        "lora_rank": run.lora["rank"],
        "seed": run.lora["seed"],
        "train_mlp": run.lora["train_mlp"],
        "train_attn": run.lora["train_attn"],
        "train_unembed": run.lora["train_unembed"],
    }
    return {
        "training_run_cuid": run.cuid,
        "base_model": run.served.name,
        "service_session_cuid": run.session,
        "workspace_cuid": WORKSPACE,
        "status": run.status,
        "run_index": run.index,
        "model_spec_cuid": f"model-{run.served.name}",
        "is_lora": True,
        "source_checkpoint_uri": run.source_uri or None,
        "restore_optimizer": run.restore_optimizer,
        "corrupted": run.corrupted_reason is not None,
        "corrupted_reason": run.corrupted_reason,
        "training_params": {"restore_optimizer": run.restore_optimizer, **lora},
        "created_at": run.created.isoformat(),
        "updated_at": run.updated.isoformat(),
        **lora,
    }


async def get_training_run(request: Request) -> Response:
    run = state_of(request).training_run(request.path_params["run"])
    return JSONResponse(training_run_json(run))


async def list_training_runs(request: Request) -> Response:
    runs = list(state_of(request).training_runs.values())[::-1]
    return page_of(request, "training_runs", runs, training_run_json, 20)


async def find_training_run(request: Request) -> Response:
    """Configuration behind a checkpoint address; `base_model` is the id the SDK compares."""
    state = state_of(request)
    source = state.store.find(request.query_params.get("checkpoint_uri", ""))
    return JSONResponse(
        {
            "base_model": served_of(state, source).model_id,
            "lora_rank": source.lora["rank"],
            "seed": source.lora["seed"],
            "train_mlp": source.lora["train_mlp"],
            "train_attn": source.lora["train_attn"],
            "train_unembed": source.lora["train_unembed"],
        }
    )


async def renew_training_run(request: Request) -> Response:
    state = state_of(request)
    run = state.training_run(request.path_params["run"])
    return JSONResponse(
        {
            "training_run_cuid": run.cuid,
            "service_session_cuid": run.session,
            "workspace_cuid": WORKSPACE,
            **state.issue_token(run.cuid),
        }
    )


# -- sampling runs -------------------------------------------------------------------------------


async def create_sampling_run(request: Request) -> Response:
    state = state_of(request)
    session = state.open_session(request.path_params["session"])
    body: SamplingRunCreateRequest = await parsed(request, SamplingRunCreateRequest)
    served = state.catalogue.resolve(body.base_model)
    checkpoint = adapter = None
    if body.source_checkpoint_uri:
        checkpoint, adapter, _ = state.store.read(body.source_checkpoint_uri)
        source = served_of(state, checkpoint)
        if source.folder != served.folder:
            raise ApiError(
                422,
                "checkpoint_mismatch",
                f"the checkpoint adapts {source.name}, not {served.name}",
            )
    if state.faults.value("billing_409"):
        raise ApiError(409, "billing_insufficient_balance", "fault: workspace balance exhausted")
    run = SamplingRun(
        cuid=new_cuid("samp"),
        session=session.cuid,
        index=len(session.sampling_runs) + 1,
        served=served,
        checkpoint=checkpoint,
        created=now(),
        # Held here, so that neither deleting nor overwriting the checkpoint changes the sampler.
        adapter=adapter,
    )
    state.sampling_runs[run.cuid] = run
    session.sampling_runs.append(run.cuid)
    state.recorder.write(
        "sampling_run",
        run=run.cuid,
        session=session.cuid,
        base_model=served.name,
        served_by=served.kind,
        checkpoint=checkpoint.uri if checkpoint else "",
        folder=served.model_id,
        snapshot=run.snapshot,
        training_run=checkpoint.training_run if checkpoint else "",
        step=checkpoint.step if checkpoint else 0,
    )
    return JSONResponse(
        {
            "sampling_run_cuid": run.cuid,
            "service_session_cuid": session.cuid,
            "workspace_cuid": WORKSPACE,
            "status": "RUNNING",
            "run_index": run.index,
            "model_spec_cuid": f"model-{served.name}",
            "model_alias": served.name,
            "model_id": served.model_id,
            "sampler": state.limits.capability(context_length(served)),
            "created_at": run.created.isoformat(),
            **state.issue_token(run.cuid),
        }
    )


async def get_sampling_run(request: Request) -> Response:
    run = state_of(request).sampling_run(request.path_params["run"])
    return JSONResponse(
        {
            "sampling_run_cuid": run.cuid,
            "service_session_cuid": run.session,
            "workspace_cuid": WORKSPACE,
            "status": "RUNNING",
            "base_model": run.served.name,
            "model_id": run.served.model_id,
            "alias": run.served.name,
            "source_checkpoint_uri": run.checkpoint.uri if run.checkpoint else None,
            "created_at": run.created.isoformat(),
            "updated_at": run.created.isoformat(),
        }
    )


async def renew_sampling_run(request: Request) -> Response:
    state = state_of(request)
    run = state.sampling_run(request.path_params["run"])
    return JSONResponse(
        {
            "sampling_run_cuid": run.cuid,
            "service_session_cuid": run.session,
            "workspace_cuid": WORKSPACE,
            **state.issue_token(run.cuid),
        }
    )


# -- checkpoints ---------------------------------------------------------------------------------


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "cuid": checkpoint.cuid,
        "checkpoint_cuid": checkpoint.cuid,
        "training_run_cuid": checkpoint.training_run,
        "workspace_cuid": WORKSPACE,
        "name": checkpoint.name,
        "checkpoint_type": checkpoint.type,
        "status": "READY",
        "checkpoint_uri": checkpoint.uri,
        "model": checkpoint.base_model,
        "base_model": checkpoint.base_model,
        "model_spec_cuid": f"model-{checkpoint.base_model}",
        "task_id": checkpoint.training_run,
        "task_created_at": iso(checkpoint.created),
        "task_status": "ENDED",
        "step": checkpoint.step,
        "path": checkpoint.uri,
        "created_at": iso(checkpoint.created),
        "uploaded_at": iso(checkpoint.created),
        "size_bytes": checkpoint.size_bytes,
        "lora_rank": checkpoint.lora["rank"],
        "is_uploaded": True,
        "expired_at": iso(checkpoint.expires),
    }


async def list_checkpoints(request: Request) -> Response:
    checkpoints = state_of(request).store.listed()
    return page_of(request, "checkpoints", checkpoints, checkpoint_json, 100)


async def list_run_checkpoints(request: Request) -> Response:
    state, run = state_of(request), request.path_params["run"]
    checkpoints = state.store.listed(run)
    if not checkpoints:
        state.training_run(run)  # nothing to list, or nothing of that name
    return page_of(request, "checkpoints", checkpoints, checkpoint_json, 200)


async def delete_checkpoint(request: Request) -> Response:
    state_of(request).store.delete(request.path_params["checkpoint"])
    return Response(status_code=204)


async def download_url(request: Request) -> Response:
    state = state_of(request)
    checkpoint = state.store.find_id(request.path_params["checkpoint"])
    return JSONResponse(
        {
            "url": f"{state.endpoint}/download/{checkpoint.cuid}",
            "expires_at": (now() + DOWNLOAD_LINK_LIFETIME).isoformat(),
            "source": "object_storage",
            "checkpoint_status": "READY",
            "tls_cert_pem": None,
            "tls_not_after": None,
        }
    )


async def download(request: Request) -> Response:
    """The archive itself; the unguessable id in the link is its key, as in a presigned URL."""
    state: State = request.app.state.backend
    archive = state.store.archive(request.path_params["checkpoint"])
    return FileResponse(archive, media_type="application/zip")


def page_of(request: Request, name: str, rows: list[Any], to_json: Any, default: int) -> Response:
    """One page of a list with the cursor the SDK reads."""
    offset, limit = strict_page(request, default)
    cursor = {"offset": offset, "limit": limit, "total": len(rows)}
    page = [to_json(row) for row in rows[offset : offset + limit]]
    return JSONResponse({name: page, "cursor": cursor})


V1 = "/api/openapi/v1"
ROUTES = [
    Route("/api/sdk/bootstrap", bootstrap, methods=["GET"]),
    Route("/api/models", list_models, methods=["GET"]),
    Route("/api/telemetry/event", telemetry, methods=["POST"]),
    Route("/download/{checkpoint}", download, methods=["GET"]),
    Route(f"{V1}/api-key/verify", verify_key, methods=["GET"]),
    Route(f"{V1}/service-sessions", create_session, methods=["POST"]),
    Route(f"{V1}/service-sessions", list_sessions, methods=["GET"]),
    Route(f"{V1}/service-sessions/{{session}}", get_session, methods=["GET"]),
    Route(f"{V1}/service-sessions/{{session}}/renew", renew_session, methods=["POST"]),
    Route(f"{V1}/service-sessions/{{session}}/close", close_session, methods=["POST"]),
    Route(
        f"{V1}/service-sessions/{{session}}/training-runs", create_training_run, methods=["POST"]
    ),
    Route(
        f"{V1}/service-sessions/{{session}}/training-runs/{{run}}",
        update_training_run,
        methods=["PATCH"],
    ),
    Route(
        f"{V1}/service-sessions/{{session}}/sampling-runs", create_sampling_run, methods=["POST"]
    ),
    Route(f"{V1}/training-runs", list_training_runs, methods=["GET"]),
    Route(f"{V1}/training-runs/by-checkpoint-uri", find_training_run, methods=["GET"]),
    Route(f"{V1}/training-runs/{{run}}", get_training_run, methods=["GET"]),
    Route(f"{V1}/training-runs/{{run}}/renew", renew_training_run, methods=["POST"]),
    Route(f"{V1}/training-runs/{{run}}/checkpoints", list_run_checkpoints, methods=["GET"]),
    Route(f"{V1}/sampling-runs/{{run}}", get_sampling_run, methods=["GET"]),
    Route(f"{V1}/sampling-runs/{{run}}/renew", renew_sampling_run, methods=["POST"]),
    Route(f"{V1}/checkpoints", list_checkpoints, methods=["GET"]),
    Route(f"{V1}/checkpoints/{{checkpoint}}", delete_checkpoint, methods=["DELETE"]),
    Route(f"{V1}/checkpoints/{{checkpoint}}/download-url", download_url, methods=["GET"]),
]
