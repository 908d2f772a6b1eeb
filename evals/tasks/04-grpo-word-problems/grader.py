"""Groups of eight, rewards as asked, fresh weights in every step, a durable save."""

from grading import Expectation, Run, approximately, expect, final_answer


def grade(run: Run) -> list[Expectation]:
    gold = {
        row["question"]: float(row["answer"].split("####")[1]) for row in run.rows("train.jsonl")
    }

    def reward(prompt: str, completion: str) -> float | None:
        right = next((gold[question] for question in gold if question in prompt), None)
        answer = final_answer(completion)
        if right is None or (answer and not answer.lstrip("-").isdigit()):
            return None  # such as `\boxed{12 apples}`: fair rewards may differ
        return float(answer != "" and float(answer) == right)

    asked = [q for prompt in run.group_by_prompt for q in gold if q in prompt]
    sizes = [len(group.members) for group in run.groups]
    wrong = run.wrong_advantages(reward)
    limits = {s.request.params.get("max_tokens") for s in run.joined.rollouts}
    return [
        expect("every question is sampled once", sorted(asked) == sorted(gold), len(asked)),
        expect("in groups of eight", sizes == [8] * 12, sizes),
        expect("asks for the box", all("\\boxed{}" in p for p in run.group_by_prompt)),
        expect("up to 128 new tokens", limits == {128}, limits),
        expect("advantages follow the reward", run.policy and not wrong, wrong[:3]),
        expect("no datum of a group without differences", not run.dull_data, len(run.dull_data)),
        expect("at most three steps, at least one", 1 <= run.step_count <= 3, run.step_count),
        expect("learning rate 1e-4", approximately(run.learning_rates, 1e-4), run.learning_rates),
        expect("keeps grpo-words", run.saved_weights("grpo-words"), run.durable_saves),
    ]
