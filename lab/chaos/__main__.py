"""`python -m lab.chaos --url URL --roles ROLES`: kill processes of a local server under load."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.chaos.command import ChaosOptions, chaos
from specserve.cli.main import run_command
from specserve.cli.parser import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m lab.chaos",
        description="Kill or stop processes of a server on this machine, and check its texts.",
    )
    add = parser.add_argument
    add("--url", required=True, metavar="U", help="URL of a server that runs on this machine")
    add(
        "--roles",
        required=True,
        metavar="ROLES",
        help="whose processes get faults: some of draft,target,coordinator,controller",
    )
    add("--kills", type=int, default=20, metavar="N", help="number of faults; 20 by default")
    add("--model", metavar="NAME", help="the server's first by default")
    add("--concurrency", type=int, default=16, metavar="N", help="clients; 16 by default")
    add("--max-tokens", type=int, default=128, metavar="N", help="per request; 128 by default")
    add("--seed", type=int, default=0, metavar="S", help="of the faults; 0 by default")
    add("--api-key-file", type=Path, metavar="FILE", help="the key is its first line")
    return run_command(parser, _chaos, arguments)


def _chaos(options: argparse.Namespace) -> None:
    chaos(ChaosOptions(**vars(options)), print)


if __name__ == "__main__":
    sys.exit(main())
