"""An encrypted, authenticated link of messages between a coordinator and a worker. Knows neither Ray nor what the messages mean.

Every link has keys of its own (CURVE), handed over by whoever started both ends; the end that listens admits a single client key
(gate.py). Whatever else arrives is logged and ignored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import parse_monitor_message

from specserve.cluster.transport.curve_auth import Gate, Socket, arrived, bind, bind_nearby, machine
from specserve.errors import BadFrame, WorkerLost
from specserve.wire.messages import (
    Failed,
    Message,
    Prepared,
    Proposals,
    Propose,
    Verdicts,
    Verify,
    pack,
    unpack,
)

log = logging.getLogger(__name__)

MAX_MESSAGE = 2**28  # bytes; a peer that has not yet shown its key cannot make us allocate more
BEAT_S, SILENCE_S = (
    0.5,
    2.5,
)  # ZeroMQ's own thread sends and answers beats, however long a pass takes; only a stopped or dead process does not
GRACE_S = 1.0  # to connect anew after a connection broke
TIDINGS = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED


@dataclass(frozen=True, slots=True)
class Keys:
    """One end's keys, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> Keys:
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server end listens, and the key by which it is known."""

    host: str
    port: int
    public: bytes
    machine: str = ""  # on which `nearby` is another way to it
    nearby: str = ""

    @property
    def endpoint(self) -> str:
        """The shortest way from here."""
        if self.nearby and self.machine == machine():
            return f"ipc://@specserve-{self.nearby}"
        return (
            f"tcp://[{self.host}]:{self.port}"
            if ":" in self.host
            else f"tcp://{self.host}:{self.port}"
        )


class Server:
    """The worker's end. Blocking, for one thread at a time; connections are admitted while it receives."""

    def __init__(self, keys: Keys, host: str, admits: bytes) -> None:
        self._context = zmq.Context()
        self._socket = encrypted(self._context, zmq.ROUTER, keys)
        self._gate = Gate(self._context, self._socket, admits)
        self._peer = b""  # who sent the last message: a coordinator that connected anew is answered, not the connection that it lost
        self.address = listening(self._socket, host, keys)
        self._poller = zmq.Poller()
        for socket in (self._socket, *self._gate.sockets):
            self._poller.register(socket, zmq.POLLIN)

    def receive(self, timeout_s: float | None = None, *, watch_s: float = 0.0) -> Message | None:
        """The next message, or None once the time is over. For `watch_s` it keeps looking: a core that falls asleep takes long to wake."""
        watched = time.monotonic() + watch_s
        while watch_s and time.monotonic() < watched:
            if (message := self._take()) is not None:
                return message
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._take()) is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return None
            for socket, _ in self._poller.poll(None if left is None else int(left * 1e3) + 1):
                if socket is not self._socket:
                    self._gate.attend()
        return message

    def waiting(self) -> bool:
        """Whether something is there; costs a microsecond, so it can be asked between two forward passes."""
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def send(self, message: Message) -> None:
        """Answers the last message. Nothing happens if its sender is gone."""
        assert self._peer
        self._socket.send_multipart([self._peer, *pack(message)], zmq.NOBLOCK)

    def close(self) -> None:
        self._gate.close()
        self._socket.close()
        self._context.term()

    def _take(self) -> Message | None:
        for peer, *frames in arrived(self._socket):
            if (message := read(frames)) is not None:
                self._peer = peer
                return message
        return None


