#!/usr/bin/env python3
"""Run a PyTRIO script against a local backend: free, offline, on the CPU.

    python dryrun.py check FILE...          look for mistakes in the text, without running it
    python dryrun.py run SCRIPT [-- ARGS]   run the script on a local backend, then audit it
    python dryrun.py audit RECORDING        audit an earlier run again
    python dryrun.py show RECORDING         what it sampled and trained, as text
    python dryrun.py rules [CODE]           what audit and check look for
    python dryrun.py serve                  keep a backend running for several scripts
    python dryrun.py probe                  find out what is documented nowhere, for a few cents
    python dryrun.py models                 which local model answers for which name
    python dryrun.py doctor                 is this Python fit for a dry run

The script and the SDK are not changed. Data goes to standard output, diagnostics to standard
error. Exit codes: 0 clean (warnings allowed), 1 the script failed or never used the backend, 2 the
audit or the check found errors, 3 usage, 130 Ctrl-C.
"""

import argparse
import errno
import io
import json
import os
import platform
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, TextIO

# The skill's folder may be read-only; a bytecode cache would be a write.
sys.dont_write_bytecode = True
SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))

# Torch's threads spin: on a machine with a busy second core, one thread is the fastest choice.
DEFAULT_THREADS = 1
os.environ.setdefault("OMP_NUM_THREADS", str(DEFAULT_THREADS))

EXIT_OK, EXIT_SCRIPT_FAILED, EXIT_FINDINGS, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
CLOUD_CONTACT_STATUS = 96  # of guard/sitecustomize.py
# Long enough to convert a model on first use.
BACKEND_START_SECONDS = 300
BACKEND_STOP_SECONDS = 20
SCRIPT_STOP_SECONDS = 10
WATCH_SECONDS = 0.5  # how soon a dead backend is noticed
NEEDED_PACKAGES = ("torch", "transformers", "peft", "safetensors", "starlette", "uvicorn")
# The names in losses.REDUCTIONS, repeated here because that module imports torch.
REDUCTIONS = ("default", "sum", "samples", "active_tokens", "advantage_tokens")
# Enough to be seen in a short loop, too little to change what it learns.
RUN_RESPELL_SHARE = 0.03
# All questions of a probe, each asked twice, need less.
PROBE_MAX_TOKENS = 60_000
SHOWN_PACKAGES = ("pytrio", *NEEDED_PACKAGES, "swanlab")
# Accepted rules with their reasons, and an `audit.report.Budget`.
AuditSettings = tuple[dict[str, str], Any]


def say(line: str) -> None:
    """One line of diagnostics."""
    print(f"dryrun: {line}", file=sys.stderr, flush=True)


def stop(line: str, code: int = EXIT_USAGE) -> NoReturn:
    """End with one line that says what was wrong and what to do."""
    say(line)
    raise SystemExit(code)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def skill_version() -> str:
    """`metadata.version` of SKILL.md."""
    try:
        text = (SCRIPTS.parent / "SKILL.md").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    match = re.search(r'^\s+version:\s*"?([^"\n]+)"?\s*$', text, re.MULTILINE)
    return match[1] if match else "unknown"


def installation_problem() -> str | None:
    """Why no dry run is possible in this Python, in one line; None when it is."""
    requirements = SCRIPTS / "requirements.txt"
    missing = [name for name in NEEDED_PACKAGES if installed(name) is None]
    if missing:
        return (
            f"missing {', '.join(missing)}; run: {sys.executable} -m pip install -r {requirements}"
        )
    try:
        from trio_local.protocol import installed_sdk_version, unsupported_sdk_reason
    except ImportError as error:
        return f"cannot import {error.name}; run: {sys.executable} -m pip install -r {requirements}"
    return unsupported_sdk_reason(installed_sdk_version())


# -- the backend process ---------------------------------------------------------------------------


