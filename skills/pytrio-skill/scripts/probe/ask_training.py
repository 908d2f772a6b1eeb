"""Questions about losses, their divisors and settings, answered by a training run."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pytrio import PyTrioError

from probe.decide import HIGH, LOW, SOMETHING_ELSE, Verdict, cannot_tell, either, fit
from probe.measure import (
    ANSWER,
    IGNORED,
    PROMPT,
    Lab,
    Row,
    Vector,
    along,
    answer_of,
    probe_row,
    rms,
    spare_row,
    with_ratio,
)

PLACEHOLDER = 0
# -- reductions ----------------------------------------------------------------------------------


def with_placeholders(row: Row) -> Row:
    targets = [PLACEHOLDER if target == IGNORED else target for target in row.targets]
    return Row(row.tokens, targets, row.signal)


def halves(row: Row) -> list[Row]:
    """The row twice, the signal of its answer shared between the two."""
    middle = PROMPT + ANSWER // 2
    front = [value if i < middle else 0.0 for i, value in enumerate(row.signal)]
    back = [value - f for value, f in zip(row.signal, front, strict=True)]
    return [Row(row.tokens, row.targets, front), Row(row.tokens, row.targets, back)]


# Variant -> its rows. The gradient of the watched row is the same in all but the two of
# TWO_GRADIENTS; what differs is what a divisor may count.
VARIANTS: dict[str, Callable[[Lab, Row], list[Row]]] = {
    "plain": lambda lab, row: [row],
    "with a sample without signal": lambda lab, row: [row, spare_row(lab, 12)],
    "prompt targets 0 instead of -100": lambda lab, row: [with_placeholders(row)],
    "with an ignored sample": lambda lab, row: [row, spare_row(lab, 40, has_targets=False)],
    "the sample twice": lambda lab, row: [row, row],
    "signal doubled": lambda lab, row: [row.times(2.0)],
    "signal in two halves": lambda lab, row: halves(row),
}
TWO_GRADIENTS = ("the sample twice", "signal doubled")
DOUBLED = "signal doubled"


def labels(row: Row) -> int:
    return sum(target != IGNORED for target in row.targets)


def signals(row: Row) -> int:
    pairs = zip(row.targets, row.signal, strict=True)
    return sum(target != IGNORED and value != 0 for target, value in pairs)


def absolute(row: Row) -> float:
    pairs = zip(row.targets, row.signal, strict=True)
    return sum(abs(value) for target, value in pairs if target != IGNORED)


# Hypothesis -> what the watched row's loss is divided by, from all rows of the call.
COMMON: dict[str, Callable[[Sequence[Row]], float]] = {
    "sum": lambda rows: 1,
    "samples": len,
    "positions": lambda rows: sum(len(row.tokens) for row in rows),
}
CROSS_ENTROPY: dict[str, Callable[[Sequence[Row]], float]] = {
    **COMMON,
    "active_tokens": lambda rows: sum(map(signals, rows)),
    "label_tokens": lambda rows: sum(map(labels, rows)),
    "weight_sum": lambda rows: sum(map(absolute, rows)),
    "sample_means": lambda rows: len(rows) * signals(rows[0]),
    "sample_means_of_labels": lambda rows: len(rows) * labels(rows[0]),
}
POLICY: dict[str, Callable[[Sequence[Row]], float]] = {
    **COMMON,
    "active_tokens": lambda rows: sum(map(labels, rows)),
    "advantage_tokens": lambda rows: sum(map(signals, rows)),
    "sample_means": lambda rows: len(rows) * labels(rows[0]),
    "sample_means_of_advantages": lambda rows: len(rows) * signals(rows[0]),
}


def predicted(lab: Lab, loss: str) -> dict[str, dict[str, float]]:
    """Hypothesis -> variant -> effect in units of the plain variant's."""
    row = probe_row(lab)
    divisors = CROSS_ENTROPY if loss in ("cross_entropy", "custom") else POLICY
    rows_by_variant = {name: make(lab, row) for name, make in VARIANTS.items()}
    return {
        hypothesis: {
            variant: (2 if variant in TWO_GRADIENTS else 1) * divisor([row]) / divisor(rows)
            for variant, rows in rows_by_variant.items()
        }
        for hypothesis, divisor in divisors.items()
    }


def effect_noise(lab: Lab, unit: Vector) -> float:
    """Standard deviation of `along` for a swing, which averages three readings."""
    return math.sqrt(1.5) * lab.noise / float(np.linalg.norm(unit))


