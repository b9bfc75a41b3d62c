"""The coordinator's own work with workers that cost nothing: `python -m benchmarks.coordinator_overhead`. Microseconds a committed token."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from specserve.engine import Coordinator
from specserve.engine.trace import Journal
from specserve.metrics import Registry
from specserve.types import (
    Chunk,
    DraftStep,
    ModelInfo,
    Proposal,
    Request,
    Verdict,
    VerifyStep,
    Warp,
)

GAMMA, PROMPT, SIZES = 5, 200, (64, 256, 1024, 4096)


class Target:
    """Accepts 0 to 5 drafts in turn. Its own seconds are counted, and taken off."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    async def verify(self, steps: Sequence[VerifyStep]) -> list[Verdict]:
        begun = time.perf_counter()
        self.calls += 1
        verdicts = [
            Verdict(step.seq_id, (step.seq_id + self.calls) % (len(step.drafts) + 1), 7, None)
            for step in steps
            if step.decide
        ]
        self.seconds += time.perf_counter() - begun
        return verdicts

    async def release(self, seq_ids: Sequence[int]) -> None: ...


class Drafter:
    """Holds all that it is given, and always says the same."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> list[Proposal]:
        begun = time.perf_counter()
        proposals = [_proposal(step) for step in steps]
        self.seconds += time.perf_counter() - begun
        return proposals

    async def release(self, seq_ids: Sequence[int]) -> None: ...


def _proposal(step: DraftStep) -> Proposal:
    stop = step.start + len(step.tokens)
    return Proposal(step.seq_id, stop, (3,) * step.gamma, None, stop + max(step.gamma - 1, 0), True)


@dataclass(frozen=True, slots=True)
class Work:
    running: int
    micros: float  # a committed token
    per_round: float  # milliseconds


def measure(running: int, *, gamma: int | None, rounds: int) -> Work:
    """Rounds of decoding alone, all sequences running; the journal included, as an engine has it."""
    target, drafter, journal, committed = Target(), Drafter(), Journal(Registry()), [0]

    def emit(chunks: Sequence[Chunk]) -> None:
        committed[0] += sum(len(chunk.tokens) for chunk in chunks)

    info = ModelInfo(
        vocab_size=100, max_context=2**20, end_ids=frozenset(), page_size=16, num_pages=2**22
    )
    coordinator = Coordinator(
        target,
        drafter,
        info=info,
        emit=emit,
        gamma=gamma,
        report=journal.record,
        max_running=running,
        max_queued=running,
        max_batch_tokens=running * 2 * PROMPT,
    )
    for i in range(running):
        coordinator.submit(Request((i % 90,) * PROMPT, 10**5, Warp(temperature=0.0), seed=i))

    async def go() -> list[tuple[float, int]]:
        for _ in range(8):
            await coordinator.round()
        found = []
        for _ in range(rounds):
            before, busy, begun = (
                committed[0],
                target.seconds + drafter.seconds,
                time.perf_counter(),
            )
            await coordinator.round()
            spent = time.perf_counter() - begun - (target.seconds + drafter.seconds - busy)
            found.append((spent, committed[0] - before))
        return found

    found = asyncio.run(go())
    return Work(
        running,
        median(spent / tokens for spent, tokens in found) * 1e6,
        median(spent for spent, _ in found) * 1e3,
    )


def report() -> list[str]:
    lines = [
        "| running | us a token, gamma 5 | ms a round | us a token, gamma auto | ms a round |",
        "|---|---|---|---|---|",
    ]
    for running in SIZES:
        fixed, auto = (
            measure(running, gamma=gamma, rounds=max(12, 20_000 // running))
            for gamma in (GAMMA, None)
        )
        lines.append(
            f"| {running} | {fixed.micros:.1f} | {fixed.per_round:.2f} | {auto.micros:.1f} | {auto.per_round:.2f} |"
        )
    return lines


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("\n".join(report()))


if __name__ == "__main__":
    main()