class Backend:
    """A backend in its own process; used as a context manager it never outlives the block."""

    def __init__(self, options: argparse.Namespace, record: Path, key: str) -> None:
        self.log_path = record / "backend.log"
        command = [sys.executable, str(Path(__file__).resolve()), "serve", "--follow-parent"]
        command += backend_arguments(options)
        command += ["--record", str(record)]
        environment = {**os.environ, "TRIO_DRYRUN_KEY": key}
        # Its own session, so that Ctrl-C in the terminal reaches the script and not the backend.
        new_group: dict[str, Any] = (
            {"start_new_session": True}
            if os.name == "posix"
            else {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined]
        )
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                **new_group,
            )
        try:
            self.url = self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> str:
        assert self.process.stdout is not None
        timer = threading.Timer(BACKEND_START_SECONDS, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            self.process.wait()
            log = self.log_path.read_text(encoding="utf-8", errors="replace").strip()
            status = self.process.returncode
            reason = log.splitlines()[-1] if log else f"the backend ended with status {status}"
            code = EXIT_USAGE if status == EXIT_USAGE else EXIT_SCRIPT_FAILED
            stop(reason.removeprefix("dryrun: "), code)
        return json.loads(line)["url"]

    def tell(self, line: str) -> None:
        """Write a line to the backend's parent pipe; a backend that has died is no error here."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError:
            pass

    def close(self) -> None:
        """Let the backend finish its files and end; kill it if it does not."""
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except OSError:
                pass
        try:
            self.process.wait(BACKEND_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> "Backend":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def backend_arguments(options: argparse.Namespace) -> list[str]:
    """The options that `run` hands on to `serve`."""
    arguments = [
        "--port", str(options.port), "--store", str(options.store), "--seed", str(options.seed),
        "--reduction", options.reduction, "--device", options.device,
        "--threads", str(options.threads), "--max-batch-size", str(options.max_batch_size),
        "--max-tokens", str(options.max_tokens), "--respell", str(options.respell),
    ]  # fmt: skip
    for model in options.model:
        arguments += ["--model", model]
    if options.demo:
        arguments += ["--demo", str(options.demo)]
    if options.fault:
        arguments += ["--fault", options.fault]
    if options.like:
        arguments += ["--like", str(options.like)]
    return arguments


# -- commands --------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Run one script on a backend of its own."""
    script = Path(options.script)
    if not script.is_file():
        stop(f"no script at {script}; give the path of a Python file")
    problem = installation_problem()
    if problem:
        stop(problem)
    from trio_local.preflight import code_that_leaves, script_environment

    backend_settings(options)
    settings = audit_settings(options)
    key = f"dryrun-{secrets.token_hex(16)}"
    try:
        # As Python does, take a file with a byte order mark.
        source = script.read_text(encoding="utf-8-sig")
        findings = code_that_leaves(source, str(script), f"http://127.0.0.1:{options.port}", key)
    except UnicodeDecodeError:
        stop(f"{script} is not a UTF-8 text file")
    except OSError as error:
        stop(f"cannot read {script}: {error.strerror}")
    except (SyntaxError, ValueError) as error:
        stop(f"{script} does not parse: {error}")
    if findings:
        stop(f"{script}:{findings[0].line}: {findings[0].message}")
    record = options.record or new_record_folder()
    # SIGTERM ends us as Ctrl-C does: the script is stopped, then the backend.
    signal.signal(signal.SIGTERM, interrupt)
    open_record(record)
    with Backend(options, record, key) as backend:
        environment = script_environment(backend.url, key, record / "sdk-home", Path.home())
        command = [sys.executable, str(script), *options.arguments]
        status = run_script(command, environment, backend)
    return report(settings, record, script, status)


def run_script(command: list[str], environment: dict[str, str], backend: Backend) -> int:
    """Run the script with our own standard streams; returns its exit status, 130 on Ctrl-C."""
    process = subprocess.Popen(command, env=environment)
    backend.tell(f"watch {process.pid}")
    try:
        while not has_ended(process, WATCH_SECONDS):
            if backend.process.poll() is not None:
                # The SDK would repeat its requests for a quarter of an hour.
                end(process, signal.SIGTERM)
                return EXIT_SCRIPT_FAILED
        return process.returncode
    except KeyboardInterrupt:
        # A terminal's Ctrl-C has reached the script as well; a signal to us alone has not.
        if not has_ended(process, 0.5):
            end(process, signal.SIGINT if os.name == "posix" else signal.SIGTERM)
        return EXIT_INTERRUPTED
    finally:
        if process.poll() is None:  # a second Ctrl-C
            process.kill()
            process.wait()
        backend.tell("unwatch")


def has_ended(process: subprocess.Popen, seconds: float) -> bool:
    """Wait for a process at most this long."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def end(process: subprocess.Popen, number: int) -> None:
    """Send a signal, and kill what does not listen to it."""
    process.send_signal(number)
    if not has_ended(process, SCRIPT_STOP_SECONDS):
        process.kill()
        process.wait()


def interrupt(*_: object) -> NoReturn:
    """As a signal handler: what Ctrl-C does."""
    raise KeyboardInterrupt


def report(settings: AuditSettings, record: Path, script: Path, status: int) -> int:
    """Print the audit of a finished run and turn its verdict and the script's status into ours."""
    try:
        summary = json.loads((record / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        say(f"the backend died; its log: {record / 'backend.log'}")
        return EXIT_SCRIPT_FAILED
    has_errors = False
    if summary["sessions"]:
        has_errors = audit_recording(settings, record, sys.stderr)
    if summary["training_runs"] and not summary["optimizer_steps"]:
        say("no optimiser step was taken: nothing was trained")
    for note in summary["notes"]:
        say(note)
    say(f"{summary['seconds']:.1f} s; recording and audit.json: {record}")
    if status == EXIT_INTERRUPTED:
        say("interrupted")
        return EXIT_INTERRUPTED
    if status == CLOUD_CONTACT_STATUS:
        return EXIT_SCRIPT_FAILED
    if status != 0:
        say(f"{script} failed with exit status {status}")
        return EXIT_SCRIPT_FAILED
    if summary["sessions"] == 0:
        say(f"{script} opened no session on the backend: nothing was proven, so this is no success")
        return EXIT_SCRIPT_FAILED
    return EXIT_FINDINGS if has_errors else EXIT_OK


def audit_settings(options: argparse.Namespace) -> AuditSettings:
    """Accepted rules and the budget of the command line; ends in one line on a mistake."""
    from audit.cli import parse_accepted, parse_prices
    from audit.report import Budget

    try:
        accepted = parse_accepted(options.accept)
    except ValueError as error:
        stop(f"--accept {error}")
    try:
        prices = None if options.price is None else parse_prices(options.price)
    except ValueError as error:
        stop(f"--price {error}")
    return accepted, Budget(options.steps, prices)


def audit_recording(
    settings: AuditSettings, path: Path, out: TextIO, sessions: Sequence[int] = ()
) -> bool:
    """Audit a recording, print the table, write audit.json beside it; True when it has errors."""
    from audit.cli import audit
    from audit.report import write_json
    from audit.trace import TraceError

    accepted, budget = settings
    try:
        text, result = audit(path, accepted, budget, sessions)
    except TraceError as error:
        stop(str(error))
    unused = [
        name
        for name in accepted
        if not any(name in (f["name"], f["code"]) for f in result["findings"])
    ]
    if unused:
        say(f"--accept {', '.join(unused)}: nothing of the kind was found")
    print(text, file=out, flush=True)
    target = (path if path.is_dir() else path.parent) / "audit.json"
    try:
        write_json(target, result)
    except OSError as error:
        say(f"cannot write {target}: {error.strerror}")
    return result["verdict"] == "errors"


def audit_again(options: argparse.Namespace) -> int:
    """Audit the recording of an earlier run."""
    need_recording(options.recording)
    settings = audit_settings(options)
    has_errors = audit_recording(settings, options.recording, sys.stdout, options.session)
    return EXIT_FINDINGS if has_errors else EXIT_OK


def show_recording(options: argparse.Namespace) -> int:
    """Print completions and training data of an earlier run."""
    need_recording(options.recording)
    from audit.show import show
    from audit.trace import TraceError

    try:
        for line in show(options.recording, options.limit, options.whole, options.session):
            print(line)
    except TraceError as error:
        stop(str(error))
    return EXIT_OK


def need_recording(path: Path) -> None:
    """Ends in one line when a recording cannot be read here."""
    missing = [name for name in ("numpy", "msgpack", "tokenizers") if installed(name) is None]
    if missing:
        stop(f"missing {', '.join(missing)}; see: {sys.argv[0]} doctor")
    if not path.exists():
        stop(f"no recording at {path}; give the folder that `run` named")


def check(options: argparse.Namespace) -> int:
    """Static rules over source files, which are not imported."""
    problem = installation_problem()
    if problem:
        stop(problem)
    from lint.cli import check_files

    return check_files(options.files, options.json)


def rules(options: argparse.Namespace) -> int:
    """Print the rules of the audit and of the static check."""
    problem = installation_problem()
    if problem:
        stop(problem)
    from audit.rules import RULES as AUDIT_RULES
    from lint.rules import RULES as LINT_RULES

    lines = [
        f"{rule.name:<26} {rule.severity:<8} {rule.condition}. {rule.fix}"
        for rule in AUDIT_RULES.values()
    ]
    lines += [f"{rule.code:<26} {rule.severity:<8} {rule.meaning}" for rule in LINT_RULES]
    chosen = [line for line in lines if line.lower().startswith(options.code.lower())]
    if not chosen:
        stop(f"no rule {options.code!r}; rules are named such as A05 or C07")
    print("\n".join(chosen))
    return EXIT_OK


def new_record_folder() -> Path:
    """A folder of its own for every run, named by time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path(".trio-local") / "runs" / f"{stamp}-{os.getpid()}"


def open_record(record: Path) -> None:
    """Make the folder of a recording; ends in one line when nothing can be written there."""
    try:
        record.mkdir(parents=True, exist_ok=True)
        (record / "backend.log").write_bytes(b"")
    except OSError as error:
        stop(f"--record {record}: cannot write there: {error.strerror}")


def backend_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Faults, models, demonstrations and behaviour of the command line, and its request limits;
    ends in one line on a mistake."""
    from trio_local.behaviour import Behaviour, read_like
    from trio_local.demos import Demos, read_demos
    from trio_local.faults import parse_faults

    for name in ("store", "record"):
        folder = getattr(options, name)
        for path in [folder, *folder.parents] if folder else []:
            if path.exists() and not path.is_dir():
                stop(f"--{name} {folder}: {path} is a file; give a folder")
    try:
        demos = read_demos(options.demo) if options.demo else Demos()
    except ValueError as error:
        stop(f"--demo: {error}")
    try:
        faults = parse_faults(options.fault or "")
    except ValueError as error:
        stop(f"--fault: {error}")
    try:
        behaviour, limits = read_like(options.like) if options.like else (Behaviour(), {})
    except ValueError as error:
        stop(f"--like: {error}")
    if behaviour.reduction and options.reduction != "default":
        stop(f"--like {options.like} says what losses are divided by; leave --reduction out")
    return {
        "faults": faults,
        "models": dict(map(model_override, options.model)),
        "demos": demos,
        "behaviour": behaviour,
        "max_batch_size": limits.get("max_batch_size", options.max_batch_size) or None,
        "max_tokens_per_request": limits.get("max_tokens_per_request", options.max_tokens) or None,
    }


def serve(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C, or, for `run`, until the parent ends."""
    problem = installation_problem()
    if problem:
        stop(problem)
    # The SDK's protocol models come with its configuration; the user's is none of our business.
    for name in [name for name in os.environ if name.startswith("PYTRIO_")]:
        del os.environ[name]
    from trio_local.protocol import ApiError
    from trio_local.server import ServerOptions
    from trio_local.server import serve as serve_backend

    server_options = ServerOptions(
        port=options.port,
        store=options.store,
        record=options.record or new_record_folder(),
        reduction=options.reduction,
        respell=options.respell,
        seed=options.seed,
        device=options.device,
        threads=options.threads,
        api_key=os.environ.get("TRIO_DRYRUN_KEY"),
        **backend_settings(options),
    )

    def announce(url: str) -> None:
        if not options.follow_parent:
            say("serving until Ctrl-C; in another terminal set PYTRIO_API_KEY to anything and")
            say("PYTRIO_BASE_URL to this address")
        print(json.dumps({"url": url}), flush=True)

    # uvicorn passes on the signal that ended it: our files are closed before we obey.
    signal.signal(signal.SIGTERM, interrupt)
    try:
        serve_backend(server_options, announce, options.follow_parent)
    except KeyboardInterrupt:
        pass
    except OSError as error:
        stop(f"cannot write {error.filename}: {error.strerror}")
    except ApiError as error:
        stop(error.message)
    return EXIT_OK


def probe(options: argparse.Namespace) -> int:
    """Find out how a service behaves: by default a backend of its own, or the cloud for money."""
    problem = installation_problem()
    if problem:
        stop(problem)
    from audit.cli import parse_prices
    from probe.cli import ProbeOptions, ask, chosen_questions
    from probe.cost import plan

    probe_options = ProbeOptions(
        options.out, probe_target(options), options.model_name, options.max_tokens_total,
        tuple(filter(None, options.only.split(","))),
    )  # fmt: skip
    try:
        if options.ask and not options.cloud:
            return ask(probe_options, os.environ.get("PYTRIO_BASE_URL", ""), say)
        questions = chosen_questions(probe_options.only)
        if options.only and not probe_options.only:
            raise ValueError(f"--only takes names of questions, got {options.only!r}")
    except ValueError as error:
        stop(str(error))
    try:
        prices = None if options.price is None else parse_prices(options.price)
    except ValueError as error:
        stop(f"--price {error}")
    if options.cloud:
        if prices is None:
            stop("--cloud needs --price P,S,T: prices of a million prefill, sample, train tokens")
        print(plan(questions, options.max_tokens_total, prices), flush=True)
        if not options.i_agree_to_pay:
            stop("nothing was sent; the same command with --i-agree-to-pay asks, and costs money")
        # In this process: one that goes on alone would go on paying.
        signal.signal(signal.SIGTERM, interrupt)
        try:
            return ask(probe_options, "", say)
        except ValueError as error:
            stop(str(error))
    if options.i_agree_to_pay:
        stop("--i-agree-to-pay goes with --cloud; without it nothing is sent anywhere but here")
    from trio_local.preflight import script_environment

    backend_settings(options)
    record = options.record or new_record_folder()
    signal.signal(signal.SIGTERM, interrupt)
    open_record(record)
    key = f"dryrun-{secrets.token_hex(16)}"
    with Backend(options, record, key) as backend:
        environment = script_environment(backend.url, key, record / "sdk-home", Path.home())
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--ask"]
        status = run_script(command, environment, backend)
    return status if status in (EXIT_OK, EXIT_USAGE, EXIT_INTERRUPTED) else EXIT_SCRIPT_FAILED


def probe_target(options: argparse.Namespace) -> str:
    """What is probed, so that an interrupted probe goes on with the same."""
    if options.cloud:
        return "cloud"
    settings = [f"--reduction {options.reduction}"]
    settings += [f"--like {options.like}"] if options.like else []
    return f"local backend, {' '.join([*settings, *options.model])}"


def model_override(text: str) -> tuple[str, str]:
    """`NAME=KIND` -> (NAME, KIND)."""
    name, separator, kind = text.partition("=")
    if not (name and separator and kind):
        stop(f"--model takes NAME=KIND, got {text!r}")
    return name, kind


def models(options: argparse.Namespace) -> int:
    """Print the kinds and which names they answer for."""
    from trio_local.catalogue import KINDS, LARGE_FROM_BILLIONS, WELL_KNOWN_MODELS, default_kind

    for kind, meaning in KINDS.items():
        print(f"{kind:<10} {meaning}")
    print(
        f"\nAny name is served: {LARGE_FROM_BILLIONS:g}B and more by `large`, others by `standin`."
    )
    for name in WELL_KNOWN_MODELS:
        print(f"{name:<32} {default_kind(name)}")
    return EXIT_OK


def doctor(options: argparse.Namespace) -> int:
    """Print versions and say whether a dry run is possible here."""
    problem = installation_problem()
    facts = {
        "skill": skill_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": str(os.cpu_count()),
        **{name: installed(name) or "not installed" for name in SHOWN_PACKAGES},
    }
    if options.json:
        print(json.dumps({**facts, "problem": problem}, indent=2))
    else:
        for name, value in facts.items():
            print(f"{name:<12} {value}")
        print(f"{'verdict':<12} {problem or 'ready for a dry run'}")
    return EXIT_USAGE if problem else EXIT_OK


# -- command line ----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse with our exit code and one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += " (the script's own go after `--`)"
        stop(f"{message}; see: {self.prog} --help")


def number(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """A type of argparse: a whole number within bounds."""

    def parse(text: str) -> int:
        value = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else lowest - 1
        if value < lowest or (highest is not None and value > highest):
            bounds = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
            raise argparse.ArgumentTypeError(f"takes a whole number {bounds}, got {text!r}")
        return value

    return parse


def share(text: str) -> float:
    """A type of argparse: a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"takes a number from 0 to 1, got {text!r}")
    return value


def folder_path(text: str) -> Path:
    """A type of argparse: the path of a folder; an empty one would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("takes the path of a folder, got nothing")
    return Path(text)


def add_backend_options(parser: argparse.ArgumentParser, respell: float) -> None:
    add = parser.add_argument
    add("--port", type=number(0, 65535), default=0, help="port on 127.0.0.1 (default: a free one)")
    add(
        "--store", type=folder_path, default=Path(".trio-local/checkpoints"),
        help="folder of the checkpoints; outlives the backend (default: %(default)s)",
    )  # fmt: skip
    add(
        "--record",
        type=folder_path,
        help="folder of the recording (default: .trio-local/runs/TIME)",
    )
    add(
        "--model", action="append", default=[], metavar="NAME=KIND",
        help="serve a name by a kind; NAME may be *; see the command models",
    )  # fmt: skip
    add(
        "--reduction", default="default", choices=REDUCTIONS,
        help="what summed losses are divided by (default: see references/dryrun.md)",
    )  # fmt: skip
    add(
        "--like", type=Path, metavar="FILE",
        help="behave as a probe found the cloud to; see references/probe.md",
    )  # fmt: skip
    add("--demo", type=Path, metavar="FILE", help="completions to emit, one JSON object a line")
    add(
        "--respell", type=share, default=respell, metavar="SHARE",
        help="completions with one token written as two, as real models do (default: %(default)s)",
    )  # fmt: skip
    add("--fault", metavar="NAME=VALUE,...", help="faults to inject, such as latency=200ms")
    add("--seed", type=int, default=0, help="seed of unseeded sampling and LoRA (default: 0)")
    add("--device", default="cpu", help="torch device (default: cpu)")
    add("--threads", type=number(1), default=DEFAULT_THREADS, help="torch threads (default: 1)")
    add("--max-batch-size", type=number(0), default=256, help="samples per request; 0 for no limit")
    add("--max-tokens", type=number(0), default=262144, help="tokens per request; 0 for no limit")


def add_audit_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--accept", action="append", default=[], metavar="RULE=REASON",
        help="a finding that is intended, such as 'A05=one step off-policy'",
    )  # fmt: skip
    add("--steps", type=number(1), help="optimiser steps of the full run, for the estimate")
    add("--price", metavar="P,S,T", help="prices of a million prefill, sample and train tokens")


def add_recording(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recording", type=folder_path, help="the folder that run named, or its trace"
    )
    parser.add_argument(
        "--session", type=number(1), action="append", default=[], metavar="N",
        help="only the N-th session: a script opens one with each ServiceClient; may be repeated",
    )  # fmt: skip


def add_probe_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("probe.json"), help="answers (default: %(default)s)")
    add("--model-name", metavar="NAME", help="base model (default: the smallest one offered)")
    add("--only", default="", metavar="QUESTION,...", help="only questions that begin so")
    add(
        "--max-tokens-total", type=number(1), default=PROBE_MAX_TOKENS, metavar="N",
        help="stop before more tokens than this are sent (default: %(default)s)",
    )  # fmt: skip
    add("--price", metavar="P,S,T", help="prices of a million prefill, sample and train tokens")
    add("--cloud", action="store_true", help="probe the cloud that the environment names")
    add("--i-agree-to-pay", action="store_true", help="with --cloud: do it, it costs money")
    add("--ask", action="store_true", help=argparse.SUPPRESS)


def parser_of_commands() -> argparse.ArgumentParser:
    parser = Parser(
        prog="dryrun.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=skill_version())
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    runner = commands.add_parser(
        "run",
        help="run a script on a backend of its own",
        usage="dryrun.py run [OPTIONS] SCRIPT [-- ARGS]",
        epilog="everything after -- goes to the script",
    )
    add_backend_options(runner, RUN_RESPELL_SHARE)
    add_audit_options(runner)
    runner.add_argument("script", help="the Python file to run")
    runner.set_defaults(call=run)
    auditor = commands.add_parser("audit", help="audit the recording of an earlier run")
    add_recording(auditor)
    add_audit_options(auditor)
    auditor.set_defaults(call=audit_again)
    shower = commands.add_parser("show", help="print what was sampled and trained")
    add_recording(shower)
    shower.add_argument(
        "--limit", type=number(1), default=6, metavar="N",
        help="requests and data to print, of each the first and last ones (default: 6)",
    )  # fmt: skip
    shower.add_argument("--whole", action="store_true", help="long texts are not cut")
    shower.set_defaults(call=show_recording)
    checker = commands.add_parser("check", help="look for mistakes in Python files")
    checker.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a Python file")
    checker.add_argument("--json", action="store_true", help="print JSON")
    checker.set_defaults(call=check)
    rules_parser = commands.add_parser("rules", help="list the rules of audit and check")
    rules_parser.add_argument("code", nargs="?", default="", help="such as A05 or C07")
    rules_parser.set_defaults(call=rules)
    server = commands.add_parser("serve", help="keep a backend running")
    add_backend_options(server, 0.0)
    server.add_argument("--follow-parent", action="store_true", help=argparse.SUPPRESS)
    server.set_defaults(call=serve)
    prober = commands.add_parser("probe", help="find out what is documented nowhere")
    add_backend_options(prober, 0.0)
    add_probe_options(prober)
    prober.set_defaults(call=probe)
    commands.add_parser("models", help="list the local models").set_defaults(call=models)
    doctor_parser = commands.add_parser("doctor", help="check this Python")
    doctor_parser.add_argument("--json", action="store_true", help="print JSON")
    doctor_parser.set_defaults(call=doctor)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Split by hand: what argparse does with `--` differs between Python versions.
    border = given.index("--") if "--" in given else len(given)
    options = parser_of_commands().parse_args(given[:border])
    options.arguments = given[border + 1 :]
    if options.arguments and options.command != "run":
        stop(f"{options.command} takes nothing after `--`; only run passes arguments on")
    for stream in (sys.stdout, sys.stderr):
        # A terminal or pipe of another encoding shows escapes instead of ending us.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = options.call(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_SCRIPT_FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        stop(f"cannot write the output: {error.strerror}", EXIT_SCRIPT_FAILED)


if __name__ == "__main__":
    raise SystemExit(main())
