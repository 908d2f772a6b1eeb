"""Made-up recordings, written as the server writes them: what a loop sent and what it was served.

A `Story` is told in the order in which a loop does things. Its defaults are those of a correct
loop, so a test changes one thing. Tokens and numbers are arbitrary but fixed; times are on the
story's own clock.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from conftest import SKILL
from trio_local.recording import Recorder, packed_floats, packed_ids

STANDIN = SKILL / "scripts" / "trio_local" / "weights" / "standin"
LARGE = STANDIN.parent / "large"
BASE_MODEL, LARGE_MODEL = "Qwen/Qwen3.5-4B", "Qwen/Qwen3.6-27B"
SAMPLE_SECONDS, CALL_SECONDS, STEP_SECONDS, SUBMIT_SECONDS = 0.4, 1.0, 0.05, 0.002
PARAMS: dict[str, Any] = {
    "max_tokens": 64,
    "temperature": 1.0,
    "top_k": -1,
    "top_p": 1,
    "stop": ["<|im_end|>"],
}
SCORING = {"max_tokens": 1, "temperature": 1, "top_k": -1, "top_p": 1}
ADAM = {
    "learning_rate": 2e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
IGNORED = -100
# Arbitrary text is made of these ids: no special tokens, no white space alone.
FIRST_WORD, LAST_WORD = 300, 1900

Ids = list[int]
Numbers = list[float]


# -- text ------------------------------------------------------------------------------------------


@cache
def tokenizer() -> Tokenizer:
    """The stand-in's own tokenizer."""
    return Tokenizer.from_file(str(STANDIN / "tokenizer.json"))


def encode(text: str) -> Ids:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def decode(ids: Sequence[int]) -> str:
    return tokenizer().decode(list(ids), skip_special_tokens=False)


END = encode("<|im_end|>")[0]
NEWLINE = encode("\n")[0]
PLAIN_OPENING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
THINKING_OPENING = "<|im_start|>assistant\n<think>\n"
CHAT: dict[str, Any] = {
    "generation_prompts": [encode(THINKING_OPENING), encode(PLAIN_OPENING)],
    "opening": encode("<|im_start|>assistant\n"),
    "closing": encode("<|im_end|>\n"),
    "end_ids": sorted({*encode("<|endoftext|>"), END}),
}
# Of the template whose thinking prompt is the bare opening.
QWEN3_CHAT = CHAT | {
    "generation_prompts": [encode("<|im_start|>assistant\n"), encode(PLAIN_OPENING)]
}


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def prompt_of(question: str, opening: str = PLAIN_OPENING) -> Ids:
    """One user turn and the opening of the answer, as the chat template writes them."""
    return encode(turn("user", question)) + encode(opening)


# -- data ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Completion:
    """What was sampled after a prompt."""

    prompt: Ids
    tokens: Ids
    logprobs: Numbers

    @property
    def whole(self) -> Ids:
        return self.prompt + self.tokens


@dataclass(frozen=True)
class Row:
    """One training sample; all lists have one length. `served` is what the trainer computes for
    the targets, by default the very `logprobs`, as on fresh data."""

    inputs: Ids
    targets: Ids
    weights: Numbers | None = None
    logprobs: Numbers | None = None
    advantages: Numbers | None = None
    served: Numbers | None = None

    @property
    def whole(self) -> Ids:
        return [*self.inputs, self.targets[-1]]

    @property
    def signal(self) -> Numbers:
        if self.advantages is not None:
            return self.advantages
        return [1.0] * len(self.targets) if self.weights is None else self.weights

    def with_at(self, name: str, position: int, *values: Any) -> "Row":
        """The same row with other entries in one list, from a position on."""
        changed = list(getattr(self, name))
        place = position % len(changed)
        changed[place : place + len(values)] = values
        assert len(changed) == len(self.targets)
        return replace(self, **{name: changed})


