"""Speaking the backend's wire directly, with the SDK's own protocol models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
from pytrio.client.builders.training import build_trainer_init_payload
from pytrio.config.config import configuration
from pytrio.protocol.actor.events.base import ProtocolPayload
from pytrio.protocol.actor.events.codec import payload_to_wire_value
from pytrio.protocol.actor.events.event import (
    EventEnvelope,
    EventMetadata,
    EventResponse,
    EventStatus,
    EventType,
    build_event_envelope,
    current_timestamp_ms,
    pack_event_envelope,
    unpack_event_response,
)
from pytrio.protocol.actor.events.trainer.forward import TrainerForwardBackwardPayload
from pytrio.protocol.actor.events.trainer.init_run import TrainerInitRunPayload
from pytrio.protocol.actor.events.trainer.lora import FreshLoraSource, LoraRunSpec
from pytrio.protocol.actor.events.trainer.optimize_step import TrainerOptimizeStepPayload
from pytrio.protocol.actor.events.trainer.save import TrainerSavePayload

V1 = "/api/openapi/v1"
BASE_MODEL = "Qwen/Qwen3.5-4B"
LORA = {"rank": 8, "seed": 7, "train_mlp": True, "train_attn": True, "train_unembed": True}
POLLS = 4
# For `trio.configure`: give up on a failing request soon, and repeat it at once.
QUICK_RETRIES = {
    "control_retry_timeout_seconds": 5.0,
    "training_retry_timeout_seconds": 5.0,
    "sampling_retry_timeout_seconds": 5.0,
    "retry_initial_delay_seconds": 0.02,
    "retry_max_delay_seconds": 0.1,
}


@dataclass
class Run:
    """A training or sampling run and the token that opens it."""

    http: httpx.Client
    cuid: str
    session: str
    model_id: str
    token: str

    @property
    def authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def envelope(
        self,
        kind: EventType,
        payload: ProtocolPayload,
        index: int,
        event_id: str | None = None,
    ) -> EventEnvelope:
        """The event as the SDK's coordinator would build it."""
        metadata = EventMetadata(
            index=index,
            step=0,
            timestamp=current_timestamp_ms(),
            sdk="pytrio",
            sdk_version=configuration.version,
            run_id=self.cuid,
        )
        value = payload_to_wire_value(kind, payload)
        return build_event_envelope(kind, value, metadata, event_id=event_id)

    def submit(self, envelope: EventEnvelope) -> httpx.Response:
        return self.http.post(
            "/v1/events",
            content=pack_event_envelope(envelope),
            headers={
                **self.authorization,
                "Content-Type": "application/msgpack",
                "Accept": "application/msgpack",
            },
        )

    def poll(self, event_id: str, wait: float = 35) -> httpx.Response:
        """One long poll; the server answers five seconds before `wait`."""
        return self.http.get(
            f"/v1/events/{event_id}",
            headers={
                **self.authorization,
                "Accept": "application/msgpack",
                "Prefer": f"wait={wait:g}",
            },
        )

    def result(self, envelope: EventEnvelope) -> EventResponse:
        """The event's final state; a first event may wait long for torch on a busy machine."""
        for _ in range(POLLS):
            response = self.poll(envelope.event_id)
            assert response.status_code == 200, response.text
            state = unpack_event_response(response.content)
            if state.status in (EventStatus.SUCCEEDED, EventStatus.FAILED):
                return state
        raise AssertionError(f"no result of {envelope.type} after {POLLS} polls: {state.status}")

    def execute(self, kind: EventType, payload: ProtocolPayload, index: int) -> EventResponse:
        """Submit one event and wait for its final state."""
        envelope = self.envelope(kind, payload, index)
        response = self.submit(envelope)
        assert response.status_code == 200, response.text
        return self.result(envelope)

    def init(self, **changes: object) -> TrainerInitRunPayload:
        """The init event of this run; `changes` replace parts of its LoRA configuration."""
        lora = LoraRunSpec(model_id=self.model_id, source=FreshLoraSource(), **{**LORA, **changes})
        return build_trainer_init_payload(lora, source=FreshLoraSource())

    def sample(self, **changes: object) -> httpx.Response:
        return self.http.post(
            f"/v1/sampling-runs/{self.cuid}/sample",
            json=sample_body(**changes),
            headers={**self.authorization, "Accept": "application/json"},
        )


