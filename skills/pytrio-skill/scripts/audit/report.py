"""The audit as a table for people and as `audit.json` for programs.

`audit.json` has `schema` 1: `verdict` (clean, warnings or errors), `findings`, `numbers`, `tokens`,
`estimate`, `cannot_tell`. Fields may be added under the same schema number, not changed.
"""

import json
import textwrap
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from audit.findings import PLACES_KEPT, Finding, plural, printable
from audit.joins import Joined

SCHEMA = 1
WIDTH = 100
MAX_LINES = 60
SEEN_LENGTH = 4 * WIDTH
TOKEN_CLASSES = ("prefill", "sample", "train")
# What no dry run knows, and the questions of a probe whose answers (`--like`) settle it.
LOSS_QUESTIONS = (
    "reduction.cross_entropy", "reduction.importance_sampling", "reduction.ppo",
    "reduction.cispo", "reduction.dro", "clip.ppo", "clip.cispo",
)  # fmt: skip
CANNOT_TELL = {
    "what the cloud divides losses by, and its default clip": LOSS_QUESTIONS,
    "how far the cloud's sampler and trainer differ numerically": ("mismatch",),
    "how well, how fast and at what price the real model learns": (),  # no probe asks that
}


@dataclass(frozen=True)
class Budget:
    """What a full run is estimated from: its steps, and prices per million tokens."""

    steps: int | None = None
    prices: tuple[float, float, float] | None = None


def token_counts(joined: Joined) -> dict[str, int]:
    """Tokens by the class in which they are billed."""
    calls, requests = joined.trace.calls, joined.trace.requests
    forward = sum(len(d.inputs) for c in calls if not c.is_backward for d in c.data)
    return {
        "prefill": sum(len(r.prompt) for r in requests) + forward,
        "sample": sum(len(s.tokens) for r in requests for s in r.sequences),
        "train": sum(len(d.inputs) for c in calls if c.is_backward for d in c.data),
    }


def estimate_of(joined: Joined, budget: Budget) -> dict[str, Any] | None:
    """Tokens and cost of a run of `budget.steps` steps, in proportion to this one."""
    done = len(joined.trace.steps)
    if not done or (budget.steps is None and budget.prices is None):
        return None
    steps = budget.steps or done
    tokens = {name: round(n * steps / done) for name, n in token_counts(joined).items()}
    cost = None
    if budget.prices is not None:
        parts = zip(TOKEN_CLASSES, budget.prices, strict=True)
        cost = sum(tokens[name] / 1e6 * price for name, price in parts)
    return {"steps": steps, "tokens": tokens, "cost": cost}


def numbers_of(joined: Joined) -> dict[str, Any]:
    """What is worth knowing about a run that is right."""
    trace = joined.trace
    losses = [c.metrics.get("loss_mean") for c in trace.calls if c.is_backward]
    groups = [g for g in joined.groups if len(g.members) > 1]
    third = max(1, len(groups) // 3)
    ordered = sorted(groups, key=lambda g: g.step)
    sampled = joined.rollouts
    stops = Counter(s.stop_reason for s in sampled)
    return {
        "training_runs": len(trace.runs),
        "optimizer_steps": len(trace.steps),
        "calls": {
            kind: sum(c.kind == kind for c in trace.calls)
            for kind in ("sft", "policy", "custom", "score")
        },
        "sampling_requests": len(trace.requests),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "groups": len(groups),
        "groups_degenerate": sum(g.is_degenerate for g in groups),
        "degenerate_first_third": mean_or_none([g.is_degenerate for g in ordered[:third]]),
        "degenerate_last_third": mean_or_none([g.is_degenerate for g in ordered[-third:]]),
        "stop_reasons": dict(stops),
        "completion_tokens_mean": mean_or_none([len(s.tokens) for s in sampled]),
    }


def mean_or_none(values: list) -> float | None:
    return round(float(np.mean(values)), 4) if values else None


def verdict_of(findings: list[Finding]) -> str:
    severities = {f.rule.severity for f in findings if f.counts}
    if "error" in severities:
        return "errors"
    return "warnings" if "warning" in severities else "clean"


def as_json(joined: Joined, findings: list[Finding], budget: Budget) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "verdict": verdict_of(findings),
        "complete": joined.trace.is_complete,
        "sdk_version": joined.trace.header.get("sdk_version"),
        "findings": [finding.as_json() for finding in findings],
        "numbers": numbers_of(joined),
        "tokens": token_counts(joined),
        "estimate": estimate_of(joined, budget),
        "cannot_tell": cannot_tell(joined.trace.header.get("like", ())),
    }


