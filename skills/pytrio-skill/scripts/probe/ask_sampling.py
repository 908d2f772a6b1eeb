"""Questions about the sampler: what it returns, and how it compares with the trainer."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from probe.decide import HIGH, LOW, Verdict, cannot_tell, either
from probe.measure import Lab, Row, Vector, along, probe_row, rms

# Sampler and trainer are different programs: this much apart (nats) is no other distribution.
SAME, OTHER = 0.03, 0.12
STOP_TOKENS, STOP_PROMPTS = 16, 6
FREE: dict[str, Any] = {"temperature": 1.0}
GREEDY: dict[str, Any] = {"temperature": 0.0}


def sampler_of(lab: Lab) -> Any:
    """A sampler of the base model: these questions need no training."""
    if "base" not in lab.kept:
        lab.kept["base"] = lab.base_sampler()
    return lab.kept["base"]


def fresh_sampler(lab: Lab) -> Any:
    """A sampler of the weights with which the training run begins."""
    run = lab.untrained().training_run_cuid
    if run not in lab.kept:
        lab.kept[run] = lab.sampler("probe-fresh")
    return lab.kept[run]


# -- stops ---------------------------------------------------------------------------------------


def stop_verdict(tokens: Sequence[int], whole: Sequence[int], at: int, reason: str) -> Verdict:
    """Where a sequence ended that was asked to stop at `whole[at]`."""
    evidence = {"without": list(whole), "stopped": list(tokens), "at": at, "stop_reason": reason}
    if list(tokens) == list(whole[: at + 1]):
        return Verdict("in tokens", HIGH, evidence)
    if list(tokens) == list(whole[:at]):
        return Verdict("not in tokens", HIGH, evidence)
    if list(tokens) == list(whole):
        return Verdict("ignored", LOW, evidence)
    return cannot_tell("greedy sampling did not repeat itself", **evidence)


def token_stop(lab: Lab) -> Verdict:
    """Whether a token asked for as a stop is part of the returned tokens."""
    special = set(lab.tokenizer.all_special_ids)
    for seed in range(STOP_PROMPTS):
        prompt = lab.mixed_words(seed, 6)
        whole = lab.sample(sampler_of(lab), prompt, max_tokens=STOP_TOKENS, **GREEDY)
        tokens = whole.sequences[0].tokens
        places = [i for i, t in enumerate(tokens[:-1]) if i and t not in {*tokens[:i], *special}]
        if places:
            at = places[0]
            stopped = lab.sample(
                sampler_of(lab), prompt, max_tokens=STOP_TOKENS, stop=[tokens[at]], **GREEDY
            ).sequences[0]
            return stop_verdict(stopped.tokens, tokens, at, stopped.stop_reason)
    return cannot_tell("no prompt gave a token to stop at")


def string_stop(lab: Lab) -> Verdict:
    """Whether the tokens of a stop string are part of the returned ones."""
    special = set(lab.tokenizer.all_special_ids)
    for seed in range(STOP_PROMPTS):
        prompt = lab.mixed_words(seed, 6)
        whole = lab.sample(sampler_of(lab), prompt, max_tokens=STOP_TOKENS, **GREEDY)
        tokens = whole.sequences[0].tokens
        for at in range(1, len(tokens) - 1):
            stop = lab.tokenizer.decode([tokens[at]]).strip()
            before = lab.tokenizer.decode(tokens[:at])
            is_new = stop.isalnum() and stop not in before
            if tokens[at] in special or not is_new:
                continue
            if stop not in lab.tokenizer.decode(tokens[: at + 1]):
                continue
            stopped = lab.sample(
                sampler_of(lab), prompt, max_tokens=STOP_TOKENS, stop=stop, **GREEDY
            ).sequences[0]
            verdict = stop_verdict(stopped.tokens, tokens, at, stopped.stop_reason)
            verdict.evidence["text has it"] = stop in (stopped.text or "")
            return verdict
    return cannot_tell("no prompt gave a string to stop at")


TURN_QUESTIONS = ("Say hello.", "Name a colour.", "What is 3 plus 4?")
TURN_TOKENS = 48


def end_of_turn(lab: Lab) -> Verdict:
    """Whether the token with which the model ends its turn is part of the returned tokens."""
    tokenizer = lab.tokenizer
    special = {*tokenizer.all_special_ids, tokenizer.eos_token_id}
    for question in TURN_QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        prompt = tokenizer.encode(text, add_special_tokens=False)
        ended = lab.sample(sampler_of(lab), prompt, max_tokens=TURN_TOKENS, **GREEDY).sequences[0]
        if ended.stop_reason == "length" or len(ended.tokens) >= TURN_TOKENS:
            continue
        evidence = {"last": ended.tokens[-1:], "stop_reason": ended.stop_reason}
        has_end = bool(ended.tokens) and ended.tokens[-1] in special
        return Verdict("in tokens" if has_end else "not in tokens", HIGH, evidence)
    return cannot_tell(f"no answer ended within {TURN_TOKENS} tokens")


# -- which distribution --------------------------------------------------------------------------


def apart(lab: Lab, count: int = 3, **params: Any) -> tuple[float, float]:
    """How far returned log-probabilities are from the trainer's of the same tokens, and the mean
    size of the trainer's: (root mean square, nats)."""
    prompt = lab.mixed_words(7, 8)
    answer = lab.sample(fresh_sampler(lab), prompt, count, max_tokens=8, **params)
    rows = [
        Row(
            [*prompt, *s.tokens[:-1]],
            [*prompt[1:], *s.tokens],
            [1.0] * (len(prompt) - 1 + len(s.tokens)),
        )
        for s in answer.sequences
        if s.tokens
    ]
    scored = lab.logprobs(rows)
    own = np.concatenate([lp[len(prompt) - 1 :] for lp in scored])
    served = np.concatenate([s.logprobs for s in answer.sequences if s.tokens])
    return rms(served - own), float(np.mean(np.abs(own)))


