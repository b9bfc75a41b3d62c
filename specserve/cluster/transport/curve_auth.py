"""A listening socket that admits one client key and logs who else comes; ZeroMQ itself hangs up on what is not ZeroMQ. Knows no messages."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.utils import z85

log = logging.getLogger(__name__)

STRANGERS = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL

Socket = zmq.Socket[bytes]


class Gate:
    """Admits one client key to a socket that is not bound yet, and logs who else comes. `attend` when one of `sockets` has news."""

    def __init__(self, context: zmq.Context[Socket], guarded: Socket, admits: bytes) -> None:
        self._guarded, self._admits = guarded, z85.decode(admits)
        guarded.set(zmq.CURVE_SERVER, 1)
        guarded.set(
            zmq.ZAP_DOMAIN, b"specserve"
        )  # from now on nobody is admitted unless `_asked` is answered
        self._asked = context.socket(
            zmq.REP
        )  # by the I/O thread, for each client that has shown its key (ZeroMQ RFC 27)
        self._asked.set(zmq.LINGER, 0)
        self._asked.bind("inproc://zeromq.zap.01")
        self._strangers: Socket = guarded.get_monitor_socket(
            STRANGERS
        )  # those that have shown none
        self._num_refused, self._quiet_until = 0, 0.0

    @property
    def sockets(self) -> tuple[Socket, Socket]:
        return self._asked, self._strangers

    def attend(self) -> None:
        for version, number, _, host, _, mechanism, *credentials in arrived(self._asked):
            if mechanism == b"CURVE" and credentials == [self._admits]:
                self._asked.send_multipart([version, number, b"200", b"", b"", b""], zmq.NOBLOCK)
            else:
                self._asked.send_multipart(
                    [version, number, b"400", b"another key", b"", b""], zmq.NOBLOCK
                )
                self._refused(f"from {host.decode()} with another key")
        for _ in arrived(self._strangers):
            self._refused("without a key")

    def _refused(self, who: str) -> None:
        """A line a second at most: strangers try again and again."""
        self._num_refused += 1
        if (now := time.monotonic()) >= self._quiet_until:
            log.warning("refused %d connections, the last %s", self._num_refused, who)
            self._num_refused, self._quiet_until = 0, now + 1

    def close(self) -> None:
        self._guarded.disable_monitor()
        for socket in self.sockets:
            socket.close(linger=0)


def bind(socket: Socket, host: str) -> int:
    """The port, which is free and the system's choice."""
    socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rpartition(b":")[2])


def bind_nearby(socket: Socket) -> str:
    """A name by which processes of this machine reach the socket without TCP, which takes a third of the time. It lies in Linux's abstract
    name space and leaves no file; elsewhere there is none.
    """
    name = secrets.token_hex(16) if machine() else ""
    if name:
        socket.bind(f"ipc://@specserve-{name}")
    return name


def machine() -> str:
    """Equal for processes that see each other's abstract sockets: one kernel, one network namespace. Empty where there are none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def arrived(socket: Socket) -> Iterator[list[bytes]]:
    """All messages that are there. A socket's descriptor tells of news only once, so an event loop must leave none of them behind."""
    while int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
        yield socket.recv_multipart(zmq.NOBLOCK)
