"""The same in another style: the untrained training client scores the reference."""

import json
from pathlib import Path

import pytrio as trio
import torch
import torch.nn.functional as F

BETA, BATCH = 0.1, 4

rows = [json.loads(line) for line in Path("pairs.jsonl").read_text(encoding="utf-8").splitlines()]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=0)
tokenizer = training.get_tokenizer()
end = tokenizer.convert_tokens_to_ids("<|im_end|>")


def sides_of(row: dict) -> list[tuple[list[int], int]]:
    """(tokens, length of the prompt) of the better and of the worse answer."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": row["prompt"]}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    order = ("a", "b") if row["better"] == "a" else ("b", "a")
    answers = [tokenizer.encode(row[f"answer_{x}"], add_special_tokens=False) for x in order]
    return [(prompt + answer + [end], len(prompt)) for answer in answers]


sides = [side for row in rows for side in sides_of(row)]
everything = [
    trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:]},
    )
    for tokens, _ in sides
]
# Before the first step the adapter changes nothing: the trainer itself is the reference.
scored = training.forward(everything, loss_fn="cross_entropy").result().loss_fn_outputs
reference = [
    sum(output["logprobs"].tolist()[start - 1 :])
    for (_, start), output in zip(sides, scored, strict=True)
]


def dpo(starts: list[int], references: list[float]):
    def loss_fn(data, logprobs):
        totals = [lp[start - 1 :].sum() for lp, start in zip(logprobs, starts, strict=True)]
        rewards = BETA * (torch.stack(totals) - torch.tensor(references))
        margins = rewards[0::2] - rewards[1::2]
        loss = -F.logsigmoid(margins).mean()
        return loss, {"dpo/loss": loss.item(), "dpo/margin": margins.mean().item()}

    return loss_fn


for first in range(0, len(sides), 2 * BATCH):
    batch = sides[first : first + 2 * BATCH]
    data = [
        trio.Datum(
            model_input=trio.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:]},
        )
        for tokens, _ in batch
    ]
    loss_fn = dpo([start for _, start in batch], reference[first : first + 2 * BATCH])
    backward = training.forward_backward_custom(data, loss_fn)
    update = training.optim_step(trio.AdamParams(learning_rate=5e-5))
    metrics = backward.result().metrics
    update.result()
    print(f"loss {metrics['dpo/loss']:.4f} margin {metrics['dpo/margin']:.4f}")
print(training.save_weights_for_sampler("dpo-polite").result().path)
