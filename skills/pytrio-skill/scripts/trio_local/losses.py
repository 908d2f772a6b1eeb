"""The five built-in losses and what each is divided by.

With lp = log-probability of the target under the current weights, q = the `logprobs` sent by the
client (behaviour policy), A = `advantages`, w = `weights` and r = exp(lp - q), the per-token
losses are

    cross_entropy        -w * lp
    importance_sampling  -r * A
    ppo                  -min(r * A, clip(r, low, high) * A)          (Schulman et al. 2017)
    cispo                -stopgrad(clip(r, low, high)) * A * lp       (MiniMax-M1, 2025)
    dro                  -(A * lp - beta / 2 * (lp - q)**2)           (Richemond et al. 2024)

Clip thresholds are bounds of the ratio (0.8, 1.2), not distances from one.

What the cloud divides by is documented nowhere. REDUCTIONS is our choice: a local choice,
unverified against the cloud, selectable with `--reduction`. What a probe has found instead comes
as a `Behaviour` (`--like`), which names the reductions of `divisors`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trio_local.behaviour import Behaviour
from trio_local.protocol import ApiError

IGNORED_TARGET = -100


@dataclass(frozen=True)
class TokenBatch:
    """Padded tensors of one microbatch, each of shape [samples, positions].

    Fields that the loss at hand does not read are a zero of shape [].
    """

    logprobs: torch.Tensor
    real: torch.Tensor  # bool: a position that is no padding
    active: torch.Tensor  # bool: a real position whose target is not ignored
    weights: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor


def cross_entropy(batch: TokenBatch, config: dict[str, float]) -> torch.Tensor:
    return -batch.weights * batch.logprobs


def importance_sampling(batch: TokenBatch, config: dict[str, float]) -> torch.Tensor:
    return -torch.exp(batch.logprobs - batch.old_logprobs) * batch.advantages


def ppo(batch: TokenBatch, config: dict[str, float]) -> torch.Tensor:
    ratio = torch.exp(batch.logprobs - batch.old_logprobs)
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)


def cispo(batch: TokenBatch, config: dict[str, float]) -> torch.Tensor:
    ratio = torch.exp(batch.logprobs - batch.old_logprobs).detach()
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -clipped * batch.advantages * batch.logprobs


def dro(batch: TokenBatch, config: dict[str, float]) -> torch.Tensor:
    distance = batch.logprobs - batch.old_logprobs
    return -(batch.advantages * batch.logprobs - 0.5 * config["beta"] * distance**2)


@dataclass(frozen=True)
class Loss:
    """One built-in loss: its formula, the fields it reads, its settings with their defaults."""

    per_token: Callable[[TokenBatch, dict[str, float]], torch.Tensor]
    reads: tuple[str, ...]
    defaults: dict[str, float] = field(default_factory=dict)


POLICY_FIELDS = ("logprobs", "advantages")
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",)),
    "importance_sampling": Loss(importance_sampling, POLICY_FIELDS),
    "ppo": Loss(ppo, POLICY_FIELDS, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Loss(cispo, POLICY_FIELDS, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "dro": Loss(dro, POLICY_FIELDS, {"beta": 0.05}),
}

CLIP_SETTINGS = ("clip_low_threshold", "clip_high_threshold")
DEFAULT_BEHAVIOUR = Behaviour()


@dataclass(frozen=True)
class Counts:
    """What a divisor may count in one sample."""

    positions: int
    labels: int  # targets that are not ignored
    active: int  # of these, the ones with a weight, or any of a policy loss
    advantages: int
    weight_sum: float  # of absolute values


# Name of `--reduction` -> loss -> which total of the whole call divides the summed loss.
# `None` means the plain sum.
REDUCTIONS: dict[str, dict[str, str | None]] = {
    "default": {
        "cross_entropy": "total_active_tokens",
        "importance_sampling": "total_active_tokens",
        "ppo": "total_active_tokens",
        "cispo": "total_active_tokens",
        "dro": "total_advantage_tokens",
    },
    "sum": dict.fromkeys(LOSSES),
    "samples": dict.fromkeys(LOSSES, "total_samples"),
    "active_tokens": dict.fromkeys(LOSSES, "total_active_tokens"),
    "advantage_tokens": {
        name: "total_active_tokens" if name == "cross_entropy" else "total_advantage_tokens"
        for name in LOSSES
    },
}


def loss_defaults(name: str, behaviour: Behaviour) -> dict[str, float]:
    """Settings of a loss and their defaults, under the names that this backend knows them by."""
    defaults = dict(LOSSES[name].defaults)
    if name == "dro" and behaviour.beta is not None:
        defaults["beta"] = behaviour.beta
    if name in behaviour.clip:
        defaults = dict(zip(CLIP_SETTINGS, behaviour.clip[name], strict=True))
    renamed = dict(zip(CLIP_SETTINGS, behaviour.clip_keys, strict=True))
    return {renamed.get(key, key): value for key, value in defaults.items()}


def loss_settings(
    name: str, config: dict[str, Any], behaviour: Behaviour = DEFAULT_BEHAVIOUR
) -> dict[str, float]:
    """Defaults of a loss overridden by `loss_fn_config`.

    Raises ApiError 422 for an unknown loss, an unknown key (unless the behaviour ignores those),
    or a value that is not a finite number: nothing is accepted and then ignored.
    """
    if name not in LOSSES:
        raise ApiError(422, "unknown_loss", f"unknown loss {name!r}; known: {', '.join(LOSSES)}")
    defaults = loss_defaults(name, behaviour)
    settings = dict(defaults)
    for key, value in config.items():
        if key not in defaults:
            if behaviour.unknown_keys == "ignored":
                continue
            known = ", ".join(defaults) or "none"
            raise ApiError(
                422,
                "unknown_loss_config",
                f"loss {name!r} has no setting {key!r} here; settings it reads: {known}",
            )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or value != value or abs(value) == float("inf"):
            raise ApiError(
                422, "invalid_loss_config", f"{key} must be a finite number, got {value!r}"
            )
        settings[key] = float(value)
    for own, served in zip(CLIP_SETTINGS, behaviour.clip_keys, strict=True):
        if served in settings:
            settings[own] = settings.pop(served)
    low, high = settings.get("clip_low_threshold"), settings.get("clip_high_threshold")
    if low is not None and high is not None and not 0 <= low <= high:
        raise ApiError(
            422,
            "invalid_loss_config",
            f"clip thresholds are bounds of the ratio, 0 <= low <= high; got {low} and {high}",
        )
    return settings


def divisor(loss: str, reduction: str, totals: dict[str, int]) -> float:
    """What the summed loss of a whole call is divided by; 1 when the total is zero."""
    total_name = REDUCTIONS[reduction][loss]
    return 1.0 if total_name is None else float(max(1, totals[total_name]))


def divisors(name: str, data: Sequence[Counts], totals: dict[str, int]) -> list[float]:
    """What each sample's summed loss is divided by under one of the probe's named reductions.

    `data` are the samples of one event: what the totals of the call do not hold is counted there.
    """
    if name == "sample_means":
        return [float(max(1, row.active)) * max(1, totals["total_samples"]) for row in data]
    shared = {
        "sum": 1.0,
        "samples": totals["total_samples"],
        "active_tokens": totals["total_active_tokens"],
        "advantage_tokens": totals["total_advantage_tokens"],
        "sqrt_tokens": math.sqrt(totals["total_active_tokens"]),
        "label_tokens": sum(row.labels for row in data),
        "positions": sum(row.positions for row in data),
        "weight_sum": sum(row.weight_sum for row in data),
    }[name]
    return [float(shared or 1.0)] * len(data)


def counted(loss: str, batch: TokenBatch, which: str | None = None) -> torch.Tensor:
    """Mask [samples, positions] of the tokens reported in `token_count`.

    Without another wish, cross_entropy counts non-zero weights (as the SDK's own total does); the
    policy losses count non-zero advantages (reported by users of the cloud, not documented).
    """
    if which == "label tokens":
        return batch.active
    if which == "positions":
        return batch.real
    signal = batch.weights if loss == "cross_entropy" else batch.advantages
    return batch.active & (signal != 0)
