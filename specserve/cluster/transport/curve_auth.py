"""Authenticate the clients of a listening ZeroMQ socket by CURVE key.

ZeroMQ itself hangs up on peers that do not speak ZeroMQ. Knows no messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import reduce
from operator import or_

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from specserve.cluster.transport.endpoint import LinkTiming, Socket, drain
from specserve.cluster.transport.handshake_limit import HandshakeLimit

log = logging.getLogger(__name__)

HANDSHAKE_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "broken off or silent before it showed a key",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "without a key",
}
UNKNOWN_KEY = "with another key"
EVENTS = reduce(or_, HANDSHAKE_FAILURES, zmq.Event.ACCEPTED)
PATIENCE = 0.5
"""Share of the time of a handshake for which a client with an unknown key waits."""


@dataclass(frozen=True, slots=True)
class _WaitingClient:
    """Client whose key is not admitted yet, and the frames that its answer begins with."""

    key: bytes
    host: str
    envelope: tuple[bytes, ...]
    until: float


class CurveAuthenticator:
    """Authenticator that admits single client keys to a socket and logs all other clients.

    A message's `User-Id` is then its sender's key. Create it before the socket is bound, and call
    `process_events` when one of `sockets` is readable.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        socket: Socket,
        client_keys: Collection[bytes],
        *,
        timing: LinkTiming,
        on_unknown: Callable[[], None] | None = None,
    ) -> None:
        """Admit these keys, in Z85, until `admit` is called.

        With `on_unknown`, which is called at an unknown key, its client waits for a moment for
        `admit` to name it, and may try again. Without, it is refused for good.
        """
        self._socket, self._keys, self._on_unknown = socket, frozenset(client_keys), on_unknown
        self._waiting: deque[_WaitingClient] = deque()
        self._patience_s = PATIENCE * timing.handshake
        self._unanswered: deque[str] = deque()  # hosts of clients that waited in vain
        self._limit = HandshakeLimit(timing.handshake)
        socket.set(zmq.CURVE_SERVER, 1)
        # With a ZAP domain, a client is admitted only after a positive answer on `_zap`.
        socket.set(zmq.ZAP_DOMAIN, b"specserve")
        # The I/O thread sends a request here for each client that has shown its key (ZeroMQ RFC
        # 27).
        self._zap = context.socket(zmq.ROUTER)
        self._zap.set(zmq.LINGER, 0)
        self._zap.bind("inproc://zeromq.zap.01")
        # Clients that have shown no key cause a handshake failure instead.
        self._events: Socket = socket.get_monitor_socket(EVENTS)
        self._num_refused = 0  # since the last line of the log
        self._next_log_times: defaultdict[str, float] = defaultdict(float)  # by reason

    @property
    def sockets(self) -> tuple[Socket, Socket]:
        return self._zap, self._events

    def admit(self, client_keys: Collection[bytes]) -> None:
        """Admit these keys and no others from now on. Connections that exist stay."""
        self._keys = frozenset(client_keys)
        for client in [client for client in self._waiting if client.key in self._keys]:
            self._waiting.remove(client)
            self._accept(client.envelope, client.key)
        self.process_events()  # sending consumes the events for which the loop would call us

    def expect(self, client_keys: Collection[bytes]) -> None:
        """Admit these keys and no others from now on, called by any thread.

        A client must not connect before. Connections that exist stay.
        """
        assert self._on_unknown is None, "clients that wait need `admit`"
        self._keys = frozenset(client_keys)

    def has_admitted(self, client_key: bytes) -> bool:
        """Return whether the key is admitted at present."""
        return client_key in self._keys

    def process_events(self) -> None:
        """Admit or refuse the clients that are waiting, and log the refused ones."""
        for frames in drain(self._zap):
            # Where the answer goes, version and number of the request; domain; and so on.
            peer, empty, version, number, _, host, _, mechanism, *credentials = frames
            self._decide((peer, empty, version, number), host.decode(), mechanism, credentials)
        for frames in drain(self._events):
            event = parse_monitor_message(frames)
            if event["event"] == zmq.Event.ACCEPTED:
                self._limit.on_accepted(event["value"], event["endpoint"].decode())
            else:
                self._log_refusal(*self._why_failed(zmq.Event(event["event"])))

    def _decide(
        self, envelope: tuple[bytes, ...], host: str, mechanism: bytes, credentials: list[bytes]
    ) -> None:
        """Admit or refuse a client, or let it wait."""
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        if key in self._keys:
            self._accept(envelope, key)
        elif self._on_unknown is not None and key:
            until = time.monotonic() + self._patience_s
            self._waiting.append(_WaitingClient(key, host, envelope, until))
            self._on_unknown()
        else:
            # ZeroMQ's client does not try again after this answer.
            self._zap.send_multipart([*envelope, b"400", b"another key", b"", b""], zmq.NOBLOCK)
            self._log_refusal(UNKNOWN_KEY, host)

    def _accept(self, envelope: tuple[bytes, ...], key: bytes) -> None:
        self._zap.send_multipart([*envelope, b"200", b"", key, b""], zmq.NOBLOCK)

    def _why_failed(self, event: zmq.Event) -> tuple[str, str]:
        """Return why a handshake failed, and the host if its client waited in vain."""
        now = time.monotonic()
        while self._waiting and self._waiting[0].until <= now:
            self._unanswered.append(self._waiting.popleft().host)
        if event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL and self._unanswered:
            return UNKNOWN_KEY, self._unanswered.popleft()
        return HANDSHAKE_FAILURES[event], ""

    def _log_refusal(self, reason: str, host: str = "") -> None:
        """Log each reason at most once a second, since refused clients keep retrying."""
        self._num_refused += 1
        if (now := time.monotonic()) >= self._next_log_times[reason]:
            client = f"from {host} {reason}" if host else reason
            log.warning("refused %d connections, the last %s", self._num_refused, client)
            self._num_refused, self._next_log_times[reason] = 0, now + 1

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
