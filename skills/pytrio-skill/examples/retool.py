"""ReTool: the model writes Python, a sandbox runs it, the model reads and answers; right answers
are reinforced.

Paper: ReTool, arXiv:2504.11536; advantages without the division by the deviation as in Dr. GRPO,
arXiv:2503.20783. A trajectory i of G on one question is turns of sampled tokens with the output of
the code between them. With the reward r_i of its final text (1 when the last box is right, else
-1; never by how a program ended):

    A_i  = r_i - mean(r_1 ... r_G)
    loss = -sum_i sum_t m_it * min(ratio_it * A_i, clip(ratio_it, 0.8, 1.28) * A_i)
    m_it = 1 where token t was sampled, 0 for what the sandbox or the template wrote

Dry run (free, offline):   python scripts/dryrun.py run examples/retool.py -- --data sample
On the cloud (billed):     PYTRIO_API_KEY=... python examples/retool.py
Is the sandbox tight here: python examples/retool.py --check-sandbox
Expected in the dry run:   correct answers 0.59 to 0.97 (last five of 10 steps), held-out accuracy
                           0.55 to 0.98, about 50 s on one core; seed 1 0.50 to 0.97, to 0.98
An interrupted run continues when the same command is given again.
"""

import asyncio
import contextlib
import ctypes
import hashlib
import importlib
import itertools
import json
import logging
import math
import os
import random
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NoReturn

import pytrio as trio
import tyro
from math_verify import parse, verify
from tqdm import tqdm

NAME = "retool"
SKILL = "pytrio-skill 0.1.0"
DATA_SET = "BytedTsinghua-SIA/DAPO-Math-17k"
REVISION = "65877096c24ffa7abc4e4fa5edb95cf3413a5674"
# What stands around each question in that data set. Its answer format is not the one we ask for.
WRAPPER = (
    "Solve the following math problem step by step. The last line of your response should be of the"
    " form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:".',
)
SYSTEM = "Run Python code when it helps. Always print the result. The final line must be \\boxed{}."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Run Python code and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}
STOP = ["<|im_end|>"]
# Stands for an assistant's text in a rendering; one word that no template trims or splits.
PLACEHOLDER = "the-assistant-wrote-this"
WRONG = -1.0  # wrong, or no answer at all; as published
# Bounds are of the ratio, not distances from 1; the cloud's defaults are unknown.
LOSS_CONFIG = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}  # public PyTRIO runs


@dataclass(frozen=True)
class Config:
    data: str = "dapo-math"
    """`dapo-math` (Hugging Face hub), `sample` (generated rows, no network, smaller defaults), or a
    .jsonl file in the schema of DAPO-Math: prompt and reward_model."""
    base_model: str = "Qwen/Qwen3.5-4B"
    """Model to adapt; the one of nearly all public PyTRIO runs."""
    isolation: Literal["auto", "bwrap", "limits"] = "auto"
    """`auto` takes bubblewrap where it works; `bwrap` demands it; references/retool.md says what
    each leaves open."""
    code_seconds: float = 10.0
    """Longest run of a program, the interpreter's start included; 30 in public runs."""
    code_memory_mb: int = 512
    """Address space of a program."""
    sandbox_workers: int = 8
    """Programs at once; 8 in public runs."""
    steps: int = 200
    """Optimiser steps; public runs: 20 to 200."""
    prompts_per_step: int = 8
    """Questions per step; 8 in public runs."""
    group_size: int = 8
    """Trajectories per question; 8 in public runs."""
    learning_rate: float = 4e-5
    """Learning rate of AdamW; 4e-5 in public runs."""
    rank: int = 32
    """LoRA rank, 4 to 64; 32 is the SDK's default."""
    max_calls: int = 4
    """Programs a trajectory may run; 4 in public runs. One more ends it without an answer."""
    max_tokens: int = 1024
    """Longest turn; 1024 in public runs."""
    max_result_tokens: int = 512
    """Longest output of a program, its end is kept; 512 in public runs."""
    max_trajectory_tokens: int = 8192
    """Prompt, turns and outputs together; 8192 in public runs, 16384 in the paper."""
    max_prompt_tokens: int = 2048
    """Longer first prompts are reported and left out."""
    seed: int = 0
    """Order of data, initial weights. Sampling gets none: one seed repeats the same turns."""
    eval_rows: int = 50
    """Held-out questions; the standard error is 7 points at worst."""
    eval_temperature: float = 0.0
    """0 for a greedy evaluation; 1 shows the policy that is trained."""
    eval_base: bool = True
    """Evaluate the untrained model, too."""
    save_every: int = 10
    """Steps between checkpoints: what a killed run does again at most."""
    run_dir: Path = Path("runs/retool")
    """Folder of metrics.jsonl, run_state.json and SwanLab's files."""
    fresh: bool = False
    """Discard the run in --run-dir instead of resuming it."""
    swanlab: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when SWANLAB_API_KEY is set and offline otherwise."""
    check_reward: bool = False
    """Only score all gold answers and a table of tricky ones; needs no model."""
    check_sandbox: bool = False
    """Only run hostile snippets in the sandbox and say what each of them could do."""


# What `--data sample` replaces; a flag on the command line still wins.
SAMPLE: dict[str, Any] = {"steps": 10, "learning_rate": 3e-4, "max_tokens": 72, "eval_rows": 64}
SAMPLE |= {"eval_temperature": 1.0, "save_every": 4}
# What may differ when a run is resumed; any other change makes it another run.
FREE_TO_CHANGE = {"steps", "save_every", "run_dir", "fresh", "swanlab", "check_reward", "eval_base"}
FREE_TO_CHANGE |= {"check_sandbox", "isolation", "sandbox_workers"}


def stop(line: str) -> NoReturn:
    """End with one line that says what is wrong and what to do."""
    raise SystemExit(f"{NAME}: {line}")


def check_config(config: Config) -> None:
    lowest = {"group_size": 2, "rank": 4, "seed": 0, "code_memory_mb": 64}
    for name, value in asdict(config).items():
        if type(value) is int and value < lowest.get(name, 1):
            flag = "--" + name.replace("_", "-")
            stop(f"{flag} must be at least {lowest.get(name, 1)}, got {value}")
    if not 0 < config.learning_rate < 1:
        stop(f"--learning-rate must be between 0 and 1, got {config.learning_rate}")
    if not 0 < config.code_seconds <= 600:
        stop(f"--code-seconds must be above 0 and at most 600, got {config.code_seconds}")
    if not 0 <= config.eval_temperature <= 2:
        stop(f"--eval-temperature must be between 0 and 2, got {config.eval_temperature}")
    if config.swanlab == "online" and not os.environ.get("SWANLAB_API_KEY"):
        stop("--swanlab online needs SWANLAB_API_KEY in the environment; offline does not")


Row = dict[str, str]


def sample_rows(count: int) -> list[dict[str, Any]]:
    """Sums and products in the data set's schema that are too large to do in the head."""
    rng = random.Random(0)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        a, b, c = rng.randint(12, 99), rng.randint(12, 99), rng.randint(101, 999)
        d, e = rng.randint(3, 9), rng.randint(101, 999)
        kinds = [
            (f"{a} * {b}", a * b),
            (f"{c} + {a} * {b}", c + a * b),
            (f"{c} * {d}", c * d),
            (f"{c} + {e} - {a}", c + e - a),
        ]
        expression, value = rng.choice(kinds)
        ask = rng.choice(["Compute {}.", "What is {}?", "Find the value of {}."])
        question = ask.format(expression)
        if value >= 100:
            rows[question] = {
                "prompt": [{"role": "user", "content": WRAPPER[0] + question + WRAPPER[1]}],
                "reward_model": {"ground_truth": str(value), "style": "rule"},
            }
    return list(rows.values())


