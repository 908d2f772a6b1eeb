"""What belongs together: which trained token was sampled in which request, which completions form
a group, which request goes on where another ended, and who scored what.

Token sequences are compared by prefix hashes, so that a run of a million tokens takes seconds.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from audit.findings import Decoder, Decoders
from audit.trace import Call, Datum, Request, Sequence, Trace

# A request may be recorded a moment after the call that uses it was submitted: clocks are of
# different threads.
CLOCK_SLACK_SECONDS = 0.05
# A sampled log-probability is returned and sent back as the same 32-bit number.
LOGPROB_TOLERANCE = 1e-6
HASH_MASK = 2**64 - 1


class PrefixHashes:
    """Hashes of all prefixes of a token sequence: the sum of (token + 2) * factor[position], modulo
    2^64, with random odd factors."""

    def __init__(self, longest: int) -> None:
        generator = np.random.default_rng(0)
        top = np.iinfo(np.uint64).max
        self.factors = generator.integers(0, top, longest + 1, dtype=np.uint64) | np.uint64(1)

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """uint64 [length + 1]; entry k is of the first k tokens."""
        hashes = np.zeros(len(tokens) + 1, np.uint64)
        values = (tokens.astype(np.int64) + 2).astype(np.uint64)
        np.cumsum(values * self.factors[: len(tokens)], out=hashes[1:])
        return hashes


@dataclass
class Match:
    """How one datum's targets were sampled. `owner[t]` is the index of a sequence, -1 for none."""

    datum: Datum
    owner: np.ndarray
    turns: list[int] = field(default_factory=list)
    cut: int | None = None  # a sequence that the datum breaks off in the middle of
    prompt_end: int | None = None  # length of the longest served prompt the datum begins with
    candidates: list[int] = field(default_factory=list)  # sequences sampled from that prompt

    @property
    def is_sampled(self) -> bool:
        return bool(self.turns) or self.cut is not None


@dataclass
class Group:
    """Completions sampled from one prompt with one set of weights at one time."""

    members: list[int]
    step: int
    advantages: dict[int, float] = field(default_factory=dict)  # by member, of its first use

    @property
    def is_degenerate(self) -> bool:
        return all(abs(value) < 1e-9 for value in self.advantages.values())


