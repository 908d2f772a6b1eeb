"""Pictures through the real SDK, against a plain forward pass of the folder that is served.

The reference goes another way than the backend: the class's own forward on placeholder ids, with
sequential positions on its three axes, one unpadded row at a time; visual tokens are counted by a
formula written down here.
"""

import base64
import io
import json
import math
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image
from pytrio import (
    AdamParams,
    Datum,
    ImageChunk,
    ModelInput,
    PyTrioError,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from pytrio.protocol.actor.events.event import EventStatus, EventType
from pytrio.types import EncodedTextChunk, SampleSequence
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from conftest import SKILL, Backend, start_backend
from helpers import (
    BASE_MODEL,
    adapter_tensors,
    downloaded,
    random_sequences,
    saved_adapter,
    service_on,
    train_step,
)
from test_examples import load
from test_losses import (
    Row,
    Start,
    assert_gradients,
    divisor_of,
    gradients_of,
    read_gradients,
    token_losses,
)
from trio_local.catalogue import ServedModel
from trio_local.loading import LoadedModel
from trio_local.protocol import ApiError
from trio_local.vision import MAX_BYTES, opened
from wire import Run, Wire, forward_payload

VL = SKILL / "scripts" / "trio_local" / "weights" / "vl"
TOLERANCE = 1e-4
PLACEHOLDER = 2050
FACTOR, FEWEST, MOST = 16, 32 * 32, 128 * 128  # pixels of a token's side and of a resized picture
PARAMS = SamplingParams(max_tokens=6, temperature=1.0, seed=3)

# A prompt: texts as token ids, pictures as PNG.
Parts: TypeAlias = Sequence[list[int] | bytes]


# -- pictures and prompts --------------------------------------------------------------------------


def painted(seed: int, width: int = 48, height: int = 32) -> Image.Image:
    """A picture of coloured blocks; no two seeds give the same."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(seed: int, width: int = 48, height: int = 32) -> bytes:
    return encoded(painted(seed, width, height))


def tokens_at(width: int, height: int) -> int:
    """Visual tokens of a picture: both sides a multiple of 16, area between the two limits."""
    sides = [round(side / FACTOR) * FACTOR for side in (height, width)]
    if math.prod(sides) > MOST:
        shrink = math.sqrt(height * width / MOST)
        sides = [max(FACTOR, math.floor(s / shrink / FACTOR) * FACTOR) for s in (height, width)]
    elif math.prod(sides) < FEWEST:
        grow = math.sqrt(FEWEST / (height * width))
        sides = [math.ceil(s * grow / FACTOR) * FACTOR for s in (height, width)]
    return math.prod(sides) // FACTOR**2


def tokens_of(data: bytes) -> int:
    with Image.open(io.BytesIO(data)) as image:
        return tokens_at(*image.size)


def chunk_of(data: bytes, expected: int | None) -> ImageChunk:
    return ImageChunk(data=data, format="png", expected_tokens=expected)


def prompt_of(parts: Parts) -> ModelInput:
    """Parts as the SDK takes them, with our own counts."""
    return ModelInput(
        chunks=[
            chunk_of(part, tokens_of(part))
            if isinstance(part, bytes)
            else EncodedTextChunk(tokens=part)
            for part in parts
        ]
    )


def ids_of(parts: Parts) -> list[int]:
    """Token ids with a placeholder for each visual token."""
    ids: list[int] = []
    for part in parts:
        ids += [PLACEHOLDER] * tokens_of(part) if isinstance(part, bytes) else part
    return ids


def texts(seed: int, *lengths: int) -> list[list[int]]:
    return random_sequences(seed, lengths)


# -- the reference ---------------------------------------------------------------------------------


@cache
def processor() -> Any:
    return AutoImageProcessor.from_pretrained(VL, backend="pil", local_files_only=True)


def plain_model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(VL, dtype=torch.float32).eval()


def table_of(model: Any, parts: Parts) -> torch.Tensor:
    """Log-probabilities [positions, vocabulary] by the class's own forward."""
    ids = torch.tensor([ids_of(parts)])
    pictures = [Image.open(io.BytesIO(p)).convert("RGB") for p in parts if isinstance(p, bytes)]
    given = processor()(images=pictures, return_tensors="pt") if pictures else {}
    positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **given).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def expected_logprobs(model: Any, parts: Parts, answer: list[int]) -> list[float]:
    """What each token of an answer costs after the prompt."""
    with torch.no_grad():
        table = table_of(model, [*parts, answer])
    first = len(ids_of(parts)) - 1
    return table[torch.arange(first, first + len(answer)), torch.tensor(answer)].tolist()


# -- fixtures --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    running = start_backend(tmp_path_factory.mktemp("seeing"), "--model", "*=vl")
    yield running
    log = (running.record.parent / "backend.log").read_text(encoding="utf-8")
    running.stop()
    assert "Traceback" not in log, log[-3000:]


@pytest.fixture(scope="module")
def service(seeing: Backend) -> Iterator[ServiceClient]:
    with service_on(seeing, sampling_request_max_in_flight=128) as made:
        yield made


