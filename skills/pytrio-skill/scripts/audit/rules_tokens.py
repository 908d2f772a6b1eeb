"""Checks of single data: alignment, which tokens carry signal, and whether they were sampled."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from audit.findings import Decoder, Hit, Place, plural, printable, target_place
from audit.joins import LOGPROB_TOLERANCE, Joined, Match
from audit.trace import IGNORED_TARGET, Call, Chat, Datum

# Of the active targets, the share that must fit a hypothesis before it is named.
MOST = 0.9
NUMERIC_NOISE = 1e-3
PADDING_RUN = 4


class Gathered:
    """Hits of one kind in many data, reported together."""

    def __init__(self) -> None:
        self.places: dict[str, list[Place]] = defaultdict(list)
        self.details: dict[str, str] = {}

    def add(self, rule: str, place: Place, detail: str = "") -> None:
        self.places[rule].append(place)
        self.details.setdefault(rule, detail)

    def hits(self, sentences: dict[str, str], total: int) -> Iterator[Hit]:
        """`sentences` maps rule names to texts with {n}, {data}, {total} and {detail}."""
        for rule, places in self.places.items():
            yield Hit(
                rule,
                sentences[rule].format(
                    n=len(places),
                    data=plural(len(places), "datum"),
                    total=total,
                    detail=self.details[rule],
                ),
                tuple(places),
            )


# -- A03: inputs against targets -------------------------------------------------------------------


def shift_of(datum: Datum) -> str:
    """`aligned`, `none`, `double` or `other`: how active targets relate to the inputs."""
    active = datum.active[:-1].copy()
    inputs, targets = datum.inputs, datum.targets
    # A placeholder under a non-zero signal is a wrong target as well.
    if not active.any():
        return "aligned"
    positions = np.flatnonzero(active)

    def share(offset: int) -> float:
        known = positions[(positions + offset >= 0) & (positions + offset < len(inputs))]
        if not len(known):
            return 0.0
        return float(np.mean(targets[known] == inputs[known + offset]))

    if share(1) == 1.0:
        return "aligned"
    if share(0) >= MOST and share(0) > share(1):
        return "none"
    if share(2) >= MOST and share(2) > share(1):
        return "double"
    return "aligned" if share(1) >= MOST else "other"


def check_alignment(joined: Joined) -> Iterator[Hit]:
    gathered, total = Gathered(), 0
    for call in joined.trace.calls:
        if not call.is_backward:
            continue
        decoder = joined.decoder(call)
        for datum in call.data:
            total += 1
            shift = shift_of(datum)
            if shift == "aligned":
                continue
            rule = {"none": "A03-no-shift", "double": "A03-double-shift"}.get(
                shift, "A03-targets-differ"
            )
            first = int(np.flatnonzero(datum.active)[0])
            gathered.add(rule, target_place(call, datum, first, decoder))
    yield from gathered.hits(
        {
            "A03-no-shift": "in {data} of {total} target t is input t: the token is predicted from "
            "itself",
            "A03-double-shift": "in {data} of {total} target t is input t + 2: the shift was made "
            "twice",
            "A03-targets-differ": "in {data} of {total} targets with signal are not the next input",
        },
        total,
    )


# -- A04: which tokens supervised data train -------------------------------------------------------


def find_all(tokens: np.ndarray, pattern: list[int]) -> list[int]:
    """Start indices of a short pattern."""
    width = len(pattern)
    if not width or len(tokens) < width:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(tokens, width)
    return np.flatnonzero((windows == np.array(pattern)).all(axis=1)).tolist()


def assistant_turns(tokens: np.ndarray, chat: Chat) -> list[tuple[int, int, int, bool]]:
    """(header start, content start, end, is closed) of every assistant turn, as token indices.

    The content begins after the longest generation prompt found there, and ends with the end
    token (inclusive) or with the sequence.
    """
    found = []
    for start in find_all(tokens, chat.header):
        content = start + len(chat.header)
        for prompt in chat.generation_prompts:
            stop = start + len(prompt)
            if stop <= len(tokens) and tokens[start:stop].tolist() == prompt:
                content = max(content, stop)
        ends = np.flatnonzero(np.isin(tokens[content:], chat.end_ids))
        is_closed = bool(len(ends))
        stop = content + int(ends[0]) + 1 if is_closed else len(tokens)
        found.append((start, content, stop, is_closed))
    return found


SUPERVISED_SENTENCES = {
    "nothing": "{data} of {total} have no token with a weight: they train nothing",
    "prompt": "{data} of {total} train tokens outside the assistant's turns",
    "header": "{data} of {total} train the opening of the assistant's turn, which is part of the "
    "prompt",
    "think": "{data} of {total} train the end of the generation prompt (its empty think block)",
    "end": "in {data} of {total} an assistant's turn ends without a trained end token: {detail}",
    "after": "{data} of {total} train text after the end of a turn",
    "open-think": "{data} of {total} train an answer inside a think block that is not closed",
    "roles": "in {data} of {total} two turns of one role follow each other",
    "padding": "{data} of {total} end in padding",
    "first": "in {data} of {total} the first token of the answer has no weight although all others "
    "have: the weights are shifted by one",
}


def check_supervised(joined: Joined) -> Iterator[Hit]:
    yield from supervised_hits(joined, joined.supervised_calls, "A04")


def check_template(joined: Joined) -> Iterator[Hit]:
    """Supervised data without a single chat turn, in a script that asks in chat turns."""
    data = [d for call in joined.supervised_calls for d in call.data]
    asked = [r for r in joined.trace.requests if not r.is_score]
    if not data or not asked:
        return
    chat = joined.trace.chat_of_run(data[0].call.run)
    if chat is None or not chat.header:
        return
    if any(find_all(datum.tokens, chat.header) for datum in data):
        return
    in_turns = [r for r in asked if find_all(r.prompt, chat.header)]
    if len(in_turns) > len(asked) / 2:
        yield Hit(
            "A04-no-template",
            f"none of {plural(len(data), 'datum')} has an assistant's turn, {len(in_turns)} of "
            f"{len(asked)} sampling prompts have",
            (target_place(data[0].call, data[0], 0, joined.decoder(data[0].call)),),
        )


def check_preference_tokens(joined: Joined) -> Iterator[Hit]:
    """What custom losses on given text train, read from their surrogate weights."""
    yield from supervised_hits(joined, joined.preference_calls, "A16")


def supervised_hits(joined: Joined, calls: list[Call], code: str) -> Iterator[Hit]:
    gathered, total = Gathered(), 0
    for call in calls:
        chat = joined.trace.chat_of_run(call.run)
        decoder = joined.decoder(call)
        for datum in call.data:
            total += 1
            active = datum.active
            if not active.any():
                if code == "A04":
                    gathered.add("nothing", Place(call.number, datum.number))
                continue
            if chat is None or not chat.header or shift_of(datum) != "aligned":
                continue
            look_at_turns(gathered, call, datum, active, chat, decoder)
    sentences = {f"{code}-{name}": text for name, text in SUPERVISED_SENTENCES.items()}
    named = Gathered()
    for name, places in gathered.places.items():
        named.places[f"{code}-{name}"] = places
        named.details[f"{code}-{name}"] = gathered.details[name]
    yield from named.hits(sentences, total)


def look_at_turns(
    gathered: Gathered, call: Call, datum: Datum, active: np.ndarray, chat: Chat, decoder: Decoder
) -> None:
    """Compare the trained positions of one chat with its assistant turns."""
    tokens = np.append(datum.inputs, datum.targets[-1:])
    turns = assistant_turns(tokens, chat)
    if not turns:
        return  # plain text: everything may be trained
    # Token index i is target position i - 1.
    trained = np.append([False], active)

    def place(token: int, length: int = 1) -> Place:
        return target_place(call, datum, token - 1, decoder, length)

    seen: list[tuple[str, Place, str]] = []
    outside = trained.copy()
    for start, content, stop, is_closed in turns:
        # What the template writes between an end token and the next turn.
        if is_closed and stop < len(tokens) and trained[stop] and tokens[stop] != chat.header[0]:
            seen.append(("after", place(stop), ""))
            outside[stop] = False
        outside[start:stop] = False
        if trained[start:content].any():
            first = start + int(np.flatnonzero(trained[start:content])[0])
            name = part_of_opening(decoder.text(tokens[first:content]))
            if name:
                seen.append((name, place(first, 1 if name == "header" else content - first), ""))
        inside = trained[content:stop]
        if not inside.any():
            continue
        text = decoder.text(tokens[start:stop])
        if is_closed and "<think>" in text and "</think>" not in text:
            seen.append(("open-think", place(content), ""))
        if len(inside) > 2 and not inside[0] and inside[1:].all():
            seen.append(("first", place(content), ""))
        elif not is_closed:
            seen.append(("end", place(stop - 1), "the sequence breaks off before it"))
        elif not inside[-1]:
            seen.append(("end", place(stop - 1), "its weight is 0"))
        elif chat.closing and tokens[stop - 1] != chat.closing[0]:
            wanted = decoder.text(chat.closing[:1])
            seen.append(("end", place(stop - 1), f"the template ends it with {wanted}"))
    repeated = repeated_role(tokens, chat)
    if repeated is not None:
        seen.append(("roles", place(repeated), ""))
    last = turns[-1][2]
    if len(tokens) - last >= PADDING_RUN and np.ptp(tokens[last:]) == 0:
        seen.append(("padding", place(last, len(tokens) - last), ""))
    if outside.any():
        seen = [("prompt", place(int(np.flatnonzero(outside)[0])), "")]
    for name in dict.fromkeys(name for name, _, _ in seen):
        _, where, detail = next(entry for entry in seen if entry[0] == name)
        gathered.add(name, where, detail)


def repeated_role(tokens: np.ndarray, chat: Chat) -> int | None:
    """Where a turn begins whose role is that of the turn before; the header's second id is it."""
    if len(chat.header) < 2:
        return None
    starts = np.flatnonzero(tokens[:-1] == chat.header[0])
    roles = tokens[starts + 1]
    same = np.flatnonzero(roles[1:] == roles[:-1])
    return int(starts[same[0] + 1]) if len(same) else None


