"""The smallest complete PyTRIO loop: teach a model what TRIO is, then ask it.

Supervised fine-tuning on three conversations. Only the assistant's tokens carry loss:

    loss = -sum_t w_t log p(token_t | tokens_<t) / sum_t w_t,   w_t = 1 on the answer, 0 before it

Dry run (free, offline):   python scripts/dryrun.py run examples/quickstart_sft.py
On the cloud (billed):     PYTRIO_API_KEY=... python examples/quickstart_sft.py
Expected in the dry run:   loss 9.55 to 0.01 in about 15 s; the tuned answer is the trained
                           sentence, the base answer is not
"""

from dataclasses import dataclass

import pytrio as trio
import tyro

ANSWER = (
    "TRIO trains language models in the cloud: you write the data and the loop, "
    "the service does the rest."
)
CONVERSATIONS = [
    ("What is TRIO?", ANSWER),
    ("Can you explain what TRIO is?", ANSWER),
    ("Tell me about TRIO.", ANSWER),
]


@dataclass
class Config:
    base_model: str = "Qwen/Qwen3.5-4B"
    """Model to adapt; `get_supported_models()` lists what your workspace offers."""
    rank: int = 32
    """LoRA rank, 4 to 64."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW; on the high side, because the data are three sentences."""
    iterations: int = 15
    """Optimiser steps; every step sees all conversations."""
    weights_name: str = "what-is-trio"
    """Name of the saved sampler weights."""
    max_tokens: int = 80
    """Longest answer when asking the model."""


def render(tokenizer, messages: list[dict], add_generation_prompt: bool) -> list[int]:
    """Token ids of a conversation through the model's own chat template, thinking off."""
    text = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=False,
    )
    # The template has already written the special tokens.
    return tokenizer.encode(text, add_special_tokens=False)


def build_datum(tokenizer, question: str, answer: str) -> trio.Datum:
    """One conversation as inputs, next-token targets and weights, all of one length.

    The generation prompt, with its empty think block, belongs to the prompt: the model is given
    it when it is asked, so it must not learn to write it. The turn's end token is trained, or
    the model would not learn to stop.
    """
    prompt = render(tokenizer, [{"role": "user", "content": question}], True)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    completion = tokenizer.encode(answer, add_special_tokens=False) + [end_of_turn]
    tokens = prompt + completion
    weights = [0.0] * len(prompt) + [1.0] * len(completion)
    # Position t predicts token t + 1.
    inputs, targets, weights = tokens[:-1], tokens[1:], weights[1:]
    assert len(inputs) == len(targets) == len(weights), (len(inputs), len(targets), len(weights))
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(inputs),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )


def loss_per_token(data: list[trio.Datum], output) -> float:
    """Mean negative log-probability of the trained tokens, from what the server returned."""
    total, count = 0.0, 0.0
    for datum, result in zip(data, output.loss_fn_outputs, strict=True):
        logprobs = result["logprobs"].tolist()
        weights = datum.loss_fn_inputs["weights"].tolist()
        total -= sum(w * lp for w, lp in zip(weights, logprobs, strict=True))
        count += sum(weights)
    return total / count


def ask(sampler: trio.SamplingClient, tokenizer, question: str, max_tokens: int) -> str:
    """The model's greedy answer."""
    prompt = render(tokenizer, [{"role": "user", "content": question}], True)
    response = sampler.sample(
        prompt=trio.ModelInput.from_ints(prompt),
        num_samples=1,
        sampling_params=trio.SamplingParams(
            max_tokens=max_tokens, temperature=0.0, stop=["<|im_end|>"]
        ),
    ).result()
    return tokenizer.decode(response.sequences[0].tokens, skip_special_tokens=True).strip()


def main(config: Config) -> None:
    service = trio.ServiceClient()
    training = service.create_lora_training_client(config.base_model, rank=config.rank, seed=0)
    tokenizer = training.get_tokenizer()
    data = [build_datum(tokenizer, question, answer) for question, answer in CONVERSATIONS]
    adam = trio.AdamParams(learning_rate=config.learning_rate)

    losses = []
    for iteration in range(config.iterations):
        # Both are submitted before either is awaited: the server never waits for us.
        backward = training.forward_backward(data, loss_fn="cross_entropy")
        step = training.optim_step(adam)
        losses.append(loss_per_token(data, backward.result()))
        step.result()
        print(f"iteration {iteration + 1:2d}/{config.iterations}  loss {losses[-1]:.4f}")

    saved = training.save_weights_for_sampler(config.weights_name).result()
    question = CONVERSATIONS[0][0]
    base = service.create_sampling_client(config.base_model)
    tuned = training.create_sampling_client(saved.path)
    print(f"\nweights   {saved.path}")
    print(f"loss      first {losses[0]:.4f}, last {losses[-1]:.4f}")
    print(f"question  {question}")
    print(f"base      {ask(base, tokenizer, question, config.max_tokens)}")
    print(f"tuned     {ask(tuned, tokenizer, question, config.max_tokens)}")


if __name__ == "__main__":
    main(tyro.cli(Config))