def reduction(lab: Lab, loss: str) -> Verdict:
    """What a loss is divided by, from the effects of variants of one call."""
    row, rate = probe_row(lab), lab.rate(loss)
    unit = lab.swing(loss, [row], rate)
    measured = {
        name: along(lab.swing(loss, make(lab, row), rate), unit) for name, make in VARIANTS.items()
    }
    noise = effect_noise(lab, unit)
    is_linear = abs(measured[DOUBLED] - 2.0) < 0.3
    if not is_linear:
        # Divided by its own weights, doubling changes nothing; a second call still does.
        is_linear = abs(along(lab.swing(loss, [row], rate, calls=2), unit) - 2.0) < 0.3
    return fit(measured, noise, predicted(lab, loss), is_linear, rms(unit))


def two_calls(lab: Lab) -> Verdict:
    """Whether two calls before one step add their gradients."""
    row, rate = probe_row(lab), lab.rate("cross_entropy")
    unit = lab.swing("cross_entropy", [row], rate)
    effect = along(lab.swing("cross_entropy", [row], rate, calls=2), unit)
    noise = effect_noise(lab, unit)
    if noise > 0.1:
        return cannot_tell("the answers are too noisy", noise=noise)
    if abs(effect - 2.0) < 0.3:
        return Verdict("add up", HIGH, {"effect": round(effect, 3)})
    if abs(effect - 1.0) < 0.2:
        return Verdict("count as one", HIGH, {"effect": round(effect, 3)})
    return cannot_tell("neither once nor twice the effect", effect=round(effect, 3))


# The watched row alone in the second chunk, behind as many fillers as the first can hold.
FILLER_SIGNAL = 1e-6
MOST_FILLERS = 1024


def split_calls(lab: Lab) -> Verdict:
    """Whether a call that the SDK splits is divided by the totals of the whole call."""
    known = {name: str(lab.notes.get(f"reduction.{name}")) for name in ("cross_entropy", "ppo")}
    told = ("samples", "active_tokens", "advantage_tokens")
    chosen = [name for name, answer in known.items() if answer in told]
    if not chosen:
        return cannot_tell("no loss is known to be divided by a total of the call", known=known)
    size = capability(lab)["max_batch_size"]
    if size is None or size > MOST_FILLERS:
        return cannot_tell(f"calls are split only above {size} samples")
    loss, row = chosen[0], probe_row(lab)
    rate = lab.rate(loss)
    unit = lab.swing(loss, [row], rate)
    token = lab.words(20, 2)
    filler = Row(token[:1], token[1:], [FILLER_SIGNAL])
    before = lab.logprobs([row])
    known_logprobs = [*([[-1.0]] * size), before[0]]
    middle = lab.moved(loss, [*([filler] * size), row], rate, [row], known_logprobs)
    effect = along(answer_of(middle[0] - before[0]), unit)
    lab.moved(loss, [row.times(-effect)], rate, [row], middle)
    divisors = CROSS_ENTROPY if loss == "cross_entropy" else POLICY
    divisor = divisors[known[loss]]
    whole = divisor([row]) / divisor([row, *([filler] * size)])
    return either(
        effect, (whole + 0.25, "whole call"), (0.75, "each chunk"), whole=round(whole, 4), loss=loss
    )


def capability(lab: Lab) -> dict[str, Any]:
    """The training limits of the model as they are served. Raises LookupError for another one."""
    served = lab.service.get_server_capabilities().supported_models
    model = next((m for m in served if m.model_name == lab.model), None)
    if model is None:
        raise LookupError(f"the service lists no {lab.model}")
    names = ("max_batch_size", "max_tokens_per_request", "max_seq_len")
    return {name: getattr(model.training, name) for name in names}


# -- what is reported ----------------------------------------------------------------------------


def token_count(lab: Lab, group: str) -> Verdict:
    """Which tokens `token_count` counts, by a row with ten positions, four labels, two signals."""
    row = halves(probe_row(lab))[0]
    loss = "cross_entropy" if group == "cross_entropy" else "importance_sampling"
    old = None if group == "cross_entropy" else lab.logprobs([row])
    count = int(lab.forward(loss, [row], old).result().metrics["token_count"])
    signal = "weight tokens" if group == "cross_entropy" else "advantage tokens"
    counts = {signals(row): signal, labels(row): "label tokens", len(row.tokens): "positions"}
    known = {name: number for number, name in counts.items()}
    return Verdict(counts.get(count, SOMETHING_ELSE), HIGH, {"token_count": count, **known})


def token_outputs(lab: Lab) -> Verdict:
    output = lab.forward("cross_entropy", [probe_row(lab)]).result()
    names = sorted(output.loss_fn_outputs[0])
    return Verdict(names, HIGH, {"metrics": sorted(output.metrics)})


def step_metrics(lab: Lab) -> Verdict:
    lab.backward("cross_entropy", [probe_row(lab)]).result()
    metrics = lab.step(1e-12).result().metrics
    return Verdict(sorted(metrics), HIGH, {"served": metrics})


# -- settings of the losses ----------------------------------------------------------------------

