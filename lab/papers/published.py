"""Figures that the papers print, as far as they can be checked.

They come from Tables 1 to 3 of arXiv 2211.17192 (target T5-XXL, 11B) and from Table 1 of arXiv
2312.11462, which takes its alphas from there and c as the ratio of the parameters. Tables 2 and 3
of 2312.11462 are of other models and tasks; no formula can check their figures.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET = 11_300e6
BASE = 250e6
SMALL = 77e6
"""Parameters of T5 in three sizes."""


@dataclass(frozen=True, slots=True)
class PaperSetup:
    """Row of Table 1 of 2312.11462. A draft is name, positions, alpha and parameters."""

    task: str
    drafts: tuple[tuple[str, int, float, float], ...]
    factor: float


TABLE_1 = (
    PaperSetup("CNNDM", (("small", 9, 0.65, SMALL),), 2.65),
    PaperSetup("CNNDM", (("base", 8, 0.73, BASE),), 2.96),
    PaperSetup("CNNDM", (("base", 5, 0.73, BASE), ("small", 3, 0.65, SMALL)), 3.03),
    PaperSetup("EnDe", (("small", 12, 0.75, SMALL),), 3.61),
    PaperSetup("EnDe", (("base", 11, 0.80, BASE),), 3.75),
    PaperSetup("EnDe", (("base", 5, 0.80, BASE), ("small", 8, 0.75, SMALL)), 3.93),
)


@dataclass(frozen=True, slots=True)
class PaperTradeOff:
    """Row of Table 1 of 2211.17192: operations and speed if drafting costs nothing."""

    alpha: float
    gamma: int
    operations: float
    speed: float


TRADE_OFFS = (
    PaperTradeOff(0.6, 2, 1.53, 1.96),
    PaperTradeOff(0.7, 3, 1.58, 2.53),
    PaperTradeOff(0.8, 2, 1.23, 2.44),
    PaperTradeOff(0.8, 5, 1.63, 3.69),
    PaperTradeOff(0.9, 2, 1.11, 2.71),
    PaperTradeOff(0.9, 10, 1.60, 6.86),
)


@dataclass(frozen=True, slots=True)
class PaperAcceptance:
    """Row of Table 3 of 2211.17192."""

    task: str
    draft: str
    greedy: float
    sampled: float


TABLE_3 = (
    PaperAcceptance("EnDe", "unigram", 0.08, 0.07),
    PaperAcceptance("EnDe", "bigram", 0.20, 0.19),
    PaperAcceptance("EnDe", "T5-small (77M)", 0.75, 0.62),
    PaperAcceptance("EnDe", "T5-base (250M)", 0.80, 0.68),
    PaperAcceptance("EnDe", "T5-large (800M)", 0.82, 0.71),
    PaperAcceptance("CNNDM", "unigram", 0.13, 0.08),
    PaperAcceptance("CNNDM", "bigram", 0.23, 0.16),
    PaperAcceptance("CNNDM", "T5-small (77M)", 0.65, 0.53),
    PaperAcceptance("CNNDM", "T5-base (250M)", 0.73, 0.55),
    PaperAcceptance("CNNDM", "T5-large (800M)", 0.74, 0.56),
)


@dataclass(frozen=True, slots=True)
class PaperSpeed:
    """Row of Table 2 of 2211.17192."""

    task: str
    draft: str
    temperature: int
    gamma: int
    alpha: float
    factor: float


TABLE_2 = (
    PaperSpeed("EnDe", "T5-small (77M)", 0, 7, 0.75, 3.4),
    PaperSpeed("EnDe", "T5-base (250M)", 0, 7, 0.80, 2.8),
    PaperSpeed("EnDe", "T5-large (800M)", 0, 7, 0.82, 1.7),
    PaperSpeed("EnDe", "T5-small (77M)", 1, 7, 0.62, 2.6),
    PaperSpeed("EnDe", "T5-base (250M)", 1, 5, 0.68, 2.4),
    PaperSpeed("EnDe", "T5-large (800M)", 1, 3, 0.71, 1.4),
    PaperSpeed("CNNDM", "T5-small (77M)", 0, 5, 0.65, 3.1),
    PaperSpeed("CNNDM", "T5-base (250M)", 0, 5, 0.73, 3.0),
    PaperSpeed("CNNDM", "T5-large (800M)", 0, 3, 0.74, 2.2),
    PaperSpeed("CNNDM", "T5-small (77M)", 1, 5, 0.53, 2.3),
    PaperSpeed("CNNDM", "T5-base (250M)", 1, 3, 0.55, 2.2),
    PaperSpeed("CNNDM", "T5-large (800M)", 1, 3, 0.56, 1.7),
)
