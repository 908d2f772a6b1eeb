"""Wrong: the weights are not shifted with the targets, so the first answer token is not trained."""

import json
import random
from pathlib import Path

import pytrio as trio

BATCH, EPOCHS = 5, 3

rows = [json.loads(line) for line in Path("faq.jsonl").read_text(encoding="utf-8").splitlines()]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=0)
tokenizer = training.get_tokenizer()
end = tokenizer.convert_tokens_to_ids("<|im_end|>")


def datum_of(row: dict) -> trio.Datum:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": row["question"]}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    answer = tokenizer.encode(row["answer"], add_special_tokens=False) + [end]
    tokens = prompt + answer
    weights = [0.0] * len(prompt) + [1.0] * len(answer)
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[:-1]},
    )


data = [datum_of(row) for row in rows]
adam = trio.AdamParams(learning_rate=5e-4)
for epoch in range(EPOCHS):
    order = random.Random(epoch).sample(range(len(data)), len(data))
    for start in range(0, len(order), BATCH):
        batch = [data[i] for i in order[start : start + BATCH]]
        backward = training.forward_backward(batch, loss_fn="cross_entropy")
        update = training.optim_step(adam)
        print(f"epoch {epoch + 1} loss {backward.result().metrics['loss_mean']:.4f}")
        update.result()
print(training.save_weights_for_sampler("faq-lora").result().path)