def distribution(lab: Lab, **params: Any) -> Verdict:
    """Whether log-probabilities are of the model's distribution or of the one sampled from."""
    plain, _ = apart(lab, seed=3, **FREE)
    changed, size = apart(lab, seed=3, **{**FREE, **params})
    evidence = {"plain": round(plain, 5), "size": round(size, 3), "noise": round(lab.noise, 5)}
    if size < 3 * OTHER:
        return cannot_tell("the model is too sure of its tokens", **evidence)
    if plain > SAME:
        return cannot_tell("sampler and trainer differ without it, too", **evidence)
    return either(changed, (SAME, "before"), (max(OTHER, 5 * plain), "after"), **evidence)


# -- seeds and groups ----------------------------------------------------------------------------

# Equal tokens say something once they are this unlikely by chance; several prompts are tried.
UNLIKELY = math.log(1e-4)
SEEDED_TOKENS, SEEDED_PROMPTS = 12, 4


def same_seed(lab: Lab) -> Verdict:
    """Whether a request repeated with its seed gives the same tokens."""
    chance = 0.0
    for number in range(SEEDED_PROMPTS):
        prompt = lab.mixed_words(20 + number, 8)
        params = {"max_tokens": SEEDED_TOKENS, "seed": 11 + number, **FREE}
        first, second = (
            lab.sample(sampler_of(lab), prompt, **params).sequences[0] for _ in range(2)
        )
        if first.tokens != second.tokens:
            return Verdict("ignored", HIGH, {"first": first.tokens, "second": second.tokens})
        chance += float(sum(first.logprobs))
        if chance < UNLIKELY:
            return Verdict("repeats", HIGH, {"log_chance": round(chance, 1)})
    return cannot_tell("equal by chance", log_chance=round(chance, 1))


def group_samples(lab: Lab) -> Verdict:
    """Whether the samples of one seeded request differ from each other."""
    chance = 0.0
    for number in range(SEEDED_PROMPTS):
        prompt = lab.mixed_words(30 + number, 8)
        answer = lab.sample(
            sampler_of(lab), prompt, 4, max_tokens=SEEDED_TOKENS, seed=21 + number, **FREE
        )
        different = len({tuple(sequence.tokens) for sequence in answer.sequences})
        if different > 1:
            return Verdict("distinct", HIGH, {"different": different, "of": 4})
        chance += float(sum(answer.sequences[0].logprobs))
        if chance < UNLIKELY:
            return Verdict("identical", HIGH, {"log_chance": round(chance, 1)})
    return cannot_tell("equal by chance", log_chance=round(chance, 1))


