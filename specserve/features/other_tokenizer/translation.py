"""Tokens of a target and how a draft model of another tokenizer spells them, as arrays of ids.

Token-level intersection (2502.05202, Algorithm 4): tokens with equal bytes are one token. Knows no
tensors, no tokenizer and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenTranslation:
    """The tokens that target and draft share, and how the draft spells each token of the target.

    Draft tokens are drawn from the shared ones alone, so each is one token to both.
    """

    target_ids: Ints  # [shared], each once
    draft_ids: Ints  # [shared]: the same tokens to the draft
    spellings: Sequence[tuple[int, ...]]
    """[target's ids] the draft's tokens with the bytes of each of the target's; none is empty."""
    prefix: tuple[int, ...] = ()
    """Tokens that the draft needs before a text and the target does not have, such as a begin."""
    filler: int = 0
    """The draft's token in the place of one that it cannot spell."""

    @property
    def num_shared(self) -> int:
        return len(self.target_ids)

    def limited_to(self, *, target_vocab: int, draft_vocab: int) -> TokenTranslation:
        """Return the translation between models that know only the ids below these numbers.

        A target's ids past its tokenizer, which are padding, are spelt by the filler.
        """
        known = (self.target_ids < target_vocab) & (self.draft_ids < draft_vocab)
        filler = (self.filler if self.filler < draft_vocab else 0,)
        spellings = [
            spelling if max(spelling) < draft_vocab else filler
            for spelling in self.spellings[:target_vocab]
        ]
        return replace(
            self,
            target_ids=self.target_ids[known],
            draft_ids=self.draft_ids[known],
            spellings=[*spellings, *[filler] * (target_vocab - len(spellings))],
            prefix=tuple(token for token in self.prefix if token < draft_vocab),
            filler=filler[0],
        )
