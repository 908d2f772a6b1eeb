"""On-policy distillation: the student samples, a large teacher scores exactly the same ids."""

import random

import pytrio as trio

from standin import words

STUDENT, TEACHER = "Qwen/Qwen3.5-4B", "Qwen/Qwen3.6-27B"
STEPS, PROMPTS, SAMPLES = 3, 4, 3

service = trio.ServiceClient()
training = service.create_lora_training_client(STUDENT, rank=16, seed=0)
teacher = service.create_sampling_client(TEACHER)
tokenizer = training.get_tokenizer()
sampling = trio.SamplingParams(max_tokens=64, temperature=1.0, stop=["<|im_end|>"])


def prompt_ids(messages: list[dict]) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return tokenizer.encode(text, add_special_tokens=False)


rng = random.Random(77)
for step in range(STEPS):
    conversations = [words.plain_prompt(words.row(rng)["question"]) for _ in range(PROMPTS)]
    student = training.save_weights_and_get_sampling_client()
    requests = []
    for messages in conversations:
        prompt = prompt_ids(messages)
        future = student.sample(trio.ModelInput.from_ints(prompt), SAMPLES, sampling)
        requests.append((messages, prompt, future))

    scored = []
    for _, prompt, future in requests:
        for sequence in future.result().sequences:
            context = prompt
            completion = sequence.tokens
            whole = trio.ModelInput.from_ints(context + completion)
            scored.append((prompt, context, sequence, teacher.compute_logprobs(whole)))

    data, kl_sum, count = [], 0.0, 0
    for prompt, context, sequence, future in scored:
        scores = future.result()
        teacher_logprobs = scores[len(context) :]
        student_logprobs = sequence.logprobs
        assert len(teacher_logprobs) == len(student_logprobs)
        pairs = list(zip(teacher_logprobs, student_logprobs, strict=True))
        gaps = [t - s for t, s in pairs]
        kl_sum, count = kl_sum - sum(gaps), count + len(gaps)
        ahead = len(prompt) - 1
        data.append(
            trio.Datum(
                model_input=trio.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": (prompt + sequence.tokens)[1:],
                    "logprobs": [0.0] * ahead + student_logprobs,
                    "advantages": [0.0] * ahead + gaps,
                },
            )
        )
    backward = training.forward_backward(data, loss_fn="importance_sampling")
    update = training.optim_step(trio.AdamParams(learning_rate=1e-4))
    backward.result()
    update.result()
    print(f"step {step} opd/reverse_kl_mean {kl_sum / count:.4f} tokens {count}")

print(training.save_weights_for_sampler("distilled").result().path)
