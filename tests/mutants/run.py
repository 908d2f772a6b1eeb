#!/usr/bin/env python3
"""Prove the source check and the audit: every seeded bug is caught, every correct loop is clean.

    python tests/mutants/run.py                  all loops and all mutants
    python tests/mutants/run.py --loops          only the correct loops
    python tests/mutants/run.py --only NAME ...  some mutants or loops

The loops go through `dryrun.py run`; mutants share backends, and each is audited by itself.
A mutant is caught when a rule it expects gives an error or a warning. A loop is clean when it runs
to the end and nothing but hints is said about it. Exit codes: 0 all caught and clean, 1 not.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

from catalogue import LOOPS, MUTANTS, Mutant, loop_source, mutated_source
from warm import SERVED, TIMED_OUT, Warm

ROOT = Path(__file__).resolve().parents[2]

TIMEOUT_SECONDS = 120
# The loops import the row generators of the stand-in's tasks.
PYTHON_PATH = os.pathsep.join(
    filter(None, [str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
)
# Exit codes of `dryrun.py run` after which the script itself has reached its end.
ENDED = (0, 2)
COUNTING = ("error", "warning")
SIDES = (("source", "C"), ("audit", "A"))


@dataclass
class Outcome:
    """What happened to one loop or mutant; a finding is (code, severity, sentence)."""

    name: str
    loop: str
    expect: tuple[str, ...]
    crashes: bool
    source_findings: list[tuple[str, str, str]] = field(default_factory=list)
    audit_findings: list[tuple[str, str, str]] = field(default_factory=list)
    exit_code: int | None = None  # None: not run, the source check was enough
    seconds: float = 0.0
    tail: str = ""

    @property
    def fired(self) -> list[str]:
        """Codes that said error or warning."""
        findings = self.source_findings + self.audit_findings
        return sorted({code for code, severity, _ in findings if severity in COUNTING})

    @property
    def caught_by(self) -> str:
        """`source`, `audit`, both or neither: which side gave an expected code."""
        return " ".join(
            side for side, prefix in SIDES if any(c[0] == prefix for c in self.expected_and_fired)
        )

    @property
    def expected_and_fired(self) -> list[str]:
        return [code for code in self.fired if code in self.expect]

    @property
    def ended_as_expected(self) -> bool:
        if self.exit_code is None:
            return True
        return (self.exit_code in ENDED) != self.crashes

    @property
    def passed(self) -> bool:
        if not self.expect:  # a correct loop
            return self.exit_code == 0 and not self.fired
        return self.ended_as_expected and bool(self.expected_and_fired)


def source_findings(source: str, name: str) -> list[tuple[str, str, str]]:
    """Findings of the source check."""
    from lint.check import check_source

    return [finding_of(found) for found in check_source(source, f"{name}.py")]


def finding_of(found: Any) -> tuple[str, str, str]:
    """(code, severity, sentence) of a finding object or of its JSON form."""
    as_json = found if isinstance(found, dict) else getattr(found, "as_json", lambda: None)()
    if as_json is None:
        as_json = {key: getattr(found, key, "") for key in ("code", "severity", "message", "seen")}
    sentence = as_json.get("seen") or as_json.get("message") or ""
    return str(as_json["code"])[:3], str(as_json["severity"]), str(sentence)


def warm_run(outcome: Outcome, source: str, args: tuple[str, ...], warm: Warm, home: Path) -> None:
    """Run a source on a shared backend and fill in what came of it."""
    from audit.cli import audit
    from audit.report import Budget

    home.mkdir(parents=True)
    script = home / f"{outcome.name.replace('-', '_')}.py"
    script.write_text(source, encoding="utf-8")
    began = time.monotonic()
    outcome.exit_code, sessions = warm.run(script, args, TIMEOUT_SECONDS)
    outcome.seconds = round(time.monotonic() - began, 1)
    lines = (home / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    outcome.tail = lines[-1] if lines else ""
    if sessions:
        table, result = audit(warm.record, {}, Budget(), sessions)
        (home / "audit.txt").write_text(table, encoding="utf-8")
        outcome.audit_findings = [finding_of(found) for found in result["findings"]]


def audit_findings(record: Path) -> list[tuple[str, str, str]]:
    """Findings that the dry run has written into the recording and nobody accepted."""
    try:
        result = json.loads((record / "audit.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return [finding_of(found) for found in result["findings"] if not found.get("accepted")]


def dry_run(outcome: Outcome, source: str, args: tuple[str, ...], skill: Path, home: Path) -> None:
    """Run a source on a backend of its own and fill in what came of it."""
    home.mkdir(parents=True)
    script = home / f"{outcome.name.replace('-', '_')}.py"
    script.write_text(source, encoding="utf-8")
    record = home / "record"
    command = [sys.executable, str(skill / "scripts" / "dryrun.py"), "run", *SERVED]
    command += ["--record", str(record), "--store", str(home / "store"), str(script), "--", *args]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": PYTHON_PATH,
    }
    log = home / "log"
    began = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            outcome.exit_code = process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            # Ends the script and the backend too, as Ctrl-C would.
            process.send_signal(signal.SIGTERM)
            process.wait()
            outcome.exit_code = TIMED_OUT
    outcome.seconds = round(time.monotonic() - began, 1)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = [line for line in lines if not line.startswith("dryrun:")] or lines
    outcome.tail = said[-1] if said else ""
    outcome.audit_findings = audit_findings(record)


def examine(job: Mutant | str, skill: Path, folder: Path, keep: bool, warm: Warm) -> Outcome:
    """Check one mutant, or one correct loop given by its name."""
    if isinstance(job, str):
        source, args = loop_source(job), ()
        outcome = Outcome(job, job, (), crashes=False)
    else:
        source, args = mutated_source(job), job.args
        outcome = Outcome(job.name, job.loop, job.expect, job.crashes)
    outcome.source_findings = source_findings(source, outcome.name)
    errors = {code for code, severity, _ in outcome.source_findings if severity == "error"}
    source_rules_only = outcome.expect and all(code.startswith("C") for code in outcome.expect)
    if source_rules_only and errors & set(outcome.expect):
        return outcome
    home = folder / outcome.name
    if isinstance(job, str):
        dry_run(outcome, source, args, skill, home)
    else:
        warm_run(outcome, source, args, warm, home)
    if not keep:
        shutil.rmtree(home, ignore_errors=True)
    return outcome


def row_of(outcome: Outcome) -> str:
    """One line of the table."""
    expected = " ".join(outcome.expect) or "clean"
    verdict = f"yes  {outcome.caught_by}".rstrip() if outcome.passed else "NO"
    run = "-" if outcome.exit_code is None else f"{outcome.exit_code} {outcome.seconds:5.1f}s"
    fired = " ".join(outcome.fired) or "-"
    line = f"{outcome.name:32} {expected:20} {fired:28} {run:>9}  {verdict}"
    if not outcome.ended_as_expected:
        line += f"  did not end as expected: {outcome.tail[:120]}"
    return line


def jobs_of(options: argparse.Namespace) -> list[Mutant | str]:
    """The loops first, then the mutants, as far as they were asked for."""
    loops: list[Mutant | str] = sorted(path.stem for path in LOOPS.glob("*.py"))
    jobs = loops if options.loops else [*loops, *MUTANTS]
    if not options.only:
        return jobs
    by_name = {job if isinstance(job, str) else job.name: job for job in [*loops, *MUTANTS]}
    unknown = [name for name in options.only if name not in by_name]
    if unknown:
        raise SystemExit(f"no loop or mutant named {', '.join(unknown)}")
    return [by_name[name] for name in options.only]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants or loops")
    parser.add_argument("--loops", action="store_true", help="only the correct loops")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep sources and recordings")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    parser.add_argument(
        "--skill",
        type=Path,
        default=ROOT / "skills" / "pytrio-skill",
        help="the skill's folder; another copy proves what is installed",
    )
    options = parser.parse_args(arguments)
    jobs = jobs_of(options)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="mutants-"))
    folder = folder.resolve()
    skill = options.skill.resolve()
    sys.path.insert(0, str(skill / "scripts"))
    print(f"{'name':32} {'expected':20} {'fired':28} {'exit':>9}  passed")
    outcomes: list[Outcome] = []
    warm_ones: Queue[Warm] = Queue()
    try:
        for number in range(options.jobs):
            warm_ones.put(Warm(skill, folder / f"warm-{number}", PYTHON_PATH))

        def examine_next(job: Mutant | str) -> Outcome:
            warm = warm_ones.get()
            try:
                return examine(job, skill, folder, options.keep is not None, warm)
            finally:
                warm_ones.put(warm)

        with ThreadPoolExecutor(options.jobs) as pool:
            for outcome in pool.map(examine_next, jobs):
                outcomes.append(outcome)
                print(row_of(outcome), flush=True)
    finally:
        while not warm_ones.empty():
            warm_ones.get().close()
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        rows = [
            asdict(o) | {"fired": o.fired, "caught_by": o.caught_by, "passed": o.passed}
            for o in outcomes
        ]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    mutants = [o for o in outcomes if o.expect]
    loops = [o for o in outcomes if not o.expect]
    for outcome in loops:
        for code, severity, sentence in outcome.source_findings + outcome.audit_findings:
            if severity in COUNTING:
                print(f"false alarm on {outcome.name}: {code} {severity}: {sentence}")
    if loops:
        print(f"clean {sum(o.passed for o in loops)}/{len(loops)}")
    for side, prefix in SIDES if mutants else ():
        # Of those that this side was able to see: a crashed or skipped run has no audit.
        asked = [o for o in mutants if any(code[0] == prefix for code in o.expect)]
        if prefix == "A":
            asked = [o for o in asked if o.exit_code in ENDED]
        caught = sum(side in o.caught_by.split() for o in asked)
        print(f"{side} caught {caught}/{len(asked)} of those meant for it")
    if mutants:
        print(f"caught {sum(o.passed for o in mutants)}/{len(mutants)}")
    return 0 if all(o.passed for o in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
