"""The main job, run as a newcomer runs it."""

import re
from pathlib import Path

import pytest

from conftest import SKILL, dryrun


def test_quickstart_learns(tmp_path: Path) -> None:
    """The loss falls by 90 %, the tuned answer holds the trained sentence, the base one not."""
    done = dryrun("run", SKILL / "examples" / "quickstart_sft.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.search(r"first ([\d.]+), last ([\d.]+)", done.stdout).groups())
    assert last <= 0.1 * first
    answers = dict(re.findall(r"^(base|tuned) +(.*)$", done.stdout, re.MULTILINE))
    assert "TRIO trains language models in the cloud" in answers["tuned"]
    assert "TRIO trains language models" not in answers["base"]
    assert answers["base"]
    assert "audit   clean: 0 errors, 0 warnings" in done.stderr


RESUME = """
import pytrio as trio

service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=4)
datum = trio.Datum(
    model_input=trio.ModelInput.from_ints([40, 41, 42]),
    loss_fn_inputs={"target_tokens": [41, 42, 43]},
)
backward, step = training.forward_backward([datum]), training.optim_step(trio.AdamParams())
backward.result(), step.result()
path = training.save_state("state").result().path
resume = service.create_training_client_from_state_with_optimizer
if WITHOUT:
    resume = service.create_training_client_from_state
training = resume(path)
backward, step = training.forward_backward([datum]), training.optim_step(trio.AdamParams())
backward.result(), step.result()
training.save_state("state").result()
"""


@pytest.mark.parametrize("without", [True, False])
def test_a_lost_optimiser_is_an_error(without: bool, tmp_path: Path) -> None:
    """Training on from weights without their optimiser is found, and may be accepted."""
    script = tmp_path / "resume.py"
    script.write_text(RESUME.replace("WITHOUT", str(without)), encoding="utf-8")
    done = dryrun("run", "--record", "record", str(script), folder=tmp_path)
    assert done.returncode == (2 if without else 0), done.stderr
    assert ("A14-optimizer-lost" in done.stderr) is without
    again = dryrun("audit", "record", "--accept", "A14=a new stage", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert ("accepted A14-optimizer-lost (a new stage)" in again.stdout) is without


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--demo", "none.jsonl"], "--demo: cannot read none.jsonl"),
        (["stray"], "unrecognized arguments: stray (the script's own go after `--`)"),
    ],
)
def test_nothing_after_the_script_is_swallowed(
    arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    """An option of `run` behind the script is one of `run`; only what follows `--` is the
    script's."""
    script = tmp_path / "script.py"
    script.write_text("print('started')\n", encoding="utf-8")
    done = dryrun("run", script, *arguments, folder=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_without_an_optimiser_step_is_remarked(tmp_path: Path) -> None:
    """A loop whose every group is degenerate ends without error, but not without a word."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pytrio as trio\n"
        "client = trio.ServiceClient().create_lora_training_client('Qwen/Qwen3.5-4B', rank=4)\n"
        "client.save_weights_and_get_sampling_client()\n",
        encoding="utf-8",
    )
    done = dryrun("run", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no optimiser step was taken: nothing was trained" in done.stderr
