#!/usr/bin/env python3
"""A stand-in for an agent, to test the harness: it copies a task's known solution, or nothing.

    python dummy_agent.py reference|wrong|nothing|sleep PROMPT_FILE WORKDIR

It finds the task by the words of the prompt. `sleep` never ends.
"""

import json
import sys
import time
from pathlib import Path

from tasks import Task, load_tasks


def task_of(prompt_file: Path) -> Task:
    """The task whose prompt this is."""
    given = prompt_file.read_text(encoding="utf-8")
    for task in load_tasks():
        if given == task.prompt:
            return task
    raise SystemExit(f"{prompt_file} is no task's prompt")


def main() -> int:
    if len(sys.argv) != 4 or sys.argv[1] not in ("reference", "wrong", "nothing", "sleep"):
        print(__doc__, file=sys.stderr)
        return 3
    mode, prompt_file, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    task = task_of(prompt_file)
    if mode == "sleep":
        time.sleep(3600)
    if mode in ("reference", "wrong"):
        (work / "solution.py").write_text(task.source(mode), encoding="utf-8")
        (work / "command.txt").write_text("python solution.py\n", encoding="utf-8")
        (work / "tokens.json").write_text(json.dumps({"input": 0, "output": 0}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
