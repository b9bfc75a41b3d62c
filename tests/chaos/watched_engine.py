"""An engine that says which sequences it runs for which gateway, and what it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.cluster.deployments import Engine
from specserve.cluster.engine.reply_streams import Reply, ReplyStreams
from specserve.cluster.placement import Bundle
from specserve.cluster.transport import chunk_stream
from specserve.cluster.transport.endpoint import Address, LinkTiming, Socket, connect
from specserve.config.tree import Config
from tests.chaos.relays import relayed

LOOK_EVERY_S = 0.005


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Sequences and resources that an engine held at one moment."""

    running: dict[int, dict[int, int]]  # by port of the gateway: sequences, and their seeds
    ran_until: dict[int, float]  # by port; of this machine's monotonic clock
    pages: int  # of the target, as of its last round
    replies: int
    senders: int
    files: int

    @property
    def sequences(self) -> set[int]:
        return {seq_id for seeds in self.running.values() for seq_id in seeds}


class NotedReplies(ReplyStreams):
    """Replies that note the gateway's port of each sequence until it is requested no more."""

    def __init__(self) -> None:
        super().__init__()
        self.ports: dict[int, int] = {}

    def open(self, seq_id: int, number: int, address: Address) -> Reply:
        self.ports[seq_id] = address.port
        return super().open(seq_id, number, address)

    def move(self) -> None:
        """Count all gateways as gone, so that their next requests open new connections."""
        for address in list(self._senders):
            self._on_gone(address)


class WatchedEngine(Engine):
    """Engine whose running sequences can be looked at, and that can use relays to its gateways."""

    # Serve awaits the constructor; type checkers do not know that.
    async def __init__(  # type: ignore[misc]
        self, config: Config, bundles: Sequence[Bundle], board: Any
    ) -> None:
        await super().__init__(config, bundles, board)
        self._noted = self._replies = NotedReplies()
        self._ran_until: dict[int, float] = {}
        self._look = asyncio.create_task(self._look_forever())

    async def _look_forever(self) -> None:
        """Note until when each gateway has sequences: a caller would learn it later."""
        while True:
            now = time.monotonic()
            self._ran_until |= dict.fromkeys(self._running(), now)
            await asyncio.sleep(LOOK_EVERY_S)

    def _running(self) -> dict[int, dict[int, int]]:
        live, ports = self._coordinator._live, self._noted.ports
        for seq_id in ports.keys() - live.keys():
            del ports[seq_id]
        running: dict[int, dict[int, int]] = {}
        for seq_id, port in ports.items():
            running.setdefault(port, {})[seq_id] = live[seq_id].policy.seed
        return running

    async def snapshot(self) -> Snapshot:
        return Snapshot(
            self._running(),
            self._ran_until,
            self._group.target.pages_used,
            len(self._noted._replies),
            len(self._noted._senders),
            len(list(Path("/proc/self/fd").iterdir())),
        )

    async def use_relays(self, hub: int) -> None:
        """Reach gateways through relays of the hub at this port from now on."""

        def connect_by_relay(socket: Socket, address: Address, timing: LinkTiming) -> None:
            connect(socket, relayed(hub, address, pair=str(address.port)), timing)

        vars(chunk_stream)["connect"] = connect_by_relay
        self._noted.move()
