"""Run a step on the first day with a GPU, or write the page of all steps.

`python -m tests.gpu check`, `speed`, `texts`, `decode`, each under ten minutes on one card; then
`page`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.gpu import check, decoding, speed, texts
from tests.gpu.page import write_page
from tests.gpu.sections import Scale, Section, run_sections

STEPS: Mapping[str, Mapping[str, Section]] = {
    "check": check.SECTIONS,
    "speed": speed.SECTIONS,
    "texts": texts.SECTIONS,
    "decode": decoding.SECTIONS,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=(*STEPS, "page"))
    parser.add_argument("--small", action="store_true", help="only show that it runs")
    parser.add_argument("--results", type=Path, default=Path("gpu-results"))
    parser.add_argument("--out", type=Path, default=Path("docs/measurements/gpu.md"))
    args = parser.parse_args(arguments)
    if args.step == "page":
        write_page(args.results, list(STEPS), args.out)
        return 0
    is_right = run_sections(args.step, STEPS[args.step], Scale(args.small), args.results)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
