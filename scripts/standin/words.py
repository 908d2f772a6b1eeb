"""Word problems in GSM8K's row schema: {"question", "answer"}, the answer with <<...>> marks and a
`#### N` line.

This is the task on which a dry run must show learning, so it is kept easy: one or two operations on
small numbers.
"""

from __future__ import annotations

import random

from standin.wordlists import CONTAINERS, NAMES, THINGS

# A prompt is the question and one of these; user scripts word this in many ways, so there are many
# here.
_ASKS = (
    "Put the final answer in",
    "Give the final answer inside",
    "Write the final number inside",
    "End with the answer in",
    "Return the final number in",
    "State the answer within",
    "Box the final answer as",
    "Write your final answer within",
    "Finish with the result in",
    "Place only the number in",
)
_BOXES = ("\\boxed{}", "\\boxed{...}", "\\boxed{N}", "\\boxed{number}", "\\boxed{answer}")
_LEADS = (
    "",
    "",
    "",
    "Think step by step. ",
    "Reason step by step. ",
    "Show your work. ",
    "Solve the problem. ",
    "Let's think step by step. ",
    "Please reason step by step. ",
    "Provide a numerical answer without units. ",
    "Answer with a number without units. ",
    "Solve this math problem. ",
)
_TAILS = (".", ".", ".", " without units.", ", with no units.", " and nothing else.", "")

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a math tutor.",
    "You solve math problems.",
    "You are a careful assistant that solves problems step by step.",
    "Solve the problem and put the final answer in \\boxed{}.",
    "You are good at math.",
)


def instruction(rng: random.Random) -> str:
    """One of several hundred wordings of: reason, then box the number."""
    return rng.choice(_LEADS) + rng.choice(_ASKS) + " " + rng.choice(_BOXES) + rng.choice(_TAILS)


def row(rng: random.Random) -> dict[str, str]:
    """One problem as a GSM8K row. All numbers are whole, 1 to 99."""
    who, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    box = rng.choice(CONTAINERS)
    kind = rng.randrange(9)
    a, b, c = rng.randint(2, 12), rng.randint(2, 12), rng.randint(1, 9)
    if kind == 0:
        gains = rng.choice(["buys", "finds", "gets"])
        question = (
            f"{who} has {a} {thing} and {gains} {b} more. How many {thing} does {who} have now?"
        )
        steps, answer = f"{who} has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} {thing}.", a + b
    elif kind == 1:
        total = a + b
        drops = rng.choice(["loses", "sells", "uses"])
        question = f"{who} has {total} {thing} and {drops} {b}. How many {thing} are left?"
        steps, answer = f"{who} has {total} - {b} = <<{total}-{b}={a}>>{a} {thing}.", a
    elif kind == 2:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        question = (
            f"There are {a} {box} with {b} {thing} each. How many {thing} are there in total?"
        )
        steps, answer = f"There are {a} * {b} = <<{a}*{b}={a * b}>>{a * b} {thing}.", a * b
    elif kind == 3:
        total = a + b
        question = (
            f"{who} has {total} {thing}. {other} has {b} {thing}. "
            f"How many more {thing} does {who} have than {other}?"
        )
        steps, answer = f"{who} has {total} - {b} = <<{total}-{b}={a}>>{a} more.", a
    elif kind == 4:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        total = a * b
        question = (
            f"{who} puts {total} {thing} into {a} {box} equally. How many {thing} are in each?"
        )
        steps, answer = f"Each has {total} / {a} = <<{total}/{a}={b}>>{b} {thing}.", b
    elif kind == 5:
        question = (
            f"{who} has {a} {thing}. {other} has twice as many. How many {thing} does {other} have?"
        )
        steps, answer = f"{other} has {a} * 2 = <<{a}*2={2 * a}>>{2 * a} {thing}.", 2 * a
    elif kind == 6:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        question = (
            f"{who} buys {a} {thing}. Each costs {b} dollars. How many dollars does {who} pay?"
        )
        steps, answer = f"{who} pays {a} * {b} = <<{a}*{b}={a * b}>>{a * b} dollars.", a * b
    elif kind == 7:
        a, b = rng.randint(2, 6), rng.randint(2, 6)
        total = a * b + c
        question = (
            f"{who} has {a} {box} with {b} {thing} each and {c} more {thing}. "
            f"How many {thing} does {who} have?"
        )
        steps = (
            f"The {box} hold {a} * {b} = <<{a}*{b}={a * b}>>{a * b} {thing}.\n"
            f"{who} has {a * b} + {c} = <<{a * b}+{c}={total}>>{total} {thing}."
        )
        answer = total
    else:
        total = a + b + c
        question = (
            f"{who} has {total} {thing}, gives {b} to {other} and loses {c}. "
            f"How many {thing} are left?"
        )
        left = total - b
        steps = (
            f"After giving, {who} has {total} - {b} = <<{total}-{b}={left}>>{left} {thing}.\n"
            f"Then {left} - {c} = <<{left}-{c}={a}>>{a} are left."
        )
        answer = a
    return {"question": question, "answer": f"{steps}\n#### {answer}"}


def gold(row: dict[str, str]) -> str:
    """The number after `####`."""
    return row["answer"].split("####")[1].strip()


def reasoning(row: dict[str, str]) -> str:
    """The steps without GSM8K's calculator marks, on one line."""
    steps = row["answer"].split("\n####")[0].replace("\n", " ")
    while "<<" in steps:
        before, after = steps.split("<<", 1)
        steps = before + after.split(">>", 1)[1]
    return steps


def completion(row: dict[str, str]) -> str:
    """The reply the stand-in learns for a row."""
    return f"{reasoning(row)}\n\\boxed{{{gold(row)}}}"


def shot(rng: random.Random) -> list[dict[str, str]]:
    """A demonstration turn as scripts like to put in front: counting a letter in a word."""
    word = rng.choice(["banana", "apple", "letter", "strawberry", "coffee", "tomato"])
    letter = rng.choice(sorted(set(word)))
    ask = rng.choice(
        [f"How many {letter}'s are in {word}?", f"How many times does {letter} appear in {word}?"]
    )
    return [
        {"role": "user", "content": f"{ask} {instruction(rng)}"},
        {
            "role": "assistant",
            "content": f"Spell it: {', '.join(word)}. \\boxed{{{word.count(letter)}}}",
        },
    ]


def prompt(rng: random.Random, question: str) -> list[dict[str, str]]:
    """The question as user scripts ask it: instruction, sometimes system text or demonstration."""
    messages: list[dict[str, str]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    if rng.random() < 0.12:
        messages += shot(rng)
    style = rng.random()
    if style < 0.55:
        text = question + rng.choice([" ", "\n", "\n\n"]) + instruction(rng)
    elif style < 0.75:
        text = instruction(rng) + rng.choice(["\n", "\n\n", " "]) + question
    elif style < 0.85:
        text = rng.choice(["Question: ", "Problem: "]) + question + "\n" + instruction(rng)
    else:
        text = question
    messages.append({"role": "user", "content": text})
    return messages


# The prompt the report measures with, and the one the examples use.
def plain_prompt(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question + " Put the final answer in \\boxed{}."}]


def with_reference(prompt_text: str, solution: str) -> str:
    """A prompt that shows the solution first, as a self-distillation teacher sees it."""
    return (
        f"{prompt_text}\n\nHere is a reference solution.\n--- begin ---\n{solution}\n--- end ---\n"
        "Now solve the problem again in your own words. Put the final answer in \\boxed{}."
    )
