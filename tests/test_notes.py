"""What checkpoints.md, swanlab.md and troubleshooting.md say is what happens."""

import json
import os
import re
import signal
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import pytrio as trio
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pytrio import SamplingClient, ServiceClient, TrainingClient
from transformers import AutoModelForCausalLM, Qwen3Config

from conftest import DRYRUN, KEY, SKILL, Backend, dryrun, start_backend
from helpers import (
    adapted_model,
    adapter_tensors,
    checkpoint_id,
    downloaded,
    logprobs_of,
    random_sequences,
    run_id_of,
    service_on,
    supervised_datum,
    train_step,
)
from lint.check import check_source
from lint.rules import RULES as LINT_RULES
from test_audit import CASES as AUDIT_CASES
from test_lint import WRONG as LINT_CASES

REFERENCES = SKILL / "references"
MODEL = "Qwen/Qwen3.5-4B"
IDS = [11, 12, 13, 14, 15]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def note(name: str) -> str:
    return (REFERENCES / name).read_text(encoding="utf-8")


def plain(text: str) -> str:
    """One line: rich and pydantic break lines anywhere."""
    return " ".join(text.split())


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(trio.PyTrioError) as refused:
        call()
    return refused.value.message


@pytest.fixture(scope="module")
def service(backend: Backend) -> Iterator[ServiceClient]:
    with service_on(backend) as opened:
        yield opened


def new_run(service: ServiceClient, **lora: Any) -> TrainingClient:
    return service.create_lora_training_client(MODEL, **({"rank": 8, "seed": 1} | lora))


def train(client: TrainingClient, steps: int = 1) -> None:
    for step in range(steps):
        data = [supervised_datum(tokens) for tokens in random_sequences(step, [9, 14, 11])]
        train_step(client, data, learning_rate=1e-3)


def fingerprint(sampler: SamplingClient) -> list[float]:
    return sampler.compute_logprobs(trio.ModelInput.from_ints(IDS)).result()[1:]


# -- checkpoints.md --------------------------------------------------------------------------------


def python_blocks(name: str) -> list[str]:
    return BLOCK.findall(note(name))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="this system has no SIGKILL")
def test_the_durable_loop_survives_kill_9(
    service: ServiceClient, backend: Backend, tmp_path: Path
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(python_blocks("checkpoints.md")[0], encoding="utf-8")
    environment = {**os.environ, "PYTRIO_BASE_URL": backend.url, "PYTRIO_API_KEY": KEY}
    environment["HOME"] = str(tmp_path)
    adapters = {}
    for name, lines_before_kill in (("unbroken", None), ("killed", 3)):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, str(script)]
        if lines_before_kill:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
            )
            shown = [process.stdout.readline() for _ in range(lines_before_kill)]
            process.send_signal(signal.SIGKILL)
            assert process.wait(30) == -signal.SIGKILL
            process.stdout.close()
            assert shown[-1].startswith("step 3 ")
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stderr
        steps = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step")]
        assert steps == (["3", "4", "5", "6"] if lines_before_kill else list("123456"))
        state = json.loads((folder / "runs/resume/run_state.json").read_text(encoding="utf-8"))
        assert (state["step"], state["weights"].split("/")[-1]) == (6, "final")
        if name == "unbroken":
            first, last = done.stdout.splitlines()[0], done.stdout.splitlines()[-2]
            shown = re.search(r"loss_mean first ([\d.]+), last ([\d.]+)", note("dryrun.md"))
            assert shown is not None
            measured = [float(line.split()[2]) for line in (first, last)]
            assert [float(value) for value in shown.groups()] == pytest.approx(measured, rel=0.02)
        adapters[name] = adapter_tensors(downloaded(service, state["weights"], folder / "adapter"))
    assert adapters["unbroken"].keys() == adapters["killed"].keys()
    for name, tensor in adapters["unbroken"].items():
        assert torch.equal(tensor, adapters["killed"][name]), name


def test_which_save_keeps_what(service: ServiceClient, tmp_path: Path) -> None:
    client = new_run(service)
    train(client)
    state = client.save_state("kept").result()
    weights = client.save_weights_for_sampler("kept").result()
    assert state.path == f"trio://{client.training_run_cuid}/state/kept"
    assert weights.path == f"trio://{client.training_run_cuid}/sampler/kept"
    assert "optimizer.safetensors" in os.listdir(downloaded(service, state.path, tmp_path / "s"))
    of_weights = sorted(os.listdir(downloaded(service, weights.path, tmp_path / "w")))
    assert of_weights == ["adapter_config.json", "adapter_model.safetensors"]
    assert 2.5 < state.size / weights.size < 3.5
    assert "exists in this" in refusal(lambda: client.save_weights_for_sampler("kept").result())
    sampler = client.save_weights_and_get_sampling_client()
    rest = service.create_rest_client()
    temporary = rest.get_sampler(sampler.sampling_run_cuid).result().model_path
    listed = rest.list_checkpoints(client.training_run_cuid).result().checkpoints
    assert {c.path for c in listed} == {state.path, weights.path}
    assert "temp-sampling" in temporary
    assert {c.checkpoint_type for c in listed} == {"training", "sampler"}
    assert all(c.expires_at is None and c.public is False for c in listed)
    for path in (state.path, weights.path):
        assert fingerprint(service.create_sampling_client(MODEL, path)) == pytest.approx(
            fingerprint(sampler), abs=1e-6
        )


def test_another_client_evaluates_by_the_address(service: ServiceClient, backend: Backend) -> None:
    client = new_run(service)
    train(client)
    path = client.save_weights_for_sampler("kept").result().path
    expected = fingerprint(client.create_sampling_client(path))
    with service_on(backend) as other:
        assert fingerprint(other.create_sampling_client(MODEL, model_path=path)) == expected


def test_a_save_holds_what_was_submitted_before_it(service: ServiceClient) -> None:
    client, waited = new_run(service), new_run(service)
    data = [supervised_datum(IDS)]
    adam = trio.AdamParams(learning_rate=1e-3)
    client.forward_backward(data)
    client.optim_step(adam)
    saved = client.save_weights_for_sampler("first")
    client.forward_backward(data)
    client.optim_step(adam)
    waited.forward_backward(data).result()
    waited.optim_step(adam).result()
    path = waited.save_weights_for_sampler("first").result().path
    assert fingerprint(client.create_sampling_client(saved.result().path)) == fingerprint(
        waited.create_sampling_client(path)
    )
    assert fingerprint(client.save_weights_and_get_sampling_client()) != fingerprint(
        waited.create_sampling_client(path)
    )