def row_of(raw: dict[str, Any]) -> Row:
    """Question without its wrapper and spaces, and the answer. `lstrip` would eat its letters."""
    question = raw["prompt"][0]["content"].removeprefix(WRAPPER[0]).removesuffix(WRAPPER[1])
    answer = (raw["reward_model"]["ground_truth"] + "").strip().replace(",", "")
    if not question.strip() or not answer:
        raise ValueError("question or answer is empty")
    return {"question": " ".join(question.split()), "answer": answer}


def clean(rows: Sequence[Row]) -> list[Row]:
    """Each question once, and only with one answer that is a number."""
    answers: dict[str, set[str]] = {}
    for row in rows:
        answers.setdefault(row["question"], set()).add(row["answer"])
    kept = [
        {"question": question, "answer": next(iter(found))}
        for question, found in answers.items()
        if len(found) == 1 and NUMBER.fullmatch(next(iter(found)))
    ]
    if len(kept) < len(answers):
        left_out = f"{len(answers) - len(kept)} of {len(answers)} questions"
        print(f"left out: {left_out} have several answers or one that is no number")
    return kept


def read_jsonl(path: Path) -> list[Row]:
    rows = []
    try:
        # Not splitlines(): JSON strings may hold other line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {path} ({error}); --data takes dapo-math, sample or a .jsonl file")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(row_of(json.loads(line)))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                stop(f"{path} line {number} is no row of prompt and reward_model: {error!r}")
    return rows


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows; no question is in both."""
    if config.data == "dapo-math":
        try:
            from datasets import load_dataset

            rows = [row_of(raw) for raw in load_dataset(DATA_SET, revision=REVISION, split="train")]
        except Exception as error:  # no package, no network, no such revision
            reason = (str(error) or repr(error)).splitlines()[0]
            stop(f"cannot load {DATA_SET} ({reason}); --data sample needs no network")
    elif config.data == "sample":
        rows = [row_of(raw) for raw in sample_rows(256 + config.eval_rows)]
    else:
        rows = read_jsonl(Path(config.data))
    rows = clean(rows)
    if len(rows) < 5:
        stop(f"{config.data} has {len(rows)} different questions; give at least 5")
    random.Random(0).shuffle(rows)
    border = min(config.eval_rows, max(1, len(rows) // 5))
    return rows[border:], rows[:border]


@lru_cache(maxsize=2)
def order_of_epoch(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def batch_of_step(items: Sequence[Any], step: int, size: int, seed: int) -> tuple[int, list[Any]]:
    """Epoch and items of a step: a function of its number, so that resuming needs nothing else."""
    places = [divmod(position, len(items)) for position in range(step * size, (step + 1) * size)]
    return places[0][0], [items[order_of_epoch(len(items), seed, e)[i]] for e, i in places]


NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?")
# What math-verify is shown. Its time limit works by signals (POSIX, main thread only) and is off;
# sums and fractions of this length take milliseconds, powers and factorials can take hours.
ARITHMETIC = re.compile(
    r"([\d\s.,+\-*/(){}$%]|\\([dt]?frac|cdot|times|div|left|right|text\s*\{[^{}\d]*\}|[$%,;:! ]))+"
)
UNDECIDED = re.compile(r"\^|(?<!\\)!|\*\*|\\(sqrt|binom|sum|prod|log)")
LONGEST_ANSWER = 60
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit


def last_boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{...} after the thinking, braces balanced."""
    text = text.rpartition("</think>")[2]
    boxes = [] if "<think>" in text else list(re.finditer(r"\\f?box(ed)?\s*\{", text))
    for box in reversed(boxes):
        depth = 1
        for end in range(box.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[box.end() : end].strip()
    return None


def reward_of(completion: str, gold: str) -> float | None:
    """1.0 right, WRONG otherwise, None when it cannot be told: that must not count as wrong."""
    answer = last_boxed(completion)
    if answer is None or len(answer) > LONGEST_ANSWER:
        return WRONG
    answer = re.sub(r"^[A-Za-z]\s*=\s*", "", answer).rstrip(".")
    if NUMBER.fullmatch(answer):
        return 1.0 if Fraction(answer.replace(",", "")) == Fraction(gold) else WRONG
    if UNDECIDED.search(answer):
        return None
    if not ARITHMETIC.fullmatch(answer):
        return WRONG
    try:
        found = parse(f"\\boxed{{{answer}}}", parsing_timeout=None, raise_on_error=True)
        wanted = parse(gold, parsing_timeout=None, raise_on_error=True)
        right = verify(wanted, found, timeout_seconds=None, raise_on_error=True)
        return 1.0 if right else WRONG
    except Exception:
        return None


# How completions score when 18 is right; the cases are those that parsers get wrong.
TRICKY: dict[float | None, list[str]] = {
    1.0: [r"So \boxed{18}.", r"\boxed{18.00}", r"\boxed{\$18}", r"\boxed{18\text{ apples}}",
          r"\boxed{\frac{36}{2}}", r"\boxed {x = 18}", r"First \boxed{17}, no: \boxed{18}",
          r"<think>\boxed{17}</think>\boxed{18}"],
    WRONG: ["It is 18.", r"\boxed{18", r"\boxed{}", r"\boxed{-18}", r"\boxed{180}", r"\boxed{1,8}",
          r"\boxed{17 or 18}", r"\boxed{17, 18}", r"\boxed{17 = 18}", r"\boxed{18 thousand}",
          r"\boxed{18}, no: \boxed{17}", r"\boxed{\frac{18}{2}}", r"<think>\boxed{18}",
          r"<think>\boxed{18}</think>No idea."],
    None: [r"\boxed{9^{9^{9^{9}}}}"],
}  # fmt: skip


def check_reward(rows: Sequence[Row]) -> None:
    """Before anything is paid: every gold answer scores 1, its neighbour WRONG, the table as
    stated."""
    cases = [(text, "18", expected) for expected, texts in TRICKY.items() for text in texts]
    for row in rows:
        gold = row["answer"]
        cases.append((f"So \\boxed{{{gold}}}.", gold, 1.0))
        cases.append((f"So \\boxed{{{Fraction(gold) + 1}}}.", gold, WRONG))
    for text, gold, expected in cases:
        if reward_of(text, gold) != expected:
            stop(f"{text[-80:]!r} for {gold} scores {reward_of(text, gold)}, not {expected}")


# -- sandbox --------------------------------------------------------------------------------------

MB = 1 << 20
OUTPUT_CHARS = 4096  # the last ones of what the code writes are kept
FILE_MB, DISK_MB, MOST_FILES = 8, 64, 1000  # of one file and of all output; of all files
READY = b"\0ready "  # the launcher's word before the code's first: the limits are set

# A program for `-c`, not a preexec_fn: between fork and exec of a process with threads Python may
# deadlock. All of it happens in the child's own interpreter, before the code is read.
LAUNCHER = r"""
import ctypes, json, os, resource, struct, sys, types

def confine(box):
    # Returns what stays open.
    os.closerange(3, 4096)
    if box["uid"]:
        os.setgroups([]), os.setgid(box["uid"]), os.setuid(box["uid"])
    if os.geteuid() == 0:
        raise PermissionError("code is not run as root")
    for path in (os.__file__, sys.prefix, "."):
        if not os.access(path, os.R_OK):
            raise PermissionError(f"uid {os.getuid()} cannot read {os.path.abspath(path)}: use a "
                "Python outside a private home, or do not run as root")
    for name, most in box["limits"].items():
        hard = resource.getrlimit(getattr(resource, name))[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(getattr(resource, name), (most, most))
        except (OSError, ValueError):
            if name != "RLIMIT_AS" or sys.platform == "linux":  # macOS cannot limit memory
                raise
    if sys.platform != "linux":
        return ["files", "network", "signals"]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS: no sudo, no setuid programs
        raise OSError("no_new_privs refused")
    try:
        seccomp = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        seccomp = None
    opened = [] if landlock(libc, box["read"]) else ["files"]
    if seccomp is None:
        return opened + ["network", "signals"]
    # No other process, no socket, no memory outside the limit, no namespace: EPERM.
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules, deny = ctypes.c_void_p(seccomp.seccomp_init(0x7FFF0000)), 0x00050001
    number = lambda name: seccomp.seccomp_syscall_resolve_name(name.encode())
    for name in DENIED.split():
        if number(name) >= 0:
            seccomp.seccomp_rule_add(rules, deny, number(name), 0)
    for command in (8, 10, 15):  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals by way of a pipe
        equal = struct.pack("=IIQQ", 1, 4, command, 0)
        seccomp.seccomp_rule_add_array(rules, deny, number("fcntl"), 1, equal)
    if seccomp.seccomp_load(rules):
        raise OSError("seccomp refused")
    return opened

def landlock(libc, readable):
    # Read Python's own files, write the box, nothing else; False when the kernel has no Landlock.
    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    every = (1 << 13 + (version > 1) + (version > 2) + (version > 4)) - 1
    size = 8 + 8 * (version > 3) + 8 * (version > 5)  # files, network, signals
    rules = libc.syscall(444, struct.pack("QQQ", every, 3, 3), ctypes.c_size_t(size), 0)
    devices = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"]
    may = [(path, 12) for path in readable] + [(path, 6) for path in devices] + [(".", every & ~1)]
    for path, rights in may:
        if os.path.exists(path):
            fd = os.open(path, os.O_PATH)
            rights &= -1 if os.path.isdir(path) else 7
            if libc.syscall(445, rules, 1, struct.pack("=Qi", rights, fd), 0):
                raise OSError(ctypes.get_errno(), "Landlock rule refused", path)
            os.close(fd)
    if rules < 0 or libc.syscall(446, rules, 0):
        raise OSError(ctypes.get_errno(), "Landlock refused")
    os.close(rules)
    return True

DENIED = "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal pidfd_open "
DENIED += "pidfd_getfd ptrace process_vm_readv process_vm_writev process_madvise kcmp socket "
DENIED += "unshare setns mount bpf perf_event_open add_key request_key keyctl userfaultfd shmget "
DENIED += "semget msgget mq_open memfd_create memfd_secret io_uring_setup prlimit64 setpriority "
DENIED += "sched_setparam sched_setscheduler sched_setattr sched_setaffinity ioprio_set"
try:
    opened = confine(json.loads(sys.argv[1]))
    with open("code.py", "rb") as file:
        source = file.read()
    os.write(1, b"\0ready " + ",".join(opened).encode() + b"\n")
except BaseException as error:
    os.write(1, f"{type(error).__name__}: {error}".encode())
    os._exit(1)
sys.argv = ["code.py"]
main = sys.modules["__main__"] = types.ModuleType("__main__")
main.__file__ = "code.py"
try:
    exec(compile(source, "code.py", "exec", dont_inherit=True), vars(main))
except SystemExit:
    raise
except BaseException as error:  # tb_next: the code's own lines only
    error.__traceback__ = error.__traceback__.tb_next
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(1)
"""


class SandboxError(RuntimeError):
    """The code was not run: the message says why, in one line."""


@dataclass(frozen=True)
class Ran:
    output: str  # of stdout and stderr
    status: Literal["ok", "error", "timeout", "killed"]
    seconds: float
    note: str = ""  # why it was stopped
    left_open: str = ""  # what this machine could not close: of files, network, signals


@lru_cache(maxsize=1)
def hide_memory() -> None:
    """A child with our uid can then not read our memory or environment through /proc."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


@lru_cache(maxsize=1)
def bwrap_fault() -> str:
    """Why bubblewrap cannot be used, or "": found by running code in it, not by its presence."""
    if not shutil.which("bwrap"):
        return "bwrap is not installed"
    try:
        ran = run_boxed("print(6 * 7)", 20, 512, with_bwrap=True)
    except SandboxError as error:
        return f"bwrap does not work here: {error}"
    return "" if ran.output == "42\n" else f"bwrap does not work here: {ran.status}"


def run_code(code: str, seconds: float, memory_mb: int, isolation: str = "auto") -> Ran:
    """Run `code` as a script; blocking, and safe from many threads at once.

    Without bwrap ("limits") the same launcher gives what the kernel does. Raises SandboxError when
    that cannot be had; the code is never run without it.
    """
    if os.name != "posix":
        raise SandboxError("code runs on Linux and macOS only: Windows has no resource limits")
    hide_memory()
    fault = bwrap_fault() if isolation != "limits" else ""
    if fault and isolation == "bwrap":
        raise SandboxError(fault)
    return run_boxed(code, seconds, memory_mb, isolation != "limits" and not fault)


def interpreter(uid: int) -> str:
    """Ours, or the system's where ours is in root's home and the code's uid cannot read it."""

    def is_open(path: str) -> bool:
        above = Path(path).resolve()
        return all(folder.stat().st_mode & 0o5 == 0o5 for folder in [above, *above.parents])

    ours = (sys.executable, sys.prefix, os.__file__)
    if not uid or all(is_open(os.path.dirname(path)) for path in ours):
        return sys.executable
    return "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable


def command_for(box: str, seconds: float, memory_mb: int, uid: int, with_bwrap: bool) -> list[str]:
    """The interpreter with its launcher, in bwrap's namespaces if wanted."""
    home = str(Path(sys.executable).resolve().parents[1])
    etc = ["/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
    read = [sys.prefix, sys.base_prefix, home, "/usr", "/lib", "/lib64", "/lib32", *etc]
    read = [path for path in dict.fromkeys(read) if os.path.exists(path)]
    limits = {"CORE": 0, "NPROC": 0, "NOFILE": 64, "FSIZE": FILE_MB * MB}
    limits |= {"CPU": math.ceil(seconds), "AS": memory_mb * MB}
    box_limits = {"RLIMIT_" + name: most for name, most in limits.items()}
    python = sys.executable if with_bwrap else interpreter(uid)
    command = [python, "-I", "-B", "-u", "-X", "utf8", "-c", LAUNCHER]
    command.append(json.dumps({"uid": uid, "limits": box_limits, "read": read}))
    if with_bwrap:
        # As root no user namespace: the launcher could not change uid in it, and NPROC does not
        # bind the host's root. NPROC is set inside, after bwrap's own forks.
        spaces = "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try"
        front = [shutil.which("bwrap") or "bwrap", *(spaces.split() if uid else ["--unshare-all"])]
        front += ["--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev"]
        above = {str(up) for path in (*read, box) for up in Path(path).parents} - {"/"}
        for path in sorted(above):  # left to itself, bwrap makes them for root's eyes only
            front += ["--dir", path]
        for path in read:
            front += ["--ro-bind", path, path]
        # bwrap's own / and /dev are memory without a limit, hence read-only.
        front += ["--bind", box, box, "--chdir", box, "--remount-ro", "/dev", "--remount-ro", "/"]
        command = [*front, "--", *command]
    return command


RUNS = itertools.count()


def run_boxed(code: str, seconds: float, memory_mb: int, with_bwrap: bool) -> Ran:
    # As root each run has a uid of its own, from a range that is nobody's.
    uid = 61184 + (os.getpid() * 67 + next(RUNS)) % 4336 if os.geteuid() == 0 else 0
    box = os.path.realpath(tempfile.mkdtemp(prefix=f"code-box-{os.getpid()}-"))
    environment = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "HOME": box, "TMPDIR": box}
    for library in ("OMP", "OPENBLAS", "MKL"):
        environment[f"{library}_NUM_THREADS"] = "1"
    try:
        source = Path(box, "code.py")
        source.write_bytes(code.encode("utf-8", "replace"))
        if uid:
            os.chown(source, uid, uid)
            os.chown(box, uid, uid)
        started = time.monotonic()
        with subprocess.Popen(
            command_for(box, seconds, memory_mb, uid, with_bwrap),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=box,
            env=environment,
            start_new_session=True,
        ) as process:
            return watch(process, box, started, seconds, with_bwrap)
    except OSError as error:
        raise SandboxError(f"cannot start the interpreter: {error}") from error
    finally:
        remove(box)


def watch(
    process: subprocess.Popen[bytes], box: str, started: float, seconds: float, with_bwrap: bool
) -> Ran:
    """Drain the output (a file could fill the disk), keep its end, kill what goes too far."""
    assert process.stdout is not None
    pipe, poll = process.stdout.fileno(), select.poll()
    poll.register(pipe, select.POLLIN)
    first, tail, total = b"", bytearray(), 0
    closed, note, stopped, look_at = False, "", 0.0, started + 0.1
    status: Literal["ok", "error", "timeout", "killed"] = "ok"
    try:
        while not closed or process.poll() is None:
            if closed:  # the code closed its output, or is just ending
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)
            elif poll.poll(50):
                chunk = os.read(pipe, 1 << 16)
                closed, total = not chunk, total + len(chunk)
                tail += chunk
                if not first and tail.startswith(READY) and b"\n" in tail:
                    first, _, rest = bytes(tail).partition(b"\n")
                    tail = bytearray(rest)
                del tail[: -(4 * OUTPUT_CHARS + 64)]
            now = time.monotonic()
            if stopped:
                if now > stopped + 2:
                    break
                continue
            if now > started + seconds:
                status, note = "timeout", f"stopped after {seconds:g} s"
            elif total > FILE_MB * MB:
                status, note = "killed", f"more than {FILE_MB} MB of output"
            elif now > look_at:
                look_at, note = now + 0.1, too_much_on_disk(box)
                status = "killed" if note else "ok"
            if note:
                stopped = now
                kill_group(process)
    finally:
        kill_group(process)
    code = process.wait()
    if with_bwrap and 128 < code < 193:  # what bwrap makes of a signal
        code = 128 - code
    if not first and not note:
        text = " ".join(tail[-600:].decode("utf-8", "replace").split())
        raise SandboxError(text or f"the launcher ended with status {code}")
    if code < 0 and not note:
        status = "timeout" if code == -signal.SIGXCPU else "killed"
        note = f"ended by signal {-code}"
    elif code and not note:
        status = "error"
    output = tail.decode("utf-8", "replace")[-OUTPUT_CHARS:]
    left_open = first.removeprefix(READY).decode()
    return Ran(output, status, time.monotonic() - started, note, "" if with_bwrap else left_open)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    # The group is all there is: with NPROC 0 nothing can fork and so leave it, and bwrap's
    # namespace dies with bwrap. Asked before it is reaped, so the number is still ours.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def too_much_on_disk(box: str) -> str:
    """Why the code's files are too much, or ""; looked at ten times a second."""
    size, seen, folders = 0, 0, [box]
    try:
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    info = entry.stat(follow_symlinks=False)
                    size, seen = size + info.st_blocks * 512, seen + 1
                    if size > DISK_MB * MB or seen > MOST_FILES:
                        return f"more than {DISK_MB} MB or {MOST_FILES} files on disk"
                    if stat.S_ISDIR(info.st_mode):
                        folders.append(entry.path)
    except FileNotFoundError:  # it went while we looked
        return ""
    except OSError as error:  # a folder that we cannot read hides its size
        return f"a folder that cannot be measured: {error.strerror}"
    return ""


