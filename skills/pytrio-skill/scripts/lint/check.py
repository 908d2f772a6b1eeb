"""Check one source text against the rules. The text is parsed, never imported or run."""

import io
import re
import tokenize
from dataclasses import dataclass

from lint.flow import Code
from lint.rules import RULES

SUPPRESSION = re.compile(r"#\s*trio:\s*allow\s+(C\d\d)\b[\s:,-]*(.*)$")


@dataclass(frozen=True)
class Finding:
    """One thing to change, at a place in the source."""

    code: str
    name: str
    severity: str
    line: int
    column: int
    message: str
    fix: str
    reference: str


@dataclass(frozen=True)
class Suppression:
    """`# trio: allow C07 <reason>`; `applies` is the line it speaks about."""

    line: int
    column: int
    applies: int
    code: str
    reason: str


def check_source(source: str, filename: str) -> list[Finding]:
    """Findings of all rules, by line. A file that does not import pytrio has none.

    Raises SyntaxError when the source does not parse.
    """
    code = Code(source, filename)
    if not code.used_trio:
        return []
    found: dict[tuple[str, int, int, str], tuple[Finding, range]] = {}
    for rule in RULES:
        for hit in rule.find(code):
            line = getattr(hit.node, "lineno", 1)
            column = getattr(hit.node, "col_offset", 0) + 1
            finding = Finding(
                code=rule.code,
                name=rule.name,
                severity=hit.severity or rule.severity,
                line=line,
                column=column,
                message=hit.message,
                fix=hit.fix,
                reference=rule.reference,
            )
            # A comment may stand on any line of an expression that has several.
            lines = range(line, (getattr(hit.node, "end_lineno", None) or line) + 1)
            found.setdefault((rule.code, line, column, hit.message), (finding, lines))
    return sorted(
        suppressed(list(found.values()), suppressions(source)),
        key=lambda finding: (finding.line, finding.column, finding.code),
    )


def suppressions(source: str) -> list[Suppression]:
    """All suppressing comments; one alone on its line speaks about the next line of code."""
    found = []
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        match = SUPPRESSION.search(token.string) if token.type == tokenize.COMMENT else None
        if match is None:
            continue
        line, column = token.start
        applies = line
        if not token.line[:column].strip():
            applies = next(
                (
                    number
                    for number in range(line + 1, len(lines) + 1)
                    if lines[number - 1].strip() and not lines[number - 1].strip().startswith("#")
                ),
                line,
            )
        found.append(Suppression(line, column + 1, applies, match[1], match[2].strip()))
    return found


def suppressed(found: list[tuple[Finding, range]], comments: list[Suppression]) -> list[Finding]:
    """What is left after suppression, and a warning for every comment that is not in order."""
    used: set[Suppression] = set()
    kept = []
    for finding, lines in found:
        matching = [
            c
            for c in comments
            if c.code == finding.code and (c.applies == finding.line or c.line in lines)
        ]
        used |= set(matching)
        if not any(comment.reason for comment in matching):
            kept.append(finding)
    rule = RULES[0]
    for comment in comments:
        if not comment.reason:
            message = f"the suppression of {comment.code} gives no reason, so it does not count"
            fix = f"write why: # trio: allow {comment.code} <reason>"
        elif comment not in used:
            message = f"nothing on this line is a finding {comment.code}"
            fix = "delete the comment"
        else:
            continue
        kept.append(
            Finding(
                rule.code, rule.name, rule.severity, comment.line, comment.column,
                message, fix, rule.reference,
            )
        )  # fmt: skip
    return kept
