"""The audit, rule by rule: for each a recording that it must name and the nearest right one on
which it must be silent; then correct loops, damaged recordings, the table, and the time it takes.
"""

import io
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from audit.cli import audit, parse_accepted, parse_prices
from audit.report import MAX_LINES, WIDTH, Budget
from audit.rules import RULES
from audit.show import show
from audit.trace import TraceError, read_trace
from conftest import DRYRUN
from traces import (
    BASE_MODEL,
    END,
    IGNORED,
    LARGE,
    LARGE_MODEL,
    NEWLINE,
    PLAIN_OPENING,
    QWEN3_CHAT,
    STANDIN,
    THINKING_OPENING,
    Completion,
    Ids,
    Numbers,
    Row,
    SamplerState,
    Story,
    decode,
    encode,
    policy_row,
    prompt_of,
    supervised_row,
    trajectory_row,
    turn,
)

Tell = Callable[[Story], None]
HEADER = encode("<|im_start|>assistant\n")
OPENING = len(encode(PLAIN_OPENING))
THINK = OPENING - len(HEADER)
NO_BLOCK = "<|im_start|>assistant\n"
OBSERVED = "\n<|im_start|>user\n"


def told(tell: Tell, folder: Path, **header: Any) -> Path:
    """The recording of a story."""
    story = Story(folder, **header)
    tell(story)
    return story.close()


def audited(path: Path, *accepted: str, budget: Budget | None = None) -> tuple[str, dict[str, Any]]:
    return audit(path, parse_accepted(accepted), budget or Budget())


def findings_by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in result["findings"]}


def complaints(result: dict[str, Any]) -> dict[str, str]:
    """What errors and warnings say, by rule."""
    return {f["name"]: f["seen"] for f in result["findings"] if f["severity"] != "info"}


# -- loops -----------------------------------------------------------------------------------------


def pattern(group: int, size: int) -> Numbers:
    """Rewards of one group, of which some are 1 and some 0, differently in neighbouring groups."""
    right = 1 + group % (size - 1)
    return [float(i < right) for i in range(size)]


def centred(rewards: Sequence[Numbers]) -> list[Numbers]:
    return [[r - float(np.mean(group)) for r in group] for group in rewards]


def rewarded(
    groups: Sequence[Sequence[Any]],
    row: Callable[[Any, float], Row] = policy_row,
    advantages: Callable[[Sequence[Numbers]], list[Numbers]] = centred,
) -> list[Row]:
    """Data of groups with the rewards of `pattern`; a member is what `row` takes."""
    values = advantages([pattern(i, len(group)) for i, group in enumerate(groups)])
    return [
        row(member, value)
        for group, of_group in zip(groups, values, strict=True)
        for member, value in zip(group, of_group, strict=True)
    ]


def sampled(
    story: Story, sampler: SamplerState, prompts: int = 3, size: int = 4, **settings: Any
) -> list[list[Completion]]:
    """Groups of fresh questions."""
    return [story.sample(sampler, story.question(), size, **settings) for _ in range(prompts)]


def policy_step(
    story: Story, run: str, rows: Sequence[Row], loss: str = "importance_sampling"
) -> None:
    story.forward_backward(run, rows, loss)
    story.step(run)
    story.wait()


def policy_loop(
    story: Story,
    batch: Callable[[Story, SamplerState], list[Row]],
    steps: int = 2,
    run: str = "",
    loss: str = "importance_sampling",
) -> None:
    """Every step a new sampling client, the data that `batch` makes with it, one training step."""
    run = run or story.training_run()
    for _ in range(steps):
        policy_step(story, run, batch(story, story.sampler(run)), loss)
    story.save(run, "final")


def grpo(
    story: Story,
    steps: int = 2,
    prompts: int = 3,
    size: int = 4,
    advantages: Callable[[Sequence[Numbers]], list[Numbers]] = centred,
    row: Callable[[Completion, Any], Row] = policy_row,
    change: Callable[[list[Row]], list[Row]] = list,
    params: dict[str, Any] | None = None,
    completions: Callable[[Story], Ids] = Story.answer,
    question: Callable[[Story], Ids] = Story.question,
    loss: str = "importance_sampling",
    renew: bool = True,
    save: str = "final",
) -> None:
    """On-policy GRPO: every step samples groups, trains once and takes one optimiser step."""
    run = story.training_run()
    sampler = None
    for _ in range(steps):
        sampler = story.sampler(run) if renew or sampler is None else sampler
        groups = []
        for _ in range(prompts):
            answers = [completions(story) for _ in range(size)]
            groups.append(story.sample(sampler, question(story), answers, params))
        policy_step(story, run, change(rewarded(groups, row, advantages)), loss)
    if save:
        story.save(run, save)


def observation(story: Story) -> Ids:
    """What an environment says between two turns, from the newline after an end token on."""
    return encode(OBSERVED) + story.words(4) + encode("<|im_end|>\n") + encode(PLAIN_OPENING)


def extended(story: Story, first: Completion) -> Ids:
    return first.whole + observation(story)


Turns = list[Completion]


def one_datum(turns: Turns, value: float) -> list[Row]:
    return [trajectory_row(turns, value)]


def tools(
    story: Story,
    data: Callable[[Turns, float], list[Row]] = one_datum,
    next_prompt: Callable[[Story, Completion], Ids] = extended,
    answer: Callable[[Story], Ids] = Story.answer,
    turns: int = 2,
    first_turns: Callable[[Story, SamplerState], list[Turns]] = sampled,
) -> None:
    """Several turns a trajectory, all trajectories at the same time, one datum of all turns."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        groups = [[[first] for first in group] for group in first_turns(story, sampler)]
        for _ in range(turns - 1):
            story.wait()
            for trajectory in (t for group in groups for t in group):
                prompt = next_prompt(story, trajectory[-1])
                trajectory += story.sample(sampler, prompt, [answer(story)])
        pairs: list[tuple[Turns, float]] = []
        rewarded(groups, lambda trajectory, value: pairs.append((trajectory, value)))
        return [row for trajectory, value in pairs for row in data(trajectory, value)]

    policy_loop(story, batch)


def sft(
    story: Story,
    steps: int = 2,
    batch: int = 4,
    prompt: Callable[[Story], Ids] = Story.question,
    answer: Callable[[Story], Ids] = Story.answer,
    row: Callable[[Ids, Ids], Row] = supervised_row,
    change: Callable[[Row], Row] = lambda row: row,
    save: Callable[[Story, str], Any] = lambda story, run: story.save(run, "final"),
    **settings: Any,
) -> None:
    """Supervised fine-tuning on single turns; `settings` are those of forward_backward."""
    run = story.training_run()
    for _ in range(steps):
        rows = [change(row(prompt(story), answer(story))) for _ in range(batch)]
        story.supervise(run, rows, **settings)
        story.step(run)
        story.wait()
    save(story, run)


def loop(story: Story, *steps: Callable[[Story, str], Any]) -> None:
    """A training run of which each step is told; saved at the end."""
    run = story.training_run()
    for told_step in steps:
        told_step(story, run)
    story.save(run, "final")


def rows_of(story: Story, count: int = 4, length: int | None = None) -> list[Row]:
    return [supervised_row(story.question(), story.answer(length)) for _ in range(count)]


def train(story: Story, run: str, rows: list[Row] | None = None, **adam: float) -> None:
    """One supervised step."""
    story.supervise(run, rows or rows_of(story))
    story.step(run, **adam)
    story.wait()


def dpo_weights(rows: Sequence[Row], step: int) -> list[Numbers]:
    """Minus the gradient of the DPO loss with beta 0.1: before the first step beta / 2 for each
    token of every answer, over the number of pairs."""
    pairs = len(rows) // 2
    sizes = [0.05 / pairs * (1 - 0.1 * step * (i // 2)) for i in range(len(rows))]
    return [
        [(1 if i % 2 == 0 else -1) * sizes[i] * w for w in row.weights or ()]
        for i, row in enumerate(rows)
    ]


def dpo(
    story: Story,
    steps: int = 2,
    pairs: int = 3,
    weights: Callable[[Sequence[Row], int], list[Numbers]] = dpo_weights,
    rejected_prompt: Callable[[Ids], Ids] = list,
    change: Callable[[list[Row]], list[Row]] = list,
    scored: Callable[[Row], Ids] = lambda row: row.whole,
    reference: Callable[[Story, str], Any] = lambda story, run: story.sampler(),
    question: Callable[[Story], Ids] = Story.question,
) -> None:
    """Preference pairs, chosen before rejected, with a reference that scores the trained ids."""
    run = story.training_run()
    for step in range(steps):
        rows = []
        for _ in range(pairs):
            prompt = question(story)
            rows.append(supervised_row(prompt, story.answer()))
            rows.append(supervised_row(rejected_prompt(prompt), story.answer()))
        rows = change(rows)
        frozen = reference(story, run)
        for row in rows:
            story.score(frozen, scored(row))
        story.wait()
        story.custom(run, rows, weights(rows, step))
        story.step(run)
        story.wait()
    story.save(run, "final")


def teacher_minus_student(values: Numbers, completion: Completion) -> Numbers:
    behind = values[len(values) - len(completion.tokens) :]
    return [t - s for t, s in zip(behind, completion.logprobs, strict=True)]


def opd(
    story: Story,
    scored: Callable[[Completion], Ids] = lambda completion: completion.whole,
    advantages: Callable[[Numbers, Completion], Numbers] = teacher_minus_student,
    completions: Callable[[Story], Ids] = Story.answer,
    teacher: str = "large",
    steps: int = 2,
    prompts: int = 3,
    size: int = 4,
) -> None:
    """On-policy distillation: advantages are teacher - student at every sampled token. The teacher
    is a `large` model, the student's `base` or the `student` of the moment."""
    base = story.sampler() if teacher == "base" else story.sampler(None, LARGE_MODEL, LARGE)

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        asked = []
        for _ in range(prompts):
            answers = [completions(story) for _ in range(size)]
            asked += story.sample(sampler, story.question(), answers)
        story.wait()
        scorer = sampler if teacher == "student" else base
        return [policy_row(c, advantages(story.score(scorer, scored(c)), c)) for c in asked]

    policy_loop(story, batch, steps)


def spelt(text: str) -> Ids:
    """A text in one token a character, as a model may write it and an encoder does not."""
    ids = {character: encode(character) for character in set(text)}
    return [token for character in text for token in ids[character]]


# -- the table -------------------------------------------------------------------------------------


def as_qwen3(tell: Tell) -> Tell:
    """The same loop with a template whose thinking prompt ends with the bare opening."""

    def retell(story: Story) -> None:
        story.chat = QWEN3_CHAT
        tell(story)

    return retell


def unshifted(prompt: Ids, answer: Ids) -> Row:
    """Lists for `auto_shift`: the target and the weight stand at the token itself."""
    tokens = prompt + answer
    return Row(tokens, tokens, weights=[0.0] * len(prompt) + [1.0] * len(answer))


def question_to_think(story: Story) -> Ids:
    asked = encode("<|im_start|>user\n") + story.words(5) + encode("<|im_end|>\n")
    return asked + encode(THINKING_OPENING)


def thought(story: Story) -> Ids:
    """Behind the opening of a thinking turn: a thought, its end, an answer."""
    return story.words(6) + encode("\n</think>\n\n") + story.answer()


def conversation(
    story: Story, blocks: tuple[str, ...] = (PLAIN_OPENING,) * 3, last_only: bool = False
) -> Row:
    """Several turns, of which the assistant's are trained from their opening to the end token."""
    tokens: Ids = encode(turn("system", "be short"))
    weights = [0.0] * len(tokens)
    for number, opening in enumerate(blocks):
        given = encode("<|im_start|>user\n") + story.words(4) + encode("<|im_end|>\n")
        given += encode(opening)
        answer = story.answer()
        trained = float(not last_only or number == len(blocks) - 1)
        tokens += given + answer + [NEWLINE]
        weights += [0.0] * len(given) + [trained] * len(answer) + [0.0]
    return Row(tokens[:-2], tokens[1:-1], weights=weights[1:-1])


def conversations(
    story: Story, change: Callable[[Row], Row] = lambda row: row, **settings: Any
) -> None:
    run = story.training_run()
    for _ in range(2):
        train(story, run, [change(conversation(story, **settings)) for _ in range(3)])
    story.save(run, "final")


def first_ends_silent(row: Row) -> Row:
    """Only the last turn's end token keeps its weight."""
    last = len(row.targets) - 1
    pairs = zip(row.targets, row.signal, strict=True)
    return replace(
        row, weights=[w if t != END or i == last else 0.0 for i, (t, w) in enumerate(pairs)]
    )


