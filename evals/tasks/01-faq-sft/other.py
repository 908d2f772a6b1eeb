"""The same in another style: asyncio, the SDK's own shift, ignored targets instead of weights."""

import asyncio
import json
import random
from pathlib import Path

import pytrio as trio


def datum_of(tokenizer, row: dict) -> trio.Datum:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": row["question"]}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    answer = tokenizer.encode(row["answer"] + "<|im_end|>", add_special_tokens=False)
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(prompt + answer),
        loss_fn_inputs={"target_tokens": [-100] * len(prompt) + answer},
    )


async def main() -> None:
    lines = Path("faq.jsonl").read_text(encoding="utf-8").splitlines()
    service = trio.ServiceClient()
    training = await service.create_lora_training_client_async("Qwen/Qwen3.5-4B", rank=16)
    data = [datum_of(training.get_tokenizer(), json.loads(line)) for line in lines]
    for _ in range(3):
        random.shuffle(data)
        for batch in (data[:5], data[5:]):
            backward = await training.forward_backward_async(
                batch, "cross_entropy", auto_shift=True
            )
            update = await training.optim_step_async(trio.AdamParams(learning_rate=5e-4))
            print((await backward).metrics)
            await update
    await (await training.save_weights_for_sampler_async("faq-lora"))


asyncio.run(main())
