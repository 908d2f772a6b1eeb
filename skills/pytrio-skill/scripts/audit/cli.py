"""The audit of one recording, from its file to the table, `audit.json` and a verdict."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from audit.findings import Finding, accept
from audit.joins import Joined
from audit.report import Budget, as_json, as_text, limited
from audit.rules import RULES, findings_of
from audit.trace import TraceError, read_trace

CODES = {rule.code for rule in RULES.values()}


def parse_accepted(texts: Sequence[str]) -> dict[str, str]:
    """`A05=one step off-policy on purpose` -> {"A05": "..."}; raises ValueError in one line."""
    accepted = {}
    for text in texts:
        name, separator, reason = text.partition("=")
        if not separator or not reason.strip() or not text.isprintable():
            raise ValueError(f"takes RULE=REASON, got {text!r}")
        known = next((rule for rule in (*RULES, *CODES) if rule.lower() == name.lower()), None)
        if known is None:
            raise ValueError(f"no rule {name!r}; rules are named such as A05 or A05-lag")
        accepted[known] = reason.strip()
    return accepted


def parse_prices(text: str) -> tuple[float, float, float]:
    """`0.1,0.4,1.2` -> prices of a million prefill, sample and train tokens; raises ValueError."""
    try:
        prefill, sample, train = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"takes three prices per million tokens, PREFILL,SAMPLE,TRAIN, got {text!r}"
        ) from None
    if not all(0 <= price < 1e9 for price in (prefill, sample, train)):
        raise ValueError(f"takes prices of 0 or more, got {text!r}")
    return prefill, sample, train


def with_accepted(findings: list[Finding], accepted: dict[str, str]) -> list[Finding]:
    marked = []
    for finding in findings:
        reason = accepted.get(finding.rule.name) or accepted.get(finding.rule.code)
        marked.append(accept(finding, reason) if reason else finding)
    return marked


def audit(
    path: Path, accepted: dict[str, str], budget: Budget, sessions: Collection[int] = ()
) -> tuple[str, dict[str, Any]]:
    """(table, content of audit.json) of a recording or of some of its sessions, counted from 1.

    Raises TraceError.
    """
    trace = read_trace(path, sessions)
    try:
        joined = Joined(trace)
        findings = limited(with_accepted(findings_of(joined), accepted))
        return as_text(joined, findings, budget), as_json(joined, findings, budget)
    except Exception as error:  # a user gets a line, whatever a damaged file holds
        raise TraceError(
            f"{trace.path} cannot be audited ({type(error).__name__}: {error}): it is damaged, or "
            "this is a defect of the audit"
        ) from error
