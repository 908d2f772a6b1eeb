"""Better answers pushed up, worse ones down, by beta / 2 at the first step; a base reference."""

from collections import Counter

import numpy as np
from grading import Expectation, Run, approximately, differing, expect, squeezed


def grade(run: Run) -> list[Expectation]:
    better, worse = {}, {}
    for row in run.rows("pairs.jsonl"):
        good, bad = ("answer_a", "answer_b") if row["better"] == "a" else ("answer_b", "answer_a")
        better[squeezed(row[good])] = row["prompt"]
        worse[squeezed(row[bad])] = row["prompt"]
    asked = better | worse
    times: Counter[str] = Counter()
    wrong_way, elsewhere = [], []
    for datum in run.preference:
        signal = datum.signal[datum.active]
        for span in map(squeezed, run.spans(datum)):
            times[span] += 1
            up = float(signal.sum()) > 0
            if up != (span in better):
                wrong_way.append(f"{'up' if up else 'down'}: {span}")
            if asked.get(span, "?") not in run.whole(datum):
                elsewhere.append(span)
    odd = differing(times, dict.fromkeys(asked, 1))
    first = run.trace.steps[0].calls if run.trace.steps else []
    sizes = [np.abs(d.signal[d.active]) for call in first for d in call.data if d.active.any()]
    start = np.concatenate(sizes) if sizes else np.empty(0)
    references = run.joined.scores
    is_base = all(not r.sampler.training_run or r.sampler.step == 0 for r in references)
    return [
        expect("trains each answer of each pair once", not odd, odd),
        expect("each behind its own prompt", times and not elsewhere, elsewhere),
        expect("better answers go up, worse ones down", times and not wrong_way, wrong_way),
        expect(
            "the first step weighs every token by beta / 2 / 4 pairs = 0.0125",
            len(start) and np.allclose(start, 0.0125, rtol=0.02),
            f"{start.min():.4g} to {start.max():.4g}" if len(start) else "no custom loss",
        ),
        expect("the reference is the untrained model", is_base, len(references)),
        expect("three steps", run.step_count == 3, run.step_count),
        expect("learning rate 5e-5", approximately(run.learning_rates, 5e-5), run.learning_rates),
        expect("rank 16", run.ranks == {16}, run.ranks),
        expect("keeps dpo-polite", run.saved_weights("dpo-polite"), run.durable_saves),
    ]
