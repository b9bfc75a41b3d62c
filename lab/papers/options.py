"""Options of `python -m lab.papers`."""

from __future__ import annotations

import argparse
from pathlib import Path

from specserve.cli.arguments import parse_count
from specserve.tools.plan.options import positive

TABLES = {
    "table-1": "Table 1 of 2312.11462, by its formulas",
    "figures": "Figures 2 to 4 of 2211.17192, by their formulas",
    "alphas": "Table 3 of 2211.17192, with the demo family",
    "speed": "Table 2 of 2211.17192, with the demo family",
    "cascades": "Tables 2 and 3 of 2312.11462, with the demo family",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    names = "; ".join(f"{name}: {about}" for name, about in TABLES.items())
    parser.add_argument(
        "tables", nargs="*", type=_table, metavar="TABLE", help=f"all of them by default. {names}"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write reproduction.md there, and the plots beside it",
    )
    parser.add_argument(
        "--params",
        type=parse_count,
        default=200_000_000,
        metavar="N",
        help="parameters of the widened target, for speed and cascades",
    )
    parser.add_argument(
        "--text-tokens",
        type=positive,
        default=16_384,
        metavar="N",
        help="held-out tokens that alpha is measured on",
    )
    parser.add_argument(
        "--prompts",
        type=positive,
        default=8,
        metavar="N",
        help="held-out prompts that are continued",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=96, metavar="N", help="of each continuation"
    )
    parser.add_argument(
        "--turns",
        type=positive,
        default=3,
        metavar="N",
        help="of all that are compared, one after the other",
    )
    parser.add_argument("--threads", type=positive, default=1, metavar="N")


def _table(text: str) -> str:
    if text not in TABLES:
        raise argparse.ArgumentTypeError(f"one of {', '.join(TABLES)}, not {text!r}")
    return text
