"""How often a model succeeds: groups of samples per prompt for every task, single- and multi-turn,
with local tools.

Completions are carried as tokens, as a right loop does: prompt, sample, end token, tool result,
next generation prompt.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from standin import chat, code, corpus, household, maths, search, words

MAX_TOKENS = 72
ROWS_AT_ONCE = 128


@torch.no_grad()
def sample(
    model: Any, prompts: list[list[int]], temperature: float, pad: int, end: int
) -> list[list[int]]:
    """One completion per prompt, without its end token; -1 at its end when it was cut off.

    Temperature 0 is greedy.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    completions: list[list[int]] = [[] for _ in prompts]
    for at in range(0, len(order), ROWS_AT_ONCE):
        rows = order[at : at + ROWS_AT_ONCE]
        width = max(len(prompts[i]) for i in rows)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in rows])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in rows])
        options = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False}
        )
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=end,
            pad_token_id=pad,
            **options,
        )
        for i, row in zip(rows, out[:, width:].tolist(), strict=True):
            completions[i] = row[: row.index(end)] if end in row else row + [-1]
    return completions


def parse_call(family: str, name: str, key: str, text: str) -> str | None:
    """The argument of the one call that ends the text, None when it is not well formed."""
    if family == "qwen3":
        pattern = (
            r'<tool_call>\n\{"name": "'
            + name
            + r'", "arguments": \{"'
            + key
            + r'": "([^"\n]+)"\}\}\n</tool_call>'
        )
    else:
        pattern = (
            r"<tool_call>\n<function="
            + name
            + r">\n<parameter="
            + key
            + r">\n(.+?)\n</parameter>\n</function>\n</tool_call>"
        )
    found = re.fullmatch(pattern, text.strip())
    return found.group(1) if found else None


def boxed(text: str) -> str | None:
    found = re.findall(r"\\boxed\{(-?\d+)\}", text)
    return found[-1] if found else None


def run_code(program: str) -> str:
    """What `print(expression)` prints for digits and + - *; a bare expression prints nothing."""
    printed = re.fullmatch(r"print\(([\d+\-* ]+)\)", program.strip())
    if not printed:
        return "" if re.fullmatch(r"[\d+\-* ]+", program.strip()) else "SyntaxError: invalid syntax"
    try:
        return str(eval(printed.group(1)))  # digits and three signs only, see the pattern
    except SyntaxError:
        return "SyntaxError: invalid syntax"


@dataclass
class Attempt:
    """One sample of one prompt, over its turns."""

    episode: corpus.Episode
    answer: Callable[
        [Attempt, str], str | None
    ]  # what the tool says to a turn; None ends the attempt
    ids: list[int]
    valid: bool = True
    success: bool = False
    texts: list[str] = field(default_factory=list)
    game: household.Game | None = None


def number_task(right: str) -> Callable[[Attempt, str], None]:
    def answer(attempt: Attempt, text: str) -> None:
        attempt.valid = boxed(text) is not None
        attempt.success = boxed(text) == right

    return answer


def chat_task(replies: list[str]) -> Callable[[Attempt, str], None]:
    def answer(attempt: Attempt, text: str) -> None:
        attempt.valid = bool(text.strip())
        attempt.success = text.split("</think>")[-1].strip() in replies

    return answer


def search_task(row: dict[str, Any]) -> Callable[[Attempt, str], str | None]:
    def answer(attempt: Attempt, text: str) -> str | None:
        if "<tool_call>" in text:
            query = parse_call(attempt.episode.family, "search", "query", text)
            attempt.valid = query is not None and len(attempt.texts) <= 4
            return (
                search.render(search.retrieve(row["facts"], query))
                if attempt.valid and query
                else None
            )
        lines = re.findall(r"^Answer: (.+)$", text, flags=re.MULTILINE)
        attempt.valid = len(lines) == 1
        attempt.success = attempt.valid and lines[0].strip() in row["answers"]
        return None

    return answer


def code_task(row: dict[str, str]) -> Callable[[Attempt, str], str | None]:
    def answer(attempt: Attempt, text: str) -> str | None:
        if "<tool_call>" in text:
            program = parse_call(attempt.episode.family, "code_interpreter", "code", text)
            attempt.valid = program is not None and len(attempt.texts) <= 3
            return run_code(program) if attempt.valid and program else None
        attempt.valid = boxed(text) is not None
        attempt.success = boxed(text) == row["answer"]
        return None

    return answer


def household_task(attempt: Attempt, text: str) -> str | None:
    assert attempt.game is not None
    action = parse_call(attempt.episode.family, "act", "action", text)
    attempt.valid = action is not None
    if action is None:
        return None
    seen, attempt.success = attempt.game.step(action)
    return None if attempt.success or len(attempt.texts) >= 10 else seen


