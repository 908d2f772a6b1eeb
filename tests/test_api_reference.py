"""references/api.md and answers.md are what the installed SDK and the backend do.

Every fact marked (T) in the generator is proven here, by a test that carries its key, or by one of
another file that is named in PROVEN_ELSEWHERE; so are the answers that claim to be measured.
"""

import ast
import asyncio
import concurrent.futures
import hashlib
import inspect
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import modelscope
import numpy as np
import pydantic
import pytest
import pytrio as trio
import torch
from pytrio import AdamParams, Datum, ModelInput, PyTrioError, SamplingParams, ServiceClient
from pytrio.config import config as sdk_config
from pytrio.errors.event import EventFailedError
from pytrio.transport.retry import RETRYABLE_STATUS_CODES
from pytrio.types import APIFuture

import gen_api_reference as generator
from conftest import KEY, ROOT, SKILL, Backend
from helpers import BASE_MODEL, service_on, supervised_datum

API = SKILL / "references" / "api.md"
ANSWERS = SKILL / "references" / "answers.md"
TOKENS = [40, 41, 42, 43, 44]
ONE_TOKEN = SamplingParams(max_tokens=1)

# Facts of api.md -> a test of another file that executes them.
PROVEN_ELSEWHERE = {
    "accumulate": "test_losses.py::test_gradients_accumulate_until_the_step_and_not_beyond",
    "capacity": "test_protocol.py::test_capacity_is_waited_for_and_dead_tokens_are_renewed",
    "from-state": "test_checkpoints.py::test_resuming_without_optimizer_restores_weights_only",
    "rest-download": "test_checkpoints.py::test_downloading_whole_and_resumed",
    "sample-snapshot": "test_sampling.py::test_an_old_sampler_keeps_its_weights",
    "splitting": "test_losses.py::test_a_split_call_has_the_gradients_of_the_whole",
}
# Questions of answers.md -> the same.
SAMPLING = "test_sampling.py::test_"
MEASURED_ELSEWHERE = {
    "Are unknown `loss_fn_config` keys refused?": (
        "test_losses.py::test_bad_settings_are_refused_and_leave_no_gradient"
    ),
    "Do gradients add up over calls?": PROVEN_ELSEWHERE["accumulate"],
    "Do sampled tokens contain the end token?": (
        f"{SAMPLING}the_end_of_the_turn_is_part_of_the_sequence"
    ),
    "Does `text` contain it?": f"{SAMPLING}special_token_as_a_stop_string",
    "Are log-probabilities before or after temperature?": (
        f"{SAMPLING}tempered_and_filtered_sequences_report_true_logprobs"
    ),
    "Do sampler and trainer give the same log-probabilities?": (
        f"{SAMPLING}sampled_logprobs_equal_a_forward_of_the_trainer"
    ),
    "What does the same seed give twice?": f"{SAMPLING}seeds",
    "Does a sampling client see later steps?": PROVEN_ELSEWHERE["sample-snapshot"],
    "Does a fresh LoRA equal the base model?": (
        f"{SAMPLING}a_base_sampler_needs_no_checkpoint_and_equals_a_fresh_adapter"
    ),
    "What if the process dies?": "test_examples.py::test_it_survives_kill_9",
}

proven: set[str] = set()
measured: set[str] = set()


def proves(*keys: str) -> Callable[[Any], Any]:
    """Marks a test as the proof of facts of api.md."""

    def register(test: Any) -> Any:
        proven.update(keys)
        return test

    return register


def answers(*questions: str) -> Callable[[Any], Any]:
    """Marks a test as the measurement behind answers of answers.md."""

    def register(test: Any) -> Any:
        measured.update(questions)
        return test

    return register


@pytest.fixture(scope="module")
def service(backend: Backend) -> Iterator[ServiceClient]:
    with service_on(backend) as opened:
        yield opened


def new_run(service: ServiceClient, rank: int = 8, **lora: Any) -> trio.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=rank, **lora)


@pytest.fixture(scope="module")
def training(service: ServiceClient) -> trio.TrainingClient:
    """A run that has started, for tests that do not care about its weights."""
    client = new_run(service)
    client.forward(some_data()).result()
    return client


def some_data(count: int = 1) -> list[Datum]:
    return [supervised_datum(TOKENS) for _ in range(count)]


def policy_datum(**changed: Any) -> Datum:
    """A datum that every policy loss takes, but for what is changed."""
    inputs = {"target_tokens": TOKENS[1:], "logprobs": [-1.0] * 4, "advantages": [1.0] * 4}
    given = {k: v for k, v in (inputs | changed).items() if v is not None}
    return Datum(model_input=ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=given)


def code_of(call: Callable[[], Any]) -> str:
    """The code with which a call is refused."""
    with pytest.raises(PyTrioError) as refused:
        call()
    return refused.value.code


@pytest.fixture
def requests(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """`requests()` lists method and path of what was sent since the last call; heartbeats,
    telemetry and the end of collected clients come whenever they like and are left out."""
    caplog.set_level(logging.INFO, logger="httpx")

    def sent() -> list[str]:
        found = []
        for record in caplog.records:
            match = re.match(r"HTTP Request: (\w+) \S+?//[^/]+(/[^\s?]*)", record.getMessage())
            if match and not re.search(r"heartbeat|telemetry|/close$", match[2]):
                found.append(f"{match[1]} {match[2]}")
        caplog.clear()
        return found

    return sent


# -- the file and its generator --------------------------------------------------------------------


def test_check_passes_on_the_installed_sdk() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gen_api_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout


def checked(monkeypatch: pytest.MonkeyPatch, path: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["gen_api_reference.py", "--check", "--file", str(path)])
    return generator.main()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"pytrio {generator.version('pytrio')}", "pytrio 0.2.8"),
        ("overwrite=False", "overwrite=True"),
        ("-> APIFuture[OptimStepResponse]  async 2", "-> APIFuture[OptimStepResponse]  async 1"),
        ("max_tokens: int | None", "max_new_tokens: int | None"),
        ("training.run_broken", "training.broken"),
        ("first 180 + 20 hex", "first 160 + 40 hex"),
    ],
)
def test_any_change_of_the_file_is_found(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    old: str,
    new: str,
) -> None:
    text = API.read_text(encoding="utf-8")
    assert old in text
    changed = tmp_path / "api.md"
    changed.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert checked(monkeypatch, changed) == 1
    assert "run scripts/gen_api_reference.py" in capsys.readouterr().err
    assert changed.read_text(encoding="utf-8") == text.replace(old, new, 1)


