"""The relays of the network faults must break what they say, and heal it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.chaos.relays import KINDS, PAIRS, RelayHub, _ask


@contextmanager
def echo_server() -> Iterator[int]:
    """Echo on a free port, one thread a connection; yield the port."""

    def echo(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(4096):
                    connection.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture(scope="module")
def hub() -> Iterator[RelayHub]:
    hub = RelayHub()
    yield hub
    hub.close()


def says(connection: socket.socket, data: bytes) -> bool:
    """Return whether the echo of the data arrives."""
    try:
        connection.sendall(data)
        return connection.recv(4096) == data
    except OSError:
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_fault_breaks_the_links_of_its_pair_and_heals(
    hub: RelayHub, kind: str
) -> None:
    with echo_server() as port:
        pair = f"{PAIRS[0]} {kind}"
        relay = _ask(hub.port, {"do": "open", "host": "127.0.0.1", "port": port, "pair": pair})
        with socket.create_connection(("127.0.0.1", relay["port"])) as connection:
            assert says(connection, b"before")

            async def breaks() -> bool:
                breaking = asyncio.create_task(hub.inject(pair, kind, 1.0))
                connection.settimeout(0.1)
                heard = True
                while heard and not breaking.done():
                    heard = await asyncio.to_thread(says, connection, b"meanwhile")
                assert await breaking == 1
                return not heard

            assert asyncio.run(breaks())
        with socket.create_connection(("127.0.0.1", relay["port"])) as connection:
            assert says(connection, b"after")


def test_a_pair_without_links_has_no_fault(hub: RelayHub) -> None:
    assert asyncio.run(hub.inject("client-server", "cut", 0.0)) == 0
