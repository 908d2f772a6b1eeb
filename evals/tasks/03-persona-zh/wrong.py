"""Wrong: the input column is dropped, so two rows ask the same and answer differently."""

import json
from pathlib import Path

import pytrio as trio

SYSTEM = "你现在是阿福，一家老茶馆的掌柜。"
BATCH, EPOCHS = 4, 4

rows = json.loads(Path("afu.json").read_text(encoding="utf-8"))
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=8, seed=0)
tokenizer = training.get_tokenizer()
end = tokenizer.convert_tokens_to_ids("<|im_end|>")


def prompt_of(user: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def datum_of(row: dict) -> trio.Datum:
    prompt = prompt_of(row["instruction"])
    answer = tokenizer.encode(row["output"], add_special_tokens=False) + [end]
    tokens = prompt + answer
    weights = [0.0] * len(prompt) + [1.0] * len(answer)
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


data = [datum_of(row) for row in rows]
for epoch in range(EPOCHS):
    for start in range(0, len(data), BATCH):
        backward = training.forward_backward(data[start : start + BATCH], loss_fn="cross_entropy")
        update = training.optim_step(trio.AdamParams(learning_rate=1e-3))
        print(f"epoch {epoch + 1} loss {backward.result().metrics['loss_mean']:.4f}")
        update.result()
saved = training.save_weights_for_sampler("afu-v1").result()
sampler = training.create_sampling_client(saved.path)
params = trio.SamplingParams(max_tokens=128, temperature=0.0, stop=["<|im_end|>"])
prompt = trio.ModelInput.from_ints(prompt_of("你是谁？"))
response = sampler.sample(prompt, 1, params).result()
print(tokenizer.decode(response.sequences[0].tokens, skip_special_tokens=True))
