"""A small run of the first 16 rows, charted offline, kept for good; the price of the whole."""

import json
import math
import re
from collections import Counter

from grading import Expectation, Run, differing, expect, squeezed

ROWS, EPOCHS, PRICE = 48, 3, 5.0
# Rows differ in length by a few per cent; scaling up the small run is as good as counting all.
TOLERANCE = 0.1
# A scalar in SwanLab's protocol-buffer file: field 1, its length, the key, then the step (field 2,
# left out when 0) or the kind (field 3). Printed lines are kept there, too, in another form.
KEY = "[^\x00-\x1f]{0,40}?(?:loss|损失)[^\x00-\x1f]{0,40}?"
SCALAR = re.compile(f"\n[\x01-\x7f]{KEY}[\x10\x18]".encode())


def estimate_of(run: Run) -> tuple[float, float]:
    """(train_tokens, cost_yuan) as written; NaN when it cannot be read."""
    try:
        value = json.loads(run.written("estimate.json"))
        return float(value["train_tokens"]), float(value["cost_yuan"])
    except (ValueError, KeyError, TypeError):
        return math.nan, math.nan


def charted(run: Run) -> int:
    """How many values of a key with `loss` in it an offline SwanLab run in the folder holds."""
    files = [p.read_bytes() for p in run.folder.rglob("*.swanlab") if p.is_file()]
    return max((len(SCALAR.findall(content)) for content in files), default=0)


def grade(run: Run) -> list[Expectation]:
    first = [squeezed(row["response"]) for row in run.rows("slogans.jsonl")][:16]
    times = Counter(squeezed(s) for datum in run.supervised for s in run.spans(datum))
    sizes = [sum(len(call.data) for call in step.calls) for step in run.trace.steps]
    last = max((step.number for step in run.trace.steps), default=0)
    kept = [s for s in run.durable_saves if s.step == last and s.kind == "weights"]
    lengths = [len(datum.tokens) for datum in run.supervised]
    expected = EPOCHS * ROWS * sum(lengths) / max(1, len(lengths))
    tokens, cost = estimate_of(run)
    odd = differing(times, Counter(first))
    return [
        expect("trains the first 16 responses once", not odd, odd),
        expect("four steps of four rows", sizes == [4] * 4, sizes),
        expect("SwanLab has a loss for every step, offline", charted(run) >= 4, charted(run)),
        expect("keeps sampler weights without an end", kept, run.durable_saves),
        expect(
            "the estimate counts all tokens of all rows, three times",
            abs(tokens - expected) <= TOLERANCE * expected,
            f"{tokens:g} where {expected:.0f} are to be expected",
        ),
        expect(
            "the price fits the tokens",
            abs(cost - tokens / 1e6 * PRICE) <= 0.006,
            f"{cost:g} yuan for {tokens:g} tokens",
        ),
    ]
