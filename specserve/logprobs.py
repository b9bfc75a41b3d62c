"""Logprobs of a text's tokens and of its prompt's, as the target reports them. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """A wish for the logprobs of the prompt's tokens after the positions of a step."""

    num_top: int  # alternatives to report beside each token
    # The prompt's token after the step's; None: the prompt ends with the step.
    next_token: int | None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities at one position, under the target's unwarped distribution.

    `token` is the emitted token's; `top` are the likeliest tokens', falling.
    """

    token: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]
    rank: int | None = None  # of the token, 1 being the likeliest; known for prompts only


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Logprobs of successive tokens of a prompt, as arrays: there may be a million of them."""

    start: int  # position of the first of these tokens, at least 1: nothing predicts the first
    token: NDArray[np.float32]  # [tokens]
    rank: NDArray[np.uint32]  # [tokens]
    top_ids: NDArray[np.uint32]  # [tokens, alternatives]
    top: NDArray[np.float32]  # [tokens, alternatives], falling

    def __len__(self) -> int:
        return len(self.token)

    @property
    def stop(self) -> int:
        """Position after the last of these tokens."""
        return self.start + len(self.token)

    @classmethod
    def empty(cls, start: int, num_top: int) -> PromptLogprobs:
        """Return the logprobs of no tokens."""
        ids, reals = np.empty((0, num_top), np.uint32), np.empty((0, num_top), np.float32)
        return cls(start, np.empty(0, np.float32), np.empty(0, np.uint32), ids, reals)

    @classmethod
    def join(cls, parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
        """Return successive parts as one."""
        names = ("token", "rank", "top_ids", "top")
        columns = [np.concatenate([getattr(part, name) for part in parts]) for name in names]
        return cls(parts[0].start, *columns)

    def part(self, first: int, stop: int, *, start: int, num_top: int) -> PromptLogprobs:
        """Return the logprobs of the tokens `first` to `stop` of these, which begin at `start`."""
        own, ranks = self.token[first:stop], self.rank[first:stop]
        ids, top = self.top_ids[first:stop, :num_top], self.top[first:stop, :num_top]
        return PromptLogprobs(start, own, ranks, ids, top)

    def rows(self, first: int, stop: int, num_top: int | None = None) -> list[Logprobs]:
        """Return the logprobs of the tokens `first` to `stop` of these, each by itself.

        `num_top` cuts the alternatives.
        """
        columns = (self.token, self.rank, self.top_ids[:, :num_top], self.top[:, :num_top])
        rows = zip(*(column[first:stop].tolist() for column in columns), strict=True)
        return [Logprobs(own, tuple(ids), tuple(top), rank) for own, rank, ids, top in rows]
