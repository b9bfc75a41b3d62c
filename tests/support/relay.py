"""A TCP relay that does to a link what networks do: delay, lose, cut, half-open, partition."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from specserve.cluster.transport.endpoint import Address

Direction = Literal["to_target", "to_client"]
DIRECTIONS: tuple[Direction, Direction] = ("to_target", "to_client")
HOST = "127.0.0.1"
READ_SIZE = 65536
BACKLOG = 128
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with which a close sends RST instead of FIN."""


@dataclass(slots=True, eq=False)
class _Connection:
    """Two sockets with a pump in each direction, and whether each direction flows."""

    client: socket.socket
    target: socket.socket
    flows: dict[Direction, asyncio.Event]
    has_gap: bool = False  # bytes were swallowed
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def close(self, *, reset: bool) -> None:
        for task in self.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for end in (self.client, self.target):
            if reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end.close()


class Relay:
    """Relay from a free port of this host to a target, in a thread with an event loop of its own.

    Every fault but `cut` lasts until `heal`. A fault without directions is one in both.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._listener = socket.create_server((HOST, 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.num_accepted = 0
        self.num_swallowed = 0  # bytes taken from a sender and never delivered
        self._delays: dict[Direction, float] = dict.fromkeys(DIRECTIONS, 0.0)
        self._swallows: set[Direction] = set()
        self._connections: set[_Connection] = set()
        self._forwards_new = True
        self._filler: socket.socket | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="relay")
        self._accepting = self._loop.create_task(self._accept())
        self._thread.start()

    @classmethod
    def to(cls, address: Address) -> Relay:
        return cls(address.host, address.port)

    def through(self, address: Address) -> Address:
        """Return the address with the relay's port instead of its own, never the abstract socket.

        The public key stays: the relay sees encrypted bytes only.
        """
        return through(address, self.port)

    def delay(self, seconds: float, *directions: Direction) -> None:
        """Deliver all that comes from now on that much later; 0 ends the delay alone."""
        self._call(lambda: self._delays.update(dict.fromkeys(directions or DIRECTIONS, seconds)))

    def swallow(self, *directions: Direction) -> None:
        """Take all that is sent, and deliver none of it."""
        self._call(lambda: self._swallows.update(directions or DIRECTIONS))

    def stall(self, *directions: Direction) -> None:
        """Read nothing more of the present connections, which stay open. New ones work."""
        self._call(lambda: self._silence(directions or DIRECTIONS))

    def half_open(self) -> None:
        """Silence the present connections, and accept new ones without forwarding anything."""

        def half_open() -> None:
            self._silence(DIRECTIONS)
            self._forwards_new = False

        self._call(half_open)

    def partition(self) -> None:
        """Silence the present connections, and answer no attempt to connect."""
        self._call(self._partition)

    def heal(self) -> None:
        """End all faults. What was held back is delivered, as a retransmission would do.

        A connection from which bytes were swallowed is cut: TCP delivers nothing after a gap.
        """
        self._call(self._heal)

    def cut(self, *, reset: bool = False) -> None:
        """Close the present connections, by RST or by FIN, with all that is on its way in them."""
        self._call(lambda: self._close(list(self._connections), reset=reset))

    def close(self) -> None:
        """Cut everything and end the thread."""
        self.heal()
        self.cut()
        self._call(self._accepting.cancel)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(asyncio.sleep(0))  # what was cancelled ends
        self._loop.close()
        self._listener.close()

    def _call(self, function: Callable[[], object]) -> None:
        """Call a function in the relay's thread and wait until it has returned."""

        async def call() -> None:
            function()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    async def _accept(self) -> None:
        while True:
            client, name = await self._loop.sock_accept(self._listener)
            if self._filler is not None and self._filler.getsockname() == name:
                client.close()
                self._filler.close()
                self._filler = None
                continue
            self.num_accepted += 1
            await self._connect(client)

    async def _connect(self, client: socket.socket) -> None:
        """Connect to the target and start the pumps, unless new connections are left half-open."""
        family = socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET
        target = socket.socket(family, socket.SOCK_STREAM)
        for end in (client, target):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        flows = {direction: asyncio.Event() for direction in DIRECTIONS}
        connection = _Connection(client, target, flows)
        self._connections.add(connection)
        if not self._forwards_new:
            return
        try:
            await self._loop.sock_connect(target, self._target)
        except OSError:
            self._close([connection])
            return
        for direction in DIRECTIONS:
            flows[direction].set()
            pump = self._pump(connection, direction)
            connection.tasks.append(self._loop.create_task(pump))

    async def _pump(self, connection: _Connection, direction: Direction) -> None:
        """Read one direction of a connection until its source ends."""
        source = connection.client if direction == "to_target" else connection.target
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        writing = self._loop.create_task(self._write(connection, direction, held))
        connection.tasks.append(writing)
        while True:
            try:
                data = await self._loop.sock_recv(source, READ_SIZE)
            except OSError:
                data = b""
            await connection.flows[direction].wait()
            if data and direction in self._swallows:
                self.num_swallowed += len(data)
                connection.has_gap = True
            else:
                held.put_nowait((self._loop.time() + self._delays[direction], data))
            if not data:
                return

    async def _write(
        self,
        connection: _Connection,
        direction: Direction,
        held: asyncio.Queue[tuple[float, bytes]],
    ) -> None:
        """Write what was read once it is due; close the connection at the end of the source."""
        sink = connection.target if direction == "to_target" else connection.client
        while True:
            due, data = await held.get()
            await asyncio.sleep(due - self._loop.time())
            await connection.flows[direction].wait()
            try:
                if not data:
                    break
                await self._loop.sock_sendall(sink, data)
            except OSError:
                break
        self._close([connection])

    def _close(self, connections: Iterable[_Connection], *, reset: bool = False) -> None:
        for connection in connections:
            if connection in self._connections:
                self._connections.remove(connection)
                connection.close(reset=reset)

    def _silence(self, directions: tuple[Direction, ...]) -> None:
        for connection in self._connections:
            for direction in directions:
                connection.flows[direction].clear()

    def _partition(self) -> None:
        """Let a connection that is never accepted fill the backlog; Linux then ignores others."""
        self._silence(DIRECTIONS)
        if self._filler is not None:
            return
        self._accepting.cancel()
        self._listener.listen(0)
        self._filler = socket.socket()
        self._filler.setblocking(False)
        self._filler.connect_ex((HOST, self.port))

    def _heal(self) -> None:
        self._delays, self._forwards_new = dict.fromkeys(DIRECTIONS, 0.0), True
        self._swallows.clear()
        self._close([each for each in self._connections if each.has_gap], reset=True)
        for connection in self._connections:
            for flow in connection.flows.values():
                flow.set()
        if self._filler is not None:
            self._listener.listen(BACKLOG)
            self._accepting = self._loop.create_task(self._accept())


def through(address: Address, port: int) -> Address:
    """Return the address with this port of this host, where a relay to it listens."""
    return replace(address, host=HOST, port=port, host_id="", ipc_name="")
