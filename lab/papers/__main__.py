"""`python -m lab.papers [TABLE ...]`: tables and figures of the papers beside ours."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lab.papers.options import add_arguments
from specserve.cli.main import run_command
from specserve.cli.parser import Parser
from specserve.progress import ProgressBar


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m lab.papers",
        description="Print the papers' tables and figures, ours beside theirs.",
    )
    add_arguments(parser)
    return run_command(parser, _reproduce, arguments)


def _reproduce(options: argparse.Namespace) -> None:
    from lab.papers.command import reproduce  # late: torch is not needed for bad usage

    with ProgressBar(sys.stderr) as bar:
        page = reproduce(options, bar)
    print(page)


if __name__ == "__main__":
    sys.exit(main())
