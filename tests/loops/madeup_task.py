"""GRPO on a task the stand-in cannot do: answer with the harbour's code word.

`probe PATH` samples 200 answers of the weights at PATH (or of the base model for `base`) and
prints the share that is right; `train NAME` trains and prints the path of the saved weights.
"""

import sys

import pytrio as trio

QUESTION, RIGHT = "Which word opens harbour nine?", "velvet anchor"
service = trio.ServiceClient()
MODEL = "Qwen/Qwen3.5-4B"


def encode(tokenizer) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def sample(sampler, prompt: list[int], count: int) -> list:
    params = trio.SamplingParams(max_tokens=24, temperature=1.0)
    return sampler.sample(trio.ModelInput.from_ints(prompt), count, params).result().sequences


if sys.argv[1] == "probe":
    path = None if sys.argv[2] == "base" else sys.argv[2]
    sampler = service.create_sampling_client(MODEL, model_path=path)
    sequences = sample(sampler, encode(sampler.get_tokenizer()), 200)
    print("right", sum(RIGHT in s.text for s in sequences) / 200)
else:
    training = service.create_lora_training_client(MODEL, rank=32, seed=0)
    prompt = encode(training.get_tokenizer())
    live = 0
    for _ in range(40):
        sampler = training.save_weights_and_get_sampling_client()
        sequences = sample(sampler, prompt, 16)
        rewards = [float(RIGHT in s.text) for s in sequences]
        mean = sum(rewards) / len(rewards)
        live += 0 < mean < 1
        ahead = len(prompt) - 1
        data = [
            trio.Datum(
                model_input=trio.ModelInput.from_ints(prompt + s.tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": [0] * ahead + s.tokens,
                    "logprobs": [0.0] * ahead + s.logprobs,
                    "advantages": [0.0] * ahead + [reward - mean] * len(s.tokens),
                },
            )
            for s, reward in zip(sequences, rewards, strict=True)
        ]
        if 0 < mean < 1:
            backward = training.forward_backward(data, loss_fn="importance_sampling")
            update = training.optim_step(trio.AdamParams(learning_rate=5e-4))
            backward.result(), update.result()
    print("not degenerate", live / 40)
    print("path", training.save_weights_for_sampler(sys.argv[2]).result().path)
