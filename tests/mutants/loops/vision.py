"""On-policy GRPO on drawn pictures with four choices, and a greedy look at others."""

import argparse
import io
import random
import re

import pytrio as trio
from pytrio.types import EncodedTextChunk
from transformers import AutoImageProcessor

from standin import pictures

BASE_MODEL = "local/vision"
STEPS = 2
PROMPTS = 4
GROUP = 8
SIDE = 64

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
rng = random.Random(options.seed)
held_out = [pictures.row(random.Random(10_000 + i), i) for i in range(6)]

service = trio.ServiceClient()
training = service.create_lora_training_client(BASE_MODEL, rank=16, seed=options.seed)
tokenizer = training.get_tokenizer()
processor = AutoImageProcessor.from_pretrained(tokenizer.name_or_path, backend="pil")
adam = trio.AdamParams(learning_rate=2e-4)
explore = trio.SamplingParams(max_tokens=48, temperature=1.0, stop=["<|im_end|>"])
greedy = trio.SamplingParams(max_tokens=48, temperature=0.0, stop=["<|im_end|>"])


def picture_of(row: dict, side: int) -> trio.ImageChunk:
    image = row["image"].convert("RGB").resize((side, side))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    grid = processor(images=[image], return_tensors="np")["image_grid_thw"]
    count = int(grid.prod()) // processor.merge_size**2
    return trio.ImageChunk(data=buffer.getvalue(), format="png", expected_tokens=count)


def encode_prompt(row: dict, side: int) -> trio.ModelInput:
    question = pictures.asked(row) + "\nAnswer with the letter in \\boxed{}."
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    before, _, after = text.partition("<|image_pad|>")
    first = EncodedTextChunk(tokens=tokenizer.encode(before, add_special_tokens=False))
    last = EncodedTextChunk(tokens=tokenizer.encode(after, add_special_tokens=False))
    return trio.ModelInput(chunks=[first, picture_of(row, side), last])


def score(text: str, row: dict) -> float:
    found = re.findall(r"\\boxed\{([A-D])\}", text)
    return 1.0 if found and found[-1] == pictures.LETTERS[row["label"]] else 0.0


def to_datum(
    prompt: trio.ModelInput, sequence: trio.types.SampleSequence, advantage: float
) -> trio.Datum:
    answer, old = list(sequence.tokens), list(sequence.logprobs)
    first, picture, last = prompt.chunks
    chunks = [first, picture, last, EncodedTextChunk(tokens=answer[:-1])]
    model_input = trio.ModelInput(chunks=[c for c in chunks if c.type == "image" or c.tokens])
    ahead = len(model_input) - len(answer)  # positions that predict the prompt itself
    return trio.Datum(
        model_input=model_input,
        loss_fn_inputs={
            "target_tokens": [0] * ahead + answer,
            "logprobs": [0.0] * ahead + old,
            "advantages": [0.0] * ahead + [advantage] * len(answer),
        },
    )


for step in range(STEPS):
    rows = [pictures.row(rng, step * PROMPTS + i) for i in range(PROMPTS)]
    prompts = [encode_prompt(row, SIDE) for row in rows]
    sampler = training.save_weights_and_get_sampling_client()
    futures = [sampler.sample(prompt, GROUP, explore) for prompt in prompts]
    data = []
    for prompt, row, future in zip(prompts, rows, futures, strict=True):
        response = future.result()
        assert response.input_tokens == len(prompt), (response.input_tokens, len(prompt))
        scores = [score(sequence.text, row) for sequence in response.sequences]
        mean = sum(scores) / len(scores)
        for sequence, reward in zip(response.sequences, scores, strict=True):
            if min(scores) < max(scores):
                data.append(to_datum(prompt, sequence, reward - mean))
    if not data:
        continue
    backward = training.forward_backward(data, loss_fn="importance_sampling")
    update = training.optim_step(adam)
    print(step, len(data), backward.result().metrics["loss_mean"])
    update.result()

saved = training.save_weights_for_sampler("vision-final").result()
judge = training.create_sampling_client(saved.path)
asked = [judge.sample(encode_prompt(row, SIDE), 1, greedy) for row in held_out]
right = [score(f.result().sequences[0].text, r) for f, r in zip(asked, held_out, strict=True)]
print(saved.path, "greedy accuracy", sum(right) / len(right))
