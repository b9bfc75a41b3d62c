"""How many tokens are worth drafting, and how long a round may wait for them.

Knows neither pages nor limits, which the scheduler applies.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specserve.engine.batch import Batch, Outcome
from specserve.engine.estimates import PRIOR_ALPHA, AcceptanceEstimate, CostEstimate
from specserve.engine.sequence import Sequence

Table = NDArray[np.float64]

# Rounds between two decisions for the same number of sequences: few after the start, when a wrong
# gamma would otherwise be kept for a second of a large target, and twice as many each time.
_FIRST_DECISION_ROUNDS = 2
_DECISION_ROUNDS = 8
_FIXED_DECISION_ROUNDS = 64  # the same where gamma is fixed and there is nothing to decide
# Gain over plain decoding that drafting must promise: its gain is less certain than its cost.
_MIN_DRAFTING_GAIN = 1.03
_MIN_CHANGE_GAIN = 1.01  # gain that another decision must promise over the current one
# Share of prepared proposals below which a sequence without one is always drafted for: until some
# have come, whether any will is not known.
_MIN_HIT_RATE = 0.05
# Times the expected seconds of drafting that a round waits at most, if it waits for all of gamma.
_PATIENCE = 4.0
_ANTICIPATION_COST = 1.5  # a pass that prepares several continuations, over a pass for one
_FIRST_BACKOFF = 64  # rounds without drafts before the first trial
_MAX_BACKOFF = 1024
_TRIAL_ROUNDS = 6
_MAX_TRIAL_SHARE = 0.03  # of the time, for the drafting of trials
_PLAIN_TRIAL_ROUNDS = 8  # at the start, of a target whose plain rounds run ahead


@dataclass(frozen=True, slots=True)
class Decision:
    """The settings for the next rounds, with all that they were derived from.

    The fields are part of `GET /trace`.
    """

    gamma: int  # for the usual sequence; 0: plain decoding
    miss_gamma: int  # for a proposal that was not prepared; 0: the round does not wait for it
    deadline: float  # seconds that the drafter has for proposals that were not prepared
    num_sequences: int
    alpha: float
    hit_rate: float
    verify_seconds: float  # of such a round
    plain_seconds: float  # of a round without drafts
    pass_seconds: float  # of one draft pass
    gain: float  # expected tokens a second, over the rate of plain decoding


class Pacer:
    """Choice of gamma: with `gamma` None the one that promises the most tokens a second.

    A gamma that a request asks for always wins.
    """

    def __init__(
        self,
        gamma: int | None,
        *,
        max_gamma: int,
        curve: abc.Sequence[tuple[int, float]] = (),
        runs_ahead: bool = False,
    ) -> None:
        """Choose for a target; one that `runs_ahead` hides the host in plain rounds alone."""
        self._runs_ahead, self._was_plain = runs_ahead, False
        self._plain_trials = _PLAIN_TRIAL_ROUNDS if runs_ahead and gamma is None else 0
        self._fixed = gamma
        self._max_gamma = max_gamma
        self.acceptance, self.costs = AcceptanceEstimate(max_gamma), CostEstimate(curve)
        self._age = 0  # rounds since the decision
        self._max_age = _FIRST_DECISION_ROUNDS if gamma is None else _FIXED_DECISION_ROUNDS
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
        """Return the tokens a second of the best choice for that many sequences."""
        return float(self._rates(num_sequences, self.acceptance.profile.cumprod()).max())

    def choose(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        """Return a gamma for each sequence; 0 is a choice."""
        is_due = self._age >= self._max_age
        if is_due or (self._fixed is None and len(sequences) != self.decision.num_sequences):
            if is_due and self._fixed is None:
                self._max_age = min(2 * self._max_age, _DECISION_ROUNDS)
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
        round_seconds: float | None = None,
    ) -> None:
        """Update the estimates from a round; its own seconds are those since the last verdict."""
        self.acceptance.observe(outcomes)
        proposals = batch.wanted_proposals
        was_plain, self._was_plain = self._was_plain, batch.is_steady and not proposals
        if not batch.is_steady:
            return
        if self._runs_ahead and round_seconds is not None:
            if self._was_plain and was_plain:
                # The target was waited for less than it took.
                self.costs.observe_plain(batch.num_positions, round_seconds)
                return
            if proposals:
                self.costs.observe_host(round_seconds - draft_seconds - verify_seconds)
        self.costs.observe_verify(batch.num_positions, verify_seconds)
        if not proposals:
            return
        missed = [len(proposal.tokens) for proposal in proposals if not proposal.anticipated]
        if passes := max(missed, default=0):
            self.costs.observe_draft(draft_seconds, passes=passes, count=len(missed))
        # In a trial, one sequence has all branches for itself.
        if self.decision.gamma or self._fixed is not None:
            self.costs.observe_hits(
                len(proposals) - len(missed),
                len(proposals),
                seconds=None if passes else draft_seconds,
            )

    def _defaults(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        """Return a gamma for each sequence, whatever it asks for itself."""
        gamma = self.decision.gamma
        if self._fixed is not None:
            return [gamma] * len(sequences)
        if self._plain_trials:
            self._plain_trials -= 1
            return [0] * len(sequences)
        if not gamma:
            return self._trial_gammas(len(sequences))
        if len(sequences) == 1:
            return [gamma]
        reach = self.acceptance.reach([sequence.seq_id for sequence in sequences])
        worth = reach - self._row_price  # [seqs, position], in tokens
        gammas: list[int] = (worth[:, : self._depth(worth)] > 0).sum(1).tolist()
        return gammas

    def _depth(self, worth: Table) -> int:
        """Return the draft passes that pay for the sequences together, or that delay no round."""
        hit = self.costs.hit_rate
        gained = (1 - hit) * np.maximum(worth, 0.0).sum(0) - self._pass_price  # [pass]
        total = np.cumsum(gained)
        depth = int(total.argmax()) + 1 if total.max() > 0 else 1
        hidden = self.decision.gamma if self.decision.gamma > self.decision.miss_gamma else 0
        return max(depth, hidden)

    def _trial_gammas(self, num_sequences: int) -> list[int]:
        """Return the gammas while drafting does not pay: all 0, except in trials.

        In a trial the oldest sequence drafts as many tokens as would pay for it alone with a good
        acceptance: a single one would show nothing of the positions after it. Trials become rarer
        with each failure.
        """
        if not self._idle_rounds:
            self._backoff = max(self._backoff, self._affordable_backoff())
        self._idle_rounds += 1
        if self._idle_rounds >= self._backoff + _TRIAL_ROUNDS:
            self._backoff, self._idle_rounds = min(2 * self._backoff, _MAX_BACKOFF), 0
        on_trial = self._idle_rounds >= self._backoff
        gamma = self._trial_gamma() if on_trial else 0
        return [gamma if i == 0 else 0 for i in range(num_sequences)]

    def _affordable_backoff(self) -> int:
        """Return the rounds without drafts of which a trial takes no more than its share."""
        drafting = _TRIAL_ROUNDS * self._trial_gamma() * self.costs.draft_pass_seconds(1)
        rounds = drafting / (_MAX_TRIAL_SHARE * float(self.costs.verify_seconds(1)))
        return min(_MAX_BACKOFF, math.ceil(rounds))

    def _trial_gamma(self) -> int:
        if not self._max_gamma:
            return 0
        reach = np.power(PRIOR_ALPHA, np.arange(1.0, self._max_gamma + 1))
        rates = self._rates(1, reach).max(axis=1)  # [gamma]
        return int(rates[1:].argmax()) + 1

    def _decide(self, num_sequences: int) -> Decision:
        """Choose the best pair: gamma for prepared proposals, miss_gamma for the others."""
        rates = self._rates(num_sequences, self.acceptance.profile.cumprod())
        rates[0, 0] *= _MIN_DRAFTING_GAIN
        if self._best is None or (
            self._fixed is None and rates.max() > _MIN_CHANGE_GAIN * rates[self._best]
        ):
            self._best = divmod(int(rates.argmax()), self._max_gamma + 1)
        gamma, miss = self._best
        if gamma:
            self._backoff, self._idle_rounds = _FIRST_BACKOFF, 0
        gain = float(rates[gamma, miss] * _MIN_DRAFTING_GAIN / rates[0, 0]) if gamma else 1.0
        self._set_prices(num_sequences, gamma, float(rates[gamma, miss]))
        return self._decision(num_sequences, gamma, miss, gain)

    def _set_prices(self, num_sequences: int, gamma: int, rate: float) -> None:
        """Set what another row of the target's pass, and another draft pass, cost in tokens.

        A row costs what it does on the way to gamma, or beyond that from gamma on: the curve may
        have a step there, which is why gamma was chosen.
        """
        count = max(1, num_sequences)
        depths = np.arange(self._max_gamma + 1, dtype=np.float64)
        seconds = self.costs.verify_seconds(count * (1 + depths))
        first, beyond = depths[1:] <= gamma, np.maximum(depths[1:] - gamma, 1)
        per_row = np.where(
            first,
            (seconds[gamma] - seconds[0]) / (count * max(1, gamma)),
            (seconds[1:] - seconds[gamma]) / (count * beyond),
        )
        self._row_price = rate * np.maximum.accumulate(per_row)  # [position]
        self._pass_price = (
            rate
            * (1 - self.costs.hit_rate**count)  # chance that the round waits for the pass
            * self.costs.draft_pass_seconds(_num_missing(count, self.costs.hit_rate))
        )

    def _rates(self, num_sequences: int, reach: Table) -> Table:  # [gamma, miss_gamma]
        """Return the expected tokens a second of each pair, with `reach` [position].

        A miss is drafted for while the whole batch waits, or goes without draft tokens if its gamma
        is 0. Prepared proposals that are shorter than wanted grow in the same passes.
        """
        hit, count = self.costs.hit_rate, max(1, num_sequences)
        gamma = np.arange(self._max_gamma + 1)
        accepted = np.append(0.0, np.cumsum(reach))
        miss, wanted = np.meshgrid(gamma, gamma)
        ready = np.minimum(wanted, self._hidden_depth(count))
        grown = np.minimum(wanted, ready + miss)
        alone = hit ** (count - 1)  # chance that no other sequence misses
        tokens = 1 + (1 - hit) * accepted[miss]
        tokens += hit * (alone * accepted[ready] + (1 - alone) * accepted[grown])
        rows = 1 + (1 - hit) * miss + hit * (alone * ready + (1 - alone) * grown)
        waiting = self.costs.hit_wait * (wanted > 0) + (
            1 - hit**count
        ) * miss * self.costs.draft_pass_seconds(_num_missing(count, hit))
        busy = self.costs.verify_seconds(count * rows) + waiting
        rates: Table = count * tokens / (busy + self.costs.host_seconds)
        rates[0, 0] = count / self.costs.plain_seconds(count)
        can_skip = (miss > 0) | (wanted == 0) | (hit > _MIN_HIT_RATE)
        return np.where((miss <= wanted) & can_skip, rates, 0.0)

    def _hidden_depth(self, count: int) -> int:
        """Return how many tokens can be prepared during a verification.

        One pass is needed to look past the last draft token.
        """
        passes = float(self.costs.verify_seconds(count)) / (
            _ANTICIPATION_COST * self.costs.draft_pass_seconds(count)
        )
        return max(1, int(min(passes, 1e6)) - 1)

    def _decision(self, num_sequences: int, gamma: int, miss: int, gain: float) -> Decision:
        costs, count = self.costs, max(1, num_sequences)
        positions = count * (1 + costs.hit_rate * gamma + (1 - costs.hit_rate) * miss)
        plain = costs.plain_seconds(count)
        pass_seconds = costs.draft_pass_seconds(_num_missing(count, costs.hit_rate))
        return Decision(
            gamma,
            miss,
            _deadline(gamma, miss, pass_seconds),
            num_sequences,
            self.acceptance.alpha,
            costs.hit_rate,
            float(costs.verify_seconds(positions)),
            plain,
            pass_seconds,
            gain,
        )


def _num_missing(count: int, hit_rate: float) -> int:
    """Return the expected number of sequences whose proposals were not prepared."""
    return max(1, round(count * (1 - hit_rate)))


def _deadline(gamma: int, miss_gamma: int, pass_seconds: float) -> float:
    """Return the seconds for proposals that were not prepared.

    The drafter looks at its clock between two passes. While drafting does not pay, a trial takes
    what it takes, and so do requests that ask for a gamma of their own.
    """
    if not gamma:
        return math.inf
    if miss_gamma == gamma:
        return _PATIENCE * gamma * pass_seconds
    return max(0.0, miss_gamma - 0.5) * pass_seconds
