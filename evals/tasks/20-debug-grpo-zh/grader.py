"""Both faults gone, nothing else changed."""

from grading import Expectation, Run, approximately, expect, final_answer


def grade(run: Run) -> list[Expectation]:
    gold = {row["q"]: row["a"] for row in run.rows("mental.jsonl")}

    def reward(prompt: str, completion: str) -> float:
        answer = next(a for q, a in gold.items() if q + " Put" in prompt)
        return float(final_answer(completion) == answer)

    sequences = run.joined.sequences
    ages = [g.step - sequences[g.members[0]].request.sampler.step for g in run.groups]
    others = [
        run.whole(datum)[-80:]
        for datum in run.policy
        if not run.joined.match(datum).turns or run.joined.match(datum).owner[-1] < 0
    ]
    sizes = {len(group.members) for group in run.groups}
    limits = {r.params.get("max_tokens") for r in run.joined.training_requests}
    asked = sorted(q for p, gs in run.group_by_prompt.items() for q in gold if q in p for _ in gs)
    wrong = run.wrong_advantages(reward)
    losses = {loss.name for loss in run.losses}
    return [
        expect("every step samples from the newest weights", ages and not any(ages), ages),
        expect(
            "trains exactly the sampled ids, end token included",
            run.policy and not others,
            others[:2],
        ),
        expect("advantages follow the reward", run.policy and not wrong, wrong[:3]),
        expect("samples the eight problems twice", asked == sorted([*gold, *gold]), asked),
        expect("eight samples a problem, 64 tokens", sizes == {8} and limits == {64}, limits),
        expect("importance_sampling", losses == {"importance_sampling"}, losses),
        expect("learning rate 2e-4", approximately(run.learning_rates, 2e-4), run.learning_rates),
        expect("rank 16", run.ranks == {16}, run.ranks),
        expect("keeps mental-grpo", run.saved_weights("mental-grpo"), run.durable_saves),
    ]
