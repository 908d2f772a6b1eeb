"""The tasks of the evaluation: loading them, and running and grading what an agent produced."""

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib
from grading import DRYRUN, Expectation, Run, standard_expectations

TASKS = Path(__file__).resolve().parent / "tasks"
LANGUAGES = ("en", "zh")
PARTS = ("prompt.md", "grader.py", "reference.py", "wrong.toml")
# What an installed skill, a trial run or a tool leaves behind; never part of a solution.
LEFT_OUT = (
    ".claude", ".agents", ".trio-local", ".git", ".venv", "venv", "__pycache__", "swanlog",
    ".mypy_cache", ".ruff_cache", ".pytest_cache",
)  # fmt: skip
COMMAND_FILE = "command.txt"
KILL_POLL_SECONDS = 0.05
STOP_SECONDS = 30
LARGEST_OUTPUT = 200_000

HAND_OVER = {
    "en": """
---
How this is handed over: work in the current folder, use the installed `pytrio` SDK. There is no
key and no network here, so do not try to reach the cloud. When you are done, write the command
that starts your script from this folder into `command.txt`, in one line such as
`python train.py --steps 4`. It is run once, on a copy of this folder, against a local stand-in of
the service, and must end by itself within {seconds} seconds; remove what your own trial runs left
behind. Do what is asked at the size that is asked, no more.
""",
    "zh": """
---
交付方式：在当前目录里完成，使用已安装的 `pytrio` SDK。这里没有密钥也没有网络，不要尝试连接云端。
完成后，把从本目录启动脚本的命令写进 `command.txt`，只写一行，例如 `python train.py --steps 4`。
它会在本目录的一份副本里、针对服务的本地替身运行一次，必须在 {seconds} 秒内自行结束；
请清理你自己试跑留下的文件。按要求的规模完成即可，不要多做。
""",
}


def changed(source: str, changes: Iterable[tuple[str, str]]) -> str:
    """A source with texts replaced, each of which must be there."""
    for old, new in changes:
        if old not in source:
            raise TaskError(f"the reference has no {old!r}")
        source = source.replace(old, new)
    return source


class TaskError(Exception):
    """A task that cannot be used, in one line."""


class NoScript(Exception):
    """Why there is nothing to run, in one line."""


