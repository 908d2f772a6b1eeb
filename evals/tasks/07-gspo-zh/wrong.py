"""Wrong: the sequence ratio is the exponential of the sum, so long answers weigh more."""

import json
import re
import statistics
from pathlib import Path

import pytrio as trio
import torch

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
    boxes = re.findall(r"\\boxed\{\s*(-?\d+)\s*\}", text)
    return float(bool(boxes) and boxes[-1] == row["answer"].split("####")[1].strip())


def gspo(old: list[list[float]], advantages: list[float]):
    """The loss over one batch; lists are aligned to targets, so a completion is at the end."""

    def loss_fn(data, logprobs):
        objectives = []
        for now, sampled, advantage in zip(logprobs, old, advantages, strict=True):
            log_ratio = now[-len(sampled) :] - torch.tensor(sampled)
            ratio = log_ratio.sum().exp()
            clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
            objectives.append(torch.minimum(ratio * advantage, clipped * advantage))
        loss = -torch.stack(objectives).mean()
        return loss, {"gspo/loss": loss.item()}

    return loss_fn


for start in range(0, len(rows), PROMPTS):
    batch = rows[start : start + PROMPTS]
    prompts = [encode(row["question"]) for row in batch]
    sampler = training.save_weights_and_get_sampling_client()
    futures = [sampler.sample(trio.ModelInput.from_ints(p), GROUP, params) for p in prompts]
    data, old, advantages = [], [], []
    for row, prompt, future in zip(batch, prompts, futures, strict=True):
        sequences = future.result().sequences
        rewards = [reward_of(s.text, row) for s in sequences]
        mean, deviation = statistics.mean(rewards), statistics.pstdev(rewards)
        print(f"{row['question'][:40]!r} reward {mean:.2f}")
        if deviation == 0:
            continue
        for sequence, reward in zip(sequences, rewards, strict=True):
            tokens = prompt + sequence.tokens
            data.append(
                trio.Datum(
                    model_input=trio.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={"target_tokens": tokens[1:]},
                )
            )
            old.append(sequence.logprobs)
            advantages.append((reward - mean) / deviation)
    if data:
        backward = training.forward_backward_custom(data, gspo(old, advantages))
        update = training.optim_step(trio.AdamParams(learning_rate=1e-4))
        print(backward.result().metrics["gspo/loss"])
        update.result()
print(training.save_weights_for_sampler("gspo-exp1").result().path)
