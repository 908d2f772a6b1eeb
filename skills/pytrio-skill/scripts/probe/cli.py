"""Ask all questions of one service, in the process that holds the SDK's client."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from probe.ask_state import delete_unlimited
from probe.cost import ATTEMPTS, CLASSES
from probe.decide import HIGH, Verdict, cannot_tell
from probe.measure import Lab, Meter, OutOfBound, OutOfBudget
from probe.questions import QUESTIONS, Question
from probe.report import Report, ReportError, table
from trio_local.catalogue import parameter_billions

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
FORBIDDEN_STATUS = 96  # as guard/sitecustomize.py


@dataclass(frozen=True)
class ProbeOptions:
    """What the command line says."""

    out: Path
    target: str  # "cloud", or "local" with what was set
    model: str | None = None
    max_tokens: int = 60_000
    only: tuple[str, ...] = ()


def chosen_questions(only: Sequence[str]) -> list[Question]:
    """The questions whose names begin with one of these; all without any. Raises ValueError."""
    for prefix in only:
        if not any(question.name.startswith(prefix) for question in QUESTIONS):
            known = ", ".join(question.name for question in QUESTIONS)
            raise ValueError(f"no question {prefix!r}; known: {known}")
    return [q for q in QUESTIONS if not only or q.name.startswith(tuple(only))]


def forbid_all_but_loopback() -> None:
    """End this process at the first attempt to talk to another machine."""

    def hook(event: str, arguments: Any) -> None:
        if event == "socket.getaddrinfo":
            host = arguments[0]
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            host = arguments[1][0]
        else:
            return
        name = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host or "")
        if name not in LOOPBACK_HOSTS:
            sys.stderr.write(f"dryrun: stopped: a local probe tried to reach {name}\n")
            sys.stderr.flush()
            os._exit(FORBIDDEN_STATUS)

    sys.addaudithook(hook)


def smallest_model(service: Any) -> str:
    """The model with the fewest parameters in its name that can be trained and sampled.

    Raises ValueError when there is none.
    """
    models = service.get_server_capabilities().supported_models
    usable = [m.model_name for m in models if m.training.available and m.sampling.available]
    if not usable:
        raise ValueError("this workspace has no model that can be trained and sampled")
    return min(usable, key=lambda name: (parameter_billions(name) or float("inf"), name))


def ask_all(
    service: Any,
    options: ProbeOptions,
    questions: Sequence[Question],
    say: Callable[[str], None],
) -> Report:
    """Ask what has not been answered yet; the report is on disk after every answer."""
    report = Report(options.out)
    model = options.model or report.content.get("model") or smallest_model(service)
    if options.target == "cloud" and model not in service.get_supported_models():
        known = ", ".join(service.get_supported_models())
        raise ValueError(f"--model-name: the workspace has no {model!r}; known: {known}")
    identity = {"target": options.target, "model": model, "sdk_version": version("pytrio")}
    report.begin(identity, date.today().isoformat())
    meter = Meter(options.max_tokens, spent=dict(report.content["tokens"]))
    lab = Lab(service, model, meter)
    lab.leave_behind = report.leave_behind
    if report.content.get("leftover_run"):
        delete_unlimited(lab, report.content["leftover_run"])
        report.leave_behind(None)
    for question in questions:
        if report.is_answered(question):
            note(lab, question, report)
            continue
        verdict, failed = attempt(lab, question, report)
        report.add(question, verdict, meter.spent, failed)
        note(lab, question, report)
        say(f"{question.name}: {verdict.answer} ({verdict.confidence})")
    report.content["complete"] = all(map(report.is_answered, QUESTIONS))
    report.write()
    return report


def note(lab: Lab, question: Question, report: Report) -> None:
    """Keep a sure answer for the questions that build on it."""
    entry = report.answers[question.name]
    if entry["confidence"] == HIGH:
        lab.notes[question.name] = entry["answer"]


def attempt(lab: Lab, question: Question, report: Report) -> tuple[Verdict, bool]:
    """Ask a question, once more when that fails; whether it is to be asked again another time."""
    reason = ""
    for _ in range(ATTEMPTS):
        bound = dict(zip(CLASSES, question.bound, strict=True))
        lab.meter.allowance = dict(bound)
        report.spend({name: lab.meter.spent[name] + bound[name] for name in CLASSES})
        try:
            return question.ask(lab), False
        except (OutOfBudget, OutOfBound) as error:
            lab.forget()
            return cannot_tell(str(error)), isinstance(error, OutOfBudget)
        except ReportError:
            raise
        except Exception as error:  # whatever a service does, the other questions are asked
            lab.forget()
            reason = f"{type(error).__name__}: {error}"[:300]
    return cannot_tell(reason), True


def ask(options: ProbeOptions, base_url: str, say: Callable[[str], None]) -> int:
    """The asking process: 0 when all was asked, 1 when something failed.

    Raises ValueError in one line for a mistake of the command line.
    """
    is_local = options.target != "cloud"
    if is_local:
        if urlsplit(base_url).hostname not in LOOPBACK_HOSTS:
            raise ValueError(f"a local probe talks to 127.0.0.1 only, not to {base_url!r}")
        forbid_all_but_loopback()
    import pytrio as trio

    # An address that does not answer is told after a minute, not after the SDK's 15.
    trio.configure(control_retry_timeout_seconds=60)
    if is_local:
        trio.configure(actor_capacity_poll_interval_seconds=1.0)
    questions = chosen_questions(options.only)
    try:
        report = ask_all(trio.ServiceClient(), options, questions, say)
    except trio.PyTrioError as error:
        say(f"the service cannot be asked: {error}")
        return 1
    print(table(report.content))
    failed = [q.name for q in questions if not report.is_answered(q)]
    if failed:
        say(
            f"not answered: {', '.join(failed)}; the same command asks them again, with a larger "
            "--max-tokens-total where that was reached"
        )
    say(f"answers and evidence: {options.out}; use them with: dryrun.py run --like {options.out}")
    return 1 if failed else 0
