"""Second spellings: now and then a sampled token is written as two with the same text.

Real models do so once in a while; the stand-ins, trained on one tokenisation, never would. A loop
that decodes a completion and encodes it again then trains ids that were not sampled, and only a
completion with a second spelling shows it. The completion is sampled as ever and then gone through
once more with its tokens given, as a demonstration's are: its text is what it would have been, its
log-probabilities are the model's own for the new ids.
"""

import random
from dataclasses import dataclass, field
from typing import Any

# The first token from one of these positions on that has a second spelling is respelled.
FIRST_POSITIONS = 6


@dataclass
class Spelling:
    """`share` of the completions get one second spelling. Used on the compute thread only."""

    share: float = 0.0
    _pieces: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def start(self, stream_seed: int, index: int) -> int | None:
        """From which position on sample `index` of a request is respelled; None for never."""
        if not self.share:
            return None
        # A stream of its own, so that the sampler's choices stay what they were.
        rng = random.Random(f"spelling {stream_seed} {index}")
        return rng.randrange(FIRST_POSITIONS) if rng.random() < self.share else None

    def respelled(self, tokenizer: Any, tokens: list[int], start: int) -> list[int]:
        """The tokens with the first from `start` on that has a second spelling written as two;
        empty when none has."""
        for place, token in enumerate(tokens[start:], start):
            key = id(tokenizer), token
            if key not in self._pieces:
                self._pieces[key] = self._split(tokenizer, token)
            if pieces := self._pieces[key]:
                return [*tokens[:place], *pieces, *tokens[place + 1 :]]
        return []

    @staticmethod
    def _split(tokenizer: Any, token: int) -> list[int]:
        """Two ids that write the text of one; empty when there are none."""
        if token in tokenizer.all_special_ids:
            return []
        text = tokenizer.decode([token])
        for border in range(1, len(text)):
            parts = [text[:border], text[border:]]
            ids = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
            flat = [i for part in ids for i in part]
            if len(flat) == 2 and token not in flat and tokenizer.decode(flat) == text:
                return flat
        return []
