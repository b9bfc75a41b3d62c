"""The coordinator's own work, with workers that cost nothing. Knows no models and no network.

`python -m lab.bench.coordinator_overhead` prints microseconds per committed token.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from specserve.config.sections import LimitsConfig, SpeculationConfig
from specserve.engine import Coordinator
from specserve.engine.trace import TraceJournal
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

GAMMA = 5
PROMPT = 200
SIZES = (64, 256, 1024, 4096)


class InstantTarget:
    """A target that accepts 0 to 5 draft tokens in turn.

    It counts its own seconds, which are subtracted from the round.
    """

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    async def verify(self, steps: Sequence[VerifyStep]) -> list[Verdict]:
        start = time.perf_counter()
        self.calls += 1
        verdicts = [
            Verdict(step.seq_id, (step.seq_id + self.calls) % (len(step.drafts) + 1), 7, None)
            for step in steps
            if step.needs_verdict
        ]
        self.seconds += time.perf_counter() - start
        return verdicts

    async def release(self, seq_ids: Sequence[int]) -> None: ...


class InstantDrafter:
    """A drafter that caches all tokens and always proposes the same ones."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> list[Proposal]:
        start = time.perf_counter()
        proposals = [_proposal(step) for step in steps]
        self.seconds += time.perf_counter() - start
        return proposals

    async def release(self, seq_ids: Sequence[int]) -> None: ...


def _proposal(step: DraftStep) -> Proposal:
    stop = step.stop
    return Proposal(step.seq_id, stop, (3,) * step.gamma, None, stop + max(step.gamma - 1, 0), True)


@dataclass(frozen=True, slots=True)
class RoundOverhead:
    """Time of the coordinator itself, with `running` sequences."""

    running: int
    us_per_token: float  # committed
    ms_per_round: float


def measure(running: int, *, gamma: int | None, rounds: int) -> RoundOverhead:
    """Measure decoding rounds in which all sequences run, with the journal of a real engine."""
    target, drafter, journal, committed = (
        InstantTarget(),
        InstantDrafter(),
        TraceJournal(Registry()),
        [0],
    )

    def emit(chunks: Sequence[Chunk]) -> None:
        committed[0] += sum(len(chunk.tokens) for chunk in chunks)

    info = ModelInfo(
        vocab_size=100, max_context=2**20, end_ids=frozenset(), page_size=16, num_pages=2**22
    )
    coordinator = Coordinator(
        target,
        drafter,
        info=info,
        limits=LimitsConfig(
            max_running=running, max_queued=running, max_batch_tokens=running * 2 * PROMPT
        ),
        speculation=SpeculationConfig(gamma=gamma),
        emit=emit,
        report=journal.record_round,
    )
    for i in range(running):
        coordinator.submit(Request((i % 90,) * PROMPT, 10**5, Warp(temperature=0.0), seed=i))

    async def run_rounds() -> list[tuple[float, int]]:
        for _ in range(8):
            await coordinator.round()
        measured = []
        for _ in range(rounds):
            committed_before, busy_before, start = (
                committed[0],
                target.seconds + drafter.seconds,
                time.perf_counter(),
            )
            await coordinator.round()
            busy = target.seconds + drafter.seconds - busy_before
            spent = time.perf_counter() - start - busy
            measured.append((spent, committed[0] - committed_before))
        return measured

    measured = asyncio.run(run_rounds())
    return RoundOverhead(
        running,
        median(spent / tokens for spent, tokens in measured) * 1e6,
        median(spent for spent, _ in measured) * 1e3,
    )


def report() -> list[str]:
    """Return the lines of a table."""
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
            f"| {running} | {fixed.us_per_token:.1f} | {fixed.ms_per_round:.2f} "
            f"| {auto.us_per_token:.1f} | {auto.ms_per_round:.2f} |"
        )
    return lines


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("\n".join(report()))


if __name__ == "__main__":
    main()
