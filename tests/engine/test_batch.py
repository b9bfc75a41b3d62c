"""A round's messages follow from its entries, and the answers are matched to them."""

from __future__ import annotations

import pytest

from specserve.engine.batch import Batch, BatchEntry
from specserve.engine.sequence import Sequence
from specserve.types import Policy, Proposal, Request, Verdict, Warp


def sequence(seq_id: int, length: int, *, num_cached: int) -> Sequence:
    made = Sequence(
        seq_id,
        Request(tuple(range(length)), 20, Warp(), seed=1),
        Policy(Warp(), "block", 1, length),
        context=99,
        draft_limit=99,
        end_ids=frozenset(),
    )
    made.target_cached = made.draft_cached = num_cached
    return made


def mixed_batch() -> Batch:
    """Return a batch of a sequence with drafts, one without, and a chunk of a prompt."""
    return Batch(
        [
            BatchEntry(sequence(1, 6, num_cached=5), 6, needs_verdict=True, gamma=2, draft_stop=6),
            BatchEntry(sequence(2, 8, num_cached=7), 8, needs_verdict=True),
            BatchEntry(sequence(3, 9, num_cached=0), 4, needs_verdict=False, draft_stop=4),
        ],
        num_prompt_tokens=4,
    )


def test_the_drafter_gets_steps_only_for_entries_that_draft_or_fill_its_cache() -> None:
    assert [(step.seq_id, step.tokens, step.gamma) for step in mixed_batch().draft_steps()] == [
        (1, (5,), 2),
        (3, (0, 1, 2, 3), 0),
    ]


def test_the_target_gets_a_step_for_every_entry_with_its_own_drafts() -> None:
    steps = mixed_batch().verify_steps(
        [Proposal(3, 4, (), None, 4), Proposal(1, 6, (50, 51), None, 7)]
    )
    assert [(step.seq_id, step.tokens, step.drafts, step.needs_verdict) for step in steps] == [
        (1, (5,), (50, 51), True),
        (2, (7,), (), True),
        (3, (0, 1, 2, 3), (), False),
    ]


def test_committing_grows_the_entries_with_verdicts_and_advances_the_others() -> None:
    batch = mixed_batch()
    batch.verify_steps([Proposal(1, 6, (50, 51), None, 7), Proposal(3, 4, (), None, 4)])
    chunks = batch.commit([Verdict(1, 1, 60, None), Verdict(2, 0, 61, None)])
    assert [(chunk.seq_id, chunk.tokens) for chunk in chunks] == [(1, (50, 60)), (2, (61,))]
    assert [
        (entry.sequence.target_cached, entry.sequence.draft_cached) for entry in batch.entries
    ] == [
        (7, 7),
        (8, 7),
        (4, 4),
    ]


def test_a_missing_verdict_raises() -> None:
    batch = mixed_batch()
    batch.verify_steps([])
    with pytest.raises(ValueError, match="zip"):
        batch.commit([Verdict(1, 0, 60, None)])


def test_only_rounds_of_decoding_alone_count_as_steady() -> None:
    assert not mixed_batch().is_steady
    entries = mixed_batch().entries[:2]
    assert Batch(entries, num_caught_up=2).is_steady
    assert not Batch(entries, num_caught_up=60).is_steady