def trajectory_row(turns: Sequence[Completion], advantage: float | Sequence[float]) -> Row:
    """Turns of which each goes on from the one before, as one datum of a policy loss. The
    advantage is one number, or one for each sampled token."""
    tokens = turns[-1].whole
    logprobs, advantages = [0.0] * len(tokens), [0.0] * len(tokens)
    count = sum(len(turn.tokens) for turn in turns)
    given = [advantage] * count if isinstance(advantage, float | int) else list(advantage)
    assert len(given) == count, (len(given), count)
    for turn in turns:
        begin, stop = len(turn.prompt), len(turn.whole)
        logprobs[begin:stop] = turn.logprobs
        advantages[begin:stop], given = given[: stop - begin], given[stop - begin :]
    return Row(tokens[:-1], tokens[1:], logprobs=logprobs[1:], advantages=advantages[1:])


def policy_row(completion: Completion, advantage: float | Sequence[float]) -> Row:
    """A single sampled completion as a datum of a policy loss."""
    return trajectory_row([completion], advantage)


def supervised_row(prompt: Ids, answer: Ids, weight: float = 1.0) -> Row:
    """A given answer after its prompt as a datum of cross-entropy."""
    tokens = prompt + answer
    return Row(
        inputs=tokens[:-1],
        targets=tokens[1:],
        weights=[0.0] * (len(prompt) - 1) + [weight] * len(answer),
    )


def packed_row(row: Row) -> dict[str, Any]:
    """A datum as the server packs it."""
    served = row.served or row.logprobs or [-1.0] * len(row.targets)
    packed: dict[str, Any] = {
        "input": [packed_ids(row.inputs)],
        "target_ids": packed_ids(row.targets),
        "served_logprobs": packed_floats(served),
    }
    for name in ("weights", "logprobs", "advantages"):
        if getattr(row, name) is not None:
            packed[name] = packed_floats(getattr(row, name))
    return packed


def totals_of(rows: Sequence[Row], loss: str, auto_shift: bool = False) -> dict[str, int]:
    """The totals of a whole call that the SDK sends with each of its events."""
    first = 1 if auto_shift else 0
    active = advantage = 0
    for row in rows:
        signal = np.array(row.signal[first:])
        counted = np.array(row.targets[first:]) != IGNORED
        with_signal = int((counted & (signal != 0)).sum())
        active += with_signal if loss == "cross_entropy" else int(counted.sum())
        advantage += 0 if loss == "cross_entropy" else with_signal
    return {
        "total_samples": len(rows),
        "total_active_tokens": active,
        "total_advantage_tokens": advantage,
    }


def mark_of(row: Row) -> int:
    """The hash of a sample's prompt that the server keeps in a saved state."""
    signal = row.weights if row.advantages is None else row.advantages
    first = next((i for i, value in enumerate(signal or ()) if value), 0)
    return zlib.crc32(packed_ids(row.inputs[: first + 1] if first else row.inputs))


# -- the story -------------------------------------------------------------------------------------


@dataclass
class RunState:
    """What the server knows of a training run."""

    events: int = 0
    steps: int = 0
    submitted: float = 0.0  # when the last call was
    finished: float = 0.0  # when the last event will be


@dataclass(frozen=True)
class SamplerState:
    id: str
    snapshot: str
    folder: str


