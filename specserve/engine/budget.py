"""How many positions a pass may have: as configured, or what the hardware computes in time.

Knows seconds and counts; no sequences.
"""

from __future__ import annotations

import logging
from collections import abc
from dataclasses import dataclass

from specserve.config.sections import MAX_BATCH_TOKENS

log = logging.getLogger(__name__)

MAX_PASS_S = 0.2
"""Seconds of a pass up to which prompts may hold up decoding, by the curve of the warm-up."""
MIN_TOKENS = 64
UNMEASURED_TOKENS = 512  # of a target that was not warmed up


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The positions of a round: for decoding sequences, draft tokens and prompts together.

    A budget that follows from the hardware yields to decoding: every decoding sequence takes part
    in every round, and prompts get as many positions as decoding has, or more. A pass thus takes
    at most MAX_PASS_S, or twice what decoding takes by itself. A configured budget is never
    exceeded: where the decoding sequences are more, they take turns.
    """

    tokens: int
    is_fixed: bool = True

    @classmethod
    def from_curve(
        cls, max_batch_tokens: int | None, curve: abc.Sequence[tuple[int, float]]
    ) -> TokenBudget:
        """Return the configured budget, or without one what takes MAX_PASS_S by the curve.

        Beyond the last measurement a pass is expected to take time in proportion to its positions,
        which it never exceeds: it could be cut into passes of the measured size.
        """
        if max_batch_tokens is not None:
            return cls(max_batch_tokens)
        tokens, reason = UNMEASURED_TOKENS, "no pass was measured"
        if curve:
            computed = _tokens_in(MAX_PASS_S, curve)
            tokens = min(max(computed, MIN_TOKENS), MAX_BATCH_TOKENS)
            reason = f"the target computes about {computed} in {MAX_PASS_S:g} s"
        log.info("limits.max_batch_tokens is %d: %s", tokens, reason)
        return cls(tokens, is_fixed=False)

    def for_prompts(self, pending: int) -> int:
        """Return the positions that prompts with that many pending tokens get in any case."""
        return min(pending, max(1, self.tokens // 4))

    def limit(self, num_decoding: int, *, prompts: int) -> int:
        """Return the positions of a round; `prompts` of them are kept for prompts."""
        if self.is_fixed:
            return max(self.tokens, 1 + prompts)
        return max(self.tokens, num_decoding * (2 if prompts else 1))


def _tokens_in(seconds: float, curve: abc.Sequence[tuple[int, float]]) -> int:
    """Return the most positions whose pass takes no longer, by interpolation."""
    last_positions, last_seconds = 0, 0.0
    for positions, taken in curve:
        if taken > seconds:
            share = (seconds - last_seconds) / (taken - last_seconds)
            return last_positions + int(share * (positions - last_positions))
        last_positions, last_seconds = positions, max(taken, last_seconds)
    return int(last_positions * seconds / max(last_seconds, 1e-9))
