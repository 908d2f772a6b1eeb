"""Every SDK release that is said to be supported runs the quickstart; an older one is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import SKILL, dryrun
from trio_local.protocol import TESTED_SDK_VERSIONS

SAVE_AND_RESUME = """
import pytrio as trio
from importlib.metadata import version

service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=4)
datum = trio.Datum(
    model_input=trio.ModelInput.from_ints([40, 41, 42]),
    loss_fn_inputs={"target_tokens": [41, 42, 43], "weights": [1.0, 1.0, 1.0]},
)
for _ in range(2):
    backward, step = training.forward_backward([datum]), training.optim_step(trio.AdamParams())
    backward.result(), step.result()
state = training.save_state("state").result()
resumed = service.create_training_client_from_state_with_optimizer(state.path)
before = training.forward([datum]).result().metrics["loss_mean"]
assert resumed.forward([datum]).result().metrics["loss_mean"] == before
print("ran on", version("pytrio"))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory):
    """`installed("0.2.8")` is a folder with that release, to be put before site-packages."""
    folders: dict[str, Path] = {}

    def install(version: str) -> Path:
        if version not in folders:
            folder = tmp_path_factory.mktemp(f"pytrio-{version}")
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            command += ["--target", str(folder), f"pytrio=={version}"]
            subprocess.run(command, check=True, capture_output=True)
            folders[version] = folder
        return folders[version]

    return install


@pytest.mark.slow
@pytest.mark.parametrize("version", TESTED_SDK_VERSIONS)
def test_supported_release(version: str, installed, tmp_path: Path) -> None:
    """The quickstart learns, and a state is saved and resumed."""
    sdk = str(installed(version))
    done = dryrun("run", SKILL / "examples" / "quickstart_sft.py", folder=tmp_path, PYTHONPATH=sdk)
    assert done.returncode == 0, done.stderr
    assert "TRIO trains language models" in done.stdout.split("tuned")[-1]
    script = tmp_path / "resume.py"
    script.write_text(SAVE_AND_RESUME, encoding="utf-8")
    done = dryrun("run", script, folder=tmp_path, PYTHONPATH=sdk)
    assert done.returncode == 0, done.stderr
    assert f"ran on {version}" in done.stdout


@pytest.mark.slow
def test_unsupported_release_gets_one_line(installed, tmp_path: Path) -> None:
    """0.2.7 reads no environment variables: it is refused before anything starts."""
    script = tmp_path / "script.py"
    script.write_text("print('started')\n", encoding="utf-8")
    done = dryrun("run", script, folder=tmp_path, PYTHONPATH=str(installed("0.2.7")))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("dryrun: pytrio 0.2.7 is not supported")
    assert len(done.stderr.splitlines()) == 1
