"""Fixtures: real backend processes, and the real SDK pointed at them."""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# One thread, before torch is imported: see the design notes on spinning threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

ROOT = Path(__file__).resolve().parent.parent
SKILL = ROOT / "skills" / "pytrio-skill"
DRYRUN = SKILL / "scripts" / "dryrun.py"
KEY = "test-key"
# Slow tests of something random run with one seed; `SEEDS=all` has all of them.
EVERY_SEED = os.environ.get("SEEDS") == "all"


def dryrun(
    *arguments: object, folder: Path, seconds: float = 180, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`dryrun.py ARGUMENTS` in a folder, to its end."""
    command = [sys.executable, str(DRYRUN), *map(str, arguments)]
    return outcome(command, folder, {**os.environ, **environment}, seconds)


def outcome(
    command: list[str], folder: Path, environment: dict[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """A command in a folder, to its end; one that takes longer fails the test, with where every
    thread of it and of its children was."""
    process = subprocess.Popen(
        command,
        env={**environment, "PYTHONFAULTHANDLER": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{command} took over {seconds:.0f} s\n{stacks_of(process, folder)}")
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def stacks_of(process: subprocess.Popen[str], folder: Path) -> str:
    """End a process and its children; what it printed, and the stacks that they leave in its
    standard error and in the backend's log."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    pids = [*map(int, children.read_text().split()), process.pid] if children.exists() else []
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    try:
        output, errors = process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
    logs = [path.read_text(encoding="utf-8") for path in folder.rglob("backend.log")]
    return "\n".join([output, errors, *logs])


@dataclass
class Backend:
    """A running `dryrun.py serve`."""

    url: str
    store: Path
    record: Path
    process: subprocess.Popen

    def client(self, **settings: object):
        """A ServiceClient of the real SDK on this backend; `settings` go to `trio.configure`."""
        import pytrio as trio

        trio.configure(base_url=self.url, api_key=KEY, **settings)
        return trio.ServiceClient()

    def stop(self) -> None:
        """End the backend as a parent's death would."""
        # A forgotten client closes its session when it is collected, in whichever thread that
        # happens: without a backend it would hold up the SDK's thread with its retries.
        gc.collect()
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()
        self.process.wait(30)


def start_backend(folder: Path, *options: str, store: Path | None = None) -> Backend:
    """Start a backend that keeps its recording under `folder`, and wait until it listens."""
    folder.mkdir(parents=True, exist_ok=True)
    store = store or folder / "store"
    record = folder / "record"
    command = [sys.executable, str(DRYRUN), "serve", "--follow-parent"]
    command += ["--store", str(store), "--record", str(record), *options]
    with (folder / "backend.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
    line = process.stdout.readline()
    if not line:
        raise RuntimeError((folder / "backend.log").read_text(encoding="utf-8"))
    return Backend(json.loads(line)["url"], store, record, process)


@pytest.fixture
def backend_factory(tmp_path: Path) -> Iterator[Callable[..., Backend]]:
    """`backend_factory("--fault", "capacity=1", store=...)` starts a backend of the test's own."""
    started: list[Backend] = []

    def start(*options: str, store: Path | None = None) -> Backend:
        backend = start_backend(tmp_path / f"backend{len(started)}", *options, store=store)
        started.append(backend)
        return backend

    yield start
    for backend in started:
        backend.stop()


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """One backend with default options, shared by all tests that do not need their own."""
    running = start_backend(tmp_path_factory.mktemp("shared"))
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def private_sdk_home(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK in the test process never reads this machine's profiles."""
    import pytrio as trio

    for name in ("PYTRIO_API_KEY", "PYTRIO_BASE_URL", "PYTRIO_ENV"):
        monkeypatch.delenv(name, raising=False)
    trio.configure(home=str(tmp_path_factory.getbasetemp()))
