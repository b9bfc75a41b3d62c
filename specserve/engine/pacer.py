"""How many tokens are worth drafting, and how long a round may wait for them.

Knows neither pages nor limits, which the scheduler applies.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass

import numpy as np

from specserve.engine.batch import Batch, Outcome
from specserve.engine.cohorts import expected_speedup
from specserve.engine.estimates import AcceptanceEstimate, CostEstimate
from specserve.engine.sequence import Sequence

_DECISION_ROUNDS = 8  # rounds between two decisions for the same number of sequences
_FIXED_DECISION_ROUNDS = 64  # the same where gamma is fixed and there is nothing to decide
# Gain over plain decoding that drafting must promise: its gain is less certain than its cost.
_MIN_DRAFTING_GAIN = 1.03
_MIN_CHANGE_GAIN = 1.01  # gain that another decision must promise over the current one
# Gain of two cohorts over one: each token then waits for two verifications.
_MIN_COHORTS_GAIN = 1.1
_PATIENCE = 1.3  # times the expected seconds of drafting
_ANTICIPATION_COST = 1.5  # a pass that prepares several continuations, over a pass for one
_FIRST_BACKOFF = 64  # rounds without drafts before the first trial
_MAX_BACKOFF = 1024
_TRIAL_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Decision:
    """The settings for the next rounds, with all that they were derived from.

    The fields are part of `GET /trace`.
    """

    gamma: int  # for the usual sequence; 0: plain decoding
    miss_gamma: int  # for a proposal that was not prepared: the whole batch waits for it
    deadline: float  # seconds that a round waits for proposals
    num_sequences: int
    alpha: float
    hit_rate: float
    verify_seconds: float  # of such a round
    plain_seconds: float  # of a round without drafts
    pass_seconds: float  # of one draft pass
    cohorts: int  # 2: one half of the batch is drafted for while the other is verified
    gain: float  # expected tokens a second, over those of plain decoding
    two_cohorts_gain: float  # the same, if two halves of the batch took turns


class Pacer:
    """Choice of gamma: with `gamma` None the one that promises the most tokens a second.

    A gamma that a request asks for always wins.
    """

    def __init__(
        self, gamma: int | None, *, max_gamma: int, curve: abc.Sequence[tuple[int, float]] = ()
    ) -> None:
        self._fixed = gamma
        self._max_gamma = max_gamma
        self.acceptance, self.costs = AcceptanceEstimate(max_gamma), CostEstimate(curve)
        self._age = 0  # rounds since the decision
        self._backoff = _FIRST_BACKOFF  # rounds without drafts before the next trial
        self._idle_rounds = 0  # rounds since drafting stopped paying, or since the last trial
        # gamma and miss_gamma of the current decision
        self._best = None if gamma is None else (gamma, gamma)
        self.decision = self._decide(1)

    @property
    def gamma(self) -> int:
        """Gamma of a typical request that does not set its own."""
        return self.decision.gamma

    @property
    def deadline(self) -> float:
        """Seconds that the next round's proposals may take; later ones are cut short."""
        return math.inf if self._fixed is not None else self.decision.deadline

    def expected_rate(self, num_sequences: int) -> float:
        """Return the tokens a second of the best choice for so many sequences."""
        self._reach = np.cumprod(self.acceptance.profile)
        return float(self._rates(num_sequences).max())

    def choose(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        """Return a gamma for each sequence; 0 is a choice."""
        max_age = _DECISION_ROUNDS if self._fixed is None else _FIXED_DECISION_ROUNDS
        if self._age >= max_age or (
            self._fixed is None and len(sequences) != self.decision.num_sequences
        ):
            self.decision = self._decide(len(sequences))
            self.acceptance.keep_only(sequence.seq_id for sequence in sequences)
            self._age = 0
        self._age += 1
        defaults = self._defaults(sequences)
        return [
            default if sequence.requested_gamma is None else sequence.requested_gamma
            for sequence, default in zip(sequences, defaults, strict=True)
        ]

    def observe(
        self,
        batch: Batch,
        outcomes: abc.Sequence[Outcome],
        *,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Update the estimates from a round."""
        self.acceptance.observe(outcomes)
        if not batch.is_steady:
            return
        self.costs.observe_verify(batch.num_positions, verify_seconds)
        if outcomes:
            passes = max(
                (outcome.proposed for outcome in outcomes if not outcome.anticipated), default=0
            )
            hits = sum(outcome.anticipated is True for outcome in outcomes)
            self.costs.observe_draft(
                draft_seconds, passes=passes, hits=hits, proposals=len(outcomes)
            )

    def _defaults(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        """Return a gamma for each sequence, whatever it asks for itself."""
        gamma = self.decision.gamma
        if self._fixed is not None:
            return [gamma] * len(sequences)
        if not gamma:
            return self._trial_gammas(len(sequences))
        if len(sequences) == 1:
            return [gamma]
        reach = self.acceptance.reach([sequence.seq_id for sequence in sequences])
        # Each sequence drafts as far as its tokens are as likely to be accepted as the last one
        # of the usual sequence.
        bar = (
            self._reach[gamma - 1]
            if gamma == self._max_gamma
            else math.sqrt(self._reach[gamma - 1] * self._reach[gamma])
        )
        gammas: list[int] = (reach >= bar).sum(1).tolist()
        return gammas

    def _trial_gammas(self, num_sequences: int) -> list[int]:
        """Return the gammas while drafting does not pay: all 0, except in trials.

        In a trial the oldest sequence drafts one token. Trials become rarer with each failure.
        """
        self._idle_rounds += 1
        if self._idle_rounds >= self._backoff + _TRIAL_ROUNDS:
            self._backoff, self._idle_rounds = min(2 * self._backoff, _MAX_BACKOFF), 0
        if self._idle_rounds == self._backoff:
            self.costs.discard_draft_passes()
        on_trial = self._idle_rounds >= self._backoff
        return [min(1, self._max_gamma) if on_trial and i == 0 else 0 for i in range(num_sequences)]

    def _decide(self, num_sequences: int) -> Decision:
        """Choose the best pair: gamma for prepared proposals, miss_gamma for the others."""
        self._reach = np.cumprod(self.acceptance.profile)  # [position]
        rates = self._rates(num_sequences)
        rates[0, 0] *= _MIN_DRAFTING_GAIN
        if self._best is None or (
            self._fixed is None and rates.max() > _MIN_CHANGE_GAIN * rates[self._best]
        ):
            self._best = divmod(int(rates.argmax()), self._max_gamma + 1)
        gamma, miss = self._best
        if gamma:
            self._backoff, self._idle_rounds = _FIRST_BACKOFF, 0
        gain = float(rates[gamma, miss] * _MIN_DRAFTING_GAIN / rates[0, 0]) if gamma else 1.0
        return self._decision(num_sequences, gamma, miss, gain)

    def _rates(
        self, num_sequences: int
    ) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:  # [gamma, miss_gamma]
        """Return the expected tokens a second of each pair.

        A miss is drafted synchronously (at least one token) and delays the whole batch.
        """
        hit, count = self.costs.hit_rate, max(1, num_sequences)
        gamma = np.arange(self._max_gamma + 1)
        accepted = np.append(0.0, np.cumsum(self._reach))
        miss, wanted = np.meshgrid(gamma, gamma)
        ready = np.minimum(wanted, self._hidden_depth(num_sequences))
        tokens = count * (1 + hit * accepted[ready] + (1 - hit) * accepted[miss])
        positions = count * (1 + hit * ready + (1 - hit) * miss)
        waiting = (
            self.costs.hit_wait * (wanted > 0)
            + (1 - hit**count) * miss * self.costs.draft_pass_seconds
        )
        return np.where(
            (miss <= wanted) & ((miss > 0) | (wanted == 0)),
            tokens / (self.costs.verify_seconds(positions) + waiting),
            0.0,
        )

    def _hidden_depth(self, num_sequences: int) -> int:
        """Return how many tokens can be prepared during a verification.

        One pass is needed to look past the last draft token.
        """
        passes = float(self.costs.verify_seconds(max(1, num_sequences))) / (
            _ANTICIPATION_COST * self.costs.draft_pass_seconds
        )
        return max(1, int(min(passes, 1e6)) - 1)

    def _decision(self, num_sequences: int, gamma: int, miss: int, gain: float) -> Decision:
        costs, count = self.costs, max(1, num_sequences)
        positions = count * (1 + costs.hit_rate * gamma + (1 - costs.hit_rate) * miss)
        plain = float(costs.verify_seconds(count))
        two_cohorts = expected_speedup(
            count,
            gamma,
            accepted=float(self._reach[:gamma].sum()),
            half_verify_seconds=float(costs.verify_seconds(count / 2 * (1 + gamma))),
            plain_seconds=plain,
            draft_pass_seconds=costs.draft_pass_seconds,
        )
        miss_seconds = miss * costs.draft_pass_seconds
        return Decision(
            gamma,
            miss,
            math.inf if miss == gamma else costs.hit_wait + _PATIENCE * miss_seconds,
            num_sequences,
            self.acceptance.alpha,
            costs.hit_rate,
            float(costs.verify_seconds(positions)),
            plain,
            costs.draft_pass_seconds,
            2 if two_cohorts > _MIN_COHORTS_GAIN * gain else 1,
            gain,
            two_cohorts,
        )
