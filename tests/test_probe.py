"""The probe against backends whose behaviour is known: it names it, or says that it cannot."""

import itertools
import json
import math
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from pytrio import ServiceClient

from audit.report import LOSS_QUESTIONS, cannot_tell
from audit.rules_tokens import probed_divisors
from conftest import DRYRUN, KEY, SKILL, Backend, dryrun
from helpers import service_on
from probe import cli
from probe.ask_training import POLICY, VARIANTS
from probe.cli import ProbeOptions, ask_all, chosen_questions
from probe.cost import bounds, cost
from probe.decide import CANNOT_TELL, HIGH, SOMETHING_ELSE, Verdict, fit
from probe.measure import TEXT, Meter, OutOfBound, OutOfBudget
from probe.questions import QUESTIONS, Question
from trio_local.app import build_app
from trio_local.behaviour import POLICY_LOSSES, SETTINGS, Behaviour, read_like, with_answer
from trio_local.catalogue import Catalogue
from trio_local.demos import Demos
from trio_local.engine import Engine
from trio_local.faults import Faults
from trio_local.recording import Recorder
from trio_local.server import bound_socket
from trio_local.spelling import Spelling
from trio_local.state import Limits, State
from trio_local.store import CheckpointStore

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
LOSS_NAMES = ("cross_entropy", *POLICY_LOSSES)
Answers = dict[str, Any]


# -- a backend whose behaviour is changed between probes ------------------------------------------


