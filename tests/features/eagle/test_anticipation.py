"""A head that anticipates runs on from its own states, and then takes the target's instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specserve.drafters.anticipation import Anticipation
from specserve.drafters.base import never
from specserve.drafters.branches import Fanout
from specserve.models.cache import PagedCache
from specserve.types import DraftStep, Proposal, VerifyStep
from tests.features.eagle.test_drafter import (
    GAMMA,
    POLICY,
    SIZES,
    TOLERANCE,
    Pair,
    four_layers,
)
from tests.support import checkpoints
from tests.support.eagle_heads import write_speculators

SEQ = 5
UNLIKELY = checkpoints.VOCAB - 1
"""A next token that no branch is prepared for."""


class Anticipating:
    """A head that anticipates, and one text whose verdicts the test makes up."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.text = pair, list(range(20, 47))
        self.anticipation = Anticipation(
            pair.drafter, Fanout(width=8, per_position=3), clock=lambda: 0.0
        )
        self._num_computed = self._num_cached = 0

    def propose(self) -> Proposal:
        """Let the target compute all committed tokens but the newest, and ask for draft tokens."""
        tokens = tuple(self.text[self._num_computed : -1])
        self.pair.verify(
            VerifyStep(SEQ, self._num_computed, tokens, (), None, POLICY, needs_verdict=False)
        )
        self._num_computed = len(self.text) - 1
        step = DraftStep(SEQ, self._num_cached, tuple(self.text[self._num_cached :]), GAMMA, POLICY)
        (proposal,) = self.anticipation.propose([step], math.inf)
        self._num_cached = min(proposal.num_cached, len(self.text))
        return proposal

    def commit(self, drafts: Sequence[int], token: int) -> None:
        self.text += [*drafts, token]

    def prepared(self, accepted: int) -> int:
        """Return a next token for which a proposal is prepared after that many draft tokens."""
        branches = self.anticipation._branches.prepared[SEQ].branches
        return next(token for depth, token in branches if depth == accepted)

    def check_own(self, proposal: Proposal, known: Sequence[int], more: Sequence[int]) -> None:
        """Assert that q was drafted from the target's states of `known`, and from own ones of more.

        The newest token of `known` has not been computed by the target.
        """
        chain = [*more, *proposal.tokens[:-1]]
        expected = self.pair.expected_q(known, chain)[len(more) :].numpy()
        assert proposal.q is not None
        dense = np.zeros_like(expected)
        np.put_along_axis(dense, proposal.q.ids, proposal.q.probs, axis=1)
        np.testing.assert_allclose(dense, expected, atol=TOLERANCE)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four_layers("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def head(llama: Path, tmp_path: Path) -> Anticipating:
    return Anticipating(Pair(llama, write_speculators(tmp_path / "head", SIZES), pages=200))


def hit(head: Anticipating, accepted: int) -> tuple[Proposal, list[int], list[int]]:
    """Take a prepared proposal; return it, the text before it, and what was committed since."""
    first = head.propose()
    head.check_own(first, head.text, [])
    head.anticipation.prepare(never)
    known, more = list(head.text), [*first.tokens[:accepted], head.prepared(accepted)]
    head.commit(more[:-1], more[-1])
    proposal = head.propose()
    assert proposal.anticipated
    return proposal, known, more


@pytest.mark.parametrize("accepted", [0, 2, GAMMA])
def test_a_prepared_proposal_is_drafted_from_the_heads_own_states(
    head: Anticipating, accepted: int
) -> None:
    head.check_own(*hit(head, accepted))


@pytest.mark.parametrize("interrupted", [False, True], ids=["prepared", "interrupted"])
@pytest.mark.parametrize("accepted", [0, 2, GAMMA])
def test_a_miss_behind_a_hit_is_drafted_from_the_targets_states_alone(
    head: Anticipating, accepted: int, interrupted: bool
) -> None:
    """Rows of the promoted branch are computed again, whether there was time before or not."""
    second, *_ = hit(head, accepted)
    head.anticipation.prepare(lambda: interrupted)
    head.commit(second.tokens[:1], UNLIKELY)
    third = head.propose()
    assert not third.anticipated
    head.check_own(third, head.text, [])
    head.anticipation.release([SEQ])
    head.pair.target.release([SEQ])
    head.anticipation.prepare(lambda: True)
    assert head.pair.drafter.runner.cache.num_used == 0
    assert not head.pair.drafter._num_certain
    assert not head.pair.drafter._target_states._kept


def test_what_is_prepared_behind_a_hit_begins_at_the_targets_newest_state(
    head: Anticipating,
) -> None:
    """Reject the whole prepared proposal: its successor is a single own state away from the target.

    Without the pass that computes the branch's rows again it would be `GAMMA + 2` away.
    """
    hit(head, GAMMA)
    head.anticipation.prepare(never)
    cache = head.pair.drafter.runner.cache
    assert isinstance(cache, PagedCache)
    states = cache.states[cache.slots(SEQ, 0, cache.length(SEQ))]
    assert not states.isnan().any(), "rows of draft tokens have lost what they were drafted from"
    known, token = list(head.text), head.prepared(0)
    head.commit([], token)
    third = head.propose()
    assert third.anticipated
    head.check_own(third, known, [token])


def test_a_hit_that_is_too_short_goes_on_behind_what_was_prepared(head: Anticipating) -> None:
    """Let branches be interrupted after a token: the rest is drafted when they are wanted."""
    first = head.propose()
    calls = iter([False, False, *[True] * 20])
    head.anticipation.prepare(lambda: next(calls))
    token = head.prepared(1)
    branch = head.anticipation._branches.prepared[SEQ].branches[1, token]
    assert len(branch.tokens) < GAMMA
    head.commit(first.tokens[:1], token)
    proposal = head.propose()
    assert proposal.anticipated
    assert len(proposal.tokens) == GAMMA
    assert proposal.tokens[: len(branch.tokens)] == branch.tokens
    assert proposal.q is not None
    np.testing.assert_allclose(proposal.q.probs.sum(1), 1, rtol=1e-5)
