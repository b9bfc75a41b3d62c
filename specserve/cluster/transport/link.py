"""Encrypted, authenticated links between a coordinator and its workers. Knows no Ray.

Every link has CURVE keys of its own, which the process that starts both ends hands to them. The
listening end admits a single client key (curve_auth.py); anything else is logged and ignored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import parse_monitor_message

from specserve.cluster.transport.curve_auth import (
    CurveAuthenticator,
    Socket,
    bind_abstract,
    bind_tcp,
    drain,
    host_id,
)
from specserve.errors import BadFrame, WorkerLost
from specserve.wire.messages import (
    Failure,
    Message,
    PreparedProposals,
    Proposals,
    Propose,
    Verdicts,
    Verify,
    pack,
    unpack,
)

log = logging.getLogger(__name__)

MAX_MESSAGE = 2**28  # bytes; a peer that has not yet shown its key cannot make us allocate more
# ZeroMQ's own thread sends and answers heartbeats however long a pass takes. Only a process that is
# stopped or dead misses them.
HEARTBEAT_INTERVAL_S = 0.5
HEARTBEAT_TIMEOUT_S = 2.5
RECONNECT_GRACE_S = 1.0
"""Time to connect again after a connection broke, before the worker counts as lost."""
MONITORED_EVENTS = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED


@dataclass(frozen=True, slots=True)
class KeyPair:
    """CURVE keys of one end of a link, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a listening socket, with the public key that identifies it."""

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


class Server:
    """Worker end of a link: blocking, for one thread at a time.

    Clients are admitted while `receive` runs.
    """

    def __init__(self, keys: KeyPair, host: str, client_key: bytes) -> None:
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, keys)
        self._auth = CurveAuthenticator(self._context, self._socket, client_key)
        # Connection of the last message. A coordinator that has reconnected is answered on its new
        # connection.
        self._peer = b""
        self.address = listen_on(self._socket, host, keys)
        self._poller = zmq.Poller()
        for socket in (self._socket, *self._auth.sockets):
            self._poller.register(socket, zmq.POLLIN)

    def receive(self, timeout_s: float | None = None, *, spin_s: float = 0.0) -> Message | None:
        """Return the next message, or None after `timeout_s`.

        It polls without sleeping for the first `spin_s`, since a core that sleeps takes long to
        wake.
        """
        spin_until = time.monotonic() + spin_s
        while spin_s and time.monotonic() < spin_until:
            if (message := self._next_message()) is not None:
                return message
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._next_message()) is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return None
            for socket, _ in self._poller.poll(None if left is None else int(left * 1e3) + 1):
                if socket is not self._socket:
                    self._auth.process_events()
        return message

    def has_message(self) -> bool:
        """Return whether a message is waiting.

        The check costs a microsecond, so it can be made between two forward passes.
        """
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def send(self, message: Message) -> None:
        """Answer the last message. Nothing happens if its sender has gone."""
        assert self._peer
        self._socket.send_multipart([self._peer, *pack(message)], zmq.NOBLOCK)

    def close(self) -> None:
        self._auth.close()
        self._socket.close()
        self._context.term()

    def _next_message(self) -> Message | None:
        for peer, *frames in drain(self._socket):
            if (message := try_unpack(frames)) is not None:
                self._peer = peer
                return message
        return None


class Client:
    """Coordinator end of a link, in the event loop of its first call. One call at a time."""

    def __init__(self, keys: KeyPair, address: Address) -> None:
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, keys)
        self._socket.set(zmq.HEARTBEAT_IVL, int(HEARTBEAT_INTERVAL_S * 1e3))
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_TIMEOUT_S * 1e3))
        self._monitor: Socket = self._socket.get_monitor_socket(MONITORED_EVENTS)
        connect(self._socket, address)
        self._address = address
        # Called with proposals that the worker sends between two answers.
        self.on_prepared: Callable[[PreparedProposals], None] | None = None
        # Called when the worker has fallen silent, during a call or between calls.
        self.on_silence: Callable[[WorkerLost], None] | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._number: int | None = None  # round of the call under way
        self._answer: asyncio.Future[Message] | None = None
        self._lost: WorkerLost | None = None
        self.is_late = False  # an answer missed its deadline and none has come since

    def call(self, message: Propose | Verify, timeout_s: float) -> Awaitable[Message]:
        """Send the message before returning; the awaitable gives the answer of the same number.

        It raises the error that the worker failed with, or WorkerLost.
        """
        assert self._answer is None
        if self._lost is not None:
            raise self._lost
        loop = self.listen()
        self._number, self._answer = message.number, loop.create_future()
        try:
            self.post(message)
        except WorkerLost:
            self._number = self._answer = None
            raise
        # Sending also consumes the socket's events, for which the loop would then not call us.
        self._on_readable()
        deadline = loop.call_later(timeout_s, self._on_timeout, timeout_s)
        return self._wait_for_answer(self._answer, deadline)

    def post(self, message: Message) -> None:
        """Send a message that has no answer; raise WorkerLost when the send queue is full."""
        try:
            self._socket.send_multipart(pack(message), zmq.NOBLOCK)
        except zmq.Again:
            raise WorkerLost(
                f"the worker at {self._address.host}:{self._address.port} "
                "has long taken no messages"
            ) from None

    def fail(self, error: WorkerLost) -> None:
        """Make the call under way and all later ones raise `error`, since the worker is gone."""
        self._lost = error
        self._fail_call(error)

    def close(self) -> None:
        """Close the link. Messages that are still queued are dropped."""
        self.fail(WorkerLost("the link to the worker is closed"))
        for socket in (self._socket, self._monitor):
            unregister(self._loop, socket)
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def listen(self) -> asyncio.AbstractEventLoop:
        """Watch the link in the running event loop from now on, between calls too."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.FD, self._on_readable)
            self._loop.add_reader(self._monitor.FD, self._on_monitor_event)
            self._on_monitor_event()  # its descriptor reports events only after a first read
        return self._loop

    async def _wait_for_answer(
        self, answer: asyncio.Future[Message], deadline: asyncio.TimerHandle
    ) -> Message:
        try:
            message = await answer
        finally:
            deadline.cancel()
            self._number = self._answer = None
        if isinstance(message, Failure):
            raise message.error()
        return message

    def _on_timeout(self, timeout_s: float) -> None:
        self.is_late = True
        self._fail_call(
            WorkerLost(
                f"the worker at {self._address.host}:{self._address.port} "
                f"has not answered within {timeout_s:g} s"
            )
        )

    def _fail_call(self, error: WorkerLost) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _on_monitor_event(self) -> None:
        """Start the silence timer on a disconnect, and stop it on any later event.

        A broken connection is restored at once; a stopped process does not reconnect.
        """
        assert self._loop is not None
        for frames in drain(self._monitor):
            if self._silence_timer is not None:
                self._silence_timer.cancel()
                self._silence_timer = None
            if parse_monitor_message(frames)["event"] == zmq.Event.DISCONNECTED:
                self._silence_timer = self._loop.call_later(RECONNECT_GRACE_S, self._on_peer_silent)

    def _on_peer_silent(self) -> None:
        error = WorkerLost(
            f"the worker at {self._address.host}:{self._address.port} has fallen silent"
        )
        self.fail(error)
        if self.on_silence is not None:
            self.on_silence(error)

    def _on_readable(self) -> None:
        for frames in drain(self._socket):
            message = try_unpack(frames)
            if isinstance(message, PreparedProposals) and self.on_prepared is not None:
                self.on_prepared(message)
            if not isinstance(message, (Proposals, Verdicts, Failure)):
                continue
            self.is_late = False
            if (
                self._answer is not None
                and message.number == self._number
                and not self._answer.done()
            ):
                self._answer.set_result(message)
            else:
                log.info("dropped a late answer to round %d", message.number)


def open_socket(context: zmq.Context[Socket], kind: int, keys: KeyPair) -> Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE)
    socket.set(zmq.IPV6, 1)
    socket.set(zmq.CURVE_PUBLICKEY, keys.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    return socket


def listen_on(socket: Socket, host: str, keys: KeyPair) -> Address:
    """Bind the socket over TCP and, on Linux, to an abstract socket; return its address."""
    return Address(host, bind_tcp(socket, host), keys.public, host_id(), bind_abstract(socket))


def connect(socket: Socket, address: Address) -> None:
    socket.set(zmq.CURVE_SERVERKEY, address.public)
    socket.connect(address.endpoint)


def try_unpack(frames: list[bytes]) -> Message | None:
    """Return the message, or None if it is malformed: a bad message must not end its receiver."""
    try:
        return unpack(frames)
    except BadFrame as error:
        log.warning("ignored %s", error)
        return None


def unregister(loop: asyncio.AbstractEventLoop | None, socket: Socket) -> None:
    if loop is not None and not loop.is_closed():
        loop.remove_reader(socket.FD)
