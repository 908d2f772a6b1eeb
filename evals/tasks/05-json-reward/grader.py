"""A reward on the whole answer, told apart within the samples of one review."""

import json

from grading import Expectation, Run, expect

KEYS = {"product", "rating", "problem"}


def reward(prompt: str, completion: str) -> float:
    try:
        value = json.loads(completion)
    except ValueError:
        return 0.0
    if not isinstance(value, dict) or set(value) != KEYS:
        return 0.0
    has_types = isinstance(value["product"], str) and isinstance(
        value["problem"], (str, type(None))
    )
    return float(has_types and type(value["rating"]) is int and 1 <= value["rating"] <= 5)


def grade(run: Run) -> list[Expectation]:
    reviews = [row["text"] for row in run.rows("reviews.jsonl")]
    asked = [r for prompt, groups in run.group_by_prompt.items() for r in reviews if r in prompt]
    times = [len(groups) for groups in run.group_by_prompt.values()]
    sizes = {len(group.members) for group in run.groups}
    wrong = run.wrong_advantages(reward)
    sums = [
        round(sum(g.advantages.values()), 4)
        for g in run.live_groups
        if len(g.advantages) == len(g.members) and abs(sum(g.advantages.values())) > 1e-3
    ]
    return [
        expect("samples all six reviews, each twice", sorted(asked) == sorted(reviews), asked),
        expect("each in two steps", times == [2] * 6, times),
        expect("eight samples a review", sizes == {8}, sizes),
        expect("advantages follow the reward", run.policy and not wrong, wrong[:3]),
        expect("advantages of one review's samples add up to 0", run.policy and not sums, sums[:5]),
        expect("one to four steps", 1 <= run.step_count <= 4, run.step_count),
        expect("keeps review-json", run.saved_weights("review-json"), run.durable_saves),
    ]
