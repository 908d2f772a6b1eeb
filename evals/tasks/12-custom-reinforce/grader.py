"""The gradient of the loss as it was written: over a completion it sums to A / N, evenly."""

from grading import Expectation, Run, approximately, expect, is_constant


def grade(run: Run) -> list[Expectation]:
    gold = {row["question"]: row["answer"] for row in run.rows("questions.jsonl")}

    def reward(prompt: str, completion: str) -> float:
        right = next((answer for question, answer in gold.items() if question in prompt), "?")
        return float(completion.lower().startswith(right))

    centred = run.centred(reward)
    uneven, shares_differ, judged, unknown = [], [], 0, 0
    for call in run.custom_calls:
        shares = []
        for datum in call.data:
            owner = run.owner(datum)
            if owner is None:
                unknown += 1
            elif abs(centred.get(owner, 0.0)) > 1e-9:
                signal = datum.signal[datum.active]
                if not is_constant(signal, 1e-2):
                    uneven.append(f"{signal.min():.4g} to {signal.max():.4g}")
                shares.append(float(signal.sum()) / centred[owner])
        judged += len(shares)
        if shares and not (is_constant(shares, 0.02) and min(shares) > 0):
            shares_differ.append(f"{min(shares):.4g} to {max(shares):.4g}")
    asked = [q for prompt in run.group_by_prompt for q in gold if q in prompt]
    sizes = [len(group.members) for group in run.groups]
    return [
        expect("trains by a custom loss", run.custom_calls and len(run.losses) == 1, run.losses),
        expect(
            "on sampled completions", judged and not unknown, f"{judged}, and {unknown} unknown"
        ),
        expect("all tokens of a completion have the same weight", judged and not uneven, uneven),
        expect(
            "their sum is A_i times one number for the whole step",
            judged and not shares_differ,
            shares_differ,
        ),
        expect("every question is sampled once", sorted(asked) == sorted(gold), len(asked)),
        expect("eight samples a question", sizes == [8] * 8, sizes),
        expect("two steps", run.step_count == 2, run.step_count),
        expect("learning rate 1e-4", approximately(run.learning_rates, 1e-4), run.learning_rates),
        expect("keeps reinforce-len", run.saved_weights("reinforce-len"), run.durable_saves),
    ]
