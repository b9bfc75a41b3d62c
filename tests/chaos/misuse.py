"""`python -m tests.chaos.misuse`: clients that misuse a server, beside sixteen that behave.

Each part sends requests of one misusing kind for a while, and prints what the others saw of it:
their longest gap between tokens, and how many of them failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from lab.chaos.report import percentile_of
from specserve.tools.bench.address import ServerAddress
from specserve.tools.bench.streams import Stream
from tests.chaos.overload import KEYS, RequestLog, counter, for_a_while, processes
from tests.support.ray_server import served

WELL_BEHAVED, TOKENS = 16, 200
RULES = 1700
"""Rules of a grammar in which each begins with the next."""
BOMB = "\n".join(
    [
        "start: a0",
        *(f'a{i}: "x" | a{i + 1} | a{i + 1} a{i}' for i in range(RULES)),
        f'a{RULES}: "x"',
    ]
)
NESTED = "\n".join(["start: a", 'a: "x" | a a | a a a | "(" a ")"'])
"""A grammar in which every text can be read in very many ways."""


@dataclass(slots=True)
class Misuse:
    """Clients that misuse a server, and what they were answered."""

    address: ServerAddress
    answers: Counter[str] = field(default_factory=Counter)

    async def post(self, body: Mapping[str, object], *, seconds: float = 30.0) -> None:
        """Send a request that is not streamed."""
        payload = json.dumps({"model": "demo", "prompt": "x", **body}).encode()
        async with self._connected() as (reader, writer):
            writer.write(self._head(len(payload)) + payload)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    line = await reader.readline()
                    self.answers[line.decode(errors="replace").strip() or "closed"] += 1
                    while await reader.read(2**16):
                        pass

    async def read_nothing(self, seconds: float) -> None:
        body = {"n": 64, "max_tokens": 400, "logprobs": 20, "stream": True, "ignore_eos": True}
        payload = json.dumps({"model": "demo", "prompt": "x", **body}).encode()
        async with self._connected() as (reader, writer):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(self._head(len(payload)) + payload)
            await asyncio.sleep(seconds)
            self.answers["read nothing"] += 1

    async def send_slowly(self, seconds: float) -> None:
        async with self._connected() as (_, writer):
            writer.write(self._head(10_000))
            for _ in range(int(seconds)):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(1.0)
            self.answers["sent slowly"] += 1

    async def stay(self, seconds: float) -> None:
        async with self._connected():
            await asyncio.sleep(seconds)
            self.answers["stayed idle"] += 1

    def _head(self, length: int) -> bytes:
        return (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{self.address.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
            "Connection: close\r\n\r\n"
        ).encode()

    def _connected(self) -> _Connection:
        return _Connection(self)


class _Connection:
    """A connection whose failures are counted, and end nothing."""

    def __init__(self, misuse: Misuse) -> None:
        self._misuse = misuse

    async def __aenter__(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self._misuse.address
        self._reader, self._writer = await asyncio.open_connection(address.host, address.port)
        return self._reader, self._writer

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._writer.transport.abort()
        if isinstance(error, OSError | EOFError):
            self._misuse.answers[type(error).__name__] += 1
            return True
        return False


async def no_misuse(misuse: Misuse, seconds: float) -> None:
    await asyncio.sleep(seconds)


async def mask_bomb(misuse: Misuse, seconds: float) -> None:
    body = {"guided": {"grammar": BOMB}, "n": 64, "max_tokens": 200, "temperature": 1.0}
    await for_a_while(seconds, lambda: misuse.post(body), 2)


async def dear_masks(misuse: Misuse, seconds: float) -> None:
    body = {"guided": {"grammar": NESTED}, "n": 64, "max_tokens": 200, "temperature": 1.0}
    await for_a_while(seconds, lambda: misuse.post(body), 1)


async def slow_readers(misuse: Misuse, seconds: float) -> None:
    await asyncio.gather(*(misuse.read_nothing(seconds) for _ in range(2)))


async def slow_bodies(misuse: Misuse, seconds: float) -> None:
    await asyncio.gather(*(misuse.send_slowly(seconds) for _ in range(256)))


async def idle_connections(misuse: Misuse, seconds: float) -> None:
    await asyncio.gather(*(misuse.stay(seconds) for _ in range(4096)), return_exceptions=True)


async def logprobs_flood(misuse: Misuse, seconds: float) -> None:
    body = {"n": 64, "max_tokens": 250, "logprobs": 20, "ignore_eos": True}
    await for_a_while(seconds, lambda: misuse.post(body), 1)


PARTS: Mapping[str, Callable[[Misuse, float], Awaitable[None]]] = {
    "none": no_misuse,
    "mask bomb": mask_bomb,
    "dear masks": dear_masks,
    "slow readers": slow_readers,
    "slow bodies": slow_bodies,
    "idle connections": idle_connections,
    "logprobs": logprobs_flood,
}


async def measure(address: ServerAddress, name: str, seconds: float) -> str:
    """Return a line of the table: what the well-behaved saw beside one kind of misuse."""
    log, misuse, next_number = RequestLog(), Misuse(address), counter()
    before = {process.pid for process in processes().values()}
    await asyncio.gather(
        PARTS[name](misuse, seconds),
        for_a_while(
            seconds,
            lambda: log.send(
                address, next_number(), max_tokens=random.randint(TOKENS // 2, TOKENS)
            ),
            WELL_BEHAVED,
        ),
    )
    gaps = [later - sooner for stream in log.streams for sooner, later in pairwise(stream.times)]
    failed = len(log.streams) - len(log.complete)
    restarted = len({process.pid for process in processes().values()} - before)
    answers = ", ".join(f"{count} x {answer}" for answer, count in misuse.answers.most_common(3))
    return (
        f"| {name} | {len(log.streams)} | {failed} | {max(gaps, default=0.0):.2f} s "
        f"| {percentile_of(gaps, 99):.3f} s | {first_token(log.complete):.2f} s | {restarted} "
        f"| {answers} |"
    )


def first_token(streams: list[Stream]) -> float:
    """Return the p99 of the seconds to the first token."""
    return percentile_of([stream.times[0] - stream.sent for stream in streams], 99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true", help="two seconds of two kinds")
    args = parser.parse_args()
    names, seconds = (("none", "mask bomb"), 2.0) if args.quick else (args.only, args.seconds)
    print(
        "| beside | requests | failed | longest gap | gaps p99 | first token p99 | restarted "
        "| answers to misuse |\n|---|---|---|---|---|---|---|---|"
    )
    for name in names:  # a server each, so that what one leaves behind disturbs no other
        with served({**KEYS, "limits.max_running": 256}) as (url, _):
            line = asyncio.run(measure(ServerAddress.from_url(url), name, seconds))
            print(line, flush=True)


if __name__ == "__main__":
    main()
