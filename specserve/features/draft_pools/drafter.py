"""Draft for the rounds of several engines in the same passes, with fair shares.

Rounds join and leave between passes, so none waits for another's. Knows engines by number; no links
and no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from specserve.drafters.base import never
from specserve.drafters.drafting_round import DraftingRound
from specserve.features.draft_pools.shares import (
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
    """The drafter below the pool; a `MergedAnticipation`."""

    def begin(self, engine: int, steps: Sequence[DraftStep], deadline: float) -> DraftingRound: ...
    def advance(self, should_stop: Callable[[], bool]) -> Sequence[DraftingRound]: ...
    def release(self, seq_ids: Sequence[int]) -> None: ...
    def prepared_proposals(self, engine: int) -> tuple[PreparedProposal, ...]: ...
    def remove_engine(self, engine: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _OpenRound:
    """A round that is drafted for, and which of its sequences have lost their pages."""

    asked: EngineRound
    drafting: DraftingRound
    dropped: set[int] = field(default_factory=set)  # ids in the pool

    def answer(self) -> tuple[Proposal, ...]:
        found = {proposal.seq_id: proposal for proposal in self.drafting.answer()}
        return tuple(
            Proposal(step.seq_id, step.stop, (), None, 0)
            if (pool_id := pool_seq_id(self.asked.engine, step.seq_id)) in self.dropped
            else replace(found[pool_id], seq_id=step.seq_id)
            for step in self.asked.steps
        )


class PooledDrafter:
    """A drafter for several engines, whose sequences may have the same ids.

    Rounds have draft tokens for at most `max_places` sequences. Where engines want more together,
    each gets a fair share, and its sequences take turns; the others are prefilled only. A round
    that joins has its share at once, so until the others are done there may be more.
    """

    def __init__(self, drafter: SharedDrafter, shares: CacheShares, *, max_places: int) -> None:
        self._drafter, self._shares, self._max_places = drafter, shares, max_places
        self._last_drafted: dict[int, int] = {}  # sequence: number of the batch
        self._num_batches = 0
        self._rounds: dict[int, _OpenRound] = {}  # without an answer yet, by engine

    @property
    def is_drafting(self) -> bool:
        """True while some round has no answer yet."""
        return bool(self._rounds)

    def propose(
        self, rounds: Sequence[EngineRound], should_stop: Callable[[], bool] = never
    ) -> Mapping[int, tuple[Proposal, ...]]:
        """Take rounds, draft for all until some can be answered, and return the answers.

        An engine has one round here at most, and a new one replaces it. It returns with no answer
        once `should_stop`, which is called between passes.
        """
        if rounds:
            self._begin(rounds)
        try:
            done = self._drafter.advance(should_stop)
        except Exception:
            self._rounds.clear()
            raise
        ended = {engine: each for engine, each in self._rounds.items() if each.drafting in done}
        for engine in ended:
            del self._rounds[engine]
        return {engine: each.answer() for engine, each in ended.items()}

    def _begin(self, rounds: Sequence[EngineRound]) -> None:
        for each in rounds:
            self._rounds.pop(each.engine, None)
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
        fitting: dict[int, list[DraftStep]] = {each.engine: [] for each in rounds}
        for step in steps:
            if step.seq_id not in dropped:
                fitting[engine_of(step.seq_id)].append(step)
        for each in rounds:
            drafting = self._drafter.begin(each.engine, fitting[each.engine], each.deadline)
            self._rounds[each.engine] = _OpenRound(each, drafting)
        for pool_id in dropped:
            if (owner := self._rounds.get(engine_of(pool_id))) is not None:
                owner.dropped.add(pool_id)

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
        self._rounds.pop(engine, None)
        self._release(sorted({*known, *self._shares.remove_engine(engine)}))
        self._drafter.remove_engine(engine)

    def num_pages_held(self, engine: int) -> int:
        return self._shares.num_held(engine)

    def _limited(self, steps: Sequence[DraftStep]) -> list[DraftStep]:
        """Return the steps, with gamma 0 for those that get no place in this batch."""
        self._num_batches += 1
        wanting = [step.seq_id for step in steps if step.gamma]
        wanted = Counter(map(engine_of, wanting))
        for engine, each in self._rounds.items():  # whose places are taken, fair or not
            wanted[engine] += len(each.drafting.drafting)
        places = fair_places(wanted, self._max_places)
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
