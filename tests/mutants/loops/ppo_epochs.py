"""Several optimiser passes over each batch of samples: the old log-probabilities stay frozen."""

import random
import re

import pytrio as trio

from standin import words

ROUNDS, PASSES, PROMPTS, GROUP = 2, 2, 4, 6
BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=13)
tokenizer = training.get_tokenizer()
rng = random.Random(303)


def collect() -> list[dict]:
    """Fresh samples of informative groups, each with its advantage and its own logprobs."""
    sampler = training.save_weights_and_get_sampling_client()
    params = trio.SamplingParams(max_tokens=64, temperature=1.0, stop=["<|im_end|>"])
    asked = []
    for row in [words.row(rng) for _ in range(PROMPTS)]:
        text = tokenizer.apply_chat_template(
            words.plain_prompt(row["question"]),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        prompt = tokenizer.encode(text, add_special_tokens=False)
        asked.append(
            (row, prompt, sampler.sample(trio.ModelInput.from_ints(prompt), GROUP, params))
        )
    samples = []
    for row, prompt, future in asked:
        sequences = future.result().sequences
        pattern = re.compile(r"\\boxed\{" + words.gold(row) + r"\}")
        rewards = [1.0 if pattern.search(s.text) else 0.0 for s in sequences]
        baseline = sum(rewards) / GROUP
        if baseline in (0.0, 1.0):
            continue
        for sequence, reward in zip(sequences, rewards, strict=True):
            samples.append(
                {
                    "prompt": prompt,
                    "tokens": sequence.tokens,
                    "logprobs": sequence.logprobs,
                    "advantage": reward - baseline,
                }
            )
    return samples


def as_datum(sample: dict) -> trio.Datum:
    prompt, tokens = sample["prompt"], sample["tokens"]
    before = len(prompt) - 1
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(prompt + tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": [0] * before + tokens,
            "logprobs": [0.0] * before + sample["logprobs"],
            "advantages": [0.0] * before + [sample["advantage"]] * len(tokens),
        },
    )


for round_index in range(ROUNDS):
    samples = collect()
    if not samples:
        continue
    for pass_index in range(PASSES):
        data = [as_datum(sample) for sample in samples]
        backward = training.forward_backward(data, loss_fn="ppo", loss_fn_config=BOUNDS)
        update = training.optim_step(trio.AdamParams(learning_rate=1e-4))
        output = backward.result()
        update.result()
        print(round_index, pass_index, len(data), round(output.metrics["loss_mean"], 4))

saved = training.save_weights_for_sampler("ppo-epochs").result()
print("saved", saved.path)