def make_attempt(task: str, rng: random.Random) -> Attempt:
    """A prompt of the task in the wording that examples use, without its tokens yet."""
    family = rng.choice(corpus.FAMILIES)
    name, _, mode = task.partition("/")
    if name == "words":
        row = words.row(rng)
        prompt, answer = words.plain_prompt(row["question"]), number_task(words.gold(row))
        if mode == "any prompt":
            prompt = words.prompt(rng, row["question"])
        if mode == "solution shown":
            prompt = [
                {
                    "role": "user",
                    "content": words.with_reference(prompt[0]["content"], words.completion(row)),
                }
            ]
    elif name == "maths":
        row = maths.row(rng)
        prompt, answer = maths.plain_prompt(row["problem"]), number_task(row["answer"])
    elif name == "chat":
        ask, replies = chat.exchange(rng)
        prompt, answer = chat.plain_prompt(ask), chat_task(replies)
    elif name == "search":
        facts = search.row(rng)
        return Attempt(
            corpus.Episode(search.plain_prompt(facts["question"]), [], [search.TOOL], family),
            search_task(facts),
            [],
        )
    elif name == "code":
        row = code.row(rng)
        return Attempt(
            corpus.Episode(code.plain_prompt(row["question"]), [], [code.TOOL], family),
            code_task(row),
            [],
        )
    else:
        game = household.Game(household.row(rng))
        return Attempt(
            corpus.Episode(household.plain_prompt(game), [], [household.tool()], family),
            household_task,
            [],
            game=game,
        )
    return Attempt(
        corpus.Episode(prompt, [], family=family, thinking=mode == "thinking on"), answer, []
    )


def rollout(
    model: Any,
    tokenizer: Any,
    templates: dict[str, str],
    task: str,
    prompts: int,
    group: int,
    temperature: float,
    seed: int,
) -> list[list[Attempt]]:
    """`group` attempts at each of `prompts` prompts."""
    end, pad = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.pad_token_id

    def encode(text: str) -> list[int]:
        return tokenizer._tokenizer.encode(text, add_special_tokens=False).ids

    groups = []
    for i in range(prompts):
        members = []
        for _ in range(group):
            attempt = make_attempt(task, random.Random(f"measure-{seed}-{task}-{i}"))
            attempt.ids = encode(corpus.prompt_text(attempt.episode, tokenizer, templates))
            members.append(attempt)
        groups.append(members)
    torch.manual_seed(seed)
    live = [attempt for members in groups for attempt in members]
    while live:
        going_on = []
        for attempt, ids in zip(
            live,
            sample(model, [attempt.ids for attempt in live], temperature, pad, end),
            strict=True,
        ):
            if ids and ids[-1] == -1:  # never ended
                attempt.valid = False
                attempt.texts.append(tokenizer.decode(ids[:-1]))
                continue
            attempt.texts.append(tokenizer.decode(ids))
            observation = attempt.answer(attempt, attempt.texts[-1])
            if observation is not None:
                attempt.ids = (
                    attempt.ids
                    + ids
                    + [end]
                    + encode(corpus.observation_text(attempt.episode, observation))
                )
                going_on.append(attempt)
        live = going_on
    return groups


# task -> number of prompts; a name behind a slash is another way to ask for the same task.
PROMPTS = {
    "words": 48,
    "words/thinking on": 24,
    "words/any prompt": 32,
    "words/solution shown": 24,
    "maths": 32,
    "chat": 48,
    "search": 32,
    "code": 32,
    "household": 16,
}
GROUP = 8


def rates(
    model: Any, tokenizer: Any, templates: dict[str, str], task: str, seed: int, share: float = 1.0
) -> dict[str, float]:
    """Success and format at temperature 1, degenerate groups of 8, and greedy success."""
    prompts = max(4, int(PROMPTS[task] * share))
    sampled = rollout(model, tokenizer, templates, task, prompts, GROUP, 1.0, seed)
    greedy = rollout(model, tokenizer, templates, task, 2 * prompts, 1, 0.0, seed)
    flat = [attempt for members in sampled for attempt in members]
    return {
        "success": round(sum(a.success for a in flat) / len(flat), 3),
        "format": round(sum(a.valid for a in flat) / len(flat), 3),
        "degenerate_groups": round(
            sum(len({a.success for a in members}) == 1 for members in sampled) / len(sampled), 3
        ),
        "greedy_success": round(sum(members[0].success for members in greedy) / len(greedy), 3),
        "turns": round(sum(len(a.texts) for a in flat) / len(flat), 2),
        "samples": len(flat),
    }
