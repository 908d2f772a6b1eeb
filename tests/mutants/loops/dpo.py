"""Direct preference optimisation with a reference that scores exactly the trained ids.

    loss = -mean log sigmoid(beta * ((pi_c - ref_c) - (pi_r - ref_r)))

with pi and ref the log-probability of a whole answer, summed over its tokens.
"""

import random
from dataclasses import dataclass

import pytrio as trio
import torch
import torch.nn.functional as F

from standin import chat

MODEL, BETA, PAIRS, STEPS = "Qwen/Qwen3.5-4B", 0.1, 4, 3


@dataclass
class Side:
    """One answer behind its prompt; `start` is the index of the first answer token."""

    tokens: list[int]
    start: int
    reference: float = 0.0

    def datum(self) -> trio.Datum:
        return trio.Datum(
            model_input=trio.ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={"target_tokens": self.tokens[1:]},
        )


service = trio.ServiceClient()
training = service.create_lora_training_client(MODEL, rank=16, seed=9)
reference = service.create_sampling_client(MODEL)
tokenizer = training.get_tokenizer()
END = tokenizer.convert_tokens_to_ids("<|im_end|>")


def prompt_of(messages: list[dict]) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return tokenizer.encode(text, add_special_tokens=False)


def pair_of(row: dict) -> tuple[Side, Side]:
    """HH-RLHF's two transcripts as chosen and rejected sides of one prompt."""
    human, chosen = row["chosen"].split("\n\nAssistant: ", 1)
    rejected = row["rejected"].split("\n\nAssistant: ", 1)[1]
    messages = [{"role": "user", "content": human.removeprefix("\n\nHuman: ")}]
    prompt = prompt_of(messages)
    good = tokenizer.encode(chosen, add_special_tokens=False) + [END]
    bad = tokenizer.encode(rejected, add_special_tokens=False) + [END]
    return Side(prompt + good, len(prompt)), Side(prompt + bad, len(prompt))


def add_references(sides: list[Side]) -> None:
    futures = [reference.compute_logprobs(trio.ModelInput.from_ints(s.tokens)) for s in sides]
    for side, future in zip(sides, futures, strict=True):
        side.reference = sum(future.result()[side.start :])


rng = random.Random(12)
for step in range(STEPS):
    pairs = [pair_of(chat.preference_row(rng)) for _ in range(PAIRS)]
    sides = [side for pair in pairs for side in pair]
    add_references(sides)
    references = [side.reference for side in sides]
    # Target t is token t + 1, so the answer begins one place earlier among the targets.
    starts = [side.start - 1 for side in sides]

    def dpo_loss(data, logprobs, starts=starts, references=references):
        totals = torch.stack([lp[at:].sum() for lp, at in zip(logprobs, starts, strict=True)])
        rewards = BETA * (totals - torch.tensor(references))
        margins = rewards[0::2] - rewards[1::2]
        loss = -F.logsigmoid(margins).mean()
        return loss, {"dpo/loss": loss.item(), "dpo/margin": margins.mean().item()}

    backward = training.forward_backward_custom([side.datum() for side in sides], dpo_loss)
    update = training.optim_step(trio.AdamParams(learning_rate=2e-4))
    metrics = backward.result().metrics
    update.result()
    print(f"step {step} loss {metrics['dpo/loss']:.4f} margin {metrics['dpo/margin']:.4f}")

print("saved", training.save_weights_for_sampler("dpo-polite").result().path)
