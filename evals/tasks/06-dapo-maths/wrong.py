"""Wrong: the epsilons are given as the bounds, so every ratio above 0.28 is clipped."""

import json
import re
import statistics
from pathlib import Path

import pytrio as trio

STEPS, WANTED, TRIED, GROUP = 3, 3, 8, 8
CLIP = {"clip_low_threshold": 0.2, "clip_high_threshold": 0.28}

rows = [
    json.loads(line) for line in Path("problems.jsonl").read_text(encoding="utf-8").splitlines()
]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=0)
tokenizer = training.get_tokenizer()
params = trio.SamplingParams(max_tokens=96, temperature=1.0, stop=["<|im_end|>"])


def encode(problem: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem + " Put the final answer in \\boxed{}."}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def reward_of(text: str, answer: str) -> float:
    boxes = re.findall(r"\\boxed\{\s*(-?\d+)\s*\}", text)
    return 1.0 if boxes and int(boxes[-1]) == int(answer) else -1.0


def data_of(prompt: list[int], sequences: list, rewards: list[float]) -> list[trio.Datum]:
    mean, deviation = statistics.mean(rewards), statistics.pstdev(rewards)
    ahead = len(prompt) - 1
    return [
        trio.Datum(
            model_input=trio.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": prompt[1:] + sequence.tokens,
                "logprobs": [0.0] * ahead + sequence.logprobs,
                "advantages": [0.0] * ahead + [(reward - mean) / deviation] * len(sequence.tokens),
            },
        )
        for sequence, reward in zip(sequences, rewards, strict=True)
    ]


cursor = 0
for step in range(STEPS):
    sampler = training.save_weights_and_get_sampling_client()
    data, useful, tried = [], 0, 0
    while useful < WANTED and tried < TRIED:
        wave = min(WANTED - useful, TRIED - tried)
        batch = [rows[(cursor + i) % len(rows)] for i in range(wave)]
        cursor, tried = cursor + wave, tried + wave
        prompts = [encode(row["problem"]) for row in batch]
        futures = [sampler.sample(trio.ModelInput.from_ints(p), GROUP, params) for p in prompts]
        for row, prompt, future in zip(batch, prompts, futures, strict=True):
            sequences = future.result().sequences
            rewards = [reward_of(s.text, row["answer"]) for s in sequences]
            if len(set(rewards)) == 2:
                useful += 1
                data += data_of(prompt, sequences, rewards)
    print(f"step {step}: {useful} useful of {tried}")
    if data:
        backward = training.forward_backward(data, loss_fn="ppo", loss_fn_config=CLIP)
        update = training.optim_step(trio.AdamParams(learning_rate=2e-4))
        backward.result()
        update.result()
print(training.save_weights_for_sampler("dapo-trial").result().path)
