"""On-policy distillation of the large stand-in into the small one; prints the sampled reverse KL
on held-out prompts before and after: `reverse_kl B A`."""

import random

import pytrio as trio

from standin import words

STEPS, PROMPTS, SAMPLES = 30, 8, 4
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=32, seed=0)
teacher = service.create_sampling_client("Qwen/Qwen3.6-27B")
tokenizer = training.get_tokenizer()
params = trio.SamplingParams(max_tokens=72, temperature=1.0)


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    texts = [
        tokenizer.apply_chat_template(
            words.plain_prompt(words.row(rng)["question"]),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        for _ in range(PROMPTS)
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def rollouts(prompts: list[list[int]]) -> list[tuple[list[int], object, list[float]]]:
    """(prompt, sequence, teacher log-probabilities of the sequence) of fresh student samples."""
    sampler = training.save_weights_and_get_sampling_client()
    futures = [sampler.sample(trio.ModelInput.from_ints(p), SAMPLES, params) for p in prompts]
    pairs = [(p, s) for p, f in zip(prompts, futures, strict=True) for s in f.result().sequences]
    scores = [teacher.compute_logprobs(trio.ModelInput.from_ints(p + s.tokens)) for p, s in pairs]
    return [(p, s, f.result()[len(p) :]) for (p, s), f in zip(pairs, scores, strict=True)]


def reverse_kl(samples: list) -> float:
    differences = [
        own - other
        for _, sequence, scores in samples
        for own, other in zip(sequence.logprobs, scores, strict=True)
    ]
    return sum(differences) / len(differences)


before = reverse_kl(rollouts(prompts_of(9999)))
for step in range(STEPS):
    data = []
    for prompt, sequence, scores in rollouts(prompts_of(step)):
        ahead = len(prompt) - 1
        advantages = [t - s for s, t in zip(sequence.logprobs, scores, strict=True)]
        data.append(
            trio.Datum(
                model_input=trio.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": [0] * ahead + sequence.tokens,
                    "logprobs": [0.0] * ahead + sequence.logprobs,
                    "advantages": [0.0] * ahead + advantages,
                },
            )
        )
    backward = training.forward_backward(data, loss_fn="importance_sampling")
    update = training.optim_step(trio.AdamParams(learning_rate=1e-4))
    backward.result(), update.result()
after = reverse_kl(rollouts(prompts_of(9999)))
training.save_weights_for_sampler("words").result()
print(f"reverse_kl {before:.4f} {after:.4f}")
