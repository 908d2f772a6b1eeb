"""One form of thinking prompt in three places; thought and answer trained, then rewarded."""

from collections import Counter

from grading import Expectation, Run, differing, expect, final_answer, squeezed

OPENED = "<|im_start|>assistant\n<think>\n"


def grade(run: Run) -> list[Expectation]:
    thoughts = [
        squeezed(f"{r['reasoning']} </think> {r['answer']}") for r in run.rows("thoughts.jsonl")
    ]
    gold = {row["question"]: row["gold"] for row in run.rows("rl.jsonl")}
    tests = [row["question"] for row in run.rows("test.jsonl")]

    def reward(prompt: str, completion: str) -> float:
        answer = next(a for q, a in gold.items() if q + " Put" in prompt)
        _, closed, said = completion.rpartition("</think>")
        return float(bool(closed) and final_answer(said) == answer)

    times = Counter(squeezed(s) for datum in run.supervised for s in run.spans(datum))
    odd = differing(times, dict.fromkeys(thoughts, 2))
    twice = [
        run.whole(datum)[-120:]
        for datum in run.supervised
        if run.whole(datum).count("<think>") != 1 or OPENED not in run.whole(datum)
    ]
    prompts = {run.prompt(r) for r in run.trace.requests}
    closed = [p[-60:] for p in prompts if not p.endswith(OPENED)]
    asked = sorted(q for p, gs in run.group_by_prompt.items() for q in gold if q in p for _ in gs)
    sizes = {len(group.members) for group in run.groups}
    wrong = run.wrong_advantages(reward)
    last = max((step.number for step in run.trace.steps), default=0)
    tested = {q for r in run.greedy if r.sampler.step == last for q in tests if q in run.prompt(r)}
    rates = [float(step.params["learning_rate"]) for step in run.trace.steps]
    samplers = {m: run.joined.sequences[m].request.sampler for g in run.groups for m in g.members}
    return [
        expect("trains thought and answer, each twice", not odd, odd),
        expect(
            "the thought is opened once, by the prompt", run.supervised and not twice, twice[:2]
        ),
        expect("all sampling has thinking on", prompts and not closed, closed[:2]),
        expect("four steps of SFT at 5e-4 first", rates[:4] == [5e-4] * 4, rates),
        expect("then one to three at 1e-4", set(rates[4:]) == {1e-4} and len(rates) <= 7, rates),
        expect(
            "GRPO goes on from the SFT weights",
            samplers and all(s.step >= 4 for s in samplers.values()) and len(run.trace.runs) == 1,
            {s.step for s in samplers.values()},
        ),
        expect(
            "samples the six problems once, eight times each",
            asked == sorted(gold) and sizes == {8},
            asked,
        ),
        expect("advantages follow the reward", run.policy and not wrong, wrong[:3]),
        expect("tests the final weights greedily", tested == set(tests), tested),
        expect("keeps thinker", run.saved_weights("thinker"), run.durable_saves),
    ]
