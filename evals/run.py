#!/usr/bin/env python3
"""Measure the skill: let an agent solve the tasks with and without it, and grade what it wrote.

    python evals/run.py --agent "CMD {prompt_file} {workdir}" [OPTIONS]    run and grade an agent
    python evals/run.py grade TASK WORKDIR                        grade one folder
    python evals/run.py selfcheck [--tasks GLOB] [--jobs N]       right ones pass, wrong ones fail
    python evals/run.py list                                      the tasks

The agent is any command that reads a prompt from a file and works in a folder. Results go to
DIR/results.json, whole after every task; README.md describes it. Exit codes: 0 done (also when the
agent failed tasks), 1 `grade` or `selfcheck` found a failure, 3 usage, 130 Ctrl-C.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "scripts")]
sys.dont_write_bytecode = True

from grading import SKILL  # noqa: E402
from tasks import (  # noqa: E402
    COMMAND_FILE,
    Grade,
    Task,
    TaskError,
    clean_environment,
    end_group,
    grade,
    load_tasks,
)

from package import shipped_files, skill_version  # noqa: E402

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 3, 130
ARMS = ("with", "without")
INSTALLED = (".claude/skills/pytrio-skill", ".agents/skills/pytrio-skill")
PLACEHOLDERS = ("{prompt_file}", "{workdir}")
SCHEMA = 1
AGENT_SECONDS = 1800


class UsageError(Exception):
    """A mistake of the caller, in one line."""


# -- one attempt -----------------------------------------------------------------------------------


def agent_words(command: str, prompt_file: Path, work: Path) -> list[str]:
    """The agent's command as words, with the placeholders filled in inside each word: no shell
    sees the paths. Raises UsageError."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--agent: {error} in {command!r}") from None
    missing = [p for p in PLACEHOLDERS if not any(p in word for word in words)]
    if missing:
        raise UsageError(f"--agent lacks {' and '.join(missing)}")
    found = shutil.which(words[0])
    if found is None:
        raise UsageError(f"--agent: no command {words[0]!r}")
    # The agent starts in its work folder, where our relative paths mean nothing.
    words = [
        os.path.abspath(found),
        *(str(Path(w).resolve()) if Path(w).is_file() else w for w in words[1:]),
    ]
    values = {PLACEHOLDERS[0]: str(prompt_file), PLACEHOLDERS[1]: str(work)}
    filled = []
    for word in words:
        for placeholder, value in values.items():
            word = word.replace(placeholder, value)
        filled.append(word)
    return filled


def prepare(task: Task, arm: str, folder: Path) -> tuple[Path, Path]:
    """(prompt file, work folder) of a fresh attempt; the arm `with` gets the shipped skill."""
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "work"
    work.mkdir(parents=True)
    if task.files.is_dir():
        shutil.copytree(task.files, work, dirs_exist_ok=True)
    if arm == "with":
        for place in INSTALLED:
            for path in shipped_files():
                target = work / place / path.relative_to(SKILL)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    prompt_file = folder / "prompt.md"
    prompt_file.write_text(task.prompt, encoding="utf-8")
    return prompt_file, work


