"""What graders of loops with several turns share: turns judged, advantages compared."""

import re
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from grading import Run

from audit.trace import Datum

Judge = Callable[[str, str], float | None]
CALL = re.compile(r"</?tool_call>|<function=|</function>")


class Judged(NamedTuple):
    """A final turn of a trajectory that was trained: its reward and its advantage."""

    reward: float
    advantage: float
    datum: Datum


def last_turn(run: Run, datum: Datum) -> int | None:
    """The completion a datum ends in, when it is trained there and was not cut by max_tokens."""
    owner = run.owner(datum)
    if owner is None or run.joined.sequences[owner].stop_reason == "length":
        return None
    return owner


def advantage_of(run: Run, datum: Datum, index: int) -> float | None:
    """Mean advantage of a completion's tokens in a datum; None where it carries none."""
    values = datum.signal[(run.joined.match(datum).owner == index) & datum.active]
    return float(values.mean()) if len(values) else None


def judged_groups(run: Run, task_of: Callable[[str], str], judge: Judge) -> dict:
    """(sampling client, task) -> trained final turns. `judge(prompt text, turn's text)` gives None
    for a turn that is not final or may fairly be judged in two ways."""
    found: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for datum in run.policy:
        index = last_turn(run, datum)
        if index is None:
            continue
        request = run.joined.sequences[index].request
        prompt = run.prompt(request)
        task, reward = task_of(prompt), judge(prompt, run.completion(index))
        advantage = advantage_of(run, datum, index)
        if reward is not None and advantage is not None:
            found[request.sampler.id, task].append(Judged(reward, advantage, datum))
    return dict(found)


def wrong_orders(run: Run, task_of: Callable[[str], str], judge: Judge) -> list[str]:
    """Final turns whose advantages contradict their rewards within the attempts at one task, and
    tasks with different rewards of which nothing was trained."""
    problems = []
    groups = judged_groups(run, task_of, judge)
    for (_, task), members in groups.items():
        trained = sorted((m.reward, m.advantage) for m in members)
        for (low, a), (high, b) in zip(trained, trained[1:], strict=False):
            if not (abs(a - b) < 1e-4 if low == high else b > a):
                problems.append(f"{task}: rewards {low:g}, {high:g}, advantages {a:.3g}, {b:.3g}")
    seen: dict[tuple[str, str], set[float]] = defaultdict(set)
    for sequence in run.joined.rollouts:
        if sequence.stop_reason != "length":
            prompt = run.prompt(sequence.request)
            reward = judge(prompt, run.bare(sequence.tokens))
            if reward is not None:
                seen[sequence.request.sampler.id, task_of(prompt)].add(reward)
    problems += [
        f"{task}: rewards {sorted(rewards)}, nothing trained"
        for (sampler, task), rewards in seen.items()
        if len(rewards) > 1 and (sampler, task) not in groups
    ]
    return problems


def untrained_turns(run: Run, task_of: Callable[[str], str], judge: Judge) -> list[str]:
    """Earlier turns of trained trajectories that do not carry the trajectory's advantage, neither
    in its datum nor in one of their own."""
    joined, missing = run.joined, []
    own: dict[tuple[int, bytes, bytes], list[float]] = defaultdict(list)
    for datum in run.policy:
        index = run.owner(datum)
        if index is not None and (value := advantage_of(run, datum, index)) is not None:
            sequence = joined.sequences[index]
            key = (datum.call.number, sequence.request.prompt.tobytes(), sequence.tokens.tobytes())
            own[key].append(value)
    for members in judged_groups(run, task_of, judge).values():
        for member in members:
            for index in joined.match(member.datum).turns[:-1]:
                sequence = joined.sequences[index]
                value = advantage_of(run, member.datum, index)
                prompt, tokens = sequence.request.prompt.tobytes(), sequence.tokens.tobytes()
                apart = own.get((member.datum.call.number, prompt, tokens), [])
                near = [v for v in [value, *apart] if v is not None]
                if not any(np.isclose(v, member.advantage, atol=1e-4) for v in near):
                    missing.append(f"{run.completion(index)[:60]!r} has {value}")
    return missing


def attempts(run: Run, task_of: Callable[[str], str]) -> tuple[list[str], set[int]]:
    """(the task of each group of first turns, sorted; the sizes of those groups). A first turn is
    one whose prompt has no turn of the assistant but the one it opens."""
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for sequence in run.joined.rollouts:
        prompt = run.prompt(sequence.request)
        if prompt.count("<|im_start|>assistant") == 1:
            sizes[sequence.request.sampler.id, task_of(prompt)] += 1
    return sorted(task for _, task in sizes), set(sizes.values())


def first_prompts(run: Run) -> set[str]:
    prompts = {run.prompt(s.request) for s in run.joined.rollouts}
    return {p for p in prompts if p.count("<|im_start|>assistant") == 1}


def rendered_turns(run: Run) -> list[tuple[str, str]]:
    """(completion, what the prompt of the next turn adds behind it), of all turns that were gone on
    with."""
    joined, found = run.joined, []
    for request in run.trace.requests:
        parent = joined.parent_of[request.number]
        if parent >= 0 and not request.is_score:
            added = run.text(request.prompt[joined.sequences[parent].length :])
            found.append((run.completion(parent), added))
    return found
