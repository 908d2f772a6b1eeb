"""GRPO one step off-policy: the next batch is sampled while this one is trained on."""

import asyncio
import json
from pathlib import Path

import pytrio as trio

BATCHES, PROMPTS, GROUP = 5, 2, 8

rows = [json.loads(x) for x in Path("problems.jsonl").read_text(encoding="utf-8").splitlines()]
params = trio.SamplingParams(max_tokens=96, temperature=1.0, stop=["<|im_end|>"])
clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def reward_of(text: str, gold: int) -> float:
    _, boxed, rest = text.rpartition("\\boxed{")
    return float(bool(boxed) and rest.partition("}")[0].strip() == str(gold))


def encode(tokenizer, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question + " Put the final answer in \\boxed{}."}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def build(batch: list[dict], prompts: list[list[int]], groups: list) -> list[trio.Datum]:
    data = []
    for row, prompt, group in zip(batch, prompts, groups, strict=True):
        rewards = [reward_of(s.text, row["answer"]) for s in group.sequences]
        mean = sum(rewards) / len(rewards)
        print(f"{row['question'][:40]!r} reward {mean:.2f}")
        if len(set(rewards)) == 1:
            continue
        ahead = len(prompt) - 1
        for sequence, reward in zip(group.sequences, rewards, strict=True):
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
    return data


async def main() -> None:
    service = trio.ServiceClient()
    training = await service.create_lora_training_client_async("Qwen/Qwen3.5-4B", rank=16)
    tokenizer = training.get_tokenizer()
    adam = trio.AdamParams(learning_rate=2e-4)
    batches = [rows[i * PROMPTS : (i + 1) * PROMPTS] for i in range(BATCHES)]
    prompts = [[encode(tokenizer, row["question"]) for row in batch] for batch in batches]

    async def rollouts(sampler: trio.SamplingClient, number: int) -> list:
        requests = [
            sampler.sample_async(trio.ModelInput.from_ints(p), GROUP, params)
            for p in prompts[number]
        ]
        return await asyncio.gather(*requests)

    async def train(number: int, groups: list) -> None:
        if data := build(batches[number], prompts[number], groups):
            backward = await training.forward_backward_async(
                data, loss_fn="ppo", loss_fn_config=clip
            )
            update = await training.optim_step_async(adam)
            print(number, (await backward).metrics["loss_mean"])
            await update

    sampler = await training.save_weights_and_get_sampling_client_async()
    groups = await rollouts(sampler, 0)
    for number in range(BATCHES - 1):
        # A snapshot from before this batch's step; made here, or the step might come first.
        sampler = await training.save_weights_and_get_sampling_client_async()
        following = asyncio.create_task(rollouts(sampler, number + 1))
        await train(number, groups)
        groups = await following
    await train(BATCHES - 1, groups)
    save = await training.save_weights_for_sampler_async("async-grpo")
    print((await save).path)


asyncio.run(main())
