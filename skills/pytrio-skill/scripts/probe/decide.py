"""From measured numbers to an answer and how sure it is: no calls, no state."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HIGH, LOW, CANNOT_TELL = "high", "low", "cannot tell"
SOMETHING_ELSE = "something else"
# A step is linear in the gradient to a share of the effect that grows with its size in nats (0.02
# of an effect of 0.16 nats was measured), plus a little.
NONLINEAR_PER_NAT, LEAST_NONLINEAR, LITTLE = 0.2, 0.025, 0.01
# In standard deviations: what a true hypothesis may be off by, and what refutes one.
FITS, REFUTED, SURELY_REFUTED = 4.0, 5.0, 8.0


@dataclass(frozen=True)
class Verdict:
    """An answer of None goes with CANNOT_TELL."""

    answer: Any
    confidence: str
    evidence: dict[str, Any] = field(default_factory=dict)


def cannot_tell(reason: str, **evidence: Any) -> Verdict:
    return Verdict(None, CANNOT_TELL, {"reason": reason, **evidence})


def fit(
    measured: Mapping[str, float],
    noise: float,
    predictions: Mapping[str, Mapping[str, float]],
    is_linear: bool,
    nats: float = 0.25,
) -> Verdict:
    """The hypothesis whose predictions the measured effects agree with.

    `measured`: variant -> effect in units of the plain one, which is so many `nats`; `noise`:
    standard deviation of an effect; `predictions`: hypothesis -> variant -> effect.
    """
    nonlinear = max(LEAST_NONLINEAR, NONLINEAR_PER_NAT * nats)

    def deviation(predicted: Mapping[str, float]) -> float:
        return max(
            abs(value - predicted[variant])
            / math.hypot(noise, noise * predicted[variant], nonlinear * predicted[variant], LITTLE)
            for variant, value in measured.items()
        )

    deviations = {name: deviation(predicted) for name, predicted in predictions.items()}
    ranked = sorted(deviations, key=lambda name: deviations[name])
    best, rival = ranked[0], deviations[ranked[1]]
    evidence = {
        "effects": {name: round(value, 4) for name, value in measured.items()},
        "noise": round(noise, 5),
        "deviations": {name: round(deviations[name], 1) for name in ranked},
    }
    if not is_linear:
        return cannot_tell("the steps are not linear in the gradient", **evidence)
    if deviations[best] > SURELY_REFUTED:
        return Verdict(SOMETHING_ELSE, HIGH, evidence)
    if deviations[best] > FITS:
        return cannot_tell("no reduction fits", **evidence)
    if rival > SURELY_REFUTED:
        return Verdict(best, HIGH, evidence)
    if rival > REFUTED:
        return Verdict(best, LOW, evidence)
    return cannot_tell("several reductions fit", **evidence)


def either(
    value: float, low: tuple[float, Any], high: tuple[float, Any], **evidence: Any
) -> Verdict:
    """One of two answers: below the first limit, above the second; between them nobody knows."""
    evidence = {"value": float(f"{value:.4g}"), **evidence}
    if value < low[0]:
        return Verdict(low[1], HIGH, evidence)
    if value > high[0]:
        return Verdict(high[1], HIGH, evidence)
    return cannot_tell("the value lies between what the answers would give", **evidence)
