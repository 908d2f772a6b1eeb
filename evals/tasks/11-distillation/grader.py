"""Advantages are teacher minus student, token by token, on the student's own ids."""

import numpy as np
from grading import Expectation, Run, approximately, expect

TEACHER = "Qwen/Qwen3.6-27B"


def grade(run: Run) -> list[Expectation]:
    questions = (run.files / "questions.txt").read_text(encoding="utf-8").splitlines()
    scores = {
        request.prompt.tobytes(): request.prompt_logprobs
        for request in run.joined.scores
        if request.sampler.base_model == TEACHER and not request.sampler.training_run
    }
    unscored, worst, judged = 0, 0.0, 0
    for datum in run.policy:
        taught = scores.get(datum.tokens.astype(np.int32).tobytes())
        own = run.owner(datum)
        if taught is None or own is None:
            unscored += 1
            continue
        sequence = run.joined.sequences[own]
        start = len(sequence.request.prompt)
        count = len(sequence.tokens)
        # Scores are of the tokens from the second on: those of the completion are the last ones.
        wanted = taught[-count:] - sequence.logprobs
        given = datum.signal[start - 1 : start - 1 + count]
        worst = max(worst, float(np.abs(given - wanted).max(initial=0.0)))
        judged += 1
    asked = [q for prompt in run.group_by_prompt for q in questions if q in prompt]
    sizes = [len(group.members) for group in run.groups]
    others = {r.sampler.base_model for r in run.joined.scores} - {TEACHER}
    return [
        expect("every question is asked once", sorted(asked) == sorted(questions), len(asked)),
        expect("with four completions", sizes == [4] * 8, sizes),
        expect("32 completions are trained", len(run.policy) == 32, len(run.policy)),
        expect("the teacher is Qwen/Qwen3.6-27B", scores and not others, others),
        expect("it scores exactly the trained ids", judged and not unscored, unscored),
        expect(
            "advantages are teacher minus student of the same token",
            judged and worst < 2e-3,
            f"largest difference {worst:.4g}",
        ),
        expect("two steps", run.step_count == 2, run.step_count),
        expect("learning rate 1e-4", approximately(run.learning_rates, 1e-4), run.learning_rates),
        expect("keeps opd-student", run.saved_weights("opd-student"), run.durable_saves),
    ]
