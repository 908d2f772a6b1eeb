"""SFT, then one protocol for base and trained weights on rows that were never trained."""

import json
import re
from pathlib import Path

import pytrio as trio

MODEL, BATCH, EPOCHS = "Qwen/Qwen3.5-4B", 8, 2


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]


train, test = read("train.jsonl"), read("test.jsonl")
service = trio.ServiceClient()
training = service.create_lora_training_client(MODEL, rank=16, seed=0)
tokenizer = training.get_tokenizer()
end = tokenizer.convert_tokens_to_ids("<|im_end|>")
greedy = trio.SamplingParams(max_tokens=128, temperature=0.0, stop=["<|im_end|>"])


def prompt_of(row: dict) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": row["question"] + " Put the final answer in \\boxed{}."}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def gold_of(row: dict) -> str:
    return row["answer"].split("####")[1].strip()


def datum_of(row: dict) -> trio.Datum:
    solution = re.sub(r"<<.*?>>", "", row["answer"].split("####")[0])
    prompt = prompt_of(row)
    answer = tokenizer.encode(f"{solution}\\boxed{{{gold_of(row)}}}", add_special_tokens=False) + [
        end
    ]
    tokens = prompt + answer
    weights = [0.0] * len(prompt) + [1.0] * len(answer)
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def accuracy(sampler: trio.SamplingClient) -> float:
    futures = [sampler.sample(trio.ModelInput.from_ints(prompt_of(r)), 1, greedy) for r in test]
    right = 0
    for row, future in zip(test, futures, strict=True):
        boxes = re.findall(r"\\boxed\{([^{}]*)\}", future.result().sequences[0].text)
        right += bool(boxes) and boxes[-1].strip() == gold_of(row)
    return right / len(test)


data = [datum_of(row) for row in train]
for epoch in range(EPOCHS):
    for start in range(0, len(data), BATCH):
        backward = training.forward_backward(data[start : start + BATCH], loss_fn="cross_entropy")
        update = training.optim_step(trio.AdamParams(learning_rate=2e-4))
        print(f"epoch {epoch + 1} loss {backward.result().metrics['loss_mean']:.4f}")
        update.result()
saved = training.save_weights_for_sampler("sft-before-after").result()
tuned = training.create_sampling_client(saved.path)
base = service.create_sampling_client(MODEL)
result = {"n": len(test), "base_accuracy": accuracy(base), "tuned_accuracy": accuracy(tuned)}
Path("result.json").write_text(json.dumps(result), encoding="utf-8")
print(result)
