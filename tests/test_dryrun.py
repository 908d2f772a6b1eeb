"""The command line as people use it: real processes, real signals, real mistakes."""

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytrio as trio

from conftest import DRYRUN, KEY, SKILL, outcome
from trio_local.preflight import blocked_hosts, code_that_leaves
from wire import BASE_MODEL, QUICK_RETRIES, read_trace

TIMEOUT_SECONDS = 120
REAL_KEY = "sk-live-0123456789abcdef0123456789abcdef"
PROFILE_KEY = "sk-live-of-the-profile-0123456789abcdef"
DEAD_PROXY = "http://127.0.0.1:9"


def hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Place:
    """A working directory and the environment of somebody who has a PyTRIO account."""

    cwd: Path
    environment: dict[str, str]
    dryrun: Path = DRYRUN

    def write(self, name: str, text: str) -> Path:
        path = self.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
        return path

    def start(self, *arguments: object, **environment: str) -> subprocess.Popen[bytes]:
        """Start `dryrun.py` in a process group of its own that hears Ctrl-C, as a terminal does;
        a background shell would have us and all we start ignore it."""
        return subprocess.Popen(
            [sys.executable, str(self.dryrun), *map(str, arguments)],
            cwd=self.cwd,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=hear_ctrl_c if os.name == "posix" else None,
        )

    def run(self, *arguments: object, **environment: str) -> "Ended":
        return ended(self.start(*arguments, **environment))


@dataclass
class Ended:
    """What a finished `dryrun.py` has left."""

    code: int
    out: bytes
    err: bytes

    @property
    def lines(self) -> list[str]:
        return self.err.decode("utf-8", "replace").splitlines()


def ended(process: subprocess.Popen[bytes]) -> Ended:
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Ended(process.returncode, out, err)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    home = tmp_path / "home"
    profile = home / ".pytrio" / "envs" / "prod"
    profile.mkdir(parents=True)
    text = f'api_key = "{PROFILE_KEY}"\nbase_url = "https://trio.example.org"\n'
    (home / ".pytrio" / "config.toml").write_text(text, encoding="utf-8")
    (profile / "config.toml").write_text(text, encoding="utf-8")
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTRIO_", "PYTHON", "TRIO_")) and "proxy" not in name.lower()
    }
    work = tmp_path / "work"
    work.mkdir()
    return Place(work, {**inherited, "HOME": str(home), "PYTRIO_API_KEY": REAL_KEY})


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.stat()
        found[str(path.relative_to(folder))] = (about.st_size, about.st_mtime_ns)
    return found


def only_line(result: Ended) -> str:
    """The one line on standard error of a command that was used wrongly."""
    assert result.out == b""
    assert len(result.lines) == 1, result.lines
    assert result.lines[0].startswith("dryrun: ")
    assert result.code == 3, result.lines
    return result.lines[0]


# -- mistakes --------------------------------------------------------------------------------------


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


MISTAKES: tuple[tuple[str, str], ...] = (
    ("", "command"),
    ("dance", "dance"),
    ("run", "script"),
    ("run missing.py", "no script at missing.py"),
    ("run .", "no script at ."),
    ("run broken.py", "broken.py does not parse: "),
    ("run binary.py", "binary.py is not a UTF-8 text file"),
    ("run nul.py", "nul.py does not parse: "),
    ("run --port 99999 ok.py", "--port"),
    ("run --port -1 ok.py", "--port"),
    ("run --port eighty ok.py", "--port"),
    ("run --port BUSY ok.py", "BUSY"),
    ("run --reduction mean ok.py", "mean"),
    ("run --fault gremlins ok.py", "unknown fault 'gremlins'"),
    ("run --fault latency=soon ok.py", "fault latency takes a duration"),
    ("run --fault sample_503=2 ok.py", "fault sample_503 takes a probability"),
    ("run --fault billing_409=yes ok.py", "fault billing_409 takes no value"),
    ("run --model Qwen ok.py", "--model takes NAME=KIND"),
    ("run --model x=huge ok.py", "unknown kind"),
    ("run --model x=hf:nowhere ok.py", "no config.json in"),
    ("run --store ok.py ok.py", "--store"),
    ("run --record ok.py ok.py", "--record"),
    ("run --demo missing.jsonl ok.py", "--demo"),
    ("run --threads 0 ok.py", "--threads"),
    ("run --max-batch-size -1 ok.py", "--max-batch-size"),
    ("run --max-tokens many ok.py", "--max-tokens"),
    ("run --unknown ok.py", "--unknown"),
    ("serve --fault gremlins", "unknown fault 'gremlins'"),
    ("serve --port BUSY", "BUSY"),
    ("serve --port 99999", "--port"),
    ("serve --store ok.py", "--store"),
    ("serve --record ok.py", "--record"),
    ("doctor --yaml", "--yaml"),
)