def remove(box: str) -> None:
    """Delete the folder; rmtree fails on very deep or unreadable ones, so these are lifted up."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.islink(box):  # the code put a link in its place: never follow it
            os.unlink(box)
            return
        os.chmod(box, 0o700)
        numbers = itertools.count()
        while entries := list(os.scandir(box)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in list(os.scandir(entry.path)):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)  # else it cannot be moved
                        os.rename(inner.path, os.path.join(box, f"\x01{next(numbers)}"))
                    else:
                        os.unlink(inner.path)
                os.rmdir(entry.path)
        os.rmdir(box)


# Name, what it must get as far as printing, and the code. {home} is a folder with a key file,
# {victim} a process of ours, {parent} we, {port} a listener: all real and looked at afterwards.
HOSTILE: list[tuple[str, str, str]] = [
    ("ordinary code", "120", "import math\nprint(math.comb(10, 3))"),
    ("own files", "3", "import tempfile\nprint(tempfile.TemporaryFile().write(b'abc'))"),
    ("environment dump", "LC_ALL", "import os\nprint(dict(os.environ))"),
    ("modules of the caller", "ModuleNotFound", "import hostile_check_module"),
    ("fork bomb", "BlockingIOError", "import os\nwhile True: os.fork()"),
    ("thread bomb", "RuntimeError",
     "import threading as t\nwhile True: t.Thread(target=id).start()"),
    ("subprocess", "BlockingIOError", "import subprocess as s\ns.run(['/bin/true'])"),
    ("orphan daemon", "BlockingIOError",
     "import os, time\nif not os.fork():\n os.setsid()\n time.sleep(1); open('{home}/x', 'w')"),
    ("10 GB", "MemoryError", "bytearray(10 << 30)"),
    ("growing list", "MemoryError", "x = []\nwhile True: x.append(bytes(10**6))"),
    ("1 GB in one print", "MemoryError", "print('x' * 10**9)"),
    ("endless output", "spam", "while True: print('spam' * 999)"),
    ("endless errors", "spam", "import sys\nwhile True: print('spam' * 999, file=sys.stderr)"),
    ("sleep", "begun", "import time\nprint('begun')\ntime.sleep(3600)"),
    ("busy loop", "begun", "print('begun')\nwhile True: pass"),
    ("os._exit(0)", "before", "import os\nprint('before')\nos._exit(0)"),
    ("closes its output", "begun",
     "import os\nprint('begun'); os.close(1); os.close(2)\nwhile True: 1"),
    ("ignores signals", "begun",
     "import signal as s\nfor n in (1, 2, 15, 24): s.signal(n, s.SIG_IGN)\n"
     "print('begun')\nwhile True: 1"),
    ("endless at exit", "begun",
     "import atexit, time\natexit.register(time.sleep, 99)\nprint('begun')"),
    ("kills a process", "PermissionError", "import os\nos.kill({victim}, 9)"),
    ("kills its parent", "Error", "import os\nos.kill({parent}, 9)"),
    ("kills everything", "begun", "import os\nprint('begun', flush=True); os.kill(-1, 9)"),
    ("parent's environment", "Error", "print(open('/proc/{parent}/environ').read())"),
    ("parent's memory", "Error", "print(open('/proc/{parent}/mem', 'rb').read(9))"),
    ("ptrace", "-1", "import ctypes\nprint(ctypes.CDLL(None).ptrace(16, {parent}, 0, 0))"),
    ("key file", "Error", "print(open('{home}/key').read())"),
    ("writes outside", "Error", "open('{home}/x', 'w')"),
    ("writes to /tmp", "Error", "open('/tmp/hostile_check', 'w')"),
    ("link to a file", "Error",
     "import os\nos.symlink('{home}/key', 'k'); open('k', 'w').write('x')"),
    ("link for the cleanup", "", "import os\nos.symlink('{home}', 'l')"),
    ("deletes its folder", "",
     "import os\nos.remove('code.py'); os.chdir('/'); os.rmdir(os.environ['HOME'])"),
    ("unreadable folders", "",
     "import os\nos.makedirs('a/b'); os.chmod('a/b', 0); os.chmod('a', 0)"),
    ("deep folders", "", "import os\nfor _ in range(5000): os.mkdir('d'); os.chdir('d')"),
    ("fills the disk", "begun",
     "print('begun')\nfor i in range(99): open(str(i), 'wb').write(b'x' * (7 << 20))"),
    ("huge sparse file", "OSError", "open('s', 'wb').truncate(1 << 40)"),
    ("network", "Error", "import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)"),
    ("higher limits", "Error",
     "import resource as r\nr.setrlimit(r.RLIMIT_NPROC, (9999, 9999))"),
    ("root again", "PermissionError", "import os\nos.setuid(0)"),
    ("segmentation fault", "begun", "import ctypes\nprint('begun'); ctypes.CDLL(None).strlen(1)"),
    ("deep recursion", "", "import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()"),
    ("huge integer", "begun", "print('begun'); 9**9**9"),
    ("slow expression", "begun", "import re\nprint('begun'); re.match('(a+)+$', 'a' * 64 + 'b')"),
    ("no text", "ok", "import os\nos.write(1, b'\\0\\xff\\xfe\\xf0ok')"),
    ("a boxed answer", "Traceback", "print('\\\\boxed{7}')\n1/0"),
]  # fmt: skip


def check_sandbox(isolation: str) -> int:
    """Run every hostile snippet against things that can be harmed, and look whether they were."""
    seconds, failed = 2.0, 0
    try:
        left_open = run_code("", 20, 512, isolation).left_open
    except SandboxError as error:
        stop(f"no code can be run: {error}")
    bwrap = isolation != "limits" and not bwrap_fault()
    print(f"isolation: {'bwrap' if bwrap else 'limits'}; open: {left_open or 'nothing'}")
    secret = os.environ["HOSTILE_CHECK"] = os.urandom(12).hex()
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home.chmod(0o755)
        (home / "key").write_text(secret, encoding="utf-8")
        (home / "key").chmod(0o600)
        (home / "hostile_check_module.py").touch()
        os.environ["PYTHONPATH"] = str(home)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
        victim = stack.enter_context(subprocess.Popen(sleeper))
        stack.callback(victim.kill)
        places = {"home": str(home), "victim": str(victim.pid), "parent": str(os.getpid())}
        places["port"] = str(listener.getsockname()[1])
        for name, shown, code in HOSTILE:
            for place, value in places.items():
                code = code.replace("{" + place + "}", value)
            started, said = time.monotonic(), []
            try:
                ran = run_code(code, seconds, 512, isolation)
            except SandboxError as error:
                ran = Ran("", "killed", 0.0, str(error))
            if time.monotonic() - started > seconds + 2:
                said.append(f"took {time.monotonic() - started:.1f} s")
            if secret in ran.output:
                said.append("read a secret")
            if (home / "key").read_text(encoding="utf-8") != secret or (home / "x").exists():
                said.append("wrote outside")
            if victim.poll() is not None:
                said.append("killed a process")
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                said.append("reached a listener")
            if list(Path(tempfile.gettempdir()).glob(f"code-box-{os.getpid()}-*")):
                said.append("its folder is left")
            if shown not in ran.output:
                said.append(f"expected {shown!r}, got {ran.output[-100:]!r} {ran.note}")
            failed += bool(said)
            detail = "; ".join(said) or f"{ran.status} in {ran.seconds:.2f} s {ran.note}".strip()
            print(f"{'FAILED' if said else 'ok':<7} {name}: {detail}", flush=True)
    print(f"{failed} of {len(HOSTILE)} failed")
    return int(failed > 0)


@dataclass(frozen=True)
class Item:
    prompt: list[int]
    gold: str


@dataclass(frozen=True)
class Turn:
    """One request: the ids the model was given, and what it wrote."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Trajectory:
    turns: list[Turn] = field(default_factory=list)
    runs: list[Ran] = field(default_factory=list)
    calls: int = 0
    malformed_calls: int = 0
    end: str = ""
    """answer; malformed, limit (calls), truncated, full (tokens): no answer; environment,
    foreign_id: not the policy's doing."""
    reward: float | None = None  # None is neither trained on nor part of a mean


