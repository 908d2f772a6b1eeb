"""Supervised fine-tuning on single-turn chat, in batches, with one question asked at the end."""

import random

import pytrio as trio

from standin import chat

BASE_MODEL = "Qwen/Qwen3.5-4B"
BATCH_SIZE = 6
MAX_LENGTH = 38

rng = random.Random(11)
rows = []
for _ in range(20):
    question, replies = chat.exchange(rng)
    rows.append((question, rng.choice(replies)))

service = trio.ServiceClient()
training = service.create_lora_training_client(BASE_MODEL, rank=16, seed=3)
tokenizer = training.get_tokenizer()
END = tokenizer.convert_tokens_to_ids("<|im_end|>")


def render(question: str, add_generation_prompt: bool = True) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def build(question: str, reply: str) -> trio.Datum | None:
    prompt = render(question)
    answer = tokenizer.encode(reply, add_special_tokens=False) + [END]
    tokens = prompt + answer
    mask = [0.0] * len(prompt) + [1.0] * len(answer)
    if len(tokens) > MAX_LENGTH:
        return None  # cutting it would lose the end token
    inputs = tokens[:-1]
    targets = tokens[1:]
    weights = mask[1:]
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(inputs),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )


adam = trio.AdamParams(learning_rate=5e-4)
data = [datum for row in rows if (datum := build(*row)) is not None]
print(f"{len(data)} of {len(rows)} conversations fit")
for start in range(0, len(data), BATCH_SIZE):
    batch = data[start : start + BATCH_SIZE]
    backward = training.forward_backward(batch, loss_fn="cross_entropy")
    step = training.optim_step(adam)
    metrics = backward.result().metrics
    step.result()
    print(f"rows {start}+{len(batch)} loss {metrics['loss_mean']:.4f}")

saved = training.save_weights_for_sampler("chat-sft").result()
print("saved", saved.path)
sampler = training.create_sampling_client(saved.path)
answered = sampler.sample(
    trio.ModelInput.from_ints(render("What is a river?")),
    1,
    trio.SamplingParams(max_tokens=48, temperature=0.0, stop=["<|im_end|>"]),
).result()
print(answered.sequences[0].stop_reason, answered.sequences[0].text)
