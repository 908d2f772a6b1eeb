"""Checks of sampling: which weights, which parameters, which groups, which stops."""

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from audit.findings import Hit, Place, plural, target_place
from audit.joins import Group, Joined, hits
from audit.rules_tokens import first_difference, is_constant, shift_of
from audit.trace import Call, Datum, Request, Sampler, Sequence

RATIO_WARNING, RATIO_ERROR = 0.02, 0.1
TRUNCATED_SHARE = 0.3
DEGENERATE_SHARE = 0.9
# A KL term, or a clip at the edge, moves the sums of a custom loss a little.
CUSTOM_TOLERANCE = 0.05
# Identical completions less likely than exp(-20) by chance are no chance.
IMPROBABLE = -20.0


def request_place(joined: Joined, request: Request, sequence: Sequence | None = None) -> Place:
    """A place that shows the end of a prompt and the beginning of a completion."""
    decoder = joined.decoders.of(request.sampler.folder)
    tokens, at = request.prompt, len(request.prompt) - 1
    if sequence is not None and len(sequence.tokens):
        tokens, at = np.concatenate([request.prompt, sequence.tokens]), len(request.prompt)
    return Place(request=request.number, text=decoder.around(tokens, max(0, at)))


# -- A05: which weights sampled --------------------------------------------------------------------


def check_lag(joined: Joined) -> Iterator[Hit]:
    """Optimiser steps that had ended when a training completion was asked for, and that its
    weights do not know."""
    lags: dict[int, int] = {}
    foreign: set[str] = set()
    snapshots: dict[str, set[int]] = defaultdict(set)
    first_request: dict[int, Request] = {}
    for index, data in joined.trained.items():
        request, run = joined.sequences[index].request, data[0].call.run
        sampler = request.sampler
        known = sampler.step
        if sampler.training_run != run:
            if not is_start_of(joined, run, sampler):
                foreign.add(sampler.base_model)
                continue
            known = joined.steps_finished(run, 0.0)
        now = joined.steps_finished(run, request.started)
        lags[request.number] = max(0, now - known)
        first_request.setdefault(lags[request.number], request)
        snapshots[sampler.snapshot].add(now)
    if foreign:
        yield Hit(
            "A05-foreign",
            f"training completions were sampled by other weights than the run's: "
            f"{', '.join(sorted(foreign))}",
        )
    if not lags:
        return
    worst = max(lags.values())
    if not worst:
        return
    counts = Counter(lags.values())
    histogram = ", ".join(f"lag {lag}: {counts[lag]}" for lag in sorted(counts))
    place = request_place(joined, first_request[worst])
    reused = max(len(steps) for steps in snapshots.values())
    sampled_at = set().union(*snapshots.values())
    never_renewed = reused == len(sampled_at) > 1
    if worst >= 2 or never_renewed:
        yield Hit(
            "A05-stale",
            f"one sampling client was used at {reused} different optimiser steps; requests by the "
            f"number of steps they were behind: {histogram}",
            (place,),
        )
    else:
        yield Hit(
            "A05-lag",
            f"completions were sampled by weights one optimiser step old ({histogram})",
            (place,),
        )


def check_trained_again(joined: Joined) -> Iterator[Hit]:
    """A call that holds completions of an earlier step beside new ones: a list never emptied.

    Several passes over one batch hold no new ones.
    """
    first_step: dict[int, int] = {}
    again: list[tuple[Datum, int]] = []
    for call in joined.policy_calls:
        steps = [
            (datum, index, first_step.setdefault(index, call.steps_before))
            for datum in call.data
            for index in np.unique(joined.match(datum).owner[datum.active])
            if index >= 0
        ]
        if any(step == call.steps_before for _, _, step in steps):
            again += [(datum, step) for datum, _, step in steps if step < call.steps_before]
    if again:
        datum, step = again[0]
        yield Hit(
            "A05-trained-again",
            f"{plural(len(again), 'completion')} of earlier steps are trained again beside new "
            f"ones (one of step {step + 1} at step {datum.call.steps_before + 1})",
            (Place(call=datum.call.number, datum=datum.number),),
        )


