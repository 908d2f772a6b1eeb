"""Checks of the loop as a whole: steps, saves, resumes, waiting, and what the server refused."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from audit.findings import Hit, Place, plural
from audit.joins import Joined
from audit.rules_rollouts import broken_turns
from audit.trace import Call, Request, Resume, Step
from trio_local.recording import prompt_mark

LEARNING_RATE_HIGH = 1e-2
# Below this, whether a call overlapped another is a matter of chance.
MEASURABLE_SECONDS = 0.02
SHARE_OF_STEPS = 0.8
UNEVEN_WEIGHT = 1.05
SAME_DATA_SHARE = 0.5
FEW_PICTURES = 4


# -- A10 and A22: gradients, steps, saves ----------------------------------------------------------


def check_gradients(joined: Joined) -> Iterator[Hit]:
    trace = joined.trace
    # Of a recording that breaks off, what is missing may come later.
    for run, calls in trace.unapplied.items() if trace.is_complete else ():
        ended = {event["run"] for event in trace.failed_events}
        if run in ended:
            continue
        count = sum(1 for step in trace.steps if step.run == run)
        seen = (
            "no optim_step was ever called"
            if not count
            else f"{plural(len(calls), 'forward_backward call')} after the last of "
            f"{plural(count, 'optim_step')} had no effect"
        )
        yield Hit("A10-not-applied", seen, (Place(call=calls[0].number),))
    empty = [step for step in trace.steps if not step.calls]
    if empty:
        yield Hit(
            "A10-empty-step",
            f"{len(empty)} of {len(trace.steps)} optimiser steps had no forward_backward before "
            f"them (the first is step {empty[0].number})",
        )
    without = [s for s in trace.steps if s.calls and s.metrics.get("grad_norm") == 0.0]
    if without:
        yield Hit(
            "A10-zero-gradient",
            f"{len(without)} of {len(trace.steps)} optimiser steps had a gradient of exactly 0 "
            f"(the first is step {without[0].number})",
        )
    rates = [step.params.get("learning_rate", 0.0) for step in trace.steps]
    if rates and not any(rates):
        yield Hit("A22-learning-rate", "the learning rate is 0 in every step")
    elif not all(rates[1:-1]):
        zero = [number for number, rate in enumerate(rates, start=1) if not rate]
        yield Hit(
            "A22-learning-rate-gaps",
            f"the learning rate is 0 at {len(zero)} of {len(rates)} steps, one of them {zero[-1]}",
        )
    if rates and max(rates) > LEARNING_RATE_HIGH:
        yield Hit("A22-learning-rate-high", f"the learning rate is {max(rates):g}")


def check_nothing_trained(joined: Joined) -> Iterator[Hit]:
    trace = joined.trace
    if not trace.runs or trace.steps or any(call.is_backward for call in trace.calls):
        return
    groups = joined.groups
    if not groups:
        return
    largest = max(len(group.members) for group in groups)
    reason = "was every group degenerate?" if largest > 1 else "a group of one has no baseline"
    yield Hit(
        "A10-nothing-trained",
        f"{plural(len(groups), 'prompt')} with up to {plural(largest, 'completion')} were sampled "
        f"and no training call was made: {reason}",
    )


def check_saves(joined: Joined) -> Iterator[Hit]:
    trace = joined.trace
    for run in trace.runs if trace.is_complete else ():
        steps = [s.number for s in trace.steps if s.run == run]
        if not steps:
            continue
        kept = [s for s in trace.saves if s.run == run and not s.is_temporary]
        if any(r.uri.split("/")[2] == run for r in trace.resumes):
            continue  # a later run went on from here and is looked at itself
        if not kept:
            yield Hit(
                "A10-not-saved",
                f"{plural(len(steps), 'optimiser step')} and no save_state or "
                "save_weights_for_sampler: nothing is left to load",
            )
            continue
        if max(s.step for s in kept) < max(steps):
            yield Hit(
                "A10-last-steps-not-saved",
                f"the last save is of step {max(s.step for s in kept)}, training went on to step "
                f"{max(steps)}",
            )
        elif all(s.ttl_seconds is not None for s in kept if s.step == max(steps)):
            seconds = max(s.ttl_seconds or 0 for s in kept if s.step == max(steps))
            yield Hit("A10-save-expires", f"the final save expires after {seconds:,} seconds")


def picture_hits(joined: Joined) -> Iterator[Hit]:
    """Pictures that all have one size where they are trained on and another where they are not."""
    sizes: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    pictures: dict[bool, set[int]] = {True: set(), False: set()}
    for request in joined.trace.requests:
        is_training = request.number in joined.trained_requests
        found, counts = np.unique(request.prompt[request.prompt < 0], return_counts=True)
        pictures[is_training].update(found.tolist())
        sizes[is_training].update(counts.tolist())
    if min(map(len, pictures.values())) < FEW_PICTURES or max(map(len, sizes.values())) > 1:
        return
    (trained,), (other,) = sizes[True], sizes[False]
    if trained != other:
        yield Hit(
            "A18-picture-size",
            f"all {len(pictures[True])} pictures of training completions have {trained} visual "
            f"tokens, all {len(pictures[False])} of other requests {other}",
        )


def check_failures(joined: Joined) -> Iterator[Hit]:
    trace = joined.trace
    if trace.failed_events:
        event = trace.failed_events[0]
        yield Hit(
            "A10-call-failed",
            f"{plural(len(trace.failed_events), 'training call')} failed; the first, "
            f"{event['type'].rpartition('.')[2]}: {event['error']['message']}",
        )
    refused = [r for r in trace.refused if r["status"] not in (401, 404, 503) and not fault(r)]
    if refused:
        first = refused[0]
        yield Hit(
            "A18-refused",
            f"{plural(len(refused), 'request')} refused; the first, {first['status']} "
            f"{first['code']}: {first.get('message', '')}",
        )
    yield from picture_hits(joined)
    injected = [r for r in trace.refused if fault(r)]
    if injected:
        yield Hit(
            "A19-fault",
            f"the faults {', '.join(trace.header['faults'])} struck "
            f"{plural(len(injected), 'time')}; the first: {injected[0]['code']}",
        )
    if not trace.is_complete:
        yield Hit(
            "A20-incomplete", "the recording has no end: it is being written, or was broken off"
        )
    dropped = trace.totals.get("dropped_records")
    if dropped:
        yield Hit("A20-incomplete", f"the recording is full: {dropped:,} later records are missing")


def fault(record: dict) -> bool:
    return str(record.get("message", "")).startswith("fault:")


# -- A12 and A13: calls per step, waiting ----------------------------------------------------------


def divisor_of(call: Call) -> int:
    """What a call is divided by under the local default reduction."""
    name = "total_advantage_tokens" if call.loss == "dro" else "total_active_tokens"
    return max(1, call.totals[name])


def largest_set(calls: list[Call]) -> list[Call]:
    """The calls of the kind and loss that occurs most often."""
    sets: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        sets[call.kind, call.loss].append(call)
    return max(sets.values(), key=len, default=[])


def check_calls_per_step(joined: Joined) -> Iterator[Hit]:
    # Calls of different losses cannot be one.
    of_one_loss = {step: largest_set(step.calls) for step in joined.trace.steps}
    several = [step for step, calls in of_one_loss.items() if len(calls) > 1]
    if not several:
        return
    most = max(several, key=lambda step: len(of_one_loss[step]))
    calls = of_one_loss[most]
    divisors = [divisor_of(call) for call in calls]
    spread = max(divisors) / min(divisors)
    place = Place(call=calls[0].number)
    seen = (
        f"{len(several)} of {len(joined.trace.steps)} optimiser steps gather several "
        f"forward_backward calls (step {most.number}: {len(calls)})"
    )
    if spread > UNEVEN_WEIGHT:
        yield Hit(
            "A12-uneven-calls",
            f"{seen}; each call is averaged by itself, so in this step a token of the smallest "
            f"call weighs {spread:.2f} times one of the largest",
            (place,),
        )
    else:
        yield Hit("A13-many-calls", seen, (place,))


def check_waiting(joined: Joined) -> Iterator[Hit]:
    """optim_step submitted only after its forward_backward had ended, step after step."""
    timed: list[tuple[Step, Call]] = []
    for step in joined.trace.steps:
        if step.calls and step.calls[-1].kind != "custom":
            call = step.calls[-1]
            if call.finished - call.started >= MEASURABLE_SECONDS:
                timed.append((step, call))
    late = [(s, c) for s, c in timed if s.started > c.finished]
    if len(timed) >= 2 and len(late) >= SHARE_OF_STEPS * len(timed):
        yield Hit(
            "A13-waits-before-step",
            f"in {len(late)} of {len(timed)} steps optim_step was submitted after the result of "
            "forward_backward had been waited for: one round trip more a step",
            (Place(call=late[0][1].number),),
        )


def check_sequential_sampling(joined: Joined) -> Iterator[Hit]:
    """First turns on one sampler that never overlap in time."""
    by_sampler: dict[str, list[Request]] = defaultdict(list)
    later_turns = {request.number for request, _, _ in broken_turns(joined)}
    conversations: dict[str, set[int]] = defaultdict(set)
    for request in joined.trace.requests:
        parent = joined.parent_of[request.number]
        if parent >= 0:
            # Later turns of one conversation wait for each other; those of several need not.
            name = f"turn {request.sampler.id}"
            by_sampler[name].append(request)
            conversations[name].add(joined.first_turn(parent))
        elif request.number not in later_turns:
            kind = "score" if request.is_score else "sample"
            by_sampler[f"{kind} {request.sampler.id}"].append(request)
    slow: dict[str, int] = defaultdict(int)
    all_of: dict[str, int] = defaultdict(int)
    for name, requests in by_sampler.items():
        kind, _, sampler = name.partition(" ")
        # Evaluations beside a training loop are another matter.
        if kind != "score" and joined.training_samplers and sampler not in joined.training_samplers:
            continue
        if kind == "turn" and len(conversations[name]) < 3:
            continue
        if len(requests) < (3 if joined.training_samplers else 4):
            continue
        all_of[kind] += 1
        ordered = sorted(requests, key=lambda r: r.started)
        overlaps = sum(b.started < a.finished for a, b in zip(ordered, ordered[1:], strict=False))
        slow[kind] += overlaps == 0
    for kind, count in slow.items():
        if count and count >= SHARE_OF_STEPS * all_of[kind]:
            what = {"score": "compute_logprobs calls", "turn": "later turns"}.get(kind, "prompts")
            yield Hit(
                "A13-one-at-a-time",
                f"on {count} of {plural(all_of[kind], 'sampling client')} the {what} were sent one "
                "after the other, each waiting for the one before",
            )


# -- A14: resume -----------------------------------------------------------------------------------


def check_resume(joined: Joined) -> Iterator[Hit]:
    trace = joined.trace
    for resume in trace.resumes:
        steps = [s for s in trace.steps if s.run == resume.run]
        if resume.type != "TRAINING" or not resume.step or not steps:
            continue
        if not resume.with_optimizer:
            yield Hit(
                "A14-optimizer-lost",
                f"{resume.uri} (step {resume.step}) was resumed without its optimiser: Adam's "
                "moments began at zero",
            )
        yield from repeated_data(resume, steps)
        yield from step_number(joined, resume)


def repeated_data(resume: Resume, steps: list[Step]) -> Iterator[Hit]:
    """The first batches after a resume against those trained before it."""
    old = [set(marks) for marks in resume.history if marks]
    if len({frozenset(marks) for marks in old}) < 2:
        return  # every step sees the same data: nothing can be repeated
    if sum(map(len, old)) > len(set().union(*old)):
        return  # the data had come round before the save: seeing them again means nothing
    new = {prompt_mark(d.inputs, d.signal) for call in steps[0].calls for d in call.data}
    if not new:
        return
    usual = float(np.median([len(marks) for marks in old]))
    for repeated in (0, len(old) - 1):
        smaller = min(len(new), len(old[repeated]))
        if smaller < min(2, usual) or len(new & old[repeated]) <= SAME_DATA_SHARE * smaller:
            continue
        number = resume.step - len(old) + repeated + 1
        yield Hit(
            "A14-data-repeated",
            f"the first batch after the resume at step {resume.step} is that of step {number}: "
            "data are trained again",
        )
        return


def step_number(joined: Joined, resume: Resume) -> Iterator[Hit]:
    """Numbers in checkpoint names before and after."""
    before = re.findall(r"\d+", resume.uri.rpartition("/")[2])
    saves = [s for s in joined.trace.saves if s.run == resume.run and not s.is_temporary]
    after = re.findall(r"\d+", saves[0].uri.rpartition("/")[2]) if saves else []
    is_a_step = before and int(before[-1]) == resume.step
    if is_a_step and after and int(after[-1]) <= resume.step < saves[0].step:
        yield Hit(
            "A14-step-reset",
            f"resumed from {resume.uri.rpartition('/')[2]!r}, the next save is "
            f"{saves[0].uri.rpartition('/')[2]!r}: the step was counted from the beginning",
        )