# -- prompt log-probabilities --------------------------------------------------------------------


def prompt_logprobs(lab: Lab) -> Verdict:
    """Shape of prompt log-probabilities, and what stands at the first token."""
    prompt = lab.words(0, 12)
    served = lab.served_logprobs(sampler_of(lab), prompt)
    evidence = {"tokens": len(prompt), "entries": len(served), "first": served[:1]}
    if len(served) == len(prompt) - 1 and None not in served:
        return Verdict("one short", HIGH, evidence)
    if len(served) == len(prompt) and None not in served[1:]:
        if served[0] is None:
            return Verdict("None first", HIGH, evidence)
        if served[0] == 0.0:
            return Verdict("0 first", HIGH, evidence)
    return cannot_tell("another shape", served=served, **evidence)


# -- numerics ------------------------------------------------------------------------------------

LONG = 160
FEWEST = 100


def mismatch(lab: Lab) -> Verdict:
    """How far the sampler's log-probabilities are from the trainer's on the same weights."""
    tokens = lab.text()[:LONG]
    difference = lab.score(fresh_sampler(lab), tokens) - lab.trainer_score(tokens)
    difference = difference[np.isfinite(difference)]
    evidence = {
        "mean": float(f"{np.abs(difference).mean():.3g}"),
        "max": float(f"{np.abs(difference).max():.3g}"),
        "bias": float(f"{difference.mean():.3g}"),
        "tokens": len(difference),
    }
    spread = float(f"{rms(difference):.3g}")
    # Below float32's own error it is none.
    answer = 0.0 if spread < 2e-5 else spread
    return Verdict(answer, HIGH if len(difference) >= FEWEST else LOW, evidence)


def fresh_lora(lab: Lab) -> Verdict:
    """Whether a new adapter leaves the base model as it is."""
    tokens = lab.words(40, 40)
    base, fresh = lab.score(sampler_of(lab), tokens), lab.score(fresh_sampler(lab), tokens)
    again = rms(lab.score(sampler_of(lab), tokens) - base)
    return either(
        rms(fresh - base),
        (max(0.02, 3 * again), "equals base"),
        (max(0.06, 8 * again), "differs from base"),
        base_again=float(f"{again:.3g}"),
    )


def snapshot(lab: Lab) -> Verdict:
    """Whether a sampler keeps its weights when the trainer takes a step."""
    row, rate = probe_row(lab), lab.rate("cross_entropy")
    tokens = [*row.tokens, row.targets[-1]]

    def answers(sampler: Any) -> Vector:
        return lab.score(sampler, tokens)[-len([w for w in row.signal if w]) :]

    start = lab.logprobs([row])
    old = lab.sampler("probe-before")
    before = answers(old)
    moved = lab.moved("cross_entropy", [row], rate, [row], start)
    after, new = answers(old), answers(lab.sampler("probe-after"))
    lab.moved("cross_entropy", [row.times(-1.0)], rate, [row], moved)
    width = len(after)
    step = moved[0][-width:] - start[0][-width:]
    evidence = {
        "step": round(rms(step), 4),
        "old sampler moves": round(along(after - before, step), 3),
        "new sampler shows": round(along(new - start[0][-width:], step), 3),
    }
    if rms(step) < 8 * lab.noise:
        return cannot_tell("the step is not seen", **evidence)
    followed, shown = evidence["old sampler moves"], evidence["new sampler shows"]
    if abs(followed - 1) < 0.3:
        return Verdict("live", HIGH, evidence)
    if abs(followed) < 0.3 and abs(shown - 1) < 0.3:
        return Verdict("frozen", HIGH, evidence)
    if abs(followed) < 0.3 and abs(shown) < 0.3:
        return Verdict("stale", HIGH, evidence)
    return cannot_tell("neither kept nor followed", **evidence)