def check_first_turn(joined: Joined) -> Iterator[Hit]:
    """A system turn that all sampling prompts begin with and no datum does."""
    data = [d for call in joined.supervised_calls for d in call.data]
    prompts = [r.prompt for r in joined.trace.requests if not r.is_score]
    if not data or len({p.tobytes() for p in prompts}) < 2:
        return
    chat = joined.trace.chat_of_run(data[0].call.run)
    if chat is None or not chat.header:
        return
    ends = np.flatnonzero(np.isin(prompts[0], chat.end_ids))
    first = prompts[0][: int(ends[0]) + 1] if len(ends) else prompts[0][:0]
    decoder = joined.decoder(data[0].call)
    if "system" not in decoder.text(first[: len(chat.header)]):
        return
    if any(not np.array_equal(p[: len(first)], first) for p in prompts):
        return
    if not any(np.array_equal(d.tokens[: len(first)], first) for d in data):
        shown = printable(decoder.text(first))
        yield Hit(
            "A04-first-turn",
            f"all {len(prompts)} sampling prompts begin with {shown[:80]!r}, none of "
            f"{plural(len(data), 'datum')} does",
            (target_place(data[0].call, data[0], 0, decoder),),
        )


def part_of_opening(text: str) -> str:
    """Which rule a trained end of a generation prompt breaks: `header`, `think` or none.

    Thinking data are trained from `<think>` on where the model writes it itself.
    """
    if text.replace("<think>", "").replace("</think>", "").strip():
        return "header"
    is_thought = text.startswith("<think>") and "</think>" not in text
    return "" if is_thought else "think"