def test_load_state_comes_before_the_first_operation(service: ServiceClient) -> None:
    client = new_run(service)
    path = client.save_state("start").result().path
    operations = {
        "forward": lambda c: c.forward([supervised_datum(IDS)]).result(),
        "optim_step": lambda c: c.optim_step(trio.AdamParams()).result(),
        "save": lambda c: c.save_state("own").result(),
    }
    for operation in operations.values():
        started = new_run(service)
        operation(started)
        assert "after training has started" in refusal(lambda c=started: c.load_state(path))
    fresh = new_run(service)
    fresh.get_tokenizer()
    fresh.load_state_with_optimizer(path).result()
    # A resumed run is another run, so the name is free.
    resumed = service.create_training_client_from_state_with_optimizer(path)
    assert resumed.training_run_cuid != client.training_run_cuid
    assert resumed.save_state("start").result().path != path


def test_a_download_continues_whatever_file_is_there(
    service: ServiceClient, tmp_path: Path
) -> None:
    client = new_run(service)
    old = client.save_weights_for_sampler("old").result().path
    new = client.save_state("new").result().path
    rest = service.create_rest_client()
    archive = tmp_path / "latest.zip"
    rest.download_checkpoint(checkpoint_id(service, old), archive).result()
    mixed = rest.download_checkpoint(checkpoint_id(service, new), archive).result()
    assert mixed.resumed and mixed.bytes_written < mixed.file_size_bytes
    with pytest.raises(zipfile.BadZipFile):
        with zipfile.ZipFile(archive) as opened:
            assert opened.testzip() is None or opened.extractall(tmp_path / "bad")
    whole = rest.download_checkpoint(checkpoint_id(service, new), archive, resume=False).result()
    assert not whole.resumed
    assert zipfile.ZipFile(archive).testzip() is None


def test_rest_client_takes_ids_and_gives_plain_futures(service: ServiceClient) -> None:
    client = new_run(service)
    path = client.save_state("state").result().path
    rest = service.create_rest_client()
    with pytest.raises(trio.PyTrioError):
        rest.get_checkpoint_archive_url(path).result()
    identity = checkpoint_id(service, path)
    link = rest.get_checkpoint_archive_url(identity)
    assert not hasattr(link, "__await__")
    assert link.result().url and link.result().expires
    rest.delete_checkpoint(run_id_of(path), identity).result()
    assert "no checkpoint at" in refusal(lambda: service.create_sampling_client(MODEL, path))


def test_the_sdk_publishes_nothing_and_serves_no_other_protocol() -> None:
    source = "".join(
        path.read_text(encoding="utf-8")
        for path in sorted(Path(trio.__file__).parent.rglob("*.py"))
    )
    assert "/openai" not in source.lower()
    rest = {name for name in dir(trio.RestClient) if not name.startswith("_")}
    assert not {name for name in rest if re.search("publish|visib|public|share", name)}


def test_the_merged_model_equals_the_sampler(
    service: ServiceClient, backend: Backend, tmp_path: Path
) -> None:
    """The note's own block, with its fresh client and its path replaced by trained ones."""
    client = new_run(service)
    train(client, 5)
    path = client.save_weights_for_sampler("trained").result().path
    block = python_blocks("checkpoints.md")[1]
    line = re.search(r"^path = training.*$", block, re.MULTILINE)
    assert line is not None
    script = tmp_path / "merge.py"
    script.write_text(block.replace(line[0], f"path = {path!r}"), encoding="utf-8")
    environment = {**os.environ, "PYTRIO_BASE_URL": backend.url, "PYTRIO_API_KEY": KEY}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**environment, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    expected = fingerprint(client.create_sampling_client(path))
    about = json.loads((tmp_path / "final/adapter_config.json").read_text(encoding="utf-8"))
    assert (about["r"], about["lora_alpha"], about["use_rslora"]) == (8, 512, False)
    assert "lm_head" in about["target_modules"]
    with torch.no_grad():
        adapted = adapted_model(tmp_path / "final")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        for model in (adapted, merged):
            found = logprobs_of(model.eval(), IDS[:-1], IDS[1:]).tolist()
            assert found == pytest.approx(expected, abs=1e-4)
        with adapted.disable_adapter():
            of_base = logprobs_of(adapted, IDS[:-1], IDS[1:]).tolist()
    assert max(abs(a - b) for a, b in zip(of_base, expected, strict=True)) > 0.1
    assert (tmp_path / "merged/tokenizer.json").is_file()


