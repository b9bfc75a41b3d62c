"""Floods of connections that never show a key: their number is bounded, and the link works."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq

from specserve.cluster.transport import handshake_limit
from specserve.cluster.transport.endpoint import KeyPair, LinkTiming
from specserve.cluster.transport.handshake_limit import MAX_HANDSHAKES, HandshakeLimit
from specserve.cluster.transport.link import Client, Server
from specserve.wire.messages import Verdicts, Verify, pack

HOST, OTHER_HOST = "127.0.0.1", "127.0.0.2"
NUM_SILENT = 1000
SECONDS = 30  # until a test that hangs is given up
SLOW = LinkTiming(handshake=600.0)  # no silent connection ends by itself


def later(condition: Callable[[], object]) -> bool:
    """Wait until the condition is true; return False if it is not within SECONDS."""
    until = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(condition())


@pytest.fixture
def silent_connections() -> Iterator[Callable[[int], list[socket.socket]]]:
    """Return a function that opens NUM_SILENT connections to a port, which say nothing."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = psutil.Process().num_fds() + 2 * NUM_SILENT + 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], wanted), limits[1]))
    with contextlib.ExitStack() as stack:
        yield lambda port: [
            stack.enter_context(socket.create_connection((HOST, port), timeout=SECONDS))
            for _ in range(NUM_SILENT)
        ]
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def num_open(connections: list[socket.socket]) -> int:
    """Return how many connections the other end has not closed."""
    hangups = select.poll()
    for connection in connections:
        hangups.register(connection, select.POLLRDHUP)
    return len(connections) - len(hangups.poll(0))


def test_a_thousand_silent_connections_leave_few_open_and_the_link_works(
    silent_connections: Callable[[int], list[socket.socket]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    keys = KeyPair.generate()
    server = Server(KeyPair.generate(), HOST, keys.public, timing=SLOW)
    before = psutil.Process().num_fds()

    async def call(client: Client, number: int) -> None:
        answer = client.call(Verify(number, (), ()), SECONDS)
        assert await asyncio.to_thread(server.receive, SECONDS) == Verify(number, (), ())
        server.send(Verdicts(number, (), 0.0, 0))
        assert (await answer) == Verdicts(number, (), 0.0, 0)

    async def main() -> None:
        client = Client(keys, server.address, timing=SLOW)
        await call(client, 1)
        silent = silent_connections(server.address.port)
        assert await asyncio.to_thread(later, lambda: num_open(silent) == MAX_HANDSHAKES)
        # Both ends of those that are open are files of this process, as are our ends of the others.
        most = before + NUM_SILENT + MAX_HANDSHAKES + 50
        assert await asyncio.to_thread(later, lambda: psutil.Process().num_fds() <= most)
        await call(client, 2)
        client.close()
        client = Client(keys, server.address, timing=SLOW)  # by the host's own socket
        await call(client, 3)
        client.close()
        assert num_open(silent) == MAX_HANDSHAKES
        assert f"beyond {MAX_HANDSHAKES} in handshake, the last from {HOST}" in caplog.text

    asyncio.run(main())
    context: zmq.Context[Any] = zmq.Context()
    other = context.socket(zmq.DEALER)
    other.set(zmq.CURVE_SERVERKEY, server.address.public)
    other.set(zmq.CURVE_PUBLICKEY, keys.public)
    other.set(zmq.CURVE_SECRETKEY, keys.secret)
    other.connect(f"tcp://{OTHER_HOST}:0;{HOST}:{server.address.port}")
    other.send_multipart(pack(Verify(4, (), ())))
    assert server.receive(SECONDS) == Verify(4, (), ()), "another address has room of its own"
    other.close(linger=0)
    context.term()
    server.close()


def test_a_peer_has_room_again_once_its_handshakes_must_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake_limit, "MAX_HANDSHAKES", 2)
    clock = SimpleNamespace(now=0.0)
    limit = HandshakeLimit(1.0, lambda: clock.now)
    with accepted_connections() as accept:
        assert [accept(limit) for _ in range(3)] == [True, True, False]
        clock.now += 1.1
        assert [accept(limit) for _ in range(3)] == [True, True, False]


@contextlib.contextmanager
def accepted_connections() -> Iterator[Callable[[HandshakeLimit], bool]]:
    """Yield a function that has a connection accepted, and returns whether it stays open."""
    with contextlib.ExitStack() as stack, socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]

        def accept(limit: HandshakeLimit) -> bool:
            ours = stack.enter_context(socket.create_connection((HOST, port)))
            theirs = stack.enter_context(listener.accept()[0])
            limit.on_accepted(theirs.fileno(), f"tcp://{HOST}:{port}")
            return num_open([ours]) == 1

        yield accept


def test_only_connections_of_the_listening_socket_are_ever_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the descriptor of another file is left alone, and that no copy of it stays.

    The file may be no socket at all, as an event loop's epoll.
    """
    monkeypatch.setattr(handshake_limit, "MAX_HANDSHAKES", 0)
    limit = HandshakeLimit(1.0)
    ours, theirs = socket.socketpair()
    with ours, theirs, open(__file__, encoding="utf-8") as file:
        num_before = psutil.Process().num_fds()
        for endpoint in (f"tcp://{HOST}:5", "ipc://@specserve-0"):
            limit.on_accepted(theirs.fileno(), endpoint)
            limit.on_accepted(file.fileno(), endpoint)
        limit.on_accepted(10**6, f"tcp://{HOST}:5")
        assert num_open([ours]) == 1
        assert psutil.Process().num_fds() == num_before
    with accepted_connections() as accept:
        assert not accept(limit), "and its own are"
