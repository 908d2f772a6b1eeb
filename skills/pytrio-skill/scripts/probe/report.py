"""The probe's answers as `probe.json`, written whole after every question, and as a table."""

import json
from pathlib import Path
from typing import Any

from probe.decide import CANNOT_TELL, Verdict
from probe.questions import QUESTIONS, Question

SCHEMA = 1
# What must agree before a probe that was interrupted goes on.
IDENTITY = ("target", "model", "sdk_version")


class Report:
    """What is known so far; every change is on disk before it is acted upon."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file that is something else."""
        self.path = path
        self.content: dict[str, Any] = {"schema": SCHEMA, "answers": {}, "complete": False}
        if path.exists():
            try:
                self.content = json.loads(path.read_text(encoding="utf-8"))
                known_schema = self.content.get("schema")
            except (ValueError, AttributeError):
                known_schema = None
            if known_schema != SCHEMA:
                raise ValueError(f"{path} is no probe's file; give another --out")

    def begin(self, identity: dict[str, str], date: str) -> None:
        """Start, or go on. Raises ValueError when the file is another probe's."""
        for name in IDENTITY:
            known = self.content.get(name, identity[name])
            if known != identity[name]:
                raise ValueError(
                    f"{self.path} is a probe of {name} {known!r}, not {identity[name]!r}; "
                    "give another --out"
                )
        self.content.update(identity)
        self.content.setdefault("date", date)
        self.content.setdefault("tokens", {"prefill": 0, "sample": 0, "train": 0})
        self.write()

    @property
    def answers(self) -> dict[str, Any]:
        return self.content["answers"]

    def is_answered(self, question: Question) -> bool:
        """Whether a question need not be asked again: one that failed is."""
        return question.name in self.answers and not self.answers[question.name].get("failed")

    def spend(self, tokens: dict[str, int]) -> None:
        """Note tokens as spent, before they are: a killed probe must not forget them."""
        self.content["tokens"] = dict(tokens)
        self.write()

    def leave_behind(self, run: str | None) -> None:
        """Note a run whose checkpoints without expiry have to be deleted."""
        self.content["leftover_run"] = run
        self.write()

    def add(
        self, question: Question, verdict: Verdict, tokens: dict[str, int], failed: bool
    ) -> None:
        entry = {
            "answer": verdict.answer,
            "confidence": verdict.confidence,
            "asks": question.asks,
            "settles": question.settles,
            "evidence": verdict.evidence,
        }
        if failed:
            entry["failed"] = True
        self.answers[question.name] = entry
        self.spend(tokens)

    def write(self) -> None:
        """The whole file or the one before."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        text = json.dumps(self.content, indent=2, ensure_ascii=False, default=str)
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(self.path)


def shown(answer: Any) -> str:
    if isinstance(answer, list):
        return ", ".join("none" if part is None else str(part) for part in answer)
    if isinstance(answer, dict):
        return ", ".join(f"{name} {value}" for name, value in answer.items())
    return str(answer)


def table(content: dict[str, Any]) -> str:
    """Question, answer, confidence and what it settles, in the order of the questions."""
    lines = [f"{'question':<28}{'answer':<42}{'confidence':<12} settles"]
    for question in QUESTIONS:
        entry = content["answers"].get(question.name)
        if entry is None:
            continue
        answer = "-" if entry["confidence"] == CANNOT_TELL else shown(entry["answer"])
        settles = entry["settles"]
        if entry["confidence"] == CANNOT_TELL:
            settles = f"nothing: {entry['evidence'].get('reason', '')}"[:100]
        lines.append(f"{question.name:<28}{answer:<42}{entry['confidence']:<12} {settles}")
    spent = sum(content["tokens"].values())
    lines.append(
        f"{content['model']}, SDK {content['sdk_version']}, {content['target']}; {spent} tokens"
    )
    return "\n".join(lines)
