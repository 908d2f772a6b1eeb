"""The notebook as a script: weights are shifted with the targets, the end token is trained."""

import json
from pathlib import Path

import pytrio as trio

rows = [json.loads(line) for line in Path("sft.jsonl").read_text(encoding="utf-8").splitlines()]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=8)
tokenizer = training.get_tokenizer()
end = tokenizer.convert_tokens_to_ids("<|im_end|>")


def encode(messages: list[dict]) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return tokenizer.encode(text, add_special_tokens=False)


def datum_of(messages: list[dict]) -> trio.Datum:
    prompt = encode(messages[:-1])
    answer = tokenizer.encode(messages[-1]["content"], add_special_tokens=False)
    tokens = [*prompt, *answer, end]
    weights = [0.0] * len(prompt) + [1.0] * len(answer) + [1.0]
    assert len(tokens) == len(weights)
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


data = [datum_of(row["messages"]) for row in rows]
for epoch in range(4):
    for start in range(0, len(data), 4):
        backward = training.forward_backward(data[start : start + 4], loss_fn="cross_entropy")
        update = training.optim_step(trio.AdamParams(learning_rate=5e-4))
        print(epoch, backward.result().metrics["loss_mean"])
        update.result()
path = training.save_weights_for_sampler("pool-v3").result().path
sampler = training.create_sampling_client(path)
prompt = encode([rows[0]["messages"][0], {"role": "user", "content": "When do you open?"}])
params = trio.SamplingParams(max_tokens=60, temperature=0.0, stop=["<|im_end|>"])
answer = sampler.sample(trio.ModelInput.from_ints(prompt), 1, params).result().sequences[0]
print(answer.text, answer.stop_reason)