@dataclass(frozen=True)
class Task:
    """One folder under `tasks/`; see README.md for what it holds."""

    name: str
    folder: Path
    title: str
    language: str
    kind: str
    seconds: int
    options: tuple[str, ...] = ()
    kill_after_steps: int = 0

    @property
    def files(self) -> Path:
        return self.folder / "files"

    @property
    def prompt(self) -> str:
        """What the agent is told: the user's words and how to hand the result over."""
        words = (self.folder / "prompt.md").read_text(encoding="utf-8").rstrip("\n")
        return words + "\n" + HAND_OVER[self.language].format(seconds=self.seconds)

    @property
    def dryrun_options(self) -> list[str]:
        """Options of `dryrun.py run`, the demonstrations of the task included."""
        demos = self.folder / "demos.jsonl"
        return [*self.options, *(["--demo", str(demos)] if demos.exists() else [])]

    @property
    def solutions(self) -> list[str]:
        """`reference` and, where there is a right one in another style, `other`; then `wrong`."""
        has_other = (self.folder / "other.py").exists()
        return ["reference", *(["other"] if has_other else []), "wrong"]

    def source(self, solution: str) -> str:
        """The text of a solution; the wrong one is the reference with a few places changed."""
        if solution != "wrong":
            return (self.folder / f"{solution}.py").read_text(encoding="utf-8")
        wrong = tomllib.loads((self.folder / "wrong.toml").read_text(encoding="utf-8"))
        changes = [(change["right"], change["wrong"]) for change in wrong["changes"]]
        return changed(self.source("reference"), changes)

    def grader(self) -> Callable[[Run], list[Expectation]]:
        """`grade` of the task's grader.py, imported under a name of its own."""
        name = "grader_" + re.sub(r"\W", "_", self.name)
        spec = importlib.util.spec_from_file_location(name, self.folder / "grader.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.grade


def load_task(folder: Path) -> Task:
    """Read one task's folder. Raises TaskError."""
    try:
        settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # of TOML or of UTF-8
        raise TaskError(f"{folder.name}/task.toml: {error}") from None
    known = {"title", "language", "kind", "seconds", "options", "kill_after_steps"}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise TaskError(f"{folder.name}/task.toml: unknown {', '.join(unknown)}")
    missing = sorted({"title", "language", "kind"} - set(settings))
    if missing:
        raise TaskError(f"{folder.name}/task.toml: lacks {', '.join(missing)}")
    if settings["language"] not in LANGUAGES:
        raise TaskError(f"{folder.name}/task.toml: language must be one of {', '.join(LANGUAGES)}")
    settings.setdefault("seconds", 240)
    for name, kind in (("seconds", int), ("kill_after_steps", int), ("options", list)):
        if not isinstance(settings.get(name, kind()), kind):
            raise TaskError(f"{folder.name}/task.toml: {name} must be a {kind.__name__}")
    settings["options"] = tuple(settings.get("options", ()))
    absent = [name for name in PARTS if not (folder / name).is_file()]
    if absent:
        raise TaskError(f"{folder.name}: lacks {', '.join(absent)}")
    return Task(folder.name, folder, **settings)


def load_tasks(pattern: str = "*", folder: Path = TASKS) -> list[Task]:
    """Tasks whose folder matches a glob, or one of several with commas between; in order of their
    names. Raises TaskError when one of the patterns matches none."""
    found: dict[str, Task] = {}
    for part in pattern.split(","):
        try:
            folders = [p for p in sorted(folder.glob(part.strip() or "-")) if p.parent == folder]
        except (NotImplementedError, ValueError):  # an absolute path; a part that is only `**`
            folders = []
        folders = [p for p in folders if p.is_dir()]
        if not folders:
            raise TaskError(f"no task matches {part.strip()!r}; see the folders of {folder}")
        found |= {p.name: load_task(p) for p in folders}
    return [found[name] for name in sorted(found)]


# -- what to run -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """The script, relative to the work folder, its arguments and variables set for it."""

    script: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def find_command(folder: Path) -> Command:
    """The command an agent left. Raises NoScript."""
    try:
        lines = (folder / COMMAND_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return only_script(folder)
    except (OSError, UnicodeDecodeError) as error:
        raise NoScript(f"{COMMAND_FILE} cannot be read: {error}") from None
    written = [line.strip().strip("`") for line in lines]
    line = next((line for line in written if line and not line.startswith(("#", "```"))), "")
    if not line:
        raise NoScript(f"{COMMAND_FILE} is empty")
    return parse_command(line, folder)


def parse_command(line: str, folder: Path) -> Command:
    """`VAR=x python train.py --steps 4` taken apart; a command that starts a dry run itself
    (`python .../dryrun.py run OPTIONS train.py -- --steps 4`) stands for its script."""
    try:
        words = shlex.split(line.removeprefix("$ "))
    except ValueError as error:
        raise NoScript(f"{COMMAND_FILE}: {error} in {line!r}") from None
    variables = []
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        name, _, value = words.pop(0).partition("=")
        if not name.startswith("PYTRIO"):  # they would lead elsewhere
            variables.append((name, value))
    places = [i for i, word in enumerate(words) if word.endswith(".py")]
    if not places:
        raise NoScript(f"{COMMAND_FILE} starts no Python file: {line!r}")
    place = places[0]
    arguments = words[place + 1 :]
    if Path(words[place]).name == "dryrun.py" and len(places) > 1:
        border = words.index("--") if "--" in words else len(words)
        scripts = [i for i in places[1:] if i < border]
        place = scripts[-1] if scripts else places[1]
        arguments = words[border + 1 :]
    script = folder / words[place]
    if not script.is_file() or not script.resolve().is_relative_to(folder.resolve()):
        raise NoScript(f"{COMMAND_FILE} names {words[place]!r}, which is not in the folder")
    relative = script.resolve().relative_to(folder.resolve()).as_posix()
    return Command(relative, tuple(arguments), tuple(variables))


def only_script(folder: Path) -> Command:
    """Without a command file: the one Python file that imports pytrio."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if LEFT_OUT_NAMES.isdisjoint(relative.parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            if re.search(r"^\s*(import|from)\s.*\bpytrio\b", text, re.MULTILINE):
                found.append(relative.as_posix())
    if len(found) != 1:
        which = ", ".join(found[:5]) or "none"
        raise NoScript(f"no {COMMAND_FILE}, and not one Python file that uses pytrio: {which}")
    return Command(found[0])


LEFT_OUT_NAMES = set(LEFT_OUT)


# -- running it ------------------------------------------------------------------------------------


def copy_work(source: Path, target: Path) -> None:
    """The agent's folder without installed skills, recordings and caches."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)


def dry_run(
    task: Task, command: Command, folder: Path, scratch: Path, kill_after_steps: int = 0
) -> Run:
    """Run a command in `folder`; recording and checkpoints go to `scratch`.

    With `kill_after_steps` the script is killed with SIGKILL once the recording shows that many
    optimiser steps.
    """
    record = scratch / ("record-killed" if kill_after_steps else "record")
    words = [sys.executable, str(DRYRUN), "run", *task.dryrun_options]
    words += ["--store", str(scratch / "store"), "--record", str(record)]
    words += [command.script, "--", *command.arguments]
    environment = {**clean_environment(), **dict(command.environment)}
    output, diagnostics = scratch / f"{record.name}.out", scratch / f"{record.name}.err"
    started = time.monotonic()
    with output.open("wb") as out, diagnostics.open("wb") as err:
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
        try:
            if kill_after_steps:
                is_killed = kill_at(process, record, kill_after_steps, started + task.seconds)
            else:
                is_killed = False
                process.wait(task.seconds)
        except subprocess.TimeoutExpired:
            stop(process)
            err.write(f"\nstopped after {task.seconds} s\n".encode())
        finally:
            end_group(process)  # what the script left running as well
    return Run(
        folder=folder,
        files=task.files,
        record=record,
        status=process.returncode,
        output=tail_of(output),
        diagnostics=tail_of(diagnostics),
        seconds=time.monotonic() - started,
        is_killed=is_killed,
    )


def kill_at(process: subprocess.Popen, record: Path, steps: int, deadline: float) -> bool:
    """Wait until the recording holds some optimiser steps, then kill script and wrapper; the
    backend, which has a session of its own, sees that and closes the recording. False when the
    script ended before. Raises subprocess.TimeoutExpired."""
    trace = record / "trace.msgpack"
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired("dryrun.py", deadline)
        if trace.exists() and trace.read_bytes().count(b"optimizer_step\xa4") >= steps:
            end_group(process)
            until = time.monotonic() + STOP_SECONDS
            while not (record / "summary.json").exists() and time.monotonic() < until:
                time.sleep(KILL_POLL_SECONDS)
            return True
        time.sleep(KILL_POLL_SECONDS)
    return False


def stop(process: subprocess.Popen) -> None:
    """End a dry run so that it still closes its recording."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        end_group(process)


def end_group(process: subprocess.Popen) -> None:
    """Kill a process that we started and all that it started in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def clean_environment(keep: tuple[str, ...] = ()) -> dict[str, str]:
    """This environment without keys and without the SDK's settings, but for the names in `keep`."""
    secret = re.compile(r"KEY|TOKEN(?!IZERS)|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
    return {
        name: value
        for name, value in os.environ.items()
        if name in keep or not (secret.search(name) or name.startswith(("PYTRIO", "SWANLAB")))
    }


def tail_of(path: Path) -> str:
    """The end of a text file."""
    return path.read_bytes()[-LARGEST_OUTPUT:].decode("utf-8", errors="replace")


# -- grading ---------------------------------------------------------------------------------------


@dataclass
class Grade:
    """What came of grading one work folder. `error` says why it could not be judged: then it is
    neither passed nor failed."""

    expectations: list[Expectation]
    findings: list[dict[str, Any]]
    seconds: float
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and bool(self.expectations) and all(
            e.passed for e in self.expectations
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "error": self.error,
            "expectations": [e.as_json() for e in self.expectations],
            "findings": self.findings,
            "seconds": round(self.seconds, 1),
        }


def grade(task: Task, work: Path, scratch: Path) -> Grade:
    """Run what lies in a work folder and judge it; `work` itself is not changed."""
    started = time.monotonic()
    folder = scratch / "work"
    try:
        copy_work(work, folder)
    except OSError as problem:
        return Grade([], [], 0.0, f"the work folder cannot be copied: {problem}"[:400])
    try:
        command = find_command(folder)
    except NoScript as reason:
        missing = Expectation("there is a script to run", False, str(reason))
        return Grade([missing], [], time.monotonic() - started)
    before = None
    if task.kill_after_steps:
        before = dry_run(task, command, folder, scratch, task.kill_after_steps)
    run = dry_run(task, command, folder, scratch)
    run.before = before
    expectations = standard_expectations(run)
    error = ""
    if run.audit:
        try:
            expectations += task.grader()(run)
        except Exception as problem:  # a grader's own failure is not the agent's
            error = f"the grader failed: {type(problem).__name__}: {problem}"
    findings = [
        {name: f[name] for name in ("name", "severity", "seen")}
        for f in run.audit.get("findings", [])
        if f["severity"] != "info"
    ]
    return Grade(expectations, findings, time.monotonic() - started, error)