# Ends that say nothing about the policy.
NOT_ITS_DOING = {"environment", "foreign_id"}


def encode_prompts(tokenizer: Any, rows: Sequence[Row], limit: int) -> list[Item]:
    """Rows through the model's own chat template, thinking off, without those over the limit."""
    items, longest = [], 0
    for row in rows:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": row["question"]},
        ]
        text = tokenizer.apply_chat_template(
            messages,
            tools=[TOOL],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        prompt = tokenizer.encode(text, add_special_tokens=False)
        longest = max(longest, len(prompt))
        if len(prompt) <= limit:
            items.append(Item(prompt, row["answer"]))
    if len(items) < len(rows):
        dropped = f"{len(rows) - len(items)} of {len(rows)} prompts"
        line = f"{dropped} are longer than --max-prompt-tokens {limit}, the longest {longest}"
        if not items:
            stop(line)
        print(f"left out: {line}")
    return items


def parse_turn(text: str) -> tuple[Literal["call", "answer", "malformed"], str]:
    """What a turn is: one well-formed call of TOOL at its end and the argument, or an answer.

    Templates write calls as XML (Qwen3.5) or JSON (Qwen3); a model writes what its template shows.
    """
    name, (parameter,) = TOOL["function"]["name"], TOOL["function"]["parameters"]["properties"]
    text = text.rpartition("</think>")[2].strip()
    if not re.search(r"</?tool_call|<function=", text):
        return "answer", text
    before, _, rest = text.partition("<tool_call>")
    body, closed, after = rest.rpartition("</tool_call>")
    whole = closed and not after and not re.search(r"</tool_call|<function=|<think>", before)
    body = body.strip() if whole else ""
    xml = rf"<function={name}>\s*<parameter={parameter}>(.*)</parameter>\s*</function>"
    argument: Any = None
    if found := re.fullmatch(xml, body, re.DOTALL):
        argument = found[1]
    else:
        try:
            call = json.loads(body)
            argument = call["arguments"][parameter] if call["name"] == name else None
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
    if not isinstance(argument, str) or not argument.strip():
        return "malformed", text
    if re.search(r"<tool_call>|<function=|<parameter=", argument):  # another call
        return "malformed", text
    return "call", argument.strip("\n")


def without_marks(tokenizer: Any, text: str) -> str:
    """A tool's text in which nothing can be taken for one of the template's marks."""
    for mark in sorted(tokenizer.get_added_vocab(), key=len, reverse=True):
        text = text.replace(mark, f"{mark[0]} {mark[1:]}")
    return text


def after_turn(tokenizer: Any, observation: str) -> list[int]:
    """What the template writes behind an assistant's turn when the tool has answered: the turn's
    end, the answer, the header of the next turn with its empty think block.

    Rendered with a placeholder as the turn: a template may trim real text, or drop its thinking.
    """
    messages = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": PLACEHOLDER},
        {"role": "tool", "content": observation},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    _, found, after = text.partition(PLACEHOLDER)
    if not found:
        stop("this model's chat template does not write an assistant's text before a tool's answer")
    return tokenizer.encode(after, add_special_tokens=False)


def next_prompt(turn: Turn, after: list[int]) -> list[int]:
    """All ids so far and what follows, less the part of it that the model has written itself: a
    turn that stopped by itself ends with the end token, one that was cut does not.

    Sampled ids are never decoded and encoded again: they would be other ids.
    """
    ends = range(min(len(turn.tokens), len(after)), 0, -1)
    written = next((n for n in ends if turn.tokens[-n:] == after[:n]), 0)
    return turn.prompt + turn.tokens + after[written:]


def joined_turns(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Turns in which each prompt begins with all ids before it share a datum; a turn whose prompt
    does not (history rendered again, or cut) begins another."""
    runs: list[list[Turn]] = []
    so_far: list[int] = []
    for turn in turns:
        if runs and turn.prompt[: len(so_far)] == so_far:
            runs[-1].append(turn)
        else:
            runs.append([turn])
        so_far = turn.prompt + turn.tokens
    return runs


def build_datum(turns: Sequence[Turn], advantage: float) -> trio.Datum:
    """Position t of the input predicts token t + 1: all lists lose their first, the input its last.

    Only what was sampled has log-probabilities and an advantage; prompts, tool answers and the
    template's own tokens have 0 and so no gradient.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    for turn in turns:
        given = len(turn.prompt) - len(tokens)
        assert turn.prompt[: len(tokens)] == tokens, "a prompt does not continue the turns before"
        tokens += turn.prompt[len(tokens) :] + turn.tokens
        logprobs += [0.0] * given + turn.logprobs
        advantages += [0.0] * given + [advantage] * len(turn.tokens)
    lengths = [len(tokens), len(logprobs), len(advantages)]
    assert len(set(lengths)) == 1, f"tokens, logprobs, advantages: {lengths}"
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": logprobs[1:],
            "advantages": advantages[1:],
        },
    )


