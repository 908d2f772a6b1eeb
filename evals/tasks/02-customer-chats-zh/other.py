"""The same in another style: one sample per conversation with all of its replies."""

import json
from pathlib import Path

import pytrio as trio

service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=32)
tokenizer = training.get_tokenizer()


def encode(text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def datum_of(messages: list[dict]) -> trio.Datum:
    """The template's text piece by piece: only the last turn has the empty think block."""
    targets: list[int] = []
    tokens: list[int] = []
    for number, message in enumerate(messages):
        is_last = number == len(messages) - 1
        think = "<think>\n\n</think>\n\n" if is_last else ""
        head = encode(f"<|im_start|>{message['role']}\n{think}")
        body = encode(message["content"] + "<|im_end|>")
        tail = encode("\n")
        tokens += head + body + tail
        is_reply = message["role"] == "assistant"
        targets += [-100] * len(head) + (body if is_reply else [-100] * len(body))
        targets += [-100] * len(tail)
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": targets[1:],
            "weights": [float(target != -100) for target in targets[1:]],
        },
    )


lines = Path("chats.jsonl").read_text(encoding="utf-8").splitlines()
data = [datum_of(json.loads(line)["messages"]) for line in lines]
for _ in range(2):
    backward = training.forward_backward(data, loss_fn="cross_entropy")
    update = training.optim_step(trio.AdamParams(learning_rate=1e-4))
    print(backward.result().metrics)
    update.result()
training.save_weights_for_sampler("kefu").result()
training.save_state("kefu-state").result()