@pytest.fixture(scope="module")
def base(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(BASE_MODEL)


@pytest.fixture(scope="module")
def plain() -> Any:
    return plain_model()


@dataclass(frozen=True)
class Trained:
    """Weights away from the base: as checkpoints, and put together by peft alone."""

    start: Start
    folder: Path
    client: TrainingClient
    sampler: SamplingClient


@pytest.fixture(scope="module")
def trained(service: ServiceClient, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3)
    data = [next_token_datum([*texts(1, 9), png(1), *texts(2, 20)])]
    for _ in range(2):
        train_step(client, data, learning_rate=1e-3)
    path = client.save_state("start").result().path
    folder = downloaded(service, path, tmp_path_factory.mktemp("start"))
    model = PeftModel.from_pretrained(plain_model(), str(folder), is_trainable=True).eval()
    start = Start(path, adapter_tensors(folder), model)
    assert all(tensor.norm() > 0 for tensor in start.adapter.values())
    weights = client.save_weights_for_sampler("start").result().path
    return Trained(start, folder, client, service.create_sampling_client(BASE_MODEL, weights))


def next_token_datum(parts: Parts, expected: int | None = None) -> Datum:
    """Cross-entropy on the parts' own next tokens; a visual token's target is ignored. `expected`
    replaces the count of every picture, the targets have the length that follows from it."""
    assert isinstance(parts[-1], list)
    cut = [*parts[:-1], parts[-1][:-1]]
    if expected is None:
        targets = [t if t != PLACEHOLDER else -100 for t in ids_of(parts)[1:]]
        model_input = prompt_of(cut)
    else:
        chunks = [
            chunk_of(p, expected) if isinstance(p, bytes) else EncodedTextChunk(tokens=p)
            for p in cut
        ]
        model_input = ModelInput(chunks=chunks)
        targets = [7] * len(model_input)
    inputs: dict[str, Any] = {"target_tokens": targets, "weights": [1.0] * len(targets)}
    return Datum(model_input=model_input, loss_fn_inputs=inputs)


def refusal(call: Callable[[], Any]) -> PyTrioError:
    with pytest.raises(PyTrioError) as refused:
        call()
    return refused.value


def sampled(
    sampler: SamplingClient,
    prompts: Sequence[Parts],
    params: SamplingParams = PARAMS,
    num_samples: int = 1,
) -> list[list[SampleSequence]]:
    """Sequences of prompts that are under way together; the service counts as we do."""
    futures = [sampler.sample(prompt_of(parts), num_samples, params) for parts in prompts]
    answers = [future.result() for future in futures]
    for parts, answer in zip(prompts, answers, strict=True):
        assert answer.input_tokens == len(ids_of(parts))
    return [answer.sequences for answer in answers]


# -- 1: the same numbers as a plain forward --------------------------------------------------------

LAYOUTS: dict[str, Parts] = {
    "between texts": [*texts(10, 7), png(10), *texts(11, 12)],
    "picture first": [png(11, 64, 64), *texts(12, 9)],
    "picture last": [*texts(13, 11), png(12, 30, 90)],
    "only a picture": [png(13)],
    "two, side by side": [*texts(14, 4), png(14), png(15, 70, 20), *texts(15, 5)],
    "three apart": [png(16), *texts(16, 3), png(17, 100, 100), *texts(17, 3), png(18)],
    "the same twice": [png(19), *texts(18, 6), png(19), *texts(19, 4)],
    "text only": [*texts(20, 25)],
    "text in two chunks": [*texts(21, 5, 6)],
}


def test_sampled_logprobs_equal_a_plain_forward(trained: Trained) -> None:
    """All layouts in one batch, with an adapter; the trainer's forward agrees, too."""
    layouts = list(LAYOUTS.values())
    groups = sampled(trained.sampler, layouts, num_samples=2)
    data, expected = [], []
    for parts, group in zip(layouts, groups, strict=True):
        for sequence in group:
            wanted = expected_logprobs(trained.start.model, parts, sequence.tokens)
            assert sequence.logprobs == pytest.approx(wanted, abs=TOLERANCE), parts
            data.append(next_token_datum([*parts, sequence.tokens]))
            expected.append(wanted)
    outputs = trained.client.forward(data).result().loss_fn_outputs
    for wanted, output in zip(expected, outputs, strict=True):
        assert output["logprobs"].data[-len(wanted) :] == pytest.approx(wanted, abs=TOLERANCE)


def test_forward_equals_a_plain_forward_at_every_text_target(trained: Trained) -> None:
    """Also before, between and right after the pictures, and on the text that pictures precede."""
    rows = [[*parts, *texts(30 + i, 8)] for i, parts in enumerate(LAYOUTS.values())]
    outputs = trained.client.forward([next_token_datum(row) for row in rows]).result()
    for row, output in zip(rows, outputs.loss_fn_outputs, strict=True):
        targets = ids_of(row)[1:]
        with torch.no_grad():
            table = table_of(trained.start.model, row)[:-1]
        wanted = table[torch.arange(len(targets)), torch.tensor(targets)].tolist()
        wanted = [0.0 if t == PLACEHOLDER else w for t, w in zip(targets, wanted, strict=True)]
        assert output["logprobs"].data == pytest.approx(wanted, abs=TOLERANCE)


def test_what_is_seen_matters(base: SamplingClient, plain: Any) -> None:
    """Equal texts and equal numbers of tokens, batched together: only pictures tell them apart."""
    one, two, three = png(40), png(41), png(42)
    before, after = texts(41, 5, 8)
    seen = [one, two, one, three, two, one]
    prompts: list[Parts] = [[before, picture, after] for picture in seen]
    prompts += [[before, one, two, after], [before, two, one, after]]
    groups = sampled(base, prompts, num_samples=2)
    by_picture: dict[bytes, list[list[float]]] = {}
    for picture, group in zip(seen, groups, strict=False):
        by_picture.setdefault(picture, []).append([x for s in group for x in s.logprobs])
    for same in by_picture.values():
        assert all(numbers == pytest.approx(same[0], abs=1e-5) for numbers in same)
    different = [same[0] for same in by_picture.values()]
    different += [[x for s in group for x in s.logprobs] for group in groups[-2:]]
    for i, numbers in enumerate(different):
        for others in different[:i]:
            pairs = zip(numbers, others, strict=False)
            assert max(abs(a - b) for a, b in pairs) > 100 * TOLERANCE
    for parts, group in zip(prompts, groups, strict=True):
        for sequence in group:
            wanted = expected_logprobs(plain, parts, sequence.tokens)
            assert sequence.logprobs == pytest.approx(wanted, abs=TOLERANCE)


def test_text_alone_works_as_on_a_text_model(base: SamplingClient, plain: Any) -> None:
    prompt = texts(43, 12)[0]
    with torch.no_grad():
        table = table_of(plain, [prompt])
    wanted = table[torch.arange(11), torch.tensor(prompt[1:])].tolist()
    first, *served = base.compute_logprobs(ModelInput.from_ints(prompt)).result()
    assert first is None
    assert served == pytest.approx(wanted, abs=TOLERANCE)


# -- 2: gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["importance_sampling", "cross_entropy"])
def test_gradients_equal_autograd(
    service: ServiceClient, trained: Trained, tmp_path: Path, loss: str
) -> None:
    """Rows with none, one and two pictures in one call; their features may come from sampling."""
    start = trained.start
    layouts: list[Parts] = [
        [*texts(50, 6), png(50), *texts(51, 14)],
        [png(51, 64, 64), *texts(52, 3), png(52), *texts(53, 5)],
        [*texts(54, 17)],
        [*texts(55, 2), png(50), *texts(56, 30)],
    ]
    sampled(trained.sampler, layouts)
    generator = torch.Generator().manual_seed(5)
    rows, data, totals = [], [], []
    for parts in layouts:
        ids = ids_of(parts)
        targets = [t if t != PLACEHOLDER else -100 for t in ids[1:]]
        chosen = torch.tensor([max(t, 0) for t in targets])
        logprobs = table_of(start.model, parts)[:-1][torch.arange(len(targets)), chosen]
        weights, advantages, noise = torch.randn(3, len(targets), generator=generator)
        weights[1], advantages[-2] = 0.0, 0.0
        row = Row(
            ids[:-1],
            targets,
            weights.tolist(),
            (logprobs.detach() + 0.3 * noise).tolist(),
            advantages.tolist(),
        )
        rows.append(row)
        totals.append(token_losses(loss, row, logprobs).sum())
        last = parts[-1]
        assert isinstance(last, list)
        datum = row.datum(loss)
        data.append(
            Datum(
                model_input=prompt_of([*parts[:-1], last[:-1]]), loss_fn_inputs=datum.loss_fn_inputs
            )
        )
    expected = gradients_of(start.model, torch.stack(totals).sum() / divisor_of(rows, loss))
    measured = read_gradients(
        service, start, tmp_path, lambda client: client.forward_backward(data, loss).result()
    )
    assert_gradients(measured, expected)


# -- 3: counts and refusals ------------------------------------------------------------------------


def with_chunk(data: bytes, expected: int | None) -> ModelInput:
    before, after = texts(60, 4, 5)
    return ModelInput(
        chunks=[
            EncodedTextChunk(tokens=before),
            chunk_of(data, expected),
            EncodedTextChunk(tokens=after),
        ]
    )


def test_the_service_counts_visual_tokens_itself(base: SamplingClient) -> None:
    for width, height in ((48, 32), (64, 64), (200, 100), (4, 4), (1000, 1000), (700, 4)):
        data = png(60, width, height)
        prompt = with_chunk(data, None)
        answer = base.sample(prompt, 1, PARAMS).result()
        assert answer.input_tokens == 9 + tokens_at(width, height), (width, height)


@pytest.mark.parametrize("off", [-1, 1])
def test_a_wrong_count_is_refused(
    service: ServiceClient, base: SamplingClient, trained: Trained, off: int
) -> None:
    data = png(61, 64, 64)
    right, wrong = tokens_of(data), tokens_of(data) + off
    errors = [refusal(lambda: base.sample(with_chunk(data, wrong), 1, PARAMS).result())]
    datum = next_token_datum([*texts(61, 4), data, *texts(62, 5)], expected=wrong)
    errors.append(refusal(lambda: trained.client.forward([datum]).result()))
    for error in errors:
        words = error.message.replace(",", " ").split()
        assert {str(right), str(wrong), "expected_tokens"} <= set(words), error.message
    assert "sample 0" in errors[1].message
    # The refusals broke nothing.
    assert sampled(base, [[data]]) and trained.client.forward([datum_of_text()]).result()


def datum_of_text() -> Datum:
    return next_token_datum(texts(63, 6))


def test_a_text_model_refuses_pictures_and_says_how_to_serve_one(backend: Backend) -> None:
    with service_on(backend) as blind:
        sampler = blind.create_sampling_client(BASE_MODEL)
        client = blind.create_lora_training_client(BASE_MODEL, rank=4, seed=0)
        datum = next_token_datum([*texts(64, 4), png(62), *texts(65, 5)])
        for call in (
            lambda: sampler.sample(with_chunk(png(62), None), 1, PARAMS).result(),
            lambda: client.forward_backward([datum]).result(),
        ):
            message = refusal(call).message
            assert "--model '*=vl'" in message and "image" in message, message


def test_a_placeholder_in_text_is_refused(base: SamplingClient, trained: Trained) -> None:
    """Alone and beside a picture: the features would land in the wrong places."""
    tokens = [5, PLACEHOLDER, 6]
    beside: Parts = [png(63), tokens]
    for call in (
        lambda: base.sample(ModelInput.from_ints(tokens), 1, PARAMS).result(),
        lambda: base.sample(prompt_of(beside), 1, PARAMS).result(),
        lambda: trained.client.forward([next_token_datum([tokens, [7, 8]])]).result(),
        lambda: trained.client.forward([next_token_datum([*beside, [7, 8]])]).result(),
    ):
        message = refusal(call).message
        assert str(PLACEHOLDER) in message and "ImageChunk" in message, message


def test_the_sdk_refuses_prompt_logprobs_with_pictures(base: SamplingClient) -> None:
    prompt = with_chunk(png(64), 6)
    for call in (
        lambda: base.compute_logprobs(prompt).result(),
        lambda: base.sample(prompt, 1, PARAMS, include_prompt_logprobs=True).result(),
        lambda: base.sample(prompt, 1, PARAMS, topk_prompt_logprobs=2).result(),
    ):
        assert refusal(call).code == "validation.image_logprobs_unsupported"


# -- 4: bad pictures -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """Bytes and label of an image chunk; `may_pass` when some of its kind are readable, `whole` is
    what a truncated one was cut from."""

    name: str
    data: bytes
    label: str = "png"
    may_pass: bool = False
    whole: bytes = b""


def flipped(data: bytes, rng: random.Random, count: int) -> bytes:
    changed = bytearray(data)
    for _ in range(count):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def with_header_size(data: bytes, width: int, height: int) -> bytes:
    """A PNG whose header claims another size, checksum included."""
    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + data[24:29]
    return data[:12] + header + zlib.crc32(header).to_bytes(4, "big") + data[33:]


def bad_pictures() -> list[Bad]:
    rng = random.Random(0)
    image = painted(70, 40, 40)
    good, jpeg = encoded(image), encoded(image, "JPEG")
    noisy = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8))
    rich = encoded(noisy)
    made = [
        Bad(f"png {number} cut at {n}", whole[:n], may_pass=True, whole=whole)
        for number, whole, step in ((1, good, 7), (2, rich, 89))
        for n in [*range(1, len(whole) - 24, step), *range(len(whole) - 24, len(whole))]
    ]
    made += [Bad(f"jpeg cut at {n}", jpeg[:n], "jpeg") for n in range(1, len(jpeg) - 2, 23)]
    for n in (16, 33, 41, 60, 100):
        made.append(Bad(f"zeros after {n}", good[:n] + bytes(len(good) - n)))
        made.append(Bad(f"jpeg zeros after {n}", jpeg[:n] + bytes(200), "jpeg", may_pass=True))
    for n in range(40):
        made.append(Bad(f"flipped {n}", flipped(good, rng, 1 + n % 4), may_pass=True))
        made.append(Bad(f"flipped jpeg {n}", flipped(jpeg, rng, 1 + n % 4), "jpeg", may_pass=True))
    made += [Bad("png called jpeg", good, "jpeg"), Bad("jpeg called png", jpeg)]
    for kind in ("GIF", "BMP", "TIFF", "WEBP", "PPM", "ICO"):
        data = encoded(image, kind)
        made += [Bad(f"{kind} called {label}", data, label) for label in ("png", "jpeg")]
    sizes = [(1, 1), (3, 3), (3, 100), (20_000, 10), (9_000, 9_000), (5_000, 5_000), (4, 1_000)]
    made += [Bad(f"{w} x {h}", encoded(Image.new("1", (w, h)))) for w, h in sizes]
    bomb = encoded(Image.new("1", (20_000, 20_000)))
    made += [Bad("bomb", bomb), Bad("smaller bomb", encoded(Image.new("1", (10_000, 10_000))))]
    for w, h in ((0, 40), (40, 0), (2**31 - 1, 2**31 - 1), (2**31, 40), (2**32 - 1, 1), (41, 40)):
        made.append(Bad(f"header says {w} x {h}", with_header_size(good, w, h)))
    made.append(Bad("jpeg 20000 wide", encoded(Image.new("L", (20_000, 10)), "JPEG"), "jpeg"))
    made.append(Bad("CMYK jpeg", encoded(image.convert("CMYK"), "JPEG"), "jpeg"))
    frames: dict[str, Any] = {"save_all": True, "append_images": [painted(71, 40, 40)]}
    made.append(Bad("animated png", encoded(image, **frames)))
    made.append(Bad("animated gif", encoded(image, "GIF", **frames)))
    deep = np.linspace(0, 65535, 1600).astype(np.uint16).reshape(40, 40)
    made.append(Bad("16-bit grey", encoded(Image.fromarray(deep))))
    made.append(Bad("huge", good + bytes(MAX_BYTES)))
    made += [Bad(f"text {n}", text) for n, text in enumerate((b"x", b"<svg/>", b"{}" * 50, b"\0"))]
    made += [Bad(f"noise {n}", rng.randbytes(rng.randrange(1, 400))) for n in range(10)]
    made += [Bad(f"noisy body {n}", good[:41] + rng.randbytes(300)) for n in range(10)]
    made.append(Bad("empty", b""))
    return made


def raw_chunk(data: bytes, label: str, **more: Any) -> dict[str, Any]:
    text = base64.b64encode(data).decode("ascii")
    return {"type": "image", "data": text, "format": label, **more}


def ask_raw(run: Run, chunk: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and body of a sampling request with one raw image chunk after three tokens."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [10, 11, 12]}, chunk]}
    response = run.sample(prompt=prompt, return_token_logprobs=True)
    return response.status_code, json.loads(response.content)


def test_bad_pictures_are_refused_and_hurt_nothing(seeing: Backend, plain: Any) -> None:
    run = Wire(seeing.url).sampling_run()
    good = raw_chunk(png(72), "png")
    status, before = ask_raw(run, good)
    assert status == 200
    statuses: Counter[str] = Counter()
    cases = bad_pictures()
    for case in cases:
        status, answer = ask_raw(run, raw_chunk(case.data, case.label))
        if status != 200:
            assert 400 <= status < 500, (case.name, status, answer)
            assert set(answer["error"]) == {"code", "message"}, (case.name, answer)
            assert 0 < len(answer["error"]["message"]) < 400, (case.name, answer)
            statuses["refused"] += 1
            continue
        # Readable after all: Pillow says so, too, and it counts as what it is.
        assert case.may_pass, (case.name, answer)
        with Image.open(io.BytesIO(case.data)) as image:
            pixels = np.asarray(image.convert("RGB"))
            count = tokens_at(*image.size)
        if case.whole:
            # Nothing but the end mark, two checksums and the stream's last bits may be missing.
            assert len(case.whole) - len(case.data) <= 24, case.name
            with Image.open(io.BytesIO(case.whole)) as image:
                assert np.array_equal(pixels, np.asarray(image.convert("RGB"))), case.name
        assert answer["usage"]["input_tokens"] == 3 + count, case.name
        statuses["read"] += 1
    assert statuses["refused"] >= 200, statuses
    assert statuses["read"] >= 1, "else the rule for readable ones was never tried"
    # The repeated request has another stream unless it is seeded; `sample_body` seeds it.
    status, after = ask_raw(run, good)
    assert (status, after["sequences"]) == (200, before["sequences"])
    (sequence,) = after["sequences"]
    wanted = expected_logprobs(plain, [[10, 11, 12], png(72)], sequence["tokens"])
    assert sequence["logprobs"] == pytest.approx(wanted, abs=TOLERANCE)


def test_bad_image_chunks_are_refused(seeing: Backend) -> None:
    """What is wrong with the chunk, not with the picture."""
    run = Wire(seeing.url).sampling_run()
    good = raw_chunk(png(73), "png")
    counts = [0, -1, 1.5, "x", 10**9, 2**70, True, [], 7]
    damaged = [{**good, "expected_tokens": count} for count in counts]
    damaged += [{**good, "data": data} for data in ("", "*", "AAA", 5, None, [1], "\u00e9")]
    damaged += [{**good, "format": label} for label in ("gif", "PNG", "", None, 1)]
    damaged += [{**good, "type": kind} for kind in ("picture", "", None)]
    damaged += [{k: v for k, v in good.items() if k != name} for name in ("data", "format", "type")]
    damaged += [{**good, "unknown": 1}]
    for chunk in damaged:
        status, answer = ask_raw(run, chunk)
        assert 400 <= status < 500, (chunk, status)
        assert answer["error"]["message"]
    assert ask_raw(run, good)[0] == 200
    for changes in ({"data": b""}, {"format": "gif"}, {"expected_tokens": 0}):
        with pytest.raises(ValueError):
            ImageChunk(**{"data": b"x", "format": "png", **changes})


def test_bad_pictures_fail_a_training_event_alone(seeing: Backend) -> None:
    run = Wire(seeing.url).training_run()
    run.execute(EventType.TRAINER_INIT_RUN, run.init(), 1)
    names = ("png 1 cut at 50", "GIF called png", "3 x 3", "bomb", "animated png", "CMYK jpeg")
    chosen = [case for case in bad_pictures() if case.name in names]
    assert len(chosen) >= 5
    good = Bad("good", png(74))
    for index, case in enumerate([*chosen, good], start=2):
        # The SDK always sends a count in training.
        chunk = {"type": "image", "data": case.data, "format": case.label, "expected_tokens": 6}
        text = {"type": "encoded_text", "tokens": [5, 6]}
        payload = forward_payload([[5] * 9]).model_dump()
        payload["data"][0]["model_input"]["chunks"] = [text, chunk]
        checked = type(forward_payload([[5, 6]])).model_validate(payload)
        state = run.execute(EventType.TRAINER_FORWARD_BACKWARD, checked, index)
        if case is good:
            assert state.status is EventStatus.SUCCEEDED
            continue
        assert state.status is EventStatus.FAILED, case.name
        assert state.error.code == "invalid_image" and "sample 0" in state.error.message, state


def by_hand(colours: np.ndarray, alpha: np.ndarray) -> Image.Image:
    """Colours [rows, columns, 3] over white."""
    share = alpha[..., None] / 255.0
    over = np.round(colours * share + 255.0 * (1.0 - share))
    return Image.fromarray(over.astype(np.uint8))


def see_through() -> dict[str, tuple[bytes, Image.Image]]:
    """Pictures of other modes, and each in RGB as converted by hand; transparency is all or none,
    so that nothing is rounded."""
    rng = np.random.default_rng(5)
    colours = rng.integers(0, 256, (40, 56, 3), dtype=np.uint8)
    grey = colours[..., 0]
    grey_rgb = np.repeat(grey[..., None], 3, axis=2)
    alpha = (255 * rng.integers(0, 2, grey.shape)).astype(np.uint8)
    solid = np.full_like(alpha, 255)
    palette = rng.integers(0, 256, (16, 3), dtype=np.uint8)
    index = rng.integers(0, 16, grey.shape, dtype=np.uint8)
    indexed = Image.fromarray(index)
    indexed = indexed.convert("P")
    indexed.putdata(index.flatten().tolist())
    indexed.putpalette(palette.flatten().tolist())
    holed = np.where(index == 3, 0, 255).astype(np.uint8)
    bits = grey > 127
    bits_rgb = np.repeat(np.where(bits, 255, 0).astype(np.uint8)[..., None], 3, axis=2)
    red = colours.copy()
    red[:20] = (200, 10, 10)
    red_holes = np.where((red == (200, 10, 10)).all(axis=2), 0, 255).astype(np.uint8)
    rgba = Image.fromarray(np.dstack([colours, alpha]))
    two = Image.fromarray(np.dstack([grey, alpha]))
    made = {
        "RGBA": (encoded(rgba), by_hand(colours, alpha)),
        "LA": (encoded(two), by_hand(grey_rgb, alpha)),
        "L": (encoded(Image.fromarray(grey)), by_hand(grey_rgb, solid)),
        "P": (encoded(indexed), by_hand(palette[index], solid)),
        "P, a transparent entry": (
            encoded(indexed, transparency=3),
            by_hand(palette[index], holed),
        ),
        "1": (encoded(Image.fromarray(bits)), by_hand(bits_rgb, solid)),
        "RGB, a transparent colour": (
            encoded(Image.fromarray(red), transparency=(200, 10, 10)),
            by_hand(red, red_holes),
        ),
    }
    modes = {name: Image.open(io.BytesIO(data)).mode for name, (data, _) in made.items()}
    assert all(name.startswith(mode) for name, mode in modes.items()), modes
    return made


def test_other_modes_are_laid_on_white(trained: Trained) -> None:
    tail = texts(75, 6)[0]
    served = []
    for data, converted in see_through().values():
        rows: list[Parts] = [[data, tail], [encoded(converted), tail]]
        outputs = trained.client.forward([next_token_datum(row) for row in rows]).result()
        served.append([output["logprobs"].data[-5:] for output in outputs.loss_fn_outputs])
    for name, (first, second) in zip(see_through(), served, strict=True):
        assert first == pytest.approx(second, abs=1e-5), name
    for i, (first, _) in enumerate(served[:3]):
        assert all(first != pytest.approx(other, abs=1e-3) for other, _ in served[:i])


def test_partial_transparency_is_composited_on_white() -> None:
    rng = np.random.default_rng(6)
    colours = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    alpha = rng.integers(0, 256, (16, 16), dtype=np.uint8)
    read = opened(encoded(Image.fromarray(np.dstack([colours, alpha]))), "png", "here")
    difference = np.asarray(read, dtype=int) - np.asarray(by_hand(colours, alpha), dtype=int)
    assert read.mode == "RGB" and np.abs(difference).max() <= 1


# -- 5: independence of the batch ------------------------------------------------------------------


def test_a_picture_does_not_depend_on_its_company(base: SamplingClient, plain: Any) -> None:
    sizes = [(32, 32), (64, 64), (128, 128), (20, 100)]
    before, after = texts(80, 6, 7)
    late: Parts = [before, png(80, 56, 56), after]
    early: Parts = [before, png(81, 56, 56), after]
    others: list[Parts] = [
        [*texts(82 + i, 3 + 2 * i), png(82 + i, *sizes[i % 4]), *texts(120 + i, 4)]
        for i in range(16)
    ]
    (alone,) = sampled(base, [early])
    *_, early_among, late_among = sampled(base, [*others, early, late])
    (late_alone,) = sampled(base, [late])
    for parts, one, other in ((early, alone, early_among), (late, late_alone, late_among)):
        assert one[0].tokens == other[0].tokens
        assert one[0].logprobs == pytest.approx(other[0].logprobs, abs=1e-5)
        wanted = expected_logprobs(plain, parts, one[0].tokens)
        assert one[0].logprobs == pytest.approx(wanted, abs=1e-5)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel(ServedModel("Qwen/Qwen3.5-4B", "vl", VL, VL), "cpu")


def test_features_do_not_depend_on_order_and_stand_in_their_places(loaded: LoadedModel) -> None:
    """Bit for bit, computed first, last or again; everything else is the text's embedding."""
    eye = loaded.eye
    pictures = [eye.read(chunk_of(png(90 + i, 30 + 20 * i, 60), None), "here") for i in range(5)]
    first = [eye.features(picture).clone() for picture in pictures]
    eye.seen.clear()
    again = [eye.features(picture).clone() for picture in reversed(pictures)]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))
    row = [3, *[PLACEHOLDER] * pictures[0].tokens, 4, *[PLACEHOLDER] * pictures[1].tokens, 5]
    other = [6, *[PLACEHOLDER] * pictures[2].tokens]
    other += [0] * (len(row) - len(other))
    tokens = torch.tensor([row, other])
    given = loaded.decoder_input(tokens, pictures[:3])["inputs_embeds"]
    table = loaded.model.get_input_embeddings().weight
    one, two, three = (picture.tokens for picture in pictures[:3])
    wanted = [
        torch.cat([table[[3]], first[0], table[[4]], first[1], table[[5]]]),
        torch.cat([table[[6]], first[2], table[[0] * (len(row) - 1 - three)]]),
    ]
    assert one + two + 3 == len(row)
    assert torch.equal(given, torch.stack(wanted))


