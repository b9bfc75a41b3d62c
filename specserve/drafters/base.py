"""Protocols of drafters that can prepare proposals in advance, and what they share.

Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from specserve.types import DraftStep, Proposal, SparseDistribution

if TYPE_CHECKING:
    from specserve.grammar.matcher import GrammarMatcher


NO_TOKEN = -1
"""Stands where there is no token."""


@dataclass(frozen=True, slots=True)
class OutcomeForecast:
    """Predicted outcomes of one proposal: how many draft tokens are accepted, and which comes next.

    Position i is the one after i accepted draft tokens. The token that follows there is never
    draft token i, which was rejected. `confidence` and `next_probs` are the drafter's own estimates
    between 0 and 1, if it has any. `Fanout` measures how reliable they are, for each `mode` apart.
    """

    seq_id: int
    start: int
    """Length of the prefix that the draft tokens continue."""
    drafts: tuple[int, ...]
    next_tokens: Sequence[Sequence[int]] | NDArray[np.int64]
    """[position][rank], likeliest first; there is one position more than there are draft tokens.

    In an array, rows end with NO_TOKEN where there are fewer.
    """
    confidence: Sequence[float] | NDArray[np.float64] = ()
    """[draft token] estimated probability that it is accepted."""
    next_probs: Sequence[Sequence[float]] | NDArray[np.float64] = ()
    """[position][rank] estimated probability of each of `next_tokens`."""
    mode: str = ""

    @property
    def num_positions(self) -> int:
        return len(self.next_tokens)


class ResumableDrafter(Protocol):
    """A drafter that answers at once, and that resumes a proposal when it gets the same step again.

    A proposal may thus be made in several calls.
    """

    def draft(
        self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]
    ) -> Sequence[Proposal]:
        """Return one proposal for each step, in order.

        `should_stop` is called between passes. Once it returns True, the draft tokens so far are
        returned.
        """
        ...

    def release(self, seq_ids: Sequence[int]) -> None: ...


class ForkableDrafter(ResumableDrafter, Protocol):
    """A drafter that can follow several continuations of one sequence."""

    def forecast_outcomes(
        self,
        seq_ids: Sequence[int],
        width: int,
        undrafted: Sequence[DraftStep] = (),
        extra_steps: Sequence[DraftStep] = (),
    ) -> Sequence[OutcomeForecast]:
        """Return forecasts for the last proposal of each sequence, at most `width` tokens each.

        It may take a pass, because the position after the last draft token has not been computed.
        The same pass writes the tokens of `undrafted` steps, which got no draft tokens: of their
        outcomes only the next token is open. The drafter may give one draft token to each of the
        `extra_steps` as well; those go on from there when they are drafted for.
        """
        ...

    def fork(self, seq_id: int, branch_id: int, length: int) -> bool:
        """Create `branch_id` with the first `length` tokens of the sequence.

        Returns False and changes nothing if there is no room for it.
        """
        ...

    def promote_branch(self, seq_id: int, branch_id: int) -> None:
        """Replace the sequence by the branch, together with the branch's draft tokens."""
        ...


def never() -> bool:
    """Return False: the `should_stop` of a draft that is not to be interrupted."""
    return False


def trim_to_grammar(
    matcher: GrammarMatcher, step: DraftStep, drafts: tuple[int, ...], q: SparseDistribution | None
) -> tuple[tuple[int, ...], SparseDistribution | None]:
    """Cut draft tokens that were made without a look at the grammar to what it allows.

    Certain draft tokens (q is None) are replaced by those that the grammar forces, where it does.
    Of sampled ones the first that is forbidden stays, and the target rejects it: dropping it, as if
    nothing had been drawn there, would be a choice by what was drawn, and q would be another.
    """
    num_allowed = matcher.num_valid(drafts)
    if q is not None and step.policy.verifier != "coupled":
        kept = slice(num_allowed + 1)
        return drafts[kept], SparseDistribution(q.ids[kept], q.probs[kept])
    allowed = drafts[:num_allowed]
    matcher.write(len(matcher.tokens), allowed)
    forced_tokens: list[int] = []
    while tokens := matcher.forced_tokens(step.gamma - num_allowed - len(forced_tokens)):
        matcher.write(len(matcher.tokens), tokens)
        forced_tokens += tokens
    return (*allowed, *forced_tokens), None
