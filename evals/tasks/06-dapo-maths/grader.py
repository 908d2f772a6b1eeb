"""Bounds of the ratio as the backend wants them, and refilling until enough groups are useful."""

from collections import defaultdict

from grading import Expectation, Run, approximately, expect, final_answer


def grade(run: Run) -> list[Expectation]:
    gold = {row["problem"]: row["answer"] for row in run.rows("problems.jsonl")}

    def reward(prompt: str, completion: str) -> float | None:
        right = next((answer for problem, answer in gold.items() if problem in prompt), None)
        boxed = final_answer(completion)
        if right is None or (boxed and not boxed.lstrip("-").isdigit()):
            return None
        return 1.0 if boxed and int(boxed) == int(right) else -1.0

    useful, tried, trained = defaultdict(int), defaultdict(int), defaultdict(int)
    for group in run.groups:
        prompt = run.prompt(run.joined.sequences[group.members[0]].request)
        rewards = {reward(prompt, run.completion(member)) for member in group.members}
        tried[group.step] += 1
        useful[group.step] += len(rewards - {None}) == 2
        trained[group.step] += not group.is_degenerate
    refilled = {s: (useful[s], tried[s]) for s in tried if useful[s] < 3 and tried[s] < 8}
    too_many = {s: n for s, n in tried.items() if n > 8}
    few = {s: (n, useful[s]) for s, n in trained.items() if n < min(3, useful[s])}
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    settings = [dict(loss.config) for loss in run.losses]
    sizes = {len(group.members) for group in run.groups}
    wrong = run.wrong_advantages(reward, surplus_allowed=True)
    return [
        expect(
            "uses the built-in ppo loss", {loss.name for loss in run.losses} == {"ppo"}, run.losses
        ),
        expect(
            "with the bounds 0.8 and 1.28 of the ratio",
            settings and all(approximately_equal(s, bounds) for s in settings),
            settings,
        ),
        expect(
            "goes on until three groups are useful or eight tried", tried and not refilled, refilled
        ),
        expect("tries at most eight problems a step", tried and not too_many, too_many),
        expect("trains the useful groups", trained and not few, few),
        expect("and no others", not run.dull_data, len(run.dull_data)),
        expect("eight samples a problem", sizes == {8}, sizes),
        expect("advantages follow the reward", run.policy and not wrong, wrong[:3]),
        expect("three steps", run.step_count == 3, run.step_count),
        expect("learning rate 2e-4", approximately(run.learning_rates, 2e-4), run.learning_rates),
        expect("keeps dapo-trial", run.saved_weights("dapo-trial"), run.durable_saves),
    ]


def approximately_equal(found: dict, wanted: dict) -> bool:
    return set(found) == set(wanted) and all(
        approximately([found[name]], value) for name, value in wanted.items()
    )