def test_writing_replaces_the_whole_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "api.md"
    target.write_text("old", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["gen_api_reference.py", "--file", str(target)])
    assert generator.main() == 0
    assert target.read_text(encoding="utf-8") == API.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [target]


def test_a_change_of_the_sdk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new method, a new type and a new error code each make the check fail."""

    def brand_new(self: object, count: int = 3) -> int:
        return count

    with monkeypatch.context() as patched:
        patched.setattr(trio.SamplingClient, "brand_new", brand_new, raising=False)
        assert any("+brand_new(count=3) -> int" in line for line in _difference())
    with monkeypatch.context() as patched:
        patched.setattr(trio.types, "BrandNew", type("BrandNew", (), {}), raising=False)
        assert any("+BrandNew" in line for line in _difference())
    known = generator.codes_of_sdk()
    with monkeypatch.context() as patched:
        patched.setattr(generator, "codes_of_sdk", lambda: known | {"validation.brand_new"})
        with pytest.raises(SystemExit, match="no entry in CODES for: validation.brand_new"):
            generator.generate()
    with monkeypatch.context() as patched:
        patched.setattr(generator, "codes_of_sdk", lambda: known - {"training.run_broken"})
        with pytest.raises(SystemExit, match="CODES names what the SDK does not have"):
            generator.generate()
    assert not _difference()


def _difference() -> list[str]:
    return generator.difference(generator.generate(), API)


def section(name: str) -> str:
    """One section of api.md, by its heading."""
    return API.read_text(encoding="utf-8").partition(f"\n## {name}\n")[2].partition("\n## ")[0]


CLIENTS = [trio.ServiceClient, trio.TrainingClient, trio.SamplingClient, trio.RestClient]


@pytest.mark.parametrize("cls", CLIENTS, ids=lambda cls: cls.__name__)
def test_every_public_method_is_listed(cls: type) -> None:
    """Asked of `dir`, not of the generator."""
    lines = section(cls.__name__).splitlines()
    for name in dir(cls):
        if name.startswith("_"):
            continue
        listed = [line for line in lines if line.startswith(f"{name.removesuffix('_async')}(")]
        assert len(listed) == 1, name
        assert ("  async " in listed[0]) == hasattr(cls, name.removesuffix("_async") + "_async")


def test_every_public_type_is_listed_with_its_fields() -> None:
    lines = section("Types").splitlines()
    names = [n for n in dir(trio.types) if n[0].isupper()]
    assert len(names) > 25
    for name in names:
        value = getattr(trio.types, name)
        line = next(line for line in lines if re.match(rf"{name}\b", line))
        for field in getattr(value, "model_fields", {}):
            assert field == "type" or re.search(rf"\b{field}\b", line), (name, field)
    for name in dir(trio):
        if name[0].isupper() and inspect.isclass(getattr(trio, name)):
            assert name in API.read_text(encoding="utf-8"), name


def test_every_error_code_is_listed() -> None:
    """Found by text in the SDK's source, not by the generator's walk over its syntax."""
    text = section("Errors")
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in Path(trio.__file__).parent.rglob("*.py")
    )
    codes = set(re.findall(r'code="([a-z_.]+)"', source))
    assert len(codes) > 50
    for code in codes:
        assert any(f"`{shown}`" in text for shown in (code, f"{code.split('.')[0]}.*")), code


def test_every_option_of_configure_is_listed() -> None:
    text = re.sub(r"\s+", " ", section("Start"))
    for name in inspect.signature(trio.configure).parameters:
        assert name == "unknown_options" or re.search(rf"\b{name}[:=]", text), name


@pytest.mark.parametrize("page", [API, ANSWERS], ids=lambda page: page.name)
def test_every_symbol_exists(page: Path) -> None:
    """`trio.X.Y` and `pytrio.a.b` resolve; error codes and hosts look alike and are none."""
    text = page.read_text(encoding="utf-8")
    symbols = set(re.findall(r"(?<![\w.])(?:py)?trio\.[A-Za-z_][\w.]*\w", text))
    symbols -= {"pytrio.com", *(code for codes, _ in generator.CODES for code in codes)}
    assert symbols
    for symbol in symbols:
        value: Any = trio
        for part in symbol.split(".")[1:]:
            value = getattr(value, part)


def test_budgets() -> None:
    """At 3.2 characters a token."""
    assert len(API.read_text(encoding="utf-8")) / 3.2 < 7000
    assert len(ANSWERS.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize(
    "reference", sorted({*PROVEN_ELSEWHERE.values(), *MEASURED_ELSEWHERE.values()})
)
def test_the_tests_named_as_proof_exist(reference: str) -> None:
    file, _, name = reference.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert any(isinstance(n, ast.FunctionDef) and n.name == name for n in tree.body)


def test_every_fact_is_proven() -> None:
    keys = [fact.key for fact in generator.FACTS]
    assert len(set(keys)) == len(keys)
    marked = {fact.key for fact in generator.FACTS if fact.mark == "T"}
    assert proven | set(PROVEN_ELSEWHERE) == marked


def test_every_answer_has_a_status_and_every_measured_one_a_test() -> None:
    text = ANSWERS.read_text(encoding="utf-8")
    bullets = re.findall(r"^- \*\*(.+?)\*\*(.*?)(?=^- |^#|^\n|\Z)", text, re.DOTALL | re.MULTILINE)
    assert len(bullets) >= 25
    for question, answer in bullets:
        statuses = ("*measured*", "*documented*", "*reported*", "unknown on the cloud")
        assert any(status in " ".join(answer.split()).lower() for status in statuses), question
    claimed = {" ".join(q.split()) for q, answer in bullets if "*measured*" in answer}
    assert measured | set(MEASURED_ELSEWHERE) == claimed


# -- await depth, futures, threads -----------------------------------------------------------------


@dataclass
class World:
    """What the calls below need."""

    service: ServiceClient
    training: trio.TrainingClient
    sampler: trio.SamplingClient
    rest: trio.RestClient
    state: str
    checkpoint: str
    folder: Path
    made: int = 0

    def name(self) -> str:
        self.made += 1
        return f"save-{self.made}"

    def doomed(self) -> str:
        """The id of a checkpoint that may be deleted."""
        path = self.training.save_state(self.name()).result().path
        return next(c.checkpoint_id for c in self.listed() if c.path == path)

    def listed(self) -> list[trio.types.Checkpoint]:
        run = self.training.training_run_cuid
        return self.rest.list_checkpoints(run).result().checkpoints


@pytest.fixture
def world(service: ServiceClient, tmp_path: Path) -> World:
    training = new_run(service)
    state = training.save_state("start").result().path
    sampler = service.create_sampling_client(BASE_MODEL)
    made = World(service, training, sampler, service.create_rest_client(), state, "", tmp_path)
    made.checkpoint = made.listed()[0].checkpoint_id
    return made


def total(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict]:
    return -sum(row.sum() for row in logprobs), {"mine": 1.0}


PROMPT = ModelInput.from_ints(TOKENS)
# Method -> object and arguments; both the sync and the async form are called with them.
CALLS: dict[str, Callable[[World], tuple]] = {
    "get_server_capabilities": lambda w: (w.service,),
    "create_lora_training_client": lambda w: (w.service, BASE_MODEL, 4),
    "ServiceClient.create_sampling_client": lambda w: (w.service, BASE_MODEL),
    "create_training_client_from_state": lambda w: (w.service, w.state),
    "create_training_client_from_state_with_optimizer": lambda w: (w.service, w.state),
    "forward": lambda w: (w.training, some_data()),
    "forward_backward": lambda w: (w.training, some_data()),
    "forward_backward_custom": lambda w: (w.training, some_data(), total),
    "optim_step": lambda w: (w.training, AdamParams()),
    "save_state": lambda w: (w.training, w.name()),
    "save_weights_for_sampler": lambda w: (w.training, w.name()),
    "load_state": lambda w: (new_run(w.service), w.state),
    "load_state_with_optimizer": lambda w: (new_run(w.service), w.state),
    "TrainingClient.create_sampling_client": lambda w: (w.training, w.state),
    "save_weights_and_get_sampling_client": lambda w: (w.training,),
    "sample": lambda w: (w.sampler, PROMPT, 1, ONE_TOKEN),
    "compute_logprobs": lambda w: (w.sampler, PROMPT),
    "get_training_run": lambda w: (w.rest, w.training.training_run_cuid),
    "list_training_runs": lambda w: (w.rest,),
    "list_checkpoints": lambda w: (w.rest, w.training.training_run_cuid),
    "list_user_checkpoints": lambda w: (w.rest,),
    "get_checkpoint_archive_url": lambda w: (w.rest, w.checkpoint),
    "get_checkpoint_download_url": lambda w: (w.rest, w.checkpoint),
    "download_checkpoint": lambda w: (w.rest, w.checkpoint, w.folder / w.name()),
    "delete_checkpoint": lambda w: (w.rest, w.training.training_run_cuid, w.doomed()),
    "get_session": lambda w: (w.rest, w.service.service_session_cuid),
    "list_sessions": lambda w: (w.rest,),
    "get_sampler": lambda w: (w.rest, w.sampler.sampling_run_cuid),
}


async def executed_depth(value: Any) -> int:
    """Awaits until something comes out that cannot be awaited."""
    depth = 0
    while inspect.isawaitable(value):
        value = await value
        depth += 1
    return depth


@proves("await-depth", "rest-futures")
def test_every_async_method_has_the_depth_that_is_listed(world: World) -> None:
    for cls in CLIENTS:
        names = [n.removesuffix("_async") for n in dir(cls) if re.fullmatch(r"[a-z]\w*_async", n)]
        text = section(cls.__name__)
        for name in names:
            call = CALLS.get(f"{cls.__name__}.{name}") or CALLS[name]
            listed = re.search(rf"^{name}\(.* async (\d)$", text, re.MULTILINE)
            assert listed, name
            target, *arguments = call(world)
            assert type(target) is cls
            depth = asyncio.run(executed_depth(getattr(target, f"{name}_async")(*arguments)))
            assert depth == int(listed[1]), name
            target, *arguments = call(world)
            value = getattr(target, name)(*arguments)
            is_future = isinstance(value, APIFuture | concurrent.futures.Future)
            assert is_future == ("Future[" in listed[0]), name
            if is_future:
                assert isinstance(value, APIFuture) == ("APIFuture[" in listed[0]), name
                assert inspect.isawaitable(value) == isinstance(value, APIFuture)
                value.result()


@proves("timeout")
@answers("Does a timeout on `.result()` cancel the work?")
def test_futures_are_asked_twice_gathered_and_time_out(training: trio.TrainingClient) -> None:
    async def ask() -> None:
        future = await training.forward_async(some_data())
        assert await future is await future
        assert (
            len(await asyncio.gather(training.forward(some_data()), training.forward(some_data())))
            == 2
        )
        assert future.result() is await future

    asyncio.run(ask())
    slow = training.forward(some_data(64))
    with pytest.raises(concurrent.futures.TimeoutError):
        slow.result(timeout=0)
    assert len(slow.result().loss_fn_outputs) == 64


@proves("cancel")
def test_a_cancelled_backward_still_counts(service: ServiceClient) -> None:
    training = new_run(service)
    training.forward(some_data()).result()

    async def cancelled() -> None:
        backward = await training.forward_backward_async(some_data(64))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(executed_depth(backward)), 0)
        assert backward.cancel()

    asyncio.run(cancelled())
    after = training.optim_step(AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
    assert after > 0
    assert training.optim_step(AdamParams(learning_rate=0.0)).result().metrics["grad_norm"] == 0


@proves("threads")
def test_clients_work_from_threads_and_are_not_pickled(
    service: ServiceClient, training: trio.TrainingClient
) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        losses = set(
            pool.map(lambda _: training.forward(some_data()).result().metrics["loss_sum"], range(8))
        )
    assert len(losses) == 1
    for _ in range(2):
        asyncio.run(executed_depth(training.forward_async(some_data())))
    future = training.forward(some_data())
    future.result()
    for client in (service, training, service.create_rest_client(), future):
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(client)
    datum = some_data()[0]
    assert pickle.loads(pickle.dumps(datum)) == datum


@proves("no-close")
@answers("Must clients be closed?")
def test_nothing_is_closed() -> None:
    for cls in CLIENTS:
        for name in ("close", "aclose", "close_async", "__enter__", "__aenter__"):
            assert not hasattr(cls, name)


# -- start -----------------------------------------------------------------------------------------


@proves("no-network", "create-run", "first-call")
def test_what_is_sent_when(backend: Backend, requests: Callable[[], list[str]]) -> None:
    trio.configure(base_url=backend.url, api_key="")
    assert code_of(trio.ServiceClient) == "auth.missing_api_key"
    assert requests() == []
    with service_on(backend) as service:
        assert [line.rsplit("/", 1)[1] for line in requests()] == [
            "verify",
            "bootstrap",
            "service-sessions",
        ]
        training = new_run(service)
        service.create_sampling_client(BASE_MODEL)
        assert [line.rsplit("/", 1)[1] for line in requests()] == ["training-runs", "sampling-runs"]
        for rank in (3, 65):
            assert (
                code_of(lambda rank=rank: new_run(service, rank)) == "validation.invalid_lora_rank"
            )
        assert code_of(lambda: training.forward([])) == "validation.empty_training_data"
        assert requests() == []
        # The trainer is started, and waited for, before the first call returns.
        future = training.forward(some_data())
        started = requests()
        assert started[0] == "POST /v1/events"
        assert started[1].startswith("GET /v1/events/")
        future.result()
        events = [line for line in started + requests() if line == "POST /v1/events"]
        assert len(events) == 2
        # The same for the async form. Only a forward needs the vocabulary, hence the tokenizer.
        other = new_run(service)
        requests()
        step = asyncio.run(other.optim_step_async(AdamParams()))
        assert requests()[1].startswith("GET /v1/events/")
        step.result()
        assert "_tokenizer_vocab_size" not in vars(other)
        assert "_tokenizer_vocab_size" in vars(training)


def read_settings(code: str, home: Path, **environment: str) -> str:
    """What a fresh process with this home prints."""
    names = ("PYTRIO_API_KEY", "PYTRIO_BASE_URL", "PYTRIO_ENV", "PYTRIO_LOG_LEVEL")
    inherited = {k: v for k, v in os.environ.items() if k not in names}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"HOME": str(home), "USERPROFILE": str(home)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@proves("precedence", "no-network")
def test_which_setting_wins(backend: Backend, tmp_path: Path) -> None:
    """And nothing is sent, which httpx would log on the way."""
    profile = sdk_config.ProfileConfig(api_key="saved", base_url="http://saved")
    trio.configure(home=str(tmp_path))
    sdk_config.save_profile("", profile)
    show = (
        "import logging, os, sys\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "import pytrio as trio\n"
        "from pytrio.config.config import auth_state, configuration\n"
        "os.environ['PYTRIO_API_KEY'] = 'late'\n"
        "print(auth_state.api_key, configuration.base_url, configuration.log_level)\n"
        "trio.configure(api_key='code')\n"
        "print(auth_state.api_key, getattr(auth_state.config_error, 'code', None))\n"
    )
    shown = read_settings(show, tmp_path).split()
    assert shown == ["saved", "http://saved", "INFO", "code", "None"]
    variables = {
        "PYTRIO_API_KEY": "variable",
        "PYTRIO_BASE_URL": "http://variable/api/",
        "PYTRIO_LOG_LEVEL": "error",
        "PYTRIO_ENV": "ghost",
    }
    shown = read_settings(show, tmp_path, **variables).split()
    assert shown[:4] == ["variable", "http://variable", "ERROR", "code"]
    assert shown[4] == "configuration.env_not_found"
    bad = read_settings(show, tmp_path, PYTRIO_LOG_LEVEL="LOUD")
    assert "Invalid PyTrio environment configuration" in bad
    trio.configure(base_url=backend.url, api_key="wrong", request_timeout_seconds=17)
    opened = trio.ServiceClient(api_key=KEY)
    try:
        trio.configure(request_timeout_seconds=30)
        assert opened._runtime.configuration.request_timeout_seconds == 17
    finally:
        opened._runtime.shutdown()


@proves("reload")
def test_a_new_home_drops_what_was_set(tmp_path: Path) -> None:
    for reload in ({"home": str(tmp_path)}, {"env": "default"}):
        trio.configure(api_key="mine", base_url="http://mine")
        trio.configure(**reload)
        assert sdk_config.auth_state.api_key == ""
        assert sdk_config.configuration.base_url == "https://pytrio.com"
        trio.configure(api_key="mine", base_url="http://mine", **reload)
        assert sdk_config.auth_state.api_key == "mine"
        assert sdk_config.configuration.base_url == "http://mine"


# What 0.2.8 called its options, and two older names.
OLD_OPTIONS = {
    "timeout": "request_timeout_seconds",
    "actor_event_wait_timeout": "actor_event_polling_timeout_seconds",
    "actor_event_request_timeout": "actor_event_submit_timeout_seconds",
    "retry_initial_delay": "retry_initial_delay_seconds",
    "retry_max_delay": "retry_max_delay_seconds",
    "retry_jitter": "retry_jitter_ratio",
    "training_retry_timeout": "training_retry_timeout_seconds",
    "sampling_retry_timeout": "sampling_retry_timeout_seconds",
    "actor_capacity_poll_interval": "actor_capacity_poll_interval_seconds",
    "actor_capacity_poll_jitter": "actor_capacity_poll_jitter_ratio",
    "actor_capacity_wait_timeout": "actor_capacity_wait_timeout_seconds",
    "sampling_timeout": "sampling_timeout_seconds",
    "actor_event_submit_timeout": "actor_event_submit_timeout_seconds",
    "actor_event_polling_timeout": "actor_event_polling_timeout_seconds",
    "training_max_in_flight": "training_event_max_in_flight",
    "training_max_queued": "training_event_queue_capacity",
    "sampling_max_in_flight": "sampling_request_max_in_flight",
    "sampling_max_queued": "sampling_request_queue_capacity",
    "heartbeat_enabled": "actor_heartbeat_enabled",
    "heartbeat_interval": "actor_heartbeat_interval_seconds",
    "heartbeat_worker_threads": None,
    "training_worker_threads": None,
    "sampling_worker_threads": None,
}


@proves("unknown-option", "old-options")
def test_unknown_options_only_warn() -> None:
    options = inspect.signature(trio.configure).parameters
    before = sdk_config.configuration.model_dump()
    for old, new in OLD_OPTIONS.items():
        assert new is None or new in options
        with pytest.warns(UserWarning, match=f"Unknown configuration option '{old}' was ignored."):
            trio.configure(**{old: 600})
    assert sdk_config.configuration.model_dump() == before
    with pytest.raises(pydantic.ValidationError):
        trio.configure(retry_max_attempts=0)
    assert sdk_config.configuration.model_dump() == before


SHOW_OLDER = """
import inspect, json, re, gen_api_reference as generator, pytrio as trio
clients = ["\\n".join(generator.client_section(cls)) for cls in generator.CLIENTS]
try:
    trio.configure(unheard_of=1)