@pytest.mark.parametrize("untied", [False, True])
def test_a_tied_base_must_be_untied_before_merging(untied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_config(shape)
    base.save_pretrained(tmp_path / "base")
    adapter = get_peft_model(base, LoraConfig(r=4, target_modules=["lm_head"]))
    for name, parameter in adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapter.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    with torch.no_grad():
        expected = logprobs_of(adapter.eval(), IDS[:-1], IDS[1:])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert base.config.tie_word_embeddings
    if untied:
        untie = re.search(r"^if base.config.tie.*?\n(?=\w)", note("checkpoints.md"), re.M | re.S)
        assert untie is not None
        exec(untie[0], {"base": base, "torch": torch})
    merged = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    with torch.no_grad():
        found = logprobs_of(merged.eval(), IDS[:-1], IDS[1:])
    assert torch.allclose(found, expected, atol=1e-4) is untied


# -- swanlab.md ------------------------------------------------------------------------------------

# What every snippet can use: `told` collects what is asserted here; no answer comes from a network.
SWANLAB_START = """
import json, os, sys
import numpy as np
import swanlab

told = {}

def tell(name, call):
    try:
        told[name] = call()
    except BaseException as error:
        told[name] = f"{type(error).__name__}: {error}"

def started(**arguments):
    try:
        run = swanlab.init(**arguments)
        settings = run._ctx.config.settings
        return {"mode": run.mode, "name": run.name, "project": settings.project.name,
                "workspace": settings.project.workspace, "log_dir": str(settings.log_dir)}
    finally:
        if swanlab.has_run():
            swanlab.finish()
"""


@dataclass
class SwanlabRun:
    told: dict[str, Any]
    output: str
    code: int
    folder: Path


def swanlab_run(code: str, folder: Path, seconds: float = 60, **environment: str) -> SwanlabRun:
    """A snippet in its own process without terminal, key, or settings of this machine."""
    folder.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if "SWANLAB" not in name}
    script = folder / "snippet.py"
    end = "\nprint('TOLD' + json.dumps(told, default=str))\n"
    script.write_text(SWANLAB_START + dedent(code) + end, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**clean, "HOME": str(folder), "COLUMNS": "400", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    told = re.findall(r"^TOLD(.*)$", done.stdout, re.MULTILINE)
    return SwanlabRun(
        json.loads(told[-1]) if told else {}, done.stdout + done.stderr, done.returncode, folder
    )


def stored(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], str]:
    """Points by key, and the state of the end, of an offline run."""
    from swanlab.proto.swanlab.record.v1 import record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    reader = DataStoreReader()
    (path,) = folder.rglob("*.swanlab")
    reader.open(path)
    points: dict[str, list[tuple[int, float]]] = {}
    end = ""
    for raw in reader:
        record = record_pb2.Record()
        record.ParseFromString(raw)
        if record.HasField("scalar"):
            points.setdefault(record.scalar.key, []).append(
                (record.scalar.step, record.scalar.value.number)
            )
        if record.HasField("finish"):
            end = str(record.finish)
    return points, end


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> SwanlabRun:
    """`init` and the other calls, with everything people pass."""
    return swanlab_run(
        """
        off = {"mode": "disabled"}
        tell("log before", lambda: swanlab.log({"a": 1}))
        for mode in (None, "online", "cloud"):
            tell(f"mode {mode}", lambda: started(mode=mode))
        tell("mode dryrun", lambda: started(mode="dryrun"))
        tell("login", swanlab.login)
        tell("unknown", lambda: started(nmae="x", **off))
        tell("renamed", lambda: started(experiment_name="abc", logdir="there", **off))
        tell("both", lambda: started(experiment_name="old", name="new", **off))
        tell("positional", lambda: swanlab.init("p"))
        for project in ("a/b", "a b", "\\u6570\\u5b66", "a" * 101, "ok_-+.1"):
            tell(f"project {project}", lambda: started(project=project, **off))
        tell("no project", lambda: started(**off))
        tell("workspace", lambda: started(workspace="a/b", **off))
        tell("free name", lambda: started(name="\\u6570\\u5b66 run/1", **off))
        tell("long name", lambda: started(name="a" * 513, **off))
        tell("config object", lambda: started(config=object(), **off))
        tell("config repr", lambda: started(
            mode="offline", log_dir="config", config={"a": object(), "b": {"c": 1}}))
        tell("resume offline", lambda: started(mode="offline", log_dir="ids", id="abc"))
        swanlab.init(**off)
        tell("second", lambda: started(**off))
        swanlab.init(**off)
        tell("reinit", lambda: started(reinit=True, **off))
        tell("finish again", swanlab.finish)
        tell("define_scalar", lambda: swanlab.define_scalar)
        tell("define_metric", lambda: callable(swanlab.define_metric))
        for name in ("PROJECT", "EXPERIMENT", "RUN", "CORE", "PROBE"):
            os.environ[f"SWANLAB_{name}"] = "abc"
            tell(f"variable {name}", lambda: started(project="x", **off))
            del os.environ[f"SWANLAB_{name}"]
        tell("after", lambda: started(project="x", **off)["project"])
        new = {"MODE": "offline", "LOG_DIR": "there", "WORKSPACE": "space",
               "PROJECT_NAME": "project", "EXPERIMENT_NAME": "experiment"}
        old = {"MODE": "offline", "PROJ_NAME": "old-project", "EXP_NAME": "old-experiment"}
        bad = {"PROJ_NAME": "a/b", "MODE": "disabled"}
        for name, values, more in (("new", new, {}), ("old", old, off), ("bad", bad, {})):
            os.environ.update({f"SWANLAB_{k}": v for k, v in values.items()})
            tell(f"variables {name}", lambda: started(**more))
            for key in values:
                del os.environ[f"SWANLAB_{key}"]
        tell("local", lambda: started(mode="local", log_dir="local"))
        """,
        tmp_path_factory.mktemp("arguments"),
    )


@pytest.mark.slow
def test_swanlab_modes_and_names(arguments: SwanlabRun) -> None:
    import swanlab

    assert swanlab.__version__ in note("swanlab.md")
    told = arguments.told
    assert arguments.code == 0, arguments.output
    for mode in (None, "online", "cloud"):
        assert "no TTY is available for interactive login" in told[f"mode {mode}"]
    assert "Invalid mode: dryrun" in told["mode dryrun"]
    assert told["login"].startswith("AuthenticationError: No API key")
    assert told["unknown"]["name"] != "x"
    assert (told["renamed"]["name"], told["renamed"]["log_dir"]) == ("abc", "there")
    assert told["both"]["name"] == "new"
    assert told["positional"].startswith("TypeError")
    for project in ("a/b", "a b", "数学", "a" * 101):
        assert told[f"project {project}"].startswith("ValidationError"), project
    assert told["project ok_-+.1"]["project"] == "ok_-+.1"
    assert told["no project"]["project"] == arguments.folder.name
    assert told["workspace"].startswith("ValidationError")
    assert told["free name"]["name"] == "数学 run/1"
    assert told["long name"].startswith("ValidationError")
    assert told["config object"].startswith("ValueError: Invalid config type")
    (config,) = (arguments.folder / "config").rglob("config.yaml")
    assert "<object object at" in config.read_text(encoding="utf-8")
    assert told["resume offline"]["mode"] == "offline"
    assert "requires an inactive Run" in told["second"]
    assert told["reinit"]["mode"] == "disabled"
    assert told["finish again"] is None and "already finished" in plain(arguments.output)
    assert "has no attribute 'define_scalar'" in told["define_scalar"]
    assert told["define_metric"] is True


