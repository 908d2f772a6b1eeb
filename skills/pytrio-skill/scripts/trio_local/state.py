"""What the backend knows while it runs: sessions, runs, tokens and events."""

import asyncio
import secrets
import uuid
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from pytrio.protocol.actor.events.event import EventEnvelope, EventStatus

from trio_local.catalogue import Catalogue, ServedModel
from trio_local.engine import Engine
from trio_local.faults import Faults
from trio_local.protocol import ApiError
from trio_local.recording import Recorder
from trio_local.store import Checkpoint, CheckpointStore

WORKSPACE = "workspace-local"
TOKEN_LIFETIME = timedelta(hours=1)
# Results already fetched are kept for a repeated poll; older ones are dropped.
FETCHED_EVENTS_KEPT = 64
# What a closed session or an ended run reports.
ENDED_STATUSES = ("ENDED", "CANCELLED")
# An event this far ahead of the next one can only be a broken client.
MAX_EVENTS_AHEAD = 256


def new_cuid(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex[:20]}"


def now() -> datetime:
    return datetime.now(timezone.utc)


@dataclass
class Session:
    """One service session: what a ServiceClient opens."""

    cuid: str
    sdk_version: str
    created: datetime
    updated: datetime
    status: str = "RUNNING"
    training_runs: list[str] = field(default_factory=list)
    sampling_runs: list[str] = field(default_factory=list)


@dataclass
class Event:
    """One trainer event from its arrival to its result."""

    envelope: EventEnvelope
    status: EventStatus = EventStatus.ACCEPTED
    result: dict[str, Any] | None = None
    error: ApiError | None = None
    usage: dict[str, int] = field(
        default_factory=lambda: {"input_tokens": 0, "output_tokens": 0, "train_tokens": 0}
    )
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class TrainingRun:
    """One training run; `trainer` exists once its init event has run."""

    cuid: str
    session: str
    index: int
    served: ServedModel
    lora: dict[str, Any]
    source_uri: str
    restore_optimizer: bool
    created: datetime
    updated: datetime
    status: str = "CREATED"
    corrupted_reason: str | None = None
    trainer: Any = None
    optimizer_steps: int = 0
    # Marks of the prompts trained on: of the step that is being gathered, and per step so far.
    batch: set[int] = field(default_factory=set)
    history: list[list[int]] = field(default_factory=list)
    next_index: int = 1
    early: dict[int, Event] = field(default_factory=dict)
    events: dict[str, Event] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)

    def remember_fetched(self, event_id: str) -> None:
        """Note that a final result was delivered, and forget the oldest of many."""
        if event_id in self.fetched:
            return
        self.fetched.append(event_id)
        while len(self.fetched) > FETCHED_EVENTS_KEPT:
            forgotten = self.events.get(self.fetched.pop(0))
            if forgotten is not None:
                # The id stays known, so that a repeated submit is still recognised.
                forgotten.result = None
                forgotten.envelope.payload = {}


@dataclass
class SamplingRun:
    """One sampling run: an immutable snapshot of weights."""

    cuid: str
    session: str
    index: int
    served: ServedModel
    checkpoint: Checkpoint | None
    created: datetime
    adapter: dict[str, Any] | None = None
    requests: int = 0
    repeats: dict[str, int] = field(default_factory=dict)

    @property
    def snapshot(self) -> str:
        """Name of the weights: the checkpoint's id, or the base model's folder."""
        return self.checkpoint.cuid if self.checkpoint else f"base:{self.served.folder}"


@dataclass(frozen=True)
class Limits:
    """Request limits. The first two are told to the SDK, which splits its calls accordingly."""

    max_batch_size: int | None
    max_tokens_per_request: int | None
    # The largest call the SDK sends is far below this; beyond it a client is broken.
    max_body_bytes: int = 256 * 1024 * 1024

    def capability(self, context_length: int) -> dict[str, int | None]:
        return {
            "max_batch_size": self.max_batch_size,
            "max_tokens_per_request": self.max_tokens_per_request,
            "max_seq_len": context_length,
        }


@dataclass
class Token:
    """An actor token: which run it opens, and when the actor stops taking it."""

    run: str
    dies: datetime


@dataclass
class State:
    """Everything the request handlers share. Only the server's event loop changes it."""

    catalogue: Catalogue
    store: CheckpointStore
    engine: Engine
    recorder: Recorder
    faults: Faults
    limits: Limits
    api_key: str | None
    seed: int
    sdk_version: str
    endpoint: str = ""
    sessions: dict[str, Session] = field(default_factory=dict)
    training_runs: dict[str, TrainingRun] = field(default_factory=dict)
    sampling_runs: dict[str, SamplingRun] = field(default_factory=dict)
    tokens: dict[str, Token] = field(default_factory=dict)

    def session(self, cuid: str) -> Session:
        return _found(self.sessions, cuid, "service session")

    def open_session(self, cuid: str) -> Session:
        """A session that can still create runs. Raises ApiError 404 or 409."""
        session = self.session(cuid)
        if session.status in ENDED_STATUSES:
            raise ApiError(409, "session_ended", f"the session has ended ({session.status})")
        return session

    def training_run(self, cuid: str) -> TrainingRun:
        return _found(self.training_runs, cuid, "training run")

    def sampling_run(self, cuid: str) -> SamplingRun:
        return _found(self.sampling_runs, cuid, "sampling run")

    def issue_token(self, run: str) -> dict[str, Any]:
        """Actor address and a fresh token for a run, as both planes hand them out.

        The fault `token_expiry` makes tokens die before the hour they claim.
        """
        token = f"local-{secrets.token_hex(16)}"
        lifetime = self.faults.value("token_expiry")
        dies = now() + (TOKEN_LIFETIME if lifetime is None else timedelta(seconds=lifetime))
        self.tokens[token] = Token(run, dies)
        return {
            "actor": {
                "actor_cuid": "actor-local",
                "endpoint": self.endpoint,
                "connect_mode": "direct",
                "tls_enabled": False,
            },
            "actor_jwt": {"token": token, "expires_at": (now() + TOKEN_LIFETIME).isoformat()},
        }

    def run_of_token(self, authorization: str) -> str:
        """The run an `Authorization` header opens. Raises ApiError 401."""
        scheme, _, value = authorization.partition(" ")
        token = self.tokens.get(value.strip()) if scheme.lower() == "bearer" else None
        if token is None:
            raise ApiError(401, "invalid_token", "unknown actor token")
        if token.dies <= now():
            raise ApiError(401, "token_expired", "the actor token has expired; renew it")
        return token.run


def _found(table: dict[str, Any], cuid: str, what: str) -> Any:
    if cuid not in table:
        raise ApiError(404, "not_found", f"no {what} {cuid!r} on this backend")
    return table[cuid]


def default_store() -> Path:
    """Where checkpoints live unless `--store` says otherwise."""
    return Path.cwd() / ".trio-local" / "checkpoints"
