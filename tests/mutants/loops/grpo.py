"""On-policy GRPO on word problems, synchronous, with a greedy evaluation of the saved weights."""

import argparse
import random
import re

import pytrio as trio

from standin import words

BASE_MODEL = "Qwen/Qwen3.5-4B"
STEPS = 3
PROMPTS = 4
GROUP = 8

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
rng = random.Random(options.seed)
held_out = [words.row(random.Random(10_000 + i)) for i in range(6)]

service = trio.ServiceClient()
training = service.create_lora_training_client(BASE_MODEL, rank=16, seed=options.seed)
tokenizer = training.get_tokenizer()
END = tokenizer.convert_tokens_to_ids("<|im_end|>")
adam = trio.AdamParams(learning_rate=2e-4)
explore = trio.SamplingParams(max_tokens=64, temperature=1.0, stop=["<|im_end|>"])
greedy = trio.SamplingParams(max_tokens=64, temperature=0.0, stop=["<|im_end|>"])


def encode_prompt(row: dict) -> list[int]:
    text = tokenizer.apply_chat_template(
        words.plain_prompt(row["question"]),
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def score(text: str, row: dict) -> float:
    found = re.findall(r"\\boxed\{(-?\d+)\}", text)
    return 1.0 if found and found[-1] == words.gold(row) else 0.0


def to_datum(
    prompt: list[int], sequence: trio.types.SampleSequence, advantage: float
) -> trio.Datum:
    answer = list(sequence.tokens)
    old = list(sequence.logprobs)
    assert len(answer) == len(old), (len(answer), len(old))
    tokens = prompt + answer
    ahead = len(prompt) - 1  # positions that predict the prompt itself
    logprobs = [0.0] * ahead + old
    advantages = [0.0] * ahead + [advantage] * len(answer)
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": logprobs,
            "advantages": advantages,
        },
    )


for step in range(STEPS):
    rows = [words.row(rng) for _ in range(PROMPTS)]
    prompts = [encode_prompt(row) for row in rows]
    sampler = training.save_weights_and_get_sampling_client()
    futures = [sampler.sample(trio.ModelInput.from_ints(p), GROUP, explore) for p in prompts]
    groups = [future.result().sequences for future in futures]
    rewards = [[score(s.text, row) for s in g] for g, row in zip(groups, rows, strict=True)]
    data, degenerate = [], 0
    for prompt, sequences, scores in zip(prompts, groups, rewards, strict=True):
        if max(scores) == min(scores):
            degenerate += 1
            continue
        mean = sum(scores) / len(scores)
        for sequence, reward in zip(sequences, scores, strict=True):
            data.append(to_datum(prompt, sequence, reward - mean))
    average = sum(map(sum, rewards)) / sum(map(len, rewards))
    print(f"step {step} reward {average:.3f} degenerate {degenerate}/{PROMPTS} datums {len(data)}")
    if not data:
        continue
    backward = training.forward_backward(data, loss_fn="importance_sampling")
    update = training.optim_step(adam)
    print("loss", backward.result().metrics["loss_mean"])
    update.result()

saved = training.save_weights_for_sampler("grpo-words").result()
judge = training.create_sampling_client(saved.path)
asked = [judge.sample(trio.ModelInput.from_ints(encode_prompt(r)), 1, greedy) for r in held_out]
right = [score(f.result().sequences[0].text, r) for f, r in zip(asked, held_out, strict=True)]
print(saved.path, "greedy accuracy", sum(right) / len(right))
