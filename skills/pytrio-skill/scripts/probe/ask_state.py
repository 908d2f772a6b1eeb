"""Questions about checkpoints and limits. What is saved here is deleted here or expires soon."""

from datetime import datetime, timezone
from typing import Any

from pytrio import PyTrioError

from probe.ask_training import capability
from probe.decide import HIGH, LOW, Verdict, cannot_tell, either
from probe.measure import TTL_SECONDS, Lab, along, answer_of, probe_row, rms

PREFIX = "probe-"


def checkpoints(lab: Lab, run: str) -> dict[str, Any]:
    """The checkpoints of a training run by the last part of their address."""
    listed = lab.service.create_rest_client().list_checkpoints(run).result().checkpoints
    return {checkpoint.path.rsplit("/", 1)[-1]: checkpoint for checkpoint in listed}


def delete_unlimited(lab: Lab, run: str) -> None:
    """Delete what `save_ttl` has saved for good in a run."""
    rest = lab.service.create_rest_client()
    for name, checkpoint in checkpoints(lab, run).items():
        if name.startswith(f"{PREFIX}unlimited"):
            rest.delete_checkpoint(run, checkpoint.checkpoint_id).result()


def lifetime(checkpoint: Any) -> float | None:
    """Seconds until a checkpoint expires, None for one that does not."""
    if checkpoint.expires_at is None:
        return None
    expires = checkpoint.expires_at
    if expires.tzinfo is None:
        expires = expires.replace(tzinfo=timezone.utc)
    return (expires - datetime.now(timezone.utc)).total_seconds()


def save_ttl(lab: Lab) -> Verdict:
    """Whether what is saved without `ttl_seconds` expires; deleted at the end."""
    training = lab.training
    run = training.training_run_cuid
    training.save_state(f"{PREFIX}limited-{lab.unique()}", ttl_seconds=TTL_SECONDS).result()
    lab.leave_behind(run)
    try:
        training.save_state(f"{PREFIX}unlimited-state-{lab.unique()}").result()
        training.save_weights_for_sampler(f"{PREFIX}unlimited-weights-{lab.unique()}").result()
        found = checkpoints(lab, run)
    finally:
        delete_unlimited(lab, run)
        lab.leave_behind(None)
    lifetimes = {
        name.removeprefix(PREFIX).rpartition("-")[0]: lifetime(checkpoint)
        for name, checkpoint in found.items()
        if name.startswith((f"{PREFIX}limited", f"{PREFIX}unlimited"))
    }
    evidence = {
        name: None if seconds is None else round(seconds) for name, seconds in lifetimes.items()
    }
    limited = lifetimes.get("limited")
    if limited is None or abs(limited - TTL_SECONDS) > 120:
        return cannot_tell("the list does not show the TTL that was given", **evidence)
    if not {"unlimited-state", "unlimited-weights"} <= lifetimes.keys():
        return cannot_tell("the list does not show what was saved", **evidence)
    state, weights = lifetimes["unlimited-state"], lifetimes["unlimited-weights"]
    if state is None and weights is None:
        return Verdict("never", HIGH, evidence)
    if state is None or weights is None or abs(state - weights) > 120:
        return Verdict(
            {"state": evidence["unlimited-state"], "weights": evidence["unlimited-weights"]},
            HIGH,
            evidence,
        )
    return Verdict(whole_minutes(max(state, weights)), HIGH, evidence)


def whole_minutes(seconds: float) -> int:
    """A TTL is a round number of which some seconds have passed."""
    return round((seconds + 25) / 60) * 60 if seconds > 300 else round(seconds)


def same_name(lab: Lab) -> Verdict:
    """Whether a second save under one name is refused."""
    training, answers = lab.training, {}
    for kind, save in (
        ("state", training.save_state),
        ("weights", training.save_weights_for_sampler),
    ):
        name = f"{PREFIX}twice-{kind}-{lab.unique()}"
        save(name, ttl_seconds=TTL_SECONDS).result()
        try:
            save(name, ttl_seconds=TTL_SECONDS).result()
            answers[kind] = "replaces"
        except PyTrioError as error:
            answers[kind] = "refused"
            answers[f"{kind} said"] = str(error)[:200]
    lab.renew_if_broken()
    if answers["state"] != answers["weights"]:
        return Verdict(answers, HIGH, answers)
    return Verdict(answers["state"], HIGH, answers)


def resume(lab: Lab) -> Verdict:
    """Whether Adam's first moment comes back with, and only with, the optimiser."""
    row = probe_row(lab)
    rate = lab.rate("cross_entropy")
    lab.renew()  # moments of earlier steps would speak, too
    start = lab.logprobs([row])
    lab.backward("cross_entropy", [row]).result()
    lab.step(rate, beta1=0.9).result()
    path = (
        lab.training.save_state(f"{PREFIX}resume-{lab.unique()}", ttl_seconds=TTL_SECONDS)
        .result()
        .path
    )
    moved = lab.logprobs([row])
    unit = answer_of(moved[0] - start[0])
    effects, kept = {}, {}
    for name, restore in (
        ("without", lab.service.create_training_client_from_state),
        ("with", lab.service.create_training_client_from_state_with_optimizer),
    ):
        lab.adopt(restore(path))
        before = lab.logprobs([row])
        kept[name] = rms(answer_of(before[0] - moved[0]))
        # A gradient of zero, whatever divides it: what moves is the momentum.
        lab.backward("cross_entropy", [row, row.times(-1.0)]).result()
        lab.step(rate, beta1=0.9).result()
        effects[name] = along(answer_of(lab.logprobs([row])[0] - before[0]), unit)
    lab.renew()
    evidence = {
        "effects": {name: round(value, 3) for name, value in effects.items()},
        "weights off by": {name: float(f"{value:.3g}") for name, value in kept.items()},
        "step": round(rms(unit), 4),
    }
    if rms(unit) < 8 * lab.noise:
        return cannot_tell("the step is not seen", **evidence)
    if max(kept.values()) > 0.3 * rms(unit):
        return Verdict("weights are not restored", LOW, evidence)
    # A restored moment moves on by about half of the first step.
    restored = {name: value > 0.3 for name, value in effects.items()}
    if any(0.15 < abs(value) < 0.3 for value in effects.values()):
        return cannot_tell("half restored", **evidence)
    answer = {
        (False, True): "documented",
        (False, False): "never",
        (True, True): "always",
        (True, False): "the other way round",
    }[restored["without"], restored["with"]]
    return Verdict(answer, HIGH, evidence)


def empty_step(lab: Lab) -> Verdict:
    """Whether a step without a gradient since the last one moves the weights, by its momentum."""
    row = probe_row(lab)
    rate = lab.rate("cross_entropy")
    lab.renew()
    start = lab.logprobs([row])
    lab.backward("cross_entropy", [row]).result()
    lab.step(rate, beta1=0.9).result()
    moved = lab.logprobs([row])
    unit = answer_of(moved[0] - start[0])
    try:
        lab.step(rate, beta1=0.9).result()
    except PyTrioError as error:
        return Verdict("refused", HIGH, {"said": str(error)[:200]})
    finally:
        after = lab.logprobs([row])
        lab.renew()
    if rms(unit) < 8 * lab.noise:
        return cannot_tell("the step is not seen", step=rms(unit), noise=lab.noise)
    effect = along(answer_of(after[0] - moved[0]), unit)
    return either(effect, (0.15, "changes nothing"), (0.3, "moves on"), step=round(rms(unit), 4))


def limits(lab: Lab) -> Verdict:
    return Verdict(capability(lab), HIGH, {})
