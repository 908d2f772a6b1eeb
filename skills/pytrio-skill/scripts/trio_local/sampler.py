"""Sampling: all requests of one weight snapshot share one running batch with a KV cache.

Requests join the batch when they arrive and leave it when they stop. Random numbers belong to
the sequence, not to the batch, so a request's result does not depend on what else is running.

Local choices, unverified against the cloud: `text` has no special tokens and ends before a stop
string; and, unless a `Behaviour` says otherwise, returned log-probabilities are those of the
untempered, unfiltered distribution, and the token that ends a sequence is part of it.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import Cache

from trio_local.behaviour import Behaviour
from trio_local.decoder import step_for
from trio_local.demos import Demos
from trio_local.loading import LoadedModel, Model
from trio_local.protocol import ApiError
from trio_local.spelling import Spelling

if TYPE_CHECKING:
    from trio_local.vision import Picture

# A prefill call stops growing at this many padded prompt tokens: only memory depends on it.
MAX_PREFILL_TOKENS = 16 * 1024
# A stop string is looked for in the decoded text of this many last tokens and its own length.
STOP_STRING_SLACK = 8

# Beyond these, logits divided by the temperature are no float32 numbers any more.
LARGEST_NUMBER = 1e30
GREEDY_BELOW = 1e-5

KNOWN_PARAMS = {
    "max_tokens", "seed", "stop", "stop_token_ids", "temperature", "top_k", "top_p"
}  # fmt: skip


@dataclass(frozen=True)
class SamplingSpec:
    """Checked sampling parameters of one request."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]


