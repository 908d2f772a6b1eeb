"""The trainer's mathematics through the real SDK, against plain torch autograd.

A gradient is read off an optimiser step: with beta1 = beta2 = weight decay = 0 AdamW moves a
weight by -lr * g / (|g| + eps), which is -MAGNIFY * g to within |g| / eps.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from peft import PeftModel
from pytrio import AdamParams, Datum, ModelInput, PyTrioError, ServiceClient, TrainingClient
from pytrio.client import training_batch

import dryrun
from conftest import Backend, start_backend
from helpers import (
    BASE_MODEL,
    Tensors,
    adapted_model,
    adapter_tensors,
    downloaded,
    logprobs_of,
    random_sequences,
    saved_adapter,
    service_on,
    supervised_datum,
    train_step,
)
from trio_local.losses import REDUCTIONS, divisor

IGNORED = -100
TOLERANCE = 1e-4
EPS, MAGNIFY = 1e6, 1e4
READING_STEP = AdamParams(
    learning_rate=EPS * MAGNIFY, beta1=0.0, beta2=0.0, eps=EPS, weight_decay=0.0
)
LENGTHS = (5, 17, 40, 30, 23)

POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro")
LOSS_NAMES = ("cross_entropy", *POLICY_LOSSES)

# What each `--reduction` divides by, written down a second time: samples, active tokens (target
# not ignored, and for cross_entropy a weight), or tokens with an advantage.
ACTIVE = dict.fromkeys(LOSS_NAMES, "active")
DIVISORS: dict[str, dict[str, str]] = {
    "default": {**ACTIVE, "dro": "advantage"},
    "sum": dict.fromkeys(LOSS_NAMES, "one"),
    "samples": dict.fromkeys(LOSS_NAMES, "samples"),
    "active_tokens": ACTIVE,
    "advantage_tokens": {**dict.fromkeys(POLICY_LOSSES, "advantage"), "cross_entropy": "active"},
}


@dataclass(frozen=True)
class Row:
    """One training sample; every list has the length of `tokens`."""

    tokens: list[int]
    targets: list[int]
    weights: list[float]
    old_logprobs: list[float]
    advantages: list[float]

    def datum(self, loss: str) -> Datum:
        inputs: dict[str, Any] = {"target_tokens": self.targets}
        if loss == "cross_entropy":
            inputs["weights"] = self.weights
        else:
            inputs |= {"logprobs": self.old_logprobs, "advantages": self.advantages}
        return Datum(model_input=ModelInput.from_ints(self.tokens), loss_fn_inputs=inputs)


# -- formulas, written again and differently -------------------------------------------------------


def token_losses(
    loss: str, row: Row, logprobs: torch.Tensor, config: dict[str, float] | None = None
) -> torch.Tensor:
    """Per-token losses [positions] of one row; ignored targets give zero."""
    settings = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "beta": 0.05}
    settings |= config or {}
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    old, advantages = torch.tensor(row.old_logprobs), torch.tensor(row.advantages)
    ratio = (logprobs - old).exp()
    if loss == "cross_entropy":
        values = -logprobs * torch.tensor(row.weights)
    elif loss == "importance_sampling":
        values = -ratio * advantages
    elif loss == "ppo":
        # A gain stops counting above `high`, a loss stops counting below `low`.
        bounded = torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low))
        values = -bounded * advantages
    elif loss == "cispo":
        values = -ratio.detach().clamp(low, high) * advantages * logprobs
    else:
        penalty = settings["beta"] / 2 * (logprobs - old).square()
        values = penalty - advantages * logprobs
    return torch.stack(
        [v if t != IGNORED else v.new_zeros(()) for v, t in zip(values, row.targets, strict=True)]
    )


def row_logprobs(model: PeftModel, row: Row) -> torch.Tensor:
    targets = [0 if target == IGNORED else target for target in row.targets]
    return logprobs_of(model, row.tokens, targets)


def loss_total(
    model: PeftModel, rows: list[Row], loss: str, config: dict[str, float] | None = None
) -> torch.Tensor:
    """Summed loss of all rows, each run alone and unpadded."""
    return torch.stack(
        [token_losses(loss, row, row_logprobs(model, row), config).sum() for row in rows]
    ).sum()


def count_of(what: str, rows: list[Row], loss: str) -> int:
    """The divisor called `what`, counted by hand."""
    tokens = [
        (weight, advantage)
        for row in rows
        for target, weight, advantage in zip(row.targets, row.weights, row.advantages, strict=True)
        if target != IGNORED
    ]
    return {
        "one": 1,
        "samples": len(rows),
        "active": sum(loss != "cross_entropy" or weight != 0 for weight, _ in tokens),
        "advantage": sum(advantage != 0 for _, advantage in tokens),
    }[what]


def gradients_of(model: PeftModel, total: torch.Tensor) -> Tensors:
    """Gradient of `total` by every adapter tensor, under the names of a checkpoint."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(total, list(named.values()))
    return {
        name.replace(".default", ""): gradient
        for name, gradient in zip(named, gradients, strict=True)
    }


