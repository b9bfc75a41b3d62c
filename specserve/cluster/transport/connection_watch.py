"""Watch a connecting socket, and report a peer that does not come back. Knows no messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from specserve.cluster.transport.endpoint import Socket, drain

WATCHED_EVENTS = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED


@dataclass(frozen=True, slots=True)
class AwayTimes:
    """Seconds without a connection after which a peer counts as gone.

    A connection that was cut is back after 0.05 to 0.3 s on one host. Elsewhere the first attempt
    may be lost, and the next one follows 0.3 to 0.35 s later (SENDER_TIMING).
    """

    local: float = 0.5  # over the abstract socket of one host
    remote: float = 0.6
    first: float = 5.0  # until the first connection: a busy peer takes a while to admit a new key


class ConnectionWatch:
    """Watch over the connection of a socket, in the running event loop.

    `on_gone` is called once, when the peer has had no connection for as long as `times` says. The
    death of its process breaks the connection at once, and a stopped process by its heartbeats; a
    connection that is back sooner was a break of the network alone. Create it before the socket
    connects.
    """

    def __init__(
        self,
        socket: Socket,
        on_gone: Callable[[], None],
        *,
        times: AwayTimes | None = None,
    ) -> None:
        self._socket, self._on_gone = socket, on_gone
        self._times = times or AwayTimes()
        self._loop = asyncio.get_running_loop()
        self._monitor: Socket = socket.get_monitor_socket(WATCHED_EVENTS)
        self._deadline: asyncio.TimerHandle | None = None  # while there is no connection
        self._wait(self._times.first)
        self._loop.add_reader(self._monitor.FD, self._on_event)
        self._on_event()  # the descriptor reports events only after a first read

    def close(self) -> None:
        """End the watch; call it before the socket is closed."""
        self._end_wait()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _on_event(self) -> None:
        for frames in drain(self._monitor):
            if parse_monitor_message(frames)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._end_wait()
            elif self._deadline is None:  # an attempt to connect that fails comes as well
                self._wait(self._times.local if self._is_local() else self._times.remote)

    def _is_local(self) -> bool:
        endpoint = self._socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.startswith(b"ipc:")

    def _wait(self, seconds: float) -> None:
        self._deadline = self._loop.call_later(seconds, self._on_deadline)

    def _on_deadline(self) -> None:
        """Report the peer, unless it is back by now: a loop that was busy runs its timers first."""
        deadline = self._deadline
        self._on_event()
        if self._deadline is deadline:
            self._deadline = None
            self._on_gone()

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
