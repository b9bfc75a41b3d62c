"""Encrypted, authenticated links between a coordinator and its workers. Knows no Ray.

Each end makes its own CURVE keys, and only public ones travel: the coordinator's with the call that
starts the worker, the worker's with its answer. The listening end admits that single client key
(curve_auth.py); anything else is logged and ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from specserve.cluster.transport.curve_auth import AuthenticatorThread, CurveAuthenticator
from specserve.cluster.transport.endpoint import (
    Address,
    KeyPair,
    LinkTiming,
    Socket,
    connect,
    drain,
    listen_on,
    open_socket,
)
from specserve.errors import BadFrame, VersionMismatch, WorkerLost
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

RECONNECT_GRACE_S = 1.0
"""Time to connect again, before a worker whose process cannot be examined counts as lost."""
EXAMINE_INTERVAL_S = 0.5
"""Time between two examinations of the process behind a broken connection."""
MONITORED_EVENTS = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED

Answer = Proposals | Verdicts | Failure

IsRunning = Callable[[], Awaitable[bool | None]]
"""Says whether a worker's process runs: False if it is stopped or gone, None if that is unknown."""


async def unknown() -> bool | None:
    """Return None: the process of this worker cannot be examined."""
    return None


class Conversation:
    """One coordinator's messages as its worker knows them: where to answer, and the last answer.

    A client that has reconnected sends its last message again, since it cannot know what was lost.
    Each message is read once all the same: a repeat gets the same answer.
    """

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        # Connection of the last message. A coordinator that has reconnected is answered on its new
        # connection.
        self.peer = b""
        self._number: int | None = None  # of the last message
        self._answer: list[bytes] | None = None  # to it, None while it is being computed

    def read(self, peer: bytes, frames: list[bytes]) -> Message | None:
        """Return the message of these frames; None if it is a repeat, refused, or malformed."""
        try:
            message = try_unpack(frames)
        except VersionMismatch as error:
            self._refuse(peer, error)
            return None
        if isinstance(message, (Propose, Verify)) and self._is_repeat(message.number, peer):
            return None
        if message is not None:
            self.peer = peer
        return message

    def send(self, message: Message) -> None:
        """Answer the last message. The answer is kept for the case that its sender has gone."""
        assert self.peer
        frames = pack(message)
        if isinstance(message, Answer) and message.number == self._number:
            self._answer = frames
        self._socket.send_multipart([self.peer, *frames], zmq.NOBLOCK)

    def has_answered(self, number: int) -> bool:
        """Return whether the last message has this number and was answered."""
        return self._number == number and self._answer is not None

    def _refuse(self, peer: bytes, error: VersionMismatch) -> None:
        """Answer a message of another version, for its sender to see this one's by the answer.

        It understands no more of it than that.
        """
        log.error("refused a message: %s", error)
        frames = pack(Failure.from_error(0, error))
        self._socket.send_multipart([peer, *frames], zmq.NOBLOCK)

    def _is_repeat(self, number: int, peer: bytes) -> bool:
        """Return whether a message came before; if it was the last one, send its answer again.

        An older one needs no answer: its sender has gone on without it.
        """
        if self._number is not None and number <= self._number:
            if number == self._number and self._answer is not None:
                self.peer = peer
                self._socket.send_multipart([peer, *self._answer], zmq.NOBLOCK)
            return True
        self._number, self._answer = number, None
        return False


class Server:
    """Worker end of a link to one coordinator: blocking, for one thread at a time."""

    def __init__(
        self, keys: KeyPair, host: str, client_key: bytes, *, timing: LinkTiming | None = None
    ) -> None:
        timing = timing or LinkTiming()
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, keys, timing)
        auth = CurveAuthenticator(self._context, self._socket, [client_key], timing=timing)
        self._conversation = Conversation(self._socket)
        self.address = listen_on(self._socket, host, keys)
        self._auth = AuthenticatorThread(self._context, auth)

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
            self._socket.poll(None if left is None else int(left * 1e3) + 1)
        return message

    def has_message(self) -> bool:
        """Return whether a message is waiting.

        The check costs a microsecond, so it can be made between two forward passes.
        """
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def send(self, message: Message) -> None:
        """Answer the last message. The answer is kept for the case that its sender has gone."""
        self._conversation.send(message)

    def close(self) -> None:
        self._auth.close()
        self._socket.close()
        self._context.term()

    def _next_message(self) -> Message | None:
        """Return the next message that has not been returned before."""
        for peer, *frames in drain(self._socket):
            if (message := self._conversation.read(peer, frames)) is not None:
                return message
        return None