except TypeError:
    print(json.dumps([clients, sorted(inspect.signature(trio.configure).parameters),
                      sorted(generator.codes_of_sdk()),
                      [inspect.getsource(cls.__init__) for cls in generator.CLIENTS]]))
"""


@pytest.mark.slow
@proves("sdk-before")
def test_the_release_before(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--target", str(tmp_path), "pytrio==0.2.8"], check=True)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "scripts")])
    shown = read_settings(SHOW_OLDER, tmp_path, PYTHONPATH=path)
    clients, options, codes, constructors = json.loads(shown)
    for then, now in zip(clients, CLIENTS, strict=True):
        listed = re.findall(r"^\w+\(.*$", section(now.__name__), re.MULTILINE)
        renamed = then.replace("CheckpointDownloadUrlResponse", "CheckpointDownloadSource")
        assert re.findall(r"^\w+\(.*$", renamed, re.MULTILINE) == listed
    unchanged = set(inspect.signature(trio.configure).parameters)
    older = {"actor_event_wait_timeout", "actor_event_request_timeout"}
    assert set(options) - unchanged == set(OLD_OPTIONS) - older
    assert "event.session_broken" in codes
    assert all("self.task_id = task_id" in constructors[place] for place in (1, 2))


@proves("logging")
def test_logging(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("pytrio")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    with service_on(backend, log_level="INFO"):
        assert [type(h).__name__ for h in logger.handlers] == ["TrioConsoleHandler"]
        assert not logger.propagate
        logger.info("to stdout")
        logger.warning("to stderr")
    shown = capsys.readouterr()
    assert "trio: to stdout" in shown.out
    assert "trio: to stderr" in shown.err
    assert "to stderr" not in shown.out
    try:
        with service_on(backend, log_level="ERROR"):
            logger.warning("silent")
            logger.error("loud")
    finally:
        logger.setLevel(logging.INFO)
    shown = capsys.readouterr()
    assert "silent" not in shown.out + shown.err
    assert "loud" in shown.err


@proves("telemetry")
def test_telemetry_is_turned_off(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="httpx")

    def sent() -> int:
        with service_on(backend) as service:
            new_run(service)
        return sum("/telemetry/" in record.getMessage() for record in caplog.records)

    trio.configure_observability(enabled=False)
    try:
        assert sent() == 0
    finally:
        trio.configure_observability(enabled=True)
    assert sent() > 0


# -- training --------------------------------------------------------------------------------------


@proves("order", "outputs")
@answers("How many calls per optimiser step?")
def test_calls_execute_in_the_order_of_submission(service: ServiceClient) -> None:
    """Everything is submitted before anything is waited for."""
    training = new_run(service, seed=3)
    data = [supervised_datum(TOKENS), supervised_datum(TOKENS[:3])]
    backward = training.forward_backward(data)
    step = training.optim_step(AdamParams(learning_rate=1e-3))
    later = training.forward(data)
    before, after = backward.result(), later.result()
    assert after.metrics["loss_mean"] < before.metrics["loss_mean"]
    assert set(before.metrics) == {"loss_sum", "loss_mean", "token_count"}
    assert before.metrics["token_count"] == 6
    assert before.metrics["loss_mean"] == pytest.approx(before.metrics["loss_sum"] / 6)
    assert [len(output["logprobs"]) for output in before.loss_fn_outputs] == [4, 2]
    logprobs = sum(sum(output["logprobs"].tolist()) for output in before.loss_fn_outputs)
    assert logprobs == pytest.approx(-before.metrics["loss_sum"], rel=1e-5)
    assert set(step.result().metrics) == {"grad_norm", "learning_rate"}


REFUSED_DATA: list[tuple[str, dict[str, Any], str]] = [
    ("unheard_of", {}, "Unsupported loss function type"),
    ("ppo", {"logprobs": None}, "logprobs is required"),
    ("ppo", {"advantages": [1.0] * 3}, r"advantages must have shape \[4\], got \[3\]"),
    ("ppo", {"target_tokens": [41.0, 42.0, 43.0, 44.0]}, "must have dtype int64"),
    ("ppo", {"logprobs": [-1.0, float("nan"), -1.0, -1.0]}, r"logprobs\[1\] must be finite"),
    ("ppo", {"advantages": [1.0, float("inf"), 1.0, 1.0]}, r"advantages\[1\] must be finite"),
    ("cross_entropy", {"weights": [float("nan")] * 4}, r"weights\[0\] must be finite"),
]


@proves("plain-errors")
@pytest.mark.parametrize(("loss", "changed", "message"), REFUSED_DATA)
def test_bad_data_raises_plain_value_errors(
    training: trio.TrainingClient, loss: str, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        training.forward([policy_datum(**changed)], loss)
    assert not isinstance(refused.value, PyTrioError)


@proves("loss-inputs")
@answers("May targets be -100?")
def test_what_is_checked_before_sending(service: ServiceClient) -> None:
    training = new_run(service)
    vocabulary = len(training.get_tokenizer())
    for outside in (vocabulary, -1):
        wrong = policy_datum(target_tokens=[41, 42, 43, outside])
        assert code_of(lambda w=wrong: training.forward([w], "ppo")) == (
            "validation.token_id_out_of_range"
        )
        prompt = supervised_datum([outside, 41, 42])
        assert code_of(lambda p=prompt: training.forward([p])) == "validation.token_id_out_of_range"
    too_long = supervised_datum([40] * (training._limits.max_seq_len + 2))
    assert code_of(lambda: training.forward([too_long])) == "validation.training_sample_too_long"
    empty = Datum(model_input=ModelInput.from_ints([]), loss_fn_inputs={"target_tokens": []})
    assert code_of(lambda: training.forward([empty])) == "validation.empty_training_sample"
    ignored = policy_datum(target_tokens=[-100, -100, 43, vocabulary - 1])
    extra = policy_datum(weights=[0.0] * 4, anything=[1, 2])
    for accepted in (ignored, extra):
        training.forward([accepted], " PPO ").result()
    supervised = policy_datum(target_tokens=[-100, -100, 43, 44])
    assert training.forward([supervised]).result().metrics["token_count"] == 2
    totals = generator.training_module.plan_training_batch(
        [supervised],
        loss_fn="ppo",
        auto_shift=False,
        limits=training._limits,
        tokenizer_vocab_size=vocabulary,
    ).totals
    assert (totals.total_active_tokens, totals.total_advantage_tokens) == (2, 2)
    one = training.forward([policy_datum()], "ppo").result().metrics
    assert training.forward([extra], "ppo").result().metrics == one


@proves("custom-loss")
@answers("What does a custom loss cost?")
def test_custom_loss(
    training: trio.TrainingClient, requests: Callable[[], list[str]], service: ServiceClient
) -> None:
    given: list[tuple] = []

    def with_settings(data: list[Datum], logprobs: list[torch.Tensor], settings: dict) -> tuple:
        given.append((threading.current_thread(), settings))
        return total(data, logprobs)

    def calls_the_sdk(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple:
        training.forward(data)
        return total(data, logprobs)

    training.forward(some_data()).result()
    requests()
    future = training.forward_backward_custom(some_data(), with_settings, {"beta": 0.1})
    (thread, settings) = given[0]
    assert settings == {"beta": 0.1}
    assert thread is not threading.current_thread()
    assert future.result().metrics["mine"] == 1.0
    assert requests().count("POST /v1/events") == 2
    training.forward_backward_custom(some_data(), total, {"beta": 0.1}).result()
    with pytest.raises(RuntimeError, match="from its own event loop"):
        training.forward_backward_custom(some_data(), calls_the_sdk)
    with pytest.raises(PyTrioError) as missing:
        training.forward_backward_custom(some_data(2), lambda d, lp: (lp[0].sum(), {}))
    assert missing.value.code == "validation.missing_custom_loss_gradient"


@proves("adam-bounds", "event-failed", "error-fields")
def test_a_failed_event_leaves_the_client_usable(training: trio.TrainingClient) -> None:
    for rate in (-1.0, float("nan")):
        with pytest.raises(EventFailedError, match="learning_rate must be") as failed:
            training.optim_step(AdamParams(learning_rate=rate)).result()
    error = failed.value
    assert error.code
    assert error.message in str(error)
    fields = ("hint", "details", "status_code", "retryable", "operation", "request_id")
    assert all(hasattr(error, field) for field in fields)
    training.forward(some_data()).result()


@proves("retries")
def test_what_the_sdk_repeats() -> None:
    fact = next(f.text for f in generator.FACTS if f.key == "retries")
    assert {int(code) for code in re.findall(r"\b[45]\d\d\b", fact)} == set(RETRYABLE_STATUS_CODES)
    defaults = sdk_config.Configuration()
    for plane in ("training", "control", "sampling"):
        assert getattr(defaults, f"{plane}_retry_timeout_seconds") == 15 * 60


@proves("load-state")
def test_load_state_and_its_refusals(service: ServiceClient, training: trio.TrainingClient) -> None:
    """The sentences are those of the note, word for word."""
    note = " ".join(section("TrainingClient").split())
    path = training.save_state("for-load").result().path
    with pytest.raises(PyTrioError) as started:
        training.load_state(path)
    assert started.value.code == "validation.already_initialized"
    assert f"`{started.value.message}`" in note
    other = new_run(service, rank=16)
    with pytest.raises(PyTrioError) as differs:
        other.load_state_with_optimizer(path)
    assert differs.value.code == "validation.checkpoint_config_mismatch"
    assert f"`{differs.value.message}`" in note
    assert differs.value.details["mismatches"] == [
        {"field": "lora_rank", "target": 16, "source": 8}
    ]
    other.forward(some_data()).result()
    same = new_run(service)
    assert same.load_state(path).result() == {}
    assert code_of(lambda: same.load_state(path)) == "validation.already_initialized"


@proves("names")
def test_checkpoint_names(training: trio.TrainingClient, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("pytrio").addHandler(caplog.handler)
    try:
        for bad in ("", "step=1", "a/b", "第一", "-x", "x."):
            assert code_of(lambda bad=bad: training.save_state(bad)) == (
                "validation.invalid_checkpoint_name"
            )
        long = "n" * 201
        expected = long[:180] + hashlib.sha256(long.encode()).hexdigest()[:20]
        assert training.save_state(long).result().path.endswith(f"/{expected}")
        assert training.save_state("after one").result().path.endswith("/after-one")
    finally:
        logging.getLogger("pytrio").removeHandler(caplog.handler)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("was shortened" in line for line in warnings)
    assert any("replaced with hyphens" in line for line in warnings)


@proves("tokenizer")
@answers("Where does the tokenizer come from?")
def test_tokenizer(
    service: ServiceClient, training: trio.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = training.get_tokenizer()
    assert training.get_tokenizer() is not tokenizer
    sampler = service.create_sampling_client(BASE_MODEL)
    assert sampler.get_tokenizer().get_vocab() == tokenizer.get_vocab()
    assert Path(training.model_id).is_dir(), "the dry run's model id is a folder"
    asked: list[bool] = []

    def not_cached(name: str, local_files_only: bool) -> str:
        asked.append(local_files_only)
        if local_files_only:
            raise OSError("not in the cache")
        return f"downloaded {name}"

    monkeypatch.setattr(modelscope.AutoTokenizer, "from_pretrained", not_cached)
    assert training.get_tokenizer() == f"downloaded {training.model_id}"
    assert asked == [True, False]


# -- saves -----------------------------------------------------------------------------------------


@proves("ttl", "save-addresses", "from-state")
@answers("Are saves without a TTL kept for good?")
def test_what_saves_are_good_for(service: ServiceClient) -> None:
    training = new_run(service)
    state = training.save_state("kept").result()
    weights = training.save_weights_for_sampler("kept").result()
    sampler = training.save_weights_and_get_sampling_client()
    assert isinstance(sampler, trio.SamplingClient)
    rest = service.create_rest_client()
    listed = rest.list_checkpoints(training.training_run_cuid).result().checkpoints
    expiry = {checkpoint.path: checkpoint.expires_at for checkpoint in listed}
    assert expiry[state.path] is expiry[weights.path] is None
    for path in (state.path, weights.path):
        made = service.create_sampling_client(BASE_MODEL, path)
        assert made.sample(PROMPT, 1, ONE_TOKEN).result().sequences
    assert service.create_training_client_from_state(weights.path).forward(some_data()).result()
    small = new_run(service, rank=4, train_mlp=False).save_state("small").result()
    restored = service.create_training_client_from_state(small.path)
    assert (restored.lora.rank, restored.lora.train_mlp, restored.lora.train_attn) == (
        4,
        False,
        True,
    )
    assert restored.training_run_cuid != training.training_run_cuid
    with_optimizer = service.create_training_client_from_state_with_optimizer
    assert code_of(lambda: with_optimizer(weights.path).forward(some_data()).result())
    # Both kinds refuse a taken name; the code is the server's and passes unchanged.
    for save in (training.save_state, training.save_weights_for_sampler):
        assert code_of(lambda save=save: save("kept").result()) == "checkpoint_exists"
    assert training.save_state("kept", overwrite=True).result().path == state.path
    assert "overwrite" not in inspect.signature(training.save_weights_for_sampler).parameters


def test_temporary_weights_last_six_hours() -> None:
    assert generator.training_module._TEMP_SAMPLING_TTL_SECONDS == 6 * 3600
    assert "6 hours" in section("What each save keeps")


# -- sampling --------------------------------------------------------------------------------------


@proves("sampling-checks", "stop")
def test_what_sampling_checks(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(BASE_MODEL)
    invalid = "validation.invalid_sampling_request"
    for params in (SamplingParams(), SamplingParams(max_tokens=0)):
        assert code_of(lambda p=params: sampler.sample(PROMPT, 1, p)) == invalid
    assert code_of(lambda: sampler.sample(PROMPT, 0, ONE_TOKEN)) == invalid
    negative = {"sampling_params": ONE_TOKEN, "topk_prompt_logprobs": -1}
    assert code_of(lambda: sampler.sample(PROMPT, **negative)) == invalid
    empty = ModelInput.from_ints([])
    for call in (
        lambda: sampler.sample(empty, 1, ONE_TOKEN),
        lambda: sampler.compute_logprobs(empty),
    ):
        assert code_of(call) == "validation.empty_prompt"
    seen = ModelInput(chunks=[trio.ImageChunk(data=b"x", format="png")])
    assert code_of(lambda: sampler.compute_logprobs(seen)) == (
        "validation.image_logprobs_unsupported"
    )
    # These are submitted; it is the server that refuses them.
    for params in (
        SamplingParams(max_tokens=1, temperature=-1.0),
        SamplingParams(max_tokens=1, top_p=2.0),
        SamplingParams(max_tokens=10**6),
    ):
        future = sampler.sample(PROMPT, 1, params)
        assert code_of(future.result)
    for stop in ("a", ["a", "b"], [43, 44]):
        reply = sampler.sample(PROMPT, 4, SamplingParams(max_tokens=3, stop=stop)).result()
        assert {sequence.stop_reason for sequence in reply.sequences} <= {"stop", "length"}
    without = sampler.sample(PROMPT, 1, ONE_TOKEN, return_text=False).result().sequences[0]
    assert without.text is None
    assert len(without.logprobs) == 1


@proves("prompt-logprobs")
@answers("What shape have prompt log-probabilities?")
def test_prompt_logprobs(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(BASE_MODEL)
    computed = sampler.compute_logprobs(PROMPT).result()
    asked = sampler.sample(
        PROMPT, 1, ONE_TOKEN, include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result()
    assert len(computed) == len(TOKENS)
    assert computed[0] is None
    assert all(value < 0 for value in computed[1:])
    assert asked.prompt_logprobs[1:] == pytest.approx(computed[1:], abs=1e-4)
    assert asked.topk_prompt_logprobs[0] is None
    assert [len(pairs) for pairs in asked.topk_prompt_logprobs[1:]] == [2] * (len(TOKENS) - 1)
    plain = sampler.sample(PROMPT, 1, ONE_TOKEN).result()
    assert (plain.prompt_logprobs, plain.topk_prompt_logprobs) == ([], [])
    capabilities = service.get_server_capabilities().supported_models
    context = next(m for m in capabilities if m.model_name == BASE_MODEL).max_context_length
    assert code_of(lambda: sampler.compute_logprobs(ModelInput.from_ints([5] * context)).result())


# -- REST ------------------------------------------------------------------------------------------


@proves("rest-ids", "rest-empty")
def test_rest_ids(world: World) -> None:
    run = world.rest.get_training_run(world.training.training_run_cuid).result()
    assert run.training_run_id == world.training.training_run_cuid
    assert (run.last_checkpoint, run.last_sampler_checkpoint) == (None, None)
    checkpoint = world.listed()[0]
    assert checkpoint.path == world.state != checkpoint.checkpoint_id
    assert checkpoint.public is False
    page = world.rest.list_user_checkpoints(limit=1).result()
    assert len(page.checkpoints) == 1
    assert page.cursor.total_count > 1
    assert world.rest.list_checkpoints(run.training_run_id).result().cursor is None


# -- types -----------------------------------------------------------------------------------------


@proves("forbid", "tensordata", "image-length")
def test_types() -> None:
    for refused in (
        lambda: AdamParams(lr=1e-4),
        lambda: SamplingParams(max_new_tokens=4),
        lambda: SamplingParams(n=2),
        lambda: policy_datum(logprobs=[None, -1.0, -1.0, -1.0]),
    ):
        with pytest.raises(pydantic.ValidationError):
            refused()
    for value in ([1, 2, 3, 4], np.array([1, 2, 3, 4], np.int32), torch.tensor([1, 2, 3, 4])):
        inputs = policy_datum(target_tokens=value).loss_fn_inputs
        assert (inputs["target_tokens"].dtype, inputs["logprobs"].dtype) == ("int64", "float32")
        assert inputs["target_tokens"].tolist() == [1, 2, 3, 4]
    tensor = inputs["logprobs"]
    assert np.asarray(tensor).shape == ()
    assert tensor.to_numpy().shape == (4,)
    picture = trio.ImageChunk(data=b"x", format="png")
    text = trio.types.EncodedTextChunk(tokens=[1, 2])
    with pytest.raises(ValueError, match="expected_tokens"):
        len(ModelInput(chunks=[picture, text]))
    counted = picture.model_copy(update={"expected_tokens": 7})
    assert len(ModelInput(chunks=[counted, text])) == 9
    datum = Datum(
        model_input=ModelInput(chunks=[picture, text]),
        loss_fn_inputs={"target_tokens": [0] * 9},
    )
    limits = generator.training_module.TrainingLimits(None, None, None)
    planned = generator.training_module.plan_training_batch(
        [datum], loss_fn="cross_entropy", auto_shift=False, limits=limits, tokenizer_vocab_size=9
    )
    assert planned.chunks[0].input_tokens == 9


# -- answers that are measured ---------------------------------------------------------------------


@answers("One request with `num_samples` or several?")
def test_requests_with_one_seed_are_copies(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(BASE_MODEL)
    params = SamplingParams(max_tokens=12, temperature=2.0, seed=5)

    def drawn(num_samples: int) -> list[tuple[int, ...]]:
        reply = sampler.sample(PROMPT, num_samples, params).result()
        return [tuple(sequence.tokens) for sequence in reply.sequences]

    assert len(set(drawn(8))) == 8
    assert len({drawn(1)[0] for _ in range(4)}) == 1


THINK = "<think>\n\n</think>\n\n"


@answers("What does `enable_thinking=False` render?", "Do earlier turns keep their think block?")
def test_thinking_in_the_template(service: ServiceClient) -> None:
    tokenizer = service.create_sampling_client("Qwen/Qwen3.5-4B").get_tokenizer()

    def render(messages: list[dict[str, str]], **options: bool) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    question = {"role": "user", "content": "one"}
    thought = {"role": "assistant", "content": "<think>\nhidden\n</think>\n\nshown"}
    off = render([question], add_generation_prompt=True, enable_thinking=False)
    assert off.endswith(f"<|im_start|>assistant\n{THINK}")
    on = render([question], add_generation_prompt=True, enable_thinking=True)
    assert on.endswith("<|im_start|>assistant\n<think>\n")
    history = [question, thought, {"role": "user", "content": "two"}]
    for thinking in (True, False):
        again = render(history, add_generation_prompt=True, enable_thinking=thinking)
        assert "hidden" not in again
        assert "<|im_start|>assistant\nshown<|im_end|>" in again
    last = render([*history, {"role": "assistant", "content": "final"}], enable_thinking=False)
    assert f"<|im_start|>assistant\n{THINK}final<|im_end|>" in last


@answers("What does SwanLab do without a login?")
@pytest.mark.parametrize(("mode", "works"), [(None, False), ("offline", True)])
def test_swanlab_without_a_login(tmp_path: Path, mode: str | None, works: bool) -> None:
    script = (
        f"import swanlab; swanlab.init(project='x', mode={mode!r}); "
        "swanlab.log({'a': 1.0}); swanlab.finish()"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SWANLAB_")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | {"HOME": str(tmp_path), "USERPROFILE": str(tmp_path)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode == 0) == works, done.stderr
    assert works or "RuntimeError: Failed to initialize SwanLab in online mode" in done.stderr
