"""Second spellings: other ids for the same text, with the model's own log-probabilities."""

import pytest
import pytrio as trio

from helpers import BASE_MODEL, chat_prompt, logprobs_of, service_on, standin_model

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does Tom have now?"


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_completions_with_a_second_spelling(backend_factory, temperature: float) -> None:
    """With a share of 1 every sampled completion has one, and a greedy one never has; what is said
    stays the same, and so do other completions of the batch."""
    answers = []
    for share in ("0", "1"):
        with service_on(backend_factory("--respell", share)) as service:
            sampler = service.create_sampling_client(BASE_MODEL)
            tokenizer = sampler.get_tokenizer()
            prompt = chat_prompt(tokenizer, QUESTION)
            params = trio.SamplingParams(max_tokens=40, temperature=temperature, seed=1)
            future = sampler.sample(trio.ModelInput.from_ints(prompt), 8, params)
            answers.append(future.result().sequences)
    plain, sequences = answers
    assert [s.text for s in plain] == [s.text for s in sequences]
    assert [s.stop_reason for s in plain] == [s.stop_reason for s in sequences]
    respelled = 0
    for sequence in sequences:
        text = tokenizer.decode(sequence.tokens)
        respelled += tokenizer.encode(text, add_special_tokens=False) != sequence.tokens
        ids = prompt + sequence.tokens
        own = logprobs_of(standin_model(), ids[:-1], ids[1:])[len(prompt) - 1 :]
        assert abs(own - own.new_tensor(sequence.logprobs)).max() < 1e-4
    assert respelled == (8 if temperature else 0)


def test_a_share_outside_its_range_is_refused(backend_factory) -> None:
    with pytest.raises(RuntimeError, match="--respell: takes a number from 0 to 1, got '2'"):
        backend_factory("--respell", "2")
