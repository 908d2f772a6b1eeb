"""What a rule reports, and the words it uses for places."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from audit.trace import Call, Chat, Datum

SEVERITIES = ("error", "warning", "info")
PLACES_KEPT = 5
TOKENS_AROUND = 6


@dataclass(frozen=True)
class Rule:
    """One entry of the table in rules.py. `code` groups related rules: A01, A02, ..."""

    name: str
    severity: str
    condition: str
    fix: str
    reference: str

    @property
    def code(self) -> str:
        return self.name.partition("-")[0]


@dataclass(frozen=True)
class Place:
    """Where something was seen. `position` is the index of a target, `text` the tokens around."""

    call: int | None = None
    datum: int | None = None
    position: int | None = None
    request: int | None = None
    text: str = ""

    def __str__(self) -> str:
        named = [
            f"{what} {value}"
            for what, value in (
                ("call", self.call),
                ("datum", self.datum),
                ("position", self.position),
                ("request", self.request),
            )
            if value is not None
        ]
        return ", ".join(named) + (f": {self.text}" if self.text else "")


@dataclass(frozen=True)
class Hit:
    """One thing a check has seen: the rule's name, a sentence with numbers, and where."""

    rule: str
    seen: str
    places: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A rule with everything that was seen of it in one run."""

    rule: Rule
    seen: str
    places: tuple[Place, ...] = ()
    count: int = 1
    accepted: str | None = None

    @property
    def counts(self) -> bool:
        """Whether it decides about the exit code."""
        return self.accepted is None

    def as_json(self) -> dict[str, Any]:
        return {
            "code": self.rule.code,
            "name": self.rule.name,
            "severity": self.rule.severity,
            "seen": self.seen,
            "fix": self.rule.fix,
            "reference": self.rule.reference,
            "count": self.count,
            "accepted": self.accepted,
            "places": [
                {key: value for key, value in vars(place).items() if value not in (None, "")}
                for place in self.places
            ],
        }


def accept(finding: Finding, reason: str) -> Finding:
    """The same finding, marked as intended by the user."""
    return replace(finding, accepted=reason)


@dataclass
class Decoder:
    """Token ids to text, with the tokenizer in a model's folder; without one, ids."""

    folder: str

    @cached_property
    def _tokenizer(self) -> Any:
        path = Path(self.folder) / "tokenizer.json"
        try:
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(path))
        except Exception:  # the library raises plain Exception for a missing file
            return None

    def text(self, ids: np.ndarray | Sequence[int]) -> str:
        known = [int(i) for i in ids if i >= 0]
        if self._tokenizer is None:
            return " ".join(map(str, known))
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def bare_text(self, ids: np.ndarray) -> str:
        """Text without what a tokenizer's decode may drop or keep at the end."""
        text = self.text(ids)
        for end in ("<|im_end|>", "<|endoftext|>"):
            text = text.replace(end, "")
        return text.strip()

    def around(self, ids: np.ndarray, index: int, length: int = 1) -> str:
        """The tokens `index` to `index + length` between marks, with some before and after."""
        before = self.text(ids[max(0, index - TOKENS_AROUND) : index])
        marked = self.text(ids[index : index + length])
        after = self.text(ids[index + length : index + length + TOKENS_AROUND])
        return printable(f"{before}>>{marked}<<{after}")


@dataclass
class Decoders:
    """One decoder a model folder."""

    chats: dict[str, Chat]
    _by_folder: dict[str, Decoder] = field(default_factory=dict)

    def of(self, folder: str) -> Decoder:
        return self._by_folder.setdefault(folder, Decoder(folder))


def target_place(
    call: Call, datum: Datum, position: int, decoder: Decoder, length: int = 1
) -> Place:
    """A place that shows targets from `position` on, in their sequence."""
    sequence = np.append(datum.inputs, datum.targets[-1:])
    return Place(
        call=call.number,
        datum=datum.number,
        position=int(position),
        text=decoder.around(sequence, int(position) + 1, length),
    )


def printable(text: str) -> str:
    """Text on one line, without characters that a terminal would act on."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def plural(count: int, what: str) -> str:
    """`1 datum`, `3 data`."""
    irregular = {"datum": "data"}
    return f"{count} {what if count == 1 else irregular.get(what, what + 's')}"
