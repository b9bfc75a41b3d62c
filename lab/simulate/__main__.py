"""`python -m lab.simulate CONFIG`: simulate the engine on other devices, loads and replicas."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.simulate.report import run_study
from specserve.cli.main import run_command
from specserve.cli.parser import Parser
from specserve.progress import ProgressBar


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m lab.simulate",
        description="Say how many replicas and devices a load needs, by simulation.",
    )
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="YAML, such as deploy/simulate-70b.yaml"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every case that was simulated, in full"
    )
    return run_command(parser, _simulate, arguments)


def _simulate(options: argparse.Namespace) -> None:
    with ProgressBar(sys.stderr) as bar:
        report = run_study(options.config, report_progress=bar)
    print(report.text())
    if options.json is not None:
        options.json.write_text(json.dumps(report.json(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