def run_agent(words: list[str], work: Path, logs: Path, options: argparse.Namespace) -> dict:
    """Run the agent to its end or its time limit: {"status", "seconds", "tokens"}. The status is
    its exit status or `timeout`."""
    started = time.monotonic()
    status: int | str
    with (logs / "agent.out").open("wb") as out, (logs / "agent.err").open("wb") as err:
        try:
            process = subprocess.Popen(
                words, cwd=work, env=clean_environment(tuple(options.keep_env)),
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(f"--agent: {words[0]} does not start: {error.strerror}") from None
        try:
            status = process.wait(options.agent_seconds)
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            end_group(process)  # what it left running as well
    seconds = round(time.monotonic() - started, 1)
    return {"status": status, "seconds": seconds, "tokens": tokens_of(work)}


def tokens_of(work: Path) -> dict[str, int] | None:
    """What the agent says it used, in `tokens.json`: whole numbers by name, such as `input` and
    `output`; None when it does not say."""
    try:
        value = json.loads((work / "tokens.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict):
        return None
    return {k: v for k, v in value.items() if isinstance(v, int) and not isinstance(v, bool)}


def attempt(task: Task, arm: str, repeat: int, options: argparse.Namespace) -> dict[str, Any]:
    """One task in one arm, once: its entry of results.json."""
    folder = options.out / task.name / arm / str(repeat)
    prompt_file, work = prepare(task, arm, folder)
    agent = run_agent(agent_words(options.agent, prompt_file, work), work, folder, options)
    with tempfile.TemporaryDirectory(prefix="pytrio-eval-") as scratch:
        judged = grade(task, work, Path(scratch))
    entry = {"task": task.name, "arm": arm, "repeat": repeat, "agent": agent, **judged.as_json()}
    is_crash = agent["status"] not in (0, "timeout") and len(judged.expectations) == 1
    if is_crash and not (work / COMMAND_FILE).exists():
        # It never got to work: no key, no network. That says nothing about the skill.
        entry["error"] = (
            f"the agent ended with status {agent['status']}; see {folder / 'agent.err'}"
        )
        entry["passed"] = False
    return entry


# -- many attempts ---------------------------------------------------------------------------------


def outcome(entry: dict[str, Any]) -> str:
    return "error" if entry["error"] else "passed" if entry["passed"] else "failed"


def summary_of(entries: list[dict[str, Any]], arms: Sequence[str]) -> dict[str, Any]:
    """Counts and pass rate by arm, errors left out of the rate; and the difference of the arms."""
    by_arm: dict[str, Any] = {}
    for arm in arms:
        outcomes = [outcome(e) for e in entries if e["arm"] == arm]
        judged = len(outcomes) - outcomes.count("error")
        by_arm[arm] = {
            "passed": outcomes.count("passed"),
            "failed": outcomes.count("failed"),
            "errors": outcomes.count("error"),
            "pass_rate": round(outcomes.count("passed") / judged, 4) if judged else None,
            **usage_of([e["agent"] for e in entries if e["arm"] == arm]),
        }
    rates = [by_arm[arm]["pass_rate"] for arm in ARMS if arm in by_arm]
    both = len(rates) == 2 and None not in rates
    return {"arms": by_arm, "difference": round(rates[0] - rates[1], 4) if both else None}


def usage_of(agents: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean seconds of the attempts, and mean tokens by name of those that told them."""
    told = [a["tokens"] for a in agents if a["tokens"]]
    names = sorted({name for tokens in told for name in tokens})
    return {
        "mean_seconds": round(sum(a["seconds"] for a in agents) / len(agents), 1)
        if agents
        else None,
        "mean_tokens": {n: round(sum(t.get(n, 0) for t in told) / len(told)) for n in names},
    }


def write_results(options: argparse.Namespace, entries: list[dict[str, Any]]) -> None:
    """The whole file or none of it."""
    target = options.out / "results.json"
    value = {
        "schema": SCHEMA,
        "skill_name": SKILL.name,
        "skill_version": skill_version(),
        "agent": options.agent,
        "runs_per_configuration": options.repeat,
        "summary": summary_of(entries, options.arms),
        "entries": entries,
    }
    part = target.with_name(target.name + ".part")
    part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(target)


def earlier_entries(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What an interrupted run has judged; what ended in an error is tried again.

    Raises UsageError when there is a run that must not be overwritten or cannot be gone on with.
    """
    path = options.out / "results.json"
    if not path.exists():
        return []
    if not options.resume:
        raise UsageError(f"{path} exists; give --resume to go on with it, or another --out")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        is_same = value["schema"] == SCHEMA and value["agent"] == options.agent
        entries = [entry for entry in value["entries"] if not entry["error"]]
        if not all(map(is_entry, entries)):
            raise ValueError("an entry lacks what an attempt has")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} cannot be gone on with: {error!r}") from None
    if not is_same:
        raise UsageError(f"{path} is of another agent; give another --out")
    return entries


def is_entry(entry: dict[str, Any]) -> bool:
    """Whether an earlier attempt has what is read of it later."""
    kinds = {"task": str, "arm": str, "repeat": int, "passed": bool, "agent": dict}
    return all(isinstance(entry.get(name), kind) for name, kind in kinds.items()) and all(
        isinstance(entry["agent"].get(name), kind)
        for name, kind in {"seconds": int | float, "tokens": dict | None}.items()
    )


def run_all(options: argparse.Namespace) -> int:
    tasks = load_tasks(options.tasks)
    if unknown := [arm for arm in options.arms if arm not in ARMS]:
        raise UsageError(f"--arms: unknown {', '.join(unknown)}; known: {', '.join(ARMS)}")
    agent_words(options.agent, Path("prompt"), Path("work"))
    if len(set(options.arms)) < len(options.arms):
        raise UsageError(f"--arms: names one twice: {','.join(options.arms)}")
    options.out = options.out.resolve()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {options.out}: cannot write there: {error.strerror}") from None
    entries = earlier_entries(options)
    done = {(e["task"], e["arm"], e["repeat"]) for e in entries}
    for task in tasks:
        for arm in options.arms:
            for repeat in range(1, options.repeat + 1):
                if (task.name, arm, repeat) in done:
                    continue
                entries.append(attempt(task, arm, repeat, options))
                write_results(options, entries)
                print(line_of(entries[-1]), file=sys.stderr, flush=True)
    write_results(options, entries)
    print(table(entries, tasks, options.arms))
    return EXIT_OK


def line_of(entry: dict[str, Any]) -> str:
    """One attempt as it ends."""
    why = entry["error"] or next(
        (f"{e['text']}: {e['evidence']}" for e in entry["expectations"] if not e["passed"]), ""
    )
    name = f"{entry['task']} {entry['arm']} {entry['repeat']}"
    return f"{outcome(entry):<7} {name}  {why}"[:200]


def table(entries: list[dict[str, Any]], tasks: list[Task], arms: Sequence[str]) -> str:
    """Passed attempts by task and arm, the rates, and their difference."""
    width = max(len(task.name) for task in tasks)
    lines = ["task".ljust(width) + "".join(f"{arm:>12}" for arm in arms)]
    for task in tasks:
        cells = []
        for arm in arms:
            own = [e for e in entries if e["task"] == task.name and e["arm"] == arm]
            judged = [e for e in own if not e["error"]]
            errors = f" {len(own) - len(judged)}err" if len(own) > len(judged) else ""
            cells.append(f"{sum(e['passed'] for e in judged)}/{len(judged)}{errors}")
        lines.append(task.name.ljust(width) + "".join(f"{cell:>12}" for cell in cells))
    summary = summary_of(entries, arms)
    rates = [summary["arms"][arm]["pass_rate"] for arm in arms]
    shown = ["-" if rate is None else f"{100 * rate:.1f} %" for rate in rates]
    lines.append("pass rate".ljust(width) + "".join(f"{cell:>12}" for cell in shown))
    if summary["difference"] is not None:
        lines.append(f"difference {100 * summary['difference']:+.1f} points")
    return "\n".join(lines)


# -- one folder, and the tasks themselves ----------------------------------------------------------


def show(judged: Grade) -> str:
    lines = [
        f"{'ok  ' if e.passed else 'FAIL'} {e.text}" + (f"  [{e.evidence}]" if e.evidence else "")
        for e in judged.expectations
    ]
    if judged.error:
        lines.append(f"ERROR {judged.error}")
    verdict = "not judged" if judged.error else "passed" if judged.passed else "failed"
    return "\n".join([*lines, f"{verdict} in {judged.seconds:.1f} s"])


def grade_one(options: argparse.Namespace) -> int:
    task = one_task(options.task)
    if not options.workdir.is_dir():
        raise UsageError(f"no folder {options.workdir}")
    if options.keep and options.keep.exists():
        raise UsageError(f"--keep {options.keep}: exists already")
    with tempfile.TemporaryDirectory(prefix="pytrio-eval-") as temporary:
        judged = grade(task, options.workdir.resolve(), (options.keep or Path(temporary)).resolve())
    print(
        json.dumps(judged.as_json(), indent=2, ensure_ascii=False) if options.json else show(judged)
    )
    return EXIT_OK if judged.passed else EXIT_FAILED


def one_task(name: str) -> Task:
    """By its folder's name or its number. Raises TaskError."""
    return load_tasks(f"{name}-*" if name.isdigit() else name)[0]


def grade_solution(task: Task, solution: str) -> Grade:
    """Grade one of a task's own solutions, as an agent would have left it."""
    with tempfile.TemporaryDirectory(prefix="pytrio-eval-") as scratch:
        work = Path(scratch) / "given"
        work.mkdir()
        if task.files.is_dir():
            shutil.copytree(task.files, work, dirs_exist_ok=True)
        (work / "solution.py").write_text(task.source(solution), encoding="utf-8")
        return grade(task, work, Path(scratch))


def selfcheck(options: argparse.Namespace) -> int:
    """Right solutions pass and wrong ones fail, by an expectation and not by an error."""
    jobs = [(task, s) for task in load_tasks(options.tasks) for s in task.solutions]
    is_good = True
    with ThreadPoolExecutor(options.jobs) as pool:
        grades = pool.map(lambda job: grade_solution(*job), jobs)
        for (task, solution), judged in zip(jobs, grades, strict=True):
            as_meant = not judged.error and judged.passed == (solution != "wrong")
            is_good = is_good and as_meant
            failed = [e for e in judged.expectations if not e.passed]
            why = judged.error or "; ".join(f"{e.text} [{e.evidence}]" for e in failed)
            mark = "ok  " if as_meant else "BAD "
            print(
                f"{mark} {task.name:<28} {solution:<10} {judged.seconds:5.1f} s  {why[:160]}",
                flush=True,
            )
    return EXIT_OK if is_good else EXIT_FAILED


def list_tasks(options: argparse.Namespace) -> int:
    for task in load_tasks(options.tasks):
        print(f"{task.name:<28} {task.language}  {task.kind:<14} {task.title}")
    return EXIT_OK


# -- command line ----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"run.py: {message}; see --help", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parser_of_commands() -> argparse.ArgumentParser:
    parser = Parser(
        prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    tasks_help = "a glob over the folders of tasks/, several with commas between (default: all)"

    agent = commands.add_parser("agent", help="run and grade an agent; the default command")
    add = agent.add_argument
    add("--agent", required=True, metavar="CMD", help="with {prompt_file} and {workdir} in it")
    add("--tasks", default="*", metavar="GLOB", help=tasks_help)
    add(
        "--arms", type=lambda text: text.split(","), default=list(ARMS), metavar="with,without",
        help="with and without the skill installed in the work folder (default: both)",
    )  # fmt: skip
    add("--repeat", type=count, default=1, metavar="N", help="attempts a task and arm (default: 1)")
    add(
        "--out", type=Path, default=Path("eval-results"), metavar="DIR", help="default: %(default)s"
    )
    add("--resume", action="store_true", help="go on with an interrupted run in --out")
    add(
        "--agent-seconds", type=count, default=AGENT_SECONDS, metavar="S",
        help="time limit of one attempt (default: %(default)s)",
    )  # fmt: skip
    add(
        "--keep-env", action="append", default=[], metavar="NAME",
        help="a variable the agent needs, such as its own key; all others that look like keys are "
        "taken away",
    )  # fmt: skip
    agent.set_defaults(call=run_all)

    grader = commands.add_parser("grade", help="grade one folder")
    grader.add_argument("task", help="a task's folder name or number")
    grader.add_argument("workdir", type=Path)
    grader.add_argument("--json", action="store_true", help="print JSON")
    grader.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the graded copy and its recording there"
    )
    grader.set_defaults(call=grade_one)

    checker = commands.add_parser("selfcheck", help="grade the solutions of the tasks themselves")
    checker.add_argument("--tasks", default="*", metavar="GLOB", help=tasks_help)
    checker.add_argument("--jobs", type=count, default=1, metavar="N", help="default: 1")
    checker.set_defaults(call=selfcheck)

    lister = commands.add_parser("list", help="list the tasks")
    lister.add_argument("--tasks", default="*", metavar="GLOB", help=tasks_help)
    lister.set_defaults(call=list_tasks)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0].startswith("--") and given[0] != "--help":
        given.insert(0, "agent")
    options = parser_of_commands().parse_args(given)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        return options.call(options)
    except (UsageError, TaskError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
