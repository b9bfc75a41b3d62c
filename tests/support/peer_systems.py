"""A fake system of the comparison with other engines, in a process of its own."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lab.bench.peers.process import SystemProcess
from lab.bench.peers.turn import TurnRequest

PROMPTS = ((1, 2), (3, 4), (5, 6))

FAKE = """
import sys, time
from contextlib import contextmanager
from lab.bench.peers.turn import serve_turns

class Fake:
    def about(self):
        print("a library that prints")
        return {"version": "7"}
    def run(self, request):
        if request.mode == "refused":
            raise ValueError("no such mode\\nand more of it")
        if request.mode == "stuck":
            time.sleep(60)
        if request.mode == "dying":
            sys.stderr.write("out of luck\\n")
            sys.exit(3)
        time.sleep(0.02 if request.gamma == 5 else 0.1)
        return len(request.prompts) * request.max_tokens - (request.mode == "short")
    def texts(self, request):
        return [
            f"{len(batch)} {list(prompt)} {request.gamma}"
            for batch in request.batches
            for prompt in batch
        ]

@contextmanager
def open_system():
    if "closed" in sys.argv:
        raise RuntimeError("there is no model")
    yield Fake()
    print("gone", file=open(sys.argv[1], "w"))

serve_turns(open_system)
"""


@pytest.fixture
def fake(tmp_path: Path) -> list[str]:
    """Return a system that prints, refuses, dies, and is fast with gamma 5.

    It leaves a file when it has ended in order.
    """
    program = tmp_path / "fake.py"
    program.write_text(textwrap.dedent(FAKE))
    return [sys.executable, str(program), str(tmp_path / "gone")]


@pytest.fixture
def process(fake: Sequence[str]) -> Iterator[SystemProcess]:
    with SystemProcess(fake) as process:
        yield process


def turn(mode: str, gamma: int | None = None, *, together: bool = True) -> TurnRequest:
    return TurnRequest(mode, gamma, PROMPTS, max_tokens=4, together=together)