def shown(tokenizer: Any, ran: Ran, limit: int) -> str:
    """What the model reads of a run: the end of the output, and why it was stopped."""
    text = without_marks(tokenizer, ran.output.strip("\n"))
    ids = tokenizer.encode(text, add_special_tokens=False)
    text = tokenizer.decode(ids[-limit:]) if len(ids) > limit else text
    return f"{text}\n[{ran.note}]".lstrip("\n") if ran.note else text


@dataclass(frozen=True)
class Rollout:
    """What every trajectory of a round shares."""

    sampler: trio.SamplingClient
    tokenizer: Any
    workers: ThreadPoolExecutor
    config: Config
    temperature: float

    async def request(self, prompt: list[int], count: int) -> list[Any]:
        """`count` turns after the prompt, none longer than the trajectory has room for."""
        room = self.config.max_trajectory_tokens - len(prompt)
        # Only at temperature 1, without top-p and top-k, are the log-probabilities that come back
        # those of the distribution that was sampled from.
        params = trio.SamplingParams(
            max_tokens=min(self.config.max_tokens, room),
            temperature=self.temperature,
            top_p=1.0,
            top_k=-1,
            stop=STOP,
        )
        response = await self.sampler.sample_async(trio.ModelInput.from_ints(prompt), count, params)
        return response.sequences

    async def react(self, trajectory: Trajectory, sequence: Any) -> tuple[str, str]:
        """How the trajectory ends with its final text, or "" and what the tool answers."""
        if not sequence.tokens or max(sequence.tokens) >= len(self.tokenizer):
            return "foreign_id", ""  # the model's vocabulary is padded: these cannot be trained
        if sequence.stop_reason == "length":
            return "truncated", ""
        text = self.tokenizer.decode(sequence.tokens)
        kind, content = parse_turn(text.removesuffix(STOP[0]))
        if kind == "answer":
            return "answer", content
        trajectory.calls += 1
        if kind == "malformed":
            trajectory.malformed_calls += 1
            return "malformed", ""
        if len(trajectory.runs) >= self.config.max_calls:
            return "limit", ""
        config, loop = self.config, asyncio.get_running_loop()
        arguments = content, config.code_seconds, config.code_memory_mb, config.isolation
        try:
            ran = await loop.run_in_executor(self.workers, run_code, *arguments)
        except SandboxError as error:
            print(f"sandbox: {error}")
            return "environment", ""
        trajectory.runs.append(ran)
        return "", shown(self.tokenizer, ran, config.max_result_tokens)

    async def play(self, item: Item, first: Any) -> Trajectory:
        """A trajectory from its first turn on: a turn waits for nothing but the one before."""
        trajectory, prompt, sequence = Trajectory(), item.prompt, first
        while True:
            tokens, logprobs = sequence.tokens, sequence.logprobs
            assert len(tokens) == len(logprobs), f"{len(tokens)} tokens, {len(logprobs)} logprobs"
            trajectory.turns.append(Turn(prompt, tokens, logprobs))
            trajectory.end, text = await self.react(trajectory, sequence)
            if not trajectory.end:
                prompt = next_prompt(trajectory.turns[-1], after_turn(self.tokenizer, text))
                if len(prompt) >= self.config.max_trajectory_tokens:
                    trajectory.end = "full"
            if trajectory.end:
                break
            (sequence,) = await self.request(prompt, 1)
        if trajectory.end == "answer":
            trajectory.reward = reward_of(text, item.gold)
        elif trajectory.end not in NOT_ITS_DOING:
            trajectory.reward = WRONG
        return trajectory

    async def group(self, item: Item, count: int) -> list[Trajectory]:
        """The first turns come from one request, so that their prompt is computed once."""
        firsts = await self.request(item.prompt, count)
        return await asyncio.gather(*[self.play(item, first) for first in firsts])

    async def groups(self, items: Sequence[Item], count: int) -> list[list[Trajectory]]:
        return await asyncio.gather(*[self.group(item, count) for item in items])