def plain_text(prompt: Ids, answer: Ids) -> Row:
    """Continued pretraining: every target is trained, and there is no template."""
    tokens = prompt + answer
    return Row(tokens[:-1], tokens[1:], weights=[1.0] * (len(tokens) - 1))


def words(story: Story) -> Ids:
    return story.words(8)


def by_length(completion: Completion, value: float) -> Row:
    """Advantages over the completion's own length."""
    return policy_row(completion, value / len(completion.tokens))


def gspo(
    story: Story,
    advantages: Callable[[Sequence[Numbers]], list[Numbers]] = centred,
    epochs: int = 1,
    stops: Sequence[str] | None = None,
) -> None:
    """A custom loss on sampled completions; `stops` says why those of each group ended."""
    run = story.training_run()
    for _ in range(2):
        groups = sampled(story, story.sampler(run), stop_reasons=stops)
        rows = rewarded(groups, by_length, advantages)
        story.wait()
        plain = [replace(row, logprobs=None, advantages=None) for row in rows]
        for _ in range(epochs):
            story.custom(run, plain, [row.signal for row in rows])
            story.step(run)
            story.wait()
    story.save(run, "final")


def best_of_n(story: Story, renew: bool = True) -> None:
    """Rejection sampling: cross-entropy on the best completion of each group."""
    run = story.training_run()
    sampler = story.sampler(run)
    for _ in range(4):
        groups = sampled(story, sampler, 4)
        rows = [supervised_row(best.prompt, best.tokens) for best, *_ in groups]
        policy_step(story, run, rows, "cross_entropy")
        sampler = story.sampler(run) if renew else sampler
    story.save(run, "final")


def best_of_all(story: Story) -> None:
    """Rejection sampling in stages: everything is sampled once, then trained in batches."""
    run = story.training_run()
    groups = sampled(story, story.sampler(), 12)
    for i in range(0, 12, 3):
        rows = [supervised_row(best.prompt, best.tokens) for best, *_ in groups[i : i + 3]]
        policy_step(story, run, rows, "cross_entropy")
    story.save(run, "final")


def asked_twice(story: Story) -> Ids:
    """A history without the answer to its first question."""
    return encode("<|im_start|>user\n") + story.words(4) + encode("<|im_end|>\n") + story.question()


def question_with_system(story: Story) -> Ids:
    return encode(turn("system", "be short")) + story.question()


def asked_with_system(prompt: Callable[[Story], Ids], story: Story) -> None:
    """Supervised data, and three questions behind a system message."""
    sft(story, prompt=prompt)
    sampler = story.sampler()
    for _ in range(3):
        story.sample(sampler, question_with_system(story), 1, {"temperature": 0.0})


def never_emptied(story: Story) -> None:
    """The list of data grows from step to step."""
    rows: list[Row] = []

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        rows.extend(rewarded(sampled(story, sampler)))
        return list(rows)

    policy_loop(story, batch)


def asked_after(tell: Tell, story: Story) -> None:
    """A question in chat turns at the end of another story."""
    tell(story)
    story.sample(story.sampler(), story.question(), 1, {"temperature": 0.0})