class Story:
    """Records of one run of a script. `now` is the loop's clock in seconds: submitting takes next
    to nothing, and what needs a result waits for it."""

    def __init__(self, folder: Path, **header: Any) -> None:
        self.folder = folder
        self.rng = np.random.default_rng(0)
        self.now = 1.0
        self.runs: dict[str, RunState] = {}
        self.samplers = 0
        self.saves = 0
        self.requests = 0
        self.models: set[str] = set()
        self.chat = CHAT
        self.records: list[tuple[float, str, dict[str, Any]]] = []
        self.sampled = 0.0  # when the last request submitted so far will be answered
        self.is_complete = True
        self.dropped_records = 0
        settings = {"sdk_version": "0.2.9", "reduction": "default", "seed": 0, "faults": {}}
        self.header = settings | header
        self.sessions = 0
        self.begin_session()

    def write(self, kind: str, time: float | None = None, **fields: Any) -> None:
        """Any record, by default one of this moment."""
        self.records.append((self.now if time is None else time, kind, fields))

    @property
    def session(self) -> str:
        return f"sess{self.sessions}"

    def begin_session(self) -> None:
        """What a ServiceClient does; runs and sampling clients are of the latest one."""
        self.sessions += 1
        self.write("session", session=self.session, sdk_version="0.2.9")

    def end_session(self) -> None:
        self.wait()
        self.write("session_closed", session=self.session, status="ENDED")

    def wait(self, seconds: float = 0.0) -> None:
        """Wait for all that was submitted, and some time more."""
        self.now = max([self.now, self.sampled, *(r.finished for r in self.runs.values())])
        self.now += seconds

    def close(self) -> Path:
        """Write the recording in the order of time and return its file."""
        self.end_session()
        recorder = Recorder(self.folder, self.header)
        for time, kind, fields in sorted(self.records, key=lambda record: record[0]):
            recorder.write(kind, time=round(time, 6), **fields)
        recorder.dropped_records = self.dropped_records
        if self.is_complete:
            recorder.close()
        else:
            recorder._file.close()
        return self.folder / "trace.msgpack"

    # -- arbitrary text -----------------------------------------------------------------------

    def words(self, count: int) -> Ids:
        return self.rng.integers(FIRST_WORD, LAST_WORD, count).tolist()

    def question(self, count: int = 6) -> Ids:
        """The prompt of a fresh question."""
        opened = encode("<|im_start|>user\n") + self.words(count)
        return opened + encode("<|im_end|>\n") + encode(PLAIN_OPENING)

    def answer(self, count: int | None = None) -> Ids:
        """A fresh answer, which ends as the template says."""
        return self.words(int(self.rng.integers(4, 10)) if count is None else count) + [END]

    def logprobs(self, count: int) -> Numbers:
        """Log-probabilities of `count` sampled tokens, as the 32-bit numbers they are."""
        return (-self.rng.uniform(0.05, 3.0, count)).astype(np.float32).tolist()

    # -- runs and samplers --------------------------------------------------------------------

    def model(self, folder: str) -> None:
        if folder not in self.models:
            self.models.add(folder)
            self.write("model", folder=folder, **self.chat)

    def training_run(
        self, base_model: str = BASE_MODEL, source: str = "", folder: Path = STANDIN, **more: Any
    ) -> str:
        """A new training run; `more` overrides fields of its record."""
        run = f"train{len(self.runs) + 1}"
        lora = {"rank": 16, "seed": 0, "train_mlp": True, "train_attn": True, "train_unembed": True}
        fields: dict[str, Any] = {
            "run": run,
            "session": self.session,
            "base_model": base_model,
            "served_by": "standin",
            "folder": str(folder),
            "lora": lora,
            "source": source,
            "restore_optimizer": False,
        }
        self.runs[run] = RunState(finished=self.now)
        self.write("training_run", **fields | more)
        self.model(str(folder))
        payload = {"base_model": str(folder), "lora_config": lora, "load_optimizer": False}
        self.event(run, "init_run", 0.1, payload=payload, result={})
        self.wait()
        return run

    def resume(
        self,
        uri: str,
        step: int,
        history: Sequence[Sequence[Row]] = (),
        with_optimizer: bool = True,
        type: str = "TRAINING",
    ) -> str:
        """A training run that goes on from a checkpoint; `history` has the data of each step."""
        run = self.training_run(source=uri, restore_optimizer=with_optimizer)
        self.write(
            "resume",
            run=run,
            uri=uri,
            type=type,
            step=step,
            with_optimizer=with_optimizer,
            history=[sorted({mark_of(row) for row in rows}) for rows in history],
        )
        self.runs[run].steps = step if with_optimizer else 0
        return run

    def sampler(
        self, run: str | None = None, base_model: str = BASE_MODEL, folder: Path = STANDIN
    ) -> SamplerState:
        """A sampling client with a run's present weights, or with a base model's."""
        if run is None:
            return self._sampling_run(base_model, f"base:{folder}", "", 0, folder=folder)
        name = f"temp-sampling-{self.saves + 1}"
        uri = self.save(run, name, visibility="TEMPORARY", ttl_seconds=21600)
        return self.sampler_of(uri, run, self.runs[run].steps)

    def sampler_of(self, uri: str, run: str, step: int) -> SamplerState:
        """A sampling client with the weights saved at an address."""
        return self._sampling_run(BASE_MODEL, f"ckpt-{uri}", run, step, uri)

    def _sampling_run(
        self,
        base_model: str,
        snapshot: str,
        run: str,
        step: int,
        uri: str = "",
        folder: Path = STANDIN,
    ) -> SamplerState:
        self.samplers += 1
        sampler = SamplerState(f"samp{self.samplers}", snapshot, str(folder))
        self.write(
            "sampling_run",
            run=sampler.id,
            session=self.session,
            base_model=base_model,
            served_by="standin",
            checkpoint=uri,
            folder=str(folder),
            snapshot=snapshot,
            training_run=run,
            step=step,
        )
        return sampler

    # -- sampling -----------------------------------------------------------------------------

    def sample(
        self,
        sampler: SamplerState,
        prompt: Ids,
        completions: int | Sequence[Ids] = 8,
        params: dict[str, Any] | None = None,
        logprobs: Sequence[Numbers] | None = None,
        stop_reasons: Sequence[str] | None = None,
        seconds: float = SAMPLE_SECONDS,
        **more: Any,
    ) -> list[Completion]:
        """One request; its completions are given, or fresh ones are made up.

        The loop does not wait for the answer; training on it does.
        """
        if isinstance(completions, int):
            completions = [self.answer() for _ in range(completions)]
        served = logprobs or [self.logprobs(len(tokens)) for tokens in completions]
        assert [len(t) for t in completions] == [len(lp) for lp in served]
        ends = [t[-1] in self.chat["end_ids"] if t else False for t in completions]
        stops = stop_reasons or ["stop" if ended else "length" for ended in ends]
        self.requests += 1
        self.model(sampler.folder)
        fields: dict[str, Any] = {
            "run": sampler.id,
            "snapshot": sampler.snapshot,
            "request": f"req{self.requests}",
            "prompt": [packed_ids(prompt)],
            "params": PARAMS | (params or {}),
            "num_samples": len(completions),
            "seconds": seconds,
            "sequences": [
                {"tokens": packed_ids(t), "logprobs": packed_floats(lp), "stop_reason": stop}
                for t, lp, stop in zip(completions, served, stops, strict=True)
            ],
        }
        self.now += SUBMIT_SECONDS
        self.write("sample", time=self.now + seconds, **fields | more)
        self.sampled = max(self.sampled, self.now + seconds)
        pairs = zip(completions, served, strict=True)
        return [Completion(list(prompt), list(tokens), list(values)) for tokens, values in pairs]

    def score(
        self, sampler: SamplerState, ids: Ids, logprobs: Numbers | None = None, **more: Any
    ) -> Numbers:
        """What compute_logprobs sends; returns the values of `ids[1:]`, which can be given."""
        values = self.logprobs(len(ids) - 1) if logprobs is None else logprobs
        assert len(values) == len(ids) - 1, (len(values), len(ids))
        self.sample(
            sampler, ids, [[END]], params=SCORING, prompt_logprobs=packed_floats(values), **more
        )
        self.records[-1][2]["params"].pop("stop")
        return values

    # -- training -----------------------------------------------------------------------------

    def event(self, run: str, type: str, seconds: float, **fields: Any) -> None:
        """One event of a run, submitted now and executed after those before it."""
        state = self.runs[run]
        state.events += 1
        state.submitted = self.now
        finished = max(self.now, state.finished) + seconds
        state.finished = finished
        settings: dict[str, Any] = {
            "run": run,
            "event": f"event_{run}_{state.events}",
            "type": f"trainer.{type}",
            "index": state.events,
            "step": state.steps,
            "optimizer_steps": state.steps,
            "seconds": round(finished - self.now, 6),
            "status": "succeeded",
        }
        self.write("event", time=finished, **settings | fields)

    def forward_backward(
        self,
        run: str,
        rows: Sequence[Row],
        loss: str = "importance_sampling",
        seconds: float = CALL_SECONDS,
        events: int = 1,
        auto_shift: bool = False,
        backward: bool = True,
        config: dict[str, Any] | None = None,
    ) -> None:
        """One call, in as many events as the SDK would split it into; submitted when everything
        that was asked of samplers has come."""
        self.now = max(self.now, self.sampled) + SUBMIT_SECONDS
        totals = totals_of(rows, loss, auto_shift)
        size = -(-len(rows) // events)
        for begin in range(0, len(rows), size):
            part = rows[begin : begin + size]
            loss_sum = -float(sum(sum(row.signal) for row in part))
            count = totals["total_active_tokens"]
            self.event(
                run,
                "forward_backward" if backward else "forward",
                seconds * len(part) / len(rows),
                data=[packed_row(row) for row in part],
                loss={"type": loss, "config": config or {}},
                auto_shift=auto_shift,
                totals=totals,
                metrics={
                    "loss_sum": loss_sum,
                    "loss_mean": loss_sum / max(1, count),
                    "token_count": count,
                },
            )

    def supervise(self, run: str, rows: Sequence[Row], **settings: Any) -> None:
        self.forward_backward(run, rows, "cross_entropy", **settings)

    def custom(self, run: str, rows: Sequence[Row], weights: Sequence[Numbers]) -> None:
        """forward_backward_custom: a forward pass, the loss here, then minus its gradient for each
        target as a weight."""
        plain = [replace(row, weights=[1.0] * len(row.targets)) for row in rows]
        self.supervise(run, plain, backward=False, seconds=CALL_SECONDS / 2)
        self.wait()
        weighted = [replace(r, weights=list(w)) for r, w in zip(rows, weights, strict=True)]
        self.supervise(run, weighted)

    def step(self, run: str, grad_norm: float = 0.3, **adam: float) -> None:
        """optim_step, submitted together with the call before it."""
        state = self.runs[run]
        state.steps += 1
        self.now += SUBMIT_SECONDS
        params = ADAM | adam
        metrics = {"grad_norm": grad_norm, "learning_rate": params["learning_rate"]}
        self.event(
            run,
            "optimize_step",
            STEP_SECONDS,
            payload={"adam_params": params},
            result={"metrics": metrics},
        )
        self.write("optimizer_step", time=state.finished, run=run, step=state.steps)

    def failed(self, run: str, type: str = "forward_backward", message: str = "no memory") -> None:
        """An event that the server could not execute."""
        error = {"code": "trainer_failed", "message": message}
        self.event(run, type, 0.1, status="failed", error=error)

    def save(
        self,
        run: str,
        name: str,
        state: bool = False,
        ttl_seconds: int | None = None,
        visibility: str = "WORKSPACE",
    ) -> str:
        """save_weights_for_sampler or save_state; the loop waits for the address."""
        self.saves += 1
        uri = f"trio://{run}/{'state' if state else 'sampler'}/{name}"
        payload = {
            "name": name,
            "ttl_seconds": ttl_seconds,
            "overwrite": False,
            "visibility": visibility,
        }
        checkpoint = {
            "uri": uri,
            "checkpoint_cuid": f"ckpt-{uri}",
            "model_id": str(STANDIN),
            "size_bytes": 770438,
        }
        type = "save_state" if state else "save_weights"
        self.event(run, type, STEP_SECONDS, payload=payload, result={"checkpoint": checkpoint})
        self.wait()
        self.write("checkpoint", run=run, uri=uri, visibility=visibility, ttl_seconds=ttl_seconds)
        return uri

    def refused(self, status: int = 422, code: str = "invalid_request", message: str = "") -> None:
        """A request that the server answered with an error."""
        self.write(
            "refused",
            method="POST",
            path="/v1/events",
            status=status,
            code=code,
            message=message or "the request is not as it should be",
        )
