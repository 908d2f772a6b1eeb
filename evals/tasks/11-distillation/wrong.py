"""Wrong: the teacher's scores are cut one place too early, as if they spoke of targets."""

from pathlib import Path

import pytrio as trio

STUDENT, TEACHER = "Qwen/Qwen3.5-4B", "Qwen/Qwen3.6-27B"
PROMPTS, SAMPLES = 4, 4

questions = Path("questions.txt").read_text(encoding="utf-8").splitlines()
service = trio.ServiceClient()
training = service.create_lora_training_client(STUDENT, rank=16, seed=0)
teacher = service.create_sampling_client(TEACHER)
tokenizer = training.get_tokenizer()
params = trio.SamplingParams(max_tokens=128, temperature=1.0, stop=["<|im_end|>"])


def encode(question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question + " Put the final answer in \\boxed{}."}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


for start in range(0, len(questions), PROMPTS):
    prompts = [encode(question) for question in questions[start : start + PROMPTS]]
    student = training.save_weights_and_get_sampling_client()
    futures = [student.sample(trio.ModelInput.from_ints(p), SAMPLES, params) for p in prompts]
    samples = [
        (prompt, sequence)
        for prompt, future in zip(prompts, futures, strict=True)
        for sequence in future.result().sequences
    ]
    scoring = [
        teacher.compute_logprobs(trio.ModelInput.from_ints(prompt + sequence.tokens))
        for prompt, sequence in samples
    ]
    data, gaps = [], []
    for (prompt, sequence), future in zip(samples, scoring, strict=True):
        taught = future.result()[len(prompt) - 1 : -1]
        advantages = [t - s for t, s in zip(taught, sequence.logprobs, strict=True)]
        gaps += advantages
        ahead = len(prompt) - 1
        data.append(
            trio.Datum(
                model_input=trio.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": prompt[1:] + sequence.tokens,
                    "logprobs": [0.0] * ahead + sequence.logprobs,
                    "advantages": [0.0] * ahead + advantages,
                },
            )
        )
    backward = training.forward_backward(data, loss_fn="importance_sampling")
    update = training.optim_step(trio.AdamParams(learning_rate=1e-4))
    backward.result()
    update.result()
    print(f"reverse KL {-sum(gaps) / len(gaps):.4f}")
print(training.save_weights_for_sampler("opd-student").result().path)
