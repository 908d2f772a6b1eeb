"""Lengths in lines and tokens, the cost of reading for each task, and README parity."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from docs.pages import SKILL, Page, Problem

MAX_ROUTER_LINES, MAX_ROUTER_TOKENS = 200, 2_500
MAX_NOTE_LINES, MAX_TASK_TOKENS = 250, 7_000
# Looked things up in, not read from top to bottom.
UNBOUNDED_NOTES = ("api.md",)


CJK = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]")


def token_count(text: str) -> int:
    """Tokens of a text, rather too many than too few.

    A Chinese character or a digit is one, of the rest 3.2 characters are one. Compared with three
    vocabularies that come in packages (anthropic 0.38, dashscope's qwen.tiktoken, mistral-common's
    tekken) on all English pages and examples, the count is 1 to 24 % above the largest of them.
    """
    single = len(CJK.findall(text)) + len(re.findall(r"[0-9]", text))
    return round((len(text) - single) / 3.2 + single)


@dataclass(frozen=True)
class Cost:
    """What an agent reads for one row of the routing table, in tokens; 0 where there is nothing."""

    line: int
    task: str
    note: str
    example: str
    router_tokens: int
    note_tokens: int
    example_tokens: int


def reading_costs(router: Page) -> list[Cost]:
    """One entry for each row of the two routing tables; of several examples the first is read."""
    found = []
    for line, row in router.rows:
        cells = {title.split()[0].lower(): cell for title, cell in row.items() if title}
        task = cells.get("task", cells.get("when"))
        note = re.search(r"references/[\w-]+\.md", cells.get("note", cells.get("read", "")))
        example = re.search(r"examples/[\w-]+\.py", cells.get("example", ""))
        if task is None or note is None:
            continue
        found.append(
            Cost(
                line,
                task,
                note[0],
                example[0] if example else "",
                token_count(router.text),
                tokens_of(note[0]),
                tokens_of(example[0] if example else ""),
            )
        )
    return found


def tokens_of(name: str) -> int:
    """Tokens of a file of the skill, 0 where there is none."""
    path = SKILL / name
    return token_count(path.read_text(encoding="utf-8")) if path.is_file() else 0


def cost_table(costs: Sequence[Cost]) -> str:
    """The costs as a Markdown table."""
    lines = [
        "| Task | SKILL.md | note | SKILL.md + note | example | total |",
        "|---|---|---|---|---|---|",
    ]
    for cost in costs:
        both = cost.router_tokens + cost.note_tokens
        lines.append(
            f"| {cost.task} | {cost.router_tokens} | {cost.note_tokens} | {both} | "
            f"{cost.example_tokens} | {both + cost.example_tokens} |"
        )
    return "\n".join(lines)


def check_budget(page: Page) -> list[Problem]:
    """Lines of a note; lines and tokens of the router, and of the router with each note."""
    count = len(page.lines)
    if page.path.parent.name == "references":
        bound = None if page.path.name in UNBOUNDED_NOTES else MAX_NOTE_LINES
        if bound and count > bound:
            return [Problem(page.path, count, f"{count} lines, allowed are {bound}")]
        return []
    if page.path.name != "SKILL.md":
        return []
    found = []
    if count > MAX_ROUTER_LINES:
        found.append(Problem(page.path, count, f"{count} lines, allowed are {MAX_ROUTER_LINES}"))
    tokens = token_count(page.text)
    if tokens > MAX_ROUTER_TOKENS:
        found.append(Problem(page.path, 1, f"{tokens} tokens, allowed are {MAX_ROUTER_TOKENS}"))
    for cost in reading_costs(page):
        both = cost.router_tokens + cost.note_tokens
        if both > MAX_TASK_TOKENS and Path(cost.note).name not in UNBOUNDED_NOTES:
            text = f"SKILL.md and {cost.note} are {both} tokens, allowed are {MAX_TASK_TOKENS}"
            found.append(Problem(page.path, cost.line, text))
    return found


def check_routing(page: Page) -> list[Problem]:
    """The router names every note and every example."""
    if page.path.name != "SKILL.md":
        return []
    files = [*(SKILL / "references").glob("*.md"), *(SKILL / "examples").glob("*.py")]
    wanted = sorted(f"{path.parent.name}/{path.name}" for path in files)
    return [Problem(page.path, 1, f"does not name {w}") for w in wanted if w not in page.text]
