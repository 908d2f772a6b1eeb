"""Wrong: the baseline is the mean over the whole step instead of over the samples of one review."""

import json
from pathlib import Path

import pytrio as trio

STEPS, REVIEWS, GROUP = 4, 3, 8
INSTRUCTION = (
    "Answer with one JSON object and nothing else. Keys: product (string), "
    "rating (integer 1 to 5), problem (string or null).\n\nReview: "
)

texts = [
    json.loads(line)["text"]
    for line in Path("reviews.jsonl").read_text(encoding="utf-8").splitlines()
]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=0)
tokenizer = training.get_tokenizer()
params = trio.SamplingParams(max_tokens=96, temperature=1.0, stop=["<|im_end|>"])


def encode(review: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": INSTRUCTION + review}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def reward_of(tokens: list[int]) -> float:
    text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    try:
        value = json.loads(text)
    except ValueError:
        return 0.0
    if not isinstance(value, dict) or set(value) != {"product", "rating", "problem"}:
        return 0.0
    rating, problem = value["rating"], value["problem"]
    is_rating = isinstance(rating, int) and not isinstance(rating, bool) and 1 <= rating <= 5
    is_text = isinstance(value["product"], str) and (problem is None or isinstance(problem, str))
    return float(is_rating and is_text)


for step in range(STEPS):
    batch = [texts[(step * REVIEWS + i) % len(texts)] for i in range(REVIEWS)]
    prompts = [encode(review) for review in batch]
    sampler = training.save_weights_and_get_sampling_client()
    futures = [sampler.sample(trio.ModelInput.from_ints(p), GROUP, params) for p in prompts]
    groups = [future.result().sequences for future in futures]
    rewards = [[reward_of(s.tokens) for s in group] for group in groups]
    everything = [reward for scores in rewards for reward in scores]
    baselines = [sum(everything) / len(everything)] * len(rewards)
    print(f"step {step} rewards {[round(b, 2) for b in baselines]}")
    data = []
    for prompt, group, scores, baseline in zip(prompts, groups, rewards, baselines, strict=True):
        if len(set(scores)) == 1:
            continue
        ahead = len(prompt) - 1
        for sequence, reward in zip(group, scores, strict=True):
            tokens = prompt + sequence.tokens
            data.append(
                trio.Datum(
                    model_input=trio.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tokens[1:],
                        "logprobs": [0.0] * ahead + sequence.logprobs,
                        "advantages": [0.0] * ahead + [reward - baseline] * len(sequence.tokens),
                    },
                )
            )
    if data:
        backward = training.forward_backward(data, loss_fn="importance_sampling")
        update = training.optim_step(trio.AdamParams(learning_rate=1e-4))
        backward.result()
        update.result()
print(training.save_weights_for_sampler("review-json").result().path)