@pytest.mark.parametrize(("command", "fragment"), MISTAKES, ids=[c for c, _ in MISTAKES])
def test_a_mistake_ends_in_one_line(
    place: Place, busy_port: int, command: str, fragment: str
) -> None:
    place.write("ok.py", "open('it-ran', 'w')")
    place.write("broken.py", "import os\n\ndef f(:\n")
    (place.cwd / "binary.py").write_bytes(b"text = '\xff\xfe'\n")
    (place.cwd / "nul.py").write_bytes(b"text = 1\n\x00\n")
    arguments = command.replace("BUSY", str(busy_port)).split()
    line = only_line(place.run(*arguments))
    assert fragment.replace("BUSY", str(busy_port)) in line
    assert not (place.cwd / "it-ran").exists()


def test_an_unfit_python_ends_in_one_line(place: Place, tmp_path: Path) -> None:
    place.write("ok.py", "open('it-ran', 'w')")
    old_sdk = tmp_path / "old" / "pytrio-0.2.7.dist-info"
    old_sdk.mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: pytrio\nVersion: 0.2.7\n"
    (old_sdk / "METADATA").write_text(metadata, encoding="utf-8")
    hidden = tmp_path / "hidden" / "sitecustomize.py"
    hidden.parent.mkdir()
    hidden.write_text(
        dedent("""
        from importlib import metadata

        known = metadata.Distribution.from_name

        def from_name(name):
            if name == "torch":
                raise metadata.PackageNotFoundError(name)
            return known(name)

        metadata.Distribution.from_name = from_name
        """),
        encoding="utf-8",
    )
    for folder, fragments in (
        (old_sdk.parent, ("pytrio 0.2.7 is not supported", "pip install pytrio==")),
        (hidden.parent, ("missing torch", "requirements.txt")),
    ):
        for command in (("run", "ok.py"), ("serve",)):
            line = only_line(place.run(*command, PYTHONPATH=str(folder)))
            assert all(fragment in line for fragment in fragments), line
        doctor = place.run("doctor", PYTHONPATH=str(folder))
        assert doctor.code == 3 and doctor.err == b""
        verdict = doctor.out.decode("utf-8").splitlines()[-1]
        assert verdict.startswith("verdict") and fragments[0] in verdict
        facts = json.loads(place.run("doctor", "--json", PYTHONPATH=str(folder)).out)
        assert fragments[0] in facts["problem"]
    assert not (place.cwd / "it-ran").exists()


LEAVING = (
    'trio.configure(base_url="https://pytrio.com")',
    'trio.configure(api_key="sk-0123")',
    'trio.ServiceClient("sk-0123")',
    'trio.ServiceClient(api_key="sk-0123")',
    'os.environ["PYTRIO_BASE_URL"] = "https://pytrio.com"',
    'os.environ["PYTRIO_API_KEY"] = "sk-0123"',
    'trio.configure(env="prod")',
    'trio.configure(home="/root")',
    "trio.configure(base_url=somewhere())",
    'configure(base_url="https://pytrio.com")',
    'Client("sk-0123")',
)
STAYING = (
    'trio.configure(base_url=os.environ["PYTRIO_BASE_URL"])',
    'trio.configure(base_url=os.getenv("PYTRIO_BASE_URL"), api_key=os.getenv("PYTRIO_API_KEY"))',
    'trio.configure(base_url=os.environ.get("PYTRIO_BASE_URL"))',
    "trio.configure(base_url=None, api_key=None)",
    "trio.configure(request_timeout_seconds=5)",
    "trio.ServiceClient()",
    "trio.ServiceClient(api_key=key)",
    'trio.ServiceClient(os.environ["PYTRIO_API_KEY"])',
    'judge.configure(api_key="another service")',
    'judge.configure(env="test", home=somewhere())',
    'os.environ["HF_HOME"] = "/tmp"',
    'text = "\\d"',
)
LEAVING_HEAD = """
import os
import pytrio as trio
from pytrio import ServiceClient as Client, configure
import another_company as judge
open("it-ran", "w")
"""


