"""What is documented nowhere about the cloud, as settings: how the backend behaves in each case.

The defaults are this project's assumptions. `--like FILE` replaces those that a probe has measured.
SETTINGS is a table: a setting is a field below, an entry there under the probe's name for the
question, a line where it acts, and a test.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro")
SCHEMA = 1


@dataclass(frozen=True)
class Behaviour:
    """One backend's answers. A loss that a mapping does not name has the answer of losses.py."""

    reduction: Mapping[str, str] = field(default_factory=dict)
    split_calls: str = "whole call"
    token_count: Mapping[str, str] = field(default_factory=dict)
    clip: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    clip_keys: tuple[str, str] = ("clip_low_threshold", "clip_high_threshold")
    beta: float | None = None
    unknown_keys: str = "refused"
    token_stop: str = "in tokens"
    string_stop: str = "in tokens"
    end_of_turn: str = "in tokens"
    temperature: str = "before"
    top_k: str = "before"
    top_p: str = "before"
    same_seed: str = "repeats"
    group_samples: str = "distinct"
    prompt_logprobs: str = "None first"
    # Standard deviations in nats: a token's own error in the sampler, and one that changes with
    # every answer of the trainer.
    mismatch: float = 0.0
    trainer_noise: float = 0.0
    fresh_lora: str = "equals base"
    snapshot: str = "frozen"
    save_ttl: int | None = None
    same_name: str = "refused"
    resume: str = "documented"
    empty_step: str = "changes nothing"
    token_outputs: tuple[str, ...] = ("logprobs",)
    step_metrics: tuple[str, ...] = ("grad_norm", "learning_rate")
    # Answers that came from a file, by question, and that file in a few words.
    taken: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Setting:
    """Which field a question's answer sets (an entry of it, for a mapping), and how it is read.

    `read` turns the JSON value into the field's and raises ValueError for any other.
    """

    field: str
    read: Callable[[Any], Any]
    entry: str = ""


def one_of(*names: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError(f"takes one of {', '.join(names)}, got {value!r}")
        return value

    return read


def number(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared and not converted: a whole number may be too large for a float.
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"takes a number of 0 or more, got {value!r}")
    return float(value)


def seconds_or_never(value: Any) -> int | None:
    return None if value == "never" else max(1, round(number(value)))


def bounds(value: Any) -> tuple[float, float]:
    """[low, high] of a ratio; null means that there is no bound."""
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"takes [low, high], got {value!r}")
    low = 0.0 if value[0] is None else number(value[0])
    return low, math.inf if value[1] is None else number(value[1])


def names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ValueError(f"takes a list of names, got {value!r}")
    return tuple(value)


def two_names(value: Any) -> tuple[str, ...]:
    if len(names(value)) != 2:
        raise ValueError(f"takes the names of the lower and the upper bound, got {value!r}")
    return names(value)