def group_advantages(rewards: Sequence[float | None]) -> list[float]:
    """Reward minus the mean of those that count; all 0 for a group that teaches nothing."""
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < 2 or max(scored) - min(scored) < 1e-6:
        return [0.0] * len(rewards)
    mean = fmean(scored)
    return [0.0 if reward is None else reward - mean for reward in rewards]


def build_batch(
    groups: Sequence[Sequence[Trajectory]], group_size: int
) -> tuple[list[trio.Datum], dict[str, float]]:
    """Datums of the groups that differ within, and what the rollouts were like."""
    data, degenerate, trained = [], 0, 0
    for group in groups:
        advantages = group_advantages([trajectory.reward for trajectory in group])
        if len(group) < group_size:  # came back short: its mean is not the group's
            advantages = [0.0] * len(group)
        degenerate += not any(advantages)
        for trajectory, advantage in zip(group, advantages, strict=True):
            if advantage:
                trained += 1
                data += [build_datum(run, advantage) for run in joined_turns(trajectory.turns)]
    return data, {
        "frac_degenerate": degenerate / len(groups),
        "datums": len(data),
        "train/datums_per_trajectory": len(data) / max(1, trained),
        "tokens/train": sum(datum.model_input.length for datum in data),
        **describe([trajectory for group in groups for trajectory in group]),
    }