@pytest.mark.parametrize("code", LEAVING)
def test_code_that_leaves_is_stopped_before_it_starts(place: Place, code: str) -> None:
    source = LEAVING_HEAD + code + "\n"
    place.write("leaving.py", source)
    line = only_line(place.run("run", "leaving.py"))
    assert line.startswith(f"dryrun: leaving.py:{len(source.splitlines())}: ")
    assert not (place.cwd / "it-ran").exists()
    assert not (place.cwd / ".trio-local").exists()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("code", STAYING)
def test_code_that_stays_is_let_through(code: str) -> None:
    source = LEAVING_HEAD + code + "\n"
    assert code_that_leaves(source, "staying.py", "http://127.0.0.1:0", "dryrun-key") == []


def test_hosts_of_profiles_and_variables_are_blocked_too(place: Place) -> None:
    home = Path(place.environment["HOME"])
    hosts = blocked_hosts(home, {"PYTRIO_BASE_URL": "https://Private.example.com:8443/api"})
    assert hosts == ["private.example.com", "pytrio.cn", "pytrio.com", "trio.example.org"]
    assert blocked_hosts(home / "empty", {"PYTRIO_BASE_URL": "http://127.0.0.1:5"}) == [
        "pytrio.cn",
        "pytrio.com",
    ]


# -- whole runs ------------------------------------------------------------------------------------

# Trains until it is killed, goes on from there in another dry run, or samples meanwhile. What it
# prints is also written to files, to be compared with what arrives.
TRAIN = """\
import json
import os
import signal
import sys

import helper_beside_the_script
import pytrio as trio

name, mode, *rest = sys.argv[1:]


def emit(stream, data):
    with open(f"{name}.{stream.name.strip('<>')}", "ab") as copy:
        copy.write(data)
    stream.buffer.write(data)
    stream.flush()


emit(sys.stdout, b"\\xff\\xfe no text \\x00\\r\\n" + b"much " * 50_000 + b"\\n")
emit(sys.stderr, b"\\xf0 on the other side\\n")
with open(f"{name}.json", "w", encoding="utf-8") as file:
    about = {"argv": rest, "pid": os.getpid(), "url": os.environ["PYTRIO_BASE_URL"]}
    about.update(cwd=os.getcwd(), env=os.environ.get("PYTRIO_ENV"))
    about.update(helped=helper_beside_the_script.X)
    json.dump(about, file)
trio.configure(base_url=os.environ["PYTRIO_BASE_URL"])
client = trio.ServiceClient()
if mode == "sample":
    sampler = client.create_sampling_client("Qwen/Qwen3.5-4B")
    params = trio.SamplingParams(max_tokens=20)
    answer = sampler.sample(trio.ModelInput.from_ints([5, 6, 7]), sampling_params=params).result()
    emit(sys.stdout, f"sampled {answer.sequences[0].tokens}\\n".encode())
    sys.exit()
if mode == "resume":
    with open("killed.state", encoding="utf-8") as file:
        trainer = client.create_training_client_from_state_with_optimizer(file.read())
else:
    trainer = client.create_lora_training_client("Qwen/Qwen3.5-4B", rank=8, seed=3)
tokens = [20, 21, 22, 23, 24, 25, 26, 27]
datum = trio.Datum(
    model_input=trio.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:]},
)
for step in range(2 if mode == "killed" else 1):
    output = trainer.forward_backward([datum])
    trainer.optim_step(trio.AdamParams(learning_rate=1e-3)).result()
    emit(sys.stdout, f"loss {output.result().metrics['loss_mean']!r}\\n".encode())
    if mode == "killed" and step == 0:
        with open("killed.state", "w", encoding="utf-8") as file:
            file.write(trainer.save_state("state").result().path)
if mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
trainer.save_state("end").result()
"""

# On PYTHONPATH, where somebody's own start-up file may already be: notes what the script opens.
SPY = """\
import os
import sys


def note(event, arguments):
    if event == "open" and ".pytrio" in str(arguments[0]):
        write(f"open {arguments[0]}")
    if event == "socket.connect":
        write(f"connect {arguments[1][0]}")


def write(line):
    descriptor = os.open(os.environ["SPY_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (line + "\\n").encode())
    os.close(descriptor)


if "PYTRIO_BASE_URL" in os.environ:  # the script, not the backend
    write("started")
    sys.addaudithook(note)
"""


