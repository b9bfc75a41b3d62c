"""The loop of a worker: what it answers, and which exceptions end it."""

from __future__ import annotations

from typing import Any

import pytest

from specserve.cluster.workers import _serve
from specserve.errors import OutOfPages
from specserve.wire.messages import Failure, Message, Stop, Verdicts, Verify


class Server:
    """Server end of a link with prepared messages."""

    def __init__(self, *messages: Message) -> None:
        self.messages, self.sent = list(messages), list[Message]()
        self.is_closed = False

    def receive(self, timeout_s: float | None, *, spin_s: float) -> Message:
        return self.messages.pop(0)

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True


def verdicts(message: Message) -> Message:
    assert isinstance(message, Verify)
    return Verdicts(message.number, (), 0.0, 0)


def test_an_exception_is_the_answer_to_its_round_and_the_next_round_is_answered() -> None:
    server: Any = Server(Verify(1, (), ()), Verify(2, (), ()), Verify(3, (), ()), Stop())
    errors: list[Exception] = [KeyError(), OutOfPages("no room")]

    def answer(message: Message) -> Message:
        if errors:
            raise errors.pop()
        return verdicts(message)

    _serve(server, answer, lambda: None, spin_s=0.0)
    assert server.sent == [
        Failure(1, "OutOfPages", "no room"),
        Failure(2, "KeyError", "KeyError"),
        Verdicts(3, (), 0.0, 0),
    ]
    assert server.is_closed


def test_an_exception_between_two_rounds_ends_the_worker_since_no_round_would_show_it() -> None:
    server: Any = Server(Verify(1, (), ()), Verify(2, (), ()), Stop())

    def prepare() -> None:
        raise KeyError("branch 7")

    with pytest.raises(KeyError):
        _serve(server, verdicts, prepare, spin_s=0.0)
    assert server.sent == [Verdicts(1, (), 0.0, 0)], "the answer of the round is not taken back"