def describe(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What a set of trajectories was like; training and evaluation report the same."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    scored = [t for t in trajectories if t.reward is not None]
    runs = [ran for trajectory in trajectories for ran in trajectory.runs]
    calls = sum(t.calls for t in trajectories)
    count, ends = len(trajectories), Counter(t.end for t in trajectories)
    return {
        "reward/mean": mean_of([t.reward for t in scored if t.reward is not None]),
        "reward/correct": mean_of([t.reward == 1 for t in scored]),
        "reward/format": mean_of([t.end == "answer" for t in scored]),
        "reward/scored": len(scored),
        "rollout/turns": len(turns) / count,
        "rollout/code_calls": len(runs) / count,
        "rollout/valid_tool_call_rate": (
            1 - sum(t.malformed_calls for t in trajectories) / calls if calls else math.nan
        ),
        "rollout/trajectory_tokens": fmean(
            len(t.turns[-1].prompt) + len(t.turns[-1].tokens) for t in trajectories
        ),
        "sandbox/success_rate": mean_of([ran.status == "ok" for ran in runs]),
        "sandbox/error_rate": mean_of([ran.status in ("error", "killed") for ran in runs]),
        "sandbox/timeout_rate": mean_of([ran.status == "timeout" for ran in runs]),
        "sandbox/latency": mean_of([ran.seconds for ran in runs]),
        "tokens/prefill": sum(len(turn.prompt) for turn in turns),
        "tokens/sample": sum(len(turn.tokens) for turn in turns),
        **{f"rollout/end_{end}": number / count for end, number in ends.items()},
    }


def mean_of(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def evaluate(rollout: Rollout, items: Sequence[Item]) -> dict[str, float]:
    """Accuracy on held-out questions; base and trained weights go through this."""
    trajectories = [group[0] for group in asyncio.run(rollout.groups(items, 1))]
    about = describe(trajectories)
    return {
        "accuracy": about["reward/correct"],
        "format": about["reward/format"],
        "items": about["reward/scored"],
        "unscored": len(items) - about["reward/scored"],
        "turns": about["rollout/turns"],
        "code_calls": about["rollout/code_calls"],
        "code_errors": about["sandbox/error_rate"],
    }


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing, whenever the process is killed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    os.replace(temporary, path)


def save_run_state(config: Config, state: dict[str, Any]) -> None:
    write_whole(config.run_dir / "run_state.json", json.dumps(state, indent=2) + "\n")


def open_run(config: Config, rows: list[Row]) -> dict[str, Any]:
    """The state to start from: a new run's, or that of the last checkpoint of the run in the
    folder. Raises SystemExit when that one had other settings."""
    path = config.run_dir / "run_state.json"
    settings = {k: v for k, v in asdict(config).items() if k not in FREE_TO_CHANGE}
    settings["rows"] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]
    config.run_dir.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"step": 0, "checkpoint": None, "weights": None, "eval": {}}
    if path.exists() and not config.fresh:
        state = json.loads(path.read_text(encoding="utf-8"))
        old = state["config"]
        changes = [f"{k} was {old.get(k)}, is {v}" for k, v in settings.items() if old.get(k) != v]
        if changes and not state["checkpoint"]:  # nothing trained is lost
            state = {"step": 0, "checkpoint": None, "weights": None, "eval": {}}
        elif changes:
            line = f"{config.run_dir} holds another run ({'; '.join(changes)})"
            stop(f"{line}; choose another --run-dir, or --fresh to discard that run")
    state["config"] = settings
    save_run_state(config, state)
    return state