def divisor_of(rows: list[Row], loss: str, reduction: str = "default") -> int:
    return max(1, count_of(DIVISORS[reduction][loss], rows, loss))


def expected_gradients(
    model: PeftModel, rows: list[Row], loss: str, config: dict[str, float] | None = None
) -> Tensors:
    """What one call leaves under the default reduction."""
    return gradients_of(model, loss_total(model, rows, loss, config) / divisor_of(rows, loss))


def divided(gradients: Tensors, divisor: float) -> Tensors:
    return {name: gradient / divisor for name, gradient in gradients.items()}


def assert_gradients(measured: Tensors, expected: Tensors, tolerance: float = TOLERANCE) -> None:
    """Every tensor agrees to `tolerance` of its own norm; a zero gradient is exactly zero."""
    assert measured.keys() == expected.keys()
    assert any(gradient.norm() > 0 for gradient in expected.values())
    for name, gradient in expected.items():
        error = float((measured[name] - gradient).norm())
        assert error <= tolerance * float(gradient.norm()), (name, error, float(gradient.norm()))


# -- fixtures --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """A checkpoint with non-zero B matrices, and the same weights in plain torch."""

    path: str
    adapter: Tensors
    model: PeftModel


@pytest.fixture(scope="module")
def service(backend: Backend) -> Iterator[ServiceClient]:
    with service_on(backend) as opened:
        yield opened


@pytest.fixture(scope="module")
def start(service: ServiceClient, tmp_path_factory: pytest.TempPathFactory) -> Start:
    client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3)
    data = [supervised_datum(tokens) for tokens in random_sequences(1, LENGTHS)]
    train_step(client, data, learning_rate=1e-3)
    path = client.save_state("start").result().path
    folder = downloaded(service, path, tmp_path_factory.mktemp("start"))
    adapter = adapter_tensors(folder)
    assert all(tensor.norm() > 0 for tensor in adapter.values())
    return Start(path, adapter, adapted_model(folder, is_trainable=True))


@pytest.fixture(scope="module")
def rows(start: Start) -> list[Row]:
    """Unequal lengths, weights and advantages of both signs, ratios inside and outside the clip,
    some tokens masked in each of the three ways."""
    return make_rows(start.model, seed=2, lengths=LENGTHS)


@pytest.fixture(scope="module")
def sum_gradients(start: Start, rows: list[Row]) -> dict[str, Tensors]:
    """Undivided autograd gradients of `rows`, by loss."""
    return {
        loss: gradients_of(start.model, loss_total(start.model, rows, loss)) for loss in LOSS_NAMES
    }


def make_rows(model: PeftModel, seed: int, lengths: tuple[int, ...]) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for tokens in random_sequences(seed, [n + 1 for n in lengths]):
        length = len(tokens) - 1
        with torch.no_grad():
            logprobs = logprobs_of(model, tokens[:-1], tokens[1:])
        weights = torch.randn(length, generator=generator)
        advantages = torch.randn(length, generator=generator)
        old = logprobs + 0.4 * torch.randn(length, generator=generator)
        targets = tokens[1:]
        targets[1], weights[2], advantages[3] = IGNORED, 0.0, 0.0
        made.append(Row(tokens[:-1], targets, weights.tolist(), old.tolist(), advantages.tolist()))
    return made


