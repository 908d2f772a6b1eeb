"""Every reply of the service trained twice, each behind its own history."""

from collections import Counter

from grading import Expectation, Run, differing, expect, squeezed


def grade(run: Run) -> list[Expectation]:
    chats = [row["messages"] for row in run.rows("chats.jsonl")]
    histories = {
        squeezed(turn["content"]): [m["content"] for m in chat[:number]]
        for chat in chats
        for number, turn in enumerate(chat)
        if turn["role"] == "assistant"
    }
    times: Counter[str] = Counter()
    lost = []
    for datum in run.supervised:
        text = run.whole(datum)
        for span in map(squeezed, run.spans(datum)):
            times[span] += 1
            before = text[: text.find(span)] if span in text else text
            lost += [h for h in histories.get(span, []) if h not in before]
    last = max((step.number for step in run.trace.steps), default=0)
    kept = [s for s in run.durable_saves if s.step == last]
    odd = differing(times, dict.fromkeys(histories, 2))
    return [
        expect("trains every reply, each twice", not odd, odd),
        expect("every reply follows the whole conversation before it", times and not lost, lost),
        expect(
            "adapts Qwen3.5-4B", all("Qwen3.5-4B" in m for m in run.base_models), run.base_models
        ),
        expect("keeps the final weights for good", kept, run.durable_saves),
    ]
