"""A round's messages follow from its rows; answers find their rows again."""

from __future__ import annotations

import pytest

from specserve.engine.batch import Batch, Row
from specserve.engine.sequence import Sequence
from specserve.types import Policy, Proposal, Request, Verdict, Warp


def sequence(seq_id: int, length: int, *, held: int) -> Sequence:
    made = Sequence(
        seq_id,
        Request(tuple(range(length)), 20, Warp(), seed=1),
        Policy(Warp(), "block", 1, length),
        context=99,
        draft_limit=99,
        end_ids=frozenset(),
    )
    made.target_held = made.draft_held = held
    return made


def mixed_batch() -> Batch:
    """One decodes with drafts, one without, one reads a chunk of its prompt."""
    return Batch(
        [
            Row(sequence(1, 6, held=5), 6, decides=True, gamma=2, draft_stop=6),
            Row(sequence(2, 8, held=7), 8, decides=True),
            Row(sequence(3, 9, held=0), 4, decides=False, draft_stop=4),
        ],
        num_prompt_tokens=4,
    )


def test_the_drafter_hears_of_the_rows_that_draft_or_fill_and_of_no_others():
    assert [(step.seq_id, step.tokens, step.gamma) for step in mixed_batch().draft_steps()] == [
        (1, (5,), 2),
        (3, (0, 1, 2, 3), 0),
    ]


def test_the_target_hears_of_every_row_with_its_own_drafts():
    steps = mixed_batch().verify_steps(
        [Proposal(3, 4, (), None, 4), Proposal(1, 6, (50, 51), None, 7)]
    )
    assert [(step.seq_id, step.tokens, step.drafts, step.decide) for step in steps] == [
        (1, (5,), (50, 51), True),
        (2, (7,), (), True),
        (3, (0, 1, 2, 3), (), False),
    ]


def test_committing_grows_the_rows_that_decide_and_advances_the_others():
    batch = mixed_batch()
    batch.verify_steps([Proposal(1, 6, (50, 51), None, 7), Proposal(3, 4, (), None, 4)])
    chunks = batch.commit([Verdict(1, 1, 60, None), Verdict(2, 0, 61, None)])
    assert [(chunk.seq_id, chunk.tokens) for chunk in chunks] == [(1, (50, 60)), (2, (61,))]
    assert [(row.sequence.target_held, row.sequence.draft_held) for row in batch.rows] == [
        (7, 7),
        (8, 7),
        (4, 4),
    ]


def test_a_missing_verdict_is_noticed():
    batch = mixed_batch()
    batch.verify_steps([])
    with pytest.raises(ValueError, match="zip"):
        batch.commit([Verdict(1, 0, 60, None)])


def test_only_rounds_of_decoding_alone_count_as_steady():
    assert not mixed_batch().is_steady
    rows = mixed_batch().rows[:2]
    assert Batch(rows, num_caught_up=2).is_steady
    assert not Batch(rows, num_caught_up=60).is_steady
