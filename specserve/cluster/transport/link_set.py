"""The worker end of links to several coordinators, over one socket. Knows no Ray.

Coordinators come and go while the worker runs; each shows a key of its own (curve_auth.py), and
messages are matched to links by that key.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import zmq

from specserve.cluster.transport.curve_auth import AuthenticatorThread, CurveAuthenticator
from specserve.cluster.transport.endpoint import KeyPair, LinkTiming, listen_on, open_socket
from specserve.cluster.transport.link import Conversation
from specserve.wire.messages import Message


class LinkSet:
    """Links to coordinators, each with a number. One thread receives and sends.

    `add` and `remove` may be called by any thread.
    """

    def __init__(self, host: str, *, timing: LinkTiming | None = None) -> None:
        timing, keys = timing or LinkTiming(), KeyPair.generate()
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, keys, timing)
        self._authenticator = CurveAuthenticator(self._context, self._socket, (), timing=timing)
        self._lock = threading.Lock()
        self._numbers: dict[bytes, int] = {}  # by the coordinator's public key
        self._conversations: dict[int, Conversation] = {}
        self._waiting: deque[tuple[int, Message]] = deque()
        self.address = listen_on(self._socket, host, keys)
        self._auth = AuthenticatorThread(self._context, self._authenticator)

    def add(self, client_key: bytes, number: int) -> None:
        """Admit a coordinator with this public key before it connects; `number` is of its link."""
        with self._lock:
            self._numbers[client_key] = number
            self._conversations[number] = Conversation(self._socket)
            self._authenticator.expect(self._numbers)

    def remove(self, number: int) -> None:
        """Admit the coordinator of this link no more, and drop messages that it still sends."""
        with self._lock:
            self._conversations.pop(number, None)
            self._numbers = {key: each for key, each in self._numbers.items() if each != number}
            self._authenticator.expect(self._numbers)

    def receive(self, timeout_s: float, *, spin_s: float = 0.0) -> dict[int, Message]:
        """Return all messages that have arrived, one of each link, by number of the link.

        Waits for the first one for `timeout_s` at most, and polls without sleeping for the first
        `spin_s` of it.
        """
        now = time.monotonic()
        until, spin_until = now + timeout_s, now + spin_s
        self._read_all()
        while not self._waiting and (left := until - time.monotonic()) > 0:
            if time.monotonic() >= spin_until:
                self._socket.poll(int(left * 1e3) + 1)
            self._read_all()
        messages: dict[int, Message] = {}
        later: deque[tuple[int, Message]] = deque()
        for number, message in self._waiting:
            if number in messages:
                later.append((number, message))
            else:
                messages[number] = message
        self._waiting = later
        return messages

    def has_message(self) -> bool:
        """Return whether a message is waiting, as `Server.has_message` does."""
        return bool(self._waiting) or bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def send(self, number: int, message: Message) -> None:
        """Answer the last message of a link; nothing is sent if the link was removed."""
        with self._lock:
            conversation = self._conversations.get(number)
        if conversation is not None:
            conversation.send(message)

    def close(self) -> None:
        self._auth.close()
        self._socket.close()
        self._context.term()

    def _read_all(self) -> None:
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if not frames:
                continue
            key = str(frames[0].get("User-Id")).encode()
            with self._lock:
                number = self._numbers.get(key)
                conversation = None if number is None else self._conversations.get(number)
            if number is None or conversation is None:
                continue  # its link was removed, and its connection stays
            message = conversation.read(peer.bytes, [frame.bytes for frame in frames])
            if message is not None:
                self._waiting.append((number, message))