def test_read_input_names_the_chunk(loaded: LoadedModel) -> None:
    """Text and good pictures before the bad one do not hide it."""
    chunks = prompt_of([[5, 6], png(95), [7]]).chunks
    tokens, pictures = loaded.read_input(chunks, "the prompt")
    assert tokens == ids_of([[5, 6], png(95), [7]]) and len(pictures) == 1
    with pytest.raises(ApiError) as refused:
        loaded.read_input([*chunks, chunk_of(b"x", None)], "the prompt")
    assert "the prompt, chunk 3" in str(refused.value)


# -- 6: checkpoints --------------------------------------------------------------------------------


def test_a_run_resumes_as_if_unbroken(service: ServiceClient, tmp_path: Path) -> None:
    data = [next_token_datum([*texts(100, 5), png(100), *texts(101, 12)])]
    adam = AdamParams(learning_rate=1e-3)
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    train_step(client, data, learning_rate=1e-3)
    path = client.save_state("half").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    adapters = []
    for number, runner in enumerate((client, resumed)):
        runner.forward_backward(data).result()
        runner.optim_step(adam).result()
        adapters.append(saved_adapter(service, runner, f"end{number}", tmp_path))
    unbroken, continued = adapters
    assert unbroken.keys() == continued.keys()
    assert all(torch.equal(tensor, continued[name]) for name, tensor in unbroken.items())
    weights = resumed.save_weights_for_sampler("last").result().path
    parts: Parts = [*texts(102, 4), png(101), *texts(103, 4)]
    of_weights = sampled(service.create_sampling_client(BASE_MODEL, weights), [parts])
    assert of_weights == sampled(client.save_weights_and_get_sampling_client(), [parts])