# -- A01 and A02: policy data against what was sampled ---------------------------------------------


POLICY_SENTENCES = {
    "A01-prompt": "{data} of {total} have advantages on prompt tokens{detail}",
    "A01-observation": "{data} of {total} have advantages on tokens between or after turns that "
    "were never sampled",
    "A01-appended": "{data} of {total} have advantages on tokens appended after the sampled ones",
    "A01-first": "in {data} of {total} the first sampled token of a turn has no advantage although "
    "the others have: the advantages are shifted by one",
    "A02-reencoded": "{data} of {total} hold other ids than were sampled, for the same text: the "
    "text was encoded again",
    "A02-cut": "{data} of {total} break off in the middle of a sampled completion",
    "A02-prompt-differs": "{data} of {total} have the sampled completion after another prompt than "
    "it was sampled from",
    "A02-ids": "{data} of {total} train token ids that were never sampled here",
    "A02-padding": "{data} of {total} end in a run of one repeated id: padding",
    "A02-logprobs": "{data} of {total} carry other log-probabilities than were served: {detail}",
    "A02-logprobs-shifted": "{data} of {total} carry the served log-probabilities shifted by one: "
    "{detail}",
    "A02-recomputed": "{data} of {total} carry log-probabilities that were computed again instead "
    "of the served ones: {detail}",
}