class Joined:
    """A trace with its connections; the lists are indexed by sequence."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.decoders = Decoders(trace.chats)
        self.sequences: list[Sequence] = [s for r in trace.requests for s in r.sequences]
        longest = max(
            [s.length for s in self.sequences]
            + [len(r.prompt) for r in trace.requests]
            + [len(d.inputs) + 1 for c in trace.calls for d in c.data],
            default=1,
        )
        self.hashes = PrefixHashes(longest)
        self.by_end: dict[int, list[int]] = defaultdict(list)
        self.by_prompt: dict[int, list[int]] = defaultdict(list)
        self.prompt_hash: list[int] = []
        self._end_of_prompt: dict[int, np.ndarray] = {}
        self._index_sequences()
        # Per sequence, the one its prompt goes on from; -1 for a first turn.
        self.parent_of = {r.number: self._parent(r) for r in trace.requests}
        self.parents = [self.parent_of[s.request.number] for s in self.sequences]
        self.first_answer: dict[str, float] = {}
        for request in trace.requests:
            earlier = self.first_answer.get(request.sampler.id, request.finished)
            self.first_answer[request.sampler.id] = min(earlier, request.finished)
        self.used: set[int] = set()
        self._texts: dict[bytes, str] = {}
        self.matches: dict[tuple[int, int], Match] = {}
        for call in trace.calls:
            if call.is_backward:
                for datum in call.data:
                    self.matches[call.number, datum.number] = self._match(call, datum)

    def _index_sequences(self) -> None:
        factors = self.hashes.factors
        index = 0
        for request in self.trace.requests:
            prompt = self.hashes.of(request.prompt)
            self._end_of_prompt[request.number] = prompt
            for sequence in request.sequences:
                start, stop = len(request.prompt), sequence.length
                values = (sequence.tokens.astype(np.int64) + 2).astype(np.uint64)
                added = (values * factors[start:stop]).sum(dtype=np.uint64)
                end = (int(prompt[-1]) + int(added)) & HASH_MASK
                if not request.is_score and len(sequence.tokens):
                    self.by_end[end].append(index)
                    self.by_prompt[int(prompt[-1])].append(index)
                self.prompt_hash.append(int(prompt[-1]))
                index += 1
        self._ends = np.array(sorted(self.by_end), np.uint64)
        self._prompts = np.array(sorted(self.by_prompt), np.uint64)

    def _parent(self, request: Request) -> int:
        hashes = self._end_of_prompt[request.number]
        for length in hits(hashes, self._ends)[::-1]:
            earlier = [
                i
                for i in self.by_end[int(hashes[length])]
                if self.sequences[i].request is not request
                and self.sequences[i].request.finished <= request.started + CLOCK_SLACK_SECONDS
            ]
            if earlier:
                return earlier[-1]
        return -1

    def first_turn(self, index: int) -> int:
        """The completion with which the conversation of a completion began."""
        return self._earliest(index, lambda parent: True)

    def root(self, index: int) -> int:
        """The first turn of the conversation that a sequence belongs to, as far as it is trained: a
        sampled question that is never trained is a prompt like any other."""
        trained = self.trained_requests
        return self._earliest(
            index,
            lambda parent: not trained or self.sequences[parent].request.number in trained,
        )

    def _earliest(self, index: int, may_follow: Callable[[int], bool]) -> int:
        """Go back from turn to turn; clocks of different threads could make a circle."""
        seen: set[int] = set()
        while (parent := self.parents[index]) >= 0 and index not in seen and may_follow(parent):
            seen.add(index)
            index = parent
        return index

    @cached_property
    def trained_requests(self) -> set[int]:
        """Numbers of the requests of which a completion was trained on by a policy call."""
        return {self.sequences[i].request.number for i in self.trained}

    def decoder(self, call: Call) -> Decoder:
        run = self.trace.runs.get(call.run)
        return self.decoders.of(run.folder if run else "")

    def match(self, datum: Datum) -> Match:
        return self.matches[datum.call.number, datum.number]

    # -- from a datum to what was sampled -----------------------------------------------------

    def _match(self, call: Call, datum: Datum) -> Match:
        tokens = datum.tokens
        hashes = self.hashes.of(tokens)
        match = Match(datum, np.full(len(datum.targets), -1, np.int32))
        for end in hits(hashes, self._ends):
            index = self._best(call, datum, self.by_end[int(hashes[end])])
            if index is not None:
                self._own(match, index, int(end))
                match.turns.append(index)
        # Completions that a longer one covers, such as a greedy look at the first tokens.
        match.turns = [i for i in match.turns if (match.owner == i).any()]
        covered = max((self.sequences[i].length for i in match.turns), default=0)
        for length in hits(hashes, self._prompts)[::-1]:
            if length < covered or length >= len(tokens):
                continue
            match.prompt_end = int(length)
            match.candidates = [
                i
                for i in self.by_prompt[int(hashes[length])]
                if self.sequences[i].request.started <= call.started + CLOCK_SLACK_SECONDS
            ]
            rest = tokens[length:]
            broken_off = [
                i
                for i in match.candidates
                if len(self.sequences[i].tokens) > len(rest)
                and np.array_equal(self.sequences[i].tokens[: len(rest)], rest)
            ]
            index = self._best(call, datum, broken_off)
            if index is not None:
                self._own(match, index, len(tokens))
                match.cut = index
            break
        return match

    def _own(self, match: Match, index: int, end: int) -> None:
        start = max(0, len(self.sequences[index].request.prompt) - 1)
        match.owner[start : end - 1] = index
        # Without signal it is the history of a datum that trains a later turn.
        if match.datum.active[start : end - 1].any():
            self.used.add(index)

    def _best(self, call: Call, datum: Datum, indices: list[int]) -> int | None:
        """Of sequences with the same tokens, the one whose log-probabilities the datum carries,
        that was sampled at temperature 1, is unused, and is the latest."""

        def distance(index: int) -> float:
            """Of the datum's log-probabilities from the served ones."""
            sequence = self.sequences[index]
            start = max(0, len(sequence.request.prompt) - 1)
            served = sequence.logprobs
            if datum.logprobs is None or len(datum.logprobs) < start + len(served):
                return float("inf")
            given = datum.logprobs[start : start + len(served)]
            return float(np.abs(given - served).max(initial=0.0))

        def is_plain(index: int) -> bool:
            return self.sequences[index].request.params.get("temperature", 1.0) == 1.0

        def worth(index: int) -> tuple[bool, bool, bool, int]:
            is_same = distance(index) <= LOGPROB_TOLERANCE
            return is_same, is_plain(index), index not in self.used, index

        earlier = [
            i
            for i in indices
            if self.sequences[i].request.started <= call.started + CLOCK_SLACK_SECONDS
        ]
        # Equal answers may be thousands: the newest unused one mostly fits. Those of one step
        # differ in the last bits only, by what they were computed together with.
        for index in reversed(earlier):
            if index not in self.used and is_plain(index) and distance(index) == 0:
                return index
        return max(earlier, key=worth, default=None)

    # -- groups -------------------------------------------------------------------------------

    def steps_finished(self, run: str, time: float) -> int:
        """How many optimiser steps of a run had ended at a time, counted as the run counts."""
        numbers = [s.number for s in self._steps_of.get(run, []) if s.finished <= time]
        if numbers:
            return numbers[-1]
        return next(
            (r.step if r.with_optimizer else 0 for r in self.trace.resumes if r.run == run), 0
        )

    @cached_property
    def _steps_of(self) -> dict[str, list]:
        found: dict[str, list] = defaultdict(list)
        for step in self.trace.steps:
            found[step.run].append(step)
        return found

    @cached_property
    def policy_calls(self) -> list[Call]:
        """Backward calls that train on sampled tokens by advantages: the policy losses, custom
        losses on samples, and cross_entropy with negative weights on samples."""
        chosen = []
        for call in self.trace.calls:
            if not call.is_backward:
                continue
            if call.kind == "policy":
                chosen.append(call)
                continue
            sampled = [
                self.match(d).is_sampled or bool(self.match(d).candidates) for d in call.data
            ]
            signed = any((d.signal < 0).any() for d in call.data)
            if sampled and np.mean(sampled) >= 0.5 and (call.kind == "custom" or signed):
                chosen.append(call)
        return chosen

    @cached_property
    def supervised_calls(self) -> list[Call]:
        """Cross-entropy calls on given text."""
        policy = {call.number for call in self.policy_calls}
        return [c for c in self.trace.calls if c.kind == "sft" and c.number not in policy]

    @cached_property
    def preference_calls(self) -> list[Call]:
        """Custom losses on given text: DPO and its kin."""
        policy = {call.number for call in self.policy_calls}
        return [c for c in self.trace.calls if c.kind == "custom" and c.number not in policy]

    @cached_property
    def trained(self) -> dict[int, list[Datum]]:
        """Sequence -> the policy data in which its tokens carry signal, in order."""
        found: dict[int, list[Datum]] = defaultdict(list)
        for call in self.policy_calls:
            for datum in call.data:
                for index in np.unique(self.match(datum).owner[datum.active]):
                    if index >= 0:
                        found[int(index)].append(datum)
        return dict(found)

    @cached_property
    def training_requests(self) -> list[Request]:
        """Requests of which at least one completion was trained on by a policy call."""
        return [r for r in self.trace.requests if r.number in self.trained_requests]

    @cached_property
    def training_samplers(self) -> set[str]:
        """Sampling clients whose completions were trained on; when nothing was trained at all,
        those that sampled from a training run."""
        chosen = {request.sampler.id for request in self.training_requests}
        if not chosen and not any(call.is_backward for call in self.trace.calls):
            chosen = {s.id for s in self.trace.samplers.values() if s.training_run}
        return chosen

    @cached_property
    def rollouts(self) -> list[Sequence]:
        """Completions, not greedy, of the sampling clients that training used."""
        return [
            s
            for s in self.sequences
            if s.request.sampler.id in self.training_samplers
            and not s.request.is_score
            and s.request.params.get("temperature", 1.0) != 0
        ]

    @cached_property
    def has_unmatched_data(self) -> bool:
        """Whether some policy data could not be traced to a completion."""
        return any(
            not self.match(datum).is_sampled for call in self.policy_calls for datum in call.data
        )

    @cached_property
    def groups(self) -> list[Group]:
        """First turns sampled together, of all samplers whose completions were trained on."""
        samplers = self.training_samplers
        grouped: dict[tuple, list[int]] = defaultdict(list)
        for index, sequence in enumerate(self.sequences):
            request = sequence.request
            is_greedy = request.params.get("temperature", 1.0) == 0
            if request.sampler.id not in samplers or request.is_score or is_greedy:
                continue
            if self.root(index) != index:
                continue
            run = request.sampler.training_run or next(iter(self.trace.runs), "")
            step = self.steps_finished(run, request.started)
            grouped[request.sampler.id, step, self.prompt_hash[index]].append(index)
        groups = [Group(members, key[1]) for key, members in grouped.items()]
        group_of = {member: group for group in groups for member in group.members}
        # First turns by themselves first: later turns of equal ones all seem to follow the last.
        for index, data in sorted(self.trained.items(), key=lambda item: item[0] not in group_of):
            root = self.root(index)
            if root in group_of and root not in group_of[root].advantages:
                datum = data[0]
                owned = datum.signal[(self.match(datum).owner == index) & datum.active]
                group_of[root].advantages[root] = float(owned.mean()) if len(owned) else 0.0
        return groups

    @cached_property
    def scores(self) -> list[Request]:
        """Requests of compute_logprobs."""
        return [r for r in self.trace.requests if r.is_score]

    @cached_property
    def _by_tokens(self) -> dict[int, dict[bytes, int]]:
        """Length -> completions of that length -> the index of one."""
        found: dict[int, dict[bytes, int]] = defaultdict(dict)
        for index, sequence in enumerate(self.sequences):
            if not sequence.request.is_score and len(sequence.tokens) > 1:
                found[len(sequence.tokens)][sequence.tokens.tobytes()] = index
        return found

    def ending(self, tokens: np.ndarray) -> int | None:
        """The longest completion that a token sequence ends in."""
        for length in sorted(self._by_tokens, reverse=True):
            if length <= len(tokens):
                index = self._by_tokens[length].get(tokens[-length:].tobytes())
                if index is not None:
                    return index
        return None

    def text_of(self, index: int) -> str:
        """A completion's text without what a tokenizer may drop or keep at its end."""
        sequence = self.sequences[index]
        key = sequence.tokens.tobytes()
        if key not in self._texts:
            decoder = self.decoders.of(sequence.request.sampler.folder)
            self._texts[key] = decoder.bare_text(sequence.tokens)
        return self._texts[key]

    @cached_property
    def scores_by_hash(self) -> dict[int, list[Request]]:
        """Whole scored sequence -> its requests."""
        found: dict[int, list[Request]] = defaultdict(list)
        for request in self.scores:
            found[int(self._end_of_prompt[request.number][-1])].append(request)
        return found


def hits(hashes: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Prefix lengths, ascending, whose hash is in the sorted array `known`; never 0."""
    if not len(known):
        return np.empty(0, np.int64)
    places = np.searchsorted(known, hashes)
    places[places == len(known)] = 0
    found = np.flatnonzero(known[places] == hashes)
    return found[found > 0]
