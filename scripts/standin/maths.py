"""Slightly harder integer maths as rows {"problem", "solution", "answer"}: two steps, equations."""

from __future__ import annotations

import random


def row(rng: random.Random) -> dict[str, str]:
    """One problem; the solution is the reasoning to learn, the answer is a decimal integer."""
    kind = rng.randrange(7)
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 9)
    if kind == 0:
        problem = f"{rng.choice(['Compute', 'Evaluate', 'Find the value of'])} {c} + {a} * {b}."
        solution, answer = f"{a} * {b} = {a * b}. {c} + {a * b} = {c + a * b}.", c + a * b
    elif kind == 1:
        problem = f"{rng.choice(['Compute', 'Evaluate', 'Find the value of'])} ({a} + {b}) * {c}."
        solution, answer = f"{a} + {b} = {a + b}. {a + b} * {c} = {(a + b) * c}.", (a + b) * c
    elif kind == 2:
        total = a * b + rng.randint(0, a - 1)
        problem = f"What is the remainder when {total} is divided by {a}?"
        solution, answer = (
            f"{a} * {b} = {a * b}. {total} - {a * b} = {total - a * b}.",
            total - a * b,
        )
    elif kind == 3:
        problem = f"Solve for x: x + {a} = {a + b + c}."
        solution, answer = f"x = {a + b + c} - {a} = {b + c}.", b + c
    elif kind == 4:
        problem = f"Solve for x: {a} * x = {a * b}."
        solution, answer = f"x = {a * b} / {a} = {b}.", b
    elif kind == 5:
        first, step = rng.randint(1, 20), rng.randint(2, 9)
        seq = [first + i * step for i in range(5)]
        problem = f"What comes next: {', '.join(map(str, seq[:4]))}?"
        solution, answer = f"The step is {step}. {seq[3]} + {step} = {seq[4]}.", seq[4]
    else:
        problem = f"{rng.choice(['Compute', 'Evaluate', 'Find the value of'])} {a}^2 - {c}."
        solution, answer = f"{a} * {a} = {a * a}. {a * a} - {c} = {a * a - c}.", a * a - c
    return {"problem": problem, "solution": solution, "answer": str(answer)}


def completion(row: dict[str, str]) -> str:
    return f"{row['solution']}\n\\boxed{{{row['answer']}}}"


def plain_prompt(problem: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem + " Put the final answer in \\boxed{}."}]
