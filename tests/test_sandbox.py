"""Model-written code of retool: what it can do, what comes back, and what the model is paid for."""

import asyncio
import glob
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import SKILL
from test_agents import agent, encoded, tokenizer_with, xml
from test_examples import environment, run_alone

EXAMPLE = SKILL / "examples" / "retool.py"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox is POSIX only")
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def module() -> Iterator[Any]:
    """What one test makes of bwrap is not for the next one."""
    found = agent("retool.py")
    found.bwrap_fault.cache_clear()
    yield found
    found.bwrap_fault.cache_clear()


def check_lines(done: subprocess.CompletedProcess[str]) -> None:
    """The program's own check of every hostile snippet came out well."""
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines, last = done.stdout.strip().splitlines()
    assert first.startswith("isolation: ")
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert sum(line.startswith("ok ") for line in lines) == len(lines) >= 25
    assert last == f"0 of {len(lines)} failed"


def test_hostile_code_does_no_harm(tmp_path: Path) -> None:
    check_lines(run_alone(EXAMPLE, "--check-sandbox", folder=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the test above was an ordinary user's")
def test_hostile_code_of_an_ordinary_user_does_no_harm() -> None:
    """Nobody changes uid then: only the kernel's rules stand between the code and its user."""
    uid = 12345
    libraries = sysconfig.get_path("purelib")
    system = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)  # pytest's own folders are closed to others
        copied = shutil.copy(EXAMPLE, folder)
        os.chmod(copied, 0o644)
        code = f"import runpy, sys; sys.path.insert(1, {libraries!r}); "
        code += "sys.argv[1:] = ['--check-sandbox']; "
        code += f"runpy.run_path({copied!r}, None, '__main__')"
        for python in (sys.executable, system):  # ours may be in root's closed home
            command = [python, "-B", "-c"]
            settings: dict[str, Any] = {"user": uid, "group": uid}
            settings |= {"cwd": folder, "extra_groups": [], "capture_output": True, "text": True}
            settings |= {"env": {**environment(HOME=folder), "PYTHONUNBUFFERED": "1"}}
            try:
                subprocess.run([*command, "import sys"], check=True, timeout=30, **settings)
            except (OSError, subprocess.CalledProcessError):
                continue
            done = subprocess.run([*command, code], timeout=120, **settings)
            check_lines(done)
            return
    pytest.skip(f"uid {uid} can read neither {sys.executable} nor {system}")


# -- what comes back ------------------------------------------------------------------------------

# code, status, what the output is (or, after `...`, ends with), what the note says
RUNS: list[tuple[str, str, str, str]] = [
    ("print(6 * 7)", "ok", "42\n", ""),
    ("", "ok", "", ""),
    ("print('a', end='')", "ok", "a", ""),
    ("x = 1", "ok", "", ""),
    ("import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint('out')", "ok",
     "out\nerr\nout\n", ""),
    ("print(__name__, __file__)\nimport sys\nprint(sys.argv)", "ok",
     "__main__ code.py\n['code.py']\n", ""),
    ("def f():\n    return g()\ndef g():\n    return 1\nprint([f() for _ in 'ab'])", "ok",
     "[1, 1]\n", ""),
    ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nprint(A(1))", "ok",
     "A(x=1)\n", ""),
    ("print('\u65e5\u672c \U0001f34e')", "ok", "\u65e5\u672c \U0001f34e\n", ""),
    ("print('\ud800')", "ok", "?\n", ""),  # a lone surrogate cannot be written
    ("import sys\nsys.exit()", "ok", "", ""),
    ("import sys\nsys.exit(3)", "error", "", ""),
    ("raise SystemExit('bye')", "error", "bye\n", ""),
    ("input()", "error", "...EOFError: EOF when reading a line\n", ""),
    ("print(1)\n\n1 / 0", "error",
     "...ZeroDivisionError: division by zero\n", ""),
    ("print(", "error", "...SyntaxError: '(' was never closed\n", ""),
    ("  x = 1", "error", "...IndentationError: unexpected indent\n", ""),
    ("a = 1\0", "error", "...null bytes\n", ""),
    ("import os\nprint('x', flush=True)\nos.kill(os.getpid(), 9)", "error",
     "...PermissionError: [Errno 1] Operation not permitted\n", ""),
    ("import time\nprint('begun')\ntime.sleep(60)", "timeout", "begun\n", "stopped after 1 s"),
    ("print('begun')\nwhile True: pass", "timeout", "begun\n", "stopped after 1 s"),
    ("import ctypes\nprint('begun')\nctypes.CDLL(None).strlen(1)", "killed", "begun\n",
     "ended by signal 11"),
    ("while True: print('spam' * 99999, end='')", "killed", "...spamspam",
     "more than 8 MB of output"),
    ("for i in range(40): open(str(i), 'wb').write(b'x' * (7 << 20))\nwhile True: pass", "killed",
     "", "more than 64 MB or 1000 files on disk"),
]  # fmt: skip


