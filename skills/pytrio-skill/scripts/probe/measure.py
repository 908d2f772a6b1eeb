"""Calls of the real SDK, each counted before it is sent, and gradients read off optimiser steps.

With beta1 = 0 and an `eps` far above every gradient, AdamW moves a weight by -rate * gradient
whatever beta2 is: the change of a log-probability is then linear in the gradient, and two variants
of a call can be compared by it. Each step is followed by its reverse, so the weights stay where
they were.
"""

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytrio as trio

Vector = np.ndarray[Any, np.dtype[np.float64]]
IGNORED = -100
RANK = 4
TTL_SECONDS = 900
EPS = 1e3
# A step is searched for that moves a log-probability by this many nats: well above the noise and
# small enough to be linear.
SMALLEST_SWING, LARGEST_SWING, SWING_OVER_NOISE = 0.02, 0.4, 25.0
FIRST_RATE = 1e-7
CALIBRATIONS = 12
# The trainer's answers are never trusted beyond this.
LEAST_NOISE = 1e-5
WITHOUT_OLD = ("cross_entropy", "custom")  # losses that read no old log-probabilities

TEXT = """The old ferry left the harbour at seven in the morning with twelve passengers, four
bicycles and a basket of apples. Its captain had crossed this water for thirty years and knew every
stone below it. On the other side a market opened on Fridays: farmers sold cheese, honey, wool and
green pears, a tailor mended coats, and somebody always played the violin near the bridge. A girl
called Nora counted the boats while her brother asked why rivers never stop. Nobody had a good
answer, so they bought two rolls, shared them with a grey dog, and walked up the hill to see the
snow on the far mountains before the bell rang at noon and the ferry went home again."""


class OutOfBudget(Exception):
    """The next call would exceed the tokens that are left to the whole probe."""


class OutOfBound(Exception):
    """The next call would exceed what one question may send."""


@dataclass
class Meter:
    """Tokens sent so far by the class they are billed in; `limit` holds for their sum."""

    limit: int
    spent: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "sample": 0, "train": 0})
    # What the question at hand may still use.
    allowance: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.spent.values())

    def take(self, kind: str, tokens: int) -> None:
        """Count tokens that are about to be sent. Raises OutOfBudget or OutOfBound instead."""
        if self.total + tokens > self.limit:
            raise OutOfBudget(
                f"{self.total} of {self.limit} tokens are spent, the next call needs {tokens}"
            )
        left = self.allowance.get(kind)
        if left is not None:
            if tokens > left:
                raise OutOfBound(f"the question has {left} {kind} tokens left, not {tokens}")
            self.allowance[kind] = left - tokens
        self.spent[kind] += tokens


@dataclass(frozen=True)
class Row:
    """One sample; `signal` is its weights or advantages, every list has the length of `tokens`."""

    tokens: list[int]
    targets: list[int]
    signal: list[float]

    def times(self, factor: float) -> "Row":
        return replace(self, signal=[factor * value for value in self.signal])

    def datum(self, loss: str, old: Sequence[float] | None = None) -> trio.Datum:
        inputs: dict[str, Any] = {"target_tokens": self.targets}
        if loss in ("cross_entropy", "custom"):
            inputs["weights"] = self.signal
        else:
            inputs |= {"advantages": self.signal, "logprobs": list(old or [0.0] * len(self.tokens))}
        return trio.Datum(model_input=trio.ModelInput.from_ints(self.tokens), loss_fn_inputs=inputs)


def with_ratio(logprobs: Vector, ratio: float) -> list[float]:
    """Old log-probabilities that make every token's ratio to `logprobs` the given one."""
    return [float(value) - math.log(ratio) for value in logprobs]