def swanlab_call(function: str, /, **arguments: Any) -> None:
    """`swanlab.FUNCTION(...)`: a chart that fails is reported, and never stops a paid run."""
    try:
        getattr(importlib.import_module("swanlab"), function)(**arguments)
    except Exception as error:
        print(f"SwanLab {function} failed, metrics.jsonl goes on: {error}")


def open_log(config: Config, last_step: int) -> None:
    """Start SwanLab, and drop the metrics of steps after the checkpoint: they are done again."""
    mode: str = config.swanlab
    if mode == "auto":
        mode = "online" if os.environ.get("SWANLAB_API_KEY") else "offline"
    # swanlab itself stops at a plain value in this variable.
    project = os.environ.pop("SWANLAB_PROJECT", f"pytrio-{NAME}")
    details = asdict(config) | {"sdk": version("pytrio"), "skill": SKILL}
    details = json.loads(json.dumps(details, default=str))
    swanlab_call("init", project=project, name=config.run_dir.name, mode=mode, config=details,
                 log_dir=str(config.run_dir / "swanlab"))  # fmt: skip
    path = config.run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    # A line that was being written when the run was killed has no closing brace.
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    rows = [row for row in rows if row["step"] <= last_step]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        chart(row)


def chart(row: dict[str, Any]) -> None:
    values = {key: float(value) for key, value in row.items() if value is not None}
    swanlab_call("log", data=values, step=row["step"])


def log(config: Config, row: dict[str, Any]) -> None:
    """metrics.jsonl is the record, SwanLab a copy."""
    with (config.run_dir / "metrics.jsonl").open("a", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(row) + "\n")
    chart(row)


def train(
    service: trio.ServiceClient,
    tokenizer: Any,
    workers: ThreadPoolExecutor,
    items: list[Item],
    config: Config,
    state: dict[str, Any],
) -> None:
    """From the state's step to the last; afterwards the state names durable sampler weights."""
    if state["checkpoint"]:
        print(f"resuming after step {state['step']} from {state['checkpoint']}")
        training = service.create_training_client_from_state_with_optimizer(state["checkpoint"])
    else:
        training = service.create_lora_training_client(
            config.base_model, rank=config.rank, seed=config.seed
        )
    adam = trio.AdamParams(learning_rate=config.learning_rate)
    first = state["step"]
    bar = tqdm(range(first + 1, config.steps + 1), initial=first, total=config.steps, disable=None)
    for step in bar:
        start = time.monotonic()
        epoch, batch = batch_of_step(items, step - 1, config.prompts_per_step, config.seed)
        # A sampling client keeps the weights it was made with: each step needs a new one.
        sampler = training.save_weights_and_get_sampling_client()
        rollout = Rollout(sampler, tokenizer, workers, config, temperature=1.0)
        groups = asyncio.run(rollout.groups(batch, config.group_size))
        data, metrics = build_batch(groups, config.group_size)
        if data:
            # One call for the whole batch, and both submitted before either is waited for.
            backward = training.forward_backward(data, loss_fn="ppo", loss_fn_config=LOSS_CONFIG)
            update = training.optim_step(adam)
            metrics["loss"] = backward.result().metrics["loss_mean"]
            update.result()
        metrics |= {"epoch": epoch, "learning_rate": config.learning_rate}
        metrics["time/step_seconds"] = time.monotonic() - start
        row = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        log(config, {"step": step, **row})
        bar.write(
            f"step {step:3d}/{config.steps}  correct {metrics['reward/correct']:.3f}"
            f"  format {metrics['reward/format']:.3f}"
            f"  degenerate {metrics['frac_degenerate']:.2f}  datums {len(data)}"
            f"  turns {metrics['rollout/turns']:.1f}"
            f"  valid calls {metrics['rollout/valid_tool_call_rate']:.2f}"
            f"  code errors {metrics['sandbox/error_rate']:.2f}"
            f" timeouts {metrics['sandbox/timeout_rate']:.2f}"
        )
        if step % config.save_every == 0 or step == config.steps:
            # The state file is written last: it never names a step that is not saved.
            path = training.save_state(f"step-{step}", overwrite=True).result().path
            state |= {"step": step, "checkpoint": path, "weights": None}
            state |= {"epoch": epoch, "cursor": step * config.prompts_per_step}
            state["eval"].pop("trained", None)
            save_run_state(config, state)
    # The loop's sampler weights expire after hours; these do not.
    saved = training.save_weights_for_sampler(f"{NAME}-step-{state['step']}")
    state["weights"] = saved.result().path
    save_run_state(config, state)


def open_sandbox(config: Config) -> None:
    """Before anything is paid: code can be run here, and what it could reach is said."""
    try:
        left_open = run_code("", 60, config.code_memory_mb, config.isolation).left_open
    except SandboxError as error:
        stop(f"no code can be run: {error}")
    if left_open:
        print(f"sandbox: model-written code can reach {left_open} of this user; install bubblewrap")


def main(config: Config) -> None:
    check_config(config)
    if config.check_sandbox:
        raise SystemExit(check_sandbox(config.isolation))
    train_rows, held_out_rows = load_rows(config)
    rows = train_rows + held_out_rows
    check_reward(rows)
    if config.check_reward:
        print(f"the reward scores {len(rows)} gold answers and the tricky ones as it must")
        return
    open_sandbox(config)
    state = open_run(config, rows)
    results = state["eval"]
    # Behind its first turn every trajectory asks for itself; the SDK's default is 16 at once.
    trio.configure(sampling_request_max_in_flight=64)
    service = trio.ServiceClient()
    open_log(config, state["step"])
    try:
        base = service.create_sampling_client(config.base_model)
        tokenizer = base.get_tokenizer()
        items = encode_prompts(tokenizer, train_rows, config.max_prompt_tokens)
        held_out = encode_prompts(tokenizer, held_out_rows, config.max_prompt_tokens)
        with ThreadPoolExecutor(config.sandbox_workers) as workers:
            if config.eval_base and "base" not in results:
                rollout = Rollout(base, tokenizer, workers, config, config.eval_temperature)
                results["base"] = evaluate(rollout, held_out)
                save_run_state(config, state)
            if state["step"] < config.steps or not state["weights"]:
                train(service, tokenizer, workers, items, config, state)
            if "trained" not in results:
                tuned = service.create_sampling_client(
                    config.base_model, model_path=state["weights"]
                )
                rollout = Rollout(tuned, tokenizer, workers, config, config.eval_temperature)
                results["trained"] = evaluate(rollout, held_out)
                save_run_state(config, state)
    finally:
        swanlab_call("finish")
    for name, result in results.items():
        numbers = "  ".join(f"{key} {value:.3g}" for key, value in result.items())
        print(f"{name:<8} held out: {numbers}")
    print(f"weights  {state['weights']}")


if __name__ == "__main__":
    arguments = tyro.cli(Config)
    if arguments.data == "sample":
        arguments = tyro.cli(Config, default=replace(arguments, **SAMPLE))
    main(arguments)
