"""Student's ids and prompt trained; scored by the untrained model that is shown the solution."""

import numpy as np
from grading import Expectation, Run, approximately, expect

ASK = " Put the final answer in \\boxed{}."


def grade(run: Run) -> list[Expectation]:
    rows = {row["problem"]: row["solution"] for row in run.rows("worked.jsonl")}
    trained_teacher, blind, off, leaked, stale = [], [], [], [], []
    for datum in run.policy:
        owner = run.owner(datum)
        if owner is None:
            off.append("a datum that is no completion")
            continue
        sequence = run.joined.sequences[owner]
        prompt, ids = run.prompt(sequence.request), sequence.tokens
        problem = next((p for p in rows if p + ASK in prompt), "")
        if not problem or rows[problem] in prompt:
            leaked.append(prompt[-200:])
        if sequence.request.sampler.step != datum.call.steps_before:
            stale.append(sequence.request.sampler.step)
        scores = [
            r
            for r in run.joined.scores
            if len(r.prompt) > len(ids) and np.array_equal(r.prompt[-len(ids) :], ids)
            and problem in run.text(r.prompt[: -len(ids)])
        ]  # fmt: skip
        informed = [r for r in scores if rows.get(problem, "?") in run.text(r.prompt[: -len(ids)])]
        if not informed:
            blind.append(problem)
            continue
        untrained = [r for r in informed if not r.sampler.training_run or r.sampler.step == 0]
        if not untrained:
            trained_teacher.append(informed[-1].sampler.step)
            continue
        place = run.joined.match(datum).owner == owner
        given = datum.signal[place]
        wanted = [r.prompt_logprobs[-len(ids) :] - sequence.logprobs for r in untrained]
        if not any(len(w) == len(given) and np.abs(w - given).max() < 1e-3 for w in wanted):
            off.append([round(float(x), 3) for x in given[:6]])
    times = [len(g) for g in run.group_by_prompt.values()]
    sizes = {len(group.members) for group in run.groups}
    losses = {loss.name for loss in run.losses}
    return [
        expect("the teacher sees problem and solution", run.policy and not blind, blind[:3]),
        expect(
            "the teacher has the initial weights at every step",
            run.policy and not trained_teacher,
            f"scored by weights after steps {trained_teacher[:8]}" if trained_teacher else "",
        ),
        expect("advantages are teacher - student by token", run.policy and not off, off[:2]),
        expect(
            "no solution in the prompts that are trained", run.policy and not leaked, leaked[:1]
        ),
        expect("every step samples from the newest weights", run.policy and not stale, stale[:4]),
        expect(
            "eight problems twice, two samples each",
            times == [2] * 8 and sizes == {2},
            (times, sizes),
        ),
        expect(
            "four steps of importance_sampling",
            run.step_count == 4 and losses == {"importance_sampling"},
            run.step_count,
        ),
        expect("learning rate 2e-4", approximately(run.learning_rates, 2e-4), run.learning_rates),
        expect("keeps opsd-small", run.saved_weights("opsd-small"), run.durable_saves),
    ]
