"""Multi-turn tool use with reinforcement learning: one datum a trajectory, tokens never re-encoded.

The next turn's prompt is the previous prompt, the sampled tokens and what the template puts
between two turns. Observations are in the context and carry no advantage.
"""

import ast
import operator
import random
import re
from dataclasses import dataclass, field

import pytrio as trio

from standin import code

STEPS, PROMPTS, GROUP, MAX_TURNS = 2, 3, 6, 3
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=4)
tokenizer = training.get_tokenizer()
END = tokenizer.convert_tokens_to_ids("<|im_end|>")
params = trio.SamplingParams(max_tokens=80, temperature=1.0, stop=["<|im_end|>"])


@dataclass
class Trajectory:
    """Token ids so far; `logprobs[i]` is None where the environment wrote token i."""

    ids: list[int]
    logprobs: list[float | None]
    texts: list[str] = field(default_factory=list)
    done: bool = False
    reward: float = 0.0


def encode(text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def render(messages: list[dict]) -> str:
    return tokenizer.apply_chat_template(
        messages,
        tools=[code.TOOL],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )


def between_turns(observation: str) -> list[int]:
    """What follows an assistant's end token when a tool has answered, from the template."""
    marker = "MARKER"
    conversation = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": marker},
        {"role": "tool", "content": observation},
    ]
    return encode(render(conversation).split(marker + tokenizer.decode([END]), 1)[1])


def value_of(node: ast.AST) -> int:
    """Whole-number arithmetic, and nothing else that a model may write."""
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError("not arithmetic")


def run_tool(program: str) -> str:
    printed = re.fullmatch(r"print\((.*)\)", program)
    try:
        result = value_of(ast.parse(printed[1] if printed else program, mode="eval").body)
    except (SyntaxError, ValueError):
        return "SyntaxError: invalid syntax"
    return str(result) if printed else ""


def advance(trajectory: Trajectory, sequence: trio.types.SampleSequence, row: dict) -> None:
    """Add a sampled turn, then either finish or add the tool's answer."""
    tokens = list(sequence.tokens)
    logprobs = list(sequence.logprobs)
    trajectory.ids += tokens
    trajectory.logprobs += logprobs
    trajectory.texts.append(sequence.text)
    called = re.search(r"<parameter=code>\n(.+)\n</parameter>\n</function>", sequence.text)
    last = len(trajectory.texts) == MAX_TURNS or sequence.stop_reason != "stop"
    if called and not last:
        observed = between_turns(run_tool(called[1]))
        trajectory.ids += observed
        trajectory.logprobs += [None] * len(observed)
        return
    boxes = re.findall(r"\\boxed\{(\d+)\}", sequence.text)
    trajectory.reward = float(boxes[-1:] == [row["answer"]])
    trajectory.done = True


def rollout(sampler: trio.SamplingClient, rows: list[dict]) -> list[list[Trajectory]]:
    """GROUP trajectories for every row; every turn is sampled for all at once."""
    prompts = [encode(render(code.plain_prompt(row["question"]))) for row in rows]
    first = [sampler.sample(trio.ModelInput.from_ints(p), GROUP, params) for p in prompts]
    groups = []
    for prompt, row, future in zip(prompts, rows, first, strict=True):
        group = []
        for sequence in future.result().sequences:
            trajectory = Trajectory(list(prompt), [None] * len(prompt))
            advance(trajectory, sequence, row)
            group.append(trajectory)
        groups.append(group)
    while True:
        live = [(t, r) for g, r in zip(groups, rows, strict=True) for t in g if not t.done]
        if not live:
            return groups
        turns = [sampler.sample(trio.ModelInput.from_ints(t.ids), 1, params) for t, _ in live]
        for (trajectory, row), future in zip(live, turns, strict=True):
            advance(trajectory, future.result().sequences[0], row)


def datum_of(trajectory: Trajectory, advantage: float) -> trio.Datum:
    sampled = [lp is not None for lp in trajectory.logprobs]
    old = [0.0 if lp is None else lp for lp in trajectory.logprobs]
    advantages = [advantage if own else 0.0 for own in sampled]
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(trajectory.ids[:-1]),
        loss_fn_inputs={
            "target_tokens": trajectory.ids[1:],
            "logprobs": old[1:],
            "advantages": advantages[1:],
        },
    )


rng = random.Random(31)
for step in range(STEPS):
    sampler = training.save_weights_and_get_sampling_client()
    groups = rollout(sampler, [code.row(rng) for _ in range(PROMPTS)])
    data = []
    for group in groups:
        mean = sum(t.reward for t in group) / len(group)
        if all(t.reward == mean for t in group):
            continue
        data += [datum_of(t, t.reward - mean) for t in group]
    everything = [t for group in groups for t in group]
    print(
        f"step {step} reward {sum(t.reward for t in everything) / len(everything):.2f}",
        f"turns {sum(len(t.texts) for t in everything) / len(everything):.2f}",
        f"datums {len(data)}",
    )
    if data:
        backward = training.forward_backward(data, loss_fn="importance_sampling")
        update = training.optim_step(trio.AdamParams(learning_rate=1e-4))
        print("loss", backward.result().metrics["loss_mean"])
        update.result()

print("state", training.save_state("tools-final").result().path)
print("weights", training.save_weights_for_sampler("tools-rl").result().path)
