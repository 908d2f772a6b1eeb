"""On-policy GRPO on word problems; prints one line `step N reward R degenerate D` a step."""

import argparse
import random
import re

import pytrio as trio

from standin import words

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--learning-rate", type=float, default=2e-4)
options = parser.parse_args()

PROMPTS, SAMPLES = 8, 8
rng = random.Random(options.seed)
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=32, seed=options.seed)
tokenizer = training.get_tokenizer()


def encode(messages: list[dict]) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return tokenizer.encode(text, add_special_tokens=False)


def reward_of(text: str, gold: str) -> float:
    boxed = re.findall(r"\\boxed\{(-?\d+)\}", text)
    return float(bool(boxed) and boxed[-1] == gold)


for step in range(options.steps):
    rows = [words.row(rng) for _ in range(PROMPTS)]
    prompts = [encode(words.plain_prompt(row["question"])) for row in rows]
    sampler = training.save_weights_and_get_sampling_client()
    params = trio.SamplingParams(max_tokens=72, temperature=1.0)
    futures = [sampler.sample(trio.ModelInput.from_ints(p), SAMPLES, params) for p in prompts]
    rewards_by_group, data = [], []
    for row, prompt, future in zip(rows, prompts, futures, strict=True):
        sequences = future.result().sequences
        rewards = [reward_of(s.text, words.gold(row)) for s in sequences]
        rewards_by_group.append(rewards)
        mean = sum(rewards) / SAMPLES
        for sequence, reward in zip(sequences, rewards, strict=True):
            if reward == mean:
                continue
            ahead = len(prompt) - 1
            data.append(
                trio.Datum(
                    model_input=trio.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": [0] * ahead + sequence.tokens,
                        "logprobs": [0.0] * ahead + sequence.logprobs,
                        "advantages": [0.0] * ahead + [reward - mean] * len(sequence.tokens),
                    },
                )
            )
    degenerate = sum(len(set(rewards)) == 1 for rewards in rewards_by_group) / PROMPTS
    mean = sum(map(sum, rewards_by_group)) / (PROMPTS * SAMPLES)
    print(f"step {step} reward {mean:.3f} degenerate {degenerate:.2f}", flush=True)
    if data:
        backward = training.forward_backward(data, loss_fn="importance_sampling")
        update = training.optim_step(trio.AdamParams(learning_rate=options.learning_rate))
        backward.result(), update.result()
training.save_weights_for_sampler("words").result()
