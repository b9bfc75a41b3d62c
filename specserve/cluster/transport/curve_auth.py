"""Authenticate the clients of a listening ZeroMQ socket by CURVE key.

ZeroMQ itself hangs up on peers that do not speak ZeroMQ. Knows no messages.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import reduce
from operator import or_

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from specserve.cluster.transport.endpoint import Socket, drain

log = logging.getLogger(__name__)

HANDSHAKE_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "broken off or silent before it showed a key",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "without a key",
}


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
        self._handshake_failures: Socket = socket.get_monitor_socket(
            reduce(or_, HANDSHAKE_FAILURES)
        )
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
        for frames in drain(self._handshake_failures):
            self._log_refusal(HANDSHAKE_FAILURES[zmq.Event(parse_monitor_message(frames)["event"])])

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


class AuthenticatorThread:
    """Thread that runs an authenticator, while the socket's own thread may compute for minutes."""

    def __init__(self, context: zmq.Context[Socket], auth: CurveAuthenticator) -> None:
        self._auth = auth
        self._end, self._ended = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._ended.bind("inproc://end-of-authentication")
        self._end.connect("inproc://end-of-authentication")
        self._thread = threading.Thread(target=self._run, name="link-authenticator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the authenticator."""
        self._end.send(b"")
        self._thread.join()
        for socket in (self._end, self._ended):
            socket.close(linger=0)
        self._auth.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._ended, *self._auth.sockets):
            poller.register(socket, zmq.POLLIN)
        while self._ended not in dict(poller.poll()):
            self._auth.process_events()
