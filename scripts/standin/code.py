"""Integer maths too large for the stand-in's head but trivial for a `code_interpreter` tool.

Rows: {"id", "question", "answer"} plus "code", the call that solves it.
"""

from __future__ import annotations

import random
from typing import Any

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Run Python code and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}

SYSTEMS = (
    "Use the code tool to compute, then give the result in \\boxed{}.",
    "You may call code_interpreter. Print what you need. Put the final answer in \\boxed{}.",
    "Solve the problem with code. End with one line: \\boxed{answer}.",
    "Run Python code when it helps. Always print the result. The final line must be \\boxed{}.",
)
SYSTEM = SYSTEMS[0]


def row(rng: random.Random) -> dict[str, str]:
    """One expression; the answer has three or four digits and no sign."""
    while True:
        a, b, c = rng.randint(12, 99), rng.randint(12, 99), rng.randint(101, 999)
        kind = rng.randrange(4)
        expression = (
            f"{a} * {b}",
            f"{c} + {a} * {b}",
            f"{c} * {rng.randint(3, 9)}",
            f"{c} + {rng.randint(101, 999)} - {a}",
        )[kind]
        value = eval(expression)  # our own arithmetic, built from numbers two lines above
        if 100 <= value <= 9999:
            ask = rng.choice(
                ["Compute {}.", "What is {}?", "Evaluate {}.", "Find the value of {}."]
            )
            return {
                "id": f"code-{rng.randrange(10**6):06d}",
                "question": ask.format(expression),
                "answer": str(value),
                "code": f"print({expression})",
            }


def plain_prompt(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
