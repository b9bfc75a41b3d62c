"""Running estimates of acceptance and of seconds a pass, from what the rounds have shown.

The pacer decides by them. Knows counts and seconds; no sequences, no decisions.
"""

from __future__ import annotations

from collections import abc, deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

from specserve.engine.batch import Outcome

Reals = NDArray[np.float64]

PRIOR_ALPHA = 0.7
"""Acceptance that is assumed before anything is measured."""
_DECAY = 0.98  # of the counts, a round: a memory of some 50 rounds
_SEQUENCE_DECAY = 0.95  # of the counts of one sequence
# Trials of a position, or of a sequence, whose own rate counts as much as the mean of all.
_PRIOR_TRIALS = 20.0

_BLEND = 0.1  # of the newest seconds into their running mean
# Slower rate for the slope estimate: machine noise correlated over tens of rounds must not be
# mistaken for slope.
_SLOPE_BLEND = 0.005
# Variance of (relative) position counts that must be seen before the measured slope counts as much
# as the curve's.
_SLOPE_PRIOR = 0.02
_PRIOR_COST = 0.1  # a draft pass over a target pass of as many rows, before it was measured
# Seconds: drafts that came sooner than prepared ones still cost something.
_MIN_PASS_SECONDS = 1e-5
_MIN_WAITS = 3  # waits for drafts that must have been seen before they are used
_MAX_WAITS = 15  # waits for drafts that are kept
_DEFAULT_CURVE = ((1, 1.0), (256, 6.0))  # for a target that was not warmed up


class AcceptanceEstimate:
    """Recent acceptance of draft tokens: by position in the proposal, and by sequence.

    Old counts decay slowly, and only in rounds that bring new ones.
    """

    def __init__(self, max_gamma: int) -> None:
        self._positions = np.arange(max_gamma)
        self._counts: Reals = np.zeros((2, max_gamma))  # trials, accepted: [2, position]
        self._all_trials, self._all_accepted = 10.0, 10.0 * PRIOR_ALPHA
        self._by_sequence: dict[int, tuple[float, float]] = {}  # trials, accepted

    @property
    def alpha(self) -> float:
        """Share of the trials that were accepted."""
        return self._all_accepted / self._all_trials

    @property
    def profile(self) -> Reals:  # [position]
        """Chance that a draft token at each position is accepted if the one before it was."""
        trials, accepted = self._counts
        profile: Reals = (accepted + _PRIOR_TRIALS * self.alpha) / (trials + _PRIOR_TRIALS)
        return profile

    def assume(self, alpha: float) -> None:
        """Start from another acceptance than the usual one."""
        self._all_accepted = self._all_trials * alpha

    def observe(self, outcomes: abc.Sequence[Outcome]) -> None:
        """Include the outcomes of one round."""
        if not outcomes:
            return
        trials = [outcome.num_trials for outcome in outcomes]
        accepted = [outcome.accepted for outcome in outcomes]
        # [2, position] outcomes with more trials, or accepted tokens, than lie before a position
        beyond = (np.array([trials, accepted])[:, :, None] > self._positions).sum(1)
        self._counts = _DECAY * self._counts + beyond
        self._all_trials = _DECAY * self._all_trials + sum(trials)
        self._all_accepted = _DECAY * self._all_accepted + sum(accepted)
        for outcome in outcomes:
            own_trials, own_accepted = self._by_sequence.get(outcome.seq_id, (0.0, 0.0))
            self._by_sequence[outcome.seq_id] = (
                _SEQUENCE_DECAY * own_trials + outcome.num_trials,
                _SEQUENCE_DECAY * own_accepted + outcome.accepted,
            )

    def reach(self, seq_ids: abc.Sequence[int]) -> Reals:  # [seqs, position]
        """Return the chance that each sequence's draft tokens are accepted up to each position."""
        alpha = self.alpha
        own = np.array([self._by_sequence.get(seq_id, (0.0, 0.0)) for seq_id in seq_ids])
        own = own.reshape(-1, 2)
        ratios = (own[:, 1:] + _PRIOR_TRIALS * alpha) / (own[:, :1] + _PRIOR_TRIALS) / alpha
        chances: Reals = np.minimum(ratios * self.profile, 0.999)
        return chances.cumprod(axis=1)

    def keep_only(self, seq_ids: abc.Iterable[int]) -> None:
        """Drop the counts of all sequences but these."""
        self._by_sequence = {
            seq_id: self._by_sequence[seq_id] for seq_id in seq_ids if seq_id in self._by_sequence
        }


