"""Gain of speculation by gamma, and the best gamma. Plain numbers; knows no models."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.theory import arithmetic_factor, best_gamma, tokens_per_round, walltime_factor


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Draft and target in theory; `name` is such as "given" or "T = 0".

    `c` is the time of a draft pass over that of a target pass, `c_ops` the same for operations.
    """

    name: str
    alpha: float
    c: float
    c_ops: float


@dataclass(frozen=True, slots=True)
class GammaGain:
    """Gain of one gamma over plain decoding.

    `tokens` are committed a round; `serial` is the walltime factor if the target waits for the
    draft, `hidden` if a share of the proposals is ready in time; `operations` counts arithmetic.
    """

    gamma: int
    tokens: float
    serial: float
    hidden: float
    operations: float

    @classmethod
    def from_pair(cls, pair: ModelPair, gamma: int, hit_rate: float) -> GammaGain:
        return cls(
            gamma,
            tokens_per_round(pair.alpha, gamma),
            walltime_factor(pair.alpha, gamma, pair.c),
            walltime_factor(pair.alpha, gamma, pair.c, hit_rate=hit_rate),
            arithmetic_factor(pair.alpha, gamma, pair.c_ops),
        )


@dataclass(frozen=True, slots=True)
class GammaAdvice:
    """Best gammas of a pair, and the gain of every gamma from 0 on."""

    pair: ModelPair
    hit_rate: float
    by_gamma: tuple[GammaGain, ...]
    best_serial: int
    best_hidden: int

    @classmethod
    def from_pair(cls, pair: ModelPair, *, hit_rate: float, max_gamma: int) -> GammaAdvice:
        return cls(
            pair,
            hit_rate,
            tuple(GammaGain.from_pair(pair, gamma, hit_rate) for gamma in range(max_gamma + 1)),
            best_gamma(pair.alpha, pair.c, max_gamma),
            best_gamma(pair.alpha, pair.c, max_gamma, hit_rate=hit_rate),
        )

    @property
    def serial(self) -> GammaGain:
        return self.by_gamma[self.best_serial]

    @property
    def hidden(self) -> GammaGain:
        return self.by_gamma[self.best_hidden]
