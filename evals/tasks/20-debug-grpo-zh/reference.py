"""The user's GRPO loop repaired: new weights for every step, ids as they were sampled."""

import json
import re
from pathlib import Path

import pytrio as trio

rows = [json.loads(x) for x in Path("mental.jsonl").read_text(encoding="utf-8").splitlines()]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16)
tokenizer = training.get_tokenizer()
params = trio.SamplingParams(max_tokens=64, temperature=1.0, stop=["<|im_end|>"])


def encode(question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question + " Put the final answer in \\boxed{}."}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def reward_of(text: str, gold: str) -> float:
    found = re.findall(r"\\boxed\{(.*?)\}", text)
    return float(bool(found) and found[-1].strip() == gold)


for step in range(4):
    batch = [rows[(step * 4 + i) % len(rows)] for i in range(4)]
    prompts = [encode(row["q"]) for row in batch]
    sampler = training.save_weights_and_get_sampling_client()
    futures = [sampler.sample(trio.ModelInput.from_ints(p), 8, params) for p in prompts]
    data = []
    for row, prompt, future in zip(batch, prompts, futures, strict=True):
        sequences = future.result().sequences
        rewards = [reward_of(s.text, row["a"]) for s in sequences]
        mean = sum(rewards) / len(rewards)
        print(step, row["q"], mean)
        if len(set(rewards)) == 1:
            continue
        ahead = len(prompt) - 1
        for sequence, reward in zip(sequences, rewards, strict=True):
            tokens, logprobs = prompt + sequence.tokens, sequence.logprobs
            data.append(
                trio.Datum(
                    model_input=trio.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tokens[1:],
                        "logprobs": [0.0] * ahead + logprobs,
                        "advantages": [0.0] * ahead + [reward - mean] * len(logprobs),
                    },
                )
            )
    if data:
        backward = training.forward_backward(data, loss_fn="importance_sampling")
        update = training.optim_step(trio.AdamParams(learning_rate=2e-4))
        backward.result()
        update.result()
print(training.save_weights_for_sampler("mental-grpo").result().path)