@dataclass(frozen=True)
class Case:
    """`wrong` must fire the rule, `right` must not. `seen` is a regular expression for the
    sentence, `place` holds fields of the first place (`text` a regular expression), and `also`
    names what else the same mistake fires."""

    wrong: Tell
    right: Tell
    seen: str = ""
    place: dict[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()


def whole_row(completion: Completion, value: float) -> Row:
    """The advantage on every target."""
    row = policy_row(completion, value)
    return replace(row, advantages=[value] * len(row.targets))


def moved_row(by: int, completion: Completion, value: float) -> Row:
    """Advantages a position too early or too late."""
    row = policy_row(completion, value)
    return replace(row, advantages=np.roll(row.advantages, by).tolist())


def with_observation(turns: Turns, value: float) -> list[Row]:
    """The advantage on everything behind the first prompt."""
    [row] = one_datum(turns, value)
    ahead = len(turns[0].prompt) - 1
    return [replace(row, advantages=[0.0] * ahead + [value] * (len(row.targets) - ahead))]


def appended_row(signal: bool, completion: Completion, value: float) -> Row:
    """An end token written behind a completion that was cut off."""
    row = policy_row(completion, value)
    return Row(
        [*row.inputs, row.targets[-1]],
        [*row.targets, END],
        logprobs=[*row.logprobs, 0.0],
        advantages=[*row.advantages, value if signal else 0.0],
    )


def cut_answer(story: Story) -> Ids:
    return story.words(12)


def spelt_answer(story: Story) -> Ids:
    return spelt(f"the apples are {story.rng.integers(1_000_000)}") + [END]


def encoded_row(completion: Completion, value: float) -> Row:
    """The text of a completion, encoded again."""
    tokens = encode(decode(completion.tokens))
    given = completion.logprobs[: len(tokens)]
    return policy_row(Completion(completion.prompt, tokens, given), value)


def shortened_row(completion: Completion, value: float) -> Row:
    tokens, values = completion.tokens[:-3], completion.logprobs[:-3]
    return policy_row(Completion(completion.prompt, tokens, values), value)


def other_prompt_row(completion: Completion, value: float) -> Row:
    """A prompt with thinking on instead of off."""
    prompt = completion.prompt[: -len(encode(PLAIN_OPENING))] + encode(THINKING_OPENING)
    return policy_row(replace(completion, prompt=prompt), value)


def invented_row(completion: Completion, value: float) -> Row:
    tokens = [token + 1 for token in completion.tokens]
    return policy_row(replace(completion, tokens=tokens), value)


def padded_row(signal: bool, completion: Completion, value: float) -> Row:
    row, count = policy_row(completion, value), 6
    return Row(
        row.inputs + [END] * count,
        row.targets + [END] * count,
        logprobs=row.logprobs + [0.0] * count,
        advantages=row.advantages + [value if signal else 0.0] * count,
    )


def with_logprobs(
    change: Callable[[Numbers], Numbers], completion: Completion, value: float
) -> Row:
    """Other log-probabilities of the sampled tokens; the trainer's own stay what they were."""
    row = policy_row(completion, value)
    ahead = len(completion.prompt) - 1
    return replace(
        row,
        logprobs=row.logprobs[:ahead] + change(row.logprobs[ahead:]),
        served=row.logprobs,
    )


def recomputed(values: Numbers) -> Numbers:
    return [value + 0.4 for value in values]


def own_logprobs_row(completion: Completion, value: float) -> Row:
    """Log-probabilities of the weights that are trained, which have moved since."""
    row = policy_row(completion, value)
    ahead = len(completion.prompt) - 1
    now = row.logprobs[:ahead] + recomputed(row.logprobs[ahead:])
    return replace(row, logprobs=now, served=now)


def served_otherwise(by: float, completion: Completion, value: float) -> Row:
    row = policy_row(completion, value)
    return replace(row, served=[lp - by for lp in row.logprobs])


def ignored_prompt(completion: Completion, value: float) -> Row:
    row, ahead = policy_row(completion, value), len(completion.prompt) - 1
    return replace(row, targets=[IGNORED] * ahead + row.targets[ahead:])


def no_shift(row: Row) -> Row:
    return replace(row, inputs=row.targets)


def shifted_twice(row: Row) -> Row:
    return replace(row, targets=[*row.targets[1:], END])


def weights_of(change: Callable[[Ids, Ids], Numbers]) -> Callable[[Ids, Ids], Row]:
    """Supervised rows whose weights come from a function of prompt and answer; one a target."""

    def build(prompt: Ids, answer: Ids) -> Row:
        return replace(supervised_row(prompt, answer), weights=change(prompt, answer))

    return build


def ones_from(before: int) -> Callable[[Ids, Ids], Row]:
    """The answer and the `before` last tokens of the prompt have weight 1."""
    return weights_of(lambda p, a: [0.0] * (len(p) - 1 - before) + [1.0] * (len(a) + before))


def with_newline(prompt: Ids, answer: Ids) -> Row:
    return supervised_row(prompt, [*answer, NEWLINE])


def with_silent_newline(prompt: Ids, answer: Ids) -> Row:
    return with_newline(prompt, answer).with_at("weights", -1, 0.0)


def foreign(story: Story) -> None:
    """A run is trained on what another run's weights have written."""
    run, other = story.training_run(), story.training_run()
    policy_step(story, run, rewarded(sampled(story, story.sampler(other))))
    story.save(run, "final")


def from_base(story: Story, base_model: str = BASE_MODEL, folder: Path = STANDIN) -> None:
    """The first step's completions come from a base model's client."""
    run = story.training_run()
    policy_step(story, run, rewarded(sampled(story, story.sampler(None, base_model, folder))))
    policy_step(story, run, rewarded(sampled(story, story.sampler(run))))
    story.save(run, "final")


def one_behind(story: Story) -> None:
    """Every sampling client is made before the step that it should know."""
    run = story.training_run()
    sampler = story.sampler(run)
    for _ in range(3):
        following = story.sampler(run)
        policy_step(story, run, rewarded(sampled(story, sampler)))
        sampler = following
    story.save(run, "final")


def one_ahead(story: Story) -> None:
    """The next batch is asked for before this one is trained, by the newest weights there are."""
    run = story.training_run()
    waiting = sampled(story, story.sampler(run))
    for _ in range(3):
        following = sampled(story, story.sampler(run))
        policy_step(story, run, rewarded(waiting))
        waiting = following
    story.save(run, "final")


def seeded(same: bool, story: Story) -> None:
    """The same seed at every step, or the step's own."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        return rewarded(sampled(story, sampler, params={"seed": 7 if same else story.samplers}))

    policy_loop(story, batch, steps=3)


def copies(logprob: float, story: Story) -> None:
    """One group of equal completions beside others; `logprob` says how likely its tokens are."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        answer = story.answer(10)
        values = [[logprob] * len(answer)] * 4
        story.sample(sampler, story.question(), [answer] * 4, logprobs=values)
        return rewarded(sampled(story, sampler))

    policy_loop(story, batch)


def across_groups(rewards: Sequence[Numbers]) -> list[Numbers]:
    """The mean over the completions with one number in different groups."""
    return (np.array(rewards) - np.mean(rewards, axis=0)).tolist()


def across_batch(rewards: Sequence[Numbers]) -> list[Numbers]:
    return (np.array(rewards) - np.mean(rewards)).tolist()


def per_reward(rewards: Sequence[Numbers]) -> list[Numbers]:
    return [list(group) for group in rewards]


def off_by_some(rewards: Sequence[Numbers]) -> list[Numbers]:
    return [[a + 0.1 * (i + 1) for a in group] for i, group in enumerate(centred(rewards))]


def without_the_first(rewards: Sequence[Numbers]) -> list[Numbers]:
    """The first of each group gets no gradient."""
    return [[0.0, *group[1:]] for group in centred(rewards)]


def none_differ(rewards: Sequence[Numbers]) -> list[Numbers]:
    """Only the last group has a signal."""
    values = [[0.0] * len(group) for group in rewards]
    values[-1] = centred(rewards)[-1]
    return values


def without_zeros(rows: list[Row]) -> list[Row]:
    return [row for row in rows if any(row.advantages or ())]


def singles(story: Story) -> None:
    """One completion a prompt, against a running mean."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        groups = sampled(story, sampler, 4, 1)
        return [policy_row(c, v) for [c], v in zip(groups, (1.0, -0.5, 0.5, -1.0), strict=True)]

    policy_loop(story, batch)


def backward(story: Story, run: str) -> None:
    story.supervise(run, rows_of(story))


def optimise(story: Story, run: str, **settings: float) -> None:
    story.step(run, **settings)


def only_sampled(story: Story) -> None:
    run = story.training_run()
    sampler = story.sampler(run)
    for _ in range(4):
        story.sample(sampler, story.question(), 4)


def only_evaluated(story: Story) -> None:
    """Sampling from a base model, with no training run."""
    sampler = story.sampler()
    for _ in range(4):
        story.sample(sampler, story.question(), 4)


def not_saved(story: Story, run: str) -> None:
    story.sampler(run)


def saved_early(story: Story, run: str) -> None:
    story.save(run, "early")
    train(story, run)


def saved_often(story: Story, run: str) -> None:
    story.save(run, "early", ttl_seconds=3600)
    train(story, run)
    story.save(run, "final")


def two_calls(first: int, second: int, story: Story) -> None:
    def step(story: Story, run: str) -> None:
        story.supervise(run, rows_of(story, first, 6))
        story.supervise(run, rows_of(story, second, 6))
        story.step(run)
        story.wait()

    loop(story, step, step)


def waiting(waits: bool, story: Story) -> None:
    def step(story: Story, run: str) -> None:
        story.supervise(run, rows_of(story))
        if waits:
            story.wait(0.01)
        story.step(run)
        story.wait()

    loop(story, step, step, step)


def asking(waits: bool, score: bool, story: Story) -> None:
    """Five requests on one sampling client."""
    sampler = story.sampler()
    for _ in range(5):
        if score:
            story.score(sampler, story.question())
        else:
            story.sample(sampler, story.question(), 2)
        if waits:
            story.wait(0.01)


def resumed(
    story: Story,
    again: bool = False,
    with_optimizer: bool = True,
    name: str = "step-3",
    type: str = "TRAINING",
) -> None:
    """A run that goes on from step 2 of another; its first batch is new, or that of step 1."""
    history = [rows_of(story) for _ in range(2)]
    run = story.resume("trio://train0/state/step-2", 2, history, with_optimizer, type)
    train(story, run, history[0] if again else None)
    story.save(run, name, state=True)


def epochs_resumed(story: Story) -> None:
    """Two batches, again and again: the batch after the fourth step is the first one."""
    first, second = rows_of(story), rows_of(story)
    run = story.resume("trio://train0/state/step-4", 4, [first, second, first, second])
    train(story, run, first)
    train(story, run, second)
    story.save(run, "step-6")


def uneven_weights(rows: Sequence[Row], step: int) -> list[Numbers]:
    """A reference that was summed over other positions: pairs weigh differently at once."""
    return [[w * (1 + 0.5 * (i // 2)) for w in ws] for i, ws in enumerate(dpo_weights(rows, 0))]


def mean_weights(rows: Sequence[Row], step: int) -> list[Numbers]:
    return [
        [w / sum(map(bool, ws)) for w in ws] if step == 0 else ws for ws in dpo_weights(rows, step)
    ]


def reverse_weights(rows: Sequence[Row], step: int) -> list[Numbers]:
    return [[-w for w in ws] for ws in dpo_weights(rows, step)]


def scaled_weights(by: float, rows: Sequence[Row], step: int) -> list[Numbers]:
    return [[w * by for w in ws] for ws in dpo_weights(rows, step)]


def in_halves(rows: list[Row]) -> list[Row]:
    """All chosen, then all rejected."""
    return rows[0::2] + rows[1::2]


def halves_weights(rows: Sequence[Row], step: int) -> list[Numbers]:
    count = len(rows) // 2
    mixed = [rows[i // 2 + (i % 2) * count] for i in range(len(rows))]
    return in_halves(dpo_weights(mixed, step))


def weigh(change: Callable[[Row], Row]) -> Callable[[list[Row]], list[Row]]:
    """For custom losses: pairs whose weights, and so the loss's gradient, are elsewhere."""
    return lambda rows: [change(row) for row in rows]


def answer_start(row: Row) -> int:
    """The target of the answer's first token."""
    return next(i for i, weight in enumerate(row.weights or ()) if weight)


def widened(before: int, row: Row) -> Row:
    return row.with_at("weights", answer_start(row) - before, *[1.0] * before)


def without_first(row: Row) -> Row:
    return row.with_at("weights", answer_start(row), 0.0)


def without_last(row: Row) -> Row:
    return row.with_at("weights", -1, 0.0)


def newline_behind(weight: float, row: Row) -> Row:
    return Row(
        [*row.inputs, row.targets[-1]],
        [*row.targets, NEWLINE],
        weights=[*(row.weights or ()), weight],
    )


def padded_behind(row: Row) -> Row:
    """Six end-of-text tokens without weight after the answer."""
    pads = encode("<|endoftext|>") * 6
    return Row(
        [*row.inputs, row.targets[-1], *pads[:-1]],
        [*row.targets, *pads],
        weights=[*(row.weights or ()), *[0.0] * 6],
    )


def everything(row: Row) -> Row:
    return replace(row, weights=[1.0] * len(row.targets))


def trained_reference(story: Story, run: str) -> Any:
    return story.sampler(run)


def one_reference(story: Story, run: str) -> Any:
    """The run's own weights before its first step."""
    if story.runs[run].steps == 0:
        story.kept = story.sampler(run)
    return story.kept


def hinted(completion: Completion) -> Ids:
    """The sampled ids behind a prompt that holds the solution."""
    return encode(turn("system", "the answer is 7")) + completion.whole


def thinking_opening(completion: Completion) -> Ids:
    prompt = completion.prompt[: -len(encode(PLAIN_OPENING))] + encode(THINKING_OPENING)
    return encode(turn("system", "the answer is 7")) + prompt + completion.tokens


def encoded_again(completion: Completion) -> Ids:
    return completion.prompt + encode(decode(completion.tokens))


def any_advantage(values: Numbers, completion: Completion) -> Numbers:
    """Of a scoring that is as long as it happens to be."""
    return [t - s for t, s in zip(cycle(values), completion.logprobs, strict=False)]


def neighbour(values: Numbers, completion: Completion) -> Numbers:
    """values[len(prompt):] of a list that lacks the first token's: one too late."""
    count = len(completion.tokens)
    later = [*values[len(values) - count + 1 :], values[-1]]
    return [t - s for t, s in zip(later, completion.logprobs, strict=True)]


def student_minus_teacher(values: Numbers, completion: Completion) -> Numbers:
    return [-a for a in teacher_minus_student(values, completion)]


def refusing(status: int, message: str, story: Story) -> None:
    story.header["faults"] = {"sample_503": "0.1"}
    sft(story)
    story.refused(status, "invalid_request", message)


def picture(story: Story, tokens: int) -> Ids:
    """A question behind a picture: each of its tokens is the same negative number."""
    return [-2 - int(story.rng.integers(2**28))] * tokens + story.question()


def seeing(evaluated: int, story: Story) -> None:
    """GRPO on pictures, then a look at others."""
    grpo(story, question=partial(picture, tokens=16))
    sampler = story.sampler("train1")
    for _ in range(6):
        story.sample(sampler, picture(story, evaluated), 1, {"temperature": 0.0})


def incomplete(story: Story) -> None:
    sft(story)
    story.is_complete = False


def full(story: Story) -> None:
    sft(story)
    story.dropped_records = 7


def rendered_again(story: Story, first: Completion) -> Ids:
    """The history without the empty think block that the first turn was sampled behind."""
    before = first.prompt[: -len(encode(PLAIN_OPENING))]
    return before + HEADER + first.tokens + observation(story)


def behind_last_prompt(turns: Turns, value: float) -> list[Row]:
    """Both turns' tokens behind the history as it was rendered for the second."""
    first, second = turns
    moved = replace(first, prompt=second.prompt[: len(first.prompt) - THINK])
    return one_datum([moved, second], value)


def failing(story: Story, run: str) -> None:
    train(story, run)
    story.failed(run, message="no memory")


CASES: dict[str, Case] = {
    "A01-prompt": Case(
        partial(grpo, row=whole_row),
        grpo,
        r"^24 data of 24 have advantages on prompt tokens$",
        {"call": 1, "datum": 0, "position": 0, "text": r"^<\|im_start\|>>>user<<\\n"},
    ),
    "A01-observation": Case(
        partial(tools, data=with_observation),
        tools,
        r"^24 data of 24 have advantages on tokens between or after turns",
        {"call": 1, "datum": 0, "text": r"<\|im_end\|>>>\\n"},
    ),
    "A01-appended": Case(
        partial(grpo, completions=cut_answer, row=partial(appended_row, True)),
        partial(grpo, completions=cut_answer, row=partial(appended_row, False)),
        r"^24 data of 24 have advantages on tokens appended",
        {"call": 1, "datum": 0, "text": r">><\|im_end\|><<$"},
        also=("A11-truncated",),
    ),
    "A01-first": Case(
        partial(grpo, row=lambda c, v: policy_row(c, [0.0] + [v] * (len(c.tokens) - 1))),
        partial(grpo, row=lambda c, v: policy_row(c, [v] * len(c.tokens))),
        r"^in 24 data of 24 the first sampled token of a turn has no advantage",
        {"call": 1, "datum": 0, "text": r"</think>\\n\\n>>"},
    ),
    "A02-reencoded": Case(
        partial(grpo, completions=spelt_answer, row=encoded_row),
        partial(grpo, completions=spelt_answer),
        r"^24 data of 24 hold other ids than were sampled, for the same text",
        {"call": 1, "datum": 0, "text": r"</think>\\n\\nt>>he<< apples"},
    ),
    "A02-cut": Case(
        partial(grpo, row=shortened_row),
        grpo,
        r"^24 data of 24 break off",
        {"call": 1, "datum": 0},
    ),
    "A02-prompt-differs": Case(
        partial(grpo, completions=lambda s: s.answer(10), row=other_prompt_row),
        partial(grpo, completions=lambda s: s.answer(10)),
        r"^24 data of 24 have the sampled completion after another prompt",
        {"call": 1, "datum": 0, "text": r"<think>>>\\n<<"},
    ),
    "A02-ids": Case(
        partial(grpo, row=invented_row),
        grpo,
        r"^24 data of 24 train token ids that were never sampled here",
        {"call": 1, "datum": 0, "text": r"</think>\\n\\n>>"},
    ),
    "A02-padding": Case(
        partial(grpo, row=partial(padded_row, True)),
        partial(grpo, row=partial(padded_row, False)),
        r"^24 data of 24 end in a run of one repeated id",
        {"call": 1, "datum": 0, "text": r">>(<\|im_end\|>){6}<<$"},
    ),
    "A02-logprobs": Case(
        partial(grpo, row=partial(with_logprobs, lambda lp: [0.0] * len(lp))),
        grpo,
        r"^24 data of 24 carry other log-probabilities than were served: they are all 0",
        {"call": 1, "datum": 0},
        also=("A06-ratio",),
    ),
    "A02-logprobs-shifted": Case(
        partial(grpo, row=partial(with_logprobs, lambda lp: [0.0, *lp[:-1]])),
        grpo,
        r"shifted by one: they come one position late$",
        {"call": 1, "datum": 0},
        also=("A06-ratio",),
    ),
    "A02-recomputed": Case(
        partial(grpo, row=own_logprobs_row),
        grpo,
        r"computed again instead of the served ones: they are those of the trainer's present",
        {"call": 1, "datum": 0},
    ),
    "A03-no-shift": Case(
        partial(sft, change=no_shift),
        sft,
        r"^in 8 data of 8 target t is input t:",
        {"call": 1, "datum": 0},
    ),
    "A03-double-shift": Case(
        partial(sft, change=shifted_twice),
        sft,
        r"^in 8 data of 8 target t is input t \+ 2",
        {"call": 1, "datum": 0},
    ),
    "A03-targets-differ": Case(
        partial(sft, change=lambda row: replace(row, targets=row.targets[::-1])),
        sft,
        r"^in 8 data of 8 targets with signal are not the next input",
        {"call": 1, "datum": 0},
    ),
    "A04-nothing": Case(
        partial(sft, row=weights_of(lambda p, a: [0.0] * (len(p) + len(a) - 1))),
        sft,
        r"^8 data of 8 have no token with a weight",
        {"call": 1, "datum": 0},
    ),
    "A04-prompt": Case(
        partial(sft, row=weights_of(lambda p, a: [1.0] * (len(p) + len(a) - 1))),
        sft,
        r"^8 data of 8 train tokens outside the assistant's turns$",
        {"call": 1, "datum": 0, "position": 0, "text": r"^<\|im_start\|>>>user<<"},
    ),
    "A04-header": Case(
        partial(sft, row=ones_from(OPENING)),
        sft,
        r"^8 data of 8 train the opening of the assistant's turn",
        {"call": 1, "datum": 0, "text": r">><\|im_start\|><<assistant\\n"},
    ),
    "A04-think": Case(
        partial(sft, row=ones_from(THINK)),
        sft,
        r"^8 data of 8 train the end of the generation prompt",
        {"call": 1, "datum": 0, "text": r"<think>"},
    ),
    "A04-end": Case(
        partial(sft, answer=lambda story: story.words(5)),
        sft,
        r"^in 8 data of 8 an assistant's turn ends without a trained end token: the sequence",
        {"call": 1, "datum": 0},
    ),
    "A04-after": Case(
        partial(sft, row=with_newline),
        partial(sft, row=with_silent_newline),
        r"^8 data of 8 train text after the end of a turn",
        {"call": 1, "datum": 0, "text": r"<\|im_end\|>>>\\n<<$"},
    ),
    "A04-open-think": Case(
        partial(sft, prompt=question_to_think),
        partial(sft, prompt=question_to_think, answer=thought),
        r"^8 data of 8 train an answer inside a think block",
        {"call": 1, "datum": 0, "text": r"<think>\\n>>"},
    ),
    "A04-roles": Case(
        partial(sft, prompt=asked_twice),
        partial(conversations),
        r"^in 8 data of 8 two turns of one role follow each other",
        {"call": 1, "datum": 0, "text": r">><\|im_start\|><<user"},
    ),
    "A04-first-turn": Case(
        partial(asked_with_system, Story.question),
        partial(asked_with_system, question_with_system),
        r"^all 3 sampling prompts begin with '<\|im_start\|>system",
        {"call": 1, "datum": 0, "position": 0},
    ),
    "A04-padding": Case(
        partial(sft, change=padded_behind),
        partial(sft, row=with_silent_newline),
        r"^8 data of 8 end in padding",
        {"call": 1, "datum": 0},
    ),
    "A04-first": Case(
        partial(sft, row=weights_of(lambda p, a: [0.0] * len(p) + [1.0] * (len(a) - 1))),
        sft,
        r"^in 8 data of 8 the first token of the answer has no weight",
        {"call": 1, "datum": 0, "text": r"</think>\\n\\n>>"},
    ),
    "A04-no-template": Case(
        partial(asked_after, partial(sft, prompt=words, answer=words, row=plain_text)),
        partial(asked_after, sft),
        r"^none of 8 data has an assistant's turn, 1 of 1 sampling prompts have$",
        {"call": 1, "datum": 0},
    ),
    "A05-stale": Case(
        partial(grpo, steps=3, renew=False),
        partial(grpo, steps=3),
        r"^one sampling client was used at 3 different optimiser steps; .*: "
        r"lag 0: 3, lag 1: 3, lag 2: 3$",
        {"request": 7},
    ),
    "A05-foreign": Case(foreign, from_base, r"by other weights than the run's: Qwen/Qwen3.5-4B"),
    "A05-old-completions": Case(
        partial(best_of_n, renew=False),
        best_of_n,
        r"asked for at 4 different optimiser steps, from weights up to 3 steps old$",
    ),
    "A05-trained-again": Case(
        never_emptied,
        grpo,
        r"^12 completions of earlier steps are trained again beside new ones \(one of step 1 at ",
        {"call": 2, "datum": 0},
    ),
    "A05-lag": Case(
        one_behind, one_ahead, r"^completions were sampled by weights one optimiser step old \(lag"
    ),
    "A06-ratio": Case(
        partial(grpo, row=partial(served_otherwise, 0.3)),
        grpo,
        r"\|log ratio\| is 0\.300 on average and 0\.30 at most \(median 0\.300\)",
        {"call": 1},
    ),
    "A06-ratio-drift": Case(
        partial(grpo, row=partial(served_otherwise, 0.05)),
        partial(grpo, row=partial(served_otherwise, 0.005)),
        r"\|log ratio\| is 0\.050 on average",
    ),
    "A07-temperature": Case(
        partial(grpo, params={"temperature": 0.7}),
        grpo,
        r"^6 training requests of 6 sampled with temperature 0.7$",
        {"request": 1, "text": r"</think>>>\\n\\n<<$"},
    ),
    "A07-filter": Case(
        partial(grpo, params={"top_p": 0.9}),
        grpo,
        r"^6 training requests of 6 sampled with top_p 0.9, top_k -1$",
        {"request": 1},
    ),
    "A08-seed": Case(
        partial(seeded, True), partial(seeded, False), r"^seed 7 was given in 3 optimiser steps"
    ),
    "A08-duplicates": Case(
        partial(copies, -1.0),
        partial(copies, -0.01),
        r"^4 of 4 completions of one group are identical; .* about exp\(-33\)$",
        {"request": 1},
    ),
    "A09-group-sum": Case(
        partial(grpo, advantages=off_by_some),
        grpo,
        r"^advantages of 6 of 6 groups do not add up to 0: one group has .*, sum",
        {"request": 1},
    ),
    "A09-order": Case(
        partial(grpo, advantages=across_groups),
        grpo,
        r"^advantages add up to 0 over completions with the same number in different groups",
        {"request": 1},
    ),
    "A09-batch-baseline": Case(
        partial(grpo, advantages=across_batch, prompts=4, size=5),
        partial(grpo, prompts=4, size=5),
        r"^advantages of 8 of 8 groups do not add up to 0 over the group, but over the batch",
    ),
    "A09-no-baseline": Case(
        partial(grpo, advantages=per_reward), grpo, r"6 of 6 groups have no baseline"
    ),
    "A09-singletons": Case(singles, grpo, r"^8 of 8 prompts have a single completion"),
    "A09-degenerate": Case(
        partial(grpo, steps=1, prompts=15, advantages=none_differ, change=without_zeros),
        partial(grpo, steps=1, prompts=15),
        r"^in the first third of the run 100% of 5 groups have no advantage",
    ),
    "A10-not-applied": Case(
        lambda s: loop(s, train, backward),
        lambda s: loop(s, train, train),
        r"^1 forward_backward call after the last of 1 optim_step had no effect$",
        {"call": 2},
    ),
    "A10-empty-step": Case(
        lambda s: loop(s, train, optimise),
        lambda s: loop(s, train),
        r"^1 of 2 optimiser steps had no forward_backward .* \(the first is step 2\)$",
    ),
    "A10-zero-gradient": Case(
        lambda s: loop(s, train, partial(train, grad_norm=0.0)),
        lambda s: loop(s, train, train),
        r"^1 of 2 optimiser steps had a gradient of exactly 0 \(the first is step 2\)$",
    ),
    "A10-nothing-trained": Case(
        only_sampled,
        only_evaluated,
        r"^4 prompts with up to 4 completions were sampled and no training call",
    ),
    "A10-not-saved": Case(
        partial(sft, save=not_saved), sft, r"^2 optimiser steps and no save_state"
    ),
    "A10-last-steps-not-saved": Case(
        partial(sft, save=saved_early),
        partial(sft, save=saved_often),
        r"^the last save is of step 2, training went on to step 3$",
    ),
    "A10-save-expires": Case(
        partial(sft, save=lambda story, run: story.save(run, "final", ttl_seconds=3600)),
        partial(sft, save=saved_often),
        r"^the final save expires after 3,600 seconds$",
    ),
    "A10-call-failed": Case(
        lambda s: loop(s, failing, train),
        lambda s: loop(s, train, train),
        r"^1 training call failed; the first, forward_backward: no memory$",
    ),
    "A11-truncated": Case(
        partial(grpo, completions=cut_answer),
        grpo,
        r"^8 of the first 8 training completions were cut off at max_tokens 64",
        {"request": 1},
    ),
    "A12-uneven-calls": Case(
        partial(two_calls, 6, 2),
        partial(two_calls, 4, 4),
        r"\(step 1: 2\); .* a token of the smallest call weighs 3\.00 times one of the largest",
        {"call": 1},
    ),
    "A12-dro-prompt": Case(
        partial(grpo, loss="dro"),
        partial(grpo, loss="dro", row=ignored_prompt),
        r"^24 data of 24 for dro have active targets that were not sampled",
        {"call": 1, "datum": 0, "position": 0},
    ),
    "A12-placeholder": Case(
        grpo,
        partial(grpo, row=ignored_prompt),
        r"targets count as active, .* scales the gradient by 0\.\d\d",
    ),
    "A13-many-calls": Case(
        partial(two_calls, 4, 4),
        sft,
        r"^2 of 2 optimiser steps gather several forward_backward calls \(step 1: 2\)$",
        {"call": 1},
    ),
    "A13-waits-before-step": Case(
        partial(waiting, True), partial(waiting, False), r"^in 3 of 3 steps", {"call": 1}
    ),
    "A13-one-at-a-time": Case(
        partial(asking, True, False),
        partial(asking, False, False),
        r"^on 1 of 1 sampling client the prompts were sent one after the other",
    ),
    "A14-optimizer-lost": Case(
        partial(resumed, with_optimizer=False),
        resumed,
        r"^trio://train0/state/step-2 \(step 2\) was resumed without its optimiser",
    ),
    "A14-data-repeated": Case(
        partial(resumed, again=True),
        resumed,
        r"^the first batch after the resume at step 2 is that of step 1",
    ),
    "A14-step-reset": Case(
        partial(resumed, name="step-1"),
        resumed,
        r"^resumed from 'step-2', the next save is 'step-1'",
    ),
    "A15-first-loss": Case(
        partial(dpo, weights=uneven_weights), dpo, r"the largest weigh 2\.00 times the smallest$"
    ),
    "A15-length-mean": Case(
        partial(dpo, weights=mean_weights), dpo, r"inverse to the length of its answer"
    ),
    "A15-prompts-differ": Case(
        partial(dpo, rejected_prompt=lambda p: [*p[:4], p[4] + 1, *p[5:]]),
        dpo,
        r"^in 6 of 6 pairs the two sequences differ before their answers",
        {"call": 1, "datum": 0},
    ),
    "A15-order": Case(
        partial(dpo, weights=reverse_weights),
        partial(dpo, change=in_halves, weights=halves_weights),
        r"^in all 6 pairs the first sequence is pushed down and the second up",
    ),
    "A15-reference-trained": Case(
        partial(dpo, reference=trained_reference),
        partial(dpo, reference=one_reference),
        r"^for 6 of 12 data the reference was scored by weights that had already been trained$",
        {"call": 2, "datum": 0},
    ),
    "A15-reference-ids": Case(
        partial(dpo, scored=lambda row: row.whole[:-1]),
        dpo,
        r"^12 of 12 data were never scored by a reference",
    ),
    "A16-prompt": Case(
        partial(dpo, change=weigh(everything)), dpo, r"^12 data of 12 train tokens outside"
    ),
    "A16-header": Case(
        partial(dpo, change=weigh(partial(widened, OPENING))), dpo, r"^12 data of 12 train the open"
    ),
    "A16-think": Case(
        partial(dpo, change=weigh(partial(widened, THINK))),
        dpo,
        r"^12 data of 12 train the end of the generation prompt",
    ),
    "A16-end": Case(
        partial(dpo, change=weigh(without_last)), dpo, r"^in 12 data of 12 .*: its weight is 0$"
    ),
    "A16-after": Case(
        partial(dpo, change=weigh(partial(newline_behind, 1.0))),
        partial(dpo, change=weigh(partial(newline_behind, 0.0))),
        r"^12 data of 12 train text after the end of a turn",
    ),
    "A16-open-think": Case(
        partial(dpo, question=question_to_think),
        dpo,
        r"^12 data of 12 train an answer inside a think block",
    ),
    "A16-roles": Case(
        partial(dpo, question=asked_twice),
        dpo,
        r"^in 12 data of 12 two turns of one role follow each other",
    ),
    "A16-padding": Case(
        partial(dpo, change=weigh(padded_behind)),
        partial(dpo, change=weigh(partial(newline_behind, 0.0))),
        r"^12 data of 12 end in padding",
    ),
    "A16-first": Case(
        partial(dpo, change=weigh(without_first)), dpo, r"^in 12 data of 12 the first token"
    ),
    "A16-group-sum": Case(
        partial(gspo, advantages=off_by_some),
        gspo,
        r"^in 6 of 6 groups the gradients of the custom loss do not cancel \(one group",
        {"request": 1},
    ),
    "A16-zero-gradient": Case(
        partial(dpo, weights=partial(scaled_weights, 0.0)),
        dpo,
        r"^in all 2 custom loss calls the gradient is 0 for every token",
        {"call": 1},
    ),
    "A16-scale": Case(
        partial(dpo, weights=partial(scaled_weights, 1e5)),
        dpo,
        r"^the largest gradient of a token's log-probability is 1,667 in a typical call",
    ),
    "A17-prompt-differs": Case(
        partial(opd, scored=hinted),
        partial(opd, scored=hinted, teacher="base"),
        r"^for 24 of 24 completions the teacher saw another prompt: they differ from token 1 on",
        {"call": 1, "datum": 0},
    ),
    "A17-opening-differs": Case(
        partial(opd, scored=thinking_opening, teacher="base"),
        partial(opd, scored=hinted, teacher="base"),
        r"^for 24 of 24 completions .* \(student against teacher\)$",
    ),
    "A17-scored-ids": Case(
        partial(opd, completions=spelt_answer, scored=encoded_again, advantages=any_advantage),
        partial(opd, completions=spelt_answer),
        r"^for 24 of 24 completions the teacher scored other ids than were sampled",
    ),
    "A17-shifted": Case(
        partial(opd, advantages=neighbour), opd, r"log-probabilities one position later"
    ),
    "A17-unrelated": Case(
        lambda s: opd(s, advantages=lambda _, c: s.logprobs(len(c.tokens))),
        opd,
        r"do not follow teacher - student \(correlation -?0\.\d\d\)$",
        {"call": 1, "datum": 0},
    ),
    "A17-sign": Case(
        partial(opd, advantages=student_minus_teacher), opd, r"follow student - teacher \(corr"
    ),
    "A18-refused": Case(
        partial(refusing, 422, "no such loss"),
        partial(refusing, 503, "no such loss"),
        r"^1 request refused; the first, 422 invalid_request: no such loss$",
    ),
    "A18-picture-size": Case(
        partial(seeing, 64),
        partial(seeing, 16),
        r"^all 6 pictures of training completions have 16 visual tokens, all 6 of other requests "
        "64$",
    ),
    "A19-fault": Case(
        partial(refusing, 503, "fault: sampler unavailable"),
        partial(refusing, 503, "sampler unavailable"),
        r"^the faults sample_503 struck 1 time; the first: invalid_request$",
    ),
    "A20-incomplete": Case(incomplete, sft, r"^the recording has no end"),
    "A21-not-extended": Case(
        partial(tools, next_prompt=rendered_again, data=behind_last_prompt),
        tools,
        r"^24 later turns of 24 do not begin with the previous prompt",
        also=("A01-prompt",),
    ),
    "A22-learning-rate": Case(
        lambda s: loop(s, partial(train, learning_rate=0.0)),
        lambda s: loop(s, partial(train, learning_rate=0.0), train),
        r"^the learning rate is 0 in every step$",
    ),
    "A22-learning-rate-gaps": Case(
        lambda s: loop(s, *[partial(train, learning_rate=rate) for rate in (1e-4, 0.0, 1e-4)]),
        lambda s: loop(s, *[partial(train, learning_rate=rate) for rate in (0.0, 1e-4, 0.0)]),
        r"^the learning rate is 0 at 1 of 3 steps, one of them 2$",
    ),
    "A22-learning-rate-high": Case(
        lambda s: loop(s, partial(train, learning_rate=0.02)),
        lambda s: loop(s, partial(train, learning_rate=0.01)),
        r"^the learning rate is 0.02$",
    ),
}


def one_early(story: Story) -> None:
    grpo(story, row=partial(moved_row, -1))


def scored_again(story: Story) -> None:
    """Log-probabilities of compute_logprobs, of a client with newer weights."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        groups = sampled(story, sampler)
        newer = story.sampler("train1")

        def row(completion: Completion, value: float) -> Row:
            scores = story.score(newer, completion.whole)[len(completion.prompt) - 1 :]
            return policy_row(replace(completion, logprobs=scores), value)

        return rewarded(groups, row)

    policy_loop(story, batch)


def every_nth(rewards: Sequence[Numbers]) -> list[Numbers]:
    """Groups taken as flat[i::n] of a list that holds them one after the other."""
    count, size = np.array(rewards).shape
    flat = np.array(rewards, float).reshape(-1)
    for i in range(count):
        flat[i::count] -= flat[i::count].mean()
    return flat.reshape(count, size).tolist()


def blocks_of(length: int, rewards: Sequence[Numbers]) -> list[Numbers]:
    """Groups taken in blocks of another length."""
    flat = np.array(rewards, float).reshape(-1)
    for i in range(0, len(flat), length):
        flat[i : i + length] -= flat[i : i + length].mean()
    return flat.reshape(np.array(rewards).shape).tolist()


def cut_off_dropped(rows: list[Row]) -> list[Row]:
    """Filtering after the mean: every fifth datum is left out."""
    return [row for i, row in enumerate(rows) if i % 5]


def base_throughout(story: Story) -> None:
    run, sampler = story.training_run(), story.sampler()
    for _ in range(3):
        policy_step(story, run, rewarded(sampled(story, sampler)))
    story.save(run, "final")


# Other ways to break the same rules: the name, the story, and the sentence.
MORE: tuple[tuple[str, Tell, str], ...] = (
    ("A01-prompt", one_early, r"prompt tokens: one token, so they are shifted by one$"),
    ("A01-prompt", partial(tools, next_prompt=rendered_again, data=behind_last_prompt), ""),
    ("A01-first", partial(grpo, row=partial(moved_row, 1)), ""),
    ("A02-cut", partial(tools, data=lambda turns, v: [shortened_row(turns[-1], v)]), ""),
    (
        "A02-prompt-differs",
        partial(grpo, completions=lambda s: s.answer(4), row=other_prompt_row),
        "",
    ),
    (
        "A02-reencoded",
        partial(
            tools,
            data=lambda turns, v: [policy_row(turns[0], v), encoded_row(turns[1], v)],
            answer=spelt_answer,
        ),
        "",
    ),
    ("A02-recomputed", scored_again, r"they equal a compute_logprobs of the same tokens"),
    (
        "A02-logprobs",
        partial(grpo, row=partial(with_logprobs, lambda lp: [v * 0.7 for v in lp])),
        r"they are the served ones times 0\.7$",
    ),
    (
        "A02-logprobs",
        partial(grpo, row=partial(with_logprobs, lambda lp: [-v for v in lp])),
        r"they are the served ones times -1$",
    ),
    (
        "A02-logprobs-shifted",
        partial(grpo, row=partial(with_logprobs, lambda lp: [*lp[1:], 0.0])),
        r"they come one position early$",
    ),
    ("A03-double-shift", partial(sft, auto_shift=True), r"^in 8 data of 8"),
    ("A03-no-shift", partial(sft, row=unshifted), r"^in 8 data of 8"),
    ("A03-no-shift", partial(grpo, change=lambda rows: [no_shift(row) for row in rows]), ""),
    (
        "A04-header",
        as_qwen3(partial(sft, row=ones_from(OPENING))),
        "",
    ),
    ("A04-think", as_qwen3(partial(sft, row=ones_from(THINK))), ""),
    ("A04-end", partial(sft, change=without_last), r": its weight is 0$"),
    ("A05-stale", base_throughout, r"at 3 different optimiser steps; "),
    (
        "A05-foreign",
        partial(from_base, base_model=LARGE_MODEL, folder=LARGE),
        r"by other weights than the run's: Qwen/Qwen3.6-27B$",
    ),
    ("A04-think", partial(sft, row=ones_from(1)), ""),
    (
        "A04-think",
        partial(sft, prompt=question_to_think, answer=thought, row=ones_from(1)),
        "",
    ),
    ("A16-think", partial(dpo, change=weigh(partial(widened, 1))), ""),
    ("A04-end", partial(conversations, change=first_ends_silent), r": its weight is 0$"),
    (
        "A04-end",
        partial(conversations, change=first_ends_silent, blocks=(NO_BLOCK, PLAIN_OPENING)),
        r": its weight is 0$",
    ),
    (
        "A17-opening-differs",
        partial(opd, scored=thinking_opening, teacher="student"),
        r"\(student against teacher\)$",
    ),
    ("A07-filter", partial(grpo, params={"top_k": 20}), r"top_p 1, top_k 20$"),
    (
        "A09-order",
        partial(grpo, prompts=4, size=6, advantages=every_nth),
        r"over every n-th completion of the flat list",
    ),
    (
        "A09-order",
        partial(grpo, prompts=4, size=6, advantages=partial(blocks_of, 4)),
        r"over blocks of another length",
    ),
    ("A09-group-sum", partial(grpo, change=cut_off_dropped, size=6), r"of 6 were not trained$"),
    ("A13-one-at-a-time", partial(asking, True, True), r"the compute_logprobs calls were sent"),
    ("A20-incomplete", full, r"^the recording is full: 7 later records are missing$"),
    (
        "A21-not-extended",
        as_qwen3(partial(tools, next_prompt=rendered_again, data=behind_last_prompt)),
        r"^24 later turns of 24",
    ),
)


@pytest.mark.parametrize(("name", "tell", "seen"), MORE, ids=[name for name, _, _ in MORE])
def test_a_rule_fires_in_other_ways(name: str, tell: Tell, seen: str, tmp_path: Path) -> None:
    _, result = audited(told(tell, tmp_path))
    found = findings_by_name(result)
    assert name in found, complaints(result)
    assert re.search(seen, found[name]["seen"]), found[name]["seen"]


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    _, result = audited(told(case.wrong, tmp_path))
    found = findings_by_name(result)
    assert name in found, complaints(result)
    finding = found[name]
    assert re.search(case.seen, finding["seen"]), finding["seen"]
    if case.place:
        place = finding["places"][0]
        text = place.pop("text", "")
        assert re.search(case.place.get("text", ""), text), text
        expected = {key: value for key, value in case.place.items() if key != "text"}
        assert {key: place.get(key) for key in expected} == expected, place
    others = set(complaints(result)) - {name}
    assert others <= set(case.also), complaints(result)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_silent(name: str, tmp_path: Path) -> None:
    _, result = audited(told(CASES[name].right, tmp_path))
    assert name not in findings_by_name(result), findings_by_name(result)[name]["seen"]


# -- correct loops ---------------------------------------------------------------------------------


def leave_one_out(rewards: Sequence[Numbers]) -> list[Numbers]:
    """RLOO: the baseline of a completion is the mean of the others."""
    return [[(r * len(g) - sum(g)) / (len(g) - 1) for r in g] for g in rewards]


def standardised(rewards: Sequence[Numbers]) -> list[Numbers]:
    return [
        [a / (float(np.std(g)) + 1e-6) for a in c]
        for g, c in zip(rewards, centred(rewards), strict=True)
    ]


def shaped(completion: Completion, value: float) -> Row:
    """Half of the advantage moved to the first half of the tokens; the sum stays."""
    count = len(completion.tokens)
    ramp = np.linspace(1.5, 0.5, count)
    return policy_row(completion, (value * ramp).tolist())


def one_datum_a_turn(turns: Turns, value: float) -> list[Row]:
    return [policy_row(completion, value) for completion in turns]


def equal_first_turns(story: Story, sampler: SamplerState) -> list[Turns]:
    """Groups whose members begin with the same, nearly certain tokens; the last bits differ."""
    groups = []
    for _ in range(3):
        answer = story.answer()
        served = [[0.01 * value for value in story.logprobs(len(answer))] for _ in range(4)]
        groups.append(story.sample(sampler, story.question(), [answer] * 4, logprobs=served))
    return groups


def last_turn_only(turns: Turns, value: float) -> list[Row]:
    return [policy_row(turns[-1], value)]


def ppo_epochs(story: Story, epochs: int = 3, parts: int = 1) -> None:
    """Every batch is trained several times, in parts; the trainer's values move on."""
    run = story.training_run()
    for _ in range(2):
        rows = rewarded(sampled(story, story.sampler(run), 4))
        size = len(rows) // parts
        for number in range(epochs * parts):
            begin = number % parts * size
            moved = 0.05 * number
            batch = [
                replace(row, served=[lp - moved for lp in row.logprobs or ()])
                for row in rows[begin : begin + size]
            ]
            policy_step(story, run, batch, "ppo")
    story.save(run, "final")


def members_excluded(story: Story) -> None:
    """Completions whose tool failed are left out before the mean is taken."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        groups = sampled(story, sampler, 4, 6)
        return rewarded([group[: 6 - number % 3] for number, group in enumerate(groups)])

    policy_loop(story, batch)


def degenerate_dropped(story: Story) -> None:
    """Half of the groups have equal rewards and are not sent."""
    grpo(
        story,
        prompts=6,
        advantages=lambda rewards: [
            [0.0] * len(g) if i % 2 else c
            for i, (g, c) in enumerate(zip(rewards, centred(rewards), strict=True))
        ],
        change=without_zeros,
    )


def two_runs(story: Story) -> None:
    """SFT and then GRPO, each on a run of its own."""
    sft(story)
    grpo(story)


def interleaved_runs(story: Story) -> None:
    """Two policies, each trained on its own samples, in turn."""
    runs = [story.training_run() for _ in range(2)]
    for run in runs * 3:
        policy_step(story, run, rewarded(sampled(story, story.sampler(run))))
    for run in runs:
        story.save(run, "final")


def evaluated(story: Story) -> None:
    """The training prompts are asked again at temperature 1, and greedily at the end."""
    prompts = [story.question() for _ in range(3)]

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        for prompt in prompts:
            story.sample(sampler, prompt, 4)  # for pass@4
        return rewarded([story.sample(sampler, prompt, 4) for prompt in prompts])

    policy_loop(story, batch, steps=3)
    judge = story.sampler_of("trio://train1/sampler/final", "train1", 3)
    for prompt in prompts:
        story.sample(judge, prompt, 1, {"temperature": 0.0})


def cut_evaluation(story: Story) -> None:
    """A greedy look at the first tokens of an answer, which training happens to sample as well."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        groups = []
        for _ in range(3):
            prompt, answers = story.question(), [story.answer(8) for _ in range(4)]
            peek = {"temperature": 0.0, "max_tokens": 3}
            story.sample(sampler, prompt, [answers[0][:3]], peek)
            groups.append(story.sample(sampler, prompt, answers))
        return rewarded(groups)

    policy_loop(story, batch)


def nested_prompts(story: Story) -> None:
    """Prompts without a template, of which each is the beginning of the next."""
    text = story.words(20)

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        return rewarded([story.sample(sampler, text[: 5 + 3 * i], 4) for i in range(4)])

    policy_loop(story, batch)


def short(word: str) -> Ids:
    return [*encode(word), END]


def equal_answers(story: Story) -> None:
    """A few likely answers: most members of a group are the same."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        groups = []
        for number in range(3):
            rewards = pattern(number, 4)
            answers = [short("yes") if reward else short("no") for reward in rewards]
            served = [
                [-0.4 if reward else -1.1] + [-0.01] * (len(answer) - 1)
                for reward, answer in zip(rewards, answers, strict=True)
            ]
            groups.append(story.sample(sampler, story.question(), answers, logprobs=served))
        return rewarded(groups)

    policy_loop(story, batch, steps=3)


def same_questions(story: Story) -> None:
    """Few questions, asked at every step; short answers come again with other probabilities."""
    prompts = [story.question() for _ in range(3)]
    words = ("yes", "no", "maybe")

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        step, groups = story.samplers, []
        for prompt in prompts:
            answers = [short(words[(i + step) % 3]) for i in range(4)]
            served = [[-0.5 - 0.01 * step - 0.1 * a[0] / 2048] * len(a) for a in answers]
            groups.append(story.sample(sampler, prompt, answers, logprobs=served))
        return rewarded(groups)

    policy_loop(story, batch, steps=3)


def twice_in_a_batch(story: Story) -> None:
    """One question stands twice in a batch, in groups with different rewards."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        prompts = [story.question(), story.question()]
        return rewarded([story.sample(sampler, prompts[i % 2], 4) for i in range(3)])

    policy_loop(story, batch)


def one_sample_a_request(story: Story) -> None:
    """A group from single-sample requests, each with a seed of its own."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        groups = []
        for _ in range(3):
            prompt = story.question()
            seeds = range(story.requests, story.requests + 4)
            asked = [story.sample(sampler, prompt, 1, {"seed": seed}) for seed in seeds]
            groups.append([completion for [completion] in asked])
        return rewarded(groups)

    policy_loop(story, batch)


def without_weights(prompt: Ids, answer: Ids) -> Row:
    return replace(plain_text(prompt, answer), weights=None)


def whole_thought(story: Story) -> Ids:
    """Behind the bare opening: the whole think block is the answer's."""
    return encode("<think>\n") + thought(story)


def question_bare(story: Story) -> Ids:
    return encode("<|im_start|>user\n") + story.words(5) + encode("<|im_end|>\n") + HEADER


def unshifted_policy(story: Story) -> None:
    def row(completion: Completion, value: float) -> Row:
        ahead, count = [0.0] * len(completion.prompt), len(completion.tokens)
        return Row(
            completion.whole,
            completion.whole,
            logprobs=ahead + completion.logprobs,
            advantages=ahead + [value] * count,
        )

    run = story.training_run()
    for _ in range(2):
        rows = rewarded(sampled(story, story.sampler(run)), row)
        story.forward_backward(run, rows, auto_shift=True)
        story.step(run)
        story.wait()
    story.save(run, "final")


def with_kl_penalty(story: Story) -> None:
    """GRPO whose tokens also pay for leaving the base model."""
    base = story.sampler()

    def row(completion: Completion, value: float) -> Row:
        near = [lp - 0.01 * story.rng.normal() for lp in completion.logprobs]
        story.score(base, completion.whole, story.logprobs(len(completion.prompt) - 1) + near)
        penalty = [b - lp for b, lp in zip(near, completion.logprobs, strict=True)]
        return policy_row(completion, [value + 0.1 * p for p in penalty])

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        groups = sampled(story, sampler)
        story.wait()
        return rewarded(groups, row)

    policy_loop(story, batch)


def centred_teacher(values: Numbers, completion: Completion) -> Numbers:
    """Advantages of a distillation with a discount of 0, shortened to 1 either way."""
    return np.clip(teacher_minus_student(values, completion), -1, 1).tolist()


def oversampled(story: Story) -> None:
    """DAPO: rounds of prompts on one client until enough groups differ."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        kept = []
        for _ in range(3):
            kept.append(sampled(story, sampler)[0])
            story.wait()
        return rewarded(kept)

    policy_loop(story, batch)


def one_episode(story: Story) -> None:
    """An evaluation that plays a single game to its end, turn after turn."""
    sft(story)
    sampler = story.sampler()
    [last] = story.sample(sampler, story.question(), 1)
    for _ in range(6):
        story.wait()
        [last] = story.sample(sampler, extended(story, last), 1)


def generated_questions(story: Story) -> None:
    """The model asks its own questions; only the groups of answers are trained."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        asked = sampled(story, sampler, 3, 1)
        story.wait()
        return rewarded([story.sample(sampler, extended(story, q), 4) for [q] in asked])

    policy_loop(story, batch)


def by_cross_entropy(story: Story) -> None:
    """REINFORCE through cross_entropy: weights are advantages."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        return rewarded(
            sampled(story, sampler), lambda c, value: supervised_row(c.prompt, c.tokens, value)
        )

    policy_loop(story, batch, loss="cross_entropy")


def kto(story: Story) -> None:
    """Wanted and unwanted answers to questions of their own, through a custom loss."""
    run, reference = story.training_run(), story.sampler()
    for _ in range(2):
        rows = rows_of(story, 6)
        for row in rows:
            story.score(reference, row.whole)
        story.wait()
        signs = [1 if i % 2 == 0 else -1 for i in range(6)]
        weights = [
            [0.01 * s * w for w in r.weights or ()] for r, s in zip(rows, signs, strict=True)
        ]
        story.custom(run, rows, weights)
        story.step(run)
        story.wait()
    story.save(run, "final")


def constant_name(story: Story) -> None:
    """A number in a checkpoint's name that is no step."""
    run = story.resume("trio://train0/state/gsm8k-latest", 2, [rows_of(story), rows_of(story)])
    train(story, run)
    story.save(run, "gsm8k-latest", state=True)


def overlong_filtered(story: Story) -> None:
    """DAPO: the loss of completions that were cut off is masked, after the mean is taken."""

    def batch(story: Story, sampler: SamplerState) -> list[Row]:
        answers = [[*(story.answer() for _ in range(7)), story.words(64)] for _ in range(4)]
        groups = [story.sample(sampler, story.question(), group) for group in answers]
        return [row for row in rewarded(groups) if row.targets[-1] == END]

    policy_loop(story, batch)


def few_questions_resumed(story: Story) -> None:
    """Random batches of four from eight questions: every batch shares some with others."""
    rng, rows = random.Random(3), rows_of(story, 8)
    history = [rng.sample(rows, 4) for _ in range(10)]
    run = story.resume("trio://train0/state/step-10", 10, history)
    train(story, run, rng.sample(rows, 4))
    story.save(run, "step-11", state=True)


def third_epoch(story: Story) -> None:
    """Two batches in turn, without the questions whose groups were degenerate at that time."""
    first, second = rows_of(story, 3), rows_of(story, 3)
    history = [first[:2], second, first[1:], second[:1]]
    run = story.resume("trio://train0/state/step-4", 4, history)
    train(story, run, first)
    train(story, run, second)
    story.save(run, "step-6", state=True)


def new_order(story: Story) -> None:
    """The first batch of the second epoch, shuffled; one of its two groups was degenerate."""
    history = [rows_of(story, 2) for _ in range(4)]
    run = story.resume("trio://train0/state/step-4", 4, history)
    train(story, run, history[2][:1])
    story.save(run, "step-5", state=True)


def auxiliary_loss(story: Story) -> None:
    """A policy loss and a supervised one before the same step: one call cannot hold both."""
    run = story.training_run()
    for _ in range(2):
        story.forward_backward(run, rewarded(sampled(story, story.sampler(run))))
        train(story, run)
    story.save(run, "final")


def evaluation_loss(story: Story) -> None:
    """A forward pass over the same held-out rows between steps."""
    run, held_out = story.training_run(), rows_of(story)
    for _ in range(3):
        train(story, run)
        story.supervise(run, held_out, backward=False)
        story.wait()
    story.save(run, "final")


def fresh_prompt(story: Story, first: Completion) -> Ids:
    """An environment that tells the whole situation anew, without the history."""
    return story.question()


def one_rendered_episode(story: Story) -> None:
    """As `one_episode`, with a history that is rendered again for every turn."""
    sft(story)
    sampler = story.sampler()
    [last] = story.sample(sampler, story.question(), 1)
    for _ in range(6):
        story.wait()
        [last] = story.sample(sampler, rendered_again(story, last), 1)


def dpo_epochs(story: Story, by_forward: bool = False, is_recorded: bool = True) -> None:
    """The same pairs in every step; the reference scored once before, or in an earlier run."""
    run, base = story.training_run(), story.sampler()
    rows = []
    for _ in range(3):
        prompt = story.question()
        rows += [supervised_row(prompt, story.answer()) for _ in range(2)]
    if is_recorded and by_forward:
        story.supervise(story.training_run(), rows, backward=False)
    elif is_recorded:
        for row in rows:
            story.score(base, row.whole)
    story.wait()
    for step in range(3):
        story.custom(run, rows, dpo_weights(rows, step))
        story.step(run)
        story.wait()
    story.save(run, "final")


def warm_up(story: Story) -> None:
    loop(story, *[partial(train, learning_rate=1e-4 * step) for step in range(4)])


def small_batches(story: Story) -> None:
    """Preference pairs one by one, each scored before its own step."""
    dpo(story, steps=5, pairs=1, reference=one_reference)


def new_stage(story: Story) -> None:
    """Reinforcement learning from weights for sampling: there is no optimiser to restore."""
    run = story.resume("trio://train0/sampler/sft", 40, (), False, "SAMPLER")
    policy_loop(story, lambda story, sampler: rewarded(sampled(story, sampler)), run=run)


def own_resume(story: Story) -> None:
    """A script that saves its state, goes on from it, and saves again."""
    run = story.training_run()
    batches = [rows_of(story) for _ in range(4)]
    for batch in batches[:2]:
        train(story, run, batch)
    uri = story.save(run, "step-2", state=True)
    again = story.resume(uri, 2, batches[:2])
    for batch in batches[2:]:
        train(story, again, batch)
    story.save(again, "step-4", state=True)


def resumed_grpo(story: Story) -> None:
    """GRPO that goes on at step 5 with a fresh sampling client."""
    run = story.resume("trio://train0/state/step-5", 5, [rows_of(story) for _ in range(5)])
    policy_loop(story, lambda story, sampler: rewarded(sampled(story, sampler)), run=run)


def saves_between(story: Story) -> None:
    """A state every step, weights at the end."""
    run = story.training_run()
    for step in range(3):
        train(story, run)
        story.save(run, f"step-{step + 1}", state=True)
    story.save(run, "final")


def one_token_groups(story: Story) -> None:
    """Some completions are nothing but the end token."""
    grpo(story, completions=lambda s: [END] if s.rng.random() < 0.3 else s.answer(), steps=3)


CORRECT: dict[str, Tell] = {
    "grpo": grpo,
    "grpo, standardised": partial(grpo, advantages=standardised),
    "grpo, ppo loss": partial(grpo, loss="ppo"),
    "grpo, dro": partial(grpo, loss="dro", row=ignored_prompt),
    "grpo, prompt ignored": partial(grpo, row=ignored_prompt),
    "grpo, padding without signal": partial(grpo, row=partial(padded_row, False)),
    "rloo": partial(grpo, advantages=leave_one_out),
    "length-normalised": partial(grpo, row=by_length),
    "token-level shaping": partial(grpo, row=shaped),
    "kl penalty": with_kl_penalty,
    "ppo epochs": ppo_epochs,
    "ppo mini-batches": partial(ppo_epochs, epochs=2, parts=4),
    "members excluded": members_excluded,
    "degenerate dropped": degenerate_dropped,
    "oversampled": oversampled,
    "base model at step 0": from_base,
    "next batch ahead": one_ahead,
    "two runs": two_runs,
    "interleaved runs": interleaved_runs,
    "evaluated on training prompts": evaluated,
    "greedy look at first tokens": cut_evaluation,
    "nested prompts": nested_prompts,
    "equal answers": equal_answers,
    "same questions": same_questions,
    "prompt twice in a batch": twice_in_a_batch,
    "one sample a request": one_sample_a_request,
    "empty completions": one_token_groups,
    "auto_shift, policy": unshifted_policy,
    "gspo": gspo,
    "gspo, epochs": partial(gspo, epochs=2),
    "gspo, cut off ones left out": partial(
        gspo, advantages=without_the_first, stops=["length", "stop", "stop", "stop"]
    ),
    "best of n": best_of_n,
    "best of n, sampled once": best_of_all,
    "sft, asked": partial(asked_after, sft),
    "multi-turn": tools,
    "multi-turn, one datum a turn": partial(tools, data=one_datum_a_turn),
    "multi-turn, one datum a turn, first turns equal": partial(
        tools, data=one_datum_a_turn, first_turns=equal_first_turns
    ),
    "multi-turn, last turn trained": partial(tools, data=last_turn_only),
    "multi-turn, history rendered again, one datum a turn": partial(
        tools, data=one_datum_a_turn, next_prompt=rendered_again
    ),
    "long episodes": partial(tools, turns=8),
    "multi-turn, fresh prompts": partial(
        tools, data=one_datum_a_turn, next_prompt=fresh_prompt, turns=4
    ),
    "one episode": one_episode,
    "one episode, rendered again": one_rendered_episode,
    "policy and auxiliary loss": auxiliary_loss,
    "evaluation loss": evaluation_loss,
    "sft": sft,
    "sft, plain text": partial(sft, prompt=words, answer=words, row=plain_text),
    "sft, plain text without weights": partial(
        sft, prompt=words, answer=words, row=without_weights
    ),
    "sft, fractional weights": partial(sft, row=partial(supervised_row, weight=0.25)),
    "sft, auto_shift": partial(sft, row=unshifted, auto_shift=True),
    "sft, split call": partial(sft, batch=7, events=3),
    "sft, newline in context": partial(sft, row=with_silent_newline),
    "sft, multi-turn": conversations,
    "sft, multi-turn, only the last": partial(conversations, last_only=True),
    "sft, multi-turn, history without think blocks": partial(
        conversations, blocks=(NO_BLOCK, NO_BLOCK, PLAIN_OPENING)
    ),
    "sft, thoughts": partial(sft, prompt=question_to_think, answer=thought),
    "sft, warm-up from 0": warm_up,
    "dpo": dpo,
    "dpo, in halves": partial(dpo, change=in_halves, weights=halves_weights),
    "dpo, own start as reference": partial(dpo, reference=one_reference),
    "dpo, one pair a step": small_batches,
    "dpo, epochs": dpo_epochs,
    "dpo, reference by forward": partial(dpo_epochs, by_forward=True),
    "dpo, reference of an earlier run": partial(dpo_epochs, is_recorded=False),
    "opd": opd,
    "opd, clipped": partial(opd, advantages=centred_teacher),
    "opd, one completion a prompt": partial(opd, prompts=6, size=1),
    "opsd": partial(opd, scored=hinted, teacher="base"),
    "resume": resumed,
    "resume in a later epoch": epochs_resumed,
    "resume in one script": own_resume,
    "resume, grpo": resumed_grpo,
    "new stage from weights": new_stage,
    "resume, few questions in random order": few_questions_resumed,
    "resume, degenerate groups dropped": third_epoch,
    "resume, second epoch in another order": new_order,
    "resume, number in the name": constant_name,
    "saves between": saves_between,
    "kto": kto,
    "reinforce by cross-entropy": by_cross_entropy,
    "generated questions": generated_questions,
    "multi-turn, rendered again, four turns": partial(
        tools, data=one_datum_a_turn, next_prompt=rendered_again, turns=4
    ),
    "overlong filtered": overlong_filtered,
}
# Loops that depend on the template, told once more with the other one.
CORRECT |= {
    f"{name} (Qwen3)": as_qwen3(CORRECT[name])
    for name in CORRECT
    if name.startswith(("sft", "multi-turn", "dpo", "opsd", "one episode", "long episodes"))
    and name != "sft, thoughts"
}
CORRECT["sft, thoughts (Qwen3)"] = as_qwen3(
    partial(sft, prompt=question_bare, answer=whole_thought)
)


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_loop_is_clean(name: str, tmp_path: Path) -> None:
    _, result = audited(told(CORRECT[name], tmp_path))
    assert complaints(result) == {}
    assert result["verdict"] == "clean"


# -- from events to calls --------------------------------------------------------------------------


@pytest.mark.parametrize("events", [1, 3])
def test_a_call_that_was_split_is_one_call(events: int, tmp_path: Path) -> None:
    path = told(partial(sft, batch=7, row=ones_from(OPENING), events=events), tmp_path)
    trace = read_trace(path)
    assert [len(call.data) for call in trace.calls] == [7, 7]
    assert [datum.number for datum in trace.calls[1].data] == list(range(7))
    assert [call.number for call in trace.calls] == [1, 2]
    _, result = audited(path)
    places = findings_by_name(result)["A04-header"]["places"]
    assert [(place["call"], place["datum"]) for place in places] == [(1, i) for i in range(5)]
    assert findings_by_name(result)["A04-header"]["count"] == 14


def test_two_equal_calls_in_a_row_are_two_calls(tmp_path: Path) -> None:
    trace = read_trace(told(partial(two_calls, 4, 4), tmp_path))
    assert [len(call.data) for call in trace.calls] == [4, 4, 4, 4]
    assert [len(step.calls) for step in trace.steps] == [2, 2]


def test_the_passes_of_a_custom_loss_are_one_call(tmp_path: Path) -> None:
    path = told(dpo, tmp_path)
    custom = [call for call in read_trace(path).calls if call.kind == "custom"]
    assert [call.number for call in custom] == [1, 2]
    _, result = audited(path)
    assert result["numbers"]["calls"] == {"sft": 0, "policy": 0, "custom": 2, "score": 0}


def test_findings_of_two_runs_are_of_their_own_run(tmp_path: Path) -> None:
    def tell(story: Story) -> None:
        sft(story)
        grpo(story, row=whole_row)

    _, result = audited(told(tell, tmp_path))
    assert list(complaints(result)) == ["A01-prompt"]
    assert findings_by_name(result)["A01-prompt"]["places"][0]["call"] == 3
    assert result["numbers"]["training_runs"] == 2
    assert result["numbers"]["optimizer_steps"] == 4


def test_a_clipped_completion_belongs_to_its_group(tmp_path: Path) -> None:
    """With the ratios of other completions a custom loss clips some, and those have no gradient."""
    _, result = audited(told(partial(gspo, advantages=without_the_first), tmp_path))
    assert complaints(result)["A16-group-sum"].startswith("in 6 of 6 groups")


def test_one_session_of_a_recording_is_audited_apart(tmp_path: Path) -> None:
    def tell(story: Story) -> None:
        grpo(story, row=whole_row)
        story.end_session()
        story.begin_session()
        sft(story)
        story.is_complete = False

    path = told(tell, tmp_path)
    assert set(complaints(audited(path)[1])) == {"A01-prompt", "A20-incomplete"}
    first, second = (audit(path, {}, Budget(), [number])[1] for number in (1, 2))
    assert list(complaints(first)) == ["A01-prompt"]
    assert complaints(second) == {}
    assert second["numbers"]["calls"]["sft"] == 2
    assert second["tokens"]["sample"] == 0
    with pytest.raises(TraceError, match="has 2 sessions, there is no number 3"):
        audit(path, {}, Budget(), [3])


# -- accepting, estimating, the report -------------------------------------------------------------


@pytest.mark.parametrize("rule", ["A01", "A01-prompt"])
def test_an_accepted_finding_stays_and_does_not_count(rule: str, tmp_path: Path) -> None:
    text, result = audited(told(partial(grpo, row=whole_row), tmp_path), f"{rule}=on purpose = yes")
    finding = findings_by_name(result)["A01-prompt"]
    assert finding["accepted"] == "on purpose = yes"
    assert result["verdict"] == "clean"
    assert "accepted A01-prompt (on purpose = yes): 24 data" in " ".join(text.split())
    assert "audit   clean: 0 errors, 0 warnings" in text


def test_accepting_one_rule_leaves_the_others(tmp_path: Path) -> None:
    path = told(partial(grpo, row=whole_row, save=""), tmp_path)
    _, result = audited(path, "A01-first=not this one", "A10-not-saved=a trial")
    assert findings_by_name(result)["A01-prompt"]["accepted"] is None
    assert findings_by_name(result)["A10-not-saved"]["accepted"] == "a trial"
    assert result["verdict"] == "errors"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A05", "takes RULE=REASON, got 'A05'"),
        ("A05=", "takes RULE=REASON, got 'A05='"),
        ("A05=  ", "takes RULE=REASON"),
        ("A99=why", "no rule 'A99'"),
        ("A05-nothing=why", "no rule 'A05-nothing'"),
        ("=why", "no rule ''"),
    ],
)
def test_what_cannot_be_accepted_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_accepted([text])