def read_gradients(
    service: ServiceClient, start: Start, folder: Path, backward: Callable[[TrainingClient], None]
) -> Tensors:
    """Gradients that `backward` leaves in a fresh client on the starting weights."""
    client = service.create_training_client_from_state(start.path)
    backward(client)
    client.optim_step(READING_STEP).result()
    after = saved_adapter(service, client, "after", folder)
    return {name: (before - after[name]) / MAGNIFY for name, before in start.adapter.items()}


def gradients_through_sdk(
    service: ServiceClient,
    start: Start,
    folder: Path,
    rows: list[Row],
    loss: str,
    config: dict[str, Any] | None = None,
) -> Tensors:
    data = [row.datum(loss) for row in rows]
    return read_gradients(
        service, start, folder, lambda c: c.forward_backward(data, loss, config).result()
    )


# -- gradients -------------------------------------------------------------------------------------


def negative(rows: list[Row]) -> list[Row]:
    """Only negative signal, which a loop sends to unlearn."""
    return [
        replace(
            row,
            weights=[-abs(weight) for weight in row.weights],
            advantages=[-abs(advantage) for advantage in row.advantages],
        )
        for row in rows
    ]


def with_masked_rows(rows: list[Row]) -> list[Row]:
    """One row without weights and advantages, one with nothing but ignored targets."""
    silent = replace(
        rows[0], weights=[0.0] * len(rows[0].tokens), advantages=[0.0] * len(rows[0].tokens)
    )
    ignored = replace(rows[2], targets=[IGNORED] * len(rows[2].tokens))
    return [silent, rows[1], ignored, *rows[3:]]


CASES = {"mixed": list, "negative": negative, "masked": with_masked_rows}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_gradients_equal_autograd(
    service: ServiceClient, start: Start, rows: list[Row], tmp_path: Path, loss: str, case: str
) -> None:
    chosen = CASES[case](rows)
    measured = gradients_through_sdk(service, start, tmp_path, chosen, loss)
    assert_gradients(measured, expected_gradients(start.model, chosen, loss))


def test_a_call_without_any_signal_leaves_zero_gradients(
    service: ServiceClient, start: Start, rows: list[Row]
) -> None:
    """Weights 0 everywhere, advantages 0 everywhere, or targets ignored everywhere."""
    silent = [
        replace(row, weights=[0.0] * len(row.tokens), advantages=[0.0] * len(row.tokens))
        for row in rows
    ]
    ignored = [replace(row, targets=[IGNORED] * len(row.tokens)) for row in rows]
    client = service.create_training_client_from_state(start.path)
    # dro's penalty needs no advantage, so only ignored targets silence it.
    calls = [(loss, silent) for loss in LOSS_NAMES if loss != "dro"]
    calls += [(loss, ignored) for loss in LOSS_NAMES]
    for loss, chosen in calls:
        data = [row.datum(loss) for row in chosen]
        metrics = client.forward_backward(data, loss).result().metrics
        assert metrics == {"loss_sum": 0.0, "loss_mean": 0.0, "token_count": 0}, loss
        assert client.optim_step(READING_STEP).result().metrics["grad_norm"] == 0.0, loss


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_what_stands_at_ignored_targets_does_not_matter(
    service: ServiceClient,
    start: Start,
    rows: list[Row],
    sum_gradients: dict[str, Tensors],
    tmp_path: Path,
    loss: str,
) -> None:
    """An old log-probability of -1e4 there overflows the ratio; nothing of it may leak."""
    padded = [
        replace(
            row,
            old_logprobs=[
                -1e4 if target == IGNORED else old
                for target, old in zip(row.targets, row.old_logprobs, strict=True)
            ],
        )
        for row in rows
    ]
    measured = gradients_through_sdk(service, start, tmp_path, padded, loss)
    assert_gradients(measured, divided(sum_gradients[loss], divisor_of(rows, loss)))


# -- divisors and split calls ----------------------------------------------------------------------