@ON_LINUX
@pytest.mark.parametrize(
    ("code", "status", "output", "note"), RUNS, ids=[str(n) for n in range(len(RUNS))]
)
def test_what_comes_back(module: Any, code: str, status: str, output: str, note: str) -> None:
    seconds = 1.0 if status == "timeout" else 10.0
    ran = module.run_code(code, seconds, 512)
    assert (ran.status, ran.note) == (status, note), ran
    if output.startswith("..."):
        assert ran.output.endswith(output[3:])
    else:
        assert ran.output == output
    assert "LAUNCHER" not in ran.output and '"<string>"' not in ran.output
    assert 0 < ran.seconds < seconds + 2
    assert not boxes()


def test_a_traceback_shows_the_code_and_nothing_of_ours(module: Any) -> None:
    ran = module.run_code("def f():\n    return 1 / 0\nprint(1)\n\nf()", 10, 512)
    first, start, *frames, last = ran.output.splitlines()
    assert (first, start) == ("1", "Traceback (most recent call last):")
    assert last == "ZeroDivisionError: division by zero" and ran.status == "error"
    files = [line.strip() for line in frames if line.startswith("  File ")]
    assert files == ['File "code.py", line 5, in <module>', 'File "code.py", line 2, in f']
    assert "    return 1 / 0" in frames


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\u65e5", "\U0001f34e"])
def test_the_end_of_a_long_output_is_kept(module: Any, letter: str) -> None:
    code = f"for n in range(3000): print(n, {letter!r} * (n % 7))"
    whole = "".join(f"{n} {letter * (n % 7)}\n" for n in range(3000))
    ran = module.run_code(code, 10, 512)
    assert len(whole) > 3 * 4096
    assert ran.output == whole[-4096:]
    short = module.run_code(f"print({letter!r} * 4095)", 10, 512)
    assert short.output == letter * 4095 + "\n"


@pytest.mark.parametrize("seconds", [0.4, 1.5])
def test_the_time_limit_is_kept(module: Any, seconds: float) -> None:
    for code in ("while True: pass", "import time\ntime.sleep(9)"):
        start = time.monotonic()
        ran = module.run_code(code, seconds, 512)
        assert ran.status == "timeout" and ran.note == f"stopped after {seconds:g} s"
        assert seconds <= ran.seconds <= time.monotonic() - start < seconds + 2


def test_the_memory_limit_is_kept(module: Any) -> None:
    code = "x = bytearray(200 << 20)\nprint(len(x))"
    assert module.run_code(code, 10, 512).output == f"{200 << 20}\n"
    assert "MemoryError" in module.run_code(code, 10, 128).output