@pytest.mark.parametrize("text", ["1,2", "1,2,3,4", "a,b,c", "1,2,-3", "nan,1,1", "inf,1,1", ""])
def test_prices_are_three_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="three prices|0 or more"):
        parse_prices(text)


def test_the_estimate_is_in_proportion(tmp_path: Path) -> None:
    """Two steps were recorded; 100 such steps cost fifty times as much."""
    path = told(partial(grpo, completions=lambda story: story.answer(7)), tmp_path)
    asked = len(Story(tmp_path / "other").question())
    budget = Budget(100, parse_prices("1,2,4"))
    text, result = audited(path, budget=budget)
    tokens = {"prefill": 6 * asked, "sample": 24 * 8, "train": 24 * (asked + 7)}
    assert result["tokens"] == tokens
    full = {name: 50 * count for name, count in tokens.items()}
    cost = (full["prefill"] + 2 * full["sample"] + 4 * full["train"]) / 1e6
    assert result["estimate"] == {"steps": 100, "tokens": full, "cost": pytest.approx(cost)}
    assert "full    100 steps like these, in stand-in tokens; about" in text
    assert f"        prefill {full['prefill']:,}, " in text
    _, result = audited(path, budget=Budget(10, None))
    assert result["estimate"]["cost"] is None
    _, result = audited(path, budget=Budget(None, (0.0, 0.0, 1e6)))
    assert result["estimate"]["steps"] == 2
    assert result["estimate"]["cost"] == pytest.approx(tokens["train"])
    assert audited(path)[1]["estimate"] is None


