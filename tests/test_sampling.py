"""The sampler through the real SDK, against a plain forward pass of the same weights."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pytrio import (
    Datum,
    ModelInput,
    PyTrioError,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from pytrio.types import SampleResponse, SampleSequence

from conftest import Backend
from helpers import (
    BASE_MODEL,
    adapted_model,
    chat_prompt,
    downloaded,
    logprob_table,
    random_sequences,
    service_on,
    standin_model,
    supervised_datum,
    train_step,
)
from trio_local.sampler import SampleJob, SamplingSpec, Sequence, pick

TOLERANCE = 1e-4
# The SDK sends 16 requests at a time unless told otherwise.
IN_FLIGHT = 128
GREEDY = SamplingParams(max_tokens=24, temperature=0)
QUESTIONS = [
    "What is 3 plus 4?",
    "Name a colour.",
    "What is snow?",
    "Say hello.",
    "Tell me about a dog that lives in a house with seven other dogs.",
]
# An answer with a special token that ends no turn, so that it can be asked for as a stop.
TAUGHT_QUESTION = "Recite the marks."
TAUGHT_ANSWER = "one two <|im_start|> three four five"


def ask(
    sampler: SamplingClient, prompt: list[int], params: SamplingParams, **options: Any
) -> SampleResponse:
    return sampler.sample(ModelInput.from_ints(prompt), sampling_params=params, **options).result()


def ask_one(sampler: SamplingClient, prompt: list[int], params: SamplingParams) -> SampleSequence:
    return ask(sampler, prompt, params).sequences[0]


@pytest.fixture(scope="module")
def service(backend: Backend) -> Iterator[ServiceClient]:
    with service_on(backend, sampling_request_max_in_flight=IN_FLIGHT) as opened:
        yield opened


@dataclass(frozen=True)
class Trained:
    """Weights some steps away from the base, as trainer, as sampler and as a plain model."""

    client: TrainingClient
    state: str
    sampler: SamplingClient
    model: torch.nn.Module
    tokenizer: Any
    prompts: list[list[int]]
    taught_prompt: list[int]


@pytest.fixture(scope="module")
def trained(service: ServiceClient, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    client = service.create_lora_training_client(BASE_MODEL, rank=16, seed=5)
    tokenizer: Any = client.get_tokenizer()
    prompt = chat_prompt(tokenizer, TAUGHT_QUESTION)
    answer = tokenizer.encode(f"{TAUGHT_ANSWER}<|im_end|>", add_special_tokens=False)
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    for _ in range(40):
        train_step(client, [supervised_datum(prompt + answer, weights)], learning_rate=1e-3)
    state = client.save_state("trained").result().path
    weights_path = client.save_weights_for_sampler("trained").result().path
    folder = downloaded(service, weights_path, tmp_path_factory.mktemp("trained"))
    return Trained(
        client,
        state,
        client.create_sampling_client(weights_path),
        adapted_model(folder),
        tokenizer,
        [chat_prompt(tokenizer, question) for question in QUESTIONS],
        prompt,
    )


@pytest.fixture(scope="module")
def talkative(
    service: ServiceClient, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SamplingClient, torch.nn.Module]:
    """A sampler that never ends a turn, and the same weights as a plain model: negative weights
    on the ending tokens have taught it so."""
    client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=6)
    tokenizer: Any = client.get_tokenizer()
    data = [
        Datum(
            model_input=ModelInput.from_ints(tokens),
            loss_fn_inputs={"target_tokens": [end] * 30, "weights": [-1.0] * 30},
        )
        for tokens in random_sequences(13, [30] * 4)
        for end in (tokenizer.eos_token_id, tokenizer.pad_token_id)
    ]
    for _ in range(6):
        train_step(client, data, learning_rate=3e-3)
    path = client.save_weights_for_sampler("talkative").result().path
    folder = downloaded(service, path, tmp_path_factory.mktemp("talkative"))
    return client.create_sampling_client(path), adapted_model(folder)


@pytest.fixture(scope="module")
def base(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(BASE_MODEL)


@pytest.fixture(scope="module")
def plain() -> torch.nn.Module:
    return standin_model()


@pytest.fixture(scope="module")
def uncertain_prompt(plain: torch.nn.Module) -> list[int]:
    """Of some arbitrary prompts, the one whose next token is least certain."""
    candidates = random_sequences(seed=4, lengths=[6] * 40)
    return max(candidates, key=lambda tokens: entropy(next_probabilities(plain, tokens)))


@pytest.fixture(scope="module")
def undecided_prompt(plain: torch.nn.Module) -> list[int]:
    """One with a few likely next tokens, so that one more or less in a filter shows in counts."""

    def least_share(tokens: list[int]) -> float:
        kept = top_p_of(next_probabilities(plain, tokens), 0.6)
        return float(kept[kept > 0].min()) if (kept > 0).sum() >= 3 else 0.0

    return max(random_sequences(seed=14, lengths=[6] * 100), key=least_share)


@torch.no_grad()
def next_probabilities(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    return logprob_table(model, prompt)[-1].exp().double()


def entropy(probabilities: torch.Tensor) -> float:
    return float(torch.special.entr(probabilities).sum())


@torch.no_grad()
def continuation_table(
    model: torch.nn.Module, prompt: list[int], tokens: list[int]
) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] that the model gives at each generated position."""
    return logprob_table(model, prompt + tokens[:-1])[len(prompt) - 1 :]


