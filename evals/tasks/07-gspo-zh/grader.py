"""The gradient of a sequence-level ratio: in a group every token's share is A over its length."""

import math

from grading import Expectation, Run, approximately, expect, final_answer, is_constant


def grade(run: Run) -> list[Expectation]:
    gold = {
        row["question"]: row["answer"].split("####")[1].strip() for row in run.rows("train.jsonl")
    }

    def reward(prompt: str, completion: str) -> float:
        right = next((answer for question, answer in gold.items() if question in prompt), "?")
        return float(final_answer(completion) == right)

    centred = run.centred(reward)
    deviation = {
        member: math.sqrt(sum(centred[m] ** 2 for m in group.members) / len(group.members))
        for group in run.groups
        for member in group.members
    }
    uneven, unequal_tokens, against, judged = [], [], [], 0
    for call in run.custom_calls:
        shares = []
        for datum in call.data:
            owner = run.owner(datum)
            if owner is None or not deviation.get(owner):
                continue
            signal = datum.signal[datum.active]
            if not is_constant(signal, 1e-2):
                unequal_tokens.append(f"{signal.min():.4g} to {signal.max():.4g}")
            # On fresh data the ratio is 1, so the sum over a sequence is A / N.
            shares.append(float(signal.sum()) / (centred[owner] / deviation[owner]))
        judged += len(shares)
        if shares and not is_constant(shares, 0.05):
            uneven.append(f"{min(shares):.4g} to {max(shares):.4g}")
        if min(shares, default=1) <= 0:
            against.append(f"{min(shares):.4g}")
    asked = [q for prompt in run.group_by_prompt for q in gold if q in prompt]
    sizes = {len(group.members) for group in run.groups}
    return [
        expect("trains by a custom loss", run.custom_calls and len(run.losses) == 1, run.losses),
        expect("on sampled completions", judged, judged),
        expect(
            "all tokens of a sequence have the same weight",
            judged and not unequal_tokens,
            unequal_tokens,
        ),
        expect("better completions are pushed up", judged and not against, against),
        expect("a sequence's weight does not depend on its length", judged and not uneven, uneven),
        expect("every question is sampled once", sorted(asked) == sorted(gold), len(asked)),
        expect("eight samples a question", sizes == {8}, sizes),
        expect("one to three steps", 1 <= run.step_count <= 3, run.step_count),
        expect("learning rate 1e-4", approximately(run.learning_rates, 1e-4), run.learning_rates),
        expect("keeps gspo-exp1", run.saved_weights("gspo-exp1"), run.durable_saves),
    ]
