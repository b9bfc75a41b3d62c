"""`make test` and `make test-rest`: the files of a part of the suite, in two lanes at once.

A folder says what its tests need (`FOLDERS`); those without a mark are the core, the part that
`make test` runs. Files are dealt by the seconds that `durations.json` has of them. Tests on Ray
stand in one lane, since two clusters on a small machine disturb each other's deadlines. With
`--browser` the rest has the browser's tests, too. The output of the first lane is printed as it
comes, that of the second as a whole.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DURATIONS = Path(__file__).parent / "durations.json"
RECORDED = ROOT / ".pytest_cache" / "v" / "seconds"
"""Where pytest keeps the seconds of the files that ran with `--record-seconds`."""

FOLDERS = {
    "ray": ("ray", "ray_llm"),
    "browser": ("browser",),
    "card": ("card", "gpu"),
    "proofs": ("proofs", "families"),
    "forms": ("lab", "chaos", "docs/test_blocks.py", "features/test_removal.py"),
}
"""The mark of all tests in these folders and files."""
FRESH = ("tests/ray/test_server.py", "tests/ray/test_several_models.py")
"""Files on Ray with a process of their own: handles of Serve waited for ever there, in a process
that had joined and left a dozen times before."""
BROWSED_RAY = "tests/browser/test_real_server.py"
"""The browser's file on Ray."""
WITH_BROWSER = ("-m", "not gpu and not long")
"""Arguments of pytest that select the browser's tests beside those selected anyway."""
PARTS = ("core", "rest")
DEFAULT_S = 2.0
"""Seconds of a file that was never measured."""
NO_TESTS = 5
"""Exit status of pytest when it finds no tests, as in a file of tests that need a GPU."""

# A thread of torch that waits for another would otherwise keep the other lane from its core.
# What pytest rewrites of the tests is kept, which takes two seconds of each run's beginning.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": ""}

Lane = Sequence[Sequence[str]]
"""The files of each run of pytest, one run after the other."""


def mark_of(file: Path) -> str | None:
    """Return the mark of a test file's folder, or None if it is a part of the core."""
    for mark, folders in FOLDERS.items():
        if any(file.is_relative_to(TESTS / folder) for folder in folders):
            return mark
    return None


def deal_part(
    part: str, durations: Mapping[str, float], *, with_browser: bool = False
) -> tuple[Lane, Lane]:
    """Return the lanes of a part of the suite."""
    files: defaultdict[str | None, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        files[mark_of(path)].append(str(path.relative_to(ROOT)))
    if part == "core":
        one, other = deal(files[None], durations)
        return [one], [other]
    # Playwright keeps an event loop in its process, where tests cannot run loops of their own.
    browsed = [[BROWSED_RAY], [file for file in files["browser"] if file != BROWSED_RAY]]
    browsed_ray, browsed_pages = browsed if with_browser else [[], []]
    on_ray = [[*FRESH], [file for file in files["ray"] if file not in FRESH], browsed_ray]
    ahead = [
        sum(durations.get(file, DEFAULT_S) for run in lane for file in run)
        for lane in (on_ray, [browsed_pages])
    ]
    others = [
        file for mark, of in files.items() if mark not in (None, "ray", "browser") for file in of
    ]
    one, other = deal(others, durations, ahead_s=ahead)
    return [*on_ray, one], [browsed_pages, other]


def deal(
    files: Iterable[str], durations: Mapping[str, float], *, ahead_s: Sequence[float] = (0.0, 0.0)
) -> tuple[list[str], list[str]]:
    """Deal files to two lanes, the longest first and to the lane that ends sooner.

    `ahead_s` are the seconds of what each lane runs before.
    """
    lanes: tuple[list[str], list[str]] = ([], [])
    loads = list(ahead_s)
    for file in sorted(files, key=lambda file: -durations.get(file, DEFAULT_S)):
        lane = loads.index(min(loads))
        lanes[lane].append(file)
        loads[lane] += durations.get(file, DEFAULT_S)
    return lanes


def run(arguments: Sequence[str], lanes: Sequence[Lane]) -> int:
    """Run pytest for all lanes at once, print their output, and return the exit status."""
    with tempfile.TemporaryFile() as later:
        running = [
            _RunningLane(lane, arguments, output)
            for lane, output in zip(lanes, (None, later), strict=True)
        ]
        try:
            statuses = [status for lane in running for status in lane.wait()]
        finally:
            for lane in running:
                lane.end()  # after Ctrl-C
        later.seek(0)
        sys.stdout.buffer.write(later.read())
        sys.stdout.flush()
    if all(status == NO_TESTS for status in statuses):
        return NO_TESTS
    return max((status for status in statuses if status != NO_TESTS), key=abs)


class _RunningLane:
    """Runs of pytest, one after the other, in a thread that waits for them."""

    def __init__(self, lane: Lane, arguments: Sequence[str], output: IO[bytes] | None) -> None:
        self._lane, self._arguments, self._output = lane, arguments, output
        self._statuses: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait(self) -> Sequence[int]:
        """Return the exit status of each run when all are over."""
        while self._thread.is_alive():
            self._thread.join(0.5)  # Ctrl-C comes between two waits
        return self._statuses

    def end(self) -> None:
        """Terminate the present run, and start no other."""
        self._is_ended = True
        if self._process is not None:
            self._process.terminate()
        self._thread.join()

    def _run(self) -> None:
        for files in self._lane:
            if self._is_ended:
                return
            if not files:
                continue  # pytest would run all
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *self._arguments, *files],
                env=os.environ | ENVIRONMENT,
                stdout=self._output,
                stderr=subprocess.STDOUT if self._output else None,
            )
            self._statuses.append(self._process.wait())


def read_durations(file: Path = DURATIONS) -> dict[str, float]:
    durations: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return durations


def write_durations(recorded: Path = RECORDED, file: Path = DURATIONS) -> None:
    """Update the seconds of each file that was run, and drop the files that are gone."""
    durations = read_durations(file)
    for seconds in recorded.rglob("test_*.py"):
        name = str(seconds.relative_to(recorded))
        durations[name] = round(json.loads(seconds.read_text(encoding="utf-8")), 1)
    present = {name: durations[name] for name in sorted(durations) if (ROOT / name).is_file()}
    file.write_text(json.dumps(present, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, help="the part to run")
    parser.add_argument(
        "--write-durations",
        action="store_true",
        help=f"write the seconds of the last runs into {DURATIONS.name}, and run nothing",
    )
    parser.add_argument(
        "--browser", action="store_true", help="with the tests that need Chromium, in the rest"
    )
    options, for_pytest = parser.parse_known_args()
    if options.write_durations:
        write_durations()
        return 0
    if options.part is None:
        parser.error("which part?")
    # A selection of tests says nothing of a file's seconds.
    arguments = for_pytest or ["--record-seconds"]
    if options.browser:
        arguments = [*WITH_BROWSER, *arguments]
    return run(arguments, deal_part(options.part, read_durations(), with_browser=options.browser))


if __name__ == "__main__":
    # A job in the background of a shell ignores Ctrl-C, and so would what the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
