"""What the papers print, as far as it is beyond doubt. Numbers only.

The figures are those of Tables 1 to 3 of 2211.17192 (target T5-XXL, 11B) and of Table 1 of 2312.11462, which takes its
alphas from there and c as the ratio of the parameters. Tables 2 and 3 of 2312.11462 are not copied here: they are of other
models and tasks, and no figure of theirs can be checked by a formula.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET, BASE, SMALL = 11_300e6, 250e6, 77e6  # parameters


@dataclass(frozen=True, slots=True)
class Setup:
    """A row of Table 1 of 2312.11462: so many positions drafted at such an alpha by a model of so many parameters."""

    task: str
    drafts: tuple[tuple[str, int, float, float], ...]  # name, positions, alpha, parameters
    factor: float


TABLE_1 = (
    Setup("CNNDM", (("small", 9, 0.65, SMALL),), 2.65),
    Setup("CNNDM", (("base", 8, 0.73, BASE),), 2.96),
    Setup("CNNDM", (("base", 5, 0.73, BASE), ("small", 3, 0.65, SMALL)), 3.03),
    Setup("EnDe", (("small", 12, 0.75, SMALL),), 3.61),
    Setup("EnDe", (("base", 11, 0.80, BASE),), 3.75),
    Setup("EnDe", (("base", 5, 0.80, BASE), ("small", 8, 0.75, SMALL)), 3.93),
)


@dataclass(frozen=True, slots=True)
class Trade:
    """A row of Table 1 of 2211.17192: operations and speed where drafting costs nothing."""

    alpha: float
    gamma: int
    operations: float
    speed: float


TRADES = (
    Trade(0.6, 2, 1.53, 1.96),
    Trade(0.7, 3, 1.58, 2.53),
    Trade(0.8, 2, 1.23, 2.44),
    Trade(0.8, 5, 1.63, 3.69),
    Trade(0.9, 2, 1.11, 2.71),
    Trade(0.9, 10, 1.60, 6.86),
)


@dataclass(frozen=True, slots=True)
class Acceptances:
    """A row of Table 3 of 2211.17192."""

    task: str
    draft: str
    greedy: float
    sampled: float


TABLE_3 = (
    Acceptances("EnDe", "unigram", 0.08, 0.07),
    Acceptances("EnDe", "bigram", 0.20, 0.19),
    Acceptances("EnDe", "T5-small (77M)", 0.75, 0.62),
    Acceptances("EnDe", "T5-base (250M)", 0.80, 0.68),
    Acceptances("EnDe", "T5-large (800M)", 0.82, 0.71),
    Acceptances("CNNDM", "unigram", 0.13, 0.08),
    Acceptances("CNNDM", "bigram", 0.23, 0.16),
    Acceptances("CNNDM", "T5-small (77M)", 0.65, 0.53),
    Acceptances("CNNDM", "T5-base (250M)", 0.73, 0.55),
    Acceptances("CNNDM", "T5-large (800M)", 0.74, 0.56),
)


@dataclass(frozen=True, slots=True)
class Speed:
    """A row of Table 2 of 2211.17192."""

    task: str
    draft: str
    temperature: int
    gamma: int
    alpha: float
    factor: float


TABLE_2 = (
    Speed("EnDe", "T5-small (77M)", 0, 7, 0.75, 3.4),
    Speed("EnDe", "T5-base (250M)", 0, 7, 0.80, 2.8),
    Speed("EnDe", "T5-large (800M)", 0, 7, 0.82, 1.7),
    Speed("EnDe", "T5-small (77M)", 1, 7, 0.62, 2.6),
    Speed("EnDe", "T5-base (250M)", 1, 5, 0.68, 2.4),
    Speed("EnDe", "T5-large (800M)", 1, 3, 0.71, 1.4),
    Speed("CNNDM", "T5-small (77M)", 0, 5, 0.65, 3.1),
    Speed("CNNDM", "T5-base (250M)", 0, 5, 0.73, 3.0),
    Speed("CNNDM", "T5-large (800M)", 0, 3, 0.74, 2.2),
    Speed("CNNDM", "T5-small (77M)", 1, 5, 0.53, 2.3),
    Speed("CNNDM", "T5-base (250M)", 1, 3, 0.55, 2.2),
    Speed("CNNDM", "T5-large (800M)", 1, 3, 0.56, 1.7),
)