@dataclass
class Wire:
    """One connection to a backend, with an API key."""

    http: httpx.Client
    key: str

    def __init__(self, url: str, key: str = "test-key") -> None:
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self.key = key

    def control(self, method: str, path: str, **request: Any) -> httpx.Response:
        """One control request; `path` begins after `/api/openapi/v1`."""
        return self.http.request(method, V1 + path, headers={"X-API-Key": self.key}, **request)

    def session(self) -> str:
        response = self.control(
            "POST", "/service-sessions", json={"sdk_version": configuration.version}
        )
        assert response.status_code == 200, response.text
        return response.json()["service_session_cuid"]

    def training_run(self, session: str | None = None, **changes: object) -> Run:
        """A fresh training run; `changes` replace parts of its LoRA configuration."""
        lora: dict[str, Any] = {**LORA, **changes}
        body = {"base_model": BASE_MODEL, "lora_rank": lora.pop("rank"), **lora}
        return self._run("training", session or self.session(), body)

    def sampling_run(self, session: str | None = None, checkpoint_uri: str = "") -> Run:
        body = {"base_model": BASE_MODEL, "source_checkpoint_uri": checkpoint_uri}
        return self._run("sampling", session or self.session(), body)

    def _run(self, kind: str, session: str, body: dict[str, Any]) -> Run:
        response = self.control("POST", f"/service-sessions/{session}/{kind}-runs", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        return Run(
            self.http,
            answer[f"{kind}_run_cuid"],
            session,
            answer["model_id"],
            answer["actor_jwt"]["token"],
        )


def forward_payload(
    sequences: list[list[int]], loss: str | dict[str, Any] = "cross_entropy", **changes: object
) -> TrainerForwardBackwardPayload:
    """A forward event on each sequence's own next tokens; `loss` is a name, or name and config."""
    data = [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
            "target_ids": tokens[1:],
            "weights": [1.0] * (len(tokens) - 1),
        }
        for tokens in sequences
    ]
    active = sum(len(tokens) - 1 for tokens in sequences)
    payload = {
        "data": data,
        "loss": {"type": loss} if isinstance(loss, str) else loss,
        "gradient_accumulation": {
            "total_samples": len(sequences),
            "total_active_tokens": active,
            "total_advantage_tokens": 0,
        },
        **changes,
    }
    return TrainerForwardBackwardPayload.model_validate(payload)


def optimize_payload(**changes: float) -> TrainerOptimizeStepPayload:
    """An AdamW step with the SDK's defaults and a visible learning rate."""
    params = {
        "learning_rate": 1e-2,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
        **changes,
    }
    return TrainerOptimizeStepPayload.model_validate({"adam_params": params})


def save_payload(name: str) -> TrainerSavePayload:
    return TrainerSavePayload(name=name)


def sample_body(**changes: object) -> dict[str, Any]:
    """A sampling request as the SDK sends it."""
    return {
        "request_id": "req_test",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [10, 11, 12]}]},
        "sampling_params": {"max_tokens": 4, "seed": 1},
        "num_samples": 1,
        **changes,
    }


def actor_error(response: httpx.Response) -> dict[str, str]:
    """Code and message of an actor refusal, whichever encoding it has."""
    if "msgpack" in response.headers["content-type"]:
        return msgpack.unpackb(response.content)["error"]
    return response.json()["error"]


def read_trace(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """All whole records of a recording, and whether it ends with its `end` record."""
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(path.read_bytes())
    records = list(unpacker)
    return records, bool(records) and records[-1]["kind"] == "end"


def ids_of(packed: bytes) -> list[int]:
    """Token ids of a recording."""
    return np.frombuffer(packed, dtype="<i4").tolist()


def floats_of(packed: bytes) -> list[float]:
    """Numbers of a recording."""
    return np.frombuffer(packed, dtype="<f4").tolist()