def test_adapters_leave_the_vision_tower_alone(trained: Trained) -> None:
    names = list(trained.start.adapter)
    assert not [name for name in names if "visual" in name or "merger" in name]
    layers = [name for name in names if ".language_model.layers." in name]
    assert layers and len(names) - len(layers) in (0, 2)  # at most the head's pair besides
    config = json.loads((trained.folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert not [name for name in config["target_modules"] if "visual" in name]


# -- 7: the example --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example() -> Any:
    return load("vision-grpo.py")


@pytest.fixture(scope="module")
def prompter(example: Any, base: SamplingClient) -> Any:
    return example.Prompter(base.get_tokenizer())


def test_sample_rows(example: Any) -> None:
    rows = example.sample_rows(300)
    assert rows == example.sample_rows(300)
    assert example.sample_rows(20) == rows[:20]
    labels: dict[str, set[int]] = {}
    for row in rows:
        assert row.png.startswith(b"\x89PNG")
        with Image.open(io.BytesIO(row.png)) as image:
            assert (image.size, image.mode) == ((64, 64), "RGB")
        assert len(row.choices) == 4
        labels.setdefault(row.subject, set()).add(row.label)
    assert len(labels) == 4 and all(found == {0, 1, 2, 3} for found in labels.values())


def test_no_sample_is_in_both_splits(example: Any) -> None:
    train, held_out = example.load_rows(example.Config(data="sample", eval_rows=64))
    assert len(held_out) == 64 and len(train) >= 200
    assert not {(r.png, r.subject) for r in train} & {(r.png, r.subject) for r in held_out}


def test_datums_line_up(example: Any, prompter: Any, trained: Trained) -> None:
    """Token t of the answer is the target at the position that reads everything before it; the
    trainer's log-probabilities there are those of sampling."""
    row = example.sample_rows(3)[2]
    item = prompter.item(row)
    before, picture, after = item.prompt.chunks
    assert (picture.data, picture.format) == (row.png, "png")
    parts: Parts = [before.tokens, row.png, after.tokens]
    tokenizer = prompter.tokenizer
    text = tokenizer.decode([*before.tokens, *after.tokens])
    assert text.count("<|vision_start|><|vision_end|>") == 1
    assert row.subject in text and f"D. {row.choices[3]}" in text
    assert len(item.prompt) == len(ids_of(parts)) == len(before.tokens) + 16 + len(after.tokens)
    length = len(item.prompt)

    groups = example.sample(trained.sampler, tokenizer, [item], 2, PARAMS)
    one_token = [100]
    single = example.Completion(one_token, [-1.0], "length", "", 0.0)
    for completion in (*groups[0], single):
        datum = example.build_datum(item, completion, -0.5)
        answer = completion.tokens
        assert len(datum.model_input) == length + len(answer) - 1
        given = [t for c in datum.model_input.chunks[3:] for t in c.tokens]
        assert list(datum.model_input.chunks[:3]) == [before, picture, after]
        assert given == answer[:-1]
        fields = {k: list(v.data) for k, v in datum.loss_fn_inputs.items()}
        assert fields["target_tokens"][length - 1 :] == answer
        assert fields["logprobs"][length - 1 :] == pytest.approx(completion.logprobs)
        assert fields["advantages"] == [0.0] * (length - 1) + [-0.5] * len(answer)
        output = trained.client.forward([datum], "importance_sampling").result()
        if completion is not single:
            served = output.loss_fn_outputs[0]["logprobs"].data[length - 1 :]
            assert served == pytest.approx(completion.logprobs, abs=TOLERANCE)

    datum = example.build_sft_datum(tokenizer, item)
    weights, targets = (
        list(datum.loss_fn_inputs[name].data) for name in ("weights", "target_tokens")
    )
    learnt = [t for t, w in zip(targets, weights, strict=True) if w]
    letter = "ABCD"[row.label]
    assert tokenizer.decode(learnt).endswith(f"\\boxed{{{letter}}}<|im_end|>")
    assert weights == [0.0] * (length - 1) + [1.0] * len(learnt)
    whole = ids_of(parts) + learnt
    assert targets[length - 1 :] == whole[length:] and len(datum.model_input) == len(whole) - 1


def test_prompter_counts_as_the_service_does(prompter: Any, base: SamplingClient) -> None:
    sizes = [(4, 4), (4, 700), (33, 47), (64, 64), (129, 127), (640, 31), (1023, 700), (17, 300)]
    for number, (width, height) in enumerate(sizes):
        data = png(110 + number, width, height)
        count = prompter.visual_tokens(data)
        assert count == tokens_at(width, height), (width, height)
        answer = base.sample(ModelInput(chunks=[chunk_of(data, None)]), 1, PARAMS).result()
        assert answer.input_tokens == count, (width, height)


REWARDS = [
    (r"\boxed{C}", "C", 1.0),
    (r"\boxed{d}", "D", 1.0),
    ("\\boxed{\n A\t}", "A", 1.0),
    (r"\boxed {A}", "A", 1.0),
    (r"\boxed{A.}", "A", 1.0),
    (r"<think>a</think> no <think>\boxed{B}</think>\boxed{A}", "A", 1.0),
    (r"<think>\boxed{A}</think> and nothing", "A", 0.0),
    (r"</think><think>\boxed{A}", "A", 0.0),
    (r"\boxed{A}\boxed{B}\boxed{C}", "A", 0.0),
    (r"\boxed{A or B}", "A", 0.0),
    (r"\boxed{\text{A}}", "B", 0.0),
    (r"boxed{A}", "A", 0.0),
    (r"\fbox{A}", "A", 0.0),
    (r"\boxed{1}", "A", 0.0),
    (r"\boxed{}", "A", 0.0),
    (r"\boxed{{A}", "B", 0.0),
    (r"\boxed{A" + "}" * 3, "A", 1.0),
    ("", "A", 0.0),
    (r"\boxed{" * 2000, "A", 0.0),
]


@pytest.mark.parametrize(("completion", "letter", "reward"), REWARDS)
def test_reward(example: Any, completion: str, letter: str, reward: float) -> None:
    assert example.reward_of(completion, letter) == reward


@pytest.mark.parametrize("filler", [" ", "\n", "x ", "{", "\\boxed "])
def test_no_completion_takes_long_to_judge(example: Any, filler: str) -> None:
    """A model that falls into repeating itself must not stop the loop."""
    completion = r"\boxed{" + filler * 1_500
    start = time.process_time()
    assert example.reward_of(completion, "A") == 0.0
    assert not example.has_box(completion)
    assert time.process_time() - start < 0.5


def test_check_reward_needs_nothing(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = example.Config(check_reward=True, data="missing.jsonl")
    example.main(config)
    assert "tricky answers" in capsys.readouterr().out
    monkeypatch.setattr(example, "reward_of", lambda completion, letter: 1.0)
    with pytest.raises(SystemExit, match="scores 1.0, not 0.0"):
        example.main(config)


def write_rows(folder: Path, changes: dict[int, dict[str, Any]]) -> Path:
    """Six rows with image files beside them; `changes` replace fields of some."""
    lines = []
    for number in range(6):
        name = f"picture {number}.png"
        (folder / name).write_bytes(png(130 + number, 60, 40))
        row = {"image": name, "subject": f"Which, {number}?", "choices": list("wxyz"), "label": 1}
        lines.append(json.dumps(row | changes.get(number, {})))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path


def test_jsonl_with_image_files(example: Any, tmp_path: Path) -> None:
    red = np.zeros((40, 60, 4), dtype=np.uint8)
    red[:, :30] = (200, 0, 0, 255)
    Image.fromarray(red).save(tmp_path / "clear.png")
    painted(150, 2000, 500).save(tmp_path / "large.jpg")
    painted(151, 60, 40).convert("P").save(tmp_path / "palette.gif")
    painted(152, 60, 40).convert("L").save(tmp_path / "grey.webp", lossless=True)
    names = ["clear.png", "large.jpg", "palette.gif", "grey.webp"]
    path = write_rows(tmp_path, {i: {"image": name} for i, name in enumerate(names)})
    rows = example.read_jsonl(path, 100)
    read = [Image.open(io.BytesIO(row.png)) for row in rows]
    assert [(image.format, image.mode) for image in read] == [("PNG", "RGB")] * 6
    assert [image.size for image in read] == [(60, 40), (100, 25), *[(60, 40)] * 4]
    colours = [read[0].getpixel((x, 20)) for x in (5, 50)]
    assert colours == [(200, 0, 0), (255, 255, 255)]
    indexed = painted(151, 60, 40).convert("P").convert("RGB")
    assert np.array_equal(np.asarray(read[2]), np.asarray(indexed))
    grey = painted(152, 60, 40).convert("L").convert("RGB")
    assert np.abs(np.asarray(read[3], int) - np.asarray(grey, int)).max() <= 3
    assert [(row.subject, row.choices, row.label) for row in rows] == [
        (f"Which, {number}?", tuple("wxyz"), 1) for number in range(6)
    ]
    train, held_out = example.load_rows(example.Config(data=str(path), max_side=100))
    assert (len(train), len(held_out)) == (5, 1) and {*train, *held_out} == {*rows}


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"image": "absent.png"}, "absent.png"),
    ({"image": "cut.png"}, "line 3"),
    ({"image": "notes.txt"}, "line 3"),
    ({"image": "."}, "line 3"),
    ({"image": None}, "line 3"),
    ({"image": "nul\0.png"}, "line 3"),
    ({"label": 4}, "label from 0 to 3"),
    ({"label": "B"}, "label from 0 to 3"),
    ({"label": None}, "label from 0 to 3"),
    ({"choices": list("wxy")}, "4 choices"),
    ({"choices": "wxyz"}, "4 choices"),
    ({"subject": 5}, "subject"),
]


