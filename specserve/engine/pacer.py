"""How many tokens are worth drafting, and how long a round may wait for them. Knows neither pages nor limits, which the scheduler applies."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass

import numpy as np

from specserve.engine.acceptance import Acceptance
from specserve.engine.batch import Batch, Outcome
from specserve.engine.estimates import Costs
from specserve.engine.sequence import Sequence

_EVERY, _SELDOM = (
    8,
    64,
)  # rounds between two decisions for the same number of sequences, and where there is nothing to decide
_WORTH_DRAFTING = 1.03  # how much better than plain decoding drafting must promise to be: what it gains is less sure than what it costs
_WORTH = 1.01  # how much better another decision must be than the one that stands
_WORTH_TWO = (
    1.1  # how much better two cohorts must be than one: each token then waits for two verifications
)
_PATIENCE = 1.3  # times what drafting should take
_CROWDED = 1.5  # times a pass for one continuation, one that prepares for several takes
_FIRST_REST, _LONGEST_REST, _TRIAL = (
    64,
    1024,
    6,
)  # rounds without drafts between two trials, and of a trial


@dataclass(frozen=True, slots=True)
class Decision:
    """How the next rounds are drafted for, and all that it was made from."""

    gamma: int  # for the usual sequence; 0: plain decoding
    miss_gamma: int  # for a proposal that nobody prepared, while everyone waits
    deadline: float  # seconds that a round waits for proposals
    num_sequences: int
    alpha: float
    hit_rate: float
    verify_seconds: float  # of such a round
    plain_seconds: float  # of a round without drafts
    pass_seconds: float  # of one draft pass
    cohorts: int  # 2: one half of the batch is drafted for while the other is verified
    gain: float  # tokens a second, over those of plain decoding, as expected
    two_cohorts_gain: float  # the same, if two halves of the batch took turns


class Pacer:
    """With `gamma` None it chooses by itself what promises the most tokens a second; a request's own wish always wins."""

    def __init__(
        self, gamma: int | None, *, max_gamma: int, curve: abc.Sequence[tuple[int, float]] = ()
    ) -> None:
        self._fixed = gamma
        self._max_gamma = max_gamma
        self.acceptance, self.costs = Acceptance(max_gamma), Costs(curve)
        self._age = 0  # rounds since it was decided
        self._rest, self._resting = (
            _FIRST_REST,
            0,
        )  # how long drafting rests while it does not pay, and has rested
        self._best = None if gamma is None else (gamma, gamma)  # gamma and miss_gamma that stand
        self.decision = self._decide(1)

    @property
    def gamma(self) -> int:
        """What a request without a wish of its own gets, if it is like most."""
        return self.decision.gamma

    @property
    def deadline(self) -> float:
        """Seconds that the next round's proposals may take; what is not ready then comes shorter."""
        return math.inf if self._fixed is not None else self.decision.deadline

    def choose(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        """A gamma for each sequence; 0 is a choice."""
        if self._age >= (_EVERY if self._fixed is None else _SELDOM) or (
            self._fixed is None and len(sequences) != self.decision.num_sequences
        ):
            self.decision = self._decide(len(sequences))
            self.acceptance.keep(sequence.seq_id for sequence in sequences)
            self._age = 0
        self._age += 1
        usual = self._usual(sequences)
        return [
            own if sequence.gamma_wish is None else sequence.gamma_wish
            for sequence, own in zip(sequences, usual, strict=True)
        ]

    def observe(
        self,
        batch: Batch,
        outcomes: abc.Sequence[Outcome],
        *,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Learns from a round."""
        self.acceptance.observe(outcomes)
        if not batch.is_steady:
            return
        self.costs.observe_verify(batch.num_rows, verify_seconds)
        if outcomes:
            passes = max(
                (outcome.proposed for outcome in outcomes if not outcome.anticipated), default=0
            )
            hits = sum(outcome.anticipated is True for outcome in outcomes)
            self.costs.observe_draft(
                draft_seconds, passes=passes, hits=hits, proposals=len(outcomes)
            )

    def _usual(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        gamma = self.decision.gamma
        if self._fixed is not None:
            return [gamma] * len(sequences)
        if not gamma:
            return self._on_trial(len(sequences))
        if len(sequences) == 1:
            return [gamma]
        reaches = self.acceptance.reaches([sequence.seq_id for sequence in sequences])
        bar = (
            self._reach[gamma - 1]
            if gamma == self._max_gamma
            else math.sqrt(self._reach[gamma - 1] * self._reach[gamma])
        )
        usual: list[int] = (
            (reaches >= bar).sum(1).tolist()
        )  # each as far as its drafts are as likely to stand as the last usual one
        return usual

    def _on_trial(self, num_sequences: int) -> list[int]:
        """While drafting does not pay, the oldest sequence tries it again now and then, ever more seldom."""
        self._resting += 1
        if self._resting >= self._rest + _TRIAL:
            self._rest, self._resting = min(2 * self._rest, _LONGEST_REST), 0
        if self._resting == self._rest:
            self.costs.doubt_draft()
        on_trial = self._resting >= self._rest
        return [min(1, self._max_gamma) if on_trial and i == 0 else 0 for i in range(num_sequences)]

    def _decide(self, num_sequences: int) -> Decision:
        """The best of all pairs: gamma for proposals that are ready, miss_gamma for those that are not."""
        self._reach = np.cumprod(self.acceptance.profile)  # [place]
        rates = self._rates(num_sequences)
        rates[0, 0] *= _WORTH_DRAFTING
        if self._best is None or (self._fixed is None and rates.max() > _WORTH * rates[self._best]):
            self._best = divmod(int(rates.argmax()), self._max_gamma + 1)
        gamma, miss = self._best
        if gamma:
            self._rest, self._resting = _FIRST_REST, 0
        return self._explained(
            num_sequences,
            gamma,
            miss,
            float(rates[gamma, miss] * _WORTH_DRAFTING / rates[0, 0]) if gamma else 1.0,
        )

    def _rates(
        self, num_sequences: int
    ) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:  # [gamma, miss_gamma]
        """Expected tokens a second. Whoever drafts for a miss, and that is at least one token, makes all sequences wait."""
        hit, count = self.costs.hit_rate, max(1, num_sequences)
        gamma = np.arange(self._max_gamma + 1)
        accepted = np.append(0.0, np.cumsum(self._reach))
        miss, wanted = np.meshgrid(gamma, gamma)
        ready = np.minimum(wanted, self._hidden_depth(num_sequences))
        tokens = count * (1 + hit * accepted[ready] + (1 - hit) * accepted[miss])
        rows = count * (1 + hit * ready + (1 - hit) * miss)
        waiting = self.costs.wait * (wanted > 0) + (1 - hit**count) * miss * self.costs.draft_pass
        return np.where(
            (miss <= wanted) & ((miss > 0) | (wanted == 0)),
            tokens / (self.costs.verify(rows) + waiting),
            0.0,
        )

    def _hidden_depth(self, num_sequences: int) -> int:
        """How many tokens can be prepared behind a verification, after the pass that looks past the last draft."""
        passes = float(self.costs.verify(max(1, num_sequences))) / (
            _CROWDED * self.costs.draft_pass
        )
        return max(1, int(min(passes, 1e6)) - 1)

    def _explained(self, num_sequences: int, gamma: int, miss: int, gain: float) -> Decision:
        costs, count = self.costs, max(1, num_sequences)
        rows = count * (1 + costs.hit_rate * gamma + (1 - costs.hit_rate) * miss)
        plain = float(costs.verify(count))
        two_cohorts = self._two_cohorts_gain(count, gamma, plain)
        patience = math.inf if miss == gamma else costs.wait + _PATIENCE * miss * costs.draft_pass
        return Decision(
            gamma,
            miss,
            patience,
            num_sequences,
            self.acceptance.alpha,
            costs.hit_rate,
            float(costs.verify(rows)),
            plain,
            costs.draft_pass,
            2 if two_cohorts > _WORTH_TWO * gain else 1,
            gain,
            two_cohorts,
        )

    def _two_cohorts_gain(self, count: int, gamma: int, plain: float) -> float:
        """While one half is verified the other is drafted for. Both devices work twice a turn, so it pays where passes for half cost less."""
        if count < 2 or not gamma:
            return 1.0
        half, drafting = (
            float(self.costs.verify(count / 2 * (1 + gamma))),
            gamma * self.costs.draft_pass,
        )
        turn = max(2 * half, 2 * drafting, half + drafting)
        return count * (1 + float(self._reach[:gamma].sum())) / turn / (count / plain)
