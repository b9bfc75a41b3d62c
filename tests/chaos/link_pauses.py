"""Pauses of a link between coordinator and worker after faults of the network between them.

`python -m tests.chaos.link_pauses` puts a relay between the two ends and prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import date
from statistics import median

from specserve.cluster.transport.endpoint import KeyPair
from specserve.cluster.transport.link import Client, Server
from specserve.wire.messages import Proposals, Propose, Stop
from tests.support.relay import HOST, Relay

DEADLINE_S = 60.0
Fault = Callable[[Relay], Awaitable[None]]


async def _cut(relay: Relay) -> None:
    relay.cut()


async def _reset(relay: Relay) -> None:
    relay.cut(reset=True)


def _during(begin: Callable[[Relay], None], seconds: float) -> Fault:
    async def fault(relay: Relay) -> None:
        begin(relay)
        await asyncio.sleep(seconds)
        relay.heal()

    return fault


FAULTS: dict[str, tuple[Fault, float]] = {
    "cut by FIN": (_cut, 0.0),
    "cut by RST": (_reset, 0.0),
    "half-open for 1 s": (_during(Relay.half_open, 1.0), 1.0),
    "half-open for 8 s": (_during(Relay.half_open, 8.0), 8.0),
    "partition for 1 s": (_during(Relay.partition, 1.0), 1.0),
    "partition for 4 s": (_during(Relay.partition, 4.0), 4.0),
    "partition for 8 s": (_during(Relay.partition, 8.0), 8.0),
    "all lost for 1 s, then cut": (_during(Relay.swallow, 1.0), 1.0),
    "delay of 2 s to the worker for 4 s": (
        _during(lambda relay: relay.delay(2.0, "to_target"), 4.0),
        4.0,
    ),
    "delay of 2 s both ways for 4 s": (_during(lambda relay: relay.delay(2.0), 4.0), 4.0),
}
"""Faults, and how long each lasts."""


def serve(server: Server, computed: list[int]) -> None:
    while isinstance(message := server.receive(), Propose):
        computed.append(message.number)
        server.send(Proposals(message.number, (), 0.0, 0))
    server.close()


class MeasuredLink:
    """Link that makes one call after the other through a relay, and keeps their times."""

    def __init__(self) -> None:
        keys = KeyPair.generate()
        server = Server(KeyPair.generate(), HOST, keys.public)
        self.computed: list[int] = []
        self._thread = threading.Thread(target=serve, args=(server, self.computed))
        self._thread.start()
        self.relay = Relay.to(server.address)
        self._keys, self._address = keys, server.address
        self.client = Client(keys, self.relay.through(server.address), is_running=_always)
        self._number = 0

    async def pause(self, fault: Fault) -> float:
        """Return the longest time between two answers around a fault."""
        longest, last, left = 0.0, time.monotonic(), 20
        happening = asyncio.create_task(_after(0.05, fault, self.relay))
        while left:
            self._number += 1
            await self.client.call(Propose(self._number, 0.0, ()), DEADLINE_S)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            left -= happening.done()
            await asyncio.sleep(0.01)
        return longest

    def close(self) -> None:
        self.client.close()
        self.relay.close()
        last = Client(self._keys, self._address)
        last.post(Stop())
        self._thread.join()
        last.close()


async def _always() -> bool:
    return True


async def _after(seconds: float, fault: Fault, relay: Relay) -> None:
    await asyncio.sleep(seconds)
    await fault(relay)


async def measure(fault: Fault, times: int) -> list[float]:
    """Return the pauses of a number of faults; each round must have been computed once."""
    link = MeasuredLink()
    try:
        pauses = [await link.pause(fault) for _ in range(times)]
    finally:
        link.close()
    assert link.computed == list(range(1, len(link.computed) + 1)), "a round ran twice or never"
    return pauses


def report(*, times: int, longest_s: float) -> str:
    rows = ["| fault | N | pause p50 s | longest s | after the fault's end p50 s | longest s |"]
    rows.append("|---|---|---|---|---|---|")
    for name, (fault, lasts_s) in FAULTS.items():
        if lasts_s > longest_s:
            continue
        pauses = sorted(asyncio.run(measure(fault, times)))
        p50, longest = median(pauses), pauses[-1]
        rows.append(
            f"| {name} | {times} | {p50:.2f} | {longest:.2f} | {max(0, p50 - lasts_s):.2f} | "
            f"{max(0, longest - lasts_s):.2f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="each short fault once")
    args = parser.parse_args()
    table = report(times=1, longest_s=0.0) if args.quick else report(times=args.times, longest_s=60)
    print(f"{date.today()}, `python -m tests.chaos.link_pauses`\n\n{table}")


if __name__ == "__main__":
    main()