FAR = 20.0  # a ratio outside every sensible clip
NEAR_BOUND = 0.1
CONFIRMED = 0.3
NOISE_OF_ONE_READING, MOST_READINGS = 2e-3, 16


class Ratios:
    """Values and gradients of one loss at chosen ratios."""

    def __init__(self, lab: Lab, loss: str) -> None:
        self.lab, self.loss, self.row = lab, loss, probe_row(lab)
        # The ratios are only as true as these: noise is averaged away.
        self.readings = min(MOST_READINGS, 1 + round((lab.noise / NOISE_OF_ONE_READING) ** 2))
        seen = [lab.logprobs([self.row])[0] for _ in range(self.readings)]
        self.logprobs: Vector = np.mean(seen, axis=0)
        self._at_one: dict[float, float] = {}
        self._unit: Vector | None = None

    @property
    def error(self) -> float:
        """Standard deviation of a `value` of 1."""
        return self.lab.noise / math.sqrt(self.readings * ANSWER)

    def loss_at(self, ratio: float, sign: float, config: Any = None) -> float:
        old = with_ratio(self.logprobs, ratio)
        return self.lab.loss_sum(self.loss, [self.row.times(sign)], [old], config)

    def value(self, ratio: float, sign: float = 1.0, config: Any = None) -> float:
        """The reported loss in units of that at ratio 1."""
        if sign not in self._at_one:
            self._at_one[sign] = self.loss_at(1.0, sign)
        if self._at_one[sign] == 0.0:
            raise ValueError(f"{self.loss} reports a loss of 0 at ratio 1")
        return self.loss_at(ratio, sign, config) / self._at_one[sign]

    def effect(self, ratio: float, sign: float = 1.0, scale: float = 1.0) -> float:
        """The gradient's size at a ratio in units of that at ratio 1, the signal scaled."""
        lab, row = self.lab, self.row
        rate = lab.rate(self.loss)
        if self._unit is None:
            self._unit = lab.swing(self.loss, [row], rate)
        before = lab.logprobs([row])
        changed = row.times(sign * scale)
        middle = lab.moved(self.loss, [changed], rate, [row], [with_ratio(before[0], ratio)])
        effect = along(answer_of(middle[0] - before[0]), self._unit)
        lab.moved(self.loss, [row.times(-effect)], rate, [row], middle)
        return sign * effect


def digits_of(error: float) -> int:
    """How many decimals an error leaves sure, at most four; 0 when not even two are."""
    return next((n for n in (4, 3, 2) if 3 * error < 0.5 * 10**-n), 0)


def clip_bounds(lab: Lab, loss: str) -> Verdict:
    """The default bounds: read off the reported loss, confirmed by the gradient."""
    ratios = Ratios(lab, loss)
    down = -1.0 if loss == "ppo" else 1.0
    high, low = ratios.value(FAR), ratios.value(1 / FAR, down)
    digits = [digits_of(ratios.error * bound) for bound in (low, high)]
    found: list[float | None] = [
        None if low < 1.5 / FAR else round(low, digits[0] or 2),
        None if high > FAR / 1.5 else round(high, digits[1] or 2),
    ]
    checks: dict[str, tuple[float, float]] = {}
    for name, bound, sign, outward in (
        ("low", found[0], down, 1 - NEAR_BOUND),
        ("high", found[1], 1.0, 1 + NEAR_BOUND),
    ):
        far = 1 / 3 if name == "low" else 3.0
        if bound is None:
            checks[f"{name}: none"] = (ratios.effect(far, sign, 1 / far), 1.0)
        elif loss == "ppo":
            beyond, within = bound * outward, bound * (2 - outward)
            checks[f"{name}: beyond"] = (ratios.effect(beyond, sign, 1 / beyond), 0.0)
            checks[f"{name}: within"] = (ratios.effect(within, sign, 1 / within), 1.0)
        else:
            ratio = FAR if name == "high" else 1 / FAR
            checks[f"{name}: beyond"] = (ratios.effect(ratio, sign, 1 / bound), 1.0)
    evidence = {
        "values": [round(low, 5), round(high, 5)],
        "error": float(f"{ratios.error:.2g}"),
        "gradients": {name: [round(seen, 3), due] for name, (seen, due) in checks.items()},
    }
    if any(abs(seen - due) > CONFIRMED for seen, due in checks.values()):
        return cannot_tell("the gradient does not confirm the reported loss", **evidence)
    is_sure = all(n for n, bound in zip(digits, found, strict=True) if bound is not None)
    return Verdict(found, HIGH if is_sure else LOW, evidence)


DISTANCE = 4.0


