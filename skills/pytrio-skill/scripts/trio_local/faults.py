"""Faults a loop meets on the cloud, switched on with `--fault NAME=VALUE,...`.

FAULTS is a table: adding a fault is an entry here, a line where it strikes, and a test.
"""

import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


def seconds(text: str) -> float:
    """`200ms` or `1.5s` or `2m` -> seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", text)
    if match is None:
        raise ValueError("a duration such as 200ms, 30s or 2m")
    return float(match[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0}[match[2]]


def probability(text: str) -> float:
    value = float(text) if re.fullmatch(r"\d*\.?\d+", text) else -1.0
    if not 0 <= value <= 1:
        raise ValueError("a probability between 0 and 1")
    return value


def count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ValueError("a whole number of at least 1")
    return int(text)


def flag(text: str) -> bool:
    if text:
        raise ValueError("no value")
    return True


@dataclass(frozen=True)
class Fault:
    """How a fault's value is written, and what it does in one line."""

    parse: Callable[[str], Any]
    meaning: str


FAULTS: dict[str, Fault] = {
    "latency": Fault(seconds, "every request waits this long first"),
    "sample_503": Fault(probability, "share of sampling requests answered 503"),
    "drop_connection": Fault(probability, "share of actor requests cut before an answer"),
    "token_expiry": Fault(seconds, "actor tokens die this early although they claim an hour"),
    "capacity": Fault(count, "this many run creations are answered 429 before one succeeds"),
    "billing_409": Fault(flag, "run creation is refused: insufficient balance"),
    "fail_chunk": Fault(count, "the n-th forward_backward event fails"),
    "lost_actor": Fault(count, "sampling runs are lost (404) after this many requests"),
}


@dataclass
class Faults:
    """The active faults of one backend and how often each has struck."""

    active: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._hits: Counter[str] = Counter()
        self._lock = threading.Lock()

    def value(self, name: str) -> Any:
        """The parsed value of a fault, None when it is off."""
        return self.active.get(name)

    def strikes(self, name: str) -> bool:
        """Whether a fault given as a probability strikes now."""
        with self._lock:
            return name in self.active and self._random.random() < self.active[name]

    def hit(self, name: str) -> int:
        """Count one occurrence and return how many there have been."""
        with self._lock:
            self._hits[name] += 1
            return self._hits[name]


def parse_faults(text: str) -> dict[str, Any]:
    """`latency=200ms,billing_409` -> {"latency": 0.2, "billing_409": True}.

    Raises ValueError with the offending part and what was expected.
    """
    active: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        if name not in FAULTS:
            raise ValueError(f"unknown fault {name!r}; known: {', '.join(FAULTS)}")
        try:
            active[name] = FAULTS[name].parse(value)
        except ValueError as expected:
            raise ValueError(f"fault {name} takes {expected}, got {value!r}") from None
    return active
