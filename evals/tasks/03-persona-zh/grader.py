"""Outputs trained four times behind system prompt, instruction and input; asked in the same way."""

import json
from collections import Counter

from grading import Expectation, Run, approximately, differing, expect, squeezed

SYSTEM = "你现在是阿福，一家老茶馆的掌柜。"


def grade(run: Run) -> list[Expectation]:
    rows = json.loads((run.files / "afu.json").read_text(encoding="utf-8"))
    asked = {
        squeezed(r["output"]): "\n".join(filter(None, [r["instruction"], r["input"]])) for r in rows
    }
    times: Counter[str] = Counter()
    elsewhere = []
    for datum in run.supervised:
        text = run.whole(datum)
        for span in map(squeezed, run.spans(datum)):
            times[span] += 1
            user = f"<|im_start|>user\n{asked.get(span, '?')}<|im_end|>"
            if user not in text or f"<|im_start|>system\n{SYSTEM}" not in text:
                elsewhere.append(text[:160])
    last = max((step.number for step in run.trace.steps), default=0)
    questions = [
        r
        for r in run.greedy
        if "你是谁？<|im_end|>" in run.prompt(r)
        and r.sampler.training_run
        and r.sampler.step == last
    ]
    answers = [run.bare(r.sequences[0].tokens) for r in questions if r.sequences]
    odd = differing(times, dict.fromkeys(asked, 4))
    return [
        expect("trains the outputs, each four times", not odd, odd),
        expect(
            "behind the system prompt, the instruction and the input",
            times and not elsewhere,
            elsewhere[:1],
        ),
        expect("eight steps", run.step_count == 8, run.step_count),
        expect("learning rate 1e-3", approximately(run.learning_rates, 1e-3), run.learning_rates),
        expect("rank 8", run.ranks == {8}, run.ranks),
        expect("asks the trained weights greedily", questions, len(run.greedy)),
        expect(
            "with the same system prompt",
            questions and all(SYSTEM in run.prompt(r) for r in questions),
        ),
        expect(
            "prints the answer",
            any(squeezed(a) and squeezed(a) in squeezed(run.output) for a in answers),
            answers,
        ),
        expect("keeps afu-v1", run.saved_weights("afu-v1"), run.durable_saves),
    ]
