"""Demonstrations: completions the sampler is made to emit, so any task has groups to learn from.

A model of a million parameters never solves a stranger's task by itself: every reward would be
zero and the training path would never run. A demonstrations file says what it shall say instead,
right and wrong, with what probability; the tokens are forced and their log-probabilities are the
model's own, so every invariant of the loop stays exact.

One JSON object a line: {"when": "pattern on the decoded prompt", "say": "the completion", "p": 0.3}
`when` is optional (every prompt) and searched with `re`; `p` is optional (the entries that match a
prompt share what is left of 1). The end token is appended.
"""

import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KNOWN_KEYS = {"when", "say", "p"}


@dataclass
class Demo:
    """One line of the file; `matched` counts the prompts it applied to, `said` its uses."""

    line: int
    when: re.Pattern[str] | None
    say: str
    p: float | None
    matched: int = 0
    said: int = 0
    problem: str | None = None


@dataclass
class Demos:
    """All demonstrations of a run. Used on the compute thread only."""

    entries: list[Demo] = field(default_factory=list)

    def matching(self, prompt: str) -> list[Demo]:
        """The entries whose `when` is found in a decoded prompt."""
        found = [e for e in self.entries if e.when is None or e.when.search(prompt)]
        for entry in found:
            entry.matched += 1
        return found

    def choose(self, matching: list[Demo], stream_seed: int, index: int) -> Demo | None:
        """The one of `matching` that sample `index` of a request shall say, None to sample freely.

        The choice has a random stream of its own, so it does not shift the sampler's.
        """
        given = sum(entry.p for entry in matching if entry.p is not None)
        open_entries = sum(entry.p is None for entry in matching)
        rest = max(0.0, 1.0 - given) / open_entries if open_entries else 0.0
        mark = random.Random(f"demo {stream_seed} {index}").random() * max(1.0, given)
        for entry in matching:
            mark -= rest if entry.p is None else entry.p
            if mark < 0:
                entry.said += 1
                return entry
        return None

    def tokens(self, entry: Demo, tokenizer: Any, end_id: int | None) -> list[int]:
        """Token ids of a completion with the end token; empty when the tokenizer loses text."""
        ids = tokenizer.encode(entry.say, add_special_tokens=False)
        if tokenizer.decode(ids) != entry.say:
            entry.problem = "the served model's tokenizer cannot write this completion"
            return []
        return ids if end_id is None else [*ids, end_id]

    def findings(self) -> list[str]:
        """What the user should know at the end of a run, by line number."""
        found = [f"line {e.line}: {e.problem}" for e in self.entries if e.problem]
        unmatched = [e for e in self.entries if not e.matched]
        return found + [f"line {e.line}: its `when` matched no prompt" for e in unmatched]


def read_demos(path: Path) -> Demos:
    """Parse a demonstrations file. Raises ValueError naming every wrong line and what is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    entries, wrong = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entries.append(parsed_line(number, line))
        except ValueError as error:
            wrong.append(f"line {number}: {error}")
    if wrong:
        raise ValueError(f"{path}: " + "; ".join(wrong[:10]))
    if not entries:
        raise ValueError(f"{path} holds no demonstration")
    return Demos(entries)


def parsed_line(number: int, line: str) -> Demo:
    """One demonstration. Raises ValueError with what is wrong in it."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, got {type(value).__name__}")
    unknown = sorted(set(value) - KNOWN_KEYS)
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}; known: when, say, p")
    say, p, when = value.get("say"), value.get("p"), value.get("when")
    if not isinstance(say, str) or not say:
        raise ValueError("say must be a completion, a string that is not empty")
    is_number = isinstance(p, (int, float)) and not isinstance(p, bool)
    if p is not None and not (is_number and 0 < p <= 1):
        raise ValueError(f"p must be above 0 and at most 1, got {p!r}")
    if when is not None and not isinstance(when, str):
        raise ValueError("when must be a pattern, a string")
    try:
        pattern = re.compile(when, re.DOTALL) if when is not None else None
    except re.error as error:
        raise ValueError(f"when is not a valid pattern: {error}") from None
    return Demo(number, pattern, say, None if p is None else float(p))
