"""Both sides asked the same, greedily, tuned with its final weights; a report that is true."""

import json
from collections import Counter

from grading import Expectation, Run, approximately, differing, expect, final_answer


def grade(run: Run) -> list[Expectation]:
    gold = {
        row["question"]: row["answer"].split("####")[1].strip() for row in run.rows("test.jsonl")
    }
    train = [row["question"] for row in run.rows("train.jsonl")]
    last = max((step.number for step in run.trace.steps), default=0)
    asked: dict[str, Counter] = {"base": Counter(), "tuned": Counter(), "other": Counter()}
    prompts: dict[str, set] = {"base": set(), "tuned": set(), "other": set()}
    right = Counter()
    for request in run.trace.requests:
        sampler = request.sampler
        is_base = not sampler.training_run or sampler.step == 0
        side = "base" if is_base else "tuned" if sampler.step == last else "other"
        question = next((q for q in gold if q in run.prompt(request)), None)
        if question is None or request.is_score:
            continue
        asked[side][question] += len(request.sequences)
        prompts[side].add((request.prompt.tobytes(), request.params.get("max_tokens")))
        texts = [run.bare(s.tokens) for s in request.sequences]
        right[side] += sum(final_answer(text) == gold[question] for text in texts)
    once = dict.fromkeys(gold, 1)
    seen = [q for q in gold if any(q in run.whole(datum) for datum in run.supervised)]
    not_trained = [q for q in train if not any(q in run.whole(datum) for datum in run.supervised)]
    not_greedy = len(run.trace.requests) - len(run.greedy) - len(run.joined.scores)
    try:
        result = json.loads(run.written("result.json"))
    except ValueError:
        result = None
    wanted = {"n": 10, "base_accuracy": right["base"] / 10, "tuned_accuracy": right["tuned"] / 10}
    is_true = isinstance(result, dict) and set(result) == set(wanted)
    is_true = is_true and all(abs(result[name] - wanted[name]) < 1e-3 for name in wanted)
    return [
        expect(
            "asks the base every test row once", not differing(asked["base"], once), asked["base"]
        ),
        expect(
            "asks the final weights every test row once",
            not differing(asked["tuned"], once),
            f"{sum(asked['tuned'].values())} answers of step {last}, "
            f"{sum(asked['other'].values())} of earlier steps",
        ),
        expect("with the same prompts and limits", prompts["base"] == prompts["tuned"]),
        expect("greedily", run.greedy and not not_greedy, f"{not_greedy} requests are not greedy"),
        expect("no test row is trained", run.supervised and not seen, seen),
        expect("every training row is trained", not not_trained, not_trained),
        expect("result.json says what was measured", is_true, f"{result} instead of {wanted}"),
        expect("four steps", run.step_count == 4, run.step_count),
        expect("learning rate 2e-4", approximately(run.learning_rates, 2e-4), run.learning_rates),
        expect("keeps sft-before-after", run.saved_weights("sft-before-after"), run.durable_saves),
    ]
