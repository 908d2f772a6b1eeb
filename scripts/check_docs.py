"""Is the text true: run its Python blocks; check its commands, names, links, budgets and parity.

    python scripts/check_docs.py            everything; exit 1 with file:line of what is wrong
    python scripts/check_docs.py --static   all but the running of Python blocks and commands
    python scripts/check_docs.py --cost     how many tokens an agent reads for each task

Every fenced `python` block runs by itself, with the real SDK on a real local backend, in a process
forked from one that has imported the heavy packages; then the static check reads it. A
`python fragment` is compiled and read only. Names are looked up in the installed SDK, in the
examples, in `--help` and in the tables of rules, never in a list of what exists.
"""

import argparse
import difflib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKILL = ROOT / "skills" / "pytrio-skill"
sys.path.insert(0, str(SKILL / "scripts"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: its threads spin
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from docs.budgets import check_budget, check_routing, cost_table, reading_costs  # noqa: E402
from docs.claims import check_files, check_links, check_metrics, check_rules  # noqa: E402
from docs.commands import check_flags, check_shell, kind_of, run_commands, shell_commands  # noqa: E402
from docs.pages import (  # noqa: E402
    COMMAND_SECONDS,
    EXECUTED,
    FRAGMENT,
    SHELL,
    Block,
    Page,
    Problem,
    last_lines,
    page_paths,
    parse_page,
)
from docs.running import (  # noqa: E402
    Worker,
    check_block_kinds,
    execute,
    program_of,
    python_blocks,
    run_problem,
    running_worker,
    static_problems,
    work,
)
from docs.sdk import check_sdk, fragment_problems, refutations  # noqa: E402


def check_parity(english: Page, chinese: Page) -> list[Problem]:
    """Both READMEs have the same commands, levels of headings and links."""
    found = []
    for what, of in (
        ("command", lambda page: [command.text for command in shell_commands(page)]),
        ("heading level", lambda page: [str(level) for _, level, _ in page.headings]),
        # An anchor is made of the heading's words.
        ("link", lambda page: sorted(link.partition("#")[0] for _, link in page.links)),
    ):
        ours, theirs = of(english), of(chinese)
        changes = [d for d in difflib.ndiff(ours, theirs) if d[0] in "+-"]
        # Each README links to the other.
        changes = [d for d in changes if d[2:] not in ("README.md", "README.zh-CN.md")]
        found += [
            Problem(chinese.path, 1, f"{what} {'only here' if d[0] == '+' else 'missing'}: {d[2:]}")
            for d in changes
        ]
    return found


def check_stamp() -> list[Problem]:
    """The API reference was made from the installed SDK."""
    script, page = ROOT / "scripts" / "gen_api_reference.py", SKILL / "references" / "api.md"
    missing = [path for path in (script, page) if not path.exists()]
    if missing:
        return [Problem(path, 1, "does not exist") for path in missing]
    done = subprocess.run(
        [sys.executable, str(script), "--check"],
        capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False,
    )  # fmt: skip
    last = "\n    ".join(last_lines(done.stdout + done.stderr))
    return [Problem(page, 1, last)] if done.returncode else []


PAGE_CHECKS: tuple[Callable[[Page], list[Problem]], ...] = (
    check_block_kinds, check_shell, check_links, check_files, check_flags, check_rules,
    check_metrics, check_sdk, check_budget, check_routing,
)  # fmt: skip


def block_problems(block: Block) -> list[Problem]:
    """What reading a Python block finds."""
    if block.info not in (EXECUTED, FRAGMENT):
        return []
    return static_problems(block) + (fragment_problems(block) if block.info == FRAGMENT else [])


def check_text(pages: Sequence[Page]) -> list[Problem]:
    """All that needs no running of blocks or commands."""
    found = [problem for page in pages for check in PAGE_CHECKS for problem in check(page)]
    for page in pages:
        for block in page.blocks:
            found += block_problems(block)
    return found


def check_readmes(pages: Sequence[Page]) -> list[Problem]:
    """There are two READMEs, and they say the same."""
    by_path = {page.path: page for page in pages}
    english, chinese = ROOT / "README.md", ROOT / "README.zh-CN.md"
    missing = [path for path in (english, chinese) if path not in by_path]
    if missing:
        return [Problem(path, 1, "does not exist") for path in missing]
    return check_parity(by_path[english], by_path[chinese])


def check_running(pages: Sequence[Page], worker: Worker) -> list[Problem]:
    """Run every block; run what must fail."""
    blocks = [block for page in pages for block in python_blocks(page)]
    wrong = refutations(pages)
    runs = worker.run([*map(program_of, blocks), *wrong.values()])
    found = [
        problem
        for block, run in zip(blocks, runs, strict=False)
        for problem in run_problem(block, run)
    ]
    for text, run in zip(wrong, runs[len(blocks) :], strict=True):
        if run.status == 0:
            found.append(Problem(SKILL / "SKILL.md", 1, f"{text} works, and is said not to"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--static", action="store_true", help="run nothing")
    parser.add_argument("--cost", action="store_true", help="print what each task costs to read")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--program", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    if options.program:
        return execute(options.program)
    pages = [parse_page(path) for path in page_paths()]
    if options.cost:
        print(cost_table(reading_costs(next(p for p in pages if p.path.name == "SKILL.md"))))
        return 0
    found = check_text(pages) + check_readmes(pages) + check_stamp()
    kinds = [block.info for page in pages for block in page.blocks]
    ran = 0
    if not options.static:
        ran, failed = run_commands(pages)
        found += failed
        try:
            with running_worker() as worker:
                found += check_running(pages, worker)
        except RuntimeError as error:
            raise SystemExit(f"the blocks cannot be run: {error}") from None
    for problem in sorted(found, key=lambda p: (str(p.page), p.line)):
        print(problem)
    commands = [kind_of(command) for page in pages for command in shell_commands(page)]
    count = Counter(kind.kind for kind in commands if kind)
    print(
        f"{len(pages)} pages; python blocks: {kinds.count(EXECUTED)} "
        f"{'not ' if options.static else ''}executed, {kinds.count(FRAGMENT)} fragments checked; "
        f"shell blocks: {kinds.count(SHELL)} with {count['checked']} commands checked "
        f"({ran} executed), {count['declared']} declared; {len(found)} problems"
    )
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