def assert_logprobs(
    model: torch.nn.Module, prompt: list[int], sequence: SampleSequence, is_greedy: bool = False
) -> None:
    """One natural logarithm per token, of the untempered and unfiltered distribution; a greedy
    token is the model's best one, up to rounding."""
    assert len(sequence.logprobs) == len(sequence.tokens)
    table = continuation_table(model, prompt, sequence.tokens)
    expected = table[torch.arange(len(sequence.tokens)), torch.tensor(sequence.tokens)]
    assert sequence.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)
    if is_greedy:
        assert float((table.max(dim=-1).values - expected).max()) < TOLERANCE


def assert_same_greedy(
    model: torch.nn.Module, prompt: list[int], one: SampleSequence, other: SampleSequence
) -> None:
    """Equal, or parted where the model's two choices differ by no more than rounding."""
    if one.tokens == other.tokens:
        assert one.stop_reason == other.stop_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)
        return
    pairs = zip(one.tokens, other.tokens, strict=False)
    parting = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    assert parting is not None, "one is a part of the other"
    row = continuation_table(model, prompt, one.tokens[: parting + 1])[-1]
    assert abs(float(row[one.tokens[parting]] - row[other.tokens[parting]])) < TOLERANCE


# -- the same weights as the trainer ---------------------------------------------------------------


def test_sampled_logprobs_equal_a_forward_of_the_trainer(trained: Trained) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1)
    for prompt in trained.prompts:
        response = ask(trained.sampler, prompt, params, num_samples=4)
        data = [supervised_datum(prompt + s.tokens) for s in response.sequences]
        outputs = trained.client.forward(data).result().loss_fn_outputs
        for sequence, output in zip(response.sequences, outputs, strict=True):
            served = output["logprobs"].data[len(prompt) - 1 :]
            assert sequence.logprobs == pytest.approx(served, abs=TOLERANCE)
        assert response.output_tokens == sum(len(s.tokens) for s in response.sequences)
        assert response.input_tokens == len(prompt)


def test_an_old_sampler_keeps_its_weights(service: ServiceClient, trained: Trained) -> None:
    """Also after so many newer ones that its merged weights have left the memory."""
    client = service.create_training_client_from_state(trained.state)
    old = client.save_weights_and_get_sampling_client()
    prompt, params = trained.prompts[4], SamplingParams(max_tokens=16, temperature=1.0, seed=2)

    def drawn(sampler: SamplingClient) -> list[SampleSequence]:
        return ask(sampler, prompt, params, num_samples=4).sequences

    before = drawn(old)
    data = [supervised_datum(tokens) for tokens in random_sequences(6, [20, 30])]
    newer = []
    for step in range(10):
        train_step(client, data, learning_rate=1e-3)
        if step % 2:
            newer.append(client.save_weights_and_get_sampling_client())
    assert all(drawn(sampler) != before for sampler in newer)
    assert drawn(old) == before


