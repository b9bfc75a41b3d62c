"""A drafter that several engines share: ids, fair places, fair pages, and preparation for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from specserve.config.tree import DEMO
from specserve.drafters.anticipation import Anticipation
from specserve.drafters.branches import Fanout
from specserve.drafters.drafting_round import DraftingRound
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.prepared_branches import PreparedBranches
from specserve.errors import OutOfPages
from specserve.features.draft_pools.drafter import EngineRound, PooledDrafter
from specserve.features.draft_pools.merged import MergedAnticipation
from specserve.features.draft_pools.rounds import DraftingRounds
from specserve.features.draft_pools.shares import (
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
    """A drafter that answers with its sequences' ids, and records what was requested."""

    def __init__(self) -> None:
        self.batches: list[list[DraftStep]] = []
        self.released: set[int] = set()
        self._rounds = DraftingRounds(self, clock=lambda: 0.0)

    def begin(self, engine: int, steps: Sequence[DraftStep], deadline: float) -> DraftingRound:
        return self._rounds.begin(steps, deadline)

    def advance(self, should_stop: Callable[[], bool]) -> list[DraftingRound]:
        return self._rounds.advance(should_stop)[0]

    def draft(self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]) -> list[Proposal]:
        self.batches.append(list(steps))
        most = 1 if should_stop() else 100
        return [
            Proposal(each.seq_id, each.stop, (7,) * min(each.gamma, most), None, each.stop)
            for each in steps
        ]

    def release(self, seq_ids: Sequence[int]) -> None:
        self.released.update(seq_ids)

    def remove_engine(self, engine: int) -> None: ...

    def prepared_proposals(self, engine: int) -> tuple[PreparedProposal, ...]:
        return (PreparedProposal(5, Proposal(pool_seq_id(engine, 3), 9, (engine,), None, 9)),)


def raise_out_of_pages(*args: object) -> list[Proposal]:
    raise OutOfPages("no page is free")


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


def propose(ahead: MergedAnticipation, step: DraftStep) -> Sequence[Proposal]:
    """Return the answer to a message of one step."""
    asked = ahead.begin(engine_of(step.seq_id), [step], float("inf"))
    while asked not in ahead.advance(lambda: False):
        pass
    return asked.answer()


def prepared_for(ahead: MergedAnticipation, seq_id: int) -> PreparedBranches:
    return ahead.engines[engine_of(seq_id)]._branches.prepared[seq_id]


@pytest.mark.parametrize("num_passes", range(5))
def test_what_another_engine_interrupts_is_prepared_after_its_answer(num_passes: int) -> None:
    (neural, cache), gamma = open_neural(), 4
    ahead = MergedAnticipation(neural, Fanout(width=8), clock=lambda: 0.0)
    first, second = (
        replace(
            step(pool_seq_id(engine, 0), 12, gamma=gamma), tokens=tuple(range(engine, 12 + engine))
        )
        for engine in (1, 2)
    )
    checks = iter([False] * num_passes)
    propose(ahead, first)
    ahead.engines[1]._hit_rate = 1.0
    ahead.prepare(lambda: next(checks, True))
    assert not ahead.prepared_proposals(1), "half of it would be sent, and the rest never"
    propose(ahead, second)
    ahead.engines[2]._hit_rate = 1.0
    ahead.prepare(lambda: False)
    for engine, asked in enumerate((first, second), 1):
        branches = prepared_for(ahead, asked.seq_id).branches
        assert {len(proposal.tokens) for proposal in branches.values()} == {gamma}
        assert len(ahead.prepared_proposals(engine)) == len(branches)
    alone = Anticipation(open_neural()[0], Fanout(width=8), clock=lambda: 0.0)
    alone.propose([first], float("inf"))
    alone.prepare(lambda: False)
    ours = prepared_for(ahead, first.seq_id).branches
    expected = alone._branches.prepared[first.seq_id].branches
    both = ours.keys() & expected.keys()
    assert len(both) > 8, "the engines' outcomes may have been chosen together"
    assert all(ours[outcome].tokens == expected[outcome].tokens for outcome in both)
    ahead.release([first.seq_id, second.seq_id])
    ahead.prepare(lambda: False)
    assert cache.num_used == 0


def test_preparation_for_one_engine_survives_the_messages_of_another() -> None:
    neural, cache = open_neural()
    ahead = MergedAnticipation(neural, Fanout(width=8), clock=lambda: 0.0)
    first, second = (
        replace(step(pool_seq_id(engine, 0), 12), tokens=tuple(range(engine, 12 + engine)))
        for engine in (1, 2)
    )
    (proposal,) = propose(ahead, first)
    ahead.prepare(lambda: False)
    propose(ahead, second)
    ahead.prepare(lambda: False)
    propose(ahead, second)  # a retry of the same engine
    likely = prepared_for(ahead, first.seq_id).branches
    accepted, token = next(iter(likely))
    after = DraftStep(
        first.seq_id, first.stop + accepted, (*proposal.tokens[accepted:accepted], token), 2, POLICY
    )
    (hit,) = propose(ahead, after)
    assert hit.anticipated is True
    ahead.release([first.seq_id, second.seq_id])
    ahead.prepare(lambda: False)
    assert cache.num_used == 0


def asked_of(engine: int, *, gamma: int) -> DraftStep:
    tokens = tuple(range(engine, 12 + engine))
    return replace(step(0, 12, gamma=gamma), tokens=tokens)