class Lab:
    """One service, one model, one training run at a time."""

    def __init__(self, service: Any, model: str, meter: Meter) -> None:
        self.service = service
        self.model = model
        self.meter = meter
        self.notes: dict[str, Any] = {}  # answers that later questions build on
        self.kept: dict[str, Any] = {}  # clients that several questions use
        # Called with a run whose checkpoints must be deleted, and with None when they are.
        self.leave_behind: Callable[[str | None], None] = lambda run: None
        self._training: Any = None
        self._steps = 0
        self._noise: float | None = None
        self._rates: dict[str, float] = {}
        self._text: list[int] = []

    # -- runs and tokens ---------------------------------------------------------------------

    @property
    def training(self) -> Any:
        if self._training is None:
            self._training = self.service.create_lora_training_client(self.model, rank=RANK, seed=1)
            self._steps = 0
        return self._training

    def untrained(self) -> Any:
        """The training client, a new one if this one has been trained."""
        if self._steps:
            self.renew()
        return self.training

    def renew(self) -> None:
        """Forget the training run: after a failed call, or for a fresh adapter."""
        self._training = None

    def adopt(self, training: Any) -> None:
        """Go on with a client made elsewhere."""
        self._training, self._steps = training, 1

    def forget(self) -> None:
        """Forget all clients and rates: after a question that failed for whatever reason."""
        self.renew()
        self.kept.clear()
        self._rates.clear()

    def unique(self) -> str:
        """Part of a checkpoint's name that no other has."""
        return uuid.uuid4().hex[:8]

    def renew_if_broken(self) -> None:
        """After a refused call: the run may have ended with it, and a new one is dear."""
        try:
            self.logprobs([probe_row(self)])
        except trio.PyTrioError:
            self.renew()

    @property
    def tokenizer(self) -> Any:
        return self.training.get_tokenizer()

    def text(self) -> list[int]:
        """Ids of ordinary text: a hundred or more with any tokenizer."""
        if not self._text:
            words = " ".join(TEXT.split())
            self._text = self.tokenizer.encode(words, add_special_tokens=False)
        return self._text

    def words(self, start: int, count: int) -> list[int]:
        """Some of the text."""
        chosen = self.text()[start : start + count]
        assert len(chosen) == count, (start, count, len(self._text))
        return chosen

    def mixed_words(self, seed: int, count: int) -> list[int]:
        """Ids of words in no sensible order: what follows them is uncertain."""
        generator = np.random.default_rng(seed)
        return [int(token) for token in generator.choice(self.text(), count)]

    # -- training calls ----------------------------------------------------------------------

    def forward(self, loss: str, rows: Sequence[Row], old: Any = None, config: Any = None) -> Any:
        """Future of a forward pass; `old` [rows] are log-probabilities per position."""
        self.meter.take("prefill", positions(rows))
        return self.training.forward(data_of(loss, rows, old), named(loss), config)

    def backward(self, loss: str, rows: Sequence[Row], old: Any = None) -> Any:
        """Future of forward and backward by a built-in loss or, for `custom`, by the same cross
        entropy computed here."""
        if loss != "custom":
            self.meter.take("train", positions(rows))
            return self.training.forward_backward(data_of(loss, rows, old), loss)
        self.meter.take("train", 2 * positions(rows))
        return self.training.forward_backward_custom(data_of(loss, rows, old), weighted(rows))

    def step(self, rate: float, beta1: float = 0.0) -> Any:
        """Future of an optimiser step that adds -rate * gradient to the weights."""
        self._steps += 1
        return self.training.optim_step(
            trio.AdamParams(learning_rate=EPS * rate, beta1=beta1, eps=EPS, weight_decay=0.0)
        )

    def logprobs(self, rows: Sequence[Row]) -> list[Vector]:
        """The trainer's log-probabilities of the targets, by row."""
        return logprobs_of(self.forward("cross_entropy", rows))

    def loss_sum(
        self, loss: str, rows: Sequence[Row], old: Any = None, config: Any = None
    ) -> float:
        return float(self.forward(loss, rows, old, config).result().metrics["loss_sum"])

    # -- gradients by their effect -----------------------------------------------------------

    @property
    def noise(self) -> float:
        """Standard deviation of the trainer's answers about the same weights, in nats."""
        if self._noise is None:
            first = probe_row(self)
            batches = [[first], [first], [first, spare_row(self, 6)], [first]]
            seen = np.stack([answer_of(self.logprobs(rows)[0]) for rows in batches])
            self._noise = max(LEAST_NOISE, float(np.sqrt(seen.var(axis=0, ddof=1).mean())))
        return self._noise

    @property
    def swing_wanted(self) -> float:
        return min(LARGEST_SWING, max(SMALLEST_SWING, SWING_OVER_NOISE * self.noise))

    def swing(self, loss: str, rows: Sequence[Row], rate: float, calls: int = 1) -> Vector:
        """Change of the answer's log-probabilities in `rows[0]` by one step on all rows (given in
        so many equal calls), from the step and its reverse."""
        opposite = [row.times(-1.0) for row in rows]
        if loss in WITHOUT_OLD:
            # The passes themselves return what is wanted, so nothing has to be waited for.
            there = [self.backward(loss, rows) for _ in range(calls)]
            steps = [self.step(rate)]
            back = [self.backward(loss, opposite) for _ in range(calls)]
            steps.append(self.step(rate))
            states = [logprobs_of(future) for future in (there[0], back[0])]
            states.append(self.logprobs(rows[:1]))
            for future in steps:
                future.result()
        else:
            states = [self.logprobs(rows)]
            states.append(self.moved(loss, rows, rate, rows, states[0], calls))
            states.append(self.moved(loss, opposite, rate, rows[:1], states[1], calls))
        start, up, down = (answer_of(state[0]) for state in states)
        return up - (start + down) / 2

    def moved(
        self,
        loss: str,
        rows: Sequence[Row],
        rate: float,
        scored: Sequence[Row],
        old: Any,
        calls: int = 1,
    ) -> list[Vector]:
        """The log-probabilities of `scored` after one step on `rows`."""
        waiting = [self.backward(loss, rows, old) for _ in range(calls)]
        waiting.append(self.step(rate))
        seen = self.forward("cross_entropy", scored)
        for future in waiting:
            future.result()
        return logprobs_of(seen)

    def rate(self, loss: str) -> float:
        """A step size at which the probe's own row moves by about `swing_wanted`."""
        if loss in self._rates:
            return self._rates[loss]
        rate = min(self._rates.values(), default=FIRST_RATE)
        wanted = self.swing_wanted
        for _ in range(CALIBRATIONS):
            size = rms(self.swing(loss, [probe_row(self)], rate))
            if 0.75 < size / wanted < 1.35:
                self._rates[loss] = rate
                return rate
            if size > 10 * wanted:
                self.renew()  # too far to come back
            is_seen = size > 5 * self.noise and size > wanted / 300
            rate *= min(100.0, max(1e-3, wanted / size)) if is_seen else 10.0
        raise ValueError(f"no step of {loss} moves a log-probability by {wanted:.2g}")

    # -- sampling ----------------------------------------------------------------------------

    def base_sampler(self) -> Any:
        return self.service.create_sampling_client(self.model)

    def sampler(self, name: str) -> Any:
        """A sampler of the training run's weights as they are."""
        saved = self.training.save_weights_for_sampler(
            f"{name}-{self.unique()}", ttl_seconds=TTL_SECONDS
        ).result()
        return self.training.create_sampling_client(saved.path)

    def sample(self, sampler: Any, prompt: Sequence[int], count: int = 1, **params: Any) -> Any:
        """The answer to one request; `params` are those of SamplingParams."""
        self.meter.take("prefill", len(prompt) * count)
        self.meter.take("sample", params["max_tokens"] * count)
        return sampler.sample(
            trio.ModelInput.from_ints(list(prompt)),
            num_samples=count,
            sampling_params=trio.SamplingParams(**params),
        ).result()

    def served_logprobs(self, sampler: Any, tokens: Sequence[int]) -> list[float | None]:
        """Prompt log-probabilities as they are served."""
        self.meter.take("prefill", len(tokens))
        self.meter.take("sample", 1)
        return sampler.compute_logprobs(trio.ModelInput.from_ints(list(tokens))).result()

    def score(self, sampler: Any, tokens: Sequence[int]) -> Vector:
        """The sampler's log-probabilities of `tokens[1:]`."""
        served = self.served_logprobs(sampler, tokens)[-(len(tokens) - 1) :]
        return np.array([math.nan if value is None else value for value in served])

    def trainer_score(self, tokens: Sequence[int]) -> Vector:
        """The trainer's log-probabilities of `tokens[1:]`."""
        row = Row(list(tokens[:-1]), list(tokens[1:]), [1.0] * (len(tokens) - 1))
        return self.logprobs([row])[0]


