"""Python blocks: run in processes forked from one that has imported what they need, and checked."""

import ast
import atexit
import gc
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import dryrun
from docs.pages import EXECUTED, FRAGMENT, SHELL, UNREAD_BLOCKS, Block, Page, Problem, last_lines
from lint.check import check_source

CHECK_DOCS = Path(__file__).resolve().parent.parent / "check_docs.py"
BLOCK_SECONDS = 120
GRACE_SECONDS = 15  # to a program that ignores the alarm
LARGEST_OUTPUT = 200_000  # bytes read of what a program printed
WORKERS = 2
VISION_MODEL = "Qwen/Qwen3.5-9B"  # of the block with pictures
NO_ANSWER = -1  # of a program that was stopped where there are no signals
TOO_LONG = (NO_ANSWER, -getattr(signal, "SIGALRM", 0))


@dataclass(frozen=True)
class Run:
    """How a program ended: 0, an exit status, or minus a signal; and all it printed."""

    status: int
    output: str


@dataclass(frozen=True)
class Program:
    """Source to run as `__main__`."""

    name: str
    source: str
    arguments: tuple[str, ...] = ()


class Worker:
    """A process that has imported the heavy packages and forks one child for each program."""

    def __init__(self, url: str, key: str, folder: Path) -> None:
        self.folder = folder
        self.seconds = BLOCK_SECONDS
        self.count = 0
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTRIO_")
        }
        # The SDK reads its environment when it is imported.
        environment |= {
            "PYTRIO_BASE_URL": url, "PYTRIO_API_KEY": key, "SWANLAB_MODE": "disabled",
            "HOME": str(folder), "USERPROFILE": str(folder), "COLUMNS": "200",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, str(CHECK_DOCS), "--worker"],
            env=environment, cwd=folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, programs: Sequence[Program]) -> list[Run]:
        """Run programs, `WORKERS` at a time; the results are in the programs' order."""
        assert self.process.stdin is not None
        folders = []
        for program in programs:
            self.count += 1
            folder = self.folder / f"{self.count:04}"
            folder.mkdir()
            request = {**asdict(program), "seconds": self.seconds}
            (folder / "program.json").write_text(json.dumps(request), encoding="utf-8")
            folders.append(folder)
        statuses: dict[str, int] = {}
        for sent, folder in enumerate(folders):
            if sent >= WORKERS:
                statuses |= self.receive()
            self.process.stdin.write(f"{folder}\n")
            self.process.stdin.flush()
        while len(statuses) < len(folders):
            statuses |= self.receive()
        return [Run(statuses[str(folder)], end_of(folder / "output.txt")) for folder in folders]

    def receive(self) -> dict[str, int]:
        """Folder and status of the next program that ends."""
        assert self.process.stdout is not None
        # A program that has ended its watcher is never answered for.
        timer = threading.Timer(self.seconds + 2 * GRACE_SECONDS, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            raise RuntimeError("the worker died, or a program killed its parent; see above")
        return json.loads(line)

    def close(self) -> None:
        """End the process; every program has ended before."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def end_of(path: Path) -> str:
    """The end of what a program printed; a program may have removed it."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - LARGEST_OUTPUT))
            return stream.read().decode("utf-8", errors="replace")
    except OSError as error:
        return f"no output: {error.strerror}"


@contextmanager
def running_worker() -> Iterator[Worker]:
    """A worker on a backend of its own, both ended at the end."""
    with tempfile.TemporaryDirectory(prefix="check-docs-") as name:
        folder = Path(name)
        (folder / "record").mkdir()
        # One name stands for models that see; all others are served as by default.
        served = ["serve", "--store", f"{folder}/store", "--model", f"{VISION_MODEL}=vl"]
        options = dryrun.parser_of_commands().parse_args(served)
        key = secrets.token_hex(8)
        with dryrun.Backend(options, folder / "record", key) as backend:
            worker = Worker(backend.url, key, folder)
            try:
                yield worker
            finally:
                worker.close()


def work() -> None:
    """The worker's loop: a folder with a program on each line of standard input.

    Answers `{folder: status}` when a program has ended; at most `WORKERS` are sent at a time.
    """
    # What blocks import and is slow, and nothing that starts a thread: a fork would lose it.
    import pytrio  # noqa: F401
    import swanlab  # noqa: F401
    import torch  # noqa: F401
    import transformers

    _ = transformers.AutoTokenizer  # transformers imports on first use
    if threading.active_count() > 1:
        raise RuntimeError(f"a fork would lose these threads: {threading.enumerate()}")
    can_fork = hasattr(os, "fork")
    gc.freeze()  # the children's collector leaves the shared memory alone
    if can_fork:
        # The kernel reaps the watchers: nobody waits for them.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        folder = Path(line.strip())
        if not can_fork:
            answer(folder, run_apart(folder))
        elif os.fork() == 0:
            watch(folder)


def answer(folder: Path, status: int) -> None:
    """One line, shorter than what a pipe takes in one piece, in one write."""
    os.write(1, (json.dumps({str(folder): status}) + "\n").encode())


def watch(folder: Path) -> NoReturn:
    """In a child of the worker: fork the program, wait for it and answer."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = execute(folder)
        finally:
            # What a process does at its end, but for taking apart the modules: that takes seconds.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(status)
    seconds = json.loads((folder / "program.json").read_text(encoding="utf-8"))["seconds"]
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(seconds + GRACE_SECONDS)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    answer(folder, status)
    os._exit(0)


def run_apart(folder: Path) -> int:
    """Run a program in a fresh process, where there is no fork."""
    command = [sys.executable, str(CHECK_DOCS), "--program", str(folder)]
    try:
        return subprocess.run(command, timeout=BLOCK_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        return NO_ANSWER


def execute(folder: Path) -> int:
    """Become the program in a folder, with home, output and `__main__` of its own; its status."""
    output = os.open(folder / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    silence = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((silence, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)
    request = json.loads((folder / "program.json").read_text(encoding="utf-8"))
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(request["seconds"])
    for name in ("HOME", "USERPROFILE", "TMPDIR", "TEMP", "TMP"):
        os.environ[name] = str(folder)
    tempfile.tempdir = None
    os.chdir(folder)
    sys.argv = [request["name"], *request["arguments"]]
    module = types.ModuleType("__main__")
    module.__file__ = request["name"]
    sys.modules["__main__"] = module
    try:
        exec(compile(request["source"], request["name"], "exec"), module.__dict__)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_problem(block: Block, run: Run) -> list[Problem]:
    """What is wrong with a block that was run."""
    if run.status == 0:
        return []
    frames = re.findall(rf'File "{re.escape(str(block.page))}", line (\d+)', run.output)
    line = int(frames[-1]) if frames else block.line
    end = "ran too long" if run.status in TOO_LONG else f"ended with {run.status}"
    title = f"the block of line {block.line} {end}"
    return [Problem(block.page, line, "\n    ".join([title, *last_lines(run.output)]))]


def static_problems(block: Block) -> list[Problem]:
    """Syntax, and the findings of the static check, warnings included."""
    source = block.source
    try:
        tree = compile(source, str(block.page), "exec", ast.PyCF_ONLY_AST)
        compile(source, str(block.page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        return [Problem(block.page, error.lineno or block.line, f"does not compile: {error.msg}")]
    roots = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    if block.info == FRAGMENT and "pytrio" not in roots:
        # The check reads only files that import the SDK, and a fragment may leave that out.
        source += "\nimport pytrio as trio\n"
    return [
        Problem(block.page, found.line, f"{found.code} {found.message}; {found.fix}")
        for found in check_source(source, str(block.page))
    ]


def python_blocks(page: Page) -> list[Block]:
    """Blocks that are run."""
    return [block for block in page.blocks if block.info == EXECUTED]


def program_of(block: Block) -> Program:
    """The program that a block is."""
    return Program(str(block.page), block.source)


def check_block_kinds(page: Page) -> list[Problem]:
    """Every fence says what it holds, so that none is left out."""
    known = (EXECUTED, FRAGMENT, SHELL, *UNREAD_BLOCKS)
    return [
        Problem(page.path, block.line - 1, f"{block.info!r} is no kind of block: {known}")
        for block in page.blocks
        if block.info not in known
    ]