class Client:
    """Coordinator end of a link, in the event loop of its first call. One call at a time.

    A connection that breaks is made again, and the last message sent again unless it was answered.
    Meanwhile `is_running` examines the worker's process: one that is stopped or gone counts as
    lost at once, and one that runs has until the deadline of its call.
    """

    def __init__(
        self,
        keys: KeyPair,
        address: Address,
        *,
        is_running: IsRunning = unknown,
        timing: LinkTiming | None = None,
    ) -> None:
        """Connect to a worker; raise VersionMismatch if it runs another release."""
        address.require_same_version()
        timing = timing or LinkTiming()
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, keys, timing)
        self._monitor: Socket = self._socket.get_monitor_socket(MONITORED_EVENTS)
        connect(self._socket, address, timing)
        self._address, self._is_running = address, is_running
        # Called with proposals that the worker sends between two answers.
        self.on_prepared: Callable[[PreparedProposals], None] | None = None
        # Called when the worker is found stopped or gone, or to run another release, during a call
        # or between calls.
        self.on_silence: Callable[[WorkerLost], None] | None = None
        self._examination: asyncio.Task[None] | None = None  # while the connection is broken
        self._loop: asyncio.AbstractEventLoop | None = None
        self._number: int | None = None  # round of the last call
        self._unanswered: list[bytes] | None = None  # frames of the last call
        self._to_resend: list[bytes] | None = None  # those sent before the connection broke
        self._answer: asyncio.Future[Message] | None = None
        self._lost: WorkerLost | None = None
        self.is_late = False  # an answer missed its deadline and none has come since
        self.is_connected = False

    def call(self, message: Propose | Verify, timeout_s: float) -> Awaitable[Message]:
        """Send the message before returning; the awaitable gives the answer of the same number.

        Numbers must grow. It raises the error that the worker failed with, or WorkerLost.
        """
        assert self._answer is None
        if self._lost is not None:
            raise self._lost
        loop = self.listen()
        frames = pack(message)
        self._send(frames)
        self._number, self._answer = message.number, loop.create_future()
        self._unanswered, self._to_resend = frames, None
        # Sending also consumes the socket's events, for which the loop would then not call us.
        self._on_readable()
        deadline = loop.call_later(timeout_s, self._on_timeout, timeout_s)
        return self._wait_for_answer(self._answer, deadline)

    def post(self, message: Message) -> None:
        """Send a message that has no answer; raise WorkerLost when the send queue is full.

        It is lost if the connection breaks.
        """
        self._send(pack(message))

    def fail(self, error: WorkerLost) -> None:
        """Make the call under way and all later ones raise `error`, since the worker is gone."""
        self._lost = error
        self._fail_call(error)

    def close(self) -> None:
        """Close the link. Messages that are still queued are dropped."""
        self.fail(WorkerLost("the link to the worker is closed"))
        for socket in (self._socket, self._monitor):
            unregister(self._loop, socket)
        self._end_examination()
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
            self._answer = None
        if isinstance(message, Failure):
            raise message.error()
        return message

    def _send(self, frames: list[bytes]) -> None:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            raise WorkerLost(
                f"the worker at {self._address.host}:{self._address.port} "
                "has long taken no messages"
            ) from None

    def _on_timeout(self, timeout_s: float) -> None:
        if self._answer is None or self._answer.done():
            return  # it came at the same moment, or just before
        self.is_late = True
        broken = "" if self.is_connected else "; the connection to it is broken"
        self._fail_call(
            WorkerLost(
                f"the worker at {self._address.host}:{self._address.port} "
                f"has not answered within {timeout_s:g} s{broken}"
            )
        )

    def _fail_call(self, error: WorkerLost) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _on_monitor_event(self) -> None:
        for frames in drain(self._monitor):
            if parse_monitor_message(frames)["event"] == zmq.Event.DISCONNECTED:
                self._on_disconnect()
            else:
                self._on_connect()

    def _on_disconnect(self) -> None:
        """Examine the worker until it is connected again. ZeroMQ keeps trying to connect."""
        assert self._loop is not None
        self.is_connected = False
        self._to_resend = self._unanswered
        if self._examination is None and self._lost is None:
            self._examination = self._loop.create_task(self._examine_worker())

    def _on_connect(self) -> None:
        """Send the last message again if it or its answer may be lost."""
        self.is_connected = True
        self._end_examination()
        frames, self._to_resend = self._to_resend, None
        if frames is None or frames is not self._unanswered:
            return
        log.info("reconnected in round %s, whose message is sent again", self._number)
        with contextlib.suppress(WorkerLost):  # the deadline of its call still holds
            self._send(frames)
        self._on_readable()

    async def _examine_worker(self) -> None:
        """Return, and report the worker, once its process is found stopped or gone."""
        while runs := await self._is_running():
            await asyncio.sleep(EXAMINE_INTERVAL_S)
        if runs is None:
            await asyncio.sleep(RECONNECT_GRACE_S)
        self._report_lost("has fallen silent")

    def _report_lost(self, why: str) -> None:
        error = WorkerLost(f"the worker at {self._address.host}:{self._address.port} {why}")
        self.fail(error)
        if self.on_silence is not None:
            self.on_silence(error)

    def _end_examination(self) -> None:
        if self._examination is not None:
            self._examination.cancel()
            self._examination = None

    def _on_readable(self) -> None:
        for frames in drain(self._socket):
            try:
                message = try_unpack(frames)
            except VersionMismatch as error:
                self._report_lost(f"is refused: {error}")
                continue
            if isinstance(message, PreparedProposals) and self.on_prepared is not None:
                self.on_prepared(message)
            if isinstance(message, Answer):
                self._on_answer(message)

    def _on_answer(self, message: Answer) -> None:
        self.is_late = False
        if message.number == self._number:
            self._unanswered = None
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(message)
                return
        log.info("dropped a late or repeated answer to round %d", message.number)


def try_unpack(frames: list[bytes]) -> Message | None:
    """Return the message, or None if it is malformed: a bad message must not end its receiver.

    Raises VersionMismatch, since nothing that this peer sends will be understood.
    """
    try:
        return unpack(frames)
    except VersionMismatch:
        raise
    except BadFrame as error:
        log.warning("ignored %s", error)
        return None


def unregister(loop: asyncio.AbstractEventLoop | None, socket: Socket) -> None:
    if loop is not None and not loop.is_closed():
        loop.remove_reader(socket.FD)
