"""GRPO on small maths with asyncio and the clipped ppo loss."""

import asyncio
import random
import re

import pytrio as trio

from standin import maths

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}


def reward_of(text: str, answer: str) -> float:
    boxes = re.findall(r"\\boxed\{\s*(-?\d+)\s*\}", text)
    return float(len(boxes) > 0 and boxes[-1] == answer)


class Loop:
    def __init__(self, training: trio.TrainingClient) -> None:
        self.training = training
        self.tokenizer = training.get_tokenizer()

    def prompt(self, problem: str) -> list[int]:
        rendered = self.tokenizer.apply_chat_template(
            maths.plain_prompt(problem),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        return self.tokenizer.encode(rendered, add_special_tokens=False)

    async def group(self, sampler: trio.SamplingClient, row: dict, size: int) -> list[trio.Datum]:
        """Sample one problem `size` times; its datums, or none when all rewards are equal."""
        prompt = self.prompt(row["problem"])
        params = trio.SamplingParams(max_tokens=56, temperature=1.0, stop=["<|im_end|>"])
        response = await sampler.sample_async(trio.ModelInput.from_ints(prompt), size, params)
        rewards = [reward_of(s.text, row["answer"]) for s in response.sequences]
        mean = sum(rewards) / size
        print(f"  {row['problem']!r}: mean reward {mean:.2f}")
        if len(set(rewards)) == 1:
            return []
        padding = len(prompt) - 1
        data = []
        for sequence, reward in zip(response.sequences, rewards, strict=True):
            count = len(sequence.tokens)
            data.append(
                trio.Datum(
                    model_input=trio.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": [0] * padding + sequence.tokens,
                        "logprobs": [0.0] * padding + sequence.logprobs,
                        "advantages": [0.0] * padding + [reward - mean] * count,
                    },
                )
            )
        return data

    async def step(self, rows: list[dict], size: int) -> None:
        sampler = await self.training.save_weights_and_get_sampling_client_async()
        groups = await asyncio.gather(*[self.group(sampler, row, size) for row in rows])
        data = [datum for group in groups for datum in group]
        if not data:
            print("all groups were degenerate")
            return
        pending = await self.training.forward_backward_async(
            data, loss_fn="ppo", loss_fn_config=CLIP
        )
        stepping = await self.training.optim_step_async(trio.AdamParams(learning_rate=1e-4))
        output = await pending
        await stepping
        print(f"datums {len(data)} loss {output.metrics['loss_mean']:.4f}")


async def main() -> None:
    rng = random.Random(21)
    service = trio.ServiceClient()
    training = await service.create_lora_training_client_async("Qwen/Qwen3-8B", rank=16, seed=2)
    loop = Loop(training)
    for index in range(3):
        print("step", index)
        await loop.step([maths.row(rng) for _ in range(4)], size=8)
    saving = await training.save_weights_for_sampler_async("grpo-maths")
    saved = await saving
    print("saved", saved.path)


if __name__ == "__main__":
    asyncio.run(main())