def open_pool() -> tuple[PooledDrafter, MergedAnticipation]:
    """Return a pool of the demo draft, and its anticipation."""
    neural, cache = open_neural()
    ahead = MergedAnticipation(neural, Fanout(width=8), clock=lambda: 0.0)
    return PooledDrafter(ahead, CacheShares(cache.num_pages, PAGE_SIZE), max_places=64), ahead


def alone(step: DraftStep) -> tuple[int, ...]:
    (proposal,) = open_pool()[0].propose([one(1, step)])[1]
    return proposal.tokens


@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_a_round_joins_the_passes_of_another_and_each_is_answered_when_it_is_done(
    num_passes: int,
) -> None:
    pool, _ = open_pool()
    first, second = asked_of(1, gamma=4), asked_of(2, gamma=4)
    checks = iter([False] * (num_passes - 1))
    assert not pool.propose([one(1, first)], lambda: next(checks, True))
    answers = pool.propose([one(2, second)])
    assert list(answers) == [1], "it wants fewer tokens than the one that has joined"
    assert pool.is_drafting
    answers = {**answers, **pool.propose([])}
    assert not pool.is_drafting
    for engine, asked in ((1, first), (2, second)):
        (proposal,) = answers[engine]
        assert proposal.tokens == alone(asked)
        assert len(proposal.tokens) == 4


def test_what_is_prepared_is_answered_between_two_passes_of_another_round() -> None:
    pool, ahead = open_pool()
    first = asked_of(1, gamma=2)
    pool.propose([one(1, first)])
    ahead.prepare(lambda: False)
    accepted, token = next(iter(prepared_for(ahead, pool_seq_id(1, 0)).branches))
    start = first.stop + accepted
    prepared = DraftStep(0, start, (token,), 2, POLICY)
    assert not pool.propose([one(2, asked_of(2, gamma=4))], lambda: True)
    answers = pool.propose([one(1, prepared)])
    assert [each.anticipated for each in answers[1]] == [True]
    assert 2 not in answers
    assert list(pool.propose([])) == [2]


def test_branches_of_one_engine_are_drafted_in_the_passes_of_another() -> None:
    pool, ahead = open_pool()
    pool.propose([one(1, asked_of(1, gamma=4))])
    checks = iter([False, False, False])
    ahead.prepare(lambda: next(checks, True))  # interrupted after a pass over the branches
    prepared = prepared_for(ahead, pool_seq_id(1, 0))
    assert prepared.unfinished
    before = {outcome: len(found.tokens) for outcome, found in prepared.branches.items()}
    pool.propose([one(2, asked_of(2, gamma=2))])
    after = {outcome: len(found.tokens) for outcome, found in prepared.branches.items()}
    assert sum(after.values()) > sum(before.values())


def test_a_round_that_other_passes_have_drafted_further_than_it_goes_is_answered() -> None:
    """Each forecast for an engine that was answered takes the rounds under way along."""
    pool, ahead = open_pool()
    prepared = []
    for engine in (1, 3):
        first = asked_of(engine, gamma=2)
        pool.propose([one(engine, first)])
        ahead.prepare(lambda: False)
        accepted, token = next(iter(prepared_for(ahead, pool_seq_id(engine, 0)).branches))
        prepared.append(one(engine, DraftStep(0, first.stop + accepted, (token,), 2, POLICY)))
    waiting = asked_of(2, gamma=2)
    assert not pool.propose([one(2, waiting)], lambda: True), "it lacks one token"
    for each in prepared:
        assert list(pool.propose([each])) == [each.engine]
        ahead.fork()
    pool.remove_engine(1)  # whose branches have draft tokens already
    (proposal,) = pool.propose([])[2]
    assert proposal.tokens == alone(waiting)


def test_a_new_round_of_an_engine_replaces_the_one_without_an_answer() -> None:
    pool, _ = open_pool()
    first = asked_of(1, gamma=4)
    assert not pool.propose([one(1, first)], lambda: True)
    after = DraftStep(0, first.stop, (5,), 2, POLICY)
    assert not pool.propose([one(1, after)]), "what it replaces is done first"
    answers = pool.propose([])
    assert [(each.start, len(each.tokens)) for each in answers[1]] == [(13, 2)]
    assert not pool.is_drafting
    pool.remove_engine(1)
    assert not pool.propose([])


def test_pages_that_a_running_round_loses_are_said_in_its_answer() -> None:
    pool = pooled(RecordingDrafter(), pages=20)
    assert not pool.propose([one(1, *(step(seq_id, 10) for seq_id in range(5)))], lambda: True)
    answers = {**pool.propose([one(2, step(0, 10), step(1, 10))]), **pool.propose([])}
    lost = [each.seq_id for each in answers[1] if not each.tokens]
    assert lost == [0, 1]
    assert [each.num_cached for each in answers[1] if not each.tokens] == [0, 0]


def test_a_failed_batch_leaves_no_round_behind() -> None:
    drafter = RecordingDrafter()
    pool = pooled(drafter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "draft", raise_out_of_pages)
        with pytest.raises(OutOfPages):
            pool.propose([one(1, step(0, 5))])
    assert not pool.is_drafting
    assert list(pool.propose([one(2, step(0, 5))])) == [2]
    assert [engine_of(each.seq_id) for each in drafter.batches[-1]] == [2]