@pytest.mark.slow
def test_swanlab_variables(arguments: SwanlabRun) -> None:
    told = arguments.told
    for name in ("PROJECT", "EXPERIMENT", "RUN", "CORE", "PROBE"):
        message = told[f"variable {name}"]
        assert f'error parsing value for field "{name.lower()}"' in message
        assert "SWANLAB" not in message
    assert told["after"] == "x"
    new, old, bad = (told[f"variables {name}"] for name in ("new", "old", "bad"))
    assert new == {
        "mode": "offline",
        "name": "experiment",
        "project": "project",
        "workspace": "space",
        "log_dir": "there",
    }
    assert (old["mode"], old["project"], old["name"]) == (
        "disabled",
        "old-project",
        "old-experiment",
    )
    assert (bad["mode"], bad["project"]) == ("disabled", arguments.folder.name)
    assert "Invalid SWANLAB_PROJ_NAME='a/b', ignored" in plain(arguments.output)


@pytest.mark.slow
def test_swanlab_local_mode_without_its_package(arguments: SwanlabRun) -> None:
    assert arguments.told["local"]["mode"] == "local"
    assert "pip install 'swanlab[dashboard]'" in plain(arguments.output)
    assert list((arguments.folder / "local").rglob("*.swanlab"))


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> SwanlabRun:
    """An offline run with every kind of value and step."""
    return swanlab_run(
        """
        import multiprocessing, threading, time
        import torch

        swanlab.init(mode="offline", project="p", log_dir="log")
        for step, value in ((0, 1.0), (5, 2.0), (5, 3.0), (2, 4.0)):
            swanlab.log({"x": value}, step=step)
        for name, step in (("numpy", np.int64(3)), ("float", 3.0), ("negative", -1)):
            swanlab.log({name: 1.0}, step=step)
        swanlab.log({"none": None, "words": "abc", "list": [1, 2], "array": np.ones(2),
                     "beside": 1.0}, step=6)
        swanlab.log({"outer": {"inner": 1.0}, "text": "1.5", "nan": float("nan"),
                     "inf": float("inf"), "np": np.float32(1.5), "torch": torch.tensor(2.5),
                     "bool": True}, step=6)
        swanlab.log({"mixed": 1.0}, step=7)
        swanlab.log({"mixed": swanlab.Text("hello")}, step=8)
        swanlab.log({"auto": 1.0})
        swanlab.log({"other": 1.0})
        thread = threading.Thread(target=swanlab.log, args=({"thread": 1.0},))
        thread.start(); thread.join()
        child = multiprocessing.get_context("fork").Process(
            target=swanlab.log, args=({"forked": 1.0},))
        child.start(); child.join()
        told["child"] = child.exitcode
        begin = time.monotonic()
        for step in range(100):
            swanlab.log({f"k{i}": float(i) for i in range(100)}, step=step)
        told["seconds"] = time.monotonic() - begin
        swanlab.finish(state="crashed", error="mine")
        tell("after", lambda: swanlab.log({"late": 1}))
        """,
        tmp_path_factory.mktemp("logged"),
    )


@pytest.mark.slow
def test_swanlab_values_and_steps(logged: SwanlabRun) -> None:
    points, end = stored(logged.folder)
    assert points["x"] == [(0, 1.0), (5, 2.0), (2, 4.0)]
    dropped = {"numpy", "float", "negative", "none", "words", "list", "array", "forked", "late"}
    assert not dropped & set(points)
    values = {"beside": 1.0, "outer/inner": 1.0, "text": 1.5, "np": 1.5, "torch": 2.5, "bool": 1.0}
    assert {name: points[name] for name in values} == {n: [(6, v)] for n, v in values.items()}
    assert np.isnan(points["nan"][0][1]) and np.isinf(points["inf"][0][1])
    assert points["mixed"] == [(7, 1.0)]
    assert [points[name][0][0] for name in ("auto", "other", "thread")] == [9, 10, 11]
    assert len(points["k99"]) == 100
    assert "CRASHED" in end and '"mine"' in end
    assert logged.told["child"] == 1
    assert logged.told["seconds"] < 5
    assert "requires an active Run" in logged.told["after"]
    text = plain(logged.output)
    for kind in ("int64", "float"):
        assert f"Step must be an integer or None, but got {kind}." in text
    assert "Step must be non-negative, but got -1." in text
    assert "has already been defined as COLUMN_TYPE_SCALAR" in text


