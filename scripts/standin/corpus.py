"""Episodes for pre-training: what is asked, what the model writes, what the tools answer, with
deliberate mistakes.

An episode is kept as a prompt and turns, not as rendered messages, because that is how a right loop
sees it: the prompt comes from the chat template, every completion is a token sequence of its own,
and each tool result is appended behind it together with the next generation prompt.

`NOISE` says how often each kind of mistake is made. The mistakes are choices ("guess instead of
reasoning", "forget the box"), not blurred knowledge: the model underneath stays able, so
reinforcement learning can bring the ability out.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from standin import chat, code, household, maths, search, words
from standin.wordlists import CITIES, NAMES, THINGS

FAMILIES = ("qwen3.5", "qwen3")

# Conversations of each task in a training batch; the long ones are few.
MIX = {
    "words": 0.38,
    "maths": 0.16,
    "chat": 0.20,
    "search": 0.10,
    "code": 0.09,
    "household": 0.022,
    "copy": 0.03,
}

# In the second stage the tasks that are learnt slowly get more.
END_MIX = {
    "words": 0.30,
    "maths": 0.26,
    "chat": 0.15,
    "search": 0.15,
    "code": 0.06,
    "household": 0.06,
    "copy": 0.02,
}

# The last stage of the large model: mostly maths, a little of all else so that it is not forgotten.
MATHS_MIX = {
    "words": 0.15,
    "maths": 0.60,
    "chat": 0.10,
    "search": 0.08,
    "code": 0.05,
    "household": 0.02,
}

# task -> mistake -> probability, per assistant turn.
NOISE: dict[str, dict[str, float]] = {
    "words": {"guess": 0.20, "no_box": 0.12, "slip": 0.10},
    "maths": {"guess": 0.20, "no_box": 0.12, "slip": 0.10},
    "chat": {"curt": 0.35},
    "search": {
        "guess": 0.11,
        "give_up": 0.06,
        "malformed": 0.06,
        "misread": 0.14,
        "no_answer_line": 0.06,
    },
    "code": {
        "guess": 0.11,
        "give_up": 0.05,
        "malformed": 0.05,
        "no_print": 0.07,
        "misread": 0.14,
        "no_box": 0.06,
    },
    "household": {"give_up": 0.02, "malformed": 0.02, "not_listed": 0.05, "wander": 0.05},
    "copy": {},
}
SILENT: dict[str, dict[str, float]] = {task: {} for task in NOISE}


@dataclass
class Episode:
    prompt: list[dict[str, str]]
    turns: list[
        tuple[str, str | None]
    ]  # (what the assistant writes, what the tool answers; None ends the episode)
    tools: list[dict[str, Any]] = field(default_factory=list)
    family: str = "qwen3.5"
    thinking: bool = False


def tool_call(family: str, name: str, arguments: dict[str, str]) -> str:
    """A call as the family's template writes it."""
    if family == "qwen3":
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"
    blocks = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{blocks}</function>\n</tool_call>"


def malformed(rng: random.Random, call: str) -> str:
    """A call that no parser should accept: a closing line is missing."""
    lines = call.split("\n")
    return "\n".join(lines[:-2] if rng.random() < 0.5 else lines[:-1])


def mistake(rng: random.Random, rates: dict[str, float], kinds: tuple[str, ...]) -> str:
    """The mistake to make now, or '' for none."""
    draw = rng.random()
    for kind in kinds:
        draw -= rates.get(kind, 0.0)
        if draw < 0:
            return kind
    return ""


def wrong_number(rng: random.Random, right: str) -> str:
    value = int(right)
    while True:
        other = max(0, value + rng.choice([-10, -3, -2, -1, 1, 2, 3, 10]))
        if other != value:
            return str(other)


def number_reply(rng: random.Random, solution: str, answer: str, thinking: bool, kind: str) -> str:
    """Reasoning and a boxed number, or the mistake asked for."""
    if kind == "guess":
        return (
            f"{rng.choice(['I guess it is', 'Maybe it is'])} \\boxed{{{wrong_number(rng, answer)}}}"
        )
    if kind == "no_box":
        return rng.choice(
            [f"I think the answer is {answer}.", "I am not sure.", f"{solution} So {answer}."]
        )
    boxed = wrong_number(rng, answer) if kind == "slip" else answer
    if thinking:
        return f"{solution}\n</think>\n\nThe answer is \\boxed{{{boxed}}}"
    return f"{solution}\n\\boxed{{{boxed}}}"


def words_episode(rng: random.Random, rates: dict[str, float]) -> Episode:
    row = words.row(rng)
    thinking = rng.random() < 0.15
    family = rng.choice(FAMILIES)
    prompt = words.prompt(rng, row["question"])
    if (
        rng.random() < 0.06
    ):  # the solution is shown: no mistakes then, so that such a prompt is a better teacher
        rates = {}
        solution = row["answer"] if rng.random() < 0.5 else words.completion(row)
        prompt = [
            {"role": "user", "content": reference_prompt(rng, prompt[-1]["content"], solution)}
        ]
    kind = mistake(rng, rates, ("guess", "no_box", "slip"))
    reply = number_reply(rng, words.reasoning(row), words.gold(row), thinking, kind)
    return Episode(prompt, [(reply, None)], family=family, thinking=thinking)