class CostEstimate:
    """Seconds that the passes of target and drafter take.

    The shape of the target's curve comes from its warm-up, its height from the last rounds, and
    its slope from both.
    """

    def __init__(self, curve: abc.Sequence[tuple[int, float]]) -> None:
        positions, seconds = zip(*(curve or _DEFAULT_CURVE), strict=True)
        self._positions = np.array(positions, dtype=float)
        self._seconds = np.maximum.accumulate(np.array(seconds))
        lines = np.diff(self._seconds) / np.diff(self._positions)
        self._last_line = float(lines[-1]) if len(lines) else 0.0  # seconds a position
        self._mean_positions = float(positions[0])
        self._mean_seconds: float | None = None  # until a round was seen
        # Their ratio is the slope, which starts at 1.
        self._covariance = self._variance = _SLOPE_PRIOR
        # Draft passes over target passes of as many rows, in the last rounds that waited.
        self._draft_costs: deque[float] = deque(maxlen=_MAX_WAITS)
        # Seconds of plain rounds over the warm-up's passes of as many rows; None: none was seen.
        self._plain_ratio: float | None = None
        self.host_seconds = 0.0  # of a round with drafts, before and after its passes
        self.hit_wait = 0.0  # seconds until prepared proposals arrive
        self.hit_rate = 0.0  # share of the proposals that were prepared in advance

    def verify_seconds(self, positions: float | Reals) -> Reals:
        """Return the seconds of a target pass over that many positions."""
        mean = (
            self._mean_seconds
            if self._mean_seconds is not None
            else float(self._curve(self._mean_positions))
        )
        slope = self._covariance / self._variance
        seconds: Reals = mean * np.maximum(
            0.1, 1 + slope * (self._curve(positions) / self._curve(self._mean_positions) - 1)
        )
        return seconds

    def plain_seconds(self, count: int) -> float:
        """Return the seconds of a round without drafts for that many sequences."""
        if self._plain_ratio is None:
            return float(self.verify_seconds(count)) + self.host_seconds
        return self._plain_ratio * float(self._curve(count))

    def draft_pass_seconds(self, count: int) -> float:
        """Return the seconds of one more draft token for that many sequences.

        It follows the target's curve, by the median of the costs seen: a first pass of its shape
        can take twenty times as long, and where proposals are prepared in advance there may be no
        second one for long. Of two costs it takes the smaller one, for the same reason.
        """
        costs = self._draft_costs
        if len(costs) >= _MIN_WAITS:
            cost = median(costs)
        else:
            cost = min(costs) if len(costs) > 1 else _PRIOR_COST
        return cost * float(self.verify_seconds(max(1, count)))

    def assume(self, draft_pass_seconds: float, *, count: int, hit_rate: float) -> None:
        """Start from passes of the drafter that were measured before any round."""
        for _ in range(_MIN_WAITS):
            self._add_draft_pass(draft_pass_seconds, count)
        self.hit_rate = hit_rate

    def observe_verify(self, positions: int, seconds: float) -> None:
        seconds = max(seconds, 1e-9)  # a clock may stand still
        if self._mean_seconds is None:
            self._mean_positions, self._mean_seconds = float(positions), seconds
            return
        more = float(self._curve(positions) / self._curve(self._mean_positions)) - 1
        longer = seconds / self._mean_seconds - 1
        self._covariance = _blend_slope(self._covariance, more * longer)
        self._variance = _blend_slope(self._variance, more * more)
        self._mean_positions += _BLEND * (positions - self._mean_positions)
        self._mean_seconds += _BLEND * (seconds - self._mean_seconds)

    def observe_plain(self, count: int, seconds: float) -> None:
        """Include a plain round that ran ahead: the seconds from one verdict to the next."""
        ratio = max(seconds, 1e-9) / float(self._curve(count))
        known = ratio if self._plain_ratio is None else self._plain_ratio
        self._plain_ratio = known + _BLEND * (ratio - known)

    def observe_host(self, seconds: float) -> None:
        """Include the seconds of a round with drafts in which neither worker was busy."""
        self.host_seconds += _BLEND * (max(0.0, seconds) - self.host_seconds)

    def observe_draft(self, seconds: float, *, passes: int, count: int) -> None:
        """Include a round that waited for `passes` of the drafter, for `count` sequences."""
        self._add_draft_pass((seconds - self.hit_wait) / passes, count)

    def observe_hits(self, hits: int, proposals: int, *, seconds: float | None) -> None:
        """Include which proposals were prepared, and the seconds of a round that waited for none.

        Even prepared proposals take a message each way, or the rest of a pass under way.
        """
        self.hit_rate += _BLEND * (hits / proposals - self.hit_rate)
        if seconds is not None:
            self.hit_wait += _BLEND * (seconds - self.hit_wait)

    def _add_draft_pass(self, seconds: float, count: int) -> None:
        self._draft_costs.append(
            max(seconds, _MIN_PASS_SECONDS) / float(self.verify_seconds(max(1, count)))
        )

    def _curve(self, positions: float | Reals) -> Reals:
        """Return the warm-up's seconds, interpolated linearly.

        Beyond the last measurement the last line goes on.
        """
        inside = np.interp(positions, self._positions, self._seconds)
        beyond: Reals = inside + self._last_line * np.maximum(0.0, positions - self._positions[-1])
        return beyond


def _blend_slope(known: float, newest: float) -> float:
    return max(1e-3, (1 - _SLOPE_BLEND) * known + _SLOPE_BLEND * (_SLOPE_PRIOR + newest))
