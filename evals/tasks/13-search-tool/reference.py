"""RL with a search tool: ids only grow, and only what was sampled carries the advantage."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytrio as trio

QUESTIONS, GROUP, SEARCHES = 2, 8, 3
SYSTEM = (
    "Answer the question. Call the search tool once per turn. "
    "Finish with a single line 'Answer: ...'."
)
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = {"name": "search", "description": "Search the facts.", "parameters": QUERY}
CALL = re.compile(r"<parameter=query>\s*(.*?)\s*</parameter>", re.DOTALL)


def rows_of(name: str) -> list[dict]:
    return [json.loads(x) for x in Path(name).read_text(encoding="utf-8").splitlines()]


facts = [row["text"] for row in rows_of("facts.jsonl")]
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16)
tokenizer = training.get_tokenizer()
params = trio.SamplingParams(max_tokens=72, temperature=1.0, stop=["<|im_end|>"])


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def search(query: str) -> str:
    shared = [len(words(query) & words(fact)) for fact in facts]
    best = max(shared)
    return facts[shared.index(best)] if best else "No results."


def encode(text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def render(*messages: tuple[str, str]) -> str:
    return tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tools=[{"type": "function", "function": SEARCH}],
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
    for searches in range(SEARCHES + 1):
        tokens += turn.tokens
        logprobs += turn.logprobs
        text = tokenizer.decode(turn.tokens, skip_special_tokens=False).removesuffix("<|im_end|>")
        if turn.stop_reason == "length":
            return tokens, logprobs, 0.0
        call = CALL.search(text)
        if call is None or searches == SEARCHES:
            break
        after = after_turn(search(call[1]))
        after = after[1:] if turn.tokens[-1] == after[0] else after
        tokens += after
        logprobs += [None] * len(after)
        request = sampler.sample(trio.ModelInput.from_ints(tokens), 1, params)
        turn = request.result().sequences[0]
    lines = re.findall(r"^Answer:(.*)$", text, re.MULTILINE)
    is_right = len(lines) == 1 and lines[0].strip().rstrip(".").lower() == answer.lower()
    return tokens, logprobs, float(is_right and "<tool_call>" not in text)


rows = rows_of("questions.jsonl")
for start in range(0, len(rows), QUESTIONS):
    batch = rows[start : start + QUESTIONS]
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
        backward = training.forward_backward(data, loss_fn="importance_sampling")
        update = training.optim_step(trio.AdamParams(learning_rate=2e-4))
        backward.result()
        update.result()
print(training.save_weights_for_sampler("searcher").result().path)
