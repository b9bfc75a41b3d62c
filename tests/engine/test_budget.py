"""The positions of a round: as configured, or as many as the hardware computes in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.config.sections import MAX_BATCH_TOKENS
from specserve.engine.budget import MAX_PASS_S, MIN_TOKENS, TokenBudget
from specserve.types import Curve

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)


def linear_curve(first: float, more: float) -> Curve:
    """Return the curve of passes that take `more` seconds longer for each position."""
    return tuple((rows, first + more * rows) for rows in ROWS)


def test_a_configured_budget_is_taken_whatever_was_measured() -> None:
    assert TokenBudget.from_curve(300, linear_curve(1.0, 1.0)) == TokenBudget(300, is_fixed=True)


def test_without_a_measurement_a_round_has_512_tokens() -> None:
    assert TokenBudget.from_curve(None, ()) == TokenBudget(512, is_fixed=False)


@pytest.mark.parametrize("more", [1e-3, 2e-4, 1e-4])
def test_a_pass_of_the_whole_budget_takes_nearly_the_longest_time_and_no_longer(
    more: float,
) -> None:
    tokens = TokenBudget.from_curve(None, linear_curve(1e-3, more)).tokens
    assert 0.9 * MAX_PASS_S < 1e-3 + more * tokens < MAX_PASS_S + more


def test_slow_hardware_gets_a_least_budget_and_fast_hardware_a_largest() -> None:
    assert TokenBudget.from_curve(None, linear_curve(10.0, 1.0)).tokens == MIN_TOKENS
    assert TokenBudget.from_curve(None, ((1, 0.0),)).tokens == MAX_BATCH_TOKENS


@given(
    decoding=st.integers(0, 5000),
    pending=st.integers(0, 10_000),
    first=st.floats(0, 0.1),
    more=st.floats(1e-6, 1e-2),
)
def test_prompts_make_no_round_longer_than_the_stated_time_or_twice_that_of_decoding(
    decoding: int, pending: int, first: float, more: float
) -> None:
    budget = TokenBudget.from_curve(None, linear_curve(first, more))
    kept = budget.for_prompts(pending)
    limit = budget.limit(decoding, prompts=kept)
    least = first + more * MIN_TOKENS
    assert first + more * limit <= max(MAX_PASS_S + more, least, 2 * (first + more * decoding))
    assert limit >= decoding + kept, "everything that decodes takes part, and so do prompts"


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 10_000))
def test_a_configured_budget_leaves_prompts_a_share_and_decoding_one(
    tokens: int, decoding: int, pending: int
) -> None:
    budget = TokenBudget(tokens)
    kept = budget.for_prompts(pending)
    limit = budget.limit(decoding, prompts=kept)
    assert kept >= min(pending, max(1, tokens // 4))
    assert kept < limit <= max(tokens, 2)
