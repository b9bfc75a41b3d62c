"""Merge the rounds of several engines into one batch of a drafter, with fair shares.

Knows engines by number; no links and no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specserve.drafters.pool.shares import (
    CacheShares,
    engine_of,
    fair_places,
    pool_seq_id,
    seq_id_of,
)
from specserve.types import DraftStep, PreparedProposal, Proposal


@dataclass(frozen=True, slots=True)
class EngineRound:
    """One engine's request of a round: releases first, then proposals."""

    engine: int
    steps: tuple[DraftStep, ...]
    released: tuple[int, ...]
    deadline: float  # by the pool's clock


class SharedDrafter(Protocol):
    """The drafter below the pool; an `OpenDrafter` whose anticipation keeps engines apart."""

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]: ...
    def release(self, seq_ids: Sequence[int]) -> None: ...
    def prepared_proposals(self, group: int = 0) -> tuple[PreparedProposal, ...]: ...


class PooledDrafter:
    """A drafter for several engines, whose sequences may have the same ids.

    A batch has draft tokens for at most `max_places` sequences. Where engines want more together,
    each gets a fair share, and its sequences take turns; the others are prefilled only.
    """

    def __init__(self, drafter: SharedDrafter, shares: CacheShares, *, max_places: int) -> None:
        self._drafter, self._shares, self._max_places = drafter, shares, max_places
        self._last_drafted: dict[int, int] = {}  # sequence: number of the batch
        self._num_batches = 0

    def propose(self, rounds: Sequence[EngineRound]) -> Mapping[int, tuple[Proposal, ...]]:
        """Return the proposals of each engine, which has one round here at most."""
        for each in rounds:
            self._release([pool_seq_id(each.engine, seq_id) for seq_id in each.released])
        steps = self._limited(
            [
                replace(step, seq_id=pool_seq_id(each.engine, step.seq_id))
                for each in rounds
                for step in each.steps
            ]
        )
        dropped = self._shares.make_room(steps)
        self._drafter.release(sorted(dropped))
        fitting = [step for step in steps if step.seq_id not in dropped]
        deadline = min(each.deadline for each in rounds)
        found = {proposal.seq_id: proposal for proposal in self._drafter.propose(fitting, deadline)}
        return {
            each.engine: tuple(
                replace(found[pool_id], seq_id=step.seq_id)
                if (pool_id := pool_seq_id(each.engine, step.seq_id)) in found
                else Proposal(step.seq_id, step.stop, (), None, 0)
                for step in each.steps
            )
            for each in rounds
        }

    def prepared_proposals(self, engine: int) -> tuple[PreparedProposal, ...]:
        """Return what has been prepared for the next round of an engine."""
        return tuple(
            replace(
                prepared,
                proposal=replace(prepared.proposal, seq_id=seq_id_of(prepared.proposal.seq_id)),
            )
            for prepared in self._drafter.prepared_proposals(engine)
        )

    def remove_engine(self, engine: int) -> None:
        """Release all sequences of an engine that is gone."""
        known = [seq_id for seq_id in self._last_drafted if engine_of(seq_id) == engine]
        self._release(sorted({*known, *self._shares.remove_engine(engine)}))

    def num_pages_held(self, engine: int) -> int:
        return self._shares.num_held(engine)

    def _limited(self, steps: Sequence[DraftStep]) -> list[DraftStep]:
        """Return the steps, with gamma 0 for those that get no place in this batch."""
        self._num_batches += 1
        wanting = [step.seq_id for step in steps if step.gamma]
        places = fair_places(Counter(map(engine_of, wanting)), self._max_places)
        drafting: set[int] = set()
        for seq_id in sorted(wanting, key=lambda seq_id: self._last_drafted.get(seq_id, 0)):
            if places[engine_of(seq_id)]:
                places[engine_of(seq_id)] -= 1
                drafting.add(seq_id)
        self._last_drafted |= dict.fromkeys(drafting, self._num_batches)
        return [
            step if step.seq_id in drafting or not step.gamma else replace(step, gamma=0)
            for step in steps
        ]

    def _release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._last_drafted.pop(seq_id, None)
        self._shares.release(seq_ids)
        self._drafter.release(seq_ids)
