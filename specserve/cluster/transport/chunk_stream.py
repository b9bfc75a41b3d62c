"""Stream chunks of output from the engines to a gateway.

The gateway has one `ChunkReceiver`; each engine opens a `ChunkSender` to the receiver's address,
with a key of its own that the receiver must have been given. Knows neither Ray nor requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

import zmq

from specserve.cluster.transport.connection_watch import ConnectionWatch
from specserve.cluster.transport.curve_auth import CurveAuthenticator
from specserve.cluster.transport.endpoint import (
    Address,
    KeyPair,
    LinkTiming,
    connect,
    listen_on,
    open_socket,
)
from specserve.cluster.transport.link import try_unpack, unregister
from specserve.errors import VersionMismatch
from specserve.types import Chunk
from specserve.wire.messages import Chunks, pack

log = logging.getLogger(__name__)

SENDER_HIGH_WATER_MARK = 100_000
"""Messages queued for a gateway, beyond which further ones are dropped."""
SENDER_LINGER_S = 1.0
SENDER_TIMING = LinkTiming(
    heartbeat_interval=0.2, heartbeat_timeout=0.8, connect=0.25, reconnect=0.05
)
"""Times of an engine's connection to a gateway, by which a silent gateway is noticed after 1 s.

That is a third of a worker's. A false alarm costs a request one prefill, since the gateway resumes
it; and a gateway resumes a request itself after 1 s without its next chunk.
"""


@dataclass(frozen=True, slots=True)
class ReceivedChunks:
    """Chunks of one message, and the public key of the engine that sent them."""

    engine: bytes
    chunks: tuple[Chunk, ...]


class ChunkReceiver:
    """Gateway end of the stream, which takes the chunks of the engines whose keys it admits.

    Engines learn its `address` through Ray. It works in the event loop of the first call of
    `receive`.
    """

    def __init__(self, host: str, *, timing: LinkTiming | None = None) -> None:
        timing, keys = timing or LinkTiming(), KeyPair.generate()
        # Called when an unknown key arrives: if `admit` names it soon, its connection goes on.
        self.on_unknown_engine: Callable[[], None] = lambda: None
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.PULL, keys, timing)
        self._auth = CurveAuthenticator(
            self._context,
            self._socket,
            (),
            timing=timing,
            on_unknown=lambda: self.on_unknown_engine(),
        )
        self.address = listen_on(self._socket, host, keys)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._received: asyncio.Queue[ReceivedChunks] = asyncio.Queue()

    def admit(self, engine_keys: Collection[bytes]) -> None:
        """Take chunks of the engines with these public keys and of no others from now on."""
        self._auth.admit(engine_keys)

    async def receive(self) -> ReceivedChunks:
        """Wait for the next message and return it. Messages of one engine arrive in order."""
        self._listen()
        return await self._received.get()

    def close(self) -> None:
        for socket in (self._socket, *self._auth.sockets):
            unregister(self._loop, socket)
        self._auth.close()
        self._socket.close()
        self._context.term()

    def _listen(self) -> None:
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._on_readable)
        for socket in self._auth.sockets:
            self._loop.add_reader(socket.FD, self._auth.process_events)

    def _on_readable(self) -> None:
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            engine = str(frames[0].get("User-Id")).encode()
            if not self._auth.has_admitted(engine):  # its connection is older than that
                self.on_unknown_engine()
                continue
            try:
                message = try_unpack([frame.bytes for frame in frames])
            except VersionMismatch as error:
                log.error("refused the chunks of an engine: %s", error)
                continue
            if isinstance(message, Chunks):
                self._received.put_nowait(ReceivedChunks(engine, message.chunks))


class ChunkSender:
    """Engine end of the stream, which never blocks.

    Chunks are queued while there is no connection, up to SENDER_HIGH_WATER_MARK, and then dropped.
    What is on its way when a connection breaks is lost. The gateway notices either by the next
    chunk's position, or by the end of the request's call. `on_gone` is called in the running event
    loop when the gateway's connection is lost and does not come back.
    """

    def __init__(
        self,
        address: Address,
        keys: KeyPair,
        *,
        timing: LinkTiming | None = None,
        on_gone: Callable[[], None] | None = None,
    ) -> None:
        """Connect to a gateway with the engine's keys, unless it runs another release."""
        address.require_same_version()
        timing = timing or SENDER_TIMING
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.PUSH, keys, timing)
        self._socket.set(zmq.SNDHWM, SENDER_HIGH_WATER_MARK)
        self._watch = on_gone and ConnectionWatch(self._socket, on_gone)
        connect(self._socket, address, timing)
        self._gateway = f"{address.host}:{address.port}"
        self._is_full = False

    def __str__(self) -> str:
        return f"the gateway at {self._gateway}"

    def send(self, chunks: Chunks) -> None:
        """Queue the chunks for sending; log once when the queue is full and they are dropped."""
        try:
            self._socket.send_multipart(pack(chunks), zmq.NOBLOCK)
            self._is_full = False
        except zmq.Again:
            if not self._is_full:  # one line, not one per round
                log.warning("%s takes no messages; those for it are dropped", self)
            self._is_full = True

    def close(self) -> None:
        """Close without blocking; the last messages get a second to be sent.

        A thread waits for them, since the caller has other gateways to serve.
        """
        if self._watch is not None:
            self._watch.close()
        self._socket.close(linger=int(SENDER_LINGER_S * 1e3))
        threading.Thread(target=self._context.term, name="chunk-sender-close").start()
