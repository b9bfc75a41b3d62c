"""Ends of links: keys, addresses, and ZeroMQ sockets with the options of every link.

Of messages it knows their version alone.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import zmq

from specserve.wire.version import RELEASE, VERSION, require_same_version

Socket = zmq.Socket[bytes]

MAX_MESSAGE = 2**28  # bytes; a peer that has not yet shown its key cannot make us allocate more


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """Times, in seconds, after which a broken connection is noticed and made again.

    ZeroMQ's own thread sends and answers heartbeats however long a pass takes. Only a process that
    is stopped or dead, or a network that is broken, misses them.
    """

    heartbeat_interval: float = 0.5
    # Each end closes a connection that brings nothing for so long.
    heartbeat_timeout: float = 2.5
    # The same two for the abstract socket of one host, which no network delays. A worker is lost
    # only if its process is stopped or gone as well, so a false alarm costs a reconnection.
    local_heartbeat_interval: float = 0.25
    local_heartbeat_timeout: float = 1.0
    # Three round trips. Where connections are accepted and then silent, ZeroMQ's own limit costs
    # 30 s, and this one less than a second after the network is back.
    handshake: float = 0.75
    connect: float = 0.5  # the system's own limit is two minutes
    reconnect: float = 0.1  # between two attempts, and as much again at random


@dataclass(frozen=True, slots=True)
class KeyPair:
    """CURVE keys of one end of links, in Z85. The secret one never leaves its process."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())

    def __reduce__(self) -> NoReturn:
        raise TypeError("the secret key of a link stays in its process; send the public one")


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a listening socket, with the public key that identifies it.

    It opens every link: the other end gets it through Ray before the first message, and connects
    only if its own version is the same.
    """

    # The first field, so that other versions can read it whatever the others are.
    version: int = field(default=VERSION, kw_only=True)
    release: str = field(default=RELEASE, kw_only=True)
    host: str
    port: int
    public: bytes
    host_id: str = ""  # processes with this id can use `ipc_name` instead of TCP
    ipc_name: str = ""

    @property
    def endpoint(self) -> str:
        """ZeroMQ endpoint: the abstract socket on the same host, TCP from elsewhere."""
        if self.ipc_name and self.host_id == host_id():
            return f"ipc://@specserve-{self.ipc_name}"
        return (
            f"tcp://[{self.host}]:{self.port}"
            if ":" in self.host
            else f"tcp://{self.host}:{self.port}"
        )

    def require_same_version(self) -> None:
        """Raise VersionMismatch if the process that listens here runs another release."""
        require_same_version(self.version, self.release)


def open_socket(
    context: zmq.Context[Socket], kind: int, keys: KeyPair, timing: LinkTiming
) -> Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE)
    socket.set(zmq.IPV6, 1)
    socket.set(zmq.HANDSHAKE_IVL, _milliseconds(timing.handshake))
    # At both ends: HEARTBEAT_TTL, by which one end would set the limit of the other, had no effect.
    socket.set(zmq.HEARTBEAT_IVL, _milliseconds(timing.heartbeat_interval))
    socket.set(zmq.HEARTBEAT_TIMEOUT, _milliseconds(timing.heartbeat_timeout))
    socket.set(zmq.CURVE_PUBLICKEY, keys.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    return socket


def listen_on(socket: Socket, host: str, keys: KeyPair) -> Address:
    """Bind the socket over TCP and, on Linux, to an abstract socket; return its address."""
    return Address(host, bind_tcp(socket, host), keys.public, host_id(), bind_abstract(socket))


def connect(socket: Socket, address: Address, timing: LinkTiming) -> None:
    socket.set(zmq.CONNECT_TIMEOUT, _milliseconds(timing.connect))
    socket.set(zmq.RECONNECT_IVL, _milliseconds(timing.reconnect))
    socket.set(zmq.CURVE_SERVERKEY, address.public)
    endpoint = address.endpoint
    if endpoint.startswith("ipc:"):
        socket.set(zmq.HEARTBEAT_IVL, _milliseconds(timing.local_heartbeat_interval))
        socket.set(zmq.HEARTBEAT_TIMEOUT, _milliseconds(timing.local_heartbeat_timeout))
    socket.connect(endpoint)


def bind_tcp(socket: Socket, host: str) -> int:
    """Bind to a free port, which the system chooses, and return the port."""
    socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rpartition(b":")[2])


def bind_abstract(socket: Socket) -> str:
    """Bind to an abstract Unix socket as well, and return its name, or "" outside Linux.

    Processes of this machine reach the socket by that name in a third of the time that TCP takes.
    An abstract socket leaves no file behind.
    """
    name = secrets.token_hex(16) if host_id() else ""
    if name:
        socket.bind(f"ipc://@specserve-{name}")
    return name


def host_id() -> str:
    """Return an id of the kernel and network namespace, or "" where there are no abstract sockets.

    Processes with the same id can reach each other's abstract sockets.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def drain(socket: Socket) -> Iterator[list[bytes]]:
    """Yield all messages that can be received without waiting.

    A ZeroMQ descriptor becomes readable only once for several messages, so an event loop must
    receive all of them each time.
    """
    while int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
        yield socket.recv_multipart(zmq.NOBLOCK)


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1e3)
