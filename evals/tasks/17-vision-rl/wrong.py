"""Wrong: a tenth is added for any box, which was not asked for and rewards wrong letters."""

import io
import json
import re
from pathlib import Path

import pytrio as trio
from PIL import Image
from pytrio.types import EncodedTextChunk
from transformers import AutoImageProcessor

QUESTIONS, GROUP = 2, 8

rows = [json.loads(x) for x in Path("quiz.jsonl").read_text(encoding="utf-8").splitlines()]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16)
tokenizer = training.get_tokenizer()
processor = AutoImageProcessor.from_pretrained(tokenizer.name_or_path, backend="pil")
params = trio.SamplingParams(max_tokens=48, temperature=1.0, stop=["<|im_end|>"])


def text_chunk(text: str) -> EncodedTextChunk:
    return EncodedTextChunk(tokens=tokenizer.encode(text, add_special_tokens=False))


def prompt_of(row: dict) -> trio.ModelInput:
    choices = [f"{letter}. {text}" for letter, text in zip("ABCD", row["choices"], strict=True)]
    question = "\n".join([row["question"], *choices, "Answer with the letter in \\boxed{}."])
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    before, _, after = rendered.partition("<|image_pad|>")
    data = Path(row["image"]).read_bytes()
    read = processor(images=[Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="np")
    count = int(read["image_grid_thw"].prod()) // processor.merge_size**2
    picture = trio.ImageChunk(data=data, format="png", expected_tokens=count)
    return trio.ModelInput(chunks=[text_chunk(before), picture, text_chunk(after)])


def reward_of(text: str, row: dict) -> float:
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", text)
    is_right = bool(boxes) and boxes[-1].strip() == "ABCD"[row["answer"]]
    return 0.9 * is_right + 0.1 * bool(boxes)


for start in range(0, len(rows), QUESTIONS):
    batch = rows[start : start + QUESTIONS]
    prompts = [prompt_of(row) for row in batch]
    sampler = training.save_weights_and_get_sampling_client()
    futures = [sampler.sample(prompt, GROUP, params) for prompt in prompts]
    data, everything = [], []
    for row, prompt, future in zip(batch, prompts, futures, strict=True):
        response = future.result()
        assert response.input_tokens == len(prompt), "the service counts the picture differently"
        rewards = [reward_of(s.text, row) for s in response.sequences]
        mean = sum(rewards) / len(rewards)
        everything += rewards
        if len(set(rewards)) == 1:
            continue
        ahead = len(prompt) - 1
        for sequence, reward in zip(response.sequences, rewards, strict=True):
            tokens = sequence.tokens
            rest = [EncodedTextChunk(tokens=tokens[:-1])] if len(tokens) > 1 else []
            data.append(
                trio.Datum(
                    model_input=trio.ModelInput(chunks=[*prompt.chunks, *rest]),
                    loss_fn_inputs={
                        "target_tokens": [0] * ahead + tokens,
                        "logprobs": [0.0] * ahead + sequence.logprobs,
                        "advantages": [0.0] * ahead + [reward - mean] * len(tokens),
                    },
                )
            )
    print(f"reward {sum(everything) / len(everything):.3f}")
    if data:
        backward = training.forward_backward(data, loss_fn="importance_sampling")
        update = training.optim_step(trio.AdamParams(learning_rate=3e-4))
        backward.result()
        update.result()
print(training.save_weights_for_sampler("quiz-vl").result().path)
