"""Command line of `python -m lab.bench.drafters`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from specserve.tools.plan.options import positive

SECTIONS = ("alpha", "copy", "speed", "heads", "eagle")


@dataclass(frozen=True, slots=True)
class Budget:
    """Amount of work of each section."""

    prompts: int = 16
    tokens: int = 200
    minutes: float = 10.0
    params: int = 100_000_000
    texts: int = 6
    length: int = 192
    turns: int = 5
    context: int = 32_768
    rounds: int = 300
    passes: int = 30
    threads: int = 1
    files: int | None = None
    """Files of the library that tables are counted from and a head learns from; None: all."""


def parser(description: str | None) -> argparse.ArgumentParser:
    usual = Budget()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=SECTIONS,
        metavar="NAME",
        help=f"of {', '.join(SECTIONS)}; the others stay",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page, rewritten after each section"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="where the trained copying model and heads are kept, and found again",
    )
    parser.add_argument(
        "--prompts", type=positive, default=usual.prompts, help="that alpha is measured on"
    )
    parser.add_argument(
        "--tokens", type=positive, default=usual.tokens, help="of each of their continuations"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=usual.minutes,
        help="that each may learn, if it is not in --cache",
    )
    parser.add_argument(
        "--params", type=positive, default=usual.params, help="of the widened models"
    )
    parser.add_argument(
        "--texts", type=positive, default=usual.texts, help="that are rewritten in a turn"
    )
    parser.add_argument(
        "--length", type=positive, default=usual.length, help="of each of them, in tokens"
    )
    parser.add_argument("--turns", type=positive, default=usual.turns)
    parser.add_argument(
        "--context",
        type=positive,
        default=usual.context,
        help="tokens behind a proposal without a model",
    )
    parser.add_argument("--rounds", type=positive, default=usual.rounds, help="of such proposals")
    parser.add_argument(
        "--passes",
        type=positive,
        default=usual.passes,
        help="of the target with and without heads, in a turn",
    )
    parser.add_argument("--threads", type=positive, default=usual.threads)
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    return parser


QUICK = Budget(
    prompts=1,
    tokens=8,
    minutes=0.01,
    params=7_000_000,
    texts=1,
    length=64,
    turns=1,
    context=512,
    rounds=3,
    passes=3,
    files=6,
)


def budget(options: argparse.Namespace) -> Budget:
    if options.quick:
        return QUICK
    stated = vars(options)
    return Budget(**{name: stated[name] for name in Budget.__dataclass_fields__ if name in stated})
