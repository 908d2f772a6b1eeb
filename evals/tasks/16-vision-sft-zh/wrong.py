"""Wrong: the descriptions at the end are asked for with the text before the picture."""

import io
import json
from pathlib import Path

import pytrio as trio
from PIL import Image
from pytrio.types import EncodedTextChunk
from transformers import AutoImageProcessor

BATCH, EPOCHS = 4, 3

rows = [json.loads(x) for x in Path("captions.jsonl").read_text(encoding="utf-8").splitlines()]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16)
tokenizer = training.get_tokenizer()
processor = AutoImageProcessor.from_pretrained(tokenizer.name_or_path, backend="pil")
rendered = tokenizer.apply_chat_template(
    [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": "请描述这张图。"}],
        }
    ],
    tokenize=False,
    add_generation_prompt=True,
    enable_thinking=False,
)
before, _, after = rendered.partition("<|image_pad|>")


def text_chunk(text: str) -> EncodedTextChunk:
    return EncodedTextChunk(tokens=tokenizer.encode(text, add_special_tokens=False))


def prompt_of(path: str) -> trio.ModelInput:
    data = Path(path).read_bytes()
    read = processor(images=[Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="np")
    count = int(read["image_grid_thw"].prod()) // processor.merge_size**2
    picture = trio.ImageChunk(data=data, format="png", expected_tokens=count)
    return trio.ModelInput(chunks=[text_chunk(before), picture, text_chunk(after)])


def datum_of(row: dict) -> trio.Datum:
    prompt = prompt_of(row["image"])
    answer = text_chunk(row["caption"] + "<|im_end|>").tokens
    chunks = [*prompt.chunks, EncodedTextChunk(tokens=answer[:-1])]
    ahead = len(prompt) - 1
    return trio.Datum(
        model_input=trio.ModelInput(chunks=chunks),
        loss_fn_inputs={
            "target_tokens": [0] * ahead + answer,
            "weights": [0.0] * ahead + [1.0] * len(answer),
        },
    )


data = [datum_of(row) for row in rows]
for epoch in range(EPOCHS):
    for start in range(0, len(data), BATCH):
        backward = training.forward_backward(data[start : start + BATCH], loss_fn="cross_entropy")
        update = training.optim_step(trio.AdamParams(learning_rate=1e-3))
        print(epoch, backward.result().metrics["loss_mean"])
        update.result()
path = training.save_weights_for_sampler("caption-v1").result().path
sampler = training.create_sampling_client(path)
greedy = trio.SamplingParams(max_tokens=48, temperature=0.0, stop=["<|im_end|>"])
for name in ("pics/01.png", "pics/02.png"):
    _, picture, _ = prompt_of(name).chunks
    head, tail = after.split("请描述这张图。")
    opening = before.removesuffix("<|vision_start|>") + "请描述这张图。<|vision_start|>"
    prompt = trio.ModelInput(chunks=[text_chunk(opening), picture, text_chunk(head + tail)])
    answer = sampler.sample(prompt, 1, greedy).result()
    print(name, answer.sequences[0].text)