def spied_environment(place: Place) -> dict[str, str]:
    """An environment whose start-up file notes what the script opens and connects to."""
    spy = place.cwd.parent / "spy" / "sitecustomize.py"
    spy.parent.mkdir()
    spy.write_text(SPY, encoding="utf-8")
    return {"PYTHONPATH": str(spy.parent), "SPY_FILE": str(place.cwd.parent / "spied")}


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and only waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def answers(url: str) -> bool:
    """Whether anybody listens at an address."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), 5).close()
    except OSError:
        return False
    return True


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def losses_in(out: bytes) -> list[str]:
    return [line for line in out.decode("latin-1").splitlines() if line.startswith("loss ")]


@pytest.mark.slow
def test_runs_side_by_side_and_one_after_a_kill(place: Place, tmp_path: Path) -> None:
    # The skill is somewhere else and may not be written to; the script's path is no ASCII.
    skill = tmp_path / "read only skill"
    shutil.copytree(SKILL, skill, ignore=shutil.ignore_patterns("__pycache__"))
    skill_before = snapshot(skill)
    place.dryrun = skill / "scripts" / "dryrun.py"
    script = place.write("a lööp 训练/trä in.py", TRAIN)
    place.write("a lööp 训练/helper_beside_the_script.py", "X = 5")
    home_before = snapshot(Path(place.environment["HOME"]) / ".pytrio")
    proxies = {f"{kind}_PROXY": DEAD_PROXY for kind in ("HTTP", "HTTPS", "ALL")}
    environment = {**spied_environment(place), **proxies, "PYTRIO_ENV": "prod"}
    script = script.relative_to(place.cwd)
    passed_on = ["--port", "1", "--", "", "two words", "ünï"]
    running = [
        place.start("run", script, "--", "killed", "killed", **environment),
        place.start("run", script, "--", "beside", "sample", *passed_on, **environment),
    ]
    killed, beside = [ended(process) for process in running]
    assert (killed.code, beside.code) == (1, 0), (killed.lines, beside.lines)
    assert any("failed with exit status -9" in line for line in killed.lines)
    resumed = place.run("run", script, "--", "resumed", "resume", **environment)
    assert resumed.code == 0, resumed.lines

    results = {"killed": killed, "beside": beside, "resumed": resumed}
    for name, result in results.items():
        assert result.out == (place.cwd / f"{name}.stdout").read_bytes()
        printed = (place.cwd / f"{name}.stderr").read_bytes()
        assert result.err.startswith(printed)
        own = result.err[len(printed) :].decode("utf-8").splitlines()
        mark = "recording and audit.json: "
        (recording,) = [line.partition(mark)[2] for line in own if mark in line]
        records, is_whole = read_trace(place.cwd / recording / "trace.msgpack")
        assert is_whole
        kind = "sampling_run" if name == "beside" else "training_run"
        assert [r["kind"] for r in records if r["kind"].endswith("_run")] == [kind]
        about = json.loads((place.cwd / f"{name}.json").read_text(encoding="utf-8"))
        assert about["argv"] == (passed_on if name == "beside" else [])
        assert about["cwd"] == str(place.cwd) and about["env"] is None and about["helped"] == 5
        assert not is_alive(about["pid"]) and not answers(about["url"])
    # The resumed run goes on from the state saved before the kill as the killed one itself did.
    assert len(losses_in(killed.out)) == 2
    assert losses_in(resumed.out) == losses_in(killed.out)[1:]
    assert any(line.startswith("audit   clean") for line in resumed.lines), resumed.lines
    assert b"sampled [" in beside.out

    assert snapshot(skill) == skill_before
    assert snapshot(Path(place.environment["HOME"]) / ".pytrio") == home_before
    spied = Path(environment["SPY_FILE"]).read_text(encoding="utf-8").splitlines()
    assert spied.count("started") == 3
    assert {line for line in spied if line.startswith("connect")} == {"connect 127.0.0.1"}
    private = str(place.cwd / ".trio-local")
    opened = {line.partition(" ")[2] for line in spied if line.startswith("open")}
    assert [p for p in opened if not str(place.cwd / p).startswith(private)] == []
    for path in place.cwd.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert REAL_KEY.encode() not in content and PROFILE_KEY.encode() not in content, path


NOTE = """\
import json, os, signal, sys, time
import pytrio as trio
with open(sys.argv[1], "w", encoding="utf-8") as file:
    json.dump({"pid": os.getpid(), "url": os.environ["PYTRIO_BASE_URL"]}, file)