def sampling_spec(params: dict[str, Any], loaded: LoadedModel, prompt_length: int) -> SamplingSpec:
    """Check the wire's sampling parameters. Raises ApiError 422 with what was expected."""

    def refuse(message: str) -> ApiError:
        return ApiError(422, "invalid_sampling_params", message)

    def number(name: str, default: float) -> float:
        value = params.get(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # Written so that NaN fails, and without turning a whole number of any size into a float.
        if not is_number or not abs(value) <= LARGEST_NUMBER:
            raise refuse(f"{name} must be a finite number, got {value!r}")
        return value

    unknown = sorted(set(params) - KNOWN_PARAMS)
    if unknown:
        raise refuse(f"unknown {', '.join(unknown)}; known: {', '.join(sorted(KNOWN_PARAMS))}")
    max_tokens = params["max_tokens"]
    room = loaded.context_length - prompt_length
    if not 1 <= max_tokens <= room:
        raise ApiError(
            422,
            "context_length_exceeded",
            f"prompt of {prompt_length} tokens and max_tokens {max_tokens} exceed the context "
            f"of {loaded.context_length}",
        )
    temperature, top_p, top_k = (
        number("temperature", 1.0),
        number("top_p", 1.0),
        number("top_k", -1),
    )
    if temperature < 0:
        raise refuse(f"temperature must be 0 or more, got {temperature}")
    if not 0 < top_p <= 1:
        raise refuse(f"top_p must be above 0 and at most 1, got {top_p}")
    if top_k != -1 and (top_k != int(top_k) or top_k < 1):
        raise refuse(f"top_k must be -1 or a whole number of at least 1, got {top_k}")
    seed = params.get("seed")
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
        raise refuse(f"seed must be a 64-bit whole number, got {seed!r}")
    stop_ids, stop_strings = set(loaded.end_ids), []
    for stop in listed(params.get("stop_token_ids"), int, "stop_token_ids", refuse):
        if not 0 <= stop < loaded.vocabulary_size:
            raise refuse(f"stop token {stop} is outside the vocabulary of {loaded.vocabulary_size}")
        stop_ids.add(stop)
    for stop in listed(params.get("stop"), str, "stop", refuse):
        if not stop:
            raise refuse("stop must not hold an empty string")
        ids = loaded.tokenizer.encode(stop, add_special_tokens=False)
        # A stop that is one special token never shows in the text: it is matched by id.
        if len(ids) == 1 and ids[0] in loaded.tokenizer.all_special_ids:
            stop_ids.add(ids[0])
        else:
            stop_strings.append(stop)
    return SamplingSpec(
        max_tokens=max_tokens,
        temperature=float(temperature) if temperature >= GREEDY_BELOW else 0.0,
        top_k=min(int(top_k), loaded.vocabulary_size),
        top_p=top_p,
        seed=seed,
        stop_ids=frozenset(stop_ids),
        stop_strings=tuple(stop_strings),
    )


def listed(value: Any, of: type, name: str, refuse: Callable[[str], ApiError]) -> list[Any]:
    """`value` as a list of `of`; a missing value is an empty list."""
    if value is None:
        return []
    is_list = isinstance(value, list)
    if not is_list or not all(isinstance(v, of) and not isinstance(v, bool) for v in value):
        raise refuse(f"{name} must be a list of {of.__name__}, got {value!r}")
    return value


@dataclass
class SampleJob:
    """One sampling request on its way through the batch; pictures stand in its prompt as
    placeholders."""

    prompt: list[int]
    spec: SamplingSpec
    num_samples: int
    want_prompt_logprobs: bool
    topk_prompt_logprobs: int
    stream_seed: int
    finish: Callable[["SampleResult | BaseException"], None]
    pictures: list["Picture"] = field(default_factory=list)
    result: "SampleResult" = field(init=False)
    unfinished: int = 0

    def __post_init__(self) -> None:
        self.result = SampleResult([], len(self.prompt), [p.tokens for p in self.pictures])


@dataclass
class SampleResult:
    """What a request gets back; log-probabilities are natural logarithms."""

    sequences: list["Sequence"]
    prompt_tokens: int  # visual ones included
    picture_tokens: list[int]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


@dataclass
class Sequence:
    """One sequence being generated; `uniforms` drive its choices, one per token, except where they
    are `forced`: by a demonstration, or because the sequence has ended once and a token of index
    `respell_from` or later is now written as two."""

    job: SampleJob
    uniforms: np.ndarray
    forced: list[int] = field(default_factory=list)
    respell_from: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: str = ""
    text: str = ""


class SlotCache(Cache):
    """KV cache with one slot a sequence, each at its own length.

    Keys and values are [slots, kv_heads, capacity, head_dim] per layer; the first `used` slots
    are live. `positions` [used] says where the next key and value of each slot go.
    """

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.positions = torch.empty(0, dtype=torch.long)
        self.used = 0
        self.width = 0
        self.layers = []  # of transformers' Cache: this one keeps its tensors itself

    def add(
        self,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        rows: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        """Append slots: slot i copies prompt `rows[i]` of a prefill of `lengths[i]` tokens."""
        count, width = len(rows), keys[0].shape[2]
        self._reserve(self.used + count, width, like=keys)
        for mine, new in ((self.keys, keys), (self.values, values)):
            for layer, tensor in enumerate(new):
                mine[layer][self.used : self.used + count, :, :width] = tensor[rows]
        self.positions = torch.cat([self.positions.to(lengths.device), lengths])
        self.used += count

    def _reserve(self, slots: int, width: int, like: list[torch.Tensor]) -> None:
        """Grow the buffers, doubling, so that growing stays rare."""
        have_slots, have_width = (
            (self.keys[0].shape[0], self.keys[0].shape[2]) if self.keys else (0, 0)
        )
        if slots <= have_slots and width <= have_width:
            return
        slots = max(slots, 2 * have_slots) if slots > have_slots else have_slots
        width = max(width + 64, 2 * have_width) if width > have_width else have_width
        for buffers in (self.keys, self.values):
            grown = [t.new_zeros(slots, t.shape[1], width, t.shape[3]) for t in like]
            for layer, old in enumerate(buffers):
                grown[layer][: self.used, :, : old.shape[2]] = old[: self.used]
            buffers[:] = grown

    def remove(self, slot: int) -> None:
        """Free a slot by moving the last live one into it."""
        last = self.used - 1
        if slot != last:
            for tensor in (*self.keys, *self.values, self.positions):
                tensor[slot] = tensor[last]
        self.positions = self.positions[:last]
        self.used = last

    def begin_step(self) -> None:
        """Make room for one more token a slot, and note in `visible` [used, width] where each
        slot may look."""
        self.width = int(self.positions.max()) + 1
        self._reserve(self.used, self.width, like=self.keys)
        self.rows = torch.arange(self.used, device=self.positions.device)
        reach = torch.arange(self.width, device=self.positions.device)
        self.visible = reach <= self.positions[:, None]

    def end_step(self) -> None:
        self.positions += 1

    # -- the part of transformers' Cache that a decoder layer calls ----------------------------

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self.rows, :, self.positions] = key_states[:, :, 0]
        values[self.rows, :, self.positions] = value_states[:, :, 0]
        return keys[: self.used, :, : self.width], values[: self.used, :, : self.width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width - 1


class Batch:
    """The running batch of one snapshot: `model` has the adapter merged in."""

    def __init__(
        self,
        loaded: LoadedModel,
        model: Model,
        demos: Demos,
        spelling: Spelling,
        behaviour: Behaviour,
    ) -> None:
        self.loaded = loaded
        self.demos = demos
        self.spelling = spelling
        self.behaviour = behaviour
        self.errors = token_errors(behaviour.mismatch, loaded)
        self.model = model
        self.decode = step_for(model, loaded.cache_argument)
        self.cache = SlotCache()
        self.sequences: list[Sequence] = []
        self.next_tokens: list[int] = []

    @torch.inference_mode()
    def admit(self, jobs: list[SampleJob]) -> None:
        """Prefill the jobs' prompts, each distinct prompt once, and choose the first tokens."""
        jobs_by_prompt: dict[tuple[tuple[int, ...], tuple[str, ...]], list[SampleJob]] = {}
        for job in jobs:
            key = tuple(job.prompt), tuple(picture.digest for picture in job.pictures)
            jobs_by_prompt.setdefault(key, []).append(job)
        prompts = sorted(jobs_by_prompt, key=lambda key: len(key[0]))
        start = 0
        for end in range(1, len(prompts) + 1):
            is_full = (
                end < len(prompts) and len(prompts[end][0]) * (end + 1 - start) > MAX_PREFILL_TOKENS
            )
            if end == len(prompts) or is_full:
                self._prefill([jobs_by_prompt[key] for key in prompts[start:end]])
                start = end

    def _prefill(self, jobs_by_prompt: list[list[SampleJob]]) -> None:
        device = self.loaded.device
        prompts = [jobs[0].prompt for jobs in jobs_by_prompt]
        width = max(map(len, prompts))
        tokens = torch.tensor([p + [0] * (width - len(p)) for p in prompts], device=device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        pictures = [picture for jobs in jobs_by_prompt for picture in jobs[0].pictures]
        given = self.loaded.decoder_input(tokens, pictures)
        output = self.model.get_decoder()(**given, use_cache=True)
        cache = getattr(output, self.loaded.cache_argument)
        hidden, head = output.last_hidden_state, self.model.get_output_embeddings()
        for row, jobs in enumerate(jobs_by_prompt):
            wanting = [j for j in jobs if j.want_prompt_logprobs or j.topk_prompt_logprobs]
            if wanting:
                self._score_prompt(prompts[row], head(hidden[row, : len(prompts[row])]), wanting)
        sequences, rows = [], []
        for row, jobs in enumerate(jobs_by_prompt):
            for job in jobs:
                for index, forced in enumerate(self._forced(job)):
                    is_copy = self.behaviour.group_samples == "identical"
                    stream = 0 if is_copy and job.spec.seed is not None else index
                    uniforms = uniforms_for(job.stream_seed, stream, job.spec.max_tokens)
                    is_greedy = job.spec.temperature == 0
                    start = None if is_greedy else self.spelling.start(job.stream_seed, index)
                    sequences.append(Sequence(job, uniforms, forced, start))
                    rows.append(row)
                job.result.sequences = sequences[-job.num_samples :]
                job.unfinished = job.num_samples
        chosen = torch.tensor(rows, device=device)
        last_hidden = hidden[torch.arange(len(prompts), device=device), lengths - 1]
        self.cache.add(
            [layer.keys for layer in cache.layers],
            [layer.values for layer in cache.layers],
            chosen,
            lengths[chosen],
        )
        first = len(self.sequences)
        self.sequences.extend(sequences)
        self._choose(head(last_hidden)[chosen], first)

    def _forced(self, job: SampleJob) -> list[list[int]]:
        """Tokens that demonstrations put into each sample of a job.

        Greedy requests show the model itself, so an evaluation at temperature 0 stays one.
        """
        if not self.demos.entries or job.spec.temperature == 0:
            return [[]] * job.num_samples
        tokenizer, end_id = self.loaded.tokenizer, self.loaded.turn_end_id
        matching = self.demos.matching(str(tokenizer.decode(job.prompt)))
        chosen = [self.demos.choose(matching, job.stream_seed, i) for i in range(job.num_samples)]
        return [self.demos.tokens(entry, tokenizer, end_id) if entry else [] for entry in chosen]

    def _score_prompt(self, prompt: list[int], logits: torch.Tensor, jobs: list[SampleJob]) -> None:
        """Log-probability of every prompt token given those before it; None for the first."""
        logprobs = torch.log_softmax(logits.float(), dim=-1) + self.errors
        targets = torch.tensor(prompt[1:], device=logits.device)
        scores = logprobs[:-1].gather(1, targets[:, None])[:, 0].tolist()
        for job in jobs:
            if job.want_prompt_logprobs:
                job.result.prompt_logprobs = [None, *scores]
            if job.topk_prompt_logprobs:
                top = logprobs[:-1].topk(min(job.topk_prompt_logprobs, logprobs.shape[1]))
                pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
                job.result.topk_prompt_logprobs = [
                    None,
                    *[list(zip(ids, values, strict=True)) for ids, values in pairs],
                ]

    @torch.inference_mode()
    def step(self) -> None:
        """Generate one token for every live sequence."""
        device = self.loaded.device
        self.cache.begin_step()
        hidden = self.decode(torch.tensor(self.next_tokens, device=device), self.cache)
        self.cache.end_step()
        logits = self.model.get_output_embeddings()(hidden)
        self.next_tokens = []
        self._choose(logits, 0)

    def _choose(self, logits: torch.Tensor, first: int) -> None:
        """Pick a token for `sequences[first:]` from `logits` [rows, vocabulary]; drop what ends."""
        rows = self.sequences[first:]
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        chosen = pick(logits.float(), logprobs, rows)
        tokens = chosen.tolist()
        for row, sequence in enumerate(rows):
            if len(sequence.tokens) < len(sequence.forced):
                tokens[row] = sequence.forced[len(sequence.tokens)]
        chosen = torch.tensor(tokens, device=logits.device)
        served = self._served(logits.float(), logprobs, rows).gather(1, chosen[:, None])[:, 0]
        scores = (served + self.errors[chosen]).tolist()
        self.next_tokens.extend(tokens)
        ended = []
        for row, (sequence, token, score) in enumerate(zip(rows, tokens, scores, strict=True)):
            sequence.tokens.append(token)
            sequence.logprobs.append(score)
            if self._has_ended(sequence, token) and not self._respell(first + row):
                ended.append(first + row)
        for slot in reversed(ended):
            sequence = self.sequences[slot]
            self._drop_stop(sequence)
            self.cache.remove(slot)
            last_sequence, last_token = self.sequences.pop(), self.next_tokens.pop()
            if slot < len(self.sequences):
                self.sequences[slot], self.next_tokens[slot] = last_sequence, last_token
            sequence.job.unfinished -= 1
            if not sequence.job.unfinished:
                sequence.job.finish(sequence.job.result)

    def _served(
        self, logits: torch.Tensor, logprobs: torch.Tensor, rows: list[Sequence]
    ) -> torch.Tensor:
        """The log-probabilities [rows, vocabulary] that are returned: of the raw distribution, or
        of the one after those of temperature, top-k and top-p that the behaviour names."""
        behaviour = self.behaviour
        if "after" not in (behaviour.temperature, behaviour.top_k, behaviour.top_p):
            return logprobs
        specs = [s.job.spec for s in rows]
        if behaviour.temperature == "after":
            temperatures = [spec.temperature or 1.0 for spec in specs]
            scaled = logits / torch.tensor(temperatures, device=logits.device)[:, None]
            logprobs = torch.log_softmax(scaled, dim=-1)
        kept = [
            replace(
                spec,
                top_k=spec.top_k if behaviour.top_k == "after" else -1,
                top_p=spec.top_p if behaviour.top_p == "after" else 1.0,
            )
            for spec in specs
        ]
        probabilities = filtered(logprobs.exp(), kept)
        # A forced token may be one that the filter leaves out.
        return (probabilities / probabilities.sum(-1, keepdim=True)).clamp_min(1e-38).log()

    def _respell(self, slot: int) -> bool:
        """Begin an ended sequence once more, its tokens given, one of them written as two; whether
        that is done."""
        sequence = self.sequences[slot]
        start, sequence.respell_from = sequence.respell_from, None
        if start is None or sequence.stop_reason != "stop":
            return False
        forced = self.spelling.respelled(self.loaded.tokenizer, sequence.tokens, start)
        if not forced or len(forced) > sequence.job.spec.max_tokens:
            return False
        sequence.forced, sequence.tokens, sequence.logprobs = forced, [], []
        sequence.stop_reason = sequence.text = ""
        # The step over the prompt's last token is what chooses the first one.
        self.cache.positions[slot] = len(sequence.job.prompt) - 1
        self.next_tokens[slot] = sequence.job.prompt[-1]
        return True

    def _has_ended(self, sequence: Sequence, token: int) -> bool:
        spec, tokenizer = sequence.job.spec, self.loaded.tokenizer
        if token in spec.stop_ids:
            sequence.stop_reason = "stop"
        elif spec.stop_strings:
            # Bytes of one token can be a single character, so a string of n characters lies
            # within the last n tokens or so; the slack covers characters of several tokens.
            longest = max(map(len, spec.stop_strings))
            tail = str(tokenizer.decode(sequence.tokens[-(longest * 4 + STOP_STRING_SLACK) :]))
            if any(stop in tail for stop in spec.stop_strings):
                sequence.stop_reason = "stop"
        if not sequence.stop_reason and len(sequence.tokens) >= spec.max_tokens:
            sequence.stop_reason = "length"
        if not sequence.stop_reason:
            return False
        sequence.text = str(tokenizer.decode(sequence.tokens, skip_special_tokens=True))
        # A stop string may span special tokens, so it is looked for before they are left out.
        whole = str(tokenizer.decode(sequence.tokens)) if spec.stop_strings else ""
        cuts = [whole.find(stop) for stop in spec.stop_strings if stop in whole]
        if cuts:
            sequence.text = whole[: min(cuts)]
            for special in tokenizer.all_special_tokens:
                sequence.text = sequence.text.replace(special, "")
        return True

    def _drop_stop(self, sequence: Sequence) -> None:
        """Take from the end what the behaviour leaves out of `tokens`."""
        behaviour, spec = self.behaviour, sequence.job.spec
        if sequence.stop_reason != "stop":
            return
        end = len(sequence.tokens)
        if sequence.tokens[-1] in spec.stop_ids:
            is_turn = sequence.tokens[-1] in self.loaded.end_ids
            rule = behaviour.end_of_turn if is_turn else behaviour.token_stop
            end -= rule == "not in tokens"
        elif behaviour.string_stop == "not in tokens":
            while any(
                stop in str(self.loaded.tokenizer.decode(sequence.tokens[:end]))
                for stop in spec.stop_strings
            ):
                end -= 1
        del sequence.tokens[end:], sequence.logprobs[end:]

    def cancel(self, error: BaseException) -> None:
        """Give every unfinished job an error and empty the batch."""
        jobs = {id(s.job): s.job for s in self.sequences}
        self.sequences, self.next_tokens, self.cache = [], [], SlotCache()
        for job in jobs.values():
            job.finish(error)


def token_errors(spread: float, loaded: LoadedModel) -> torch.Tensor:
    """What the sampler's log-probability of each token is off by: [vocabulary]."""
    generator = torch.Generator().manual_seed(0)
    errors = spread * torch.randn(loaded.vocabulary_size, generator=generator)
    return errors.to(loaded.device)


def pick(logits: torch.Tensor, logprobs: torch.Tensor, rows: list[Sequence]) -> torch.Tensor:
    """Token per row [rows] by inverting the cumulative distribution at the row's next uniform."""
    specs = [s.job.spec for s in rows]
    if all(spec.temperature == 0 for spec in specs):
        return logits.argmax(dim=-1)
    uniforms = torch.tensor(
        [s.uniforms[len(s.tokens)] for s in rows], dtype=torch.float32, device=logits.device
    )
    if any(spec.temperature != 1 for spec in specs):
        # A zero temperature is handled below; any positive number keeps its row finite.
        temperatures = [spec.temperature or 1.0 for spec in specs]
        scaled = logits / torch.tensor(temperatures, device=logits.device)[:, None]
        probabilities = torch.softmax(scaled, dim=-1)
    else:
        probabilities = logprobs.exp()
    if any(spec.top_k > 0 or spec.top_p < 1 for spec in specs):
        probabilities = filtered(probabilities, specs)
    cumulative = probabilities.cumsum(dim=-1)
    # Scaling by the last entry absorbs rounding and the mass that filtering removed; a mark stays
    # below it, or a number that rounds to one would pick the last token, filtered out or not.
    total = cumulative[:, -1:]
    marks = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    chosen = torch.searchsorted(cumulative, marks, right=True)[:, 0]
    chosen = chosen.clamp_max(logits.shape[1] - 1)
    if any(spec.temperature == 0 for spec in specs):
        greedy = torch.tensor([spec.temperature == 0 for spec in specs], device=logits.device)
        chosen = torch.where(greedy, logits.argmax(dim=-1), chosen)
    return chosen


def filtered(probabilities: torch.Tensor, specs: list[SamplingSpec]) -> torch.Tensor:
    """Zero what top-k and then top-p leave out; the most likely token always stays."""
    device, vocabulary = probabilities.device, probabilities.shape[1]
    ordered, order = probabilities.sort(dim=-1, descending=True)
    limits = [spec.top_k if spec.top_k > 0 else vocabulary for spec in specs]
    rank = torch.arange(vocabulary, device=device)
    kept = rank < torch.tensor(limits, device=device)[:, None]
    ordered = ordered * kept
    before = ordered.cumsum(dim=-1) - ordered
    shares = torch.tensor([spec.top_p for spec in specs], device=device)[:, None]
    kept = (before < shares * ordered.sum(dim=-1, keepdim=True)) | (rank == 0)
    return torch.zeros_like(probabilities).scatter(1, order, ordered * kept)


def uniforms_for(stream_seed: int, index: int, count: int) -> np.ndarray:
    """`count` numbers in [0, 1) for sample `index` of a request, independent of everything else."""
    return np.random.Generator(np.random.Philox(key=[stream_seed, index])).random(count)


def stream_seed(*parts: Any) -> int:
    """A 63-bit seed from any printable parts."""
    digest = hashlib.sha256(repr(parts).encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "little") >> 1
