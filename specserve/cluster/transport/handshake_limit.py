"""Limit how many connections in handshake one peer has at a listening socket.

ZeroMQ has no such limit. It reports each connection that it has accepted, with its file descriptor,
and those beyond the limit are shut down here.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 128
"""Connections that one peer may open within the time of a handshake."""
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class HandshakeLimit:
    """Times at which each peer's latest connections were accepted.

    A peer is an address, or a user of this host. A connection is in handshake for `handshake_s` at
    most, so those accepted in that time include all that are. Successful ones are counted too,
    which spares us the question which of them a report of success is about.
    """

    def __init__(self, handshake_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._handshake_s, self._clock = handshake_s, clock
        self._accepted: dict[str, deque[float]] = {}
        self._num_refused, self._next_log_time = 0, 0.0

    def on_accepted(self, descriptor: int, endpoint: str) -> None:
        """Shut down a connection that `endpoint` has accepted if its peer has too many."""
        try:
            with _copy_of(descriptor) as connection:
                if not _was_accepted_by(connection, endpoint):
                    return
                peer = _peer_of(connection)
                if not self._has_room(peer):
                    connection.shutdown(socket.SHUT_RDWR)
                    self._log_refusal(peer)
        except OSError:  # it is closed already
            return

    def _has_room(self, peer: str) -> bool:
        """Return whether the peer may have one more connection in handshake, and count it."""
        now = self._clock()
        for other, times in list(self._accepted.items()):
            while times and times[0] < now - self._handshake_s:
                times.popleft()
            if not times:
                del self._accepted[other]
        times = self._accepted.setdefault(peer, deque())
        if len(times) >= MAX_HANDSHAKES:
            return False
        times.append(now)
        return True

    def _log_refusal(self, peer: str) -> None:
        """Log at most one line a second."""
        self._num_refused += 1
        if (now := self._clock()) >= self._next_log_time:
            log.warning(
                "shut down %d connections beyond %d in handshake, the last from %s",
                self._num_refused,
                MAX_HANDSHAKES,
                peer,
            )
            self._num_refused, self._next_log_time = 0, now + 1


def _copy_of(descriptor: int) -> socket.socket:
    """Return a copy, which stays the same connection even if ZeroMQ closes its own descriptor.

    Raises OSError if it has closed it already, also if another file has got that number.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _was_accepted_by(connection: socket.socket, endpoint: str) -> bool:
    """Return whether the local end of the connection is the endpoint, in ZeroMQ's words."""
    name = connection.getsockname()
    if connection.family == socket.AF_UNIX:
        text = name if isinstance(name, str) else "@" + name[1:].decode()
        return endpoint == f"ipc://{text}"
    return endpoint.startswith("tcp:") and endpoint.endswith(f":{name[1]}")


def _peer_of(connection: socket.socket) -> str:
    if connection.family == socket.AF_UNIX:
        length = _CREDENTIALS.size
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, length)
        return f"user {_CREDENTIALS.unpack(credentials)[1]} of this host"
    return str(connection.getpeername()[0]).removeprefix("::ffff:")