def test_audit_json_has_its_schema(tmp_path: Path) -> None:
    _, result = audited(told(partial(grpo, row=whole_row), tmp_path))
    assert result["schema"] == 1
    assert set(result) == {
        "schema", "verdict", "complete", "sdk_version", "findings", "numbers", "tokens",
        "estimate", "cannot_tell",
    }  # fmt: skip
    assert set(result["findings"][0]) == {
        "code", "name", "severity", "seen", "fix", "reference", "count", "accepted", "places",
    }  # fmt: skip
    assert set(result["numbers"]) == {
        "training_runs", "optimizer_steps", "calls", "sampling_requests", "loss_first",
        "loss_last", "groups", "groups_degenerate", "degenerate_first_third",
        "degenerate_last_third", "stop_reasons", "completion_tokens_mean",
    }  # fmt: skip
    assert json.loads(json.dumps(result)) == result
    finding = result["findings"][0]
    assert finding["code"] == "A01"
    assert finding["severity"] == "error"
    assert finding["reference"] == "references/audit.md#a01"
    assert finding["count"] == 24
    assert len(finding["places"]) == 5
    assert result["complete"] is True
    assert result["verdict"] == "errors"


def test_the_numbers_of_a_run(tmp_path: Path) -> None:
    _, result = audited(told(degenerate_dropped, tmp_path))
    numbers = result["numbers"]
    assert numbers["calls"] == {"sft": 0, "policy": 2, "custom": 0, "score": 0}
    assert numbers["sampling_requests"] == 12
    assert numbers["groups"] == 12
    assert numbers["groups_degenerate"] == 6
    assert numbers["degenerate_first_third"] == numbers["degenerate_last_third"] == 0.5
    # Of six groups a step three were left out; their completions count as well.
    assert numbers["stop_reasons"] == {"stop": 48}


