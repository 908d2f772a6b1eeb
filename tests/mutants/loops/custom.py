"""GSPO through a custom loss: one clipped ratio a sequence, its mean taken over answer tokens."""

import math
import random
import re

import pytrio as trio
import torch

from standin import words

STEPS, PROMPTS, GROUP = 3, 3, 8
CLIP_LOW, CLIP_HIGH = 0.9, 1.1


def make_loss(starts: list[int], old: list[list[float]], advantages: list[float]):
    """The loss for one batch; everything it needs beyond the log-probabilities is kept here."""

    def gspo(data, logprobs):
        objectives, ratios = [], []
        for lp, start, q, advantage in zip(logprobs, starts, old, advantages, strict=True):
            answer = lp[start:]
            assert len(answer) == len(q), (len(answer), len(q))
            log_ratio = (answer - torch.tensor(q)).mean()
            ratio = torch.exp(log_ratio)
            clipped = torch.clamp(ratio, CLIP_LOW, CLIP_HIGH)
            objectives.append(torch.minimum(ratio * advantage, clipped * advantage))
            ratios.append(float(ratio.detach()))
        loss = -torch.stack(objectives).mean()
        mean_ratio = sum(ratios) / len(ratios)
        return loss, {"gspo/loss": float(loss.detach()), "gspo/seq_ratio_mean": mean_ratio}

    return gspo


def group_advantages(rewards: list[float]) -> list[float]:
    """(reward - mean) / standard deviation; zeros when all are equal."""
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    if deviation < 1e-6:
        return [0.0] * len(rewards)
    return [(r - mean) / deviation for r in rewards]


def is_right(text: str, gold: str) -> bool:
    boxes = re.findall(r"\\boxed\{(\d+)\}", text)
    return bool(boxes) and boxes[-1] == gold


def main() -> None:
    rng = random.Random(44)
    training = trio.ServiceClient().create_lora_training_client("Qwen/Qwen3.5-9B", rank=8, seed=5)
    tokenizer = training.get_tokenizer()
    params = trio.SamplingParams(max_tokens=64, temperature=1.0, stop=["<|im_end|>"])
    for step in range(STEPS):
        sampler = training.save_weights_and_get_sampling_client()
        jobs = []
        for _ in range(PROMPTS):
            row = words.row(rng)
            text = tokenizer.apply_chat_template(
                words.plain_prompt(row["question"]),
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
            )
            prompt = tokenizer.encode(text, add_special_tokens=False)
            jobs.append(
                (row, prompt, sampler.sample(trio.ModelInput.from_ints(prompt), GROUP, params))
            )
        data, starts, old, advantages = [], [], [], []
        for row, prompt, future in jobs:
            sequences = future.result().sequences
            rewards = [float(is_right(s.text, words.gold(row))) for s in sequences]
            centred = group_advantages(rewards)
            if not any(centred):
                continue
            for sequence, advantage in zip(sequences, centred, strict=True):
                tokens = prompt + sequence.tokens
                data.append(
                    trio.Datum(
                        model_input=trio.ModelInput.from_ints(tokens[:-1]),
                        loss_fn_inputs={"target_tokens": tokens[1:]},
                    )
                )
                starts.append(len(prompt) - 1)
                old.append(sequence.logprobs)
                advantages.append(advantage)
        if not data:
            print(f"step {step}: no group to learn from")
            continue
        loss_fn = make_loss(starts, old, advantages)
        backward = training.forward_backward_custom(data, loss_fn)
        update = training.optim_step(trio.AdamParams(learning_rate=1e-4))
        metrics = backward.result().metrics
        update.result()
        print(f"step {step}", {k: round(v, 4) for k, v in metrics.items() if "gspo" in k})
    saved = training.save_weights_for_sampler("gspo-words").result()
    print("saved", saved.path)


main()