"""
ENDINGS = {
    "crash": ("raise RuntimeError('boom')", "failed with exit status 1", "RuntimeError: boom"),
    "three": ("sys.exit(3)", "failed with exit status 3", ""),
    "hard": ("client = trio.ServiceClient(); os._exit(7)", "failed with exit status 7", ""),
    "idle": ("print('done')", "opened no session on the backend", ""),
    "foreign": (
        "trio.ServiceClient(api_key='sk-' + 'x' * 20)",
        "failed with exit status 1",
        "do not set api_key in code, leave it to PYTRIO_API_KEY",
    ),
}


def test_scripts_that_end_badly(place: Place) -> None:
    running = {}
    for name, (code, _, _) in ENDINGS.items():
        script = place.write(f"{name}.py", NOTE + code + "\n")
        running[name] = place.start("run", script, "--", f"{name}.json")
    for name, (_, verdict, shown) in ENDINGS.items():
        result = ended(running[name])
        assert result.code == 1, (name, result.lines)
        assert [verdict in line for line in result.lines if line.startswith("dryrun: ")][-1], name
        assert any(shown in line for line in result.lines)
        about = json.loads((place.cwd / f"{name}.json").read_text(encoding="utf-8"))
        assert not is_alive(about["pid"]) and not answers(about["url"])
        if not shown:
            assert "Traceback" not in "".join(result.lines)


def test_a_hidden_address_is_stopped_at_the_first_look_up(place: Place) -> None:
    place.write(
        "company_settings.py",
        f"""
        import pytrio

        pytrio.configure(base_url="https://API.PyTrio.com.", api_key="{REAL_KEY}")
        """,
    )
    place.write(
        "innocent.py",
        "import company_settings, pytrio\npytrio.ServiceClient()\nopen('it-ran', 'w')\n",
    )
    environment = spied_environment(place)
    # Through a proxy nobody would look the host up on this machine.
    proxies = dict.fromkeys(("HTTPS_PROXY", "https_proxy", "ALL_PROXY"), DEAD_PROXY)
    started = time.monotonic()
    result = place.run("run", "innocent.py", **environment, **proxies)
    assert time.monotonic() - started < 60
    assert result.code == 1
    stopped = [line for line in result.lines if "stopped: the script tried to reach" in line]
    assert len(stopped) == 1 and "api.pytrio.com" in stopped[0].lower()
    assert "Traceback" not in "".join(result.lines)
    spied = Path(environment["SPY_FILE"]).read_text(encoding="utf-8").splitlines()
    assert "started" in spied and not [line for line in spied if line.startswith("connect")]
    assert not (place.cwd / "it-ran").exists()


# -- signals ---------------------------------------------------------------------------------------

WAITING = (
    NOTE
    + """
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
client = trio.ServiceClient()
sampler = client.create_sampling_client("Qwen/Qwen3.5-4B")
print("ready", flush=True)
while True:
    if sys.argv[2] == "sampling":
        params = trio.SamplingParams(max_tokens=2)
        sampler.sample(trio.ModelInput.from_ints([5, 6]), sampling_params=params).result()
    time.sleep(0.05)
"""
)


def backend_pid(record: str) -> int:
    """The process that serves a recording."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        if "--follow-parent" in arguments and record in arguments:
            return int(path.parent.name)
    raise AssertionError(f"no backend records into {record}")