SMALL_LIMITS = ("--max-batch-size", "2", "--max-tokens", "64")
# One of the backends also makes the SDK split its calls: totals are of the whole call.
REDUCED_BACKENDS: dict[str, tuple[str, ...]] = {"sum": (), "advantage_tokens": SMALL_LIMITS}


@dataclass(frozen=True)
class Reduced:
    """A backend with a `--reduction` of its own, on the store of the shared one."""

    name: str
    backend: Backend
    service: ServiceClient


@pytest.fixture(scope="module", params=REDUCED_BACKENDS)
def reduced(
    request: pytest.FixtureRequest, backend: Backend, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reduced]:
    name = request.param
    options = ("--reduction", name, *REDUCED_BACKENDS[name])
    running = start_backend(tmp_path_factory.mktemp(name), *options, store=backend.store)
    with service_on(running) as opened:
        yield Reduced(name, running, opened)
    running.stop()


def assert_divisors(
    service: ServiceClient, start: Start, rows: list[Row], sums: dict[str, Tensors], reduction: str
) -> None:
    """For every loss, the gradient's norm is that of the summed loss over the divisor."""
    client = service.create_training_client_from_state(start.path)
    for loss in LOSS_NAMES:
        client.forward_backward([row.datum(loss) for row in rows], loss).result()
        measured = client.optim_step(AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
        norm = float(torch.stack([gradient.norm() for gradient in sums[loss].values()]).norm())
        expected = norm / divisor_of(rows, loss, reduction)
        assert measured == pytest.approx(expected, rel=TOLERANCE), loss


def test_divisors_of_the_default_reduction(
    service: ServiceClient, start: Start, rows: list[Row], sum_gradients: dict[str, Tensors]
) -> None:
    counts = {count_of(what, rows, "cross_entropy") for what in ("one", "samples", "active")}
    counts |= {count_of(what, rows, "dro") for what in ("active", "advantage")}
    # Weights and advantages have as many zeros, so two of the five numbers agree.
    assert len(counts) == 4, "the data must tell the divisors apart"
    assert_divisors(service, start, rows, sum_gradients, "default")


def test_divisors_of_other_reductions(
    reduced: Reduced, start: Start, rows: list[Row], sum_gradients: dict[str, Tensors]
) -> None:
    assert_divisors(reduced.service, start, rows, sum_gradients, reduced.name)


def test_the_table_of_divisors(rows: list[Row]) -> None:
    """All of them, those without a backend above included, and the command line offers them."""
    assert set(REDUCTIONS) == set(dryrun.REDUCTIONS) == set(DIVISORS)
    for reduction, loss in itertools.product(DIVISORS, LOSS_NAMES):
        totals = {
            "total_samples": len(rows),
            "total_active_tokens": count_of("active", rows, loss),
            "total_advantage_tokens": count_of("advantage", rows, loss),
        }
        assert divisor(loss, reduction, totals) == divisor_of(rows, loss, reduction)
        assert divisor(loss, reduction, dict.fromkeys(totals, 0)) == 1


@pytest.mark.parametrize("reduced", ["advantage_tokens"], indirect=True)
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_a_split_call_has_the_gradients_of_the_whole(
    reduced: Reduced,
    start: Start,
    rows: list[Row],
    sum_gradients: dict[str, Tensors],
    tmp_path: Path,
    loss: str,
) -> None:
    events_before = len(backward_events(reduced.backend))
    measured = gradients_through_sdk(reduced.service, start, tmp_path, rows, loss)
    sizes = [len(event["data"]) for event in backward_events(reduced.backend)[events_before:]]
    assert sizes == [2, 1, 2], "two samples or 64 tokens a request"
    divisor = divisor_of(rows, loss, reduced.name)
    assert_gradients(measured, divided(sum_gradients[loss], divisor))


def backward_events(backend: Backend) -> list[dict[str, Any]]:
    """The forward_backward events in a backend's recording so far."""
    with (backend.record / "trace.msgpack").open("rb") as trace:
        records = list(msgpack.Unpacker(trace, raw=False))
    return [r for r in records if r.get("type", "").upper().endswith("FORWARD_BACKWARD")]


# -- custom losses ---------------------------------------------------------------------------------


def preference_loss(
    data: list[Datum], logprobs: list[torch.Tensor], config: dict[str, float]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Not a sum over tokens: a margin between two halves of the batch through a sigmoid, and a
    squared distance to the log-probabilities sent along."""
    totals = torch.stack([values.sum() for values in logprobs])
    half = len(data) // 2
    margin = config["beta"] * (totals[:half].sum() - totals[half:].sum())
    distances = [
        (values - torch.tensor(datum.loss_fn_inputs["logprobs"].data)).square().mean()
        for datum, values in zip(data, logprobs, strict=True)
    ]
    loss = torch.nn.functional.softplus(-margin) + torch.stack(distances).sum()
    return loss, {"margin": float(margin.detach())}


CUSTOM_CONFIG = {"beta": 0.01}


def custom_loss_case(
    service: ServiceClient, start: Start, rows: list[Row], folder: Path
) -> tuple[Tensors, Tensors, int]:
    """Gradients through the SDK and by autograd, and the number of tokens that got one."""
    data = [row.datum("ppo") for row in rows]

    def backward(client: TrainingClient) -> None:
        output = client.forward_backward_custom(data, preference_loss, CUSTOM_CONFIG).result()
        assert output.metrics["margin"] == pytest.approx(margin, rel=TOLERANCE)

    logprobs = []
    for row in rows:
        # An ignored target is reported as zero and never gets a gradient.
        kept = torch.tensor([target != IGNORED for target in row.targets])
        logprobs.append(row_logprobs(start.model, row) * kept)
    loss, metrics = preference_loss(data, logprobs, CUSTOM_CONFIG)
    margin = metrics["margin"]
    with_gradient = sum(target != IGNORED for row in rows for target in row.targets)
    measured = read_gradients(service, start, folder, backward)
    return measured, gradients_of(start.model, loss), with_gradient


@pytest.mark.parametrize("reduced", ["sum"], indirect=True)
def test_custom_loss_equals_autograd_under_sum(
    reduced: Reduced, start: Start, rows: list[Row], tmp_path: Path
) -> None:
    measured, expected, _ = custom_loss_case(reduced.service, start, rows, tmp_path)
    assert_gradients(measured, expected)


def test_custom_loss_is_divided_by_its_tokens_by_default(
    service: ServiceClient, start: Start, rows: list[Row], tmp_path: Path
) -> None:
    measured, expected, tokens = custom_loss_case(service, start, rows, tmp_path)
    assert_gradients(measured, divided(expected, tokens))


# -- metrics and settings --------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_reported_numbers(service: ServiceClient, start: Start, rows: list[Row], loss: str) -> None:
    """loss_sum over all tokens; token_count of those with a weight or an advantage; their ratio."""
    client = service.create_training_client_from_state(start.path)
    data = [row.datum(loss) for row in rows]
    output = client.forward(data, loss).result()
    with torch.no_grad():
        total = float(loss_total(start.model, rows, loss))
        logprobs = [row_logprobs(start.model, row) for row in rows]
    count = count_of("active" if loss == "cross_entropy" else "advantage", rows, loss)
    assert output.metrics["loss_sum"] == pytest.approx(total, rel=TOLERANCE)
    assert output.metrics["token_count"] == count
    assert output.metrics["loss_mean"] == pytest.approx(total / count, rel=TOLERANCE)
    for row, own, sample in zip(rows, logprobs, output.loss_fn_outputs, strict=True):
        kept = torch.tensor([target != IGNORED for target in row.targets])
        served = torch.tensor(sample["logprobs"].data)
        torch.testing.assert_close(served, own * kept, atol=1e-4, rtol=0)
    assert client.forward_backward(data, loss).result().metrics == output.metrics


SETTINGS: dict[str, tuple[str, dict[str, float]]] = {
    "ppo narrow": ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}),
    "ppo low alone": ("ppo", {"clip_low_threshold": 0.99}),
    "cispo wide": ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 3.0}),
    "cispo high alone": ("cispo", {"clip_high_threshold": 1.01}),
    "dro strong": ("dro", {"beta": 2.0}),
    "dro off": ("dro", {"beta": 0.0}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_change_the_loss_as_the_formula_says(
    service: ServiceClient,
    start: Start,
    rows: list[Row],
    sum_gradients: dict[str, Tensors],
    tmp_path: Path,
    name: str,
) -> None:
    loss, config = SETTINGS[name]
    measured = gradients_through_sdk(service, start, tmp_path, rows, loss, config)
    expected = expected_gradients(start.model, rows, loss, config)
    assert_gradients(measured, expected)
    by_default = divided(sum_gradients[loss], divisor_of(rows, loss))
    assert any((by_default[n] - g).norm() > 0.01 * g.norm() for n, g in expected.items())


REFUSED_SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("cross_entropy", {"label_smoothing": 0.1}, "no setting 'label_smoothing'"),
    ("importance_sampling", {"beta": 0.1}, "no setting 'beta'"),
    ("ppo", {"clip_range": 0.2}, "settings it reads: clip_low_threshold, clip_high_threshold"),
    ("cispo", {"clip_low_threshold": 1.2, "clip_high_threshold": 0.8}, "got 1.2 and 0.8"),
    ("ppo", {"clip_low_threshold": -0.1}, "0 <= low <= high"),
    ("ppo", {"clip_high_threshold": "1.2"}, "clip_high_threshold must be a finite number"),
    ("ppo", {"clip_high_threshold": True}, "clip_high_threshold must be a finite number"),
    ("ppo", {"clip_high_threshold": math.inf}, "clip_high_threshold must be a finite number"),
    ("dro", {"beta": math.nan}, "beta must be a finite number"),
    ("dro", {"beta": None}, "beta must be a finite number"),
]


def test_bad_settings_are_refused_and_leave_no_gradient(
    service: ServiceClient, start: Start, rows: list[Row]
) -> None:
    client = service.create_training_client_from_state(start.path)
    for loss, config, message in REFUSED_SETTINGS:
        data = [rows[0].datum(loss)]
        for call in (client.forward, client.forward_backward):
            with pytest.raises(PyTrioError) as refused:
                call(data, loss, config).result()
            assert message in refused.value.message, (loss, config)
    assert client.optim_step(READING_STEP).result().metrics["grad_norm"] == 0.0


def test_unknown_loss_is_refused(
    service: ServiceClient, start: Start, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the SDK, and by the backend should an SDK one day know more losses than it does."""
    client = service.create_training_client_from_state(start.path)
    data = [row.datum("ppo") for row in rows]
    with pytest.raises(ValueError, match="Unsupported loss function type: gspo"):
        client.forward_backward(data, "gspo")
    schemas = training_batch.LOSS_INPUT_SCHEMAS
    monkeypatch.setitem(schemas, "gspo", schemas["ppo"])
    with pytest.raises(PyTrioError, match="unknown loss 'gspo'; known: cross_entropy,"):
        client.forward_backward(data, "gspo").result()


def test_a_loss_that_overflows_is_refused(
    service: ServiceClient, start: Start, rows: list[Row]
) -> None:
    """The message names the loss, and the gradient of the call is gone."""
    client = service.create_training_client_from_state(start.path)
    wild = replace(rows[0], old_logprobs=[-1e4] * len(rows[0].tokens))
    data = [row.datum("ppo") for row in (wild, rows[1])]
    with pytest.raises(PyTrioError, match="ppo gave a loss of .*; gradients dropped"):
        client.forward_backward(data, "ppo").result()
    assert client.optim_step(READING_STEP).result().metrics["grad_norm"] == 0.0


# -- optimiser -------------------------------------------------------------------------------------

ADAM_SETTINGS: dict[str, dict[str, float]] = {
    "plain": {"eps": 1e-7, "grad_clip_norm": 1e3},
    "decay and clipping": {
        "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "grad_clip_norm": 0.05,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ADAM_SETTINGS)
def test_five_optimiser_steps_equal_torch(
    service: ServiceClient, start: Start, tmp_path: Path, name: str
) -> None:
    settings = AdamParams(learning_rate=3e-4, **ADAM_SETTINGS[name])
    folder = downloaded(service, start.path, tmp_path / "start")
    client = service.create_training_client_from_state(start.path)
    model = adapted_model(folder, is_trainable=True)
    trained = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    for step in range(5):
        rows = make_rows(start.model, seed=10 + step, lengths=LENGTHS)
        client.forward_backward([row.datum("cross_entropy") for row in rows]).result()
        norm = client.optim_step(settings).result().metrics["grad_norm"]
        gradients = expected_gradients(model, rows, "cross_entropy")
        for n, parameter in trained.items():
            parameter.grad = gradients[n]
        limit = settings.grad_clip_norm or math.inf
        expected_norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), limit))
        assert norm == pytest.approx(expected_norm, rel=TOLERANCE)
        assert (norm > limit) == (name == "decay and clipping")
        optimizer.step()
    after = saved_adapter(service, client, "five", tmp_path)
    for n, parameter in trained.items():
        moved = float((parameter.detach() - start.adapter[n]).norm())
        error = float((after[n] - parameter.detach()).norm())
        # Adam divides by the gradient's own size, which magnifies the rounding of small ones.
        assert error <= 3 * TOLERANCE * moved, (n, error, moved)


def test_gradients_accumulate_until_the_step_and_not_beyond(
    service: ServiceClient, start: Start, rows: list[Row], tmp_path: Path
) -> None:
    first, second = rows[:2], rows[2:]
    data = [[row.datum("cross_entropy") for row in part] for part in (first, second)]

    def both(client: TrainingClient) -> None:
        for part in data:
            client.forward_backward(part).result()

    def second_after_a_step(client: TrainingClient) -> None:
        client.forward_backward(data[0]).result()
        client.optim_step(AdamParams(learning_rate=0.0)).result()
        client.forward(data[0]).result()
        client.forward_backward(data[1]).result()

    of_first = expected_gradients(start.model, first, "cross_entropy")
    of_second = expected_gradients(start.model, second, "cross_entropy")
    summed = {name: of_first[name] + gradient for name, gradient in of_second.items()}
    assert_gradients(read_gradients(service, start, tmp_path / "both", both), summed)
    measured = read_gradients(service, start, tmp_path / "second", second_after_a_step)
    assert_gradients(measured, of_second)


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo", "dro"])
def test_auto_shift_equals_shifting_by_hand(
    service: ServiceClient, start: Start, rows: list[Row], tmp_path: Path, loss: str
) -> None:
    """Unshifted: targets are the inputs, and weights stand at the token they belong to."""
    unshifted = [replace(row, targets=row.tokens) for row in rows]
    by_hand = [
        Row(
            row.tokens[:-1],
            row.tokens[1:],
            row.weights[1:],
            row.old_logprobs[1:],
            row.advantages[1:],
        )
        for row in rows
    ]
    with torch.no_grad():
        # Old log-probabilities of these targets, so that ratios are near one.
        old = [row_logprobs(start.model, row) for row in by_hand]
    by_hand = [
        replace(row, old_logprobs=(logprobs + 0.1).tolist())
        for row, logprobs in zip(by_hand, old, strict=True)
    ]
    unshifted = [
        replace(row, old_logprobs=[0.0, *shifted.old_logprobs])
        for row, shifted in zip(unshifted, by_hand, strict=True)
    ]
    data = [row.datum(loss) for row in unshifted]
    outputs = []

    def backward(client: TrainingClient) -> None:
        outputs.append(client.forward_backward(data, loss, auto_shift=True).result())

    measured = read_gradients(service, start, tmp_path, backward)
    assert_gradients(measured, expected_gradients(start.model, by_hand, loss))
    count = count_of("active" if loss == "cross_entropy" else "advantage", by_hand, loss)
    assert outputs[0].metrics["token_count"] == count
    for sample, logprobs in zip(outputs[0].loss_fn_outputs, old, strict=True):
        served = torch.tensor(sample["logprobs"].data)
        torch.testing.assert_close(served[1:], logprobs, atol=1e-4, rtol=0)
        assert served[0] == 0
