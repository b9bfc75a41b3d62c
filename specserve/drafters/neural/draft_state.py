"""What a draft model has drawn behind a prefix, and what is left to do for it. Knows no model and no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.drafters.base import Outlook
from specserve.drafters.neural.draws import Source
from specserve.drafters.ranking import Ranked, Sight, mode
from specserve.types import DraftStep, Policy, SparseRows, Step


@dataclass(slots=True)
class Draft:
    """What has been drawn behind a prefix so far. All of it is cached but the last token, and what a grammar forced before that."""

    start: int  # length of the prefix
    policy: Policy
    tokens: list[int] = field(default_factory=list)
    rows: list[tuple[Source, int]] = field(
        default_factory=list
    )  # what each was drawn from, and its row there

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def add(self, token: int, source: Source, row: int) -> None:
        self.tokens.append(token)
        self.rows.append((source, row))

    def unread(self, seq_id: int, held: int) -> Step:
        """What is to be written where `held` positions are; the last token in any case."""
        start = min(held, self.stop - 1)
        return Step(seq_id, start, tuple(self.tokens[start - self.start :]))

    def sources(self) -> SparseRows | None:
        """What the tokens were drawn from; None where each was certain, or nobody asks."""
        if (
            self.policy.warp.temperature == 0
            or self.policy.verifier == "coupled"
            or not self.tokens
        ):
            return None
        return SparseRows(
            np.stack([source.ids[row] for source, row in self.rows]),
            np.stack([_probs(source, row) for source, row in self.rows]),
        )

    def sights(self, end: Tensor) -> list[Sight]:
        """Every place of it, and the one behind it with the logits `end`."""
        places = [
            Sight(source.logits[row], self.policy, self.start + i, token)
            for i, (token, (source, row)) in enumerate(zip(self.tokens, self.rows, strict=True))
        ]
        return [*places, Sight(end, self.policy, self.stop, None)]

    def outlook(self, seq_id: int, places: Sequence[Ranked]) -> Outlook:
        return Outlook(
            seq_id,
            self.start,
            tuple(self.tokens),
            nexts=tuple(place.tokens for place in places),
            trust=tuple(place.trust for place in places[:-1]),
            shares=tuple(place.shares for place in places),
            mode=mode(self.policy),
        )


@dataclass(frozen=True, slots=True)
class Todo:
    """One sequence in a call of `draft`: what is to be read before it can go on, and how many tokens it still wants."""

    seq_id: int
    read: Step
    draft: Draft
    wanted: int

    @property
    def room(self) -> int:
        """The length that it comes to: the last token is drawn and not written."""
        return self.read.stop + max(self.wanted - 1, 0)

    def num_pages(self, page_size: int) -> int:
        """With what a source takes."""
        return pages_from(self.read.start, self.room, page_size) + -(
            -len(self.read.source) // page_size
        )


def stop_of(step: DraftStep) -> int:
    return step.start + len(step.tokens)


def pages_from(start: int, stop: int, page_size: int) -> int:
    """What it may take of the free pages to write from `start` to `stop`, one that is copied on write counted."""
    return -(-stop // page_size) - start // page_size


def certain(token: int, *, width: int, vocab: int, device: torch.device) -> Source:
    """What a token that nobody had to draw was drawn from: itself, on a support as wide as others'."""
    probs = np.zeros((1, width), np.float32)
    probs[0, 0] = 1
    logits = torch.full((1, vocab), -torch.inf, device=device)
    logits[0, token] = 0
    return Source([token], np.full((1, width), token, np.int64), probs, logits)


def _probs(source: Source, row: int) -> NDArray[np.float32]:
    assert source.probs is not None, "a sampled token was drawn from probabilities"
    row_of: NDArray[np.float32] = source.probs[row]
    return row_of