def test_nothing_is_left_behind_by_signals_and_deaths(place: Place) -> None:
    script = place.write("waiting.py", WAITING)
    modes = {
        "interrupt": "patient", "terminate": "stubborn", "kill": "stubborn", "backend": "sampling"
    }  # fmt: skip
    # A recording of an earlier run must not be taken for that of a run whose backend died.
    (place.cwd / "backend").mkdir()
    stale = {"sessions": 1, "optimizer_steps": 1, "samples": 1, "checkpoints": 0, "seconds": 1.0}
    stale |= {"loss_first": None, "tokens": {"prefill": 0, "sample": 0, "train": 0}}
    stale |= {"notes": []}
    place.write("backend/summary.json", json.dumps(stale))
    running: dict[str, subprocess.Popen[bytes]] = {
        name: place.start("run", "--record", name, script, "--", f"{name}.json", mode)
        for name, mode in modes.items()
    }
    abouts: dict[str, dict[str, Any]] = {}
    for name, process in running.items():
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", name
        abouts[name] = json.loads((place.cwd / f"{name}.json").read_text(encoding="utf-8"))
        assert is_alive(abouts[name]["pid"]) and answers(abouts[name]["url"])

    os.killpg(running["interrupt"].pid, signal.SIGINT)
    running["terminate"].send_signal(signal.SIGTERM)
    running["kill"].kill()
    os.kill(backend_pid("backend"), signal.SIGKILL)
    time.sleep(1.5)
    # Impatience ends a script that does not listen.
    running["terminate"].send_signal(signal.SIGTERM)
    started = time.monotonic()
    results = {name: ended(process) for name, process in running.items() if name != "kill"}
    assert time.monotonic() - started < 30

    assert results["interrupt"].code == 130, results["interrupt"].lines
    assert results["interrupt"].lines[-1] == "dryrun: interrupted"
    assert results["terminate"].code == 130, results["terminate"].lines
    for name in ("interrupt", "terminate"):
        assert read_trace(place.cwd / name / "trace.msgpack")[1], name
        assert (place.cwd / name / "summary.json").is_file()
    assert results["backend"].code == 1, results["backend"].lines
    assert "the backend died; its log: backend/backend.log" in results["backend"].lines[-1]
    running["kill"].wait(20)
    for name, about in abouts.items():
        gone = wait_until(lambda about=about: not is_alive(about["pid"]), 15)
        assert gone, f"the script of {name} is still alive"
        assert wait_until(lambda about=about: not answers(about["url"]), 15), name
    assert wait_until(lambda: read_trace(place.cwd / "kill" / "trace.msgpack")[1], 15)
    for process in running.values():
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


# -- the other commands ----------------------------------------------------------------------------


def test_serve_works_for_a_script_of_its_own_and_ends_on_a_signal(place: Place) -> None:
    for number, name in ((signal.SIGINT, "first"), (signal.SIGTERM, "second")):
        process = place.start("serve", "--record", name)
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        trio.configure(base_url=url, api_key=KEY, **QUICK_RETRIES)
        client = trio.ServiceClient()
        assert BASE_MODEL in client.get_supported_models()
        del client
        gc.collect()  # closes the session while there is somebody to tell
        process.send_signal(number)
        result = ended(process)
        assert result.code == 0, result.lines
        assert result.out == b""
        assert result.lines and all(line.startswith("dryrun: ") for line in result.lines)
        assert not answers(url)
        assert read_trace(place.cwd / name / "trace.msgpack")[1]
        summary = json.loads((place.cwd / name / "summary.json").read_text(encoding="utf-8"))
        assert summary["sessions"] == 1


def test_doctor_models_and_help(place: Place) -> None:
    doctor = place.run("doctor")
    assert (doctor.code, doctor.err) == (0, b"")
    text = doctor.out.decode("utf-8")
    for word in ("skill", "python", "pytrio", "torch", "swanlab", "ready for a dry run"):
        assert word in text
    facts = json.loads(place.run("doctor", "--json").out)
    assert facts["problem"] is None
    assert facts["pytrio"] == trio.__version__ if hasattr(trio, "__version__") else facts["pytrio"]
    models = place.run("models")
    assert (models.code, models.err) == (0, b"")
    for word in ("standin", "large", "hf:FOLDER", BASE_MODEL):
        assert word in models.out.decode("utf-8")
    for command in ([], ["run"], ["serve"], ["models"], ["doctor"]):
        shown = place.run(*command, "--help")
        assert (shown.code, shown.err) == (0, b"")
        assert len(shown.out) > 60
    assert b"--fault" in place.run("run", "--help").out
    version = place.run("--version")
    assert version.code == 0 and version.out.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_command_that_hangs_says_where(tmp_path: Path) -> None:
    """So that a test which waits for ever leaves more than a time-out."""
    code = "import time\ndef wait_here():\n    time.sleep(60)\nwait_here()\n"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with pytest.raises(pytest.fail.Exception, match="in wait_here"):
        outcome([sys.executable, "-c", parent], tmp_path, dict(os.environ), 2)