def cannot_tell(settled: Collection[str]) -> list[str]:
    """What stays unknown when a probe has settled these questions."""
    is_settled = {what: asked and set(asked) <= set(settled) for what, asked in CANNOT_TELL.items()}
    return [what for what, settled_by_probe in is_settled.items() if not settled_by_probe]


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write the whole file or none of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def as_text(joined: Joined, findings: list[Finding], budget: Budget) -> str:
    """The table: findings first, the worst on top, within MAX_LINES lines."""
    foot = footer(joined, budget, findings)
    blocks = [block(finding) for finding in findings if finding.rule.severity != "info"]
    blocks += [
        block(finding, brief=True) for finding in findings if finding.rule.severity == "info"
    ]
    room = MAX_LINES - len(foot) - 1
    # First leave out places, then whole findings; audit.json has everything.
    if sum(map(len, blocks)) > room:
        blocks = [block(finding, brief=True) for finding in findings]
    lines: list[str] = []
    for number, lines_of_one in enumerate(blocks):
        if len(lines) + len(lines_of_one) > room - 1:
            lines.append(f"... and {plural(len(blocks) - number, 'more finding')} in audit.json")
            break
        lines += lines_of_one
    return "\n".join([*lines, *foot])


def block(finding: Finding, brief: bool = False) -> list[str]:
    """The lines of one finding."""
    rule = finding.rule
    seen = shorten(printable(finding.seen), SEEN_LENGTH)
    head = f"{rule.severity:<7} {rule.name}: {seen}"
    if finding.accepted is not None:
        head = f"accepted {rule.name} ({finding.accepted}): {seen}"
    lines = textwrap.wrap(head, WIDTH, subsequent_indent=" " * 8)
    if finding.accepted is not None:
        return lines[:2]
    if not brief:
        for place in finding.places[:2]:
            lines.append(shorten(f"        at {place}"))
    lines += textwrap.wrap(
        f"{'note' if rule.severity == 'info' else 'fix'}: {rule.fix} ({rule.reference})",
        WIDTH,
        initial_indent=" " * 8,
        subsequent_indent=" " * 8,
        break_on_hyphens=False,
    )
    return lines


def shorten(line: str, length: int = WIDTH) -> str:
    return line if len(line) <= length else line[: length - 3] + "..."


def footer(joined: Joined, budget: Budget, findings: list[Finding]) -> list[str]:
    numbers, tokens = numbers_of(joined), token_counts(joined)
    calls = ", ".join(f"{n} {kind}" for kind, n in numbers["calls"].items() if n) or "none"
    scores = sum(request.is_score for request in joined.trace.requests)
    lines = [
        f"calls   {calls}; {plural(numbers['optimizer_steps'], 'optimiser step')}, "
        + plural(numbers["sampling_requests"], "sampling request")
        + (f" ({scores} to score)" if scores else ""),
    ]
    if numbers["loss_first"] is not None:
        lines.append(
            f"loss    loss_mean first {numbers['loss_first']:.4f}, last {numbers['loss_last']:.4f}"
            + (" (of custom losses their linear stand-in's)" if numbers["calls"]["custom"] else "")
        )
    if numbers["groups"]:
        lines.append(
            f"groups  {numbers['groups']}, {numbers['groups_degenerate']} of them degenerate: "
            f"{numbers['degenerate_first_third']:.0%} in the first third, "
            f"{numbers['degenerate_last_third']:.0%} in the last"
        )
    if numbers["stop_reasons"]:
        stops = ", ".join(f"{name} {n}" for name, n in sorted(numbers["stop_reasons"].items()))
        lines.append(f"sampled {stops}; {numbers['completion_tokens_mean']:.0f} tokens on average")
    lines.append("tokens  " + ", ".join(f"{name} {n:,}" for name, n in tokens.items()))
    estimate = estimate_of(joined, budget)
    if estimate:
        shown = ", ".join(f"{name} {n:,}" for name, n in estimate["tokens"].items())
        cost = ""
        if estimate["cost"] is not None:
            cost = f"; about {estimate['cost']:,.2f} in the currency of --price"
        lines.append(f"full    {estimate['steps']:,} steps like these, in stand-in tokens{cost}:")
        lines.append(f"        {shown}")
    count = Counter(f.rule.severity for f in findings if f.counts)
    accepted = [f for f in findings if not f.counts]
    lines.append(
        f"audit   {verdict_of(findings)}: {plural(count['error'], 'error')}, "
        + plural(count["warning"], "warning")
        + (f", {len(accepted)} accepted" if accepted else "")
    )
    return lines


def limited(findings: list[Finding]) -> list[Finding]:
    """Findings with as many places as are worth keeping."""
    return [Finding(f.rule, f.seen, f.places[:PLACES_KEPT], f.count, f.accepted) for f in findings]