def check_old_completions(joined: Joined) -> Iterator[Hit]:
    """Supervised training on own samples (best of n) that are asked for from old weights."""
    lags: dict[int, int] = {}
    asked_at: set[int] = set()
    for call in joined.supervised_calls:
        for datum in call.data:
            for index in joined.match(datum).turns:
                request = joined.sequences[index].request
                if request.params.get("temperature", 1.0) == 0:
                    continue
                now = joined.steps_finished(call.run, request.started)
                known = request.sampler.step if request.sampler.training_run == call.run else 0
                lags[request.number] = now - known
                asked_at.add(now)
    if lags and max(lags.values()) >= 2 and len(asked_at) > 1:
        yield Hit(
            "A05-old-completions",
            f"training completions were asked for at {len(asked_at)} different optimiser steps, "
            f"from weights up to {max(lags.values())} steps old",
        )


def is_start_of(joined: Joined, run: str, sampler: Sampler) -> bool:
    """Whether a sampling client has the weights that a training run began with."""
    known = joined.trace.runs.get(run)
    if known is None or sampler.base_model != known.base_model:
        return False
    if not sampler.training_run:
        return not known.source
    return f"//{sampler.training_run}/" in known.source


# -- A06: the ratio on fresh data ------------------------------------------------------------------


def check_ratio(joined: Joined) -> Iterator[Hit]:
    """|log ratio| of targets in the first call that trains on them, right after sampling."""
    differences: list[np.ndarray] = []
    place: Place | None = None
    worst = 0.0
    for call in joined.policy_calls:
        if call.kind != "policy":
            continue
        for datum in call.data:
            match = joined.match(datum)
            fresh = [
                i
                for i in match.turns
                if i in joined.trained
                and joined.trained[i][0] is datum
                and joined.sequences[i].request.sampler.training_run == call.run
                and joined.sequences[i].request.sampler.step == call.steps_before
            ]
            if not fresh or shift_of(datum) != "aligned":
                continue
            assert datum.logprobs is not None
            positions = datum.active & np.isin(match.owner, fresh)
            if not positions.any():
                continue
            delta = np.abs(datum.served - datum.logprobs)[positions]
            differences.append(delta)
            if float(delta.max()) > worst:
                worst = float(delta.max())
                at = int(np.flatnonzero(positions)[int(delta.argmax())])
                place = target_place(call, datum, at, joined.decoder(call))
    if not differences:
        return
    every = np.concatenate(differences)
    mean = float(every.mean())
    if mean > RATIO_WARNING:
        rule = "A06-ratio" if mean > RATIO_ERROR else "A06-ratio-drift"
        yield Hit(
            rule,
            f"on data sampled by the very weights that are trained, |log ratio| is {mean:.3f} on "
            f"average and {worst:.2f} at most (median {np.median(every):.3f}); it must be 0",
            (place,) if place else (),
        )


# -- A07 and A08: sampling parameters --------------------------------------------------------------


def check_parameters(joined: Joined) -> Iterator[Hit]:
    wrong: dict[str, list[Request]] = defaultdict(list)
    for request in joined.training_requests:
        params = request.params
        if params.get("temperature", 1.0) != 1.0:
            wrong["A07-temperature"].append(request)
        if (params.get("top_p") or 1.0) < 1.0 or (params.get("top_k") or -1) > 0:
            wrong["A07-filter"].append(request)
    for rule, requests in wrong.items():
        params = requests[0].params
        shown = (
            f"temperature {params.get('temperature')}"
            if rule == "A07-temperature"
            else f"top_p {params.get('top_p', 1)}, top_k {params.get('top_k', -1)}"
        )
        yield Hit(
            rule,
            f"{plural(len(requests), 'training request')} of {len(joined.training_requests)} "
            f"sampled with {shown}",
            tuple(request_place(joined, r) for r in requests[:3]),
        )


