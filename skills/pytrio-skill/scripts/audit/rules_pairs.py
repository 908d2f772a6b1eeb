"""Checks of custom losses, preference pairs and teachers: what was scored, and what came of it."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from audit.findings import Hit, Place, plural, target_place
from audit.joins import CLOCK_SLACK_SECONDS, Joined
from audit.rules_rollouts import without_generation_prompt
from audit.rules_tokens import (
    Gathered,
    assistant_turns,
    first_difference,
    is_constant,
    shift_of,
)
from audit.trace import Call, Datum, Request, Sequence

SAME_SIZE = 0.02
SAME_QUESTION = 0.6
LARGE_WEIGHT, SMALL_WEIGHT = 20.0, 1e-9
CLEAR_CORRELATION, UNRELATED = 0.98, 0.3
ENOUGH_TOKENS = 24


# -- A16: what a custom loss did -------------------------------------------------------------------


def check_custom(joined: Joined) -> Iterator[Hit]:
    calls = [c for c in joined.trace.calls if c.kind == "custom"]
    zero = [c for c in calls if not any(d.signal.any() for d in c.data)]
    # A whole batch may be clipped now and then; A10 says so.
    if calls and len(zero) == len(calls):
        yield Hit(
            "A16-zero-gradient",
            f"in all {plural(len(calls), 'custom loss call')} the gradient is 0 for every token: "
            "the loss does not depend on the log-probabilities",
            (Place(call=zero[0].number),),
        )
    largest = [max(float(np.abs(d.signal).max()) for d in c.data) for c in calls if c not in zero]
    if not largest:
        return
    middle = float(np.median(largest))
    if middle > LARGE_WEIGHT:
        yield Hit(
            "A16-scale",
            f"the largest gradient of a token's log-probability is {middle:,.0f} in a typical "
            "call: a loss that is a mean gives at most about 1",
        )
    elif middle < SMALL_WEIGHT:
        yield Hit(
            "A16-scale",
            f"the largest gradient of a token's log-probability is {middle:.1e} in a typical call: "
            "the loss is scaled away",
        )


# -- A15: preference pairs -------------------------------------------------------------------------


def pairs_of(joined: Joined, call: Call) -> list[tuple[Datum, Datum]]:
    """(pushed up, pushed down) data of a call that is made of pairs; empty when it is not."""
    signs = []
    for datum in call.data:
        weights = datum.signal[datum.signal != 0]
        if not len(weights):
            return []
        # Shared prompt tokens may carry weight by mistake; the sign is one for a whole datum.
        signs.append(1 if weights.mean() > 0 else -1)
    count = len(signs)
    if count < 2 or count % 2 or sum(signs):
        return []
    neighbours = [(call.data[i], call.data[i + 1]) for i in range(0, count, 2)]
    halves = [(call.data[i], call.data[i + count // 2]) for i in range(count // 2)]
    chosen = neighbours if all(signs[i] != signs[i + 1] for i in range(0, count, 2)) else halves
    ordered = [(a, b) if signs[a.number] > 0 else (b, a) for a, b in chosen]
    opposite = all(signs[a.number] != signs[b.number] for a, b in chosen)
    alike = [share_a_question(joined, a, b) for a, b in ordered]
    return ordered if opposite and sum(alike) > len(alike) / 2 else []


def share_a_question(joined: Joined, left: Datum, right: Datum) -> bool:
    """Whether two prompts are mostly the same ids at their beginning and end (KTO's are not), not
    counting what the template puts around every question."""
    chat = joined.trace.chat_of_run(left.call.run)
    frame = len(chat.header) + len(chat.closing) if chat else 0
    prompts = []
    for datum in (left, right):
        prompt = datum.tokens[: prompt_length(joined, datum)]
        bare = without_generation_prompt(prompt, chat.generation_prompts) if chat else None
        prompts.append(prompt[:bare])
    shorter = min(map(len, prompts))
    ahead = first_difference(*prompts)
    behind = first_difference(prompts[0][::-1], prompts[1][::-1])
    return ahead >= shorter or ahead + behind - frame >= SAME_QUESTION * (shorter - frame)


def check_pairs(joined: Joined) -> Iterator[Hit]:
    gathered, total, first_down = Gathered(), 0, 0
    paired = [(call, pairs_of(joined, call)) for call in joined.preference_calls]
    paired = [(call, pairs) for call, pairs in paired if pairs]
    for call, pairs in paired:
        decoder = joined.decoder(call)
        for up, down in pairs:
            total += 1
            first_down += up.number > down.number
            shared = first_difference(up.tokens, down.tokens)
            starts = [int(np.flatnonzero(d.active)[0]) + 1 for d in (up, down)]
            prompt = max(prompt_length(joined, d) for d in (up, down))
            if shared < min(starts) and shared < prompt:
                place = target_place(call, up, max(0, shared - 1), decoder)
                gathered.add("A15-prompts-differ", place)
    yield from gathered.hits(
        {
            "A15-prompts-differ": "in {n} of {total} pairs the two sequences differ before their "
            "answers: the prompts are not the same ids"
        },
        total,
    )
    if total and first_down == total:
        yield Hit(
            "A15-order",
            f"in all {total} pairs the first sequence is pushed down and the second up: are chosen "
            "and rejected exchanged?",
            (Place(call=paired[0][0].number, datum=0),),
        )
    for call, pairs in paired:
        if call.steps_before == 0 and not joined.trace.runs[call.run].source:
            yield from first_loss_hits(joined, call, pairs)
            break
    yield from reference_hits(joined, paired)


def prompt_length(joined: Joined, datum: Datum) -> int:
    """Tokens up to the last answer's beginning, by the chat template; the whole without one."""
    chat = joined.trace.chat_of_run(datum.call.run)
    if chat is None or not chat.header:
        return len(datum.tokens)
    turns = assistant_turns(datum.tokens, chat)
    return turns[-1][1] if turns else len(datum.tokens)


def first_loss_hits(joined: Joined, call: Call, pairs: list) -> Iterator[Hit]:
    """With policy and reference equal, every token of every pair weighs beta / 2 (over a common
    factor), because the sigmoid is 1/2 and the loss ln 2."""
    per_datum = [(d, np.abs(d.signal[d.signal != 0])) for pair in pairs for d in pair]
    sizes = np.array([float(np.median(weights)) for _, weights in per_datum])
    lengths = np.array([len(weights) for _, weights in per_datum])
    if np.ptp(sizes) <= SAME_SIZE * sizes.max():
        return
    products = sizes * lengths
    place = Place(call=call.number, datum=int(np.argmax(sizes)))
    if np.ptp(products) <= SAME_SIZE * products.max():
        yield Hit(
            "A15-length-mean",
            "on the first step the weight of a token is inverse to the length of its answer: "
            "log-probabilities are averaged where DPO sums them",
            (place,),
        )
        return
    yield Hit(
        "A15-first-loss",
        "before the first step policy and reference are equal, so all tokens must weigh the same "
        f"and the loss be ln 2 = 0.693; the largest weigh {sizes.max() / sizes.min():.2f} times "
        "the smallest",
        (place,),
    )


def reference_hits(joined: Joined, paired: list) -> Iterator[Hit]:
    """Where the reference's log-probabilities came from."""
    if not paired:
        return
    scored: Counter[str] = Counter()
    example: dict[str, Place] = {}
    forwards = {
        int(joined.hashes.of(np.append(d.inputs, d.targets[-1:]))[-1]): c
        for c in joined.trace.calls
        if c.kind == "score"
        for d in c.data
    }
    for call, pairs in paired:
        for datum in (d for pair in pairs for d in pair):
            key = int(joined.hashes.of(datum.tokens)[-1])
            requests = [r for r in joined.scores_by_hash.get(key, []) if r.started <= call.started]
            if any(is_untrained(joined, r, call.run) for r in requests):
                kind = "good"
            elif requests:
                kind = "trained"
            elif key in forwards:
                kind = "good" if forwards[key].steps_before == 0 else "trained"
            elif joined.trace.runs[call.run].source:
                continue  # resumed: the reference may have been scored by an earlier process
            else:
                kind = "unknown"
            scored[kind] += 1
            example.setdefault(kind, Place(call=call.number, datum=datum.number))
    total = sum(scored.values())
    if scored["trained"]:
        yield Hit(
            "A15-reference-trained",
            f"for {scored['trained']} of {plural(total, 'datum')} the reference was scored by "
            "weights that had already been trained",
            (example["trained"],),
        )
    if scored["unknown"] and (joined.scores or forwards):
        yield Hit(
            "A15-reference-ids",
            f"{scored['unknown']} of {plural(total, 'datum')} were never scored by a reference: "
            "what was scored has other ids",
            (example["unknown"],),
        )


def is_untrained(joined: Joined, request: Request, run: str) -> bool:
    sampler = request.sampler
    source = joined.trace.runs[run].source if run in joined.trace.runs else ""
    if not sampler.training_run:
        return True
    return sampler.step == 0 or (bool(source) and f"//{sampler.training_run}/" in source)


# -- A17: teachers ---------------------------------------------------------------------------------


def check_teacher(joined: Joined) -> Iterator[Hit]:
    """Distillation by policy losses: per-token advantages against a teacher's scores."""
    gathered, total = Gathered(), 0
    differences: dict[int, list[np.ndarray]] = {-1: [], 0: [], 1: []}
    given: dict[int, list[np.ndarray]] = {-1: [], 0: [], 1: []}
    example: Place | None = None
    for index, data in joined.trained.items():
        datum, sequence = data[0], joined.sequences[index]
        owned = np.flatnonzero((joined.match(datum).owner == index) & datum.active)
        if datum.logprobs is None or len(owned) < 2 or is_constant(datum.signal[owned]):
            continue
        if shift_of(datum) != "aligned":
            continue
        total += 1
        place = target_place(datum.call, datum, int(owned[0]), joined.decoder(datum.call))
        exact = exact_score(joined, datum, sequence)
        if exact is None:
            other = other_score(joined, sequence, datum)
            if other is None:
                continue
            rule, detail, where = explain_score(joined, sequence, other, place)
            if rule:
                gathered.add(rule, where, detail)
            if rule == "A17-scored-ids":
                continue
            exact = other, len(other.prompt) - len(sequence.tokens) - len(sequence.request.prompt)
        request, offset = exact
        example = example or place
        scores = request.prompt_logprobs
        assert scores is not None
        for shift in differences:
            wanted = owned + offset + shift
            known = (wanted >= 0) & (wanted < len(scores))
            mine = owned[known]
            differences[shift].append(scores[wanted[known]] - datum.logprobs[mine])
            given[shift].append(datum.signal[mine])
    yield from gathered.hits(
        {
            "A17-prompt-differs": "for {n} of {total} completions the teacher saw another prompt: "
            "{detail}",
            "A17-opening-differs": "for {n} of {total} completions the teacher's prompt ends in "
            "another opening of the answer: {detail}",
            "A17-scored-ids": "for {n} of {total} completions the teacher scored other ids than "
            "were sampled: {detail}",
        },
        total,
    )
    yield from advantage_hits(differences, given, example)


def exact_score(joined: Joined, datum: Datum, sequence: Sequence) -> tuple[Request, int] | None:
    """A scoring, by other weights than sampled, of the very sequence; and an offset of 0."""
    hashes = joined.hashes.of(datum.tokens)
    end = sequence.length
    for length in {min(end, len(datum.tokens)), len(datum.tokens)}:
        for request in reversed(joined.scores_by_hash.get(int(hashes[length]), [])):
            if request.started <= datum.call.started + CLOCK_SLACK_SECONDS and is_teacher(
                request, sequence
            ):
                return request, 0
    return None


def is_teacher(request: Request, sequence: Sequence) -> bool:
    return request.sampler.snapshot != sequence.request.sampler.snapshot


def other_score(joined: Joined, sequence: Sequence, datum: Datum) -> Request | None:
    """A scoring between sampling and training that ends in the same ids or the same text."""
    window = [
        r
        for r in joined.scores
        if sequence.request.finished - CLOCK_SLACK_SECONDS
        <= r.started
        <= datum.call.started + CLOCK_SLACK_SECONDS
        and not np.array_equal(r.prompt, datum.tokens)
    ]
    length = len(sequence.tokens)
    for request in window:
        if len(request.prompt) > length and np.array_equal(
            request.prompt[-length:], sequence.tokens
        ):
            return request
    decoder = joined.decoders.of(sequence.request.sampler.folder)
    text = decoder.bare_text(sequence.tokens)
    for request in window:
        if text and decoder.bare_text(request.prompt).endswith(text):
            return request
    return None


def explain_score(
    joined: Joined, sequence: Sequence, score: Request, place: Place
) -> tuple[str, str, Place]:
    """(rule, detail, place) for a scoring that is not of the student's own sequence.

    Another prompt is what self-distillation is about, as long as the teacher is the student's own
    base and both end in the same opening of the answer.
    """
    length = len(sequence.tokens)
    student, decoder = sequence.request.prompt, joined.decoders.of(sequence.request.sampler.folder)
    if not np.array_equal(score.prompt[-length:], sequence.tokens):
        return "A17-scored-ids", "the same text was encoded again", place
    teacher = score.prompt[:-length]
    chat = joined.trace.chats.get(sequence.request.sampler.folder)
    variants = chat.generation_prompts if chat else []
    openings = [opening_of(p, variants) for p in (student, teacher)]
    if openings[0] != openings[1]:
        shown = " against ".join(repr(decoder.text(ids)) for ids in openings)
        return "A17-opening-differs", f"{shown} (student against teacher)", place
    if score.sampler.base_model == sequence.request.sampler.base_model:
        return "", "", place
    differs = first_difference(student, teacher)
    detail = f"they differ from token {differs} on: "
    detail += decoder.around(teacher, min(differs, len(teacher) - 1))
    return "A17-prompt-differs", detail, place


def opening_of(prompt: np.ndarray, variants: list[list[int]]) -> list[int]:
    """The generation prompt that a prompt ends in, or its last three tokens."""
    length = without_generation_prompt(prompt, variants)
    return prompt[length if length is not None else -3 :].tolist()


def is_per_token(advantages: list[np.ndarray]) -> bool:
    """Whether advantages differ within completions more than between them: no outcome reward."""
    every = np.concatenate(advantages)
    within = float(np.mean([a.var() for a in advantages]))
    return within > 0.5 * float(every.var())


def advantage_hits(
    differences: dict[int, list[np.ndarray]],
    given: dict[int, list[np.ndarray]],
    example: Place | None,
) -> Iterator[Hit]:
    """Per-token advantages must follow teacher - student at the same position."""
    correlations = {}
    for shift, parts in differences.items():
        left = np.concatenate(parts) if parts else np.empty(0)
        right = np.concatenate(given[shift]) if parts else np.empty(0)
        if len(left) < ENOUGH_TOKENS or not left.std() or not right.std():
            return
        correlations[shift] = float(np.corrcoef(left, right)[0, 1])
    straight = correlations[0]
    places = (example,) if example else ()
    best = max((-1, 1), key=lambda shift: abs(correlations[shift]))
    if straight < -CLEAR_CORRELATION:
        yield Hit(
            "A17-sign",
            f"advantages follow student - teacher (correlation {straight:.3f} with teacher - "
            "student): the student is pushed away from the teacher",
            places,
        )
    elif correlations[best] > CLEAR_CORRELATION and straight < correlations[best] - 0.01:
        direction = "later" if best == 1 else "earlier"
        yield Hit(
            "A17-shifted",
            f"advantages follow the teacher's log-probabilities one position {direction} "
            f"(correlation {correlations[best]:.3f}, at the right position {straight:.3f})",
            places,
        )
    elif abs(straight) < UNRELATED and is_per_token(given[0]):
        yield Hit(
            "A17-unrelated",
            "the teacher scored the sampled ids, yet the advantages do not follow teacher - "
            f"student (correlation {straight:.2f})",
            places,
        )
