"""Token rules by row: which tokens they forbid, and that they never forbid all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from specserve.sampling import History, WarpBatch
from specserve.types import TokenRule, Warp

VOCAB = 6
PROMPT = (5, 4)


def allowed(
    rule: TokenRule, text: Sequence[int] = (), drafts: tuple[int, ...] = (), *, vocab: int = VOCAB
) -> list[list[int]]:
    """Return the tokens that the rule allows after a text, and after each of its drafts."""
    history = History(np.array((*PROMPT, *text)), len(PROMPT), drafts)
    batch = WarpBatch([Warp(rule=rule)], [len(drafts) + 1], [history])
    p = batch.probabilities(torch.zeros(len(drafts) + 1, vocab))
    assert not p.isnan().any()
    return [torch.nonzero(row)[:, 0].tolist() for row in p]


def completes(word: tuple[int, ...], text: tuple[int, ...], token: int) -> bool:
    return (*text, token)[-len(word) :] == word


def test_every_row_forbids_what_its_own_text_and_position_forbid() -> None:
    """Compare with the definition, for all texts of a length and all drafts after them."""
    rule = TokenRule(4, (0, 3), ((1,), (2, 2), (4, 5, 2)))
    for text in itertools.product((2, 4, 5), repeat=3):
        for drafts in itertools.product((2, 4, 5), repeat=2):
            for row, found in enumerate(allowed(rule, text, drafts)):
                before = (*text, *drafts[:row])
                assert found == [
                    token
                    for token in range(VOCAB)
                    if not (token in (0, 3) and len(before) < 4)
                    and not any(completes(word, before, token) for word in rule.bad_words)
                ]


def test_a_word_that_begins_in_the_prompt_may_be_completed() -> None:
    """Look at the new tokens alone, as vLLM does."""
    assert 3 in allowed(TokenRule(bad_words=((4, 3),)))[0]
    assert 3 not in allowed(TokenRule(bad_words=((4, 3),)), (4,))[0]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (TokenRule(1, (2,), (), (2,)), [2]),  # allowed ids before min_tokens
        (TokenRule(0, (), ((1,), (2,)), (1, 2)), [1, 2]),
        (TokenRule(1, (2,), ((1,),), (1, 2)), [1]),  # min_tokens before bad words
        (TokenRule(0, (), tuple((token,) for token in range(VOCAB))), list(range(VOCAB))),
    ],
)
def test_a_part_that_would_leave_no_token_forbids_none(
    rule: TokenRule, expected: list[int]
) -> None:
    assert allowed(rule) == [expected]


def test_what_a_grammar_or_the_logits_exclude_stays_excluded_whatever_the_rule() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 2] = 0
    history = History(np.array(PROMPT), len(PROMPT))
    for rule in (
        TokenRule(allowed_ids=(1, 3)),
        TokenRule(3, (2,)),
        TokenRule(bad_words=((2,),)),
        TokenRule(3, (2,), ((2,), (1,)), (1, 2)),
    ):
        p = WarpBatch([Warp(rule=rule)], [1], [history]).probabilities(logits)
        assert p[0].tolist() == [0, 0, 1, 0, 0, 0]


def test_ids_that_a_smaller_draft_model_lacks_are_ignored() -> None:
    rule = TokenRule(1, (2, 9), ((9,), (1,)), (0, 1, 2, 8))
    assert allowed(rule) == [[0]]
    assert allowed(TokenRule(allowed_ids=(8, 9))) == [list(range(VOCAB))]


def test_tokens_drawn_since_the_history_count() -> None:
    rule = TokenRule(3, (0,), ((1, 2), (2, 2, 3)))
    history = History(np.array(PROMPT), len(PROMPT))
    batch = WarpBatch([Warp(rule=rule)] * 2, [1, 1], [history, history])
    for drawn in itertools.product((1, 2), repeat=3):
        p = batch.probabilities(torch.zeros(2, VOCAB), torch.tensor([[2, 2, 2], drawn]))
        expected = allowed(rule, (2, 2, 2)) + allowed(rule, drawn)
        assert [torch.nonzero(row)[:, 0].tolist() for row in p] == expected


def test_the_logits_that_were_given_stay_as_they_are() -> None:
    logits = torch.zeros(1, VOCAB)
    history = History(np.array(PROMPT), len(PROMPT))
    warp = Warp(temperature=0, rule=TokenRule(allowed_ids=(3,)))
    assert WarpBatch([warp], [1], [history]).greedy_tokens(logits).tolist() == [3]
    assert logits.tolist() == [[0] * VOCAB]
