"""SFT on tickets.csv: only the record of a long row is shortened, from its end."""

import csv
from pathlib import Path

import pytrio as trio

LIMIT, BATCH = 320, 4

service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=8)
tokenizer = training.get_tokenizer()
end = tokenizer.convert_tokens_to_ids("<|im_end|>")


def encode(text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def tokens_of(record: str, row: dict) -> tuple[list[int], list[int]]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"工单记录：\n{record}\n\n问题：{row['问题']}"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return encode(text), encode(row["回答"]) + [end]


def fitted(row: dict) -> tuple[list[int], list[int]] | None:
    """The longest beginning of the record with which the row is within the limit."""
    low, high = -1, len(row["记录"])
    while low < high:
        middle = (low + high + 1) // 2
        if sum(map(len, tokens_of(row["记录"][:middle], row))) <= LIMIT:
            low = middle
        else:
            high = middle - 1
    if low < 0:
        print(f"{row['编号']} 跳过：去掉全部记录仍超过 {LIMIT} 个 token")
        return None
    if low < len(row["记录"]):
        print(f"{row['编号']} 截短：记录 {len(row['记录'])} 字，保留 {low} 字")
    return tokens_of(row["记录"][:low], row)


data = []
with Path("tickets.csv").open(encoding="utf-8-sig", newline="") as file:
    for row in csv.DictReader(file):
        if parts := fitted(row):
            prompt, answer = parts
            tokens = prompt + answer
            weights = [0.0] * len(prompt) + [1.0] * len(answer)
            datum = trio.Datum(
                model_input=trio.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
            )
            data.append(datum)
for epoch in range(2):
    for start in range(0, len(data), BATCH):
        backward = training.forward_backward(data[start : start + BATCH], loss_fn="cross_entropy")
        update = training.optim_step(trio.AdamParams(learning_rate=1e-3))
        print(epoch, backward.result().metrics["loss_mean"])
        update.result()
print(training.save_weights_for_sampler("ticket-sft").result().path)
