"""A first small run: four steps of SFT, SwanLab offline, weights that stay, the price of it all."""

import json
from pathlib import Path

import pytrio as trio
import swanlab

SMALL, BATCH, EPOCHS, PRICE = 16, 4, 3, 5.0

rows = [json.loads(x) for x in Path("slogans.jsonl").read_text(encoding="utf-8").splitlines()]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16)
tokenizer = training.get_tokenizer()
end = tokenizer.convert_tokens_to_ids("<|im_end|>")


def datum_of(row: dict) -> trio.Datum:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": row["prompt"]}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    answer = tokenizer.encode(row["response"], add_special_tokens=False) + [end]
    tokens = prompt + answer
    weights = [0.0] * len(prompt) + [1.0] * len(answer)
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


data = [datum_of(row) for row in rows]
swanlab.init(project="slogans", name="small-run", mode="offline", log_dir="swanlog")
trained_tokens = 0
for step, start in enumerate(range(0, SMALL, BATCH), start=1):
    batch = data[start : start + BATCH]
    backward = training.forward_backward(batch, loss_fn="cross_entropy")
    update = training.optim_step(trio.AdamParams(learning_rate=1e-3))
    metrics = backward.result().metrics
    update.result()
    trained_tokens += sum(datum.model_input.length for datum in batch)
    print(step, metrics["loss_mean"])
    swanlab.log({"loss": float(metrics["loss_mean"])}, step=step)
swanlab.finish()
print(training.save_weights_for_sampler("slogans-small").result().path)
tokens = EPOCHS * sum(datum.model_input.length for datum in data)
estimate = {"train_tokens": tokens, "cost_yuan": round(tokens / 1e6 * PRICE, 4)}
Path("estimate.json").write_text(json.dumps(estimate), encoding="utf-8")
print(f"这次训练了 {trained_tokens} 个 token；全量 {EPOCHS} 遍的估算：", estimate)
