"""Chunks on their way from engines to a gateway: one Inbox, and an Outlet in each engine that has its ticket. Knows neither Ray nor requests."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass

import zmq

from specserve.cluster.transport.curve_auth import Gate, arrived
from specserve.cluster.transport.link import (
    Address,
    Keys,
    connect,
    deaf,
    encrypted,
    listening,
    read,
)
from specserve.wire.messages import Chunks, pack

log = logging.getLogger(__name__)

OUTLET_MARK = 100_000  # messages that wait for a gateway before more are dropped
OUTLET_LINGER_S = 1.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """All that an engine needs to send to a gateway. Whoever holds it is admitted."""

    address: Address
    keys: Keys


class Inbox:
    """The gateway's end, in the event loop where it first receives: takes the chunks of whichever engine has its ticket."""

    def __init__(self, host: str) -> None:
        keys, guests = Keys.fresh(), Keys.fresh()
        self._context = zmq.Context()
        self._socket = encrypted(self._context, zmq.PULL, keys)
        self._gate = Gate(self._context, self._socket, guests.public)
        self.ticket = Ticket(listening(self._socket, host, keys), guests)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: asyncio.Queue[Chunks] = asyncio.Queue()

    async def receive(self) -> Chunks:
        """The next message; those of one engine come in the order in which they were sent."""
        self._listen()
        return await self._arrived.get()

    def close(self) -> None:
        for socket in (self._socket, *self._gate.sockets):
            deaf(self._loop, socket)
        self._gate.close()
        self._socket.close()
        self._context.term()

    def _listen(self) -> None:
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._hear)
        for socket in self._gate.sockets:
            self._loop.add_reader(socket.FD, self._gate.attend)

    def _hear(self) -> None:
        for frames in arrived(self._socket):
            message = read(frames)
            if isinstance(message, Chunks):
                self._arrived.put_nowait(message)


class Outlet:
    """The engine's end. Never blocks: when the gateway is gone, its chunks wait for a while and are then dropped."""

    def __init__(self, ticket: Ticket) -> None:
        self._context = zmq.Context()
        self._socket = encrypted(self._context, zmq.PUSH, ticket.keys)
        self._socket.set(zmq.SNDHWM, OUTLET_MARK)
        connect(self._socket, ticket.address)
        self._gateway = f"{ticket.address.host}:{ticket.address.port}"
        self._is_full = False

    def send(self, chunks: Chunks) -> None:
        try:
            self._socket.send_multipart(pack(chunks), zmq.NOBLOCK)
            self._is_full = False
        except zmq.Again:
            if not self._is_full:  # one line, not one a round
                log.warning(
                    "the gateway at %s takes no messages; those for it are dropped", self._gateway
                )
            self._is_full = True

    def close(self) -> None:
        """The last messages get a second to leave; a thread waits for that, since whoever closes has other gateways to serve."""
        self._socket.close(linger=int(OUTLET_LINGER_S * 1e3))
        threading.Thread(target=self._context.term, name="outlet-close").start()