def check_sampled(joined: Joined) -> Iterator[Hit]:
    gathered, total = Gathered(), 0
    for call in joined.policy_calls:
        decoder = joined.decoder(call)
        for datum in call.data:
            total += 1
            if shift_of(datum) in ("none", "double"):
                continue  # A03 says it
            match = joined.match(datum)
            look_at_ids(gathered, joined, call, datum, match, decoder)
            if call.kind == "policy" and match.is_sampled:
                look_at_logprobs(gathered, joined, call, datum, match, decoder)
    yield from gathered.hits(POLICY_SENTENCES, total)


def look_at_ids(
    gathered: Gathered,
    joined: Joined,
    call: Call,
    datum: Datum,
    match: Match,
    decoder: Decoder,
) -> None:
    """Targets with signal that no request served."""
    active, owned = datum.active, match.owner >= 0

    def place(position: int, length: int = 1) -> Place:
        return target_place(call, datum, position, decoder, length)

    if match.cut is not None and active[owned].any():
        gathered.add("A02-cut", place(len(active) - 1))
    foreign = active & ~owned
    if match.turns:
        look_at_first_tokens(gathered, joined, datum, match, place)
    if not foreign.any():
        return
    positions = np.flatnonzero(foreign)
    if not match.is_sampled:
        if match.prompt_end is not None and (positions < match.prompt_end - 1).any():
            gathered.add("A01-prompt", place(int(positions[0])))
            positions = positions[positions >= match.prompt_end - 1]
        if len(positions):
            look_at_unknown(gathered, joined, call, datum, match, positions, decoder)
        return
    first_owned, last_owned = np.flatnonzero(owned)[[0, -1]]
    before = positions[positions < first_owned]
    if len(before):
        one_early = len(before) == 1 and before[0] == first_owned - 1
        detail = ": one token, so they are shifted by one" if one_early else ""
        gathered.add("A01-prompt", place(int(before[0])), detail)
    later = positions[positions > first_owned]
    if not len(later):
        return
    if match.prompt_end is not None and match.candidates and not match.cut:
        # A later turn was sampled from this prefix, yet its ids are others.
        in_turn = later[later >= match.prompt_end - 1]
        if len(in_turn):
            look_at_unknown(gathered, joined, call, datum, match, in_turn, decoder)
        later = later[later < match.prompt_end - 1]
        if not len(later):
            return
    behind = later[later > last_owned]
    if padding_of(datum) and len(behind):
        gathered.add("A02-padding", place(int(behind[0]), len(behind)))
    elif 0 < len(behind) <= 2 and len(behind) == len(later):
        gathered.add("A01-appended", place(int(behind[0]), len(behind)))
    else:
        gathered.add("A01-observation", place(int(later[0]), min(len(later), 8)))