@dataclass
class Bench:
    """A backend in this process: starting a new one for each combination would take minutes."""

    url: str
    record: Path
    state: State

    def client(self, **settings: object) -> ServiceClient:
        import pytrio as trio

        trio.configure(base_url=self.url, api_key=KEY, **settings)
        return trio.ServiceClient()

    def behave(self, answers: Answers, batch_size: int | None = 6) -> None:
        """Behave as `answers` say, and as by default in all else."""
        behaviour = Behaviour()
        for question, value in answers.items():
            behaviour = with_answer(behaviour, question, value)
        engine = self.state.engine
        # On the compute thread, which alone touches the batches.
        engine.submit(engine._batches.clear).result()
        engine.behaviour = behaviour
        self.state.faults = Faults({}, 0)
        self.state.limits = Limits(batch_size, 262_144)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    listener: socket.socket = bound_socket(0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    engine = Engine("cpu", "default", 0, 1, Demos(), Spelling(0.0), Behaviour())
    engine.start()
    state = State(
        catalogue=Catalogue({}),
        store=CheckpointStore(folder / "store"),
        engine=engine,
        recorder=Recorder(folder / "record", {}),
        faults=Faults({}, 0),
        limits=Limits(6, 262_144),
        api_key=None,
        seed=0,
        sdk_version="0.2.9",
        endpoint=url,
    )
    config = uvicorn.Config(build_app(state), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield Bench(url, folder / "record", state)
    server.should_exit = True
    thread.join(30)
    engine.stop()
    state.recorder.close()


@pytest.fixture(scope="module")
def service(bench: Bench) -> Iterator[ServiceClient]:
    with service_on(bench) as opened:
        yield opened


def probed(service: ServiceClient, folder: Path, only: tuple[str, ...], **options: Any) -> Answers:
    """What the probe wrote after asking the questions that begin with one of `only`."""
    wanted = ProbeOptions(folder / "probe.json", "test", MODEL, only=only, **options)
    ask_all(service, wanted, chosen_questions(only), lambda line: None)
    return json.loads(wanted.out.read_text(encoding="utf-8"))


# -- what is true of a backend, written down a second time ----------------------------------------

DEFAULTS: Answers = {
    "token_outputs": ["logprobs"],
    "mismatch": 0.0,
    "fresh_lora": "equals base",
    "temperature": "before",
    "top_k": "before",
    "top_p": "before",
    "token_stop": "in tokens",
    "string_stop": "in tokens",
    "end_of_turn": "in tokens",
    "same_seed": "repeats",
    "group_samples": "distinct",
    "prompt_logprobs": "None first",
    "step_metrics": ["grad_norm", "learning_rate"],
    "event_order": "in order",
    "two_calls": "add up",
    "reduction.cross_entropy": "active_tokens",
    "reduction.importance_sampling": "active_tokens",
    "reduction.ppo": "active_tokens",
    "reduction.cispo": "active_tokens",
    "reduction.dro": "advantage_tokens",
    "split_calls": "whole call",
    "token_count.cross_entropy": "weight tokens",
    "token_count.policy": "advantage tokens",
    "clip.ppo": [0.8, 1.2],
    "clip.cispo": [0.8, 1.2],
    "beta.dro": 0.05,
    "clip_keys": ["clip_low_threshold", "clip_high_threshold"],
    "unknown_keys": "refused",
    "snapshot": "frozen",
    "save_ttl": "never",
    "same_name": "refused",
    "resume": "documented",
    "empty_step": "changes nothing",
}
TOTALS_OF_THE_CALL = ("samples", "active_tokens", "advantage_tokens")


def truth(settings: Answers) -> Answers:
    """What a probe should find; a question without an entry has no answer."""
    found = {**DEFAULTS, **settings}
    noise = found.pop("trainer_noise", 0.0)
    found["mismatch"] = math.hypot(found["mismatch"], noise)
    for loss in LOSS_NAMES:
        if found[f"reduction.{loss}"] == "sqrt_tokens":
            found[f"reduction.{loss}"] = SOMETHING_ELSE
    found["reduction.custom"] = found["reduction.cross_entropy"]
    told = [found[f"reduction.{loss}"] in TOTALS_OF_THE_CALL for loss in ("cross_entropy", "ppo")]
    if not any(told):
        del found["split_calls"]
    if "token_outputs" in settings:
        found["token_outputs"] = sorted(settings["token_outputs"])
    return found


def agrees(question: str, answer: Any, expected: Any) -> bool:
    """Whether an answer is right, numbers to the accuracy that matters."""
    if question == "mismatch":
        return abs(answer - expected) <= 0.25 * expected
    if question.startswith("clip."):
        pairs = zip(answer, expected, strict=True)
        return all(a == e if None in (a, e) else abs(a - e) <= 0.005 for a, e in pairs)
    if question == "beta.dro":
        return abs(answer - expected) <= max(0.002, 0.03 * expected)
    return answer == expected


def asked(content: Answers) -> dict[str, tuple[Any, str]]:
    """Question -> (answer, confidence), `limits` aside."""
    return {
        name: (entry["answer"], entry["confidence"])
        for name, entry in content["answers"].items()
        if name != "limits"
    }


def errors_of(content: Answers, settings: Answers) -> dict[str, Any]:
    """Answers that are wrong and said to be sure, or given where there is nothing to know."""
    expected = truth(settings)
    return {
        name: content["answers"][name]
        for name, (answer, confidence) in asked(content).items()
        if confidence == HIGH and (name not in expected or not agrees(name, answer, expected[name]))
    }


def unsure(content: Answers, settings: Answers) -> dict[str, Any]:
    """Questions that have an answer which was not found for sure."""
    return {
        name: content["answers"][name]
        for name, (_, confidence) in asked(content).items()
        if confidence != HIGH and name in truth(settings)
    }


# -- combinations of settings ---------------------------------------------------------------------

CROSS_ENTROPY_DIVISORS = (
    "sum", "samples", "active_tokens", "positions", "sample_means", "label_tokens", "weight_sum",
    "sqrt_tokens",
)  # fmt: skip
POLICY_DIVISORS = (
    "advantage_tokens", "sum", "samples", "sqrt_tokens", "active_tokens", "positions",
    "sample_means", "samples",
)  # fmt: skip
BEFORE_OR_AFTER, IN_OR_NOT = ("before", "after"), ("in tokens", "not in tokens")
SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": BEFORE_OR_AFTER,
    "top_k": BEFORE_OR_AFTER,
    "top_p": BEFORE_OR_AFTER,
    "token_stop": IN_OR_NOT,
    "string_stop": IN_OR_NOT,
    "end_of_turn": IN_OR_NOT,
    "same_seed": ("repeats", "ignored"),
    "group_samples": ("distinct", "identical"),
    "prompt_logprobs": ("None first", "0 first", "one short"),
    "mismatch": (0.0, 1e-3, 1e-2),
    "fresh_lora": ("equals base", "differs from base"),
}
CLIPS = ([0.8, 1.2], [0.8, 1.28], [0.5, 2.0], [0.9997, 1.0004], [None, 1.5], [0.7, None])
SETTINGS_OF_LOSSES: dict[str, tuple[Any, ...]] = {
    "clip.ppo": CLIPS,
    "clip.cispo": CLIPS,
    "beta.dro": (0.05, 0.0, 0.01, 0.5, 1.0),
    "clip_keys": (
        ["clip_low_threshold", "clip_high_threshold"],
        ["clip_low", "clip_high"],
        ["epsilon_low", "epsilon_high"],
    ),
    "unknown_keys": ("refused", "ignored"),
}
STATE: dict[str, tuple[Any, ...]] = {
    "save_ttl": ("never", 120, 3600, 86_400),
    "same_name": ("refused", "replaces"),
    "resume": ("documented", "never", "always"),
    "empty_step": ("changes nothing", "moves on", "refused"),
    "snapshot": ("frozen", "live", "stale"),
    "token_outputs": (["logprobs"], ["logprobs", "elementwise_loss"]),
    "step_metrics": (["grad_norm", "learning_rate"], ["lr", "optim_norm"]),
}


def covering(factors: dict[str, tuple[Any, ...]], count: int) -> list[Answers]:
    """`count` combinations; of many candidates each is the one with the most pairs not seen."""
    generator = random.Random(0)
    seen: set[tuple[str, ...]] = set()
    rows = []

    def pairs(row: Answers) -> set[tuple[str, ...]]:
        parts = [f"{name}={value}" for name, value in row.items()]
        return set(itertools.combinations(parts, 2))

    for _ in range(count):
        candidates = [
            {name: generator.choice(values) for name, values in factors.items()} for _ in range(60)
        ]
        best = max(candidates, key=lambda row: len(pairs(row) - seen))
        seen |= pairs(best)
        rows.append(best)
    return rows


def reductions() -> list[Answers]:
    """Every divisor of every loss, each loss another one in a row."""
    counts = (("weight tokens", "label tokens", "positions"),)
    counts += (("advantage tokens", "label tokens", "positions"),)
    return [
        {
            "reduction.cross_entropy": CROSS_ENTROPY_DIVISORS[i],
            **{
                f"reduction.{loss}": POLICY_DIVISORS[(i + shift) % len(POLICY_DIVISORS)]
                for shift, loss in enumerate(POLICY_LOSSES)
            },
            "split_calls": ("each chunk", "whole call")[i % 2],
            "token_count.cross_entropy": counts[0][i % 3],
            "token_count.policy": counts[1][(i + 1) % 3],
        }
        for i in range(len(CROSS_ENTROPY_DIVISORS))
    ]


@dataclass(frozen=True)
class Case:
    """One combination and the questions that it decides."""

    settings: Answers
    only: tuple[str, ...]


REDUCTION_QUESTIONS = (
    *(f"reduction.{loss}" for loss in LOSS_NAMES), "split_calls", "token_count", "event_order",
    "two_calls",
)  # fmt: skip
SAMPLING_QUESTIONS = tuple(SAMPLING)
CLIP_QUESTIONS = tuple(SETTINGS_OF_LOSSES)
STATE_QUESTIONS = tuple(STATE)


def mixed() -> list[Answers]:
    """Settings of all groups at once: a question must not be misled by another's setting."""
    rows = zip(reductions()[1:7:3], covering(SAMPLING, 5)[3:], strict=True)
    others = zip(covering(SETTINGS_OF_LOSSES, 4)[2:], covering(STATE, 4)[2:], strict=True)
    return [{**a, **b, **c, **d} for (a, b), (c, d) in zip(rows, others, strict=True)]


CASES = {
    "reduction": [
        Case(row, (*REDUCTION_QUESTIONS, *(["reduction.custom"] if number % 2 else [])))
        for number, row in enumerate(reductions())
    ],
    "sampling": [Case(row, SAMPLING_QUESTIONS) for row in covering(SAMPLING, 20)],
    "clip": [Case(row, CLIP_QUESTIONS) for row in covering(SETTINGS_OF_LOSSES, 12)],
    "state": [Case(row, STATE_QUESTIONS) for row in covering(STATE, 20)],
    "mixed": [Case(row, ()) for row in mixed()],
}
FAST = {"sampling": 2, "clip": 1, "state": 2}


def combinations() -> list[Any]:
    """Parameters of the test: the first of most groups are fast enough for every run."""
    return [
        pytest.param(
            case,
            id=f"{group}-{number}",
            marks=[] if number < FAST.get(group, 0) else [pytest.mark.slow],
        )
        for group, cases in CASES.items()
        for number, case in enumerate(cases)
    ]


@pytest.mark.parametrize("case", combinations())
def test_names_the_setting(
    case: Case, bench: Bench, service: ServiceClient, tmp_path: Path
) -> None:
    """Without noise every question that has an answer is answered rightly and for sure."""
    bench.behave(case.settings)
    content = probed(service, tmp_path, case.only)
    assert not errors_of(content, case.settings)
    assert not unsure(content, case.settings)
    # All questions together are far below the limit of a probe, which is 60,000.
    assert sum(content["tokens"].values()) < 12_000
    assert content["complete"] is (not case.only)


def test_the_combinations_cover_every_setting() -> None:
    """At least sixty; each value of each setting is in one, each pair of sampling settings too."""
    cases = list(itertools.chain(*CASES.values()))
    assert len({json.dumps(case.settings) for case in cases}) >= 60
    tried = {(name, str(value)) for case in cases for name, value in case.settings.items()}
    for factors in (SAMPLING, SETTINGS_OF_LOSSES, STATE):
        assert {(n, str(v)) for n, values in factors.items() for v in values} <= tried
    for loss in LOSS_NAMES:
        values = CROSS_ENTROPY_DIVISORS if loss == "cross_entropy" else POLICY_DIVISORS
        assert {(f"reduction.{loss}", value) for value in values} <= tried
    assert {name for name, _ in tried} == set(SETTINGS) - {"trainer_noise"}
    for first, second in itertools.combinations(SAMPLING, 2):
        seen = {(case.settings[first], case.settings[second]) for case in CASES["sampling"]}
        assert len(seen) == len(SAMPLING[first]) * len(SAMPLING[second]), (first, second)


# -- noise ----------------------------------------------------------------------------------------

NOISY = {
    "sampling": Case({"temperature": "after", "top_p": "after", "same_seed": "ignored",
                      "fresh_lora": "differs from base"}, (*SAMPLING_QUESTIONS, "snapshot")),
    "clip": Case({"clip.ppo": [0.8, 1.28], "clip.cispo": [0.5, 2.0], "beta.dro": 0.1},
                 ("clip.", "beta", "clip_keys")),
    "reduction": Case({"reduction.cross_entropy": "label_tokens",
                       "reduction.importance_sampling": "positions",
                       "reduction.cispo": "advantage_tokens", "resume": "never"},
                      ("reduction.c", "reduction.imp", "token_count", "resume")),
}  # fmt: skip
NOISES = {"sampling": (1e-3, 3e-3, 1e-2, 3e-2), "clip": (3e-3, 1e-2, 3e-2)}
NOISES |= {"reduction": (1e-2, 3e-2)}


@pytest.mark.parametrize(
    ("group", "noise"),
    [
        pytest.param(g, n, marks=[] if (g, n) == ("sampling", 1e-2) else [pytest.mark.slow])
        for g in NOISY
        for n in NOISES[g]
    ],
)
def test_noise_makes_unsure_and_not_wrong(
    group: str, noise: float, bench: Bench, service: ServiceClient, tmp_path: Path
) -> None:
    """Noise between the engines and in the trainer's answers, up to three times what is known."""
    settings = {**NOISY[group].settings, "mismatch": noise, "trainer_noise": noise}
    bench.behave(settings)
    content = probed(service, tmp_path, NOISY[group].only)
    assert not errors_of(content, settings)
    if noise <= 1e-2:
        # It does not save itself by knowing nothing.
        assert len(unsure(content, settings)) <= len(content["answers"]) // 4


# -- decisions without calls ----------------------------------------------------------------------

# Effects of the variants by reduction, worked out by hand for ten positions, four answer tokens.
BY_HAND = {
    "sum": (1, 1, 1, 1, 2, 2, 1),
    "samples": (1, 1 / 2, 1, 1 / 2, 1, 2, 1 / 2),
    "active_tokens": (1, 4 / 16, 4 / 10, 1, 1, 2, 1 / 2),
    "advantage_tokens": (1, 1, 1, 1, 1, 2, 1),
    "positions": (1, 10 / 22, 1, 10 / 50, 1, 2, 1 / 2),
    "sample_means": (1, 1 / 2, 4 / 10, 1 / 2, 1, 2, 1 / 2),
}


def predictions() -> dict[str, dict[str, float]]:
    return {name: dict(zip(VARIANTS, row, strict=True)) for name, row in BY_HAND.items()}


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_what_a_question_settles_is_in_the_notes(question: Question) -> None:
    for place in question.settles.split("; "):
        page, _, words = place.partition(": ")
        text = (SKILL / "references" / page).read_text(encoding="utf-8").replace("`", "")
        assert words.lower() in " ".join(text.split()).lower(), place


def test_predictions_are_those_worked_out_by_hand(bench: Bench, service: ServiceClient) -> None:
    from probe.ask_training import predicted
    from probe.measure import Lab

    bench.behave({})
    lab = Lab(service, MODEL, Meter(1000))
    by_code = predicted(lab, "ppo")
    assert by_code.keys() == POLICY.keys()
    for name, row in predictions().items():
        assert by_code[name] == pytest.approx(row), name


@pytest.mark.parametrize("name", BY_HAND)
def test_fit_is_sure_without_noise_and_says_so_when_it_is_not(name: str) -> None:
    effects = predictions()[name]
    sure = fit(effects, 1e-4, predictions(), True)
    assert (sure.answer, sure.confidence) == (name, HIGH)
    assert fit(effects, 0.5, predictions(), True).confidence == CANNOT_TELL
    assert fit(effects, 1e-4, predictions(), False).confidence == CANNOT_TELL


def test_fit_is_never_wrong_and_sure_under_noise() -> None:
    """Two thousand noisy measurements at every size of noise."""
    generator = random.Random(1)
    sure = 0
    for noise in (0.005, 0.02, 0.05, 0.1, 0.2):
        for _ in range(400):
            name = generator.choice(list(BY_HAND))
            effects = {
                variant: value + generator.gauss(0, noise) * math.hypot(1, value)
                for variant, value in predictions()[name].items()
            }
            verdict = fit(effects, noise, predictions(), True)
            sure += verdict.confidence == HIGH
            assert verdict.confidence != HIGH or verdict.answer == name, (noise, verdict)
    assert sure > 400


def test_an_unknown_divisor_is_something_else() -> None:
    effects = dict(zip(VARIANTS, (1, 0.5, 0.632, 1, 1.414, 2, 0.707), strict=True))
    verdict = fit(effects, 1e-3, predictions(), True)
    assert (verdict.answer, verdict.confidence) == (SOMETHING_ELSE, HIGH)


# -- budget ---------------------------------------------------------------------------------------


def test_all_questions_stay_below_the_limit() -> None:
    """Each asked twice: the upper bound that is printed before anything is sent."""
    assert sum(bounds(QUESTIONS).values()) <= 60_000
    assert cost({"prefill": 1_000_000, "sample": 0, "train": 500_000}, (1.0, 9.0, 4.0)) == 3.0


def test_the_text_is_long_enough_for_any_tokenizer() -> None:
    """The longest stretch that a question takes ends at token 81; few tokens hold two words."""
    assert len(TEXT.split()) >= 110


def test_meter_refuses_before_it_counts() -> None:
    meter = Meter(100)
    meter.take("train", 60)
    with pytest.raises(OutOfBudget):
        meter.take("sample", 41)
    meter.allowance = {"prefill": 10}
    with pytest.raises(OutOfBound):
        meter.take("prefill", 11)
    assert meter.spent == {"prefill": 0, "sample": 0, "train": 60}


def served_tokens(bench: Bench) -> int:
    """Tokens that the backend has counted since it began."""
    return sum(bench.state.recorder.tokens.values())


def test_stops_within_its_budget_and_goes_on_with_a_larger_one(
    bench: Bench, service: ServiceClient, tmp_path: Path
) -> None:
    """What the backend counted is never more than what the probe says, nor that than the limit."""
    bench.behave({})
    only = ("token_outputs", "mismatch", "prompt", "same_seed", "event_order")
    before = served_tokens(bench)
    content = probed(service, tmp_path, only, max_tokens=420)
    spent = sum(content["tokens"].values())
    assert served_tokens(bench) - before <= spent <= 420
    failed = {name for name, entry in content["answers"].items() if entry.get("failed")}
    assert "event_order" in failed and "mismatch" not in failed
    content = probed(service, tmp_path, only, max_tokens=5000)
    assert not [name for name, entry in content["answers"].items() if entry.get("failed")]
    assert served_tokens(bench) - before <= sum(content["tokens"].values())
    assert not errors_of(content, {}) and not unsure(content, {})


# -- faults ---------------------------------------------------------------------------------------

FAULTY: dict[str, tuple[Answers, tuple[str, ...]]] = {
    "503 and cut connections": (
        {"sample_503": 0.3, "drop_connection": 0.1},
        ("mismatch", "token_stop", "group", "prompt", "event_order", "save_ttl"),
    ),
    "no actor is free": ({"capacity": 2}, ("token_outputs", "fresh_lora")),
    "a failed pass": ({"fail_chunk": 3}, ("event_order", "two_calls")),
    "a lost sampler": ({"lost_actor": 4}, ("token_stop", "end_of_turn", "same_seed")),
    "tokens that expire": ({"token_expiry": 1.0}, ("mismatch", "two_calls")),
}


@pytest.mark.parametrize("name", FAULTY)
def test_survives_faults(name: str, bench: Bench, tmp_path: Path) -> None:
    faults, only = FAULTY[name]
    bench.behave({})
    bench.state.faults = Faults(faults, 0)
    fast = {"actor_capacity_poll_interval_seconds": 0.2, "retry_initial_delay_seconds": 0.05}
    with service_on(bench, **fast) as service:
        content = probed(service, tmp_path, only)
        bench.state.faults = Faults({}, 0)
    assert not errors_of(content, {})
    assert not unsure(content, {}), content["answers"]


def test_a_service_that_refuses_everything_gives_no_answers(bench: Bench, tmp_path: Path) -> None:
    """No balance: nothing is known, nothing is wrong, and a later run asks again."""
    bench.behave({})
    bench.state.faults = Faults({"billing_409": True}, 0)
    only = ("token_outputs", "prompt", "save_ttl")
    with service_on(bench) as service:
        content = probed(service, tmp_path, only)
        assert {c for _, c in asked(content).values()} == {CANNOT_TELL}
        assert "balance" in content["answers"]["prompt_logprobs"]["evidence"]["reason"]
        bench.state.faults = Faults({}, 0)
        content = probed(service, tmp_path, only)
    assert not unsure(content, {})


# -- interruption ---------------------------------------------------------------------------------


def test_goes_on_where_it_was_interrupted(
    bench: Bench, service: ServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers before the interruption stay, its tokens count, what it left behind is deleted."""
    bench.behave({})
    only = ("token_outputs", "prompt", "save_ttl", "same_name")
    questions = chosen_questions(only)

    def interrupted(lab: Any) -> Verdict:
        run = lab.training.training_run_cuid
        lab.leave_behind(run)
        lab.training.save_state("probe-unlimited-state-x").result()
        lab.logprobs([])  # counts nothing, fails: the SDK takes no empty call
        raise AssertionError("not reached")

    def ctrl_c(*_: Any) -> None:
        raise KeyboardInterrupt

    broken = [
        replace(q, ask=interrupted, bound=(500, 0, 0)) if q.name == "save_ttl" else q
        for q in questions
    ]
    options = ProbeOptions(tmp_path / "probe.json", "test", MODEL, only=only)
    with monkeypatch.context() as patched:
        patched.setattr("probe.measure.Lab.logprobs", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            ask_all(service, options, broken, lambda line: None)
    first = json.loads(options.out.read_text(encoding="utf-8"))
    assert list(first["answers"]) == ["token_outputs", "prompt_logprobs"]
    assert first["leftover_run"] and first["tokens"]["prefill"] >= 500
    assert [c for c in bench.state.store.listed() if c.name == "probe-unlimited-state-x"]
    content = probed(service, tmp_path, only)
    assert not [c for c in bench.state.store.listed() if c.name == "probe-unlimited-state-x"]
    assert content["leftover_run"] is None
    assert content["tokens"]["prefill"] >= first["tokens"]["prefill"]
    for name, entry in first["answers"].items():
        assert content["answers"][name] == entry
    assert not errors_of(content, {}) and not unsure(content, {})


def test_a_file_of_another_probe_is_not_continued(
    bench: Bench, service: ServiceClient, tmp_path: Path
) -> None:
    bench.behave({})
    content = probed(service, tmp_path, ("limits",))
    content["model"] = "another/model-1B"
    (tmp_path / "probe.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match="give another --out"):
        probed(service, tmp_path, ("limits",))


REPORT = {"schema": 1, "answers": {}, "tokens": {"prefill": 0, "sample": 0, "train": 0}}
DAMAGED = [
    REPORT | {"tokens": {"prefill": -1_000_000, "sample": 0, "train": 0}},  # a budget without end
    REPORT | {"tokens": {"prefill": 0}},
    REPORT | {"tokens": None},
    REPORT | {"answers": []},
    REPORT | {"answers": {"top_k": "before"}},
    REPORT | {"answers": {"top_k": {"answer": "before"}}},
    REPORT | {"model": 7},
    REPORT | {"leftover_run": "../../x"},
]


@pytest.mark.parametrize("text", ["{", "[]", "{}", "[" * 100_000, *map(json.dumps, DAMAGED)])
def test_a_file_of_something_else_is_not_overwritten(
    text: str, service: ServiceClient, tmp_path: Path
) -> None:
    (tmp_path / "probe.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="no probe's file"):
        probed(service, tmp_path, ("limits",))
    assert (tmp_path / "probe.json").read_text(encoding="utf-8") == text


def test_nothing_without_expiry_is_left(
    bench: Bench, service: ServiceClient, tmp_path: Path
) -> None:
    bench.behave({})
    known = {c.cuid for c in bench.state.store.listed()}
    probed(service, tmp_path, ("save_ttl", "same_name", "resume", "snapshot"))
    left = [c for c in bench.state.store.listed() if c.cuid not in known]
    assert left and all(c.expires is not None for c in left)
    assert max(c.expires - c.created for c in left) <= 900


# -- the file -------------------------------------------------------------------------------------

HAND = {"schema": 1, "answers": {"reduction.ppo": "sum", "clip.ppo": [0.7, None], "save_ttl": 60}}
BAD_FILES = [
    ('{"schema": 1, "answers": {"save_ttl": 1' + "0" * 400 + "}}", "takes a number of 0 or more"),
    ("{", "is not JSON"),
    ("{}", "no `answers`"),
    ('{"schema": 2, "answers": {}}', "schema 2"),
    ('{"schema": 1, "answers": {"reduction.ppo": "mean"}}', "reduction.ppo takes one of"),
    ('{"schema": 1, "answers": {"reduction.pop": "sum"}}', "no setting 'reduction.pop'"),
    ('{"schema": 1, "answers": {"mismatch": -1}}', "mismatch takes a number"),
    ('{"schema": 1, "answers": {"clip.ppo": 0.2}}', "clip.ppo takes [low, high]"),
    ('{"schema": 1, "answers": {"clip_keys": ["a"]}}', "clip_keys takes the names"),
]


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "like.json"
    path.write_text(json.dumps(HAND), encoding="utf-8")
    behaviour, limits = read_like(path)
    assert behaviour.reduction == {"ppo": "sum"}
    assert behaviour.clip == {"ppo": (0.7, math.inf)}
    assert (behaviour.save_ttl, limits) == (60, {})
    assert behaviour.taken == HAND["answers"]


@pytest.mark.parametrize(("text", "reason"), BAD_FILES)
def test_a_bad_file_is_refused_in_one_line(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "like.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        read_like(path)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_only_sure_answers_are_taken(tmp_path: Path) -> None:
    """And none that this backend cannot imitate."""
    answers = {
        "reduction.ppo": {"answer": "sum", "confidence": "low"},
        "reduction.cispo": {"answer": "samples", "confidence": "high"},
        "reduction.dro": {"answer": SOMETHING_ELSE, "confidence": "high"},
        "top_k": {"answer": None, "confidence": CANNOT_TELL},
        "event_order": {"answer": "in order", "confidence": "high"},
        "limits": {"answer": {"max_batch_size": 7, "max_seq_len": 9}, "confidence": "high"},
    }
    path = tmp_path / "probe.json"
    path.write_text(json.dumps({"schema": 1, "answers": answers}), encoding="utf-8")
    behaviour, limits = read_like(path)
    assert behaviour.reduction == {"cispo": "samples"}
    assert behaviour.taken == {"reduction.cispo": "samples", "limits": limits}
    assert limits == {"max_batch_size": 7}


def test_the_audit_cites_a_probe() -> None:
    joined: Any = SimpleNamespace(trace=SimpleNamespace(header={"like": {"reduction.ppo": "sum"}}))
    assert probed_divisors(joined, ["ppo", "dro"]).endswith("with --like divide ppo by sum")
    assert probed_divisors(joined, ["cispo"]) == ""


def test_the_audit_leaves_out_what_a_probe_has_settled() -> None:
    every = cannot_tell(())
    assert len(every) == 3 and cannot_tell(["reduction.ppo"]) == every
    assert cannot_tell(["mismatch", *LOSS_QUESTIONS]) == every[2:]


def test_settings_and_questions_have_the_same_names() -> None:
    names = [question.name for question in QUESTIONS]
    assert len(names) == len(set(names))
    assert set(SETTINGS) - set(names) == {"trainer_noise"}


# -- the command ----------------------------------------------------------------------------------

SCRIPT = """
import pytrio as trio
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3-4B-Instruct-2507", rank=4)
row = trio.Datum(model_input=trio.ModelInput.from_ints([40, 41, 42]), loss_fn_inputs={
    "target_tokens": [41, 42, 43], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3})
training.forward_backward([row], "ppo").result()
training.optim_step(trio.AdamParams(learning_rate=1e-4)).result()
service._runtime.shutdown()
"""


@pytest.mark.slow
def test_probe_and_like_through_the_command(tmp_path: Path) -> None:
    """A backend set by hand is probed, and a run behaves as the probe found."""
    settings = {"token_stop": "not in tokens", "unknown_keys": "ignored", "save_ttl": 3600}
    like = tmp_path / "like.json"
    like.write_text(json.dumps({"schema": 1, "answers": settings}), encoding="utf-8")
    only = "limits,token_stop,unknown_keys,save_ttl"
    done = dryrun("probe", "--like", like, "--only", only, "--out", "found.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert not errors_of(content, settings) and not unsure(content, settings)
    assert content["model"] == MODEL and content["target"].startswith("local backend")
    assert "answers.md: Are unknown loss_fn_config keys refused?" in done.stdout
    (tmp_path / "loop.py").write_text(SCRIPT, encoding="utf-8")
    run = dryrun("run", "--like", "found.json", "--respell", 0, "loop.py", folder=tmp_path)
    assert run.returncode in (0, 2), run.stderr
    lines = [line for line in run.stderr.splitlines() if "--like (found.json" in line]
    assert len(lines) == 1 and "decides limits, token_stop, unknown_keys, save_ttl" in lines[0]
    assert "still assumed: reduction.cross_entropy" in lines[0]


def test_two_divisors_at_once_are_refused(tmp_path: Path) -> None:
    like = {"schema": 1, "answers": {"reduction.ppo": "sum"}}
    (tmp_path / "like.json").write_text(json.dumps(like), encoding="utf-8")
    (tmp_path / "loop.py").write_text("", encoding="utf-8")
    command = ["run", "--like", "like.json", "--reduction", "samples", "loop.py"]
    done = dryrun(*command, folder=tmp_path)
    assert done.returncode == 3 and "leave --reduction out" in done.stderr


@dataclass
class Listener:
    """A port that counts who comes."""

    url: str
    visits: list[Any]


@pytest.fixture
def listener() -> Iterator[Listener]:
    server = socket.create_server(("127.0.0.1", 0))
    found = Listener(f"http://127.0.0.1:{server.getsockname()[1]}", [])

    def accept() -> None:
        while True:
            try:
                connection, address = server.accept()
            except OSError:
                return
            found.visits.append(address)
            connection.close()

    threading.Thread(target=accept, daemon=True).start()
    yield found
    server.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cloud", "--price", "1,2,3"), "nothing was sent"),
        (("--cloud", "--price", "1,2,3", "--ask"), "nothing was sent"),
        (("--cloud", "--i-agree-to-pay"), "--cloud needs --price"),
        (("--i-agree-to-pay",), "goes with --cloud"),
    ],
)
def test_nothing_is_sent_without_consent(
    options: tuple[str, ...], said: str, listener: Listener, tmp_path: Path
) -> None:
    """The cloud's address is a port that counts its visitors; all others are looked up in vain."""
    guard = SKILL / "scripts" / "trio_local" / "guard"
    environment = {
        "PYTRIO_BASE_URL": listener.url,
        "PYTRIO_API_KEY": KEY,
        "PYTHONPATH": str(guard),
        "TRIO_DRYRUN_BLOCKED": "pytrio.com,pytrio.cn",
    }
    done = dryrun("probe", *options, folder=tmp_path, **environment)
    assert done.returncode == 3 and said in done.stderr
    assert listener.visits == []
    assert not (tmp_path / "probe.json").exists()
    if options[1:2] == ("--price",):
        assert "upper bound of the cost at 1, 2, 3 a million: " in done.stdout
        assert "reduction.ppo" in done.stdout and "forward_backward" in done.stdout


@pytest.mark.slow
def test_with_consent_the_named_service_is_asked(backend: Backend, tmp_path: Path) -> None:
    """A backend on this machine stands in for the cloud."""
    environment = {"PYTRIO_BASE_URL": backend.url, "PYTRIO_API_KEY": KEY, "HOME": str(tmp_path)}
    options = ("--cloud", "--i-agree-to-pay", "--price", "1,2,3", "--only", "limits,token_outputs")
    done = dryrun("probe", *options, folder=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert "upper bound" in done.stdout
    content = json.loads((tmp_path / "probe.json").read_text(encoding="utf-8"))
    assert content["target"] == "cloud"
    assert content["answers"]["limits"]["answer"]["max_batch_size"] == 256


def test_the_local_probe_cannot_leave(tmp_path: Path) -> None:
    """Its asking process refuses another address, and ends at a look-up or a connection."""
    done = dryrun("probe", "--ask", folder=tmp_path, PYTRIO_BASE_URL="https://pytrio.com")
    assert done.returncode == 3 and "127.0.0.1 only" in done.stderr
    for call in ("getaddrinfo('example.com', 80)", "create_connection(('192.0.2.1', 80), 1)"):
        code = (
            f"import sys; sys.path.insert(0, {str(SKILL / 'scripts')!r})\n"
            "import socket, probe.cli\nprobe.cli.forbid_all_but_loopback()\n"
            f"socket.{call}\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
        assert ended.returncode == cli.FORBIDDEN_STATUS, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_command_continues(number: int, tmp_path: Path) -> None:
    """Ctrl-C or kill -9 in the middle; the same command answers the rest and repeats nothing."""
    only = "limits,token_o,mismatch,fresh,temp,top,prompt,same_seed,event,two,reduction.cross"
    command = [sys.executable, str(DRYRUN), "probe", "--only", only]
    path, asked_for = tmp_path / "probe.json", len(chosen_questions(tuple(only.split(","))))
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert wait_for(lambda: answered(path) >= 4)
    process.send_signal(number)
    assert process.wait(30) == (130 if number == signal.SIGINT else -number)
    first = json.loads(path.read_text(encoding="utf-8"))
    assert 4 <= len(first["answers"]) < asked_for
    done = dryrun("probe", "--only", only, folder=tmp_path, seconds=400)
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text(encoding="utf-8"))
    assert len(content["answers"]) == asked_for
    for name, entry in first["answers"].items():
        assert content["answers"][name] == entry
    assert not errors_of(content, {}) and not unsure(content, {})
    assert sum(first["tokens"].values()) <= sum(content["tokens"].values()) < 60_000


def answered(path: Path) -> int:
    try:
        return len(json.loads(path.read_text(encoding="utf-8"))["answers"])
    except (OSError, ValueError):
        return 0


def wait_for(is_so: Callable[[], bool], seconds: float = 200.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not is_so():
        time.sleep(0.1)
    return is_so()
