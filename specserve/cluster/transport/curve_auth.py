"""Authenticate the clients of a listening ZeroMQ socket by CURVE key, and bind and drain sockets.

ZeroMQ itself hangs up on peers that do not speak ZeroMQ. Knows no messages.
"""

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

HANDSHAKE_FAILURES = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL

Socket = zmq.Socket[bytes]


class CurveAuthenticator:
    """Authenticator that admits one client key to a socket and logs all other clients.

    Create it before the socket is bound, and call `process_events` when one of `sockets` is
    readable.
    """

    def __init__(self, context: zmq.Context[Socket], socket: Socket, client_key: bytes) -> None:
        self._socket, self._client_key = socket, z85.decode(client_key)
        socket.set(zmq.CURVE_SERVER, 1)
        # With a ZAP domain, a client is admitted only after a positive answer on `_zap`.
        socket.set(zmq.ZAP_DOMAIN, b"specserve")
        # The I/O thread sends a request here for each client that has shown its key (ZeroMQ RFC
        # 27).
        self._zap = context.socket(zmq.REP)
        self._zap.set(zmq.LINGER, 0)
        self._zap.bind("inproc://zeromq.zap.01")
        # Clients that have shown no key cause a handshake failure instead.
        self._handshake_failures: Socket = socket.get_monitor_socket(HANDSHAKE_FAILURES)
        self._num_refused, self._next_log_time = 0, 0.0

    @property
    def sockets(self) -> tuple[Socket, Socket]:
        return self._zap, self._handshake_failures

    def process_events(self) -> None:
        """Admit or refuse the clients that are waiting, and log the refused ones."""
        for version, number, _, host, _, mechanism, *credentials in drain(self._zap):
            if mechanism == b"CURVE" and credentials == [self._client_key]:
                self._zap.send_multipart([version, number, b"200", b"", b"", b""], zmq.NOBLOCK)
            else:
                self._zap.send_multipart(
                    [version, number, b"400", b"another key", b"", b""], zmq.NOBLOCK
                )
                self._log_refusal(f"from {host.decode()} with another key")
        for _ in drain(self._handshake_failures):
            self._log_refusal("without a key")

    def _log_refusal(self, reason: str) -> None:
        """Log at most one line a second, since refused clients keep retrying."""
        self._num_refused += 1
        if (now := time.monotonic()) >= self._next_log_time:
            log.warning("refused %d connections, the last %s", self._num_refused, reason)
            self._num_refused, self._next_log_time = 0, now + 1

    def close(self) -> None:
        self._socket.disable_monitor()
        for socket in self.sockets:
            socket.close(linger=0)


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
