"""Wrong: programs run apart and for two seconds only, but inherit our environment."""

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytrio as trio

STEPS, QUESTIONS, GROUP, CALLS, SECONDS = 4, 2, 8, 2, 2
SYSTEM = "Run Python code when it helps. Always print the result. The final line must be \\boxed{}."
CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOL = {
    "name": "code_interpreter",
    "description": "Run Python code and return what it prints.",
    "parameters": CODE,
}
CALL = re.compile(r"<parameter=code>\n?(.*?)\n?</parameter>", re.DOTALL)

rows = [json.loads(x) for x in Path("sums.jsonl").read_text(encoding="utf-8").splitlines()]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16)
tokenizer = training.get_tokenizer()
params = trio.SamplingParams(max_tokens=96, temperature=1.0, stop=["<|im_end|>"])


def run_code(code: str) -> str:
    """What a program prints. It gets a folder of its own and two seconds."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                timeout=SECONDS,
            )
        except (subprocess.TimeoutExpired, ValueError) as error:  # ValueError: a null in the code
            return "timeout" if isinstance(error, subprocess.TimeoutExpired) else str(error)
    text = (done.stdout + done.stderr).decode("utf-8", "replace").strip()[-400:]
    return text.replace("<", "< ") or "(no output)"


def encode(text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def render(*messages: tuple[str, str]) -> str:
    return tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tools=[{"type": "function", "function": TOOL}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )


def after_turn(result: str) -> list[int]:
    """What the template writes between two turns; a placeholder stands for the first."""
    text = render(("user", "-"), ("assistant", "PLACEHOLDER"), ("tool", result))
    return encode(text.partition("PLACEHOLDER")[2])


def play(sampler: trio.SamplingClient, prompt: list[int], first, answer: str):
    """(tokens, log-probabilities with None for what was not sampled, reward) of one attempt."""
    tokens, logprobs, turn = list(prompt), [None] * len(prompt), first
    for calls in range(CALLS + 1):
        tokens += turn.tokens
        logprobs += turn.logprobs
        text = tokenizer.decode(turn.tokens, skip_special_tokens=False).removesuffix("<|im_end|>")
        call = CALL.search(text)
        if turn.stop_reason == "length" or call is None or calls == CALLS:
            break
        after = after_turn(run_code(call[1]))
        after = after[1:] if turn.tokens[-1] == after[0] else after
        tokens += after
        logprobs += [None] * len(after)
        request = sampler.sample(trio.ModelInput.from_ints(tokens), 1, params)
        turn = request.result().sequences[0]
    boxes = re.findall(r"\\boxed\{\s*(-?\d+)\s*\}", text)
    is_final = turn.stop_reason != "length" and "<tool_call>" not in text
    return tokens, logprobs, 1.0 if is_final and boxes and boxes[-1] == answer else -1.0


for step in range(STEPS):
    batch = [rows[(step * QUESTIONS + i) % len(rows)] for i in range(QUESTIONS)]
    prompts = [encode(render(("system", SYSTEM), ("user", row["question"]))) for row in batch]
    sampler = training.save_weights_and_get_sampling_client()
    firsts = [sampler.sample(trio.ModelInput.from_ints(p), GROUP, params) for p in prompts]
    jobs = [
        (sampler, prompt, first, row["answer"])
        for row, prompt, future in zip(batch, prompts, firsts, strict=True)
        for first in future.result().sequences
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        attempts = list(pool.map(lambda job: play(*job), jobs))
    data = []
    for begin in range(0, len(attempts), GROUP):
        group = attempts[begin : begin + GROUP]
        mean = sum(reward for _, _, reward in group) / GROUP
        print(f"{batch[begin // GROUP]['question']} reward {mean:.2f}")
        for tokens, logprobs, reward in group:
            if reward != mean:
                advantages = [0.0 if x is None else reward - mean for x in logprobs]
                datum = trio.Datum(
                    model_input=trio.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tokens[1:],
                        "logprobs": [x or 0.0 for x in logprobs[1:]],
                        "advantages": advantages[1:],
                    },
                )
                data.append(datum)
    if data:
        backward = training.forward_backward(
            data,
            loss_fn="ppo",
            loss_fn_config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
        )
        update = training.optim_step(trio.AdamParams(learning_rate=2e-4))
        backward.result()
        update.result()
print(training.save_weights_for_sampler("coder").result().path)