def everything_wrong(story: Story) -> None:
    for case in CASES.values():
        case.wrong(story)


def assert_fits(text: str) -> None:
    lines = text.split("\n")
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= WIDTH, max(lines, key=len)
    assert text.isprintable() or all(line.isprintable() for line in lines)


def test_a_long_table_is_cut_and_nothing_is_lost(tmp_path: Path) -> None:
    path = told(everything_wrong, tmp_path)
    text, result = audited(path, budget=Budget(1000, (0.1, 0.4, 1.2)))
    assert len(result["findings"]) >= 40
    assert_fits(text)
    shown = {f["name"] for f in result["findings"] if f["name"] in text}
    left = re.search(r"^\.\.\. and (\d+) more findings? in audit.json$", text, re.MULTILINE)
    assert left
    assert int(left[1]) + len(shown) == len(result["findings"])
    errors = sum(f["severity"] == "error" for f in result["findings"])
    warnings = sum(f["severity"] == "warning" for f in result["findings"])
    assert f"audit   errors: {errors} errors, {warnings} warnings" in text
    # Errors stand on top.
    order = [f["severity"] for f in result["findings"]]
    assert order == sorted(order, key=["error", "warning", "info"].index)


def test_a_long_message_is_no_flood(tmp_path: Path) -> None:
    def tell(story: Story) -> None:
        sft(story, save=not_saved)
        story.refused(422, message="x" * 20_000)
        story.refused(422, message="two\nlines")

    text, result = audited(told(tell, tmp_path))
    assert_fits(text)
    assert "A10-not-saved" in text
    assert "A18-refused" in text


