"""Scripts in processes that are forked from one which has imported what they import.

Such a start takes 0.1 s of the 2 s that a fresh interpreter needs.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FORKED = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
FORKED.set_forkserver_preload(["forked", "pytrio", "tyro", "tqdm", "math_verify", "torch"])


def run_forked(
    script: Path, *arguments: str, folder: Path, environment: dict[str, str], seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """A script in a folder, to its end; one that takes longer fails the test."""
    with tempfile.TemporaryDirectory() as place:
        told = Path(place, "out"), Path(place, "err")
        process = FORKED.Process(target=become, args=(script, arguments, folder, environment, told))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            pytest.fail(f"{script} {arguments} took over {seconds:.0f} s")
        output, errors = (path.read_text(encoding="utf-8") for path in told)
        return subprocess.CompletedProcess(
            [str(script), *arguments], process.exitcode, output, errors
        )


def become(
    script: Path,
    arguments: tuple[str, ...],
    folder: Path,
    environment: dict[str, str],
    told: tuple[Path, Path],
) -> None:
    """The new process: be the script; what it prints goes into the files `told`."""
    for stream, path in enumerate(told, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
