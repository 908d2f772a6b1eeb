"""Wrong: the masked mean divides by the whole sequence, prompt included, not by the completion."""

import json
from pathlib import Path

import pytrio as trio
import torch

QUESTIONS, GROUP = 4, 8

rows = [
    json.loads(line) for line in Path("questions.jsonl").read_text(encoding="utf-8").splitlines()
]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=0)
tokenizer = training.get_tokenizer()
params = trio.SamplingParams(max_tokens=64, temperature=1.0, stop=["<|im_end|>"])


def encode(question: str) -> list[int]:
    user = question + " Answer yes or no, then you may give a reason."
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": user}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def reinforce(lengths: list[int], advantages: list[float]):
    def loss_fn(data, logprobs):
        terms = []
        for lp, length, advantage in zip(logprobs, lengths, advantages, strict=True):
            # Aligned to targets: the completion is at the end.
            mask = torch.zeros_like(lp)
            mask[-length:] = 1.0
            terms.append(advantage * (lp * mask).mean())
        loss = -torch.stack(terms).sum() / len(terms)
        return loss, {"reinforce/loss": loss.item()}

    return loss_fn


for start in range(0, len(rows), QUESTIONS):
    batch = rows[start : start + QUESTIONS]
    prompts = [encode(row["question"]) for row in batch]
    sampler = training.save_weights_and_get_sampling_client()
    futures = [sampler.sample(trio.ModelInput.from_ints(p), GROUP, params) for p in prompts]
    data, lengths, advantages = [], [], []
    for row, prompt, future in zip(batch, prompts, futures, strict=True):
        sequences = future.result().sequences
        rewards = [float(s.text.strip().lower().startswith(row["answer"])) for s in sequences]
        mean = sum(rewards) / len(rewards)
        print(f"{row['question']} reward {mean:.2f}")
        if len(set(rewards)) == 1:
            continue
        for sequence, reward in zip(sequences, rewards, strict=True):
            tokens = prompt + sequence.tokens
            data.append(
                trio.Datum(
                    model_input=trio.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={"target_tokens": tokens[1:]},
                )
            )
            lengths.append(len(sequence.tokens))
            advantages.append(reward - mean)
    if data:
        backward = training.forward_backward_custom(data, reinforce(lengths, advantages))
        update = training.optim_step(trio.AdamParams(learning_rate=1e-4))
        print(backward.result().metrics["reinforce/loss"])
        update.result()
print(training.save_weights_for_sampler("reinforce-len").result().path)