def test_no_variable_of_ours_is_seen(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s3cr3t-value"
    for name in ("PYTRIO_API_KEY", "LD_PRELOAD_NOT", "PYTHONSTARTUP", "PATH_OF_OURS"):
        monkeypatch.setenv(name, secret)
    code = "import os, json\nprint(json.dumps(dict(os.environ)))"
    seen = json.loads(module.run_code(code, 10, 512).output)
    assert secret not in json.dumps(seen)
    expected = {"LANG", "LC_ALL", "HOME", "TMPDIR", "PWD"}
    assert seen and set(seen) <= expected | {f"{n}_NUM_THREADS" for n in ("OMP", "OPENBLAS", "MKL")}


# -- what is left ---------------------------------------------------------------------------------


def boxes() -> list[str]:
    return glob.glob(f"{tempfile.gettempdir()}/code-box-{os.getpid()}-*")


def processes() -> list[int]:
    """Processes whose environment names one of our boxes, and children of ours that are dead."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text().rpartition(")")[2].split()
                inside = f"code-box-{os.getpid()}-".encode() in (folder / "environ").read_bytes()
            except OSError:  # gone, or somebody else's
                continue
            if inside or (status[0] == "Z" and status[1] == str(os.getpid())):
                found.append(int(folder.name))
    return found


@ON_LINUX
def test_nothing_is_left_of_many_at_once(module: Any) -> None:
    names = {"ordinary code", "own files", "fork bomb", "thread bomb", "orphan daemon", "sleep",
             "busy loop", "closes its output", "ignores signals", "endless output", "deep folders",
             "unreadable folders", "deletes its folder", "10 GB", "kills everything",
             "fills the disk", "segmentation fault", "endless at exit"}  # fmt: skip
    codes = [code.replace("{home}", "/tmp") for name, _, code in module.HOSTILE if name in names]
    assert len(codes) == len(names)
    codes = (codes + ["print('mine', 7)"] * 6)[:24]
    seen = threading.Event()

    def look() -> None:
        while not seen.is_set():
            if boxes() and processes():
                seen.set()
            time.sleep(0.02)

    watcher = threading.Thread(target=look)
    watcher.start()
    with ThreadPoolExecutor(8) as threads:
        rans = list(threads.map(lambda code: module.run_code(code, 2.5, 512), codes))
    found = seen.is_set()  # this test would see what is left
    seen.set()
    watcher.join()
    assert found and len(rans) == 24
    assert {ran.status for ran in rans} == {"ok", "error", "timeout", "killed"}
    assert [ran.output for ran in rans[18:]] == ["mine 7\n"] * 6
    assert max(ran.seconds for ran in rans) < 5
    assert boxes() == [] and processes() == []


# -- code is never run without a sandbox ----------------------------------------------------------


def test_bwrap_is_demanded(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(module.SandboxError, match="bwrap is not installed"):
        module.run_code("print(1)", 10, 512, isolation="bwrap")
    assert module.run_code("print(1)", 10, 512, isolation="auto").output == "1\n"
    assert module.run_code("print(1)", 10, 512, isolation="limits").output == "1\n"


@pytest.mark.parametrize("script", ["echo no namespaces >&2; exit 1", "echo 42", "exit 0"])
def test_a_bwrap_that_does_not_work_is_none(
    module: Any, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not enough that it is installed, nor that it prints what was expected."""
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(module.SandboxError, match="bwrap does not work here"):
        module.run_code("print(6 * 7)", 10, 512, isolation="bwrap")
    assert module.run_code("print(1)", 10, 512, isolation="auto").output == "1\n"
    assert not boxes()


def test_a_bwrap_in_which_code_ends_early_is_none(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: "/usr/bin/bwrap")
    ended = module.Ran("", "killed", 0.1, "ended by signal 31")
    monkeypatch.setattr(module, "run_boxed", lambda *_, **__: ended)
    with pytest.raises(module.SandboxError, match="bwrap does not work here: killed"):
        module.run_code("print(1)", 10, 512, isolation="bwrap")


@pytest.mark.parametrize(
    ("python", "complaint"),
    [
        ("/nonexistent/python", "cannot start the interpreter"),
        ("/bin/false", "the launcher ended with status 1"),
        ("/bin/true", "the launcher ended with status 0"),
        ("/bin/echo", "RLIMIT_CPU"),  # says something, but not that the limits are set
    ],
)
def test_without_a_launcher_nothing_is_run(
    module: Any, python: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "interpreter", lambda uid: python)
    with pytest.raises(module.SandboxError, match=complaint) as failed:
        module.run_code("print('it ran')", 10, 512, isolation="limits")
    assert "\n" not in str(failed.value)
    assert not boxes()


@ON_LINUX
@pytest.mark.parametrize(
    ("sound", "refused", "complaint"),
    [
        ("if libc.prctl(38, 1, 0, 0, 0):", "if True:", "no_new_privs refused"),
        ("if seccomp.seccomp_load(rules):", "if True:", "seccomp refused"),
        ("if rules < 0 or libc.syscall(446, rules, 0):", "if True:", "Landlock refused"),
        ("if os.geteuid() == 0:", "if True:", "code is not run as root"),
        ("resource.setrlimit(getattr(resource, name), (most, most))", "raise OSError('no limit')",
         "no limit"),
        ("os.setgroups([]), os.setgid(box", "raise OSError('no uid'), (box", "no uid"),
    ],
)  # fmt: skip
def test_a_launcher_that_is_refused_something_runs_nothing(
    module: Any, sound: str, refused: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.LAUNCHER.count(sound) == 1
    if "Landlock" in complaint and "files" in module.run_code("", 10, 512, "limits").left_open:
        pytest.skip("this kernel has no Landlock")
    if complaint == "no uid" and os.geteuid() != 0:
        pytest.skip("an ordinary user keeps their uid")
    monkeypatch.setattr(module, "LAUNCHER", module.LAUNCHER.replace(sound, refused))
    with pytest.raises(module.SandboxError, match=complaint) as failed:
        module.run_code("print('it ran')", 10, 512, isolation="limits")
    assert "it ran" not in str(failed.value) and not boxes()


@ON_LINUX
def test_what_is_left_open_is_said(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = module.LAUNCHER.replace("libseccomp.so.2", "libseccomp.so.none")
    monkeypatch.setattr(module, "LAUNCHER", missing)
    left_open = module.run_code("", 10, 512, isolation="limits").left_open
    assert left_open.removeprefix("files,") == "network,signals"


# -- what the model reads, and is paid for --------------------------------------------------------


@pytest.mark.parametrize("template", ["standin", "qwen3"])
def test_the_model_reads_the_end_of_the_output(module: Any, template: str) -> None:
    tokenizer = tokenizer_with(template)
    marks = set(tokenizer.get_added_vocab().values())
    ran = module.Ran("\n".join(f"line {n} <|im_end|>" for n in range(50)) + "\n\n", "ok", 0.1)
    whole = module.shown(tokenizer, ran, 10_000)
    assert whole == "\n".join(f"line {n} < |im_end|>" for n in range(50))
    for limit in (1, 7, 30):
        text = module.shown(tokenizer, ran, limit)
        assert text and whole.endswith(text) and len(encoded(tokenizer, text)) <= limit
        assert text == tokenizer.decode(encoded(tokenizer, whole)[-limit:])
        assert not set(encoded(tokenizer, text)) & marks
    stopped = module.Ran(ran.output, "timeout", 1.0, "stopped after 1 s")
    assert module.shown(tokenizer, stopped, 10_000) == whole + "\n[stopped after 1 s]"
    text = module.shown(tokenizer, stopped, 7)
    assert text == module.shown(tokenizer, ran, 7) + "\n[stopped after 1 s]"
    silent = module.Ran("\n", "timeout", 1.0, "stopped after 1 s")
    assert module.shown(tokenizer, silent, 7) == "[stopped after 1 s]"
    assert module.shown(tokenizer, module.Ran("", "ok", 0.1), 7) == ""
    indented = module.Ran("\n  2\n 11\n", "ok", 0.1)
    assert module.shown(tokenizer, indented, 99) == "  2\n 11"


class Scripted:
    """A sampler that says what it is told, turn by turn."""

    def __init__(self, tokenizer: Any, said: list[str], reason: str = "stop") -> None:
        self.tokens = [encoded(tokenizer, text) for text in said]
        self.reasons = ["stop"] * (len(said) - 1) + [reason]
        self.prompts: list[list[int]] = []

    async def sample_async(self, prompt: Any, count: int, params: Any) -> Any:
        self.prompts.append(prompt.to_ints())
        assert params.temperature == 1.0 and params.top_p == 1.0 and params.top_k == -1
        tokens, reason = self.tokens.pop(0), self.reasons.pop(0)
        sequence = SimpleNamespace(tokens=tokens, logprobs=[-0.5] * len(tokens), stop_reason=reason)
        return SimpleNamespace(sequences=[sequence] * count)


def program(code: str) -> str:
    return xml(code, name="code_interpreter", key="code") + "<|im_end|>"


BOX = "print('\\\\boxed{7}')"
# What the model says, turn by turn, when 7 is right; how that ends; what it is paid.
PLAYED: list[tuple[list[str], str, float | None]] = [
    (["\\boxed{7}<|im_end|>"], "answer", 1.0),
    (["\\boxed{8}<|im_end|>"], "answer", -1.0),
    ([program(BOX), "So it is.<|im_end|>"], "answer", -1.0),  # the tool's box is not the model's
    ([program(BOX), "So \\boxed{8}.<|im_end|>"], "answer", -1.0),
    ([program("print(7)"), "So \\boxed{7}.<|im_end|>"], "answer", 1.0),
    ([program("1 / 0"), "So \\boxed{7}.<|im_end|>"], "answer", 1.0),  # never by how a program ended
    ([program("while True: pass"), "\\boxed{7}<|im_end|>"], "answer", 1.0),
    (["I guess \\boxed{7}. " + program("print(8)"), "No.<|im_end|>"], "answer", -1.0),
    ([program("print(7)")] * 3, "limit", -1.0),
    ([program("print(7)"), program("print(7)"), "\\boxed{7}<|im_end|>"], "answer", 1.0),
    (["<tool_call>\n\\boxed{7}<|im_end|>"], "malformed", -1.0),
    ([program("print(7)").replace("code_", "my_")], "malformed", -1.0),
    ([""], "foreign_id", None),
]


@pytest.mark.parametrize(
    ("said", "end", "reward"), PLAYED, ids=[str(n) for n in range(len(PLAYED))]
)
def test_only_the_final_text_is_paid_for(
    module: Any, said: list[str], end: str, reward: float | None
) -> None:
    tokenizer = tokenizer_with("standin")
    sampler = Scripted(tokenizer, said)
    config = module.Config(max_calls=2, code_seconds=1.0)
    item = module.Item(encoded(tokenizer, "<|im_start|>user\nWhat is 3 + 4?"), "7")
    with ThreadPoolExecutor(1) as workers:
        rollout = module.Rollout(sampler, tokenizer, workers, config, 1.0)
        ((played,),) = asyncio.run(rollout.groups([item], 1))
    assert (played.end, played.reward) == (end, reward)
    assert not sampler.tokens and len(played.turns) == len(said)
    assert [turn.prompt for turn in played.turns] == sampler.prompts
    (run,) = module.joined_turns(played.turns)
    assert run == played.turns
    if end == "answer" and len(said) > 1 and said[0] == program(BOX):
        assert "\\boxed{7}\n</tool_response>" in tokenizer.decode(sampler.prompts[1])


@pytest.mark.parametrize(
    ("changes", "reason", "end", "reward"),
    [
        ({}, "length", "truncated", -1.0),
        ({"max_trajectory_tokens": 40}, "stop", "full", -1.0),
        ({"isolation": "bwrap"}, "stop", "environment", None),
    ],
)
def test_how_else_a_trajectory_ends(
    module: Any,
    changes: dict[str, Any],
    reason: str,
    end: str,
    reward: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut or full is the policy's doing; a sandbox that fails is not."""
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    tokenizer = tokenizer_with("standin")
    config = module.Config(**changes)
    sampler = Scripted(tokenizer, [program("print(7)")], reason)
    item = module.Item(encoded(tokenizer, "3 + 4"), "7")
    with ThreadPoolExecutor(1) as workers:
        rollout = module.Rollout(sampler, tokenizer, workers, config, 1.0)
        ((played,),) = asyncio.run(rollout.groups([item], 1))
    assert (played.end, played.reward) == (end, reward)
