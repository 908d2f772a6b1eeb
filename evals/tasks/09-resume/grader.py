"""The second start goes on from a state with its optimiser, and no row is lost or repeated."""

from collections import Counter

from grading import Expectation, Run, approximately, differing, expect, squeezed


def trained_by_step(run: Run) -> list[tuple[int, str]]:
    """(number of the step, completion) of everything trained; steps count over restarts."""
    return [
        (step.number, squeezed(span))
        for step in run.trace.steps
        for call in step.calls
        for datum in call.data
        for span in run.spans(datum)
    ]


def grade(run: Run) -> list[Expectation]:
    first = run.before
    if first is None or not first.is_killed:
        return [
            expect("the first start takes five steps", False, first and first.diagnostics[-300:])
        ]
    rows = [squeezed(row["completion"]) for row in run.rows("train.jsonl")]
    states = [save.step for save in first.durable_saves if save.kind == "state"]
    resumes = run.trace.resumes
    at = resumes[-1].step if resumes else 0
    kept = [row for step, row in trained_by_step(first) if step <= at]
    again = [row for _, row in trained_by_step(run)]
    odd = differing(Counter(kept + again), dict.fromkeys(rows, 1))
    last = max((step.number for step in run.trace.steps), default=0)
    rates = first.learning_rates | run.learning_rates
    return [
        expect("saves a state at least every two steps", {2, 4} <= set(states), states),
        expect("the second start resumes from a saved state", resumes and at >= 4, resumes and at),
        expect("with its optimiser", resumes and all(r.with_optimizer for r in resumes)),
        expect("it ends after step 12", last == 12, last),
        expect("every row is trained once over both starts", not odd, odd),
        expect("learning rate 3e-4", approximately(rates, 3e-4), rates),
        expect("keeps survivor", run.saved_weights("survivor"), run.durable_saves),
    ]
