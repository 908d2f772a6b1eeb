"""Wrong: only the last reply of every conversation is trained."""

import json
import random
from pathlib import Path

import pytrio as trio

BATCH, EPOCHS = 6, 2

chats = [json.loads(line) for line in Path("chats.jsonl").read_text(encoding="utf-8").splitlines()]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=0)
tokenizer = training.get_tokenizer()
end = tokenizer.convert_tokens_to_ids("<|im_end|>")


def datum_of(history: list[dict], reply: str) -> trio.Datum:
    text = tokenizer.apply_chat_template(
        history, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    answer = tokenizer.encode(reply, add_special_tokens=False) + [end]
    tokens = prompt + answer
    weights = [0.0] * len(prompt) + [1.0] * len(answer)
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


data = [datum_of(chat["messages"][:-1], chat["messages"][-1]["content"]) for chat in chats]
for epoch in range(EPOCHS):
    order = random.Random(epoch).sample(data, len(data))
    for start in range(0, len(order), BATCH):
        backward = training.forward_backward(order[start : start + BATCH], loss_fn="cross_entropy")
        update = training.optim_step(trio.AdamParams(learning_rate=2e-4))
        print(f"epoch {epoch + 1} loss {backward.result().metrics['loss_mean']:.4f}")
        update.result()
print(training.save_weights_for_sampler("service-chats").result().path)
