"""The draft tokens that a model has drawn after a prefix, and the work that remains.

Knows no model and no cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.drafters.neural.draws import HostDraws
from specserve.drafters.ranking import PositionLogits
from specserve.types import Policy, SparseDistribution, Step


@dataclass(slots=True)
class DraftState:
    """The draft tokens of a sequence so far.

    All of them are cached but the last, and those that a grammar forced just before it.
    """

    start: int
    """Length of the prefix."""
    policy: Policy
    tokens: list[int] = field(default_factory=list)
    rows: list[tuple[HostDraws, int]] = field(default_factory=list)
    """The draws that each token is from, and its row there."""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def append(self, token: int, draws: HostDraws, row: int) -> None:
        self.tokens.append(token)
        self.rows.append((draws, row))

    def missing_step(self, seq_id: int, num_cached: int) -> Step:
        """Return the step that writes what is not cached, at least the last token."""
        start = min(num_cached, self.stop - 1)
        tokens = tuple(self.tokens[start - self.start :])
        return Step(seq_id, start, tokens, cache_salt=self.policy.cache_salt)

    def distribution(self) -> SparseDistribution | None:
        """Return q, or None where each token was certain or q is not used."""
        if (
            self.policy.warp.temperature == 0
            or self.policy.verifier == "coupled"
            or not self.tokens
        ):
            return None
        return SparseDistribution(
            np.stack([draws.ids[row] for draws, row in self.rows]),
            np.stack([_row_probs(draws, row) for draws, row in self.rows]),
        )

    def position_logits(self, last: Tensor) -> list[PositionLogits]:
        """Return the logits at each draft token, and `last` at the position after them."""
        positions = [
            PositionLogits(draws.logits[row], self.policy, self.start + i, token)
            for i, (token, (draws, row)) in enumerate(zip(self.tokens, self.rows, strict=True))
        ]
        return [*positions, PositionLogits(last, self.policy, self.stop, None)]


@dataclass(frozen=True, slots=True)
class DraftTask:
    """One sequence in a call of `draft`: what to prefill first, and how many tokens to draw."""

    seq_id: int
    prefill: Step
    state: DraftState
    num_wanted: int
    written: range
    """Positions of the model's cache that the prefill writes."""

    @property
    def newest(self) -> int:
        """The newest token: the last draft token, or the last one of the prefix."""
        return (self.state.tokens or self.prefill.tokens)[-1]

    @property
    def final_length(self) -> int:
        """Length of the model's cache afterwards; the last token is drawn and not written."""
        return self.written.stop + max(self.num_wanted - 1, 0)

    def max_new_pages(self, page_size: int) -> int:
        """Return the pages that the task may take, including the encoder input's."""
        pages = max_new_pages(self.written.start, self.final_length, page_size)
        return pages + -(-len(self.prefill.encoder_input) // page_size)


def max_new_pages(start: int, stop: int, page_size: int) -> int:
    """Return the free pages that writing from `start` to `stop` may take.

    It counts one that is copied on write.
    """
    return -(-stop // page_size) - start // page_size


def one_hot_draws(token: int, *, width: int, vocab: int, device: torch.device) -> HostDraws:
    """Return the one-hot distribution of a forced token, padded to the width of sampled ones."""
    probs = np.zeros((1, width), np.float32)
    probs[0, 0] = 1
    logits = torch.full((1, vocab), -torch.inf, device=device)
    logits[0, token] = 0
    return HostDraws([token], np.full((1, width), token, np.int64), probs, logits)


def _row_probs(draws: HostDraws, row: int) -> NDArray[np.float32]:
    assert draws.probs is not None, "a sampled token was drawn from probabilities"
    probs: NDArray[np.float32] = draws.probs[row]
    return probs
