"""What drafting gains by gamma, and which gamma gains most. Theory on plain numbers; knows no models."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.theory import arithmetic_factor, best_gamma, tokens_per_round, walltime_factor


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft beside its target, as theory sees them."""

    name: str  # such as "given" or "T = 0"
    alpha: float
    c: float  # seconds of a draft pass / of a target pass
    c_ops: float  # operations likewise


@dataclass(frozen=True, slots=True)
class Gain:
    """What one gamma comes to."""

    gamma: int
    tokens: float  # a round commits
    serial: float  # times faster than plain decoding, when the target waits for the draft
    hidden: float  # likewise, when a share of the proposals is ready in time
    operations: float  # times the arithmetic of plain decoding

    @classmethod
    def of(cls, pair: Pair, gamma: int, hit_rate: float) -> Gain:
        return cls(
            gamma,
            tokens_per_round(pair.alpha, gamma),
            walltime_factor(pair.alpha, gamma, pair.c),
            walltime_factor(pair.alpha, gamma, pair.c, hit_rate=hit_rate),
            arithmetic_factor(pair.alpha, gamma, pair.c_ops),
        )


@dataclass(frozen=True, slots=True)
class Advice:
    """The best gammas of a pair, and all that they were chosen from."""

    pair: Pair
    hit_rate: float
    by_gamma: tuple[Gain, ...]  # from gamma 0 on
    best_serial: int
    best_hidden: int

    @classmethod
    def of(cls, pair: Pair, *, hit_rate: float, max_gamma: int) -> Advice:
        return cls(
            pair,
            hit_rate,
            tuple(Gain.of(pair, gamma, hit_rate) for gamma in range(max_gamma + 1)),
            best_gamma(pair.alpha, pair.c, max_gamma),
            best_gamma(pair.alpha, pair.c, max_gamma, hit_rate=hit_rate),
        )

    @property
    def serial(self) -> Gain:
        return self.by_gamma[self.best_serial]

    @property
    def hidden(self) -> Gain:
        return self.by_gamma[self.best_hidden]
