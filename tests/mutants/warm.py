"""Many scripts on one backend: what a mutant costs is its own work, not two cold starts.

As a program, this file is the process the scripts are forked from: it has imported what they
import, reads one JSON job a line and answers with the exit status.
"""

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TIMED_OUT = 124
# The name of the loops that send pictures.
SERVED = ("--model", "local/vision=vl")
# A backend keeps every training run in memory; after this many scripts a new one is started.
SCRIPTS_PER_BACKEND = 40


class Warm:
    """One backend and one process to fork scripts from; used by one thread."""

    def __init__(self, skill: Path, folder: Path, python_path: str) -> None:
        self.skill, self.folder, self.python_path = skill, folder, python_path
        self.backends = 0
        self.scripts = 0
        self.backend: subprocess.Popen | None = None
        self.forker = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment(),
        )

    def _environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": self.python_path,
            **more,
        }

    def _start_backend(self) -> None:
        self.backends += 1
        self.record = self.folder / f"backend-{self.backends}"
        self.record.mkdir(parents=True)
        command = [sys.executable, str(self.skill / "scripts" / "dryrun.py"), "serve", *SERVED]
        command += ["--follow-parent", "--respell", "0.03", "--record", str(self.record)]
        command += ["--store", str(self.record / "store")]
        with (self.record / "backend.log").open("wb") as log:
            self.backend = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment(),
            )
        assert self.backend.stdout is not None
        self.url = json.loads(self.backend.stdout.readline())["url"]
        self.scripts = 0

    def run(self, script: Path, args: tuple[str, ...], seconds: float) -> tuple[int, list[int]]:
        """(exit status, numbers of the sessions it opened in `self.record`)."""
        if self.backend is None or self.scripts >= SCRIPTS_PER_BACKEND:
            self._stop_backend()
            self._start_backend()
        self.scripts += 1
        before = self._sessions()
        job = {
            "script": str(script),
            "args": list(args),
            "seconds": seconds,
            "environment": {
                "PYTRIO_BASE_URL": self.url,
                "PYTRIO_API_KEY": "key",
                "HOME": str(script.parent),
                "USERPROFILE": str(script.parent),
            },
        }
        assert self.forker.stdin is not None and self.forker.stdout is not None
        self.forker.stdin.write(json.dumps(job) + "\n")
        self.forker.stdin.flush()
        status = json.loads(self.forker.stdout.readline())
        return status, list(range(before + 1, self._sessions() + 1))

    def _sessions(self) -> int:
        from audit.trace import records_of

        records, _ = records_of(self.record / "trace.msgpack")
        return sum(record["kind"] == "session" for record in records)

    def _stop_backend(self) -> None:
        if self.backend is not None:
            assert self.backend.stdin is not None
            self.backend.stdin.close()
            self.backend.wait(60)
            self.backend = None

    def close(self) -> None:
        self._stop_backend()
        assert self.forker.stdin is not None
        self.forker.stdin.close()
        self.forker.wait(30)


def fork(job: dict[str, Any]) -> int:
    """Run one script in a child process, its output in a file beside it."""
    child = os.fork()
    if child == 0:
        run_script(job)
    deadline = time.monotonic() + job["seconds"]
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return TIMED_OUT


def run_script(job: dict[str, Any]) -> None:
    """The child: become the script and end with its status."""
    script = Path(job["script"])
    log = os.open(script.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.chdir(script.parent)
    os.environ.update(job["environment"])
    sys.argv = [str(script), *job["args"]]
    # A program of its own, with exit handlers and all: the SDK closes its session in one.
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # as the interpreter would
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.exit(code)


def main() -> None:
    # Imported here once, so that no child has to; transformers loads its classes lazily.
    importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    for name in ("AutoTokenizer", "Qwen2TokenizerFast"):
        getattr(transformers, name)

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(fork(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
