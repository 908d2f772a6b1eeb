"""Each batch but the first one step old, clipped against the log-probabilities of then."""

from grading import Expectation, Run, approximately, expect, final_answer


def grade(run: Run) -> list[Expectation]:
    gold = {row["question"]: str(row["answer"]) for row in run.rows("problems.jsonl")}

    def reward(prompt: str, completion: str) -> float:
        answer = next(a for q, a in gold.items() if q + " Put" in prompt)
        return float(final_answer(completion) == answer)

    sequences = run.joined.sequences
    lags, late = [], []
    finished = {step.number: step.finished for step in run.trace.steps}
    for call in run.joined.policy_calls:
        owners = {run.owner(datum) for datum in call.data} - {None}
        requests = [sequences[i].request for i in owners]
        lags.append({call.steps_before - r.sampler.step for r in requests})
        end = finished.get(call.steps_before)  # of the step that ran meanwhile
        late += [r.number for r in requests if end is not None and r.started > end]
    # A batch of which nothing was trained leaves the next one fresh.
    fresh = 1 + 5 - len(lags)
    is_one_old = lags[:1] == [{0}] and all(lag in ({0}, {1}) for lag in lags[1:])
    asked = sorted(q for p, gs in run.group_by_prompt.items() for q in gold if q in p for _ in gs)
    sizes = {len(group.members) for group in run.groups}
    wrong = run.wrong_advantages(reward)
    losses = {(loss.name, tuple(v for _, v in loss.config)) for loss in run.losses}
    bounds = {(name, tuple(sorted(values))) for name, values in losses}
    return [
        expect(
            "the first batch is on-policy, every other exactly one step old",
            is_one_old and lags.count({0}) <= fresh,
            lags,
        ),
        expect("sampling starts while the step before is under way", lags and not late, late),
        expect("at least three batches are trained", 3 <= len(lags) <= 5, len(lags)),
        expect("ppo, ratio clipped to 0.8 and 1.2", bounds == {("ppo", (0.8, 1.2))}, run.losses),
        expect(
            "samples the ten questions once, eight times each",
            asked == sorted(gold) and sizes == {8},
            asked,
        ),
        expect("advantages follow the reward", run.policy and not wrong, wrong[:3]),
        expect("learning rate 2e-4", approximately(run.learning_rates, 2e-4), run.learning_rates),
        expect("rank 16", run.ranks == {16}, run.ranks),
        expect("keeps async-grpo", run.saved_weights("async-grpo"), run.durable_saves),
    ]
