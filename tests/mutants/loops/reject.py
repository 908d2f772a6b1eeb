"""Rejection sampling: supervised fine-tuning on the model's own right answers."""

import random
import re

import pytrio as trio

from standin import words

service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=17)
tokenizer = training.get_tokenizer()
rng = random.Random(909)


def prompt_tokens(question: str) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        words.plain_prompt(question),
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(rendered, add_special_tokens=False)


def right_answers(rows: list[dict], tries: int, keep: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, completion) ids of the shortest right samples of every row."""
    sampler = training.save_weights_and_get_sampling_client()
    params = trio.SamplingParams(max_tokens=64, temperature=1.0, stop=["<|im_end|>"])
    prompts = [prompt_tokens(row["question"]) for row in rows]
    futures = [sampler.sample(trio.ModelInput.from_ints(p), tries, params) for p in prompts]
    kept = []
    for row, prompt, future in zip(rows, prompts, futures, strict=True):
        right = []
        for sequence in future.result().sequences:
            boxes = re.findall(r"\\boxed\{(-?\d+)\}", sequence.text)
            if sequence.stop_reason == "stop" and boxes[-1:] == [words.gold(row)]:
                right.append(sequence.tokens)
        unique = [list(ids) for ids in sorted(set(map(tuple, right)), key=len)]
        kept += [(prompt, ids) for ids in unique[:keep]]
    return kept


for round_number in range(3):
    chosen = right_answers([words.row(rng) for _ in range(4)], tries=6, keep=2)
    data = []
    for prompt, completion in chosen:
        tokens = prompt + completion
        weights = [0.0] * len(prompt) + [1.0] * len(completion)
        data.append(
            trio.Datum(
                model_input=trio.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
            )
        )
    if not data:
        continue
    backward = training.forward_backward(data, loss_fn="cross_entropy")
    update = training.optim_step(trio.AdamParams(learning_rate=2e-4))
    print(
        f"round {round_number} rows {len(data)} loss {backward.result().metrics['loss_mean']:.4f}"
    )
    update.result()

print("saved", training.save_weights_for_sampler("best-of-n").result().path)
