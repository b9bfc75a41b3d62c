"""`python -m tests.conformance.suites`: server tests of other projects against our servers.

Each suite is taken from its project's release and runs unmodified in an environment of its own. The
servers serve SmolLM2, whose package must be installed, and the demo pair for completions; behind
Ray Serve LLM, by what `python -m lab.bench.peers.install ray-llm` has installed. What is not run
and what fails for a known reason is named with the reason. Prints the tables of the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
from datetime import date
from pathlib import Path

from tests.conformance.checks import FAILED
from tests.conformance.page import SUITES as HEADING
from tests.conformance.page import suites_section
from tests.conformance.suites.sources import SUITES, fetch, run_suite
from tests.conformance.suites.tables import tables

INTRODUCTION = f"""{HEADING}

{{when}}. Command: `python -m tests.conformance.suites`. Each release's tests run unmodified against
SmolLM2, or the demo pair.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [suite.name for suite in SUITES]
    parser.add_argument("--only", choices=names, help="instead of all")
    parser.add_argument("--tests", nargs="+", default=(), metavar="TEST", help="of that suite")
    parser.add_argument("--archive", type=Path, help="of that suite's release, not to download it")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="whose last section it writes")
    parser.add_argument("--results", type=Path, help="write the outcome of every test there")
    options = parser.parse_args()
    if (options.tests or options.archive) and not options.only:
        parser.error("--tests and --archive go with --only")
    runs = []
    for suite in SUITES:
        if options.only not in (None, suite.name):
            continue
        if not Path(suite.server[0]).exists():
            print(f"{suite.name} is left out: {suite.server[0]} is not installed", file=sys.stderr)
            continue
        try:
            fetch(suite, options.archive)
        except (OSError, tarfile.TarError) as error:
            parser.error(f"{suite.name}: {error}; --archive names a {suite.release} that is here")
        runs.append(run_suite(suite, options.tests))
    section = "\n".join((INTRODUCTION.format(when=date.today()), *tables(runs)))
    print(section)
    if options.out is not None:
        page = options.out.read_text(encoding="utf-8")
        page = page.removesuffix(suites_section(page))
        options.out.write_text(f"{page}\n{section}\n", encoding="utf-8")
    results = [result for run in runs for result in run.results]
    if options.results is not None:
        lines = [json.dumps([each.name, each.outcome, each.reason]) for each in results]
        options.results.write_text("\n".join(lines) + "\n", encoding="utf-8")
    unknown = [result for result in results if result.outcome == FAILED]
    for result in unknown:
        print(f"{result.name}: {result.reason}", file=sys.stderr)
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