ENDINGS = {
    "exit": ("", 0, "FINISHED"),
    "exception": ("raise ValueError('boom')", 1, "CRASHED"),
    "kill": ("import time; time.sleep(1); os.kill(os.getpid(), 9)", -9, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDINGS)
def test_how_a_swanlab_run_ends(name: str, tmp_path: Path) -> None:
    last, code, state = ENDINGS[name]
    if name == "kill" and os.name != "posix":
        pytest.skip("this system has no SIGKILL")
    begin = "swanlab.init(mode='offline', log_dir='log')\nswanlab.log({'a': 1.0}, step=1)\n"
    result = swanlab_run(begin + last, tmp_path)
    assert result.code == code
    (path,) = tmp_path.rglob("*.swanlab")
    if name == "kill":
        assert path.stat().st_size == 0
    else:
        points, end = stored(tmp_path)
        assert points == {"a": [(1, 1.0)]} and state in end


@pytest.mark.slow
def test_swanlab_online_without_a_network(tmp_path: Path) -> None:
    online = swanlab_run(
        """
        import time

        begin = time.monotonic()
        tell("online", lambda: started(mode="online", project="x"))
        told["seconds"] = time.monotonic() - begin
        tell("alive", swanlab.has_run)
        """,
        tmp_path,
        SWANLAB_API_KEY="not-a-key",
        SWANLAB_API_HOST="http://127.0.0.1:9",
    )
    assert "Failed to initialize the SwanLab client." in online.told["online"]
    assert 8 < online.told["seconds"] < 40
    assert online.told["alive"] is False


def test_the_swanlab_pattern_never_stops_a_run(tmp_path: Path) -> None:
    """The note's block, while every call of swanlab raises; the record is complete."""
    (tmp_path / "swanlab.py").write_text(
        "def fail(**arguments):\n    raise RuntimeError('down')\n\ninit = log = finish = fail\n",
        encoding="utf-8",
    )
    (block,) = python_blocks("swanlab.md")
    script = tmp_path / "pattern.py"
    script.write_text(block, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "SWANLAB_PROJECT": "plain"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("failed, metrics.jsonl goes on: down") == 5
    rows = (tmp_path / "runs/demo/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3]


def test_swanlab_names_are_those_of_the_examples() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (SKILL / "examples").glob("*.py")]
    table = note("swanlab.md").split("## Names people chart")[1]
    names = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*)`", table)) - {"config"}
    assert len(names) > 40
    missing = {n for n in names if not any(re.search(rf"[\"']{n}[\"']", s) for s in sources)}
    assert not missing


# -- troubleshooting.md ----------------------------------------------------------------------------

START = """\
import asyncio
import numpy as np
import torch
import pytrio as trio
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=8)
tokenizer = training.get_tokenizer()
sampler = training.save_weights_and_get_sampling_client()
"""


@dataclass(frozen=True)
class Row:
    """One row of a table of the note."""

    message: str
    rules: list[str]

    @property
    def fragments(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.message)

    @property
    def is_symptom(self) -> bool:
        return self.message.startswith("*")


def rows() -> list[Row]:
    lines = [line for line in note("troubleshooting.md").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == 4 for row in cells), [row for row in cells if len(row) != 4]
    return [
        Row(message, [code.strip() for code in rule.split(",") if code.strip()])
        for message, _, _, rule in cells
        if message and not message.startswith(("Message", "---"))
    ]


ROWS = rows()
MESSAGES = [row for row in ROWS if not row.is_symptom]


@dataclass
class Lab:
    """What the snippets see, and what other proofs need."""

    names: dict[str, Any]
    folder: Path
    faulty: Backend
    broke: Backend
    swanlab: str
    cache: dict[str, str] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], str]) -> str:
        if name not in self.cache:
            self.cache[name] = make()
        return self.cache[name]


@pytest.fixture(scope="module")
def lab(
    service: ServiceClient,
    arguments: SwanlabRun,
    logged: SwanlabRun,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    training = new_run(service)
    train(training)
    policy = {"target_tokens": [6, 7], "logprobs": [0.0, -0.5], "advantages": [0.0, 1.0]}
    names = {
        "trio": trio,
        "np": np,
        "torch": torch,
        "service": service,
        "training": training,
        "tokenizer": training.get_tokenizer(),
        "sampler": training.save_weights_and_get_sampling_client(),
        "state_path": training.save_state("lab").result().path,
        "weights_path": training.save_weights_for_sampler("lab").result().path,
        "datum": supervised_datum([5, 6, 7]),
        "policy": trio.Datum(model_input=trio.ModelInput.from_ints([5, 6]), loss_fn_inputs=policy),
        "folder": folder,
    }
    faults = "capacity=2,fail_chunk=1,lost_actor=1"
    faulty = start_backend(folder / "faulty", "--fault", faults, "--max-batch-size", "1")
    broke = start_backend(folder / "broke", "--fault", "billing_409")
    swanlab = [arguments.output, logged.output, *arguments.told.values(), *logged.told.values()]
    yield Lab(names, folder, faulty, broke, "\n".join(map(str, swanlab)))
    faulty.stop()
    broke.stop()


def told_by(code: str, names: dict[str, Any]) -> str:
    """The exception and the warnings of a snippet."""
    with warnings.catch_warnings(record=True) as seen:
        # The SDK warns with UserWarning; others may be of objects that are collected just now.
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        try:
            exec(compile(code, "snippet", "exec"), dict(names))
            text = ""
        except BaseException as error:  # SystemExit and pydantic's, too
            text = f"{type(error).__name__}: {error}"
    return plain("\n".join([text, *(str(warning.message) for warning in seen)]))


Proof = str | Callable[[Lab], str]


def in_process(code: str, *options: str, **environment: str) -> Callable[[Lab], str]:
    """Everything a snippet in a process of its own writes."""

    def prove(lab: Lab) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTRIO", "SWANLAB"))}
        done = subprocess.run(
            [sys.executable, *options, "-c", dedent(code)], cwd=lab.folder, capture_output=True,
            text=True, timeout=60, env={**clean, "HOME": str(lab.folder), **environment},
        )  # fmt: skip
        return done.stdout + done.stderr

    return prove


def in_dryrun(code: str, *arguments: str) -> Callable[[Lab], str]:
    def prove(lab: Lab) -> str:
        script = lab.folder / f"script{len(list(lab.folder.glob('script*')))}.py"
        script.write_text(dedent(code), encoding="utf-8")
        ended = dryrun("run", script, *arguments, folder=lab.folder)
        return ended.stdout + ended.stderr

    return prove


def without_a_login(lab: Lab) -> str:
    """No key, no network, no tokenizer package, no such profile: one after the other."""
    code = """
        import sys
        import pytrio
        from pytrio.model.tokenizer import get_tokenizer

        def tell(call):
            try:
                call()
            except Exception as error:
                print(error)

        tell(pytrio.ServiceClient)
        pytrio.configure(base_url="http://127.0.0.1:9", api_key="x",
                         control_retry_timeout_seconds=0.1, retry_max_attempts=1)
        tell(pytrio.ServiceClient)
        sys.modules.update(transformers=None, modelscope=None)
        tell(lambda: get_tokenizer("x"))
        pytrio.configure(env="staging")
        tell(pytrio.ServiceClient)
        """
    return lab.once("login", lambda: in_process(code)(lab))


def leaving_late(lab: Lab) -> str:
    """A run without a step, that ends at a hidden address."""
    code = """
        import sys
        from pathlib import Path
        import pytrio
        pytrio.ServiceClient().create_lora_training_client("Qwen/Qwen3.5-4B", rank=8)
        sys.path.insert(0, ".")
        text = "import pytrio; pytrio.configure(base_url='https://pytrio.com')"
        Path("company_settings.py").write_text(text, encoding="utf-8")
        import company_settings
        pytrio.ServiceClient()
        """
    return lab.once("leaving", lambda: in_dryrun(code)(lab))


def old_sdk(lab: Lab) -> str:
    about = lab.folder / "old" / "pytrio-0.2.7.dist-info"
    about.mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: pytrio\nVersion: 0.2.7\n"
    (about / "METADATA").write_text(metadata, encoding="utf-8")
    ended = dryrun("doctor", folder=lab.folder, PYTHONPATH=str(about.parent))
    return ended.stdout + ended.stderr


def without_torch(lab: Lab) -> str:
    """A value of None in sys.modules makes its import fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        custom = lab.names["training"].forward_backward_custom
        return refusal(lambda: custom([lab.names["datum"]], lambda data, logprobs: (None, {})))


def on_faulty(lab: Lab) -> str:
    """No capacity at first; then a failed chunk, and a sampling run that is lost."""

    def make() -> str:
        seen = []
        waits = {"actor_capacity_wait_timeout_seconds": 0.05}
        waits |= {"actor_capacity_poll_interval_seconds": 1.0}
        with service_on(lab.faulty, **waits, sampling_retry_timeout_seconds=0.5) as service:
            names = {"service": service, "trio": trio, "datum": lab.names["datum"]}
            seen.append(told_by(f"service.create_lora_training_client({MODEL!r})", names))
            names["training"] = service.create_lora_training_client(MODEL, rank=8)
            seen.append(told_by("training.forward_backward([datum, datum]).result()", names))
            seen.append(told_by("training.forward_backward([datum]).result()", names))
            names["sampler"] = service.create_sampling_client(MODEL)
            for _ in range(2):
                ask = "sampler.compute_logprobs(trio.ModelInput.from_ints([5, 6])).result()"
                seen.append(told_by(ask, names))
        return "\n".join(seen)

    return lab.once("faulty", make)


def on_broke(lab: Lab) -> str:
    with service_on(lab.broke) as service:
        return told_by(f"service.create_sampling_client({MODEL!r})", {"service": service})


def expired(lab: Lab) -> str:
    import time

    path = lab.names["training"].save_state("short", ttl_seconds=1).result().path
    time.sleep(1.2)
    return refusal(lambda: lab.names["service"].create_training_client_from_state(path))


def mixed_archive(lab: Lab) -> str:
    service, archive = lab.names["service"], lab.folder / "mixed.zip"
    rest = service.create_rest_client()
    for path in (lab.names["weights_path"], lab.names["state_path"]):
        rest.download_checkpoint(checkpoint_id(service, path), archive).result()
    with zipfile.ZipFile(archive) as opened:
        return told_by("opened.extractall(folder)", {**lab.names, "opened": opened})


def of_swanlab(lab: Lab) -> str:
    return lab.swanlab


def send(loss_fn_inputs: str, loss: str = "cross_entropy", tokens: str = "[5, 6]") -> str:
    return (
        f"d = trio.Datum(model_input=trio.ModelInput.from_ints({tokens}), "
        f"loss_fn_inputs={loss_fn_inputs})\n"
        f"training.forward_backward([d], loss_fn={loss!r}).result()\n"
    )


def ask(prompt: str = "trio.ModelInput.from_ints([5])", more: str = "max_tokens=1") -> str:
    return (
        f"sampler.sample({prompt}, num_samples=1, "
        f"sampling_params=trio.SamplingParams({more})).result()"
    )


# How each message is provoked: a snippet of Python that uses the SDK, or a function.
# By the first quoted fragment of the row; a row without an entry fails.
PROOFS: dict[str, Proof] = {
    "No module named 'trio'": in_process("import trio", "-I", "-S"),
    "pytrio 0.2.7 is not supported": old_sdk,
    "Detected missing tokenizer backend.": without_a_login,
    "Detected missing 'torch'.": without_torch,
    "Unknown configuration option 'timeout' was ignored.": "trio.configure(timeout=600)",
    "'TrainingClient' object has no attribute 'close'": "training.close()",
    "module 'pytrio' has no attribute 'TensorData'": "trio.TensorData(data=[1.0])",
    "got an unexpected keyword argument 'name'": (
        'training.save_weights_and_get_sampling_client(name="x")'
    ),
    "'ServiceClient' object has no attribute 'get_tokenizer'": "service.get_tokenizer()",
    "API key cannot be empty": without_a_login,
    "sets a key; leave it to PYTRIO_API_KEY": in_dryrun(
        """
        import pytrio as trio
        trio.ServiceClient(api_key="KEYKEYKEYKEYKEYKEYKEY")
        """
    ),
    "Server profile staging does not exist": without_a_login,
    "The Control request failed after retries.": without_a_login,
    "Your workspace balance is insufficient or overdue.": on_broke,
    "Server remained at capacity until the wait timeout.": on_faulty,
    "rank must be in [4, 64]. Got 128": (
        'service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=128)'
    ),
    "Input should be a valid list": (
        'ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])\n'
        "trio.ModelInput.from_ints(ids)"
    ),
    "Only numeric lists are allowed for TensorData": send(
        '{"target_tokens": [6, 7], "logprobs": [None, -0.5], "advantages": [0.0, 1.0]}', "ppo"
    ),
    "target_tokens must have shape [2], got [3]": send('{"target_tokens": [6, 7, 8]}'),
    "weights must have shape [2], got [1]": send('{"target_tokens": [6, 7], "weights": [1.0]}'),
    "advantages[1] must be finite for sample": send(
        '{"target_tokens": [6, 7], "logprobs": [0.0, -1.0], "advantages": [0.0, np.nan]}', "ppo"
    ),
    "target_tokens must have dtype int64": send('{"target_tokens": [6.0, 7.0]}'),
    "logprobs is required": send('{"target_tokens": [6, 7], "weights": [0.0, 1.0]}', "ppo"),
    "training input token ID is outside the tokenizer vocabulary": send(
        '{"target_tokens": [6, 7]}', tokens="[5, len(tokenizer)]"
    ),
    "training data cannot be empty": "training.forward_backward([]).result()",
    "training sample exceeds max_seq_len": send(
        '{"target_tokens": [6] * 100_000}', tokens="[5] * 100_000"
    ),
    "image chunks require expected_tokens to calculate model input length": (
        'len(trio.ModelInput(chunks=[trio.ImageChunk(data=b"x", format="png")]))'
    ),
    "Unsupported loss function type: grpo": (
        'training.forward_backward([datum], loss_fn="grpo").result()'
    ),
    "has no setting 'clip_epsilon' here": (
        'training.forward_backward([policy], "ppo", {"clip_epsilon": 0.2}).result()'
    ),
    "clip thresholds are bounds of the ratio": (
        'bounds = {"clip_low_threshold": 0.2, "clip_high_threshold": 0.1}\n'
        'training.forward_backward([policy], "ppo", bounds).result()'
    ),
    "Extra inputs are not permitted": "trio.AdamParams(lr=1e-4)",
    "'APIFuture' object has no attribute 'metrics'": (
        "print(training.forward_backward([datum]).metrics)"
    ),
    "KeyError: 'loss'": 'print(training.forward([datum]).result().metrics["loss"])',
    "zero-dimensional arrays cannot be concatenated": (
        "outputs = training.forward([datum]).result().loss_fn_outputs\n"
        'np.concatenate([np.asarray(output["logprobs"]) for output in outputs])'
    ),
    "element 0 of tensors does not require grad": (
        "def loss(data, logprobs):\n    return -logprobs[0].detach().sum(), {}\n"
        "training.forward_backward_custom([datum], loss).result()"
    ),
    "Custom loss output has no gradients.": (
        "def loss(data, logprobs):\n    return -logprobs[0].sum(), {}\n"
        "training.forward_backward_custom([datum, datum], loss).result()"
    ),
    "Cannot synchronously wait on SDKEventLoopRunner from its own event loop": (
        "def loss(data, logprobs):\n    training.forward(data).result()\n"
        "    return -logprobs[0].sum(), {}\n"
        "training.forward_backward_custom([datum], loss).result()"
    ),
    "The training run coordinator is no longer safe to use.": on_faulty,
    "sampling_params.max_tokens must be greater than 0": ask(more=""),
    "exceed the context of": ask(more="max_tokens=100_000"),
    "prompt cannot be empty": ask("trio.ModelInput.from_ints([])"),
    "'list' object has no attribute 'is_empty'": ask("[5, 6]"),
    "'SampleResponse' object has no attribute 'text'": f"print({ask()}.text)",
    "'SampleSequence' object has no attribute 'finish_reason'": (
        f"response = {ask()}\nprint([s.finish_reason for s in response.sequences])"
    ),
    "unsupported operand type(s) for +: 'int' and 'NoneType'": (
        "sum(sampler.compute_logprobs(trio.ModelInput.from_ints([5, 6])).result())"
    ),
    "compute_logprobs does not support image chunks": (
        'picture = trio.ImageChunk(data=b"x", format="png")\n'
        "sampler.compute_logprobs(trio.ModelInput(chunks=[picture])).result()"
    ),
    "is a checkpoint address: pass the base model's name": (
        "service.create_sampling_client(state_path)"
    ),
    "fault: the actor of this run is gone": on_faulty,
    "object SampleResponse can't be used in 'await' expression": (
        "import asyncio\n"
        "async def main():\n"
        "    params = trio.SamplingParams(max_tokens=1)\n"
        "    prompt = trio.ModelInput.from_ints([5])\n"
        "    return await (await sampler.sample_async(prompt, 1, params))\n"
        "asyncio.run(main())"
    ),
    "'coroutine' object has no attribute 'forward'": (
        'client = service.create_lora_training_client_async("Qwen/Qwen3.5-4B")\n'
        "client.forward([datum])"
    ),
    "object Future can't be used in 'await' expression": (
        "import asyncio\n"
        "async def main():\n"
        "    return await service.create_rest_client().list_user_checkpoints()\n"
        "asyncio.run(main())"
    ),
    "asyncio.run() cannot be called from a running event loop": (
        "import asyncio\n"
        "async def main():\n"
        "    pass\n"
        "async def cell():\n"
        "    asyncio.run(main())\n"
        "asyncio.run(cell())"
    ),
    "load_state cannot be called after training has started.": "training.load_state(state_path)",
    "Checkpoint configuration is incompatible: lora_rank (target=4, source=8)": (
        'client = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=4)\n'
        "client.load_state(state_path).result()"
    ),
    "checkpoint name must match": 'training.save_state("step=1").result()',
    "exists in this training run": (
        'for step in range(2):\n    training.save_state("same").result()'
    ),
    "holds sampler weights without optimiser state": (
        "service.create_training_client_from_state_with_optimizer(weights_path)"
    ),
    "no checkpoint at": 'service.create_training_client_from_state("trio://run/state/gone")',
    "has expired": expired,
    "BadZipFile: Bad": mixed_archive,
    "signal only works in main thread of the main interpreter": in_process(
        """
        import signal, threading
        threading.Thread(target=lambda: signal.signal(signal.SIGALRM, print)).start()
        """
    ),
    "no TTY is available for interactive login": of_swanlab,
    'error parsing value for field "project"': of_swanlab,
    r"String should match pattern '^[0-9a-zA-Z_\-+.]+$'": of_swanlab,
    "Step must be an integer or None, but got int64": of_swanlab,
    "Failed to extract scalar value from builtins.NoneType": of_swanlab,
    "requires an inactive Run": of_swanlab,
    "requires an active Run": of_swanlab,
    "opened no session on the backend": in_dryrun("print('hello')\n"),
    "the script tried to reach": leaving_late,
    "no optimiser step was taken: nothing was trained": leaving_late,
}

# What the note recommends instead, by the message: it runs without one.
FIXES: dict[str, str] = {
    "Unknown configuration option 'timeout' was ignored.": (
        "trio.configure(request_timeout_seconds=30)"
    ),
    "module 'pytrio' has no attribute 'TensorData'": (
        'trio.types.TensorData(data=[1.0], dtype="float32")\n'
        + send('{"target_tokens": np.array([6, 7]), "weights": torch.ones(2)}')
    ),
    "got an unexpected keyword argument 'name'": (
        'path = training.save_weights_for_sampler("fixed").result().path\n'
        "training.create_sampling_client(path)"
    ),
    "'ServiceClient' object has no attribute 'get_tokenizer'": (
        "assert len(training.get_tokenizer()) == len(sampler.get_tokenizer())"
    ),
    "Input should be a valid list": (
        'messages = [{"role": "user", "content": "Hi"}]\n'
        "text = tokenizer.apply_chat_template(messages, tokenize=False)\n"
        "trio.ModelInput.from_ints(tokenizer.encode(text, add_special_tokens=False))"
    ),
    "image chunks require expected_tokens to calculate model input length": (
        'picture = trio.ImageChunk(data=b"x", format="png", expected_tokens=4)\n'
        "assert len(trio.ModelInput(chunks=[picture])) == 4"
    ),
    "clip thresholds are bounds of the ratio": (
        'bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}\n'
        'training.forward_backward([policy], "ppo", bounds).result()'
    ),
    "Extra inputs are not permitted": "trio.AdamParams(learning_rate=1e-4, grad_clip_norm=1.0)",
    "'APIFuture' object has no attribute 'metrics'": (
        "metrics = training.forward_backward([datum]).result().metrics\n"
        'assert set(metrics) == {"loss_sum", "loss_mean", "token_count"}'
    ),
    "zero-dimensional arrays cannot be concatenated": (
        "outputs = training.forward([datum]).result().loss_fn_outputs\n"
        'np.concatenate([output["logprobs"].to_numpy() for output in outputs])'
    ),
    "Custom loss output has no gradients.": (
        "def loss(data, logprobs):\n    return -logprobs[0].sum() + 0 * logprobs[1].sum(), {}\n"
        "training.forward_backward_custom([datum, datum], loss).result()"
    ),
    "'SampleSequence' object has no attribute 'finish_reason'": (
        f"response = {ask()}\n"
        "assert {s.stop_reason for s in response.sequences} <= {'stop', 'length'}\n"
        "assert isinstance(response.sequences[0].text, str)"
    ),
    "unsupported operand type(s) for +: 'int' and 'NoneType'": (
        "sum(sampler.compute_logprobs(trio.ModelInput.from_ints([5, 6])).result()[1:])"
    ),
    "is a checkpoint address: pass the base model's name": (
        'service.create_sampling_client("Qwen/Qwen3.5-4B", model_path=state_path)'
    ),
    "object SampleResponse can't be used in 'await' expression": (
        "import asyncio\n"
        "async def main():\n"
        "    params = trio.SamplingParams(max_tokens=1)\n"
        "    return await sampler.sample_async(trio.ModelInput.from_ints([5]), 1, params)\n"
        "assert asyncio.run(main()).sequences"
    ),
    "object Future can't be used in 'await' expression": (
        "import asyncio\n"
        "async def main():\n"
        "    return await service.create_rest_client().list_user_checkpoints_async()\n"
        "assert asyncio.run(main()).checkpoints"
    ),
    "load_state cannot be called after training has started.": (
        "service.create_training_client_from_state(state_path).forward([datum]).result()"
    ),
    "exists in this training run": (
        'for step in range(2):\n    training.save_state("again", overwrite=True).result()'
    ),
    "holds sampler weights without optimiser state": (
        "service.create_training_client_from_state_with_optimizer(state_path)\n"
        "service.create_training_client_from_state(weights_path)"
    ),
}

# Snippets of the check's rules for rows whose proof is no snippet of the SDK.
CHECKED_ELSEWHERE = {"C12", "C18", "C23"}


def test_the_table_is_large_and_every_row_has_a_proof() -> None:
    assert len(ROWS) >= 40
    assert len(MESSAGES) >= 25
    first = [row.fragments[0] if row.fragments else "" for row in MESSAGES]
    assert sorted(first) == sorted(PROOFS), set(first) ^ set(PROOFS)
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("row", MESSAGES, ids=lambda row: row.message[:40])
def test_the_message_is_exact(row: Row, lab: Lab) -> None:
    proof = PROOFS[row.fragments[0]]
    told = told_by(proof, lab.names) if isinstance(proof, str) else proof(lab)
    assert row.fragments[0] in plain(told), plain(told)[-600:]


@pytest.mark.parametrize("message", FIXES)
def test_the_fix_runs(message: str, lab: Lab) -> None:
    assert message in PROOFS
    assert told_by(FIXES[message], lab.names) == ""


@pytest.mark.parametrize("row", [r for r in MESSAGES if r.rules], ids=lambda row: row.message[:40])
def test_the_check_finds_it_before(row: Row) -> None:
    """Where a message names a rule of the check, the snippet that provokes it is a finding."""
    proof = PROOFS[row.fragments[0]]
    static = {rule for rule in row.rules if rule.startswith("C")}
    if isinstance(proof, str):
        found = {finding.code for finding in check_source(START + proof + "\n", "snippet.py")}
        assert static <= found, found
    else:
        assert static <= CHECKED_ELSEWHERE


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.message[:40])
def test_rules_exist_and_are_proven(row: Row) -> None:
    """Every code is one of the check or the audit that a test of its own makes fire."""
    checked = {code for code, _, _ in LINT_CASES}
    known = {rule.code for rule in LINT_RULES}
    for code in row.rules:
        assert code in (known & checked if code.startswith("C") else set(AUDIT_CASES)), code
    if row.is_symptom:
        assert row.rules


def test_codes_of_every_note_exist() -> None:
    """Also in the text around the tables, and in the notes beside it."""
    known = {rule.code for rule in LINT_RULES} | set(AUDIT_CASES)
    known |= {name.split("-")[0] for name in AUDIT_CASES}
    for name in ("checkpoints.md", "swanlab.md", "troubleshooting.md", "dryrun.md"):
        for code in re.findall(r"\b[AC]\d\d(?:-[a-z]+)*\b", note(name)):
            assert code in known, (name, code)


def test_a_printed_error_has_its_hint(lab: Lab) -> None:
    with pytest.raises(trio.PyTrioError) as refused:
        lab.names["training"].save_state("step=1")
    error = refused.value
    assert error.code == "validation.invalid_checkpoint_name"
    assert error.hint in str(error) and error.retryable is False


def test_the_command_of_the_first_lines_works(tmp_path: Path) -> None:
    shown = dryrun("rules", "A05", folder=tmp_path)
    assert shown.returncode == 0 and "A05-stale" in shown.stdout
    assert DRYRUN.is_file()
