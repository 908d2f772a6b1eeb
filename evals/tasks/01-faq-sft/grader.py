"""Answers trained, and only they; the numbers that were asked for; a durable save."""

from collections import Counter

from grading import Expectation, Run, approximately, differing, expect, squeezed


def grade(run: Run) -> list[Expectation]:
    rows = {squeezed(row["answer"]): row["question"] for row in run.rows("faq.jsonl")}
    spans = [run.spans(datum) for datum in run.supervised]
    times = Counter(squeezed(span) for parts in spans for span in parts)
    beside = [
        run.whole(datum)[:80]
        for datum, parts in zip(run.supervised, spans, strict=True)
        if len(parts) == 1 and rows.get(squeezed(parts[0]), "?") not in run.whole(datum)
    ]
    sizes = [sum(len(call.data) for call in step.calls) for step in run.trace.steps]
    odd = differing(times, dict.fromkeys(rows, 3))
    return [
        expect("trains the ten answers, each three times", not odd, odd),
        expect("every answer follows its own question", spans and not beside, beside),
        expect(
            "there is no system turn",
            not any("<|im_start|>system" in run.whole(d) for d in run.supervised),
        ),
        expect("six steps of five rows", sizes == [5] * 6, sizes),
        expect("learning rate 5e-4", approximately(run.learning_rates, 5e-4), run.learning_rates),
        expect("rank 16", run.ranks == {16}, run.ranks),
        expect("adapts Qwen/Qwen3.5-4B", run.base_models == {"Qwen/Qwen3.5-4B"}, run.base_models),
        expect(
            "keeps the final weights as faq-lora", run.saved_weights("faq-lora"), run.durable_saves
        ),
    ]
