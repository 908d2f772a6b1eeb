"""The backend process: builds the state, serves on loopback, ends when its parent does."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trio_local.behaviour import Behaviour, described
from trio_local.demos import Demos
from trio_local.protocol import ApiError, installed_sdk_version

LOOPBACK = "127.0.0.1"
# An orphaned script that does not listen to SIGTERM is ended for good after this long.
ORPHAN_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class ServerOptions:
    """Everything `serve` and `run` can set."""

    port: int = 0
    store: Path = Path(".trio-local/checkpoints")
    record: Path = Path(".trio-local/runs/latest")
    reduction: str = "default"
    behaviour: Behaviour = field(default_factory=Behaviour)
    faults: dict[str, object] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    demos: Demos = field(default_factory=Demos)
    respell: float = 0.0
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    max_batch_size: int | None = 256
    max_tokens_per_request: int | None = 262_144
    api_key: str | None = None


def bound_socket(port: int) -> socket.socket:
    """A socket listening on loopback. Raises ApiError 409 when the port is taken."""
    # With the protocol named, asyncio switches off Nagle, which would cost 40 ms an answer.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if os.name == "posix":
        # On Windows this option would let two servers share a port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        # From here on connections wait in the queue instead of being refused.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ApiError(
            409,
            "port_taken",
            f"cannot serve on {LOOPBACK}:{port}: {error.strerror}; choose another --port",
        ) from None
    return listener


def check_device(name: str) -> None:
    """Raises ApiError 422 when torch cannot use a device here."""
    if name == "cpu":
        return
    import torch

    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ApiError(422, "invalid_device", f"--device {name}: {reason}") from None


def serve(options: ServerOptions, on_ready: Callable[[str], None], follow_parent: bool) -> None:
    """Serve until told to stop. Calls `on_ready` with the address once listening.

    With `follow_parent`, standard input is a pipe held by the parent: lines `watch PID` and
    `unwatch` name the script to end with us should the parent die, and its end ends the server.
    """
    check_device(options.device)
    listener = bound_socket(options.port)
    port = listener.getsockname()[1]

    import uvicorn

    from trio_local.app import build_app
    from trio_local.catalogue import Catalogue
    from trio_local.engine import Engine
    from trio_local.faults import Faults
    from trio_local.recording import Recorder
    from trio_local.spelling import Spelling
    from trio_local.state import Limits, State
    from trio_local.store import CheckpointStore

    sdk_version = installed_sdk_version() or ""
    # Before the compute thread starts: both may import transformers, which two threads cannot.
    catalogue = Catalogue(options.models)
    engine = Engine(
        options.device,
        options.reduction,
        options.seed,
        options.threads,
        options.demos,
        Spelling(options.respell),
        options.behaviour,
    )
    engine.start()
    recorder = Recorder(
        options.record,
        {
            "sdk_version": sdk_version,
            "reduction": options.reduction,
            "seed": options.seed,
            "faults": options.faults,
            "like": dict(options.behaviour.taken),
        },
    )
    if options.behaviour.source:
        recorder.note(described(options.behaviour))
    state = State(
        catalogue=catalogue,
        store=CheckpointStore(options.store),
        engine=engine,
        recorder=recorder,
        faults=Faults(options.faults, options.seed),
        limits=Limits(options.max_batch_size, options.max_tokens_per_request),
        api_key=options.api_key,
        seed=options.seed,
        sdk_version=sdk_version,
        endpoint=f"http://{LOOPBACK}:{port}",
    )
    config = uvicorn.Config(
        build_app(state),
        # What is tested here, whichever other servers are installed.
        loop="asyncio",
        http="h11",
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=120,
        timeout_graceful_shutdown=5,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    if follow_parent:
        threading.Thread(target=watch_parent, args=(server,), daemon=True).start()
    on_ready(state.endpoint)
    try:
        server.run(sockets=[listener])
    finally:
        state.store.delete_temporary(set(state.training_runs))
        engine.stop()
        for finding in options.demos.findings():
            recorder.note(f"--demo {finding}")
        recorder.close()


def watch_parent(server: Any) -> None:
    """Read the parent's pipe; when it ends, stop the watched script and the uvicorn server."""
    watched = 0
    for line in sys.stdin:
        word, _, value = line.strip().partition(" ")
        watched = int(value) if word == "watch" else 0
    if watched:
        end_orphan(watched)
    server.should_exit = True


def end_orphan(pid: int) -> None:
    """End a script whose parent has died; returns when it is gone."""
    try:
        os.kill(pid, signal.SIGTERM)
        if os.name != "posix":
            return  # there SIGTERM cannot be ignored, and asking with signal 0 would kill too
        deadline = time.monotonic() + ORPHAN_GRACE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.05)
            os.kill(pid, 0)
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass  # it has ended