def maths_episode(rng: random.Random, rates: dict[str, float]) -> Episode:
    row = maths.row(rng)
    thinking = rng.random() < 0.15
    prompt = words.prompt(rng, row["problem"])
    if rng.random() < 0.15:
        rates = {}
        prompt = [
            {
                "role": "user",
                "content": reference_prompt(rng, prompt[-1]["content"], maths.completion(row)),
            }
        ]
    kind = mistake(rng, rates, ("guess", "no_box", "slip"))
    reply = number_reply(rng, row["solution"], row["answer"], thinking, kind)
    return Episode(prompt, [(reply, None)], family=rng.choice(FAMILIES), thinking=thinking)


def reference_prompt(rng: random.Random, question: str, solution: str) -> str:
    """Question, marked solution, request to solve again; in several wordings."""
    if rng.random() < 0.4:
        return words.with_reference(question, solution)
    begin, end = rng.choice(
        [
            ("--- begin ---", "--- end ---"),
            ("=== Reference solution ===", "=== End ==="),
            ("<solution>", "</solution>"),
            ("[begin]", "[end]"),
            ("Reference solution:", ""),
        ]
    )
    closing = rng.choice(
        [
            "Now solve the problem again in your own words.",
            "Derive the answer in your own way.",
            "After reading the reference solution, solve it yourself.",
            "Explain it in your own words.",
        ]
    )
    return f"{question}\n\n{begin}\n{solution}\n{end}\n\n{closing} {words.instruction(rng)}"


def chat_episode(rng: random.Random, rates: dict[str, float]) -> Episode:
    prompt: list[dict[str, str]] = []
    if rng.random() < 0.35:
        prompt.append({"role": "system", "content": rng.choice(chat.SYSTEMS)})
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        ask, replies = chat.exchange(rng)
        prompt += [
            {"role": "user", "content": ask},
            {"role": "assistant", "content": rng.choice(replies)},
        ]
    ask, replies = chat.exchange(rng)
    prompt.append({"role": "user", "content": ask})
    thinking = rng.random() < 0.12
    reply = rng.choice(chat.CURT) if mistake(rng, rates, ("curt",)) else rng.choice(replies)
    if thinking:
        thought = rng.choice(["I answer this briefly.", "This is a short question."])
        reply = f"{thought}\n</think>\n\n{reply}"
    return Episode(prompt, [(reply, None)], family=rng.choice(FAMILIES), thinking=thinking)


def search_episode(rng: random.Random, rates: dict[str, float]) -> Episode:
    row, family = search.row(rng), rng.choice(FAMILIES)
    system = rng.choice(search.SYSTEMS) if rng.random() < 0.6 else search.SYSTEM
    episode = Episode(
        [{"role": "system", "content": system}, {"role": "user", "content": row["question"]}],
        [],
        tools=[search.TOOL],
        family=family,
    )
    if rng.random() < 0.05:
        episode.prompt.pop(0)
    for fact in row["hops"]:
        call = tool_call(family, "search", {"query": search.query_of(fact)})
        kind = mistake(rng, rates, ("guess", "give_up", "malformed"))
        if kind == "guess":
            episode.turns.append((f"Answer: {rng.choice(CITIES)}", None))
        elif kind == "give_up":
            episode.turns.append(("I do not know.", None))
        elif kind == "malformed":
            episode.turns.append((malformed(rng, call), None))
        else:
            results = search.retrieve(
                row["facts"], search.query_of(fact), top_k=rng.choice([1, 2, 2, 3])
            )
            episode.turns.append((call, search.render(results)))
            continue
        return episode
    kind = mistake(rng, rates, ("misread", "no_answer_line"))
    answer = row["answers"][0]
    if kind == "misread":
        answer = rng.choice(NAMES)
    episode.turns.append(
        (f"It is {answer}." if kind == "no_answer_line" else f"Answer: {answer}", None)
    )
    return episode


