"""OPSD: the untrained model, shown the solution, scores what the student writes without it."""

import json
from pathlib import Path

import pytrio as trio

MODEL, STEPS, PROBLEMS, SAMPLES = "Qwen/Qwen3.5-4B", 4, 4, 2
ASK = " Put the final answer in \\boxed{}."

rows = [json.loads(x) for x in Path("worked.jsonl").read_text(encoding="utf-8").splitlines()]
service = trio.ServiceClient()
training = service.create_lora_training_client(MODEL, rank=16, seed=0)
teacher = service.create_sampling_client(MODEL)
tokenizer = training.get_tokenizer()
params = trio.SamplingParams(max_tokens=64, temperature=1.0, stop=["<|im_end|>"])


def encode(content: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def teacher_prompt_of(row: dict) -> list[int]:
    return encode(
        f"{row['problem']}{ASK}\n\nHere is a reference solution.\n--- begin ---\n"
        f"{row['solution']}\n--- end ---\nNow solve the problem again in your own words.{ASK}"
    )


for step in range(STEPS):
    batch = [rows[(step * PROBLEMS + i) % len(rows)] for i in range(PROBLEMS)]
    prompts = [encode(row["problem"] + ASK) for row in batch]
    hints = [teacher_prompt_of(row) for row in batch]
    student = training.save_weights_and_get_sampling_client()
    futures = [student.sample(trio.ModelInput.from_ints(p), SAMPLES, params) for p in prompts]
    samples = [
        (prompt, hint, sequence)
        for prompt, hint, future in zip(prompts, hints, futures, strict=True)
        for sequence in future.result().sequences
    ]
    scorings = [
        teacher.compute_logprobs(trio.ModelInput.from_ints(hint + sequence.tokens))
        for _, hint, sequence in samples
    ]
    data, gaps = [], []
    for (prompt, hint, sequence), scoring in zip(samples, scorings, strict=True):
        scores = scoring.result()[len(hint) :]
        advantages = [t - s for t, s in zip(scores, sequence.logprobs, strict=True)]
        gaps += advantages
        tokens, ahead = prompt + sequence.tokens, [0.0] * (len(prompt) - 1)
        data.append(
            trio.Datum(
                model_input=trio.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "logprobs": ahead + sequence.logprobs,
                    "advantages": ahead + advantages,
                },
            )
        )
    backward = training.forward_backward(data, loss_fn="importance_sampling")
    update = training.optim_step(trio.AdamParams(learning_rate=2e-4))
    backward.result()
    update.result()
    print(f"step {step} reverse KL {-sum(gaps) / len(gaps):.4f}")
print(training.save_weights_for_sampler("opsd-small").result().path)
