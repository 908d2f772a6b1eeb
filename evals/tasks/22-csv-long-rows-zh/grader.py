"""Every row that can fit, whole but for the end of its record; the others reported and left out."""

import csv
import re
from collections import Counter

from grading import Expectation, Run, approximately, differing, expect, squeezed

LIMIT = 320
SHORTENED, SKIPPED = ["GD-2042", "GD-2045", "GD-2048"], "GD-2047"
# A cut may fall into a character of several tokens, or at a cautious distance from the limit.
SLACK = 12
FORM = re.compile(
    r"<\|im_start\|>user\n工单记录：\n(.*?)\n*问题：(.*?)<\|im_end\|>\n<\|im_start\|>assistant",
    re.DOTALL,
)


def grade(run: Run) -> list[Expectation]:
    with (run.files / "tickets.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = {squeezed(r["回答"]): r for r in csv.DictReader(file)}
    skipped = next(answer for answer, r in rows.items() if r["编号"] == SKIPPED)
    wanted = dict.fromkeys((a for a in rows if a != skipped), 2)
    times = Counter(squeezed(s) for d in run.supervised for s in run.spans(d))
    misshapen, wasteful = [], []
    for datum in run.supervised:
        found = FORM.search(run.whole(datum))
        row = rows.get(squeezed(" ".join(run.spans(datum))))
        if not found or row is None or found[2] != row["问题"]:
            misshapen.append(run.whole(datum)[:60])
            continue
        kept = found[1].rstrip("\ufffd\n")
        if not row["记录"].startswith(kept):
            misshapen.append(f"{row['编号']}: {kept[:40]}")
        elif len(kept) < len(row["记录"]) and len(datum.tokens) < LIMIT - SLACK:
            wasteful.append(f"{row['编号']}: {len(datum.tokens)}")
    longest = max((len(d.tokens) for d in run.supervised), default=0)
    ends = Counter(run.text(d.targets[d.active][-1:]) for d in run.supervised)
    silent = [code for code in [*SHORTENED, SKIPPED] if code not in run.output]
    odd = differing(times, wanted)
    return [
        expect("trains the seven whole answers that fit, each twice", not odd, odd),
        expect("the end token is trained", set(ends) == {"<|im_end|>"}, ends),
        expect(
            "header, the record's beginning and the whole question are there",
            run.supervised and not misshapen,
            misshapen[:3],
        ),
        expect("no sample is longer than 320 tokens", 0 < longest <= LIMIT, longest),
        expect("as much of a long record is kept as fits", not wasteful, wasteful),
        expect("prints the numbers of shortened and skipped rows", not silent, silent),
        expect("four steps", run.step_count == 4, run.step_count),
        expect("learning rate 1e-3", approximately(run.learning_rates, 1e-3), run.learning_rates),
        expect("keeps ticket-sft", run.saved_weights("ticket-sft"), run.durable_saves),
    ]