# -- rows ----------------------------------------------------------------------------------------

PROMPT, ANSWER = 6, 4


def probe_row(lab: Lab) -> Row:
    """The row whose answer is watched: six prompt positions without a target, four with."""
    tokens = lab.words(0, PROMPT + ANSWER + 1)
    targets = [IGNORED] * PROMPT + tokens[PROMPT + 1 :]
    return Row(tokens[:-1], targets, [0.0] * PROMPT + [1.0] * ANSWER)


def spare_row(lab: Lab, length: int, has_targets: bool = True) -> Row:
    """A row of other text, without signal."""
    tokens = lab.words(20, length + 1)
    targets = tokens[1:] if has_targets else [IGNORED] * length
    return Row(tokens[:-1], targets, [0.0] * length)


def answer_of(logprobs: Vector) -> Vector:
    return logprobs[PROMPT : PROMPT + ANSWER]


def positions(rows: Sequence[Row]) -> int:
    return sum(len(row.tokens) for row in rows)


def named(loss: str) -> str:
    return "cross_entropy" if loss == "custom" else loss


def data_of(loss: str, rows: Sequence[Row], old: Any) -> list[trio.Datum]:
    known = old if old is not None else [None] * len(rows)
    return [
        row.datum(loss, None if values is None else [float(value) for value in values])
        for row, values in zip(rows, known, strict=True)
    ]


def weighted(rows: Sequence[Row]) -> Callable[[Any, Any], tuple[Any, dict[str, float]]]:
    """Cross entropy with the rows' weights as a loss of one's own."""

    def loss(data: Any, logprobs: Any) -> tuple[Any, dict[str, float]]:
        parts = [
            -(lp * lp.new_tensor(row.signal)).sum() for row, lp in zip(rows, logprobs, strict=True)
        ]
        return sum(parts), {}

    return loss


def logprobs_of(future: Any) -> list[Vector]:
    outputs = future.result().loss_fn_outputs
    return [output["logprobs"].to_numpy().astype(np.float64) for output in outputs]


def along(effect: Vector, unit: Vector) -> float:
    """How many times `unit` an effect is."""
    return float(effect @ unit / (unit @ unit))


def rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(values, dtype=np.float64)))))
