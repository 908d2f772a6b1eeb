"""The probe's answers as `probe.json`, written whole after every question, and as a table."""

import json
import re
from pathlib import Path
from typing import Any

from probe.cost import CLASSES
from probe.decide import CANNOT_TELL, Verdict
from probe.questions import QUESTIONS, Question

SCHEMA = 1
# What must agree before a probe that was interrupted goes on.
IDENTITY = ("target", "model", "sdk_version")
ENTRY = {"answer", "confidence", "settles", "evidence"}


class ReportError(ValueError):
    """The report cannot be kept: nothing more may be asked. In one line."""


def is_report(content: Any) -> bool:
    """Whether a file's content has the form that `Report` writes: a probe goes on from it, and
    counts the tokens it names as spent."""
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        return False
    answers, tokens = content.get("answers"), content.get("tokens", dict.fromkeys(CLASSES, 0))
    return (
        isinstance(answers, dict)
        and all(isinstance(e, dict) and ENTRY <= set(e) for e in answers.values())
        and all(isinstance(e["evidence"], dict) for e in answers.values())
        and isinstance(tokens, dict)
        and set(tokens) == set(CLASSES)
        and all(type(n) is int and n >= 0 for n in tokens.values())
        and all(isinstance(content.get(name, ""), str) for name in IDENTITY)
        and re.fullmatch(r"[\w-]*", content.get("leftover_run") or "") is not None
    )


class Report:
    """What is known so far; every change is on disk before it is acted upon."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file that is something else."""
        self.path = path
        self.content: dict[str, Any] = {"schema": SCHEMA, "answers": {}, "complete": False}
        try:
            self.content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except OSError as error:
            raise ValueError(f"--out {path}: cannot read it: {error.strerror}") from None
        except (ValueError, RecursionError):
            self.content = {}
        if not is_report(self.content):
            raise ValueError(f"{path} is no probe's file, or a damaged one; give another --out")

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
        """The whole file or the one before. Raises ReportError when it cannot be written."""
        text = json.dumps(self.content, indent=2, ensure_ascii=False, default=str)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(self.path)
        except OSError as error:
            raise ReportError(f"--out {self.path}: cannot write it: {error.strerror}") from None


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
            reason = " ".join(str(entry["evidence"].get("reason", "")).split())
            settles = f"nothing: {reason}"[:100]
        lines.append(f"{question.name:<28}{answer:<41} {entry['confidence']:<12} {settles}")
    spent = sum(content["tokens"].values())
    lines.append(
        f"{content['model']}, SDK {content['sdk_version']}, {content['target']}; {spent} tokens"
    )
    return "\n".join(lines)