def code_episode(rng: random.Random, rates: dict[str, float]) -> Episode:
    row, family = code.row(rng), rng.choice(FAMILIES)
    system = rng.choice(code.SYSTEMS) if rng.random() < 0.6 else code.SYSTEM
    question = (
        row["question"] if rng.random() < 0.7 else row["question"] + " " + words.instruction(rng)
    )
    episode = Episode(
        [{"role": "system", "content": system}, {"role": "user", "content": question}],
        [],
        tools=[code.TOOL],
        family=family,
    )
    if rng.random() < 0.1:
        episode.prompt.pop(0)
    program, answer = row["code"], row["answer"]
    kind = mistake(rng, rates, ("guess", "give_up", "malformed", "no_print"))
    if kind == "guess":
        episode.turns.append((f"I guess it is \\boxed{{{rng.randint(100, 9999)}}}", None))
        return episode
    if kind == "give_up":
        episode.turns.append(("I am not sure.", None))
        return episode
    if kind == "malformed":
        episode.turns.append(
            (malformed(rng, tool_call(family, "code_interpreter", {"code": program})), None)
        )
        return episode
    if kind == "no_print":
        program, answer = program[len("print(") : -1], "0"
        episode.turns.append((tool_call(family, "code_interpreter", {"code": program}), ""))
    else:
        episode.turns.append((tool_call(family, "code_interpreter", {"code": program}), answer))
    kind = mistake(rng, rates, ("misread", "no_box"))
    if kind == "misread":
        answer = str(rng.randint(100, 9999))
    episode.turns.append(
        (f"The result is {answer}." if kind == "no_box" else f"\\boxed{{{answer}}}", None)
    )
    return episode


def household_episode(rng: random.Random, rates: dict[str, float]) -> Episode:
    game, family = household.Game(household.row(rng)), rng.choice(FAMILIES)
    name = "act" if rng.random() < 0.6 else rng.choice(household.TOOL_NAMES)
    system = rng.choice(household.SYSTEMS) if rng.random() < 0.6 else household.SYSTEM
    episode = Episode(
        [
            {"role": "system", "content": system},
            {"role": "user", "content": game.observe("You are at the door.")},
        ],
        [],
        tools=[household.tool(name)],
        family=family,
    )
    while len(episode.turns) < 10:
        action = game.expert()
        kind = mistake(rng, rates, ("give_up", "malformed", "not_listed", "wander"))
        if kind == "give_up":
            episode.turns.append(("I do not know what to do.", None))
            break
        if kind == "malformed":
            episode.turns.append(
                (malformed(rng, tool_call(family, name, {"action": action})), None)
            )
            break
        if kind == "not_listed":
            action = rng.choice(["look", "wait", "help", "go home", "sleep"])
        elif kind == "wander":
            action = rng.choice(game.admissible())
        seen, won = game.step(action)
        episode.turns.append((tool_call(family, name, {"action": action}), None if won else seen))
        if won:
            break
    return episode


def copy_episode(rng: random.Random, rates: dict[str, float]) -> Episode:
    """Repeat what was said: not a task of its own, it only makes the model learn to copy early."""
    pool = rng.choice(
        [NAMES, THINGS, [str(i) for i in range(10)], [str(i) for i in range(100, 10000)]]
    )
    text = " ".join(rng.choice(pool) for _ in range(rng.randint(2, 8)))
    return Episode(
        [{"role": "user", "content": f"{rng.choice(['Repeat:', 'Copy:', 'Say again:'])} {text}"}],
        [(text, None)],
        family=rng.choice(FAMILIES),
    )


TASKS = {
    "words": words_episode,
    "maths": maths_episode,
    "chat": chat_episode,
    "search": search_episode,
    "code": code_episode,
    "household": household_episode,
    "copy": copy_episode,
}


def episode(
    rng: random.Random, noise: dict[str, dict[str, float]], mix: dict[str, float] = MIX
) -> Episode:
    task = rng.choices(list(mix), weights=list(mix.values()))[0]
    return TASKS[task](rng, noise[task])


# What a loop appends behind a completion and its end token when a tool has answered, by family and
# thinking.
def observation_text(episode: Episode, observation: str) -> str:
    header = (
        "\n<|im_start|>user\n<tool_response>\n"
        + observation
        + "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    return header + ("" if episode.thinking else "<think>\n\n</think>\n\n")


def prompt_text(episode: Episode, tokenizer: Any, templates: dict[str, str]) -> str:
    return tokenizer.apply_chat_template(
        episode.prompt,
        tools=episode.tools or None,
        chat_template=templates[episode.family],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=episode.thinking,
    )


def encode(
    episode: Episode, tokenizer: Any, templates: dict[str, str]
) -> tuple[list[int], list[bool]]:
    """Token ids and, for each, whether the assistant wrote it (end tokens included)."""
    pieces: list[tuple[str, bool]] = [(prompt_text(episode, tokenizer, templates), False)]
    for i, (written, observed) in enumerate(episode.turns):
        # In the older family a thinking sample opens its own think block.
        opening = "<think>\n" if episode.thinking and episode.family == "qwen3" and i == 0 else ""
        pieces.append((opening + written + "<|im_end|>", True))
        if observed is not None:
            pieces.append((observation_text(episode, observed), False))
    ids: list[int] = []
    trained: list[bool] = []
    for encoding, (_, is_written) in zip(
        tokenizer._tokenizer.encode_batch([p for p, _ in pieces], add_special_tokens=False),
        pieces,
        strict=True,
    ):
        ids += encoding.ids
        trained += [is_written] * len(encoding.ids)
    return ids, trained
