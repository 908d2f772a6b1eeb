"""What was sampled and what was trained in a recording, as text to read."""

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from audit.findings import Decoder, plural, printable
from audit.joins import Joined
from audit.trace import Datum, Request, read_trace

SHORT = 400
LEFT_OUT = "..."


def show(
    path: Path, limit: int, is_whole: bool = False, sessions: Collection[int] = ()
) -> Iterator[str]:
    """Lines: sampling requests with their completions, then training data, `limit` of each.

    Of a recording with more, as many are taken from the beginning as from the end. Texts are cut
    in the middle unless `is_whole`. Raises TraceError.
    """
    joined = Joined(read_trace(path, sessions))
    requests = [r for r in joined.trace.requests if not r.is_score]
    data = [d for call in joined.trace.calls if call.is_backward for d in call.data]
    length = None if is_whole else SHORT
    for request in chosen(requests, limit):
        yield from [LEFT_OUT] if request is None else request_lines(joined, request, length)
    for datum in chosen(data, limit):
        yield from [LEFT_OUT] if datum is None else datum_lines(joined, datum, length)
    yield (
        f"{min(limit, len(requests))} of {plural(len(requests), 'sampling request')}; "
        f"{min(limit, len(data))} of {plural(len(data), 'datum')}"
    )


def chosen(items: list, limit: int) -> list:
    """The first and the last ones, `limit` in all, with None for what is left out between."""
    if len(items) <= limit:
        return items
    first = (limit + 1) // 2
    return [*items[:first], None, *items[len(items) - (limit - first) :]]


def request_lines(joined: Joined, request: Request, length: int | None) -> Iterator[str]:
    """A request's prompt, and its completions with stop reason and advantage."""
    decoder = joined.decoders.of(request.sampler.folder)
    temperature = request.params.get("temperature", 1.0)
    source = request.sampler.training_run or request.sampler.base_model
    yield (
        f"request {request.number}: {plural(len(request.sequences), 'completion')} of {source} "
        f"after step {request.sampler.step}, temperature {temperature:g}"
    )
    yield "  prompt  " + clipped(decoder.text(request.prompt), length)
    for sequence in request.sequences:
        tokens = plural(len(sequence.tokens), "token")
        signal = signal_text(joined, joined.sequences.index(sequence))
        text = clipped(decoder.text(sequence.tokens), length)
        yield f"  [{sequence.index + 1}] {sequence.stop_reason}, {tokens}, {signal}: {text}"


def signal_text(joined: Joined, index: int) -> str:
    """`advantage +0.25` of the first datum that trains a completion; of a custom loss, whose
    advantages never leave the script, minus its mean gradient."""
    if index not in joined.trained:
        return "not trained"
    datum = joined.trained[index][0]
    owned = datum.signal[(joined.match(datum).owner == index) & datum.active]
    name = "-gradient" if datum.call.kind == "custom" else "advantage"
    return f"{name} {float(np.mean(owned)):+.3g}"


def datum_lines(joined: Joined, datum: Datum, length: int | None) -> Iterator[str]:
    """A datum's whole sequence with what was trained marked."""
    call = datum.call
    loss = "custom" if call.kind == "custom" else call.loss
    yield f"call {call.number}, datum {datum.number} ({loss}), trained between the marks"
    yield "  " + clipped(marked(datum, joined.decoder(call)), length)


def marked(datum: Datum, decoder: Decoder) -> str:
    """A datum's sequence with each trained region between `>>` and `<<`."""
    tokens = np.append(datum.inputs, datum.targets[-1:])
    is_trained = np.concatenate([[False], datum.active])
    parts, start = [], 0
    for stop in [*(np.flatnonzero(np.diff(is_trained)) + 1), len(tokens)]:
        text = decoder.text(tokens[start:stop])
        parts.append(f">>{text}<<" if is_trained[start] else text)
        start = stop
    return "".join(parts)


def clipped(text: str, length: int | None) -> str:
    """On one line; the middle left out of what is longer than `length` characters."""
    line = printable(text)
    if length is None or len(line) <= length:
        return line
    return f"{line[: length // 4]} ... {line[len(line) - length * 3 // 4 :]}"
