"""On-policy self-distillation: the teacher is the initial model that is shown the solution."""

import random
from collections import namedtuple

import pytrio as trio

from standin import words

MODEL = "Qwen/Qwen3.5-4B"
Item = namedtuple("Item", "plain privileged")

service = trio.ServiceClient()
training = service.create_lora_training_client(MODEL, rank=16, seed=6)
teacher = service.create_sampling_client(MODEL)  # the weights training starts from
tokenizer = training.get_tokenizer()


def ids_of(content: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def item_of(row: dict) -> Item:
    """The student's prompt and the teacher's; both end in the same generation prompt."""
    content = words.plain_prompt(row["question"])[0]["content"]
    shown = words.with_reference(content, words.completion(row))
    return Item(ids_of(content), ids_of(shown))


def collect(items: list[Item], samples: int) -> list[tuple[Item, trio.types.SampleSequence]]:
    sampler = training.save_weights_and_get_sampling_client()
    params = trio.SamplingParams(max_tokens=64, temperature=1.0, stop=["<|im_end|>"])
    futures = [sampler.sample(trio.ModelInput.from_ints(i.plain), samples, params) for i in items]
    return [(i, s) for i, f in zip(items, futures, strict=True) for s in f.result().sequences]


def train_on(pairs: list[tuple[Item, trio.types.SampleSequence]]) -> float:
    """One optimiser step; returns the mean log-ratio student to teacher per token."""
    futures = []
    for item, sequence in pairs:
        given = item.privileged
        scoring = trio.ModelInput.from_ints(given + sequence.tokens)
        futures.append(teacher.compute_logprobs(scoring))
    data, total, tokens = [], 0.0, 0
    for (item, sequence), future in zip(pairs, futures, strict=True):
        size = len(sequence.tokens)
        offset = len(item.privileged)
        judged = future.result()[offset : offset + size]
        advantages = [t - s for t, s in zip(judged, sequence.logprobs, strict=True)]
        total, tokens = total - sum(advantages), tokens + size
        context = item.plain
        zeros = [0.0] * (len(context) - 1)
        data.append(
            trio.Datum(
                model_input=trio.ModelInput.from_ints(context + sequence.tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": context[1:] + sequence.tokens,
                    "logprobs": zeros + sequence.logprobs,
                    "advantages": zeros + advantages,
                },
            )
        )
    backward = training.forward_backward(data, loss_fn="importance_sampling")
    update = training.optim_step(trio.AdamParams(learning_rate=1e-4))
    backward.result()
    update.result()
    return total / tokens


rng = random.Random(8)
for step in range(3):
    batch = [item_of(words.row(rng)) for _ in range(4)]
    print("step", step, "reverse_kl", round(train_on(collect(batch, samples=3)), 4))
print("saved", training.save_weights_for_sampler("self-distilled").result().path)
