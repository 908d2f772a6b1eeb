#!/usr/bin/env python3
"""Draw the README's terminal picture from two real dry runs: the quickstart, and a wrong copy.

    python scripts/terminal_picture.py            writes docs/dry-run.svg

The wrong copy differs in one word: the weights are not shifted with the targets. Nothing in the
picture is typed in except the prompts; the iterations between the first and the last are cut.
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
SKILL = ROOT / "skills" / "pytrio-skill"
PICTURE = ROOT / "docs" / "dry-run.svg"
COLUMNS = 112
RIGHT, WRONG = "weights[1:]", "weights[:-1]"
CUT_AFTER = 2  # iterations shown at the beginning
STYLES = {
    "$": "bold",
    "error": "bold red",
    "audit   clean": "bold green",
    "audit   errors": "bold red",
    "...": "dim",
}
# Only what every viewer has: no fonts from elsewhere, no script.
FRAME = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>Two dry runs</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def dry_run(script: Path, folder: Path) -> list[str]:
    """Lines of a dry run, the middle iterations cut; without the path of its recording."""
    command = [sys.executable, str(SKILL / "scripts" / "dryrun.py"), "run", str(script)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "COLUMNS": str(COLUMNS - 4)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 2):
        raise SystemExit(done.stdout)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("dryrun: ")]
    middle = [n for n, line in enumerate(lines) if line.startswith("iteration")][CUT_AFTER:-1]
    return [*lines[: middle[0]], "...", *lines[middle[-1] + 1 :]]


def both_runs() -> list[str]:
    """The picture's lines."""
    quickstart = SKILL / "examples" / "quickstart_sft.py"
    text = quickstart.read_text(encoding="utf-8")
    assert text.count(RIGHT) == 1, "the quickstart has changed: choose another mistake"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "wrong.py").write_text(text.replace(RIGHT, WRONG), encoding="utf-8")
        return [
            "$ dryrun.py run quickstart_sft.py",
            *dry_run(quickstart, folder),
            "",
            f'$ sed "s/{re.escape(RIGHT)}/{WRONG}/" quickstart_sft.py > wrong.py',
            "$ dryrun.py run wrong.py",
            *dry_run(folder / "wrong.py", folder),
        ]


def picture(lines: list[str]) -> str:
    """The lines as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in lines:
        style = next((style for start, style in STYLES.items() if line.startswith(start)), "")
        console.print(Text(line, style=style), highlight=False, soft_wrap=False)
    drawn = console.export_svg(
        title="dryrun.py", theme=MONOKAI, code_format=FRAME, unique_id="dry-run"
    )
    return "".join(line.rstrip() + "\n" for line in drawn.splitlines() if line.strip())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(picture(both_runs()), encoding="utf-8", newline="\n")
    print(options.output)


if __name__ == "__main__":
    main()