@pytest.mark.parametrize(("changes", "named"), BROKEN)
def test_a_broken_row_is_one_line(
    example: Any, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    (tmp_path / "cut.png").write_bytes(png(140)[:60])
    (tmp_path / "notes.txt").write_text("no picture")
    path = write_rows(tmp_path, {2: changes})
    with pytest.raises(SystemExit) as ended:
        example.load_rows(example.Config(data=str(path)))
    line = str(ended.value)
    assert line.startswith("vision-grpo: ") and "\n" not in line
    assert f"{path} line 3" in line and named in line


# Bombs are among the files; that the example refuses them is what is tested.
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_any_damaged_file_is_one_line(example: Any, tmp_path: Path) -> None:
    """Whatever Pillow raises for a file, it is named, or the file is readable."""
    path = write_rows(tmp_path, {2: {"image": "bad"}})
    refused = 0
    for case in bad_pictures():
        if len(case.data) > 10**6:
            continue
        (tmp_path / "bad").write_bytes(case.data)
        try:
            example.read_jsonl(path, 64)
        except SystemExit as ended:
            assert f"{path} line 3" in str(ended), case.name
            refused += 1
    assert refused > 100


def test_a_question_with_its_picture_is_in_one_split(example: Any, tmp_path: Path) -> None:
    """Also when its choices stand in another order: the answer would be known from training."""
    lines = []
    for number in range(20):
        (tmp_path / f"{number}.png").write_bytes(png(160 + number))
        for choices, label in (("wxyz", 1), ("xwyz", 0)):
            row = {"image": f"{number}.png", "subject": "Which?", "choices": list(choices)}
            lines.append(json.dumps({**row, "label": label}))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    train, held_out = example.load_rows(example.Config(data=str(path)))
    assert not {(r.png, r.subject) for r in train} & {(r.png, r.subject) for r in held_out}


# -- 8: any prompt ---------------------------------------------------------------------------------


def test_any_mixture_has_the_length_that_is_counted(base: SamplingClient, trained: Trained) -> None:
    """1 to 4 chunks, texts and pictures of any size, served in one batch and trained on."""
    rng = random.Random(8)
    prompts: list[list[list[int] | bytes]] = []
    for number in range(60):
        parts: list[list[int] | bytes] = []
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.5:
                parts += texts(rng.randrange(10**6), rng.randint(1, 20))
            else:
                size = [int(4 * 60 ** rng.random()) for _ in range(2)]
                parts.append(png(1000 + number, *size))
        prompts.append(parts)
    assert len({tuple(type(part) for part in parts) for parts in prompts}) >= 12
    short = SamplingParams(max_tokens=1, temperature=0)
    sampled(base, prompts, short)
    rows = [[*parts, [5, 6]] for parts in prompts[:20]]
    outputs = trained.client.forward([next_token_datum(row) for row in rows]).result()
    for row, output in zip(rows, outputs.loss_fn_outputs, strict=True):
        assert len(output["logprobs"].data) == len(ids_of(row)) - 1