def check_seeds(joined: Joined) -> Iterator[Hit]:
    samplers_of: dict[int, set[str]] = defaultdict(set)
    example: dict[int, Request] = {}
    for request in joined.training_requests:
        seed = request.params.get("seed")
        if seed is not None:
            samplers_of[seed].add(request.sampler.snapshot)
            example.setdefault(seed, request)
    repeated = [seed for seed, samplers in samplers_of.items() if len(samplers) > 1]
    if repeated:
        seed = repeated[0]
        yield Hit(
            "A08-seed",
            f"seed {seed} was given in {len(samplers_of[seed])} optimiser steps: a question asked "
            "again gets the same random numbers",
            (request_place(joined, example[seed]),),
        )
    for group in joined.groups:
        sequences = [joined.sequences[i] for i in group.members]
        sequences = [s for s in sequences if not s.is_forced]
        if len(sequences) < 2:
            continue
        copies = Counter(s.tokens.tobytes() for s in sequences)
        tokens, count = copies.most_common(1)[0]
        likely = next(s for s in sequences if s.tokens.tobytes() == tokens)
        chance = (count - 1) * float(likely.logprobs.sum())
        if count >= 2 and chance < IMPROBABLE:
            yield Hit(
                "A08-duplicates",
                f"{count} of {len(sequences)} completions of one group are identical; the chance "
                f"of that is about exp({chance:.0f})",
                (request_place(joined, likely.request, likely),),
            )
            return


# -- A09: groups -----------------------------------------------------------------------------------


