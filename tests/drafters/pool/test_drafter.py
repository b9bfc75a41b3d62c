"""A drafter that several engines share: ids, fair places, fair pages, and preparation for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from specserve.config.tree import DEMO
from specserve.drafters.anticipation import Anticipation
from specserve.drafters.branches import Fanout
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.pool.drafter import EngineRound, PooledDrafter
from specserve.drafters.pool.shares import (
    CacheShares,
    engine_of,
    fair_places,
    pool_seq_id,
    seq_id_of,
)
from specserve.models.cache import PagedCache
from specserve.models.model import ModelOptions, open_model
from specserve.types import DraftStep, Policy, PreparedProposal, Proposal, Warp

VOCAB = 4096
PAGE_SIZE = 4
POLICY = Policy(Warp(temperature=0), "block", seed=1, prompt_length=2)


def step(seq_id: int, length: int, *, start: int = 0, gamma: int = 2) -> DraftStep:
    return DraftStep(seq_id, start, tuple(range(start, length)), gamma, POLICY)


class RecordingDrafter:
    """A drafter that answers with its sequences' ids, and records what it was asked."""

    def __init__(self) -> None:
        self.batches: list[list[DraftStep]] = []
        self.deadlines: list[float] = []
        self.released: set[int] = set()

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> list[Proposal]:
        self.batches.append(list(steps))
        self.deadlines.append(deadline)
        return [
            Proposal(each.seq_id, each.stop, (7,) * each.gamma, None, each.stop) for each in steps
        ]

    def release(self, seq_ids: Sequence[int]) -> None:
        self.released.update(seq_ids)

    def prepared_proposals(self, group: int = 0) -> tuple[PreparedProposal, ...]:
        return (PreparedProposal(5, Proposal(pool_seq_id(group, 3), 9, (group,), None, 9)),)


def pooled(drafter: RecordingDrafter, *, pages: int = 1000, places: int = 64) -> PooledDrafter:
    return PooledDrafter(drafter, CacheShares(pages, PAGE_SIZE), max_places=places)


def one(engine: int, *steps: DraftStep, released: tuple[int, ...] = ()) -> EngineRound:
    return EngineRound(engine, steps, released, deadline=float(engine))


def drafted(proposals: Sequence[Proposal]) -> list[int]:
    return [proposal.seq_id for proposal in proposals if proposal.tokens]


def test_ids_of_engines_do_not_meet_and_come_back_as_they_were() -> None:
    drafter = RecordingDrafter()
    pool = pooled(drafter)
    found = pool.propose([one(2, step(3, 5)), one(1, step(3, 8), step(4, 2))])
    assert len({each.seq_id for each in drafter.batches[0]}) == 3
    assert [proposal.seq_id for proposal in found[1]] == [3, 4]
    assert [proposal.start for proposal in found[2]] == [5]
    assert drafter.deadlines == [1.0], "the batch ends for the engine that waits least"
    pool.propose([one(1, released=(3,))])
    assert drafter.released == {pool_seq_id(1, 3)}
    (prepared,) = pool.prepared_proposals(2)
    assert (prepared.proposal.seq_id, prepared.proposal.tokens) == (3, (2,))
    assert [engine_of(pool_seq_id(5, 9)), seq_id_of(pool_seq_id(5, 9))] == [5, 9]


@pytest.mark.parametrize(
    ("wanted", "total", "places"),
    [
        ({1: 10, 2: 1}, 4, {1: 3, 2: 1}),
        ({1: 10, 2: 10}, 8, {1: 4, 2: 4}),
        ({1: 2, 2: 3}, 64, {1: 2, 2: 3}),
        ({1: 9, 2: 9, 3: 1}, 11, {1: 5, 2: 5, 3: 1}),
        ({1: 9, 2: 9, 3: 9}, 1, {1: 1, 2: 1, 3: 1}),
        ({}, 4, {}),
    ],
)
def test_places_are_shared_equally_and_what_one_engine_leaves_goes_to_the_others(
    wanted: dict[int, int], total: int, places: dict[int, int]
) -> None:
    assert fair_places(wanted, total) == places


def test_a_busy_engine_takes_no_place_from_another_and_its_sequences_take_turns() -> None:
    drafter = RecordingDrafter()
    pool = pooled(drafter, places=4)
    busy = [step(seq_id, 5) for seq_id in range(9)]
    turns: list[int] = []
    for _ in range(3):
        found = pool.propose([one(1, *busy), one(2, step(0, 5))])
        assert drafted(found[2]) == [0]
        assert len(found[1]) == 9, "those without a place are prefilled"
        turns += drafted(found[1])
    assert sorted(turns) == list(range(9))