def dro_beta(lab: Lab) -> Verdict:
    """`beta` of dro's quadratic term, from the reported loss and from the gradient."""
    ratios = Ratios(lab, "dro")
    same, apart = ratios.loss_at(1.0, 1.0), ratios.loss_at(math.exp(DISTANCE), 1.0)
    scale = same / -float(answer_of(ratios.logprobs).sum())
    beta = (apart - same) / scale / ANSWER * 2 / DISTANCE**2
    # Where the penalty cancels half of the advantage.
    distance = min(10.0, max(0.2, 0.5 / max(beta, 1e-3)))
    due = 1.0 - beta * distance
    seen = ratios.effect(math.exp(distance))
    # A wrong distance of e nats at DISTANCE is 2 e / DISTANCE of beta; the rest is float32.
    error = beta * 2 * ratios.error / DISTANCE + 1e-5
    evidence = {
        "value": round(beta, 6),
        "error": float(f"{error:.2g}"),
        "gradient": [round(seen, 3), round(due, 3)],
    }
    if abs(seen - due) > CONFIRMED or beta < -3 * error:
        return cannot_tell("the gradient does not confirm the reported loss", **evidence)
    digits = digits_of(error)
    return Verdict(max(0.0, round(beta, digits or 2)), HIGH if digits else LOW, evidence)


# Names of clip settings in public code, lower and upper; a single name is for both.
CLIP_NAMES = (
    ("clip_low_threshold", "clip_high_threshold"),
    ("clip_low", "clip_high"),
    ("clip_ratio_low", "clip_ratio_high"),
    ("epsilon_low", "epsilon_high"),
    ("eps_clip_low", "eps_clip_high"),
)
SINGLE_NAMES = ("clip_epsilon", "clip_range", "clip_ratio", "epsilon")
# Tried as bounds: the first that is not the default already.
LOWS_TRIED, HIGHS_TRIED = (0.5, 0.25), (3.0, 6.0)


def clip_keys(lab: Lab) -> Verdict:
    """Which names of clip settings change what ppo computes."""
    ratios = Ratios(lab, "ppo")
    plain = {sign: ratios.value(FAR**sign, sign) for sign in (1.0, -1.0)}
    refused, ignored = [], []
    effective: dict[str, float] = {}
    low = next(bound for bound in LOWS_TRIED if abs(bound - plain[-1.0]) > 0.1)
    high = next(bound for bound in HIGHS_TRIED if abs(bound - plain[1.0]) > 0.5)
    tried = [(name, -1.0, low) for name, _ in CLIP_NAMES]
    tried += [(name, 1.0, high) for _, name in CLIP_NAMES]
    tried += [(name, 1.0, high) for name in SINGLE_NAMES]
    for name, sign, bound in tried:
        try:
            value = ratios.value(FAR**sign, sign, {name: bound})
        except PyTrioError:
            lab.renew_if_broken()
            refused.append(name)
            continue
        if abs(value / plain[sign] - 1.0) > max(0.05, 8 * lab.noise):
            effective[name] = round(value, 4)
        else:
            ignored.append(name)
    evidence = {"values": effective, "refused": refused, "ignored": ignored}
    are_bounds = all(
        min(abs(v - low) / low, abs(v - high) / high) < 0.1 for v in effective.values()
    )
    if not effective:
        return cannot_tell("no name that was tried has an effect", **evidence)
    if not are_bounds:
        return Verdict({"names": list(effective), "as": "something else"}, HIGH, evidence)
    return Verdict(list(effective), HIGH, evidence)


def unknown_keys(lab: Lab) -> Verdict:
    """Whether a setting that no loss has is refused."""
    answers = {}
    for loss in ("cross_entropy", "ppo"):
        row = probe_row(lab)
        try:
            old = lab.logprobs([row])
            lab.loss_sum(loss, [row], old, {"probe_no_such_setting": 1.0})
            answers[loss] = "ignored"
        except PyTrioError as error:
            answers[loss] = "refused"
            answers[f"{loss} said"] = str(error)[:200]
            lab.renew_if_broken()
    if answers["cross_entropy"] != answers["ppo"]:
        return cannot_tell("the losses differ", **answers)
    return Verdict(answers["ppo"], HIGH, answers)


# -- order of events -----------------------------------------------------------------------------


def event_order(lab: Lab) -> Verdict:
    """Whether a forward pass submitted behind a step, without waiting, sees the step."""
    row, rate = probe_row(lab), lab.rate("cross_entropy")
    before = lab.logprobs([row])
    queued = lab.moved("cross_entropy", [row], rate, [row], before)
    waited = lab.logprobs([row])
    lab.moved("cross_entropy", [row.times(-1.0)], rate, [row], waited)
    moved = rms(answer_of(waited[0] - before[0]))
    missing = rms(answer_of(waited[0] - queued[0]))
    if moved < 8 * lab.noise:
        return cannot_tell("the step is not seen", moved=moved, noise=lab.noise)
    return either(missing / moved, (0.4, "in order"), (0.8, "out of order"), moved=round(moved, 4))