def test_control_characters_of_a_model_do_not_reach_the_terminal(tmp_path: Path) -> None:
    control = encode("\r") + encode("\x1b[2J") + encode("\u2028")
    text, _ = audited(
        told(partial(grpo, completions=lambda story: [*control, END], row=whole_row), tmp_path)
    )
    assert_fits(text)


def test_a_model_without_a_tokenizer_is_shown_as_ids(tmp_path: Path) -> None:
    def tell(story: Story) -> None:
        run = story.training_run(folder=tmp_path / "gone")
        story.supervise(run, [no_shift(row) for row in rows_of(story)])
        story.step(run)
        story.save(run, "final")

    _, result = audited(told(tell, tmp_path))
    [place, *_] = findings_by_name(result)["A03-no-shift"]["places"]
    assert re.search(r"\d+ \d+>>\d+<<\d+", place["text"]), place


def test_a_model_without_a_template_has_no_rules_about_turns(tmp_path: Path) -> None:
    def tell(story: Story) -> None:
        story.chat = {"generation_prompts": [], "opening": [], "closing": [], "end_ids": [END]}
        sft(story, row=plain_text)
        grpo(story)
        dpo(story)
        tools(story)

    _, result = audited(told(tell, tmp_path))
    assert complaints(result) == {}


def test_an_empty_run_is_clean(tmp_path: Path) -> None:
    text, result = audited(told(lambda story: None, tmp_path))
    assert result["verdict"] == "clean"
    assert result["findings"] == []
    assert "calls   none; 0 optimiser steps, 0 sampling requests" in text