def test_pages_are_taken_from_the_engine_with_most_of_them_not_from_one_within_its_share() -> None:
    drafter = RecordingDrafter()
    pool = pooled(drafter, pages=20)
    pool.propose([one(1, *(step(seq_id, 10) for seq_id in range(5)))])  # all 20 pages
    assert pool.num_pages_held(1) == 20
    found = pool.propose([one(2, step(0, 10), step(1, 10))])
    assert drafted(found[2]) == [0, 1]
    assert drafter.released == {pool_seq_id(1, 0), pool_seq_id(1, 1)}, "the longest unused"
    assert (pool.num_pages_held(1), pool.num_pages_held(2)) == (12, 8)
    # Engine 1 wants all again: it loses some of its own, and engine 2 keeps what it has.
    found = pool.propose([one(1, *(step(seq_id, 10) for seq_id in range(5)))])
    lost = [proposal for proposal in found[1] if not proposal.tokens]
    assert len(lost) == 2
    assert all(proposal.num_cached == 0 for proposal in lost), "their next steps start at 0"
    assert pool.num_pages_held(2) == 8
    pool.remove_engine(1)
    assert pool.num_pages_held(1) == 0
    assert pool_seq_id(1, 4) in drafter.released


def open_neural() -> tuple[NeuralDrafter, PagedCache]:
    opened = open_model(DEMO / "draft", ModelOptions(dtype="bfloat16", device="cpu", pages=400))
    drafter = NeuralDrafter(
        opened.runner, vocab_size=VOCAB, target_vocab_size=VOCAB, context=1024, support=16
    )
    return drafter, opened.runner.cache


@pytest.mark.parametrize("num_passes", range(5))
def test_what_another_engine_interrupts_is_prepared_after_its_answer(num_passes: int) -> None:
    (neural, cache), gamma = open_neural(), 4
    ahead = Anticipation(neural, Fanout(width=8), clock=lambda: 0.0, group_of=engine_of)
    ahead._hit_rate = 1.0
    first, second = (
        replace(
            step(pool_seq_id(engine, 0), 12, gamma=gamma), tokens=tuple(range(engine, 12 + engine))
        )
        for engine in (1, 2)
    )
    checks = iter([False] * num_passes)
    ahead.propose([first], float("inf"))
    ahead.prepare(lambda: next(checks, True))
    assert not ahead.prepared_proposals(1), "half of it would be sent, and the rest never"
    ahead.propose([second], float("inf"))
    ahead.prepare(lambda: False)
    for engine, asked in enumerate((first, second), 1):
        branches = ahead._prepared[asked.seq_id].branches
        assert {len(proposal.tokens) for proposal in branches.values()} == {gamma}
        assert len(ahead.prepared_proposals(engine)) == len(branches)
    alone = Anticipation(open_neural()[0], Fanout(width=8), clock=lambda: 0.0)
    alone.propose([first], float("inf"))
    alone.prepare(lambda: False)
    ours, expected = (one._prepared[first.seq_id].branches for one in (ahead, alone))
    both = ours.keys() & expected.keys()
    assert len(both) > 8, "the engines' outcomes may have been chosen together"
    assert all(ours[outcome].tokens == expected[outcome].tokens for outcome in both)
    ahead.release([first.seq_id, second.seq_id])
    ahead.prepare(lambda: False)
    assert cache.num_used == 0


def test_preparation_for_one_engine_survives_the_messages_of_another() -> None:
    neural, cache = open_neural()
    ahead = Anticipation(neural, Fanout(width=8), clock=lambda: 0.0, group_of=engine_of)
    first, second = (
        replace(step(pool_seq_id(engine, 0), 12), tokens=tuple(range(engine, 12 + engine)))
        for engine in (1, 2)
    )
    (proposal,) = ahead.propose([first], float("inf"))
    ahead.prepare(lambda: False)
    ahead.propose([second], float("inf"))
    ahead.prepare(lambda: False)
    ahead.propose([second], float("inf"))  # a retry of the same engine
    likely = ahead._prepared[first.seq_id].branches
    accepted, token = next(iter(likely))
    after = DraftStep(
        first.seq_id, first.stop + accepted, (*proposal.tokens[accepted:accepted], token), 2, POLICY
    )
    (hit,) = ahead.propose([after], float("inf"))
    assert hit.anticipated is True
    ahead.release([first.seq_id, second.seq_id])
    ahead.prepare(lambda: False)
    assert cache.num_used == 0
