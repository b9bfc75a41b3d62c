"""The verifier of sampled requests that leave it to the server: the one with more tokens a second.

Both are exact, so the choice is one of speed. `block` accepts more draft tokens; `coupled` lets the
drafter foresee more of the target's own tokens, so that more proposals are prepared in advance. A
sequence keeps its verifier, which is chosen before its first pass from what other sequences have
shown: nothing that its own noise decides has a part in it. Knows counts; no seconds and no workers.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict, abc
from dataclasses import dataclass, field, replace
from typing import Protocol

from specserve.engine.batch import Batch, Outcome
from specserve.engine.sequence import Sequence
from specserve.types import Policy

log = logging.getLogger(__name__)

DEFAULT_VERIFIER = "block"
_OTHER = {"block": "coupled", "coupled": "block"}
_MIN_GAIN = 1.01  # gain over the default that `coupled` must promise
# The slower verifier is tried by as many sequences as cost this share of all tokens a second ...
_TRIAL_LOSS = 0.0025
_MAX_TRIALS = 1 / 8  # ... but by no larger share of the sequences.
# Draft tokens, and proposals, of a verifier whose own rates count as much as those of both.
_PRIOR_DRAFTS = 100.0
_PRIOR_PROPOSALS = 30.0
_MAX_PROPOSALS = 10_000.0  # under a verifier, before all counts of the kind are halved
_MAX_KINDS = 16


class RateModel(Protocol):
    """The part of the pacer that knows costs."""

    def expected_rate(
        self, num_sequences: int, *, alpha: float | None = None, hit_rate: float | None = None
    ) -> float: ...


@dataclass(slots=True)
class VerifierRecord:
    """Counts of the sequences of one kind under one verifier."""

    num_sequences: float = 0.0
    trials: float = 0.0  # draft tokens whose acceptance was decided
    accepted: float = 0.0
    proposals: float = 0.0  # that were wanted
    hits: float = 0.0  # of which were prepared in advance

    def __add__(self, other: VerifierRecord) -> VerifierRecord:
        return VerifierRecord(
            self.num_sequences + other.num_sequences,
            self.trials + other.trials,
            self.accepted + other.accepted,
            self.proposals + other.proposals,
            self.hits + other.hits,
        )

    def halved(self) -> VerifierRecord:
        return VerifierRecord(
            self.num_sequences / 2,
            self.trials / 2,
            self.accepted / 2,
            self.proposals / 2,
            self.hits / 2,
        )


@dataclass(frozen=True, slots=True)
class VerifierEstimate:
    """Acceptance and hit rate to expect under a verifier."""

    alpha: float
    hit_rate: float

    def expected_rate(self, rates: RateModel, num_sequences: int) -> float:
        return rates.expected_rate(num_sequences, alpha=self.alpha, hit_rate=self.hit_rate)

    def mixed_with(self, other: VerifierEstimate, num_sequences: int) -> VerifierEstimate:
        """Return the estimate for a batch in which one sequence has the other verifier.

        A miss of that one holds up the others.
        """
        share = 1 / num_sequences
        return VerifierEstimate(
            (1 - share) * self.alpha + share * other.alpha,
            self.hit_rate ** (1 - share) * other.hit_rate**share,
        )


@dataclass(slots=True)
class SampledKind:
    """Requests that draw their tokens alike, which makes their verifiers comparable."""

    records: dict[str, VerifierRecord] = field(
        default_factory=lambda: {name: VerifierRecord() for name in _OTHER}
    )
    best: str = DEFAULT_VERIFIER

    def halve(self) -> None:
        """Halve all counts, so that what was seen lately counts more."""
        self.records = {name: record.halved() for name, record in self.records.items()}

    def estimate(self, verifier: str) -> VerifierEstimate | None:
        """Return what to expect under a verifier, or None before anything was seen.

        While little was seen under it, both are close to those under either.
        """
        own = self.records[verifier]
        both = own + self.records[_OTHER[verifier]]
        if not both.trials or not both.proposals:
            return None
        return VerifierEstimate(
            (own.accepted + _PRIOR_DRAFTS * both.accepted / both.trials)
            / (own.trials + _PRIOR_DRAFTS),
            (own.hits + _PRIOR_PROPOSALS * both.hits / both.proposals)
            / (own.proposals + _PRIOR_PROPOSALS),
        )


class VerifierChoice:
    """The records of the last kinds of requests, and the sequences that add to them."""

    def __init__(self, *, seed: int = 0) -> None:
        self._kinds: OrderedDict[abc.Hashable, SampledKind] = OrderedDict()
        self._kind_of: dict[int, SampledKind] = {}  # by sequence
        self._random = random.Random(seed)

    def assign(self, running: abc.Sequence[Sequence], rates: RateModel) -> None:
        """Set the verifier of each sequence that is about to start and leaves it open."""
        for sequence in running:
            if sequence.is_verifier_open and sequence.seq_id not in self._kind_of:
                kind = self._kind_of[sequence.seq_id] = self._kind(sequence.policy)
                verifier = self._choose(kind, rates, num_sequences=len(running))
                kind.records[verifier].num_sequences += 1
                sequence.policy = replace(sequence.policy, verifier=verifier)

    def observe(self, batch: Batch, outcomes: abc.Sequence[Outcome]) -> None:
        """Add a round's outcomes to the records of their sequences' verifiers."""
        if not self._kind_of:
            return
        by_id = {outcome.seq_id: outcome for outcome in outcomes}
        for entry in batch.entries:
            sequence, proposal = entry.sequence, entry.proposal
            kind = self._kind_of.get(sequence.seq_id)
            if kind is None or not entry.gamma or proposal is None:
                continue
            record = kind.records[sequence.policy.verifier]
            record.proposals += 1
            record.hits += proposal.anticipated is True
            outcome = by_id.get(sequence.seq_id)
            if outcome is not None:
                record.trials += outcome.num_trials
                record.accepted += outcome.accepted
            if record.proposals >= _MAX_PROPOSALS:
                kind.halve()

    def drop(self, seq_ids: abc.Iterable[int]) -> None:
        """Drop finished sequences; what they have shown stays."""
        for seq_id in seq_ids:
            self._kind_of.pop(seq_id, None)

    def _kind(self, policy: Policy) -> SampledKind:
        warp = policy.warp
        key = (warp.temperature, warp.top_k, warp.top_p, warp.min_p, policy.constrained)
        kind = self._kinds.setdefault(key, SampledKind())
        self._kinds.move_to_end(key)
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)
        return kind

    def _choose(self, kind: SampledKind, rates: RateModel, *, num_sequences: int) -> str:
        """Return the verifier with the higher rate, or now and then the other one, as a trial.

        Trials are due at irregular intervals, so that they do not meet the same client each time.
        """
        best, share = DEFAULT_VERIFIER, _MAX_TRIALS
        own, other = (kind.estimate(name) for name in _OTHER)
        if own is not None and other is not None:
            expected = [one.expected_rate(rates, num_sequences) for one in (own, other)]
            if expected[1] > _MIN_GAIN * expected[0]:
                best, own, other = _OTHER[best], other, own
            mixed = own.mixed_with(other, num_sequences).expected_rate(rates, num_sequences)
            loss = num_sequences * (1 - mixed / max(expected))
            share = min(_MAX_TRIALS, _TRIAL_LOSS / max(loss, _TRIAL_LOSS))
            if best != kind.best:
                log.info(
                    "unseeded requests are verified with %s from now on: %.0f tokens/s expected "
                    "of block, %.0f of coupled",
                    best,
                    *expected,
                )
        kind.best = best
        total = sum(record.num_sequences for record in kind.records.values())
        trials = kind.records[_OTHER[best]].num_sequences
        return _OTHER[best] if trials < share * total and self._random.random() < 0.5 else best
