"""The link to a worker: round trips between two processes, and times of packing and unpacking.

`python -m lab.bench.link`; knows no models.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles

import numpy as np
import zmq

from specserve.cluster.transport.endpoint import KeyPair
from specserve.cluster.transport.link import Client, Server
from specserve.host import usable_cores
from specserve.types import (
    Chunk,
    DraftStep,
    Origin,
    Policy,
    Proposal,
    SparseDistribution,
    Verdict,
    VerifyStep,
    Warp,
)
from specserve.wire.messages import (
    Chunks,
    Message,
    Proposals,
    Propose,
    Stop,
    Verdicts,
    Verify,
    pack,
    unpack,
)

HOST = "127.0.0.1"
WARM_UP = 200
NUM_DRAFTS = 5
SUPPORT = 64


@dataclass(frozen=True, slots=True)
class LatencyQuantiles:
    """Median and 99th percentile of measured times, in milliseconds."""

    p50: float
    p99: float

    @classmethod
    def from_seconds(cls, seconds: Sequence[float]) -> LatencyQuantiles:
        percentiles = quantiles(seconds, n=100)
        return cls(percentiles[49] * 1e3, percentiles[98] * 1e3)

    def __str__(self) -> str:
        return f"{self.p50:.3f} | {self.p99:.3f}"


def proposals(num_sequences: int) -> Proposals:
    rng = np.random.default_rng(0)
    rows = [
        SparseDistribution(
            rng.integers(0, 2**17, (NUM_DRAFTS, SUPPORT)),
            rng.random((NUM_DRAFTS, SUPPORT), dtype=np.float32),
        )
        for _ in range(num_sequences)
    ]
    tokens = tuple(range(NUM_DRAFTS))
    return Proposals(
        0, tuple(Proposal(i, 400, tokens, q, 404) for i, q in enumerate(rows)), 0.001, 100
    )


def verify(num_sequences: int) -> Verify:
    steps = (
        VerifyStep(
            proposal.seq_id, 399, (7,), proposal.tokens, proposal.q, _policy(proposal.seq_id)
        )
        for proposal in proposals(num_sequences).proposals
    )
    return Verify(0, tuple(steps))


def propose(num_sequences: int) -> Propose:
    return Propose(
        0,
        math.inf,
        tuple(DraftStep(i, 399, (7, 8), NUM_DRAFTS, _policy(i)) for i in range(num_sequences)),
    )


def verdicts(num_sequences: int) -> Verdicts:
    return Verdicts(0, tuple(Verdict(i, 3, 7, None) for i in range(num_sequences)), 0.001, 100)


def chunks(num_sequences: int) -> Chunks:
    origins = (Origin.ACCEPTED,) * 3 + (Origin.BONUS,)
    return Chunks(tuple(Chunk(i, 100, (1, 2, 3, 4), origins) for i in range(num_sequences)))


def messages_of_size(num_bytes: int) -> tuple[Verify, Proposals]:
    """Return a request and an answer of about that many bytes each.

    Nearly all of them are rows of q, as in a round.
    """
    num_rows = max(1, num_bytes // (8 * SUPPORT))
    q = SparseDistribution(
        np.ones((num_rows, SUPPORT), dtype=np.int64), np.ones((num_rows, SUPPORT), dtype=np.float32)
    )
    tokens = tuple(range(num_rows))
    request = Verify(0, (VerifyStep(0, 399, (7,), tokens, q, _policy(0)),))
    return request, Proposals(0, (Proposal(0, 400, tokens, q, 404),), 0.001, 100)


def packed_size(message: Message) -> int:
    return sum(len(frame) for frame in pack(message))


def serve_calls(connection: Connection, client_key: bytes, num_bytes: int) -> None:
    """Answer all calls, in the worker's process, until the client sends Stop."""
    server = Server(KeyPair.generate(), HOST, client_key)
    connection.send(server.address)
    _, answer = messages_of_size(num_bytes)
    while isinstance(message := server.receive(), Verify):
        server.send(Proposals(message.number, answer.proposals, answer.seconds, answer.pages_used))
    server.close()


