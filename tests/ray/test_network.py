"""A server whose links break must lose no text."""

from __future__ import annotations

import asyncio

from lab.chaos.faults import Fault
from lab.chaos.requests import KIND_NAMES
from lab.chaos.run import ChaosRun
from specserve.tools.bench.address import ServerAddress
from tests.chaos import network
from tests.chaos.relays import PAIRS


def test_broken_links_of_a_server_lose_nothing() -> None:
    faults = [
        (PAIRS[0], "half-open"),
        (PAIRS[1], "partition"),
        (PAIRS[2], "cut"),
        (PAIRS[0], "cut"),
    ]
    with network.relayed_server() as (url, hub):

        async def inject(rng: object) -> Fault | None:
            pair, kind = faults.pop()
            loop = asyncio.get_running_loop()
            at = loop.time()
            assert await hub.inject(pair, kind, 0.2), f"no link of {pair} goes through a relay"
            return Fault(at, pair, kind, 0, until=loop.time())

        chaos = ChaosRun(ServerAddress.from_url(url), "demo", len(KIND_NAMES), 64)
        outcome = asyncio.run(chaos.run(inject, num_faults=len(faults), seed=1, say=print))
    assert not faults
    assert outcome.counts.complete >= len(KIND_NAMES)
    assert outcome.counts.num_failed == 0, outcome.first_failure
