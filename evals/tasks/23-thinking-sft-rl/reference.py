"""SFT, GRPO and a greedy test, thinking on: the generation prompt opens the thought."""

import json
from pathlib import Path

import pytrio as trio

PROMPTS, GROUP = 2, 8


def rows_of(name: str) -> list[dict]:
    return [json.loads(x) for x in Path(name).read_text(encoding="utf-8").splitlines()]


service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=0)
tokenizer = training.get_tokenizer()
end = tokenizer.convert_tokens_to_ids("<|im_end|>")


def encode(question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question + " Put the final answer in \\boxed{}."}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=True,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def train(data: list[trio.Datum], loss: str, rate: float) -> None:
    backward = training.forward_backward(data, loss_fn=loss)
    update = training.optim_step(trio.AdamParams(learning_rate=rate))
    print(loss, backward.result().metrics["loss_mean"])
    update.result()


def thought_datum(row: dict) -> trio.Datum:
    prompt = encode(row["question"])
    text = f"{row['reasoning']}\n</think>\n\n{row['answer']}"
    answer = tokenizer.encode(text, add_special_tokens=False) + [end]
    tokens = prompt + answer
    weights = [0.0] * len(prompt) + [1.0] * len(answer)
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def reward_of(text: str, gold: str) -> float:
    _, closed, answer = text.rpartition("</think>")
    _, boxed, rest = answer.rpartition("\\boxed{")
    return float(bool(closed and boxed) and rest.partition("}")[0].strip() == gold)


thoughts = [thought_datum(row) for row in rows_of("thoughts.jsonl")]
for _ in range(2):
    for start in range(0, len(thoughts), 3):
        train(thoughts[start : start + 3], "cross_entropy", 5e-4)

params = trio.SamplingParams(max_tokens=96, temperature=1.0, stop=["<|im_end|>"])
problems = rows_of("rl.jsonl")
for start in range(0, len(problems), PROMPTS):
    batch = problems[start : start + PROMPTS]
    prompts = [encode(row["question"]) for row in batch]
    sampler = training.save_weights_and_get_sampling_client()
    futures = [sampler.sample(trio.ModelInput.from_ints(p), GROUP, params) for p in prompts]
    data = []
    for row, prompt, future in zip(batch, prompts, futures, strict=True):
        sequences = future.result().sequences
        rewards = [reward_of(s.text, row["gold"]) for s in sequences]
        mean = sum(rewards) / len(rewards)
        print(f"reward {mean:.2f}")
        if len(set(rewards)) == 1:
            continue
        ahead = len(prompt) - 1
        for sequence, reward in zip(sequences, rewards, strict=True):
            tokens = prompt + sequence.tokens
            data.append(
                trio.Datum(
                    model_input=trio.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tokens[1:],
                        "logprobs": [0.0] * ahead + sequence.logprobs,
                        "advantages": [0.0] * ahead + [reward - mean] * len(sequence.tokens),
                    },
                )
            )
    if data:
        train(data, "importance_sampling", 1e-4)

path = training.save_weights_for_sampler("thinker").result().path
sampler = training.create_sampling_client(path)
greedy = trio.SamplingParams(max_tokens=96, temperature=0.0, stop=["<|im_end|>"])
tests = rows_of("test.jsonl")
futures = [
    sampler.sample(trio.ModelInput.from_ints(encode(row["question"])), 1, greedy) for row in tests
]
texts = [future.result().sequences[0].text for future in futures]
scores = [reward_of(text, row["gold"]) for text, row in zip(texts, tests, strict=True)]
print(f"accuracy {sum(scores) / len(scores):.2f}")