def test_a_base_sampler_needs_no_checkpoint_and_equals_a_fresh_adapter(
    service: ServiceClient, base: SamplingClient, plain: torch.nn.Module, trained: Trained
) -> None:
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=9)
    fresh = client.save_weights_and_get_sampling_client()
    for prompt in trained.prompts:
        of_base, of_fresh = ask_one(base, prompt, GREEDY), ask_one(fresh, prompt, GREEDY)
        assert of_base == of_fresh
        assert_logprobs(plain, prompt, of_base, is_greedy=True)


# -- batching --------------------------------------------------------------------------------------


def mixed_requests(prompts: list[list[int]], count: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests that differ in prompt, length, temperature and filter."""
    variants = [
        SamplingParams(max_tokens=30, temperature=1.3, top_k=20),
        SamplingParams(max_tokens=9, temperature=0),
        SamplingParams(max_tokens=17, temperature=0.7, top_p=0.9),
    ]
    arbitrary = random_sequences(8, [3 + 5 * i for i in range(count)])
    return [
        ((prompts[i % len(prompts)] if i % 2 else arbitrary[i]), variants[i % 3])
        for i in range(count)
    ]


def test_greedy_output_does_not_depend_on_what_else_runs(trained: Trained) -> None:
    """Alone, among 20 others as futures, and among 20 others with asyncio."""
    requests = [(prompt, GREEDY) for prompt in trained.prompts]
    requests += mixed_requests(trained.prompts, 20)
    alone = [ask_one(trained.sampler, prompt, GREEDY) for prompt in trained.prompts]

    futures = [
        trained.sampler.sample(ModelInput.from_ints(prompt), sampling_params=params)
        for prompt, params in requests
    ]
    together = [future.result().sequences[0] for future in futures]

    async def gather() -> list[SampleResponse]:
        return await asyncio.gather(
            *(
                trained.sampler.sample_async(ModelInput.from_ints(prompt), sampling_params=params)
                for prompt, params in reversed(requests)
            )
        )

    gathered = [response.sequences[0] for response in reversed(asyncio.run(gather()))]
    for index, prompt in enumerate(trained.prompts):
        assert_logprobs(trained.model, prompt, alone[index], is_greedy=True)
        assert_same_greedy(trained.model, prompt, alone[index], together[index])
        assert_same_greedy(trained.model, prompt, alone[index], gathered[index])


def test_a_hundred_concurrent_requests_of_all_lengths(
    talkative: tuple[SamplingClient, torch.nn.Module],
) -> None:
    """1 to 200 new tokens: each is what the model alone would say, and some are asked alone."""
    sampler, model = talkative
    prompts = random_sequences(12, [2 + i % 37 for i in range(100)])
    params = [SamplingParams(max_tokens=1 + 199 * i // 99, temperature=0) for i in range(100)]
    futures = [
        sampler.sample(ModelInput.from_ints(prompt), sampling_params=chosen)
        for prompt, chosen in zip(prompts, params, strict=True)
    ]
    sequences = [future.result().sequences[0] for future in futures]
    for prompt, chosen, sequence in zip(prompts, params, sequences, strict=True):
        assert (len(sequence.tokens), sequence.stop_reason) == (chosen.max_tokens, "length")
        assert_logprobs(model, prompt, sequence, is_greedy=True)
    for index in range(5, 100, 20):
        alone = ask_one(sampler, prompts[index], params[index])
        assert_same_greedy(model, prompts[index], alone, sequences[index])


# -- seeds -----------------------------------------------------------------------------------------


def test_seeds(base: SamplingClient, uncertain_prompt: list[int]) -> None:
    def drawn(seed: int | None) -> list[SampleSequence]:
        params = SamplingParams(max_tokens=12, temperature=2.0, seed=seed)
        return ask(base, uncertain_prompt, params, num_samples=8).sequences

    def tokens(sequences: list[SampleSequence]) -> list[list[int]]:
        return [sequence.tokens for sequence in sequences]

    first = drawn(11)
    assert drawn(11) == first
    assert len({tuple(sequence.tokens) for sequence in first}) == 8
    assert all(a != b for a, b in zip(tokens(drawn(12)), tokens(first), strict=True))
    assert tokens(drawn(None)) != tokens(drawn(None))


def test_unseeded_sampling_repeats_between_backends_whatever_the_order_of_arrival(
    backend_factory: Callable[..., Backend], trained: Trained, uncertain_prompt: list[int]
) -> None:
    """Two fresh backends of one --seed; the second gets the requests in reverse."""
    hot = SamplingParams(max_tokens=8, temperature=2.0)
    requests = [(prompt, hot, 2) for prompt in [*trained.prompts, uncertain_prompt]]
    # The same prompt with other parameters, other numbers of samples, and thrice the same.
    requests += [
        (uncertain_prompt, SamplingParams(max_tokens=8, temperature=1.5), 2),
        (uncertain_prompt, SamplingParams(max_tokens=9, temperature=2.0, top_k=500), 2),
        (uncertain_prompt, SamplingParams(max_tokens=9, temperature=2.0, top_p=0.99), 2),
        (uncertain_prompt, hot, 3),
        (trained.prompts[0], hot, 2),
        (trained.prompts[0], hot, 2),
    ]

    def drawn(running: Backend, in_reverse: bool) -> list[list[list[int]]]:
        with service_on(running, sampling_request_max_in_flight=IN_FLIGHT) as service:
            sampler = service.create_sampling_client(BASE_MODEL)
            order = list(range(len(requests)))[:: -1 if in_reverse else 1]
            futures = {
                i: sampler.sample(
                    ModelInput.from_ints(requests[i][0]),
                    num_samples=requests[i][2],
                    sampling_params=requests[i][1],
                )
                for i in order
            }
            answers = [futures[i].result().sequences for i in range(len(requests))]
            return [[sequence.tokens for sequence in answer] for answer in answers]

    backends = [backend_factory("--seed", "7") for _ in range(2)]
    one, other = drawn(backends[0], False), drawn(backends[1], True)
    thrice = [0, len(requests) - 2, len(requests) - 1]
    for index in set(range(len(requests))) - set(thrice):
        assert one[index] == other[index], requests[index]
    # Equal requests cannot be told apart, but together they draw the same.
    assert sorted(one[i] for i in thrice) == sorted(other[i] for i in thrice)
    assert len({str(one[i]) for i in thrice}) == 3


# -- the distribution ------------------------------------------------------------------------------


def tempered(probabilities: torch.Tensor, temperature: float) -> torch.Tensor:
    powered = probabilities ** (1 / temperature)
    return powered / powered.sum()


def top_k_of(probabilities: torch.Tensor, k: int) -> torch.Tensor:
    kept = torch.zeros_like(probabilities)
    best = probabilities.topk(k).indices
    kept[best] = probabilities[best]
    return kept / kept.sum()


def top_p_of(probabilities: torch.Tensor, p: float) -> torch.Tensor:
    """The fewest most likely tokens that hold at least `p`."""
    kept, mass = torch.zeros_like(probabilities), 0.0
    for token in probabilities.argsort(descending=True).tolist():
        kept[token] = probabilities[token]
        mass += float(probabilities[token])
        if mass >= p:
            break
    return kept / kept.sum()


FILTERS: dict[str, tuple[dict[str, float], Callable[[torch.Tensor], torch.Tensor]]] = {
    "as it is": ({}, lambda p: p),
    "temperature": ({"temperature": 0.5}, lambda p: tempered(p, 0.5)),
    "top_k": ({"top_k": 3}, lambda p: top_k_of(p, 3)),
    "top_p": ({"top_p": 0.6}, lambda p: top_p_of(p, 0.6)),
    "all": (
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        lambda p: top_p_of(top_k_of(tempered(p, 0.7), 20), 0.8),
    ),
}


def surprise(counts: Counter[int], expected: torch.Tensor) -> float:
    """Chi-square of the counts as a standard normal deviate (Wilson and Hilferty), tokens
    expected fewer than five times taken as one."""
    total = sum(counts.values())
    common = torch.nonzero(expected * total >= 5)[:, 0].tolist()
    cells = [(counts[token], float(expected[token]) * total) for token in common]
    rest = total - sum(seen for seen, _ in cells), total - sum(due for _, due in cells)
    cells += [rest] if rest[1] >= 1 else []
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    freedom = len(cells) - 1
    centre = 1 - 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - centre) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("name", FILTERS)
def test_distribution(
    base: SamplingClient, plain: torch.nn.Module, undecided_prompt: list[int], name: str
) -> None:
    """Four thousand first tokens, a thousand a seed."""
    settings, transform = FILTERS[name]
    probabilities = next_probabilities(plain, undecided_prompt)
    expected = transform(probabilities)
    if len(settings) == 1 and name != "temperature":
        assert (expected > 0.01).sum() == (expected > 0).sum() >= 3, "the filter's edge must show"
    drawn: list[SampleSequence] = []
    for seed in range(4):
        params = SamplingParams(max_tokens=1, seed=seed, **settings)
        drawn += ask(base, undecided_prompt, params, num_samples=1000).sequences
    counts = Counter(sequence.tokens[0] for sequence in drawn)
    assert all(expected[token] > 0 for token in counts)
    assert abs(surprise(counts, expected)) < 5
    # What was left out changes the choice and not the reported log-probability.
    logprobs = torch.tensor([sequence.logprobs[0] for sequence in drawn], dtype=torch.float64)
    true = probabilities[torch.tensor([sequence.tokens[0] for sequence in drawn])].log()
    torch.testing.assert_close(logprobs, true, atol=TOLERANCE, rtol=0)


def test_distribution_over_unseeded_requests(
    base: SamplingClient, plain: torch.nn.Module, uncertain_prompt: list[int]
) -> None:
    """Equal requests without a seed are independent draws as well."""
    prompt = ModelInput.from_ints(uncertain_prompt)
    futures = [base.sample(prompt, 1, SamplingParams(max_tokens=1)) for _ in range(300)]
    counts = Counter(future.result().sequences[0].tokens[0] for future in futures)
    assert abs(surprise(counts, next_probabilities(plain, uncertain_prompt))) < 5


def test_tempered_and_filtered_sequences_report_true_logprobs(trained: Trained) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.5, top_k=3, top_p=0.6, seed=3)
    for prompt in trained.prompts:
        for sequence in ask(trained.sampler, prompt, params, num_samples=3).sequences:
            assert_logprobs(trained.model, prompt, sequence)
            table = continuation_table(trained.model, prompt, sequence.tokens)
            best = table.topk(3).indices
            assert all(t in row for t, row in zip(sequence.tokens, best.tolist(), strict=True))


def test_the_last_uniform_number_picks_a_token_that_was_not_filtered_out() -> None:
    """Just below one, a draw rounds to one in single precision."""
    spec = SamplingSpec(1, 1.0, 2, 1.0, None, frozenset(), ())
    job = SampleJob([1], spec, 1, False, 0, 0, finish=lambda _: None)
    logits = torch.tensor([[0.0, 3.0, 2.9, 0.0, 0.0, -1.0]])
    row = Sequence(job, torch.tensor([1 - 1e-12], dtype=torch.float64).numpy())
    assert pick(logits, torch.log_softmax(logits, dim=-1), [row]).tolist() == [2]


# -- stopping --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def taught(trained: Trained) -> SampleSequence:
    """The answer that was taught, up to the end of the turn."""
    return ask_one(trained.sampler, trained.taught_prompt, GREEDY)


def asked_to_stop(
    trained: Trained, stop: str | list[str] | list[int], max_tokens: int = 24
) -> SampleSequence:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, stop=stop)
    return ask_one(trained.sampler, trained.taught_prompt, params)


def assert_beginning(sequence: SampleSequence, whole: SampleSequence, length: int) -> None:
    """The first `length` tokens of `whole`, the last of them included with its log-probability."""
    assert sequence.tokens == whole.tokens[:length]
    assert sequence.logprobs == pytest.approx(whole.logprobs[:length], abs=TOLERANCE)
    assert sequence.stop_reason == "stop"


def test_the_end_of_the_turn_is_part_of_the_sequence(
    trained: Trained, taught: SampleSequence
) -> None:
    tokenizer = trained.tokenizer
    assert taught.tokens == tokenizer.encode(f"{TAUGHT_ANSWER}<|im_end|>", add_special_tokens=False)
    assert taught.tokens[-1] == tokenizer.eos_token_id
    assert taught.stop_reason == "stop"
    assert_logprobs(trained.model, trained.taught_prompt, taught)
    # `text` has no special tokens; the tokens say more.
    assert taught.text == TAUGHT_ANSWER.replace("<|im_start|>", "")


def test_stop_token_id(trained: Trained, taught: SampleSequence) -> None:
    tokens = taught.tokens
    where = next(i for i in range(2, len(tokens)) if tokens[i] not in tokens[:i])
    assert_beginning(asked_to_stop(trained, [tokens[where]]), taught, where + 1)


def test_special_token_as_a_stop_string(trained: Trained, taught: SampleSequence) -> None:
    special = trained.tokenizer.convert_tokens_to_ids("<|im_start|>")
    sequence = asked_to_stop(trained, "<|im_start|>")
    assert_beginning(sequence, taught, taught.tokens.index(special) + 1)
    assert sequence.text == TAUGHT_ANSWER.partition("<|im_start|>")[0]


@pytest.mark.parametrize(
    ("stop", "before"),
    [
        ("two", "one "),
        ("e tw", "on"),
        (["nowhere", "o <|im_start|> thr", "hree f"], "one tw"),
        (["five", "one"], ""),
    ],
)
def test_stop_strings(
    trained: Trained, taught: SampleSequence, stop: str | list[str], before: str
) -> None:
    """Of several tokens or a part of one: the sequence ends with the token that completes it."""
    stops = [stop] if isinstance(stop, str) else stop
    decode = trained.tokenizer.decode
    length = next(
        n
        for n in range(1, len(taught.tokens) + 1)
        if any(s in decode(taught.tokens[:n]) for s in stops)
    )
    sequence = asked_to_stop(trained, stop)
    assert_beginning(sequence, taught, length)
    assert sequence.text == before


def test_max_tokens(trained: Trained, taught: SampleSequence) -> None:
    for length in (1, 3, len(taught.tokens) - 1):
        sequence = asked_to_stop(trained, ["nowhere"], max_tokens=length)
        assert sequence.stop_reason == "length"
        assert sequence.tokens == taught.tokens[:length]
        assert sequence.text == trained.tokenizer.decode(
            taught.tokens[:length], skip_special_tokens=True
        )
    assert asked_to_stop(trained, ["nowhere"], max_tokens=len(taught.tokens)) == taught


# -- prompts ---------------------------------------------------------------------------------------


def test_prompt_logprobs(trained: Trained) -> None:
    for prompt in trained.prompts:
        with torch.no_grad():
            table = logprob_table(trained.model, prompt)[:-1]
        expected = table[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].tolist()
        response = ask(
            trained.sampler,
            prompt,
            SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=5,
        )
        computed = trained.sampler.compute_logprobs(ModelInput.from_ints(prompt)).result()
        for served in (response.prompt_logprobs, computed):
            assert served[0] is None
            assert served[1:] == pytest.approx(expected, abs=TOLERANCE)
        assert response.topk_prompt_logprobs[0] is None
        assert len(response.topk_prompt_logprobs) == len(prompt)
        best = table.topk(5).values
        for row, values, pairs in zip(table, best, response.topk_prompt_logprobs[1:], strict=True):
            tokens = [token for token, _ in pairs or []]
            served = torch.tensor([value for _, value in pairs or []])
            torch.testing.assert_close(served, values, atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(row[tokens], values, atol=TOLERANCE, rtol=0)


def test_prompt_logprobs_only_when_asked_for(base: SamplingClient) -> None:
    response = ask(base, [5, 6, 7], SamplingParams(max_tokens=1))
    assert (response.prompt_logprobs, response.topk_prompt_logprobs) == ([], [])
    only_top = ask(base, [5, 6, 7], SamplingParams(max_tokens=1), topk_prompt_logprobs=1)
    assert only_top.prompt_logprobs == []
    assert len(only_top.topk_prompt_logprobs) == 3
    without_text = ask(base, [5, 6, 7], SamplingParams(max_tokens=1), return_text=False)
    assert without_text.sequences[0].text is None


# -- refusals --------------------------------------------------------------------------------------


class WiderParams(SamplingParams):
    """What an SDK with more parameters would send."""

    min_p: float = 0.1


REFUSED: list[tuple[list[int], SamplingParams, str]] = [
    ([1, 2], SamplingParams(max_tokens=4, temperature=-0.5), "temperature must be 0 or more"),
    ([1, 2], SamplingParams(max_tokens=4, top_p=0.0), "top_p must be above 0 and at most 1"),
    ([1, 2], SamplingParams(max_tokens=4, top_p=1.5), "top_p must be above 0 and at most 1"),
    ([1, 2], SamplingParams(max_tokens=4, top_k=0), "top_k must be -1 or a whole number"),
    ([1, 2], SamplingParams(max_tokens=4, top_k=-2), "top_k must be -1 or a whole number"),
    ([1, 2], SamplingParams(max_tokens=4, stop=["a", ""]), "stop must "),
    ([1, 2], WiderParams(max_tokens=4), "unknown min_p; known: max_tokens, seed, stop"),
    ([1, 2], SamplingParams(max_tokens=0), "max_tokens must be greater than 0"),
    ([1, 2], SamplingParams(), "max_tokens must be greater than 0"),
    ([], SamplingParams(max_tokens=4), "prompt cannot be empty"),
    ([1, 2, 999_999], SamplingParams(max_tokens=4), "prompt token 999999 at position 2"),
    ([1, -2], SamplingParams(max_tokens=4), "prompt token -2 at position 1"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), REFUSED)
def test_refused_parameters(
    base: SamplingClient, prompt: list[int], params: SamplingParams, message: str
) -> None:
    with pytest.raises(PyTrioError) as refused:
        ask(base, prompt, params)
    assert message in refused.value.message


def test_the_context_length_is_a_limit(
    service: ServiceClient, base: SamplingClient, trained: Trained
) -> None:
    """Both numbers are in the message, and exactly full is allowed."""
    models = service.get_server_capabilities().supported_models
    context = next(m for m in models if m.model_name == BASE_MODEL).max_context_length
    prompt = trained.taught_prompt
    room = context - len(prompt)
    with pytest.raises(PyTrioError) as refused:
        ask(base, prompt, SamplingParams(max_tokens=room + 1))
    expected = f"prompt of {len(prompt)} tokens and max_tokens {room + 1} exceed the context"
    assert expected in refused.value.message
    fitting = SamplingParams(max_tokens=room, temperature=0)
    assert ask_one(trained.sampler, prompt, fitting).stop_reason == "stop"
    with pytest.raises(PyTrioError, match=f"prompt of {context} tokens"):
        ask(base, [5] * context, SamplingParams(max_tokens=1))