class Client:
    """The coordinator's end, in the event loop of its first call. One call at a time."""

    def __init__(self, keys: Keys, address: Address) -> None:
        self._context = zmq.Context()
        self._socket = encrypted(self._context, zmq.DEALER, keys)
        self._socket.set(zmq.HEARTBEAT_IVL, int(BEAT_S * 1e3))
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1e3))
        self._tidings: Socket = self._socket.get_monitor_socket(TIDINGS)
        connect(self._socket, address)
        self._address = address
        self.unasked: Callable[[Prepared], None] | None = (
            None  # takes what the worker sends between two answers
        )
        self.on_silence: Callable[[WorkerLost], None] | None = (
            None  # is told when the worker has vanished, call or no call
        )
        self._silence: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._number: int | None = None  # of the call under way
        self._answer: asyncio.Future[Message] | None = None
        self._lost: WorkerLost | None = None
        self.is_late = False  # an answer did not come in time, and none has come since

    def call(self, message: Propose | Verify, timeout_s: float) -> Awaitable[Message]:
        """Sends it at once; to be awaited for the answer of the same number, or what the worker failed with, or WorkerLost."""
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
        self._hear()  # sending looks at the socket's news too, and the loop would then not be told of them
        return self._answered(self._answer, loop.call_later(timeout_s, self._give_up, timeout_s))

    def post(self, message: Message) -> None:
        """Sends a message that is not answered."""
        try:
            self._socket.send_multipart(pack(message), zmq.NOBLOCK)
        except zmq.Again:
            raise WorkerLost(
                f"the worker at {self._address.host}:{self._address.port} has long taken no messages"
            ) from None

    def fail(self, error: WorkerLost) -> None:
        """The call under way, and any later one, raises this: someone knows that the worker is gone."""
        self._lost = error
        self._break_off(error)

    def close(self) -> None:
        """What has not been sent is not sent any more."""
        self.fail(WorkerLost("the link to the worker is closed"))
        for socket in (self._socket, self._tidings):
            deaf(self._loop, socket)
        if self._silence is not None:
            self._silence.cancel()
        self._socket.disable_monitor()
        self._tidings.close(linger=0)
        self._socket.close()
        self._context.term()

    def listen(self) -> asyncio.AbstractEventLoop:
        """From now on, in the loop that runs, even between calls."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.FD, self._hear)
            self._loop.add_reader(self._tidings.FD, self._heed)
            self._heed()  # its descriptor tells of news only after a first look
        return self._loop

    async def _answered(
        self, answer: asyncio.Future[Message], deadline: asyncio.TimerHandle
    ) -> Message:
        try:
            message = await answer
        finally:
            deadline.cancel()
            self._number = self._answer = None
        if isinstance(message, Failed):
            raise message.error()
        return message

    def _give_up(self, timeout_s: float) -> None:
        self.is_late = True
        self._break_off(
            WorkerLost(
                f"the worker at {self._address.host}:{self._address.port} has not answered within {timeout_s:g} s"
            )
        )

    def _break_off(self, error: WorkerLost) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _heed(self) -> None:
        """The worker's end may come back at once, if only the connection broke; a process that is stopped does not."""
        assert self._loop is not None
        for frames in arrived(self._tidings):
            if self._silence is not None:
                self._silence.cancel()
                self._silence = None
            if parse_monitor_message(frames)["event"] == zmq.Event.DISCONNECTED:
                self._silence = self._loop.call_later(GRACE_S, self._vanish)

    def _vanish(self) -> None:
        error = WorkerLost(
            f"the worker at {self._address.host}:{self._address.port} has fallen silent"
        )
        self.fail(error)
        if self.on_silence is not None:
            self.on_silence(error)

    def _hear(self) -> None:
        for frames in arrived(self._socket):
            message = read(frames)
            if isinstance(message, Prepared) and self.unasked is not None:
                self.unasked(message)
            if not isinstance(message, (Proposals, Verdicts, Failed)):
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


def encrypted(context: zmq.Context[Socket], kind: int, keys: Keys) -> Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE)
    socket.set(zmq.IPV6, 1)
    socket.set(zmq.CURVE_PUBLICKEY, keys.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    return socket


def listening(socket: Socket, host: str, keys: Keys) -> Address:
    return Address(host, bind(socket, host), keys.public, machine(), bind_nearby(socket))


def connect(socket: Socket, address: Address) -> None:
    socket.set(zmq.CURVE_SERVERKEY, address.public)
    socket.connect(address.endpoint)


def read(frames: list[bytes]) -> Message | None:
    """None for what is not ours: one bad message must not end whoever receives it."""
    try:
        return unpack(frames)
    except BadFrame as error:
        log.warning("ignored %s", error)
        return None


def deaf(loop: asyncio.AbstractEventLoop | None, socket: Socket) -> None:
    if loop is not None and not loop.is_closed():
        loop.remove_reader(socket.FD)
