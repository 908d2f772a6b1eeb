"""What a grader sees of one dry run: everything the script sent, and everything it was served.

A grader is a function `grade(run) -> list[Expectation]` in a task's `grader.py`. It judges the
recorded behaviour through a `Run`; it never reads source text, and it depends on no file name and
no style.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SKILL = ROOT / "skills" / "pytrio-skill"
DRYRUN = SKILL / "scripts" / "dryrun.py"
sys.path.insert(0, str(SKILL / "scripts"))

from audit.joins import Group, Joined  # noqa: E402
from audit.trace import (  # noqa: E402
    Call,
    Datum,
    Request,
    Save,
    Trace,
    read_trace,
    records_of,
)

EVIDENCE_LENGTH = 400


@dataclass(frozen=True)
class Expectation:
    """One thing that must hold, whether it does, and what was seen."""

    text: str
    passed: bool
    evidence: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"text": self.text, "passed": self.passed, "evidence": self.evidence}


def expect(text: str, passed: object, evidence: object = "") -> Expectation:
    """An expectation with its evidence shortened; any truth value will do for `passed`."""
    shown = evidence if isinstance(evidence, str) else repr(evidence)
    if len(shown) > EVIDENCE_LENGTH:
        shown = shown[: EVIDENCE_LENGTH - 3] + "..."
    return Expectation(text, bool(passed), shown)


class Loss(NamedTuple):
    """A built-in loss as it was asked for; `config` as sorted pairs."""

    name: str
    config: tuple[tuple[str, float], ...]


class SavedCheckpoint(NamedTuple):
    """A durable save: its kind is `state` or `weights`; `step` counts optimiser steps."""

    name: str
    kind: str
    step: int


def squeezed(text: str) -> str:
    """Text with each run of white space as one space, for comparisons."""
    return " ".join(text.split())


@dataclass
class Run:
    """One dry run of the produced script.

    `folder` is the copy of the work folder after the run, `files` the task's data as given to the
    user, `status` the exit status of `dryrun.py` (0 clean, 1 the script failed, 2 audit errors),
    `output` what the script printed. `before` is the earlier run of the same folder that was
    killed, in tasks that ask for it.
    """

    folder: Path
    files: Path
    record: Path
    status: int
    output: str
    diagnostics: str
    seconds: float
    is_killed: bool = False
    before: "Run | None" = None
    _texts: dict[bytes, str] = field(default_factory=dict)

    # -- reading ------------------------------------------------------------------------------

    @cached_property
    def trace(self) -> Trace:
        return read_trace(self.record)

    @cached_property
    def joined(self) -> Joined:
        return Joined(self.trace)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The raw records, for what the audit's objects leave out."""
        return records_of(self.record / "trace.msgpack")[0]

    @cached_property
    def audit(self) -> dict[str, Any]:
        """`audit.json`; empty when the run was not audited."""
        try:
            return json.loads((self.record / "audit.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def findings(self, *codes: str) -> list[str]:
        """Names of the audit's findings; `codes` such as `A04` or `A05-lag` restrict them."""
        return [
            f["name"]
            for f in self.audit.get("findings", [])
            if not codes or f["code"] in codes or f["name"] in codes
        ]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """A JSONL file of the task's data."""
        lines = (self.files / name).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]

    def written(self, name: str) -> str:
        """A file the script was asked to write; empty when it did not."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ""

    # -- text ---------------------------------------------------------------------------------

    @cached_property
    def model_folder(self) -> str:
        """Of the first model; all stand-ins of one run share their tokenizer."""
        return next(iter(self.trace.chats), "")

    def text(self, ids: Iterable[int] | np.ndarray) -> str:
        """Ids as text, special tokens included."""
        array = np.asarray(list(ids) if not isinstance(ids, np.ndarray) else ids, np.int64)
        key = array.tobytes()
        if key not in self._texts:
            self._texts[key] = self.joined.decoders.of(self.model_folder).text(array)
        return self._texts[key]

    def bare(self, ids: Iterable[int] | np.ndarray) -> str:
        """Ids as text without end tokens and outer white space."""
        return re.sub(r"<\|im_end\|>|<\|endoftext\|>", "", self.text(ids)).strip()

    def spans(self, datum: Datum) -> list[str]:
        """The texts of a datum's regions of consecutive trained targets, in order."""
        active = datum.active
        edges = np.flatnonzero(np.diff(np.concatenate([[0], active.astype(np.int8), [0]])))
        return [
            self.bare(datum.targets[start:stop])
            for start, stop in zip(edges[::2], edges[1::2], strict=True)
        ]

    def whole(self, datum: Datum) -> str:
        """The text of a datum's sequence, trained or not."""
        return self.text(datum.tokens)

    def prompt(self, request: Request) -> str:
        return self.text(request.prompt)

    # -- training -----------------------------------------------------------------------------

    @cached_property
    def step_count(self) -> int:
        """Optimiser steps that applied a gradient."""
        return sum(bool(step.calls) for step in self.trace.steps)

    @cached_property
    def backward_calls(self) -> list[Call]:
        return [call for call in self.trace.calls if call.is_backward]

    @cached_property
    def supervised(self) -> list[Datum]:
        """Data of the cross-entropy calls on given text, in order."""
        return [d for call in self.joined.supervised_calls for d in call.data]

    @cached_property
    def policy(self) -> list[Datum]:
        """Data of the calls that train on sampled tokens."""
        return [d for call in self.joined.policy_calls for d in call.data]

    @cached_property
    def preference(self) -> list[Datum]:
        """Data of custom losses on given text."""
        return [d for call in self.joined.preference_calls for d in call.data]

    @cached_property
    def losses(self) -> dict[Loss, int]:
        """Built-in losses with their settings -> backward events. A custom loss is one of kind
        `cross_entropy` here; see `custom_calls`."""
        found: dict[Loss, int] = defaultdict(int)
        for record in self.records:
            is_backward = str(record.get("type", "")).endswith("forward_backward")
            if record["kind"] == "event" and is_backward and "loss" in record:
                config = record["loss"].get("config") or {}
                found[Loss(record["loss"]["type"], tuple(sorted(config.items())))] += 1
        return dict(found)

    @cached_property
    def custom_calls(self) -> list[Call]:
        """Calls of forward_backward_custom."""
        return [call for call in self.backward_calls if call.kind == "custom"]

    @cached_property
    def learning_rates(self) -> set[float]:
        return {float(step.params["learning_rate"]) for step in self.trace.steps}

    @cached_property
    def base_models(self) -> set[str]:
        """Of the training runs."""
        return {run.base_model for run in self.trace.runs.values()}

    @cached_property
    def ranks(self) -> set[int]:
        """LoRA ranks of the training runs."""
        return {
            int(record["lora"]["rank"])
            for record in self.records
            if record["kind"] == "training_run" and record.get("lora")
        }

    @cached_property
    def durable_saves(self) -> list[SavedCheckpoint]:
        """Saves that neither are temporary nor expire, in order."""
        return [saved_of(s) for s in self.trace.saves if not s.is_temporary and not s.ttl_seconds]

    def saved_weights(self, name: str) -> bool:
        """Whether weights were kept for good under a name, after the last step of their run."""
        last = {step.run: step.number for step in self.trace.steps}
        return any(
            saved_of(save) == SavedCheckpoint(name, "weights", last.get(save.run, 0))
            for save in self.trace.saves
            if not save.is_temporary and not save.ttl_seconds
        )

    # -- sampling -----------------------------------------------------------------------------

    @cached_property
    def groups(self) -> list[Group]:
        """Completions sampled together from one prompt, of the samplers used for training."""
        return self.joined.groups

    @cached_property
    def live_groups(self) -> list[Group]:
        """Groups of which something was trained."""
        return [group for group in self.groups if not group.is_degenerate]

    @cached_property
    def dull_data(self) -> list[Datum]:
        """Data sent to the trainer although their whole group carries no signal."""
        live = {member for group in self.live_groups for member in group.members}
        first_turns = [(d, self.owner(d)) for d in self.policy if not d.active.any()]
        return [d for d, i in first_turns if i is None or self.joined.first_turn(i) not in live]

    @cached_property
    def greedy(self) -> list[Request]:
        """Requests at temperature 0 (or restricted to the best token) that are no scoring."""
        return [
            r
            for r in self.trace.requests
            if not r.is_score
            and (r.params.get("temperature", 1.0) == 0 or r.params.get("top_k", -1) == 1)
        ]

    @cached_property
    def group_by_prompt(self) -> dict[str, list[Group]]:
        """Prompt text -> its groups."""
        found: dict[str, list[Group]] = defaultdict(list)
        for group in self.groups:
            request = self.joined.sequences[group.members[0]].request
            found[self.prompt(request)].append(group)
        return dict(found)

    def completion(self, index: int) -> str:
        """The text of a sequence by its index in `joined.sequences`."""
        return self.joined.text_of(index)

    def owner(self, datum: Datum) -> int | None:
        """The completion, by its index in `joined.sequences`, that a datum ends in."""
        match = self.joined.match(datum)
        return match.turns[-1] if match.turns else match.cut

    def centred(self, reward: Callable[[str, str], float]) -> dict[int, float]:
        """Completion -> its reward minus the mean reward of its group."""
        found: dict[int, float] = {}
        for group in self.groups:
            prompt = self.prompt(self.joined.sequences[group.members[0]].request)
            rewards = [reward(prompt, self.completion(m)) for m in group.members]
            mean = sum(rewards) / len(rewards)
            found |= {m: r - mean for m, r in zip(group.members, rewards, strict=True)}
        return found

    def wrong_advantages(
        self, reward: Callable[[str, str], float | None], surplus_allowed: bool = False
    ) -> list[str]:
        """Trained completions whose order within their group is not the reward's.

        `reward(prompt text, completion text)` is the grader's own, None where fair rewards may
        differ. Of two trained completions of a group the better must have the higher advantage and
        equals must have equal ones, whatever the scale. Also named are groups with different
        rewards of which nothing was trained, unless a surplus is allowed.
        """
        problems = []
        for group in self.groups:
            request = self.joined.sequences[group.members[0]].request
            prompt = self.prompt(request)
            judged = {m: reward(prompt, self.completion(m)) for m in group.members}
            rewards = {m: value for m, value in judged.items() if value is not None}
            differ = len(set(rewards.values())) > 1
            if differ and not group.advantages and not surplus_allowed:
                problems.append(f"a group with rewards {sorted(rewards.values())} is not trained")
            trained = sorted((rewards[m], a) for m, a in group.advantages.items() if m in rewards)
            for (low, a), (high, b) in zip(trained, trained[1:], strict=False):
                is_right = abs(a - b) < 1e-4 if low == high else b > a
                if not is_right:
                    problems.append(f"rewards {low:g}, {high:g} have advantages {a:.3g}, {b:.3g}")
        return problems


def saved_of(save: Save) -> SavedCheckpoint:
    """`trio://RUN/KIND/NAME` taken apart."""
    parts = save.uri.split("/")
    kind = "state" if "state" in parts[-2] else "weights"
    return SavedCheckpoint(parts[-1], kind, save.step)


def standard_expectations(run: Run) -> list[Expectation]:
    """What holds for every task: the script ends well and the audit has no error."""
    failed = [
        f"{f['name']}: {f['seen']}"
        for f in run.audit.get("findings", [])
        if f["severity"] == "error" and not f["accepted"]
    ]
    end = [line for line in run.diagnostics.splitlines() if line.strip()][-3:]
    return [
        expect("the script ends without failure", run.status in (0, 2), " / ".join(end)),
        expect(
            "the audit has no error",
            run.audit and not failed,
            "; ".join(failed) or run.audit.get("verdict", "no audit: nothing was recorded"),
        ),
    ]


def differing(found: Mapping[str, int], wanted: Mapping[str, int]) -> dict[str, str]:
    """The counts that are not the wanted ones, as evidence."""
    names = [*wanted, *(name for name in found if name not in wanted)]
    return {
        name: f"{found.get(name, 0)} instead of {wanted.get(name, 0)}"
        for name in names
        if found.get(name, 0) != wanted.get(name, 0)
    }


def is_constant(values: Iterable[float], tolerance: float = 1e-3) -> bool:
    """Whether all values are the same and not 0, up to a relative tolerance."""
    found = list(values)
    middle = sum(found) / len(found) if found else 0.0
    return middle != 0 and all(abs(v - middle) <= tolerance * abs(middle) for v in found)


def approximately(values: Iterable[float], wanted: float, tolerance: float = 1e-6) -> bool:
    """Whether there are values and all are the wanted one, up to a relative tolerance."""
    found = list(values)
    return bool(found) and all(abs(v - wanted) <= tolerance * abs(wanted) for v in found)


def final_answer(text: str, marker: str = r"\boxed{") -> str:
    """The contents of the last box in a text, nested braces included; empty when there is none."""
    start = text.rfind(marker)
    if start < 0:
        return ""
    depth, begin = 1, start + len(marker)
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip()
    return ""