# -- damaged recordings ----------------------------------------------------------------------------


def small(story: Story) -> None:
    grpo(story, steps=1, prompts=1, size=2)


@pytest.fixture(scope="module")
def small_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return told(small, tmp_path_factory.mktemp("small")).read_bytes()


def audited_or_refused(path: Path) -> dict[str, Any] | str:
    """The result, or the one line why there is none; any other exception is a defect."""
    try:
        text, result = audited(path)
    except TraceError as error:
        assert "\n" not in str(error)
        assert str(error).strip()
        return str(error)
    json.dumps(result, allow_nan=False)
    assert_fits(text)
    return result


def test_a_recording_that_breaks_off_is_audited_as_far_as_it_goes(
    small_bytes: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "trace.msgpack"
    audited_ones = 0
    for length in range(0, len(small_bytes) - 1, 50):
        path.write_bytes(small_bytes[:length])
        outcome = audited_or_refused(path)
        if isinstance(outcome, dict):
            audited_ones += 1
            assert "A20-incomplete" in findings_by_name(outcome), length
    assert audited_ones > len(small_bytes) / 50 * 0.9


def test_flipped_bytes_are_no_traceback(small_bytes: bytes, tmp_path: Path) -> None:
    path, rng = tmp_path / "trace.msgpack", random.Random(0)
    for _ in range(100):
        changed = bytearray(small_bytes)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        audited_or_refused(path)


def fields_of(content: bytes) -> Iterator[tuple[int, str]]:
    for number, record in enumerate(msgpack.Unpacker(io.BytesIO(content))):
        for name in record:
            yield number, name


@pytest.mark.parametrize("value", ["gone", None, "text", -1, [], {}], ids=repr)
def test_a_missing_or_wrong_field_is_no_traceback(
    value: Any, small_bytes: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "trace.msgpack"
    for number, name in fields_of(small_bytes):
        records = list(msgpack.Unpacker(io.BytesIO(small_bytes)))
        if value == "gone":
            del records[number][name]
        else:
            records[number][name] = value
        path.write_bytes(b"".join(map(msgpack.packb, records)))
        audited_or_refused(path)


def run_audit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DRYRUN), "audit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def damaged(kind: str, folder: Path, content: bytes) -> Path:
    """A file or folder that is no recording."""
    path = folder / "trace.msgpack"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("this is no recording\n" * 100, encoding="utf-8")
    elif kind == "json":
        path.write_text('{"kind": "header"}\n', encoding="utf-8")
    elif kind == "version":
        path.write_bytes(content.replace(b"\xa7version\x02", b"\xa7version\x03"))
    elif kind == "damaged":
        path.write_bytes(content[:200] + b"\xc1" + content[200:])
    elif kind == "directory":
        path.mkdir()
    elif kind == "no folder":
        return folder / "gone"
    return path if kind == "text" else folder


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", "no recording of a dry run"),
        ("text", "no recording of a dry run"),
        ("version", "has version 3, this audit reads version 2; record the run again"),
        ("damaged", "is damaged"),
        ("folder without a trace", "cannot read"),
        ("no folder", "no recording at"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(
    kind: str, message: str, small_bytes: bytes, tmp_path: Path
) -> None:
    done = run_audit(damaged(kind, tmp_path, small_bytes))
    assert done.returncode == 3
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("dryrun: ")
    assert message in line
    assert not (tmp_path / "audit.json").exists()


@pytest.mark.parametrize("kind", ["json", "directory"])
def test_other_things_that_are_no_recording(kind: str, small_bytes: bytes, tmp_path: Path) -> None:
    assert isinstance(audited_or_refused(damaged(kind, tmp_path, small_bytes)), str)


def test_the_command_prints_writes_and_decides(tmp_path: Path) -> None:
    path = told(partial(grpo, row=whole_row), tmp_path)
    done = run_audit(tmp_path, "--steps", 100, "--price", "1,2,4")
    assert done.returncode == 2
    assert done.stderr == ""
    text, result = audited(path, budget=Budget(100, (1.0, 2.0, 4.0)))
    assert done.stdout == text + "\n"
    written = (tmp_path / "audit.json").read_text(encoding="utf-8")
    assert json.loads(written) == result
    done = run_audit(path, "--accept", "A01=on purpose")
    assert done.returncode == 0
    assert json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))["verdict"] == "clean"


@pytest.mark.parametrize(
    "arguments", [("--accept", "A99=why"), ("--accept", "A05"), ("--price", "1"), ("--steps", "0")]
)
def test_a_wrong_option_is_named_in_one_line(arguments: tuple[str, str], tmp_path: Path) -> None:
    told(small, tmp_path)
    done = run_audit(tmp_path, *arguments)
    assert done.returncode == 3
    [line] = done.stderr.splitlines()
    assert arguments[0] in line


# -- time and memory -------------------------------------------------------------------------------

MEASURE = """
import json, resource, sys, time
from pathlib import Path
from audit.cli import audit
from audit.report import Budget
begin = time.process_time()
_, result = audit(Path(sys.argv[1]), {}, Budget())
seconds = time.process_time() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
names = [f["name"] for f in result["findings"]]
print(json.dumps({"seconds": seconds, "peak": peak, "names": names}))
"""
UNIT_OF_PEAK = 1 if sys.platform == "darwin" else 1024
TOKENS = 512


def long_text(story: Story) -> Ids:
    """A text of 512 tokens that a tokenizer writes in fewer."""
    text = "".join(c for c in decode(story.words(TOKENS)) if c.isascii() and c.isprintable())
    return [*spelt(text[: TOKENS - 1].strip()), END]


def long_answer(story: Story) -> Ids:
    return story.answer(TOKENS - 1)


def asked_again(story: Story) -> Ids:
    """One of eight questions, in turn."""
    story.asked = getattr(story, "asked", -1) + 1
    return prompt_of(f"What is {story.asked % 8} and {story.asked % 8}?")


big = partial(grpo, steps=20, prompts=8, size=8)


@pytest.mark.parametrize(
    ("name", "tell", "seconds", "expected"),
    [
        ("right", partial(big, completions=long_answer), 5, []),
        (
            "encoded again",
            partial(big, completions=long_text, row=encoded_row),
            15,
            ["A02-reencoded"],
        ),
        (
            "few questions, encoded again",
            partial(big, completions=long_text, row=encoded_row, question=asked_again),
            15,
            ["A02-reencoded"],
        ),
        (
            "few questions, equal answers",
            partial(big, steps=40, completions=lambda story: short("yes"), question=asked_again),
            5,
            [],
        ),
        (
            "teacher scores other ids",
            partial(
                opd,
                steps=10,
                size=8,
                completions=long_text,
                scored=encoded_again,
                advantages=any_advantage,
            ),  # fmt: skip
            15,
            ["A17-scored-ids"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_long_recording_is_audited_soon(
    name: str,
    tell: Tell,
    seconds: float,
    expected: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """20 steps of 64 trajectories of 512 tokens, under 1 GB."""
    path = told(tell, tmp_path)
    scripts = str(DRYRUN.parent)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": scripts, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    peak = measured["peak"] * UNIT_OF_PEAK / 1e6
    size = path.stat().st_size / 1e6
    with capsys.disabled():
        print(
            f"\naudit, {name}: {measured['seconds']:.1f} s, {peak:.0f} MB, recording {size:.1f} MB"
        )
    assert [n for n in measured["names"] if RULES[n].severity == "error"] == expected
    assert measured["seconds"] < seconds
    assert peak < 1000


def test_show_prints_what_was_sampled_and_trained(tmp_path: Path) -> None:
    """Completions with their advantages, data with the trained region marked, within a limit."""
    path = told(degenerate_dropped, tmp_path)
    lines = list(show(path, limit=2))
    assert lines[-1] == "2 of 12 sampling requests; 2 of 24 data"
    heads = [line for line in lines if line.startswith("request")]
    assert len(heads) == 2
    for number, head in zip((1, 12), heads, strict=True):
        assert re.match(rf"request {number}: 4 completions of .* step \d, temperature 1", head)
    completions = [line for line in lines if line.startswith("  [")]
    assert len(completions) == 8
    trained = [line for line in completions if re.search(r", advantage [+-]0\.\d+: ", line)]
    assert trained and len(trained) + sum(", not trained: " in line for line in completions) == 8
    data = [line for line in lines if line.startswith("  <|im_start|>")]
    assert len(data) == 2 and all(line.count(">>") == line.count("<<") == 1 for line in data)
    assert all(line.endswith("<|im_end|><<") for line in data)


def test_show_cuts_long_texts_unless_asked_not_to(tmp_path: Path) -> None:
    path = told(partial(grpo, completions=lambda story: story.answer(400)), tmp_path)
    assert max(map(len, show(path, limit=1))) < 600
    assert max(map(len, show(path, limit=1, is_whole=True))) > 600