async def time_calls(client: Client, num_bytes: int, times: int) -> list[float]:
    """Return the seconds of each round trip, and send Stop to the worker."""
    request, _ = messages_of_size(num_bytes)
    seconds = []
    for number in range(WARM_UP + times):
        message = Verify(number, request.steps)
        start = time.perf_counter()
        await client.call(message, 10)
        seconds.append(time.perf_counter() - start)
    client.post(Stop())
    return seconds[WARM_UP:]


def measure_round_trips(
    num_bytes: int, *, times: int, loop: Callable[[], asyncio.AbstractEventLoop]
) -> LatencyQuantiles:
    """Measure round trips, with packing and unpacking on both sides."""
    keys = KeyPair.generate()
    pipe, worker_pipe = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(
        target=serve_calls, args=(worker_pipe, keys.public, num_bytes)
    )
    worker.start()
    with asyncio.Runner(loop_factory=loop) as runner:
        client = Client(keys, pipe.recv())
        try:
            latency = LatencyQuantiles.from_seconds(
                runner.run(time_calls(client, num_bytes, times))
            )
            worker.join(10)
        finally:
            client.close()
            worker.kill()
    return latency


def measure_packing(message: Message, *, times: int) -> tuple[LatencyQuantiles, LatencyQuantiles]:
    """Measure packing and unpacking of a message."""
    packed = [bytes(frame) for frame in pack(message)]
    return LatencyQuantiles.from_seconds(
        call_times(lambda: pack(message), times=times)
    ), LatencyQuantiles.from_seconds(call_times(lambda: unpack(packed), times=times))


def call_times(function: Callable[[], object], *, times: int) -> list[float]:
    """Return the seconds of each call, after a warm-up."""
    seconds = []
    for _ in range(WARM_UP + times):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


def loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return asyncio's event loop, and uvloop's where it is installed; Ray Serve prefers that."""
    try:
        import uvloop
    except ImportError:
        return {"asyncio": asyncio.new_event_loop}
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def report(*, times: int) -> str:
    """Measure everything and return the tables."""
    rows = [
        "| round trip, encrypted, both ways alike | loop | p50 ms | p99 ms |",
        "|---|---|---|---|",
    ]
    for num_bytes in (2_000, 100_000):
        for name, loop in loops().items():
            latency = measure_round_trips(num_bytes, times=times, loop=loop)
            rows.append(f"| {num_bytes // 1000} kB | {name} | {latency} |")
    rows += [
        "",
        "| message | bytes | pack p50 ms | p99 ms | unpack p50 ms | p99 ms |",
        "|---|---|---|---|---|---|",
    ]
    for make_message in (propose, proposals, verify, verdicts, chunks):
        for num_sequences in (1, 32):
            message = make_message(num_sequences)
            packed, unpacked = measure_packing(message, times=times)
            rows.append(
                f"| {type(message).__name__}, {num_sequences} sequences | {packed_size(message):,} "
                f"| {packed} | {unpacked} |"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="write the report here, too")
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    args = parser.parse_args()
    if args.quick:
        args.times = 20
    logging.basicConfig(level=logging.WARNING)
    table = report(times=args.times)
    machine = (
        f"{date.today()}, {platform.machine()}, on {usable_cores()} of {os.cpu_count()} cores, "
        f"ZeroMQ {zmq.zmq_version()}"
    )
    text = (
        f"{machine}; {args.times} times each, {NUM_DRAFTS} drafts a sequence on a support of "
        f"{SUPPORT}, two processes on one host.\n\n{table}\n"
    )
    print(text)
    if args.out:
        args.out.write_text(f"# The link to a worker\n\n`python -m lab.bench.link`\n\n{text}")


def _policy(seed: int) -> Policy:
    return Policy(Warp(), "block", seed, 100)


if __name__ == "__main__":
    main()
