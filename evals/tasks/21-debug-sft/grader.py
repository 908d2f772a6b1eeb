"""The whole answer and the end token trained, the rest as before; asked once."""

from collections import Counter

from grading import Expectation, Run, approximately, differing, expect, squeezed

SYSTEM = "You answer for the town pool."


def grade(run: Run) -> list[Expectation]:
    answers = [squeezed(row["messages"][-1]["content"]) for row in run.rows("sft.jsonl")]
    times = Counter(squeezed(s) for datum in run.supervised for s in run.spans(datum))
    ends = [run.text(datum.targets[datum.active][-1:]) for datum in run.supervised]
    sizes = [sum(len(call.data) for call in step.calls) for step in run.trace.steps]
    last = max((step.number for step in run.trace.steps), default=0)
    asked = [
        r
        for r in run.greedy
        if r.sampler.training_run
        and r.sampler.step == last
        and "When do you open?" in run.prompt(r)
    ]
    said = [run.bare(r.sequences[0].tokens) for r in asked if r.sequences]
    odd = differing(times, dict.fromkeys(answers, 4))
    without_system = [d for d in run.supervised if SYSTEM not in run.whole(d)]
    return [
        expect("trains the answers from their first word on, each four times", not odd, odd),
        expect("the end token is trained", ends and set(ends) == {"<|im_end|>"}, Counter(ends)),
        expect("the system prompt is still there", run.supervised and not without_system),
        expect("eight steps of four rows", sizes == [4] * 8, sizes),
        expect("learning rate 5e-4", approximately(run.learning_rates, 5e-4), run.learning_rates),
        expect("rank 8", run.ranks == {8}, run.ranks),
        expect("asks the trained weights greedily", asked, len(run.greedy)),
        expect(
            "behind the same system prompt, thinking off",
            asked
            and all(SYSTEM in run.prompt(r) for r in asked)
            and all(run.prompt(r).endswith("<think>\n\n</think>\n\n") for r in asked),
        ),
        expect(
            "prints the answer", any(a and squeezed(a) in squeezed(run.output) for a in said), said
        ),
        expect("keeps pool-v3", run.saved_weights("pool-v3"), run.durable_saves),
    ]
