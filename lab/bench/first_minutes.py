"""A new user's first minutes: each command of the quick start, its time and what it prints.

`python -m lab.bench.first_minutes` copies the repository to an empty folder, so that `make serve`
installs into an environment of its own, and then runs the blocks of docs/guides/quickstart.md in
their order: once on the machine as it is, and once beside a process that keeps one core busy.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from lab.bench.demo_race import busy_core
from specserve.host import usable_cores
from specserve.tools.bench.report import machine
from tests.support.pages import DOCS, ROOT, URL, Block, blocks_of
from tests.support.ray_server import free_port
from tests.support.wheel import LEFT_OUT, clean

PAGE = DOCS / "guides" / "quickstart.md"
INSTALL_S, STEP_S = 3600.0, 900.0
SHOWN = 90
"""Characters of a command, and of what it printed last."""
CLIENT = "pip install openai"
QUICK = 2
"""Commands of the page that the tiny form runs."""


@dataclass(frozen=True, slots=True)
class TimedCommand:
    """A command as the page has it, its seconds and the last line that it printed."""

    command: str
    seconds: float
    printed: str


class Newcomer:
    """A copy of the repository in a folder of its own, and the shell of who works in it.

    Commands that fail are rows like the others, and listed in `failed`.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.failed: list[str] = []
        self._env = dict(clean()) | {"PATH": f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}"}

    def install(self) -> TimedCommand:
        """Install as `make serve` does before it starts anything."""
        return self._run("make serve, its installation", ["make", ".venv/installed"], INSTALL_S)

    def run(self, block: Block) -> Iterator[TimedCommand]:
        """Run each command of a shell block, or a Python block, against the own server."""
        text = block.text.replace(URL, f"http://127.0.0.1:{self.port}")
        if block.language == "python":
            yield self._run(_title(block), ["python", "-c", text], STEP_S)
            return
        for shown, line in zip(block.text.splitlines(), text.splitlines(), strict=True):
            yield self._run(shown, ["sh", "-c", line], STEP_S)

    def run_line(self, line: str) -> TimedCommand:
        return self._run(line, ["sh", "-c", line], INSTALL_S)

    @contextlib.contextmanager
    def served(self, steps: list[TimedCommand]) -> Iterator[None]:
        """Serve; add a step for the start and one for the end."""
        begun = time.monotonic()
        process = subprocess.Popen(
            ["make", "serve", f"ARGS=--port {self.port}"],
            cwd=self.folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        lines: list[str] = []
        try:
            for line in process.stdout:
                lines.append(line)
                if line.startswith("ready "):
                    steps.append(
                        TimedCommand("make serve, until ready", time.monotonic() - begun, line)
                    )
                    break
            else:
                raise AssertionError(f"it ended before it was ready: {''.join(lines)}")
            yield
            begun = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=STEP_S)
            steps.append(TimedCommand("Ctrl-C, until all is gone", time.monotonic() - begun, ""))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.communicate()

    def _run(self, title: str, command: Sequence[str], timeout: float) -> TimedCommand:
        begun = time.monotonic()
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout,
        )
        seconds = time.monotonic() - begun
        printed = next(iter(done.stdout.strip().splitlines()[::-1]), "")
        if done.returncode:
            self.failed.append(title)
            printed = f"**failed** ({done.returncode}): {printed}"
        return TimedCommand(title, seconds, printed)


def blocks() -> list[Block]:
    """Return the blocks of the quick start that a reader runs one after the other."""
    found = blocks_of(PAGE, PAGE.read_text(encoding="utf-8"))
    return [block for block in found if block.language in ("sh", "python") and not block.excuse]


def first_minutes(newcomer: Newcomer, *, quick: bool) -> list[TimedCommand]:
    """Start the server, run the page's commands while it serves, and end it."""
    steps: list[TimedCommand] = []
    with newcomer.served(steps):
        asked = blocks()
        if quick:
            asked = [block for block in asked if block.language == "sh"]
        own = (step for block in asked for step in newcomer.run(block))
        steps += (step for _, step in zip(range(QUICK), own, strict=False)) if quick else own
    return steps


def _title(block: Block) -> str:
    """Return the line of a Python block that says most: the first that asks for a text."""
    lines = [line.strip() for line in block.text.splitlines()]
    return f"Python: {next(line for line in lines if 'create(' in line or 'LLM(' in line)}"


def _cell(text: str) -> str:
    shown = " ".join(text.split()).replace("|", "/").replace("`", "'")
    return shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 3]}..."


def page(
    installed: Sequence[TimedCommand],
    quiet: Sequence[TimedCommand],
    busy: Sequence[TimedCommand],
    *,
    load: float,
) -> str:
    """Return the page: a row for each command."""
    shared = load > usable_cores()
    note = " Other programs used the cores as well: the seconds are upper bounds." if shared else ""
    lines = [
        "# A new user's first minutes",
        "",
        f"{date.today()}, {machine()}, load before {load:.1f}.",
        "`python -m lab.bench.first_minutes`: the commands of the",
        "[quick start](../guides/quickstart.md) in their order, in a copy of the repository with",
        "an environment of its own: Python, `make` and curl are all that it finds. *Busy*: the",
        f"same again beside a process that keeps one core busy. One run of each.{note}",
        "",
        "| command | s | busy, s | the last line that it prints |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{_cell(step.command)}` | {step.seconds:.1f} |  | {_cell(step.printed)} |"
        for step in installed
    ]
    seconds = [f"{step.seconds:.1f}" for step in busy] or [""] * len(quiet)
    lines += [
        f"| `{_cell(step.command)}` | {step.seconds:.1f} | {other} | {_cell(step.printed)} |"
        for step, other in zip(quiet, seconds, strict=True)
    ]
    both = [*installed, *quiet]
    lines += ["", f"All of it takes {sum(step.seconds for step in both) / 60:.1f} minutes."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the page there")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two commands, in the environment that is here: measures nothing",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="specserve-first-") as name:
        folder = Path(name) / "specserve"
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        newcomer, load = Newcomer(folder, free_port()), os.getloadavg()[0]
        installed: list[TimedCommand] = []
        if options.quick:
            (folder / ".venv").symlink_to(sys.prefix)
        else:
            installed = [newcomer.install(), newcomer.run_line(CLIENT)]
        quiet = first_minutes(newcomer, quick=options.quick)
        _write(page(installed, quiet, [], load=load), options.out)
        if not options.quick:
            with busy_core():
                busy = first_minutes(newcomer, quick=False)
            _write(page(installed, quiet, busy, load=load), options.out)
    if newcomer.failed:
        raise SystemExit(f"failed: {'; '.join(newcomer.failed)}")


def _write(text: str, out: Path | None) -> None:
    print(text, flush=True)
    if out is not None:
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