def check_groups(joined: Joined) -> Iterator[Hit]:
    per_step = [g for g in joined.groups if g.advantages or trained_around(joined, g)]
    if not per_step or not advantages_are_constant(joined):
        return
    many = [g for g in per_step if len(g.members) > 1 and not are_later_turns(joined, g)]
    at_once = [g for g in per_step if is_first_wave(joined, g)]
    alone = [g for g in at_once if len(g.members) == 1]
    if len(alone) > 0.8 * len(at_once):
        if any(g.advantages for g in alone):
            yield Hit(
                "A09-singletons",
                f"{len(alone)} of {len(at_once)} prompts have a single completion: there is "
                "nothing to compare it with",
            )
        return
    if not many:
        return
    yield from group_sum_hits(joined, many)
    first_third = sorted(many, key=lambda g: g.step)[: max(1, len(many) // 3)]
    share = float(np.mean([g.is_degenerate for g in first_third]))
    if share >= DEGENERATE_SHARE and len(first_third) >= 4:
        yield Hit(
            "A09-degenerate",
            f"in the first third of the run {share:.0%} of {len(first_third)} groups have no "
            "advantage that differs from 0: all their completions got the same reward",
        )


def check_custom_groups(joined: Joined) -> Iterator[Hit]:
    """On fresh data a custom policy loss has ratio 1, so its gradients cancel over a group as
    advantages do, per token or per completion."""
    bad: list[Group] = []
    tested, has_baseline = 0, False
    silent = silent_completions(joined)
    for group in joined.groups:
        calls = {joined.trained[m][0].call for m in group.members if m in joined.trained}
        fresh = all(
            c.kind == "custom"
            and c.steps_before == joined.sequences[group.members[0]].request.sampler.step
            for c in calls
        )
        if not calls or not fresh or len(group.members) < 2 or group.is_degenerate:
            continue
        if not are_all_trained(joined, group, calls, silent):
            continue
        tested += 1
        has_baseline |= min(group.advantages.values()) < 0
        if not sums_to_zero(joined, group, CUSTOM_TOLERANCE):
            bad.append(group)
    if has_baseline and len(bad) > tested / 3:
        values = ", ".join(f"{bad[0].advantages.get(m, 0.0):.3g}" for m in bad[0].members[:8])
        yield Hit(
            "A16-group-sum",
            f"in {len(bad)} of {tested} groups the gradients of the custom loss do not cancel "
            f"(one group, mean per token: {values})",
            (request_place(joined, joined.sequences[bad[0].members[0]].request),),
        )


def wording(sequence: Sequence) -> tuple[bytes, bytes]:
    """What a completion has in common with its twins."""
    return sequence.request.prompt.tobytes(), sequence.tokens.tobytes()


def silent_completions(joined: Joined) -> dict[int, Counter[tuple[bytes, bytes]]]:
    """By custom policy call, the completions that its data without any gradient end with."""
    found: dict[int, Counter[tuple[bytes, bytes]]] = {}
    for call in joined.policy_calls:
        if call.kind == "custom":
            ends = [joined.match(d).turns[-1:] for d in call.data if not d.signal.any()]
            found[call.number] = Counter(wording(joined.sequences[i]) for end in ends for i in end)
    return found


def are_all_trained(
    joined: Joined,
    group: Group,
    calls: set[Call],
    silent: dict[int, Counter[tuple[bytes, bytes]]],
) -> bool:
    """Whether every completion of a group is in the data of the calls, with a gradient or without:
    a wrong ratio is clipped. What was cut off may be without one on purpose."""
    rest = [joined.sequences[m] for m in group.members if m not in joined.used]
    if any(sequence.stop_reason != "stop" for sequence in rest):
        return False
    sent = sum((silent[call.number] for call in calls), Counter[tuple[bytes, bytes]]())
    return Counter(map(wording, rest)) <= sent


def is_first_wave(joined: Joined, group: Group) -> bool:
    """Whether a group was asked for before any answer of its sampling client: no later turn."""
    request = joined.sequences[group.members[0]].request
    return request.started < joined.first_answer[request.sampler.id]


def are_later_turns(joined: Joined, group: Group) -> bool:
    """Whether a group is no group but later turns whose prompts happen to be alike: each asked for
    alone, behind an earlier answer. They carry their conversations' advantages."""
    requests = [joined.sequences[member].request for member in group.members]
    chat = joined.trace.chats.get(requests[0].sampler.folder)
    if is_first_wave(joined, group) or any(len(r.sequences) > 1 for r in requests) or not chat:
        return False
    header, prompt = np.array(chat.header, np.int32), requests[0].prompt
    if not 0 < len(header) <= len(prompt):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(prompt, len(header))
    return int((windows == header).all(axis=1).sum()) > 1


def trained_around(joined: Joined, group: Group) -> bool:
    """A group of a sampler that also sampled trained completions: its own were dropped."""
    sampler = joined.sequences[group.members[0]].request.sampler.id
    return any(r.sampler.id == sampler for r in joined.training_requests)


def advantages_are_constant(joined: Joined) -> bool:
    """Whether advantages are per completion (GRPO) and not per token (distillation)."""
    constant = [
        is_constant(d.signal[(joined.match(d).owner == i) & d.active])
        for i, data in joined.trained.items()
        for d in data[:1]
        if ((joined.match(d).owner == i) & d.active).any() and d.call.kind == "policy"
    ]
    return bool(constant) and float(np.mean(constant)) >= 0.8


def group_sum_hits(joined: Joined, groups: list[Group]) -> Iterator[Hit]:
    """Advantages against the mean of a group add up to zero over the group."""
    live = [g for g in groups if not g.is_degenerate]
    bad = [
        g
        for g in live
        if not sums_to_zero(joined, g)
        # A member may be missing only because its datum was not recognised, which A02 says.
        and not (joined.has_unmatched_data and len(g.advantages) < len(g.members))
        and not only_cut_are_missing(joined, g)
    ]
    if not bad:
        return
    example = max(bad, key=lambda g: len(g.advantages))
    total = sum(example.advantages.values())
    place = request_place(joined, joined.sequences[example.members[0]].request)
    shown = ", ".join(f"{example.advantages.get(m, 0.0):.3g}" for m in example.members[:8])
    counted = f"{len(bad)} of {len(live)} groups"
    values = [v for g in live for v in g.advantages.values()]
    if min(values) >= 0:
        yield Hit(
            "A09-no-baseline",
            f"no advantage is negative: {counted} have no baseline (one group: {shown})",
            (place,),
        )
        return
    order = wrong_order(groups) if len(bad) > len(live) / 2 else None
    if order:
        yield Hit(
            "A09-order",
            f"advantages add up to 0 over {order}, not over the completions of one prompt (one "
            f"group: {shown})",
            (place,),
        )
    elif len(bad) > len(live) / 2 and batch_sums_are_zero(live):
        yield Hit(
            "A09-batch-baseline",
            f"advantages of {counted} do not add up to 0 over the group, but over the batch (one "
            f"group: {shown})",
            (place,),
        )
    else:
        missing = len(example.members) - len(example.advantages)
        dropped = f"; {missing} of {len(example.members)} were not trained" if missing else ""
        yield Hit(
            "A09-group-sum",
            f"advantages of {counted} do not add up to 0: one group has {shown}, sum {total:.3g}"
            f"{dropped}",
            (place,),
        )


def only_cut_are_missing(joined: Joined, group: Group) -> bool:
    """Overlong filtering: cut completions count in the mean and are not trained."""
    missing = [joined.sequences[m] for m in group.members if m not in group.advantages]
    return bool(missing) and all(s.stop_reason == "length" for s in missing)


def sums_to_zero(joined: Joined, group: Group, tolerance: float = 0.01) -> bool:
    """Whether the group's advantages add up to zero, per completion or per token."""
    values = np.array([group.advantages.get(m, 0.0) for m in group.members])
    lengths = np.array([len(joined.sequences[m].tokens) for m in group.members])
    scale = float(np.abs(values).max())
    products = values * lengths
    by_completion = abs(float(values.sum())) <= tolerance * scale
    by_token = abs(float(products.sum())) <= tolerance * float(np.abs(products).max())
    return by_completion or by_token


def matrices(groups: list[Group]) -> Iterator[np.ndarray]:
    """Advantages [groups, completions] of each step whose groups have one size."""
    by_step: dict[int, list[Group]] = defaultdict(list)
    for group in groups:
        by_step[group.step].append(group)
    for of_step in by_step.values():
        if len({len(g.members) for g in of_step}) == 1 and len(of_step) > 1:
            yield np.array([[g.advantages.get(m, 0.0) for m in g.members] for g in of_step])


def wrong_order(groups: list[Group]) -> str | None:
    """Another way of cutting a step's flat list into groups under which the sums are zero."""
    found = []
    for matrix in matrices(groups):
        scale = 0.01 * float(np.abs(matrix).max())
        count, size = matrix.shape
        flat = matrix.reshape(-1)
        if (np.abs(matrix.sum(axis=0)) <= scale).all():
            found.append("completions with the same number in different groups")
        elif (np.abs(flat.reshape(size, count).sum(axis=0)) <= scale).all() and count != size:
            found.append("every n-th completion of the flat list")
        elif (np.abs(flat.reshape(size, count).sum(axis=1)) <= scale).all() and count != size:
            found.append("blocks of another length than the groups have")
        else:
            return None
    return found[0] if found else None


def batch_sums_are_zero(groups: list[Group]) -> bool:
    by_step: dict[int, list[float]] = defaultdict(list)
    for group in groups:
        by_step[group.step] += group.advantages.values()
    return all(abs(sum(v)) <= 0.01 * max(map(abs, v)) for v in by_step.values() if v)


# -- A11: stops ------------------------------------------------------------------------------------


def check_truncation(joined: Joined) -> Iterator[Hit]:
    """Share of training completions that ended at max_tokens, in the first third of the run."""
    sampled = joined.rollouts[: max(1, len(joined.rollouts) // 3)]
    cut = [s for s in sampled if s.stop_reason == "length"]
    if len(sampled) >= 8 and len(cut) / len(sampled) > TRUNCATED_SHARE:
        limit = cut[0].request.params.get("max_tokens")
        yield Hit(
            "A11-truncated",
            f"{len(cut)} of the first {len(sampled)} training completions were cut off at "
            f"max_tokens {limit}: they cannot hold a final answer",
            (request_place(joined, cut[0].request, cut[0]),),
        )


# -- A21: turns ------------------------------------------------------------------------------------


def check_turns(joined: Joined) -> Iterator[Hit]:
    """Later prompts that do not go on exactly where a completion ended."""
    if not joined.training_samplers:
        return
    broken = broken_turns(joined)
    later = len(broken) + sum(
        joined.parent_of[r.number] >= 0 for r in joined.trace.requests if not r.is_score
    )
    own_data = {
        joined.sequences[i].request.number
        for i, data in joined.trained.items()
        if not any((d.active & (joined.match(d).owner < 0)).any() for d in data)
    }
    if any(request.number in own_data for request, _, _ in broken):
        return  # one datum a turn, each trained behind its own prompt
    if broken:
        request, sequence, differs = broken[0]
        decoder = joined.decoders.of(request.sampler.folder)
        at = min(differs, len(request.prompt) - 1)
        yield Hit(
            "A21-not-extended",
            f"{plural(len(broken), 'later turn')} of {later} do not begin with the previous prompt "
            "and the sampled ids",
            (Place(request=request.number, text=decoder.around(request.prompt, at)),),
        )


def broken_turns(joined: Joined) -> list[tuple[Request, Sequence, int]]:
    """(request, the completion it was meant to continue, where they part) of later turns that
    hold an earlier prompt and another history than was sampled."""
    starts: dict[int, list[Request]] = defaultdict(list)
    for request in joined.trace.requests:
        chat = joined.trace.chats.get(request.sampler.folder)
        if chat and chat.header and not request.is_score:
            bare = without_generation_prompt(request.prompt, chat.generation_prompts)
            if bare is not None:
                opened = np.append(request.prompt[:bare], np.array(chat.header, np.int32))
                starts[int(joined.hashes.of(opened)[-1])].append(request)
    known = np.array(sorted(starts), np.uint64)
    found = [
        find_broken(joined, request, starts, known)
        for request in joined.trace.requests
        if not request.is_score and joined.parent_of[request.number] < 0
    ]
    return [one for one in found if one]


def without_generation_prompt(prompt: np.ndarray, variants: list[list[int]]) -> int | None:
    """Length of a prompt without the generation prompt it ends in, None when it has none."""
    for ids in sorted(variants, key=len, reverse=True):
        if len(prompt) > len(ids) and prompt[-len(ids) :].tolist() == ids:
            return len(prompt) - len(ids)
    return None


def find_broken(
    joined: Joined, request: Request, starts: dict[int, list[Request]], known: np.ndarray
) -> tuple[Request, Sequence, int] | None:
    """The completion that a request was meant to continue: the one it shares most tokens with."""
    hashes = joined.hashes.of(request.prompt)
    best: tuple[int, Sequence] | None = None
    for length in hits(hashes, known)[::-1]:
        for earlier in starts[int(hashes[length])]:
            if earlier.finished > request.started or len(earlier.prompt) >= len(request.prompt):
                continue
            if earlier.sampler.snapshot != request.sampler.snapshot:
                continue
            for sequence in earlier.sequences:
                whole = np.concatenate([earlier.prompt, sequence.tokens])
                shared = first_difference(request.prompt, whole)
                if best is None or shared > best[0]:
                    best = shared, sequence
        if best:
            break
    return (request, best[1], best[0]) if best else None