COMMON_DIVISORS = ("sum", "samples", "active_tokens", "positions", "sample_means", "sqrt_tokens")
BEFORE_OR_AFTER, IN_OR_NOT = ("before", "after"), ("in tokens", "not in tokens")
SETTINGS: dict[str, Setting] = {
    "reduction.cross_entropy": Setting(
        "reduction", one_of(*COMMON_DIVISORS, "label_tokens", "weight_sum"), "cross_entropy"
    ),
    **{
        f"reduction.{loss}": Setting(
            "reduction", one_of(*COMMON_DIVISORS, "advantage_tokens"), loss
        )
        for loss in POLICY_LOSSES
    },
    "split_calls": Setting("split_calls", one_of("whole call", "each chunk")),
    "token_count.cross_entropy": Setting(
        "token_count", one_of("weight tokens", "label tokens", "positions"), "cross_entropy"
    ),
    "token_count.policy": Setting(
        "token_count", one_of("advantage tokens", "label tokens", "positions"), "policy"
    ),
    "clip.ppo": Setting("clip", bounds, "ppo"),
    "clip.cispo": Setting("clip", bounds, "cispo"),
    "clip_keys": Setting("clip_keys", two_names),
    "beta.dro": Setting("beta", number),
    "unknown_keys": Setting("unknown_keys", one_of("refused", "ignored")),
    "token_stop": Setting("token_stop", one_of(*IN_OR_NOT)),
    "string_stop": Setting("string_stop", one_of(*IN_OR_NOT)),
    "end_of_turn": Setting("end_of_turn", one_of(*IN_OR_NOT)),
    "temperature": Setting("temperature", one_of(*BEFORE_OR_AFTER)),
    "top_k": Setting("top_k", one_of(*BEFORE_OR_AFTER)),
    "top_p": Setting("top_p", one_of(*BEFORE_OR_AFTER)),
    "same_seed": Setting("same_seed", one_of("repeats", "ignored")),
    "group_samples": Setting("group_samples", one_of("distinct", "identical")),
    "prompt_logprobs": Setting("prompt_logprobs", one_of("None first", "0 first", "one short")),
    "mismatch": Setting("mismatch", number),
    "trainer_noise": Setting("trainer_noise", number),
    "fresh_lora": Setting("fresh_lora", one_of("equals base", "differs from base")),
    "snapshot": Setting("snapshot", one_of("frozen", "live", "stale")),
    "save_ttl": Setting("save_ttl", seconds_or_never),
    "same_name": Setting("same_name", one_of("refused", "replaces")),
    "resume": Setting("resume", one_of("documented", "never", "always")),
    "empty_step": Setting("empty_step", one_of("changes nothing", "moves on", "refused")),
    "token_outputs": Setting("token_outputs", names),
    "step_metrics": Setting("step_metrics", names),
}


def read_like(path: Path) -> tuple[Behaviour, dict[str, int | None]]:
    """The behaviour in a probe's file, and the request limits it found by their field name.

    The file holds `{"schema": 1, "answers": {QUESTION: ANSWER}}`; an answer is what the probe
    writes (`{"answer": ..., "confidence": ...}`, used when the confidence is high) or, written by
    hand, the bare value. Raises ValueError in one line.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("answers"), dict):
        raise ValueError(f"{path} has no `answers`; it is not a probe's file")
    if content.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {content.get('schema')!r}, read is {SCHEMA}")
    behaviour, taken = Behaviour(), dict[str, Any]()
    limits: dict[str, int | None] = {}
    for question, given in content["answers"].items():
        value = certain_value(given)
        if value is None:
            continue
        if question == "limits" and isinstance(value, dict):
            limits = {
                name: value[name]
                for name in ("max_batch_size", "max_tokens_per_request")
                if type(value.get(name)) is int and value[name] > 0
            }
            taken |= {"limits": limits} if limits else {}
        if question not in SETTINGS:
            if not isinstance(given, dict):
                raise ValueError(f"{path}: no setting {question!r}; known: {', '.join(SETTINGS)}")
            continue  # what a probe asks and nothing here depends on
        try:
            behaviour = with_answer(behaviour, question, value)
        except ValueError as error:
            if isinstance(given, dict):
                continue  # a probe may see what this backend cannot imitate
            raise ValueError(f"{path}: {question} {error}") from None
        taken[question] = value
    source = f"{path}, {content.get('model', 'written by hand')}, {content.get('date', 'undated')}"
    return replace(behaviour, taken=taken, source=source), limits


def certain_value(given: Any) -> Any:
    """The answer if it is certain, else None."""
    if not isinstance(given, dict) or "confidence" not in given:
        return given
    return given.get("answer") if given["confidence"] == "high" else None


def with_answer(behaviour: Behaviour, question: str, value: Any) -> Behaviour:
    """The behaviour with one answer set. Raises ValueError for a value that has no meaning."""
    setting = SETTINGS[question]
    read = setting.read(value)
    if setting.entry:
        read = {**getattr(behaviour, setting.field), setting.entry: read}
    return replace(behaviour, **{setting.field: read})


def described(behaviour: Behaviour) -> str:
    """One line for the end of a run: what was measured and what is still assumed."""
    assumed = [name for name in SETTINGS if name not in (*behaviour.taken, "trainer_noise")]
    kept = f"; still assumed: {', '.join(assumed)}" if assumed else ""
    return f"--like ({behaviour.source}) decides {', '.join(behaviour.taken) or 'nothing'}{kept}"


# A misspelt field would be found only by the answer that sets it.
assert {setting.field for setting in SETTINGS.values()} <= {f.name for f in fields(Behaviour)}
