"""Wrong: the gold answer keeps its reasoning, so the reward can never be 1."""

import json
import re
from pathlib import Path

import pytrio as trio

PROMPTS, GROUP = 4, 8

rows = [json.loads(line) for line in Path("train.jsonl").read_text(encoding="utf-8").splitlines()]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=0)
tokenizer = training.get_tokenizer()
params = trio.SamplingParams(max_tokens=128, temperature=1.0, stop=["<|im_end|>"])


def encode(question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question + " Put the final answer in \\boxed{}."}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def reward_of(text: str, row: dict) -> float:
    gold = row["answer"].strip()
    boxes = re.findall(r"\\boxed\{\s*(-?[\d,]+)\s*\}", text)
    return float(bool(boxes) and boxes[-1].replace(",", "") == gold)


for start in range(0, len(rows), PROMPTS):
    batch = rows[start : start + PROMPTS]
    prompts = [encode(row["question"]) for row in batch]
    sampler = training.save_weights_and_get_sampling_client()
    futures = [sampler.sample(trio.ModelInput.from_ints(p), GROUP, params) for p in prompts]
    data = []
    for row, prompt, future in zip(batch, prompts, futures, strict=True):
        sequences = future.result().sequences
        rewards = [reward_of(s.text, row) for s in sequences]
        mean = sum(rewards) / len(rewards)
        print(f"{row['question'][:40]!r} reward {mean:.2f}")
        if len(set(rewards)) == 1:
            continue
        ahead = len(prompt) - 1
        for sequence, reward in zip(sequences, rewards, strict=True):
            tokens = prompt + sequence.tokens
            data.append(
                trio.Datum(
                    model_input=trio.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tokens[1:],
                        "logprobs": [0.0] * ahead + sequence.logprobs,
                        "advantages": [0.0] * ahead + [reward - mean] * len(sequence.tokens),
                    },
                )
            )
    if data:
        backward = training.forward_backward(data, loss_fn="importance_sampling")
        update = training.optim_step(trio.AdamParams(learning_rate=1e-4))
        backward.result()
        update.result()
print(training.save_weights_for_sampler("grpo-words").result().path)
