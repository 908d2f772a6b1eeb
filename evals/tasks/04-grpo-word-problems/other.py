"""The same in another style: asyncio, eight requests a group with seeds, ppo, divided by std."""

import asyncio
import json
import re
import statistics
from pathlib import Path

import pytrio as trio


def reward_of(text: str, gold: str) -> float:
    boxes = re.findall(r"\\boxed\{(.*?)\}", text)
    try:
        return float(bool(boxes) and float(boxes[-1].replace(",", "")) == float(gold))
    except ValueError:
        return 0.0


async def group(sampler: trio.SamplingClient, row: dict, step: int) -> list[trio.Datum]:
    tokenizer = sampler.get_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": row["question"] + " Put the final answer in \\boxed{}."}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    responses = await asyncio.gather(
        *[
            sampler.sample_async(
                trio.ModelInput.from_ints(prompt),
                1,
                trio.SamplingParams(max_tokens=128, temperature=1.0, seed=1000 * step + number),
            )
            for number in range(8)
        ]
    )
    sequences = [response.sequences[0] for response in responses]
    gold = row["answer"].split("####")[-1].strip()
    rewards = [
        reward_of(tokenizer.decode(s.tokens, skip_special_tokens=True), gold) for s in sequences
    ]
    deviation = statistics.stdev(rewards)
    if deviation == 0:
        return []
    mean, ahead = statistics.mean(rewards), len(prompt) - 1
    return [
        trio.Datum(
            model_input=trio.ModelInput.from_ints(prompt + s.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": [-100] * ahead + s.tokens,
                "logprobs": [0.0] * ahead + s.logprobs,
                "advantages": [0.0] * ahead + [(r - mean) / (deviation + 1e-6)] * len(s.tokens),
            },
        )
        for s, r in zip(sequences, rewards, strict=True)
    ]


async def main() -> None:
    lines = Path("train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    service = trio.ServiceClient()
    training = await service.create_lora_training_client_async("Qwen/Qwen3.5-4B", rank=8)
    for step in range(3):
        sampler = await training.save_weights_and_get_sampling_client_async()
        batch = rows[4 * step : 4 * step + 4]
        groups = await asyncio.gather(*[group(sampler, row, step) for row in batch])
        data = [datum for part in groups for datum in part]
        if data:
            clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
            backward = await training.forward_backward_async(data, "ppo", loss_fn_config=clip)
            update = await training.optim_step_async(trio.AdamParams(learning_rate=1e-4))
            await backward
            await update
    await (await training.save_weights_for_sampler_async("grpo-words"))


asyncio.run(main())