def look_at_first_tokens(
    gathered: Gathered, joined: Joined, datum: Datum, match: Match, place: Any
) -> None:
    """A turn whose tokens all carry signal but the first."""
    for index in match.turns:
        positions = np.flatnonzero(match.owner == index)
        if len(positions) < 3:
            continue
        values = datum.signal[positions]
        if values[0] == 0 and (values[1:] != 0).all() and is_constant(values[1:]):
            gathered.add("A01-first", place(int(positions[0])))
            return


def is_constant(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= 1e-6 * max(1e-12, float(np.abs(values).max())))


def padding_of(datum: Datum) -> bool:
    tail = datum.inputs[-PADDING_RUN:]
    return len(tail) == PADDING_RUN and bool((tail == tail[0]).all())


def look_at_unknown(
    gathered: Gathered,
    joined: Joined,
    call: Call,
    datum: Datum,
    match: Match,
    positions: np.ndarray,
    decoder: Decoder,
) -> None:
    """Name the reason why trained ids match no completion, as far as it can be told."""
    tokens = datum.tokens
    first = int(positions[0])
    place = target_place(call, datum, first, decoder, min(8, len(positions)))
    if padding_of(datum):
        gathered.add("A02-padding", place)
        return
    if match.prompt_end is not None and match.candidates:
        rest = tokens[match.prompt_end :]
        text = decoder.bare_text(rest)
        for index in reversed(match.candidates):
            if joined.text_of(index) == text:
                differs = first_difference(rest, joined.sequences[index].tokens)
                position = min(match.prompt_end - 1 + differs, len(datum.targets) - 1)
                gathered.add("A02-reencoded", target_place(call, datum, position, decoder))
                return
        gathered.add("A02-ids", place)
        return
    ending = joined.ending(tokens)
    if ending is not None:
        differs = first_difference(tokens, joined.sequences[ending].request.prompt)
        position = max(0, min(differs - 1, len(datum.targets) - 1))
        gathered.add("A02-prompt-differs", target_place(call, datum, position, decoder))
        return
    gathered.add("A02-ids", place)


