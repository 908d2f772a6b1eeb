"""Captions trained behind their own pictures, sent as the files are; asked in the same form."""

import hashlib
from collections import Counter

from grading import Expectation, Run, approximately, differing, expect, squeezed

from audit.trace import picture_id

# A picture has no text: its marks stand side by side.
ASKED = "<|im_start|>user\n<|vision_start|><|vision_end|>请描述这张图。<|im_end|>"


def grade(run: Run) -> list[Expectation]:
    def number_of(path: str) -> int:
        content = (run.files / path).read_bytes()
        return picture_id(hashlib.sha256(content).hexdigest()[:16])

    rows = {squeezed(row["caption"]): number_of(row["image"]) for row in run.rows("captions.jsonl")}
    times = Counter(squeezed(s) for datum in run.supervised for s in run.spans(datum))
    ends = Counter(run.text(d.targets[d.active][-1:]) for d in run.supervised)
    elsewhere = [
        run.spans(datum)
        for datum in run.supervised
        if {int(i) for i in datum.inputs if i < 0}
        != {rows.get(squeezed(" ".join(run.spans(datum))))}
    ]
    other_form = [run.whole(d)[:120] for d in run.supervised if ASKED not in run.whole(d)]
    last = max((step.number for step in run.trace.steps), default=0)
    wanted = {number_of("pics/01.png"), number_of("pics/02.png")}
    questions = [
        r
        for r in run.greedy
        if r.sampler.step == last and {int(i) for i in r.prompt if i < 0} <= wanted
    ]
    seen = {int(i) for r in questions for i in r.prompt if i < 0}
    other = [run.prompt(r) for r in questions if ASKED not in run.prompt(r)]
    said = [run.bare(r.sequences[0].tokens) for r in questions if r.sequences]
    sizes = [sum(len(call.data) for call in step.calls) for step in run.trace.steps]
    odd = differing(times, dict.fromkeys(rows, 3))
    return [
        expect("trains the captions, each three times", not odd, odd),
        expect("the end token is trained", set(ends) == {"<|im_end|>"}, ends),
        expect(
            "each behind its own picture, as the file is",
            run.supervised and not elsewhere,
            elsewhere[:3],
        ),
        expect(
            "the picture comes first, then the text",
            run.supervised and not other_form,
            other_form[:1],
        ),
        expect("six steps of four pictures", sizes == [4] * 6, sizes),
        expect("describes both pictures with the trained weights", seen == wanted, len(questions)),
        expect("asks in the form that was trained", questions and not other, other[:1]),
        expect(
            "prints the descriptions",
            said and all(squeezed(s) in squeezed(run.output) for s in said),
            said,
        ),
        expect("learning rate 1e-3", approximately(run.learning_rates, 1e-3), run.learning_rates),
        expect("keeps caption-v1", run.saved_weights("caption-v1"), run.durable_saves),
    ]