def first_difference(left: np.ndarray, right: np.ndarray) -> int:
    """Index of the first entry in which two arrays differ."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def look_at_logprobs(
    gathered: Gathered, joined: Joined, call: Call, datum: Datum, match: Match, decoder: Decoder
) -> None:
    """The `logprobs` of a datum against those that the sampler returned."""
    served = np.full(len(datum.targets), np.nan, np.float32)
    turns = [*match.turns, *([] if match.cut is None else [match.cut])]
    for index in turns:
        sequence = joined.sequences[index]
        start = max(0, len(sequence.request.prompt) - 1)
        stop = min(start + len(sequence.logprobs), len(served))
        mine = match.owner[start:stop] == index
        served[start:stop][mine] = sequence.logprobs[: stop - start][mine]
    given = datum.logprobs
    assert given is not None  # policy losses carry them
    relevant = np.flatnonzero(datum.active & ~np.isnan(served))
    if not len(relevant):
        return
    differences = np.abs(given[relevant] - served[relevant])
    if differences.max() <= LOGPROB_TOLERANCE:
        return
    worst = int(relevant[int(differences.argmax())])
    place = target_place(call, datum, worst, decoder)
    for shift in (-1, 1):
        moved = relevant[(relevant + shift >= 0) & (relevant + shift < len(served))]
        moved = moved[~np.isnan(served[moved + shift])]
        if len(moved) >= 2 and fits(given[moved], served[moved + shift]):
            direction = "early" if shift == 1 else "late"
            gathered.add("A02-logprobs-shifted", place, f"they come one position {direction}")
            return
    scored = scores_of(joined, datum)
    if scored is not None and fits(given[relevant], scored[relevant]):
        detail = f"they equal a compute_logprobs of the same tokens, up to {differences.max():.3g}"
        gathered.add("A02-recomputed", place, detail + " away from the served ones")
        return
    if fits(given[relevant], datum.served[relevant], NUMERIC_NOISE):
        detail = "they are those of the trainer's present weights"
        gathered.add("A02-recomputed", place, detail)
        return
    if not given[relevant].any():
        detail = "they are all 0"
    else:
        ratios = given[relevant] / np.where(served[relevant] == 0, np.nan, served[relevant])
        middle = float(np.nanmedian(ratios))
        scaled = np.nanmean(np.abs(ratios - middle) < 1e-3) >= MOST
        detail = (
            f"they are the served ones times {middle:.3g}"
            if scaled
            else f"up to {differences.max():.3g} away"
        )
    gathered.add("A02-logprobs", place, detail)


def fits(left: np.ndarray, right: np.ndarray, tolerance: float = LOGPROB_TOLERANCE) -> bool:
    return bool(np.mean(np.abs(left - right) <= tolerance) >= MOST)


def scores_of(joined: Joined, datum: Datum) -> np.ndarray | None:
    """Log-probabilities [positions] of a recorded scoring of the same tokens, None without."""
    known = joined.scores_by_hash.get(int(joined.hashes.of(datum.tokens)[-1]))
    if not known:
        return None
    values = np.full(len(datum.targets), np.nan, np.float32)
    scored = known[-1].prompt_logprobs
    assert scored is not None
    values[: len(scored)] = scored[: len(values)]
    return values


def check_dro_prompts(joined: Joined) -> Iterator[Hit]:
    """dro's distance to `logprobs` counts wherever a target is active, whatever the advantage."""
    gathered, total = Gathered(), 0
    for call in joined.policy_calls:
        if call.loss != "dro":
            continue
        for datum in call.data:
            total += 1
            foreign = (datum.targets != IGNORED_TARGET) & (joined.match(datum).owner < 0)
            if foreign.any() and joined.match(datum).is_sampled:
                first = int(np.flatnonzero(foreign)[0])
                gathered.add(
                    "A12-dro-prompt", target_place(call, datum, first, joined.decoder(call))
                )
    yield from gathered.hits(
        {"A12-dro-prompt": "{data} of {total} for dro have active targets that were not sampled"},
        total,
    )


def check_placeholders(joined: Joined) -> Iterator[Hit]:
    """Prompt targets of 0 count as active tokens, targets of -100 do not."""
    active = signal = 0
    losses = set()
    for call in joined.policy_calls:
        if call.kind != "policy":
            continue
        losses.add(call.loss)
        for datum in call.data:
            counted = datum.targets != IGNORED_TARGET
            active += int(counted.sum())
            signal += int((counted & (datum.advantages != 0)).sum())
    if signal and active > 1.5 * signal:
        yield Hit(
            "A12-placeholder",
            f"{active:,} targets count as active, {signal:,} carry an advantage: a server that "
            f"divides by active tokens scales the gradient by {signal / active:.2f} against one "
            f"that divides by the others{probed_divisors(joined, losses)}",
        )


def probed_divisors(joined: Joined, losses: Collection[str]) -> str:
    """What `--like` says about the divisors of these losses, as the end of a sentence."""
    like = joined.trace.header.get("like", {})
    found = {loss: like.get(f"reduction.{loss}") for loss in sorted(losses)}
    known = [f"{loss} by {divisor}" for loss, divisor in found.items() if divisor]
    return f"; the answers given with --like divide {', '.join(known)}" if known else ""
