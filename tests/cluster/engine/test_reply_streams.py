"""The chunks of an engine reach the gateways of their requests, whatever happens to one of them."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from specserve.cluster.deployments import Engine
from specserve.cluster.engine.reply_streams import ReplyStreams
from specserve.cluster.transport.endpoint import Address, KeyPair
from specserve.errors import Displaced, Overloaded, WorkerLost
from specserve.types import Chunk, FinishReason, Origin
from specserve.wire.messages import Chunks


class Sender:
    """Sender to a gateway, which may be broken."""

    def __init__(self, address: Any, on_gone: Callable[[], None]) -> None:
        self.sent: list[Chunks] = []
        self.on_gone = on_gone
        self.is_broken = address == "broken"
        self.is_closed = False

    def send(self, chunks: Chunks) -> None:
        if self.is_broken:
            raise OSError("too many open files")
        self.sent.append(chunks)

    def close(self) -> None:
        self.is_closed = True


class Streams(ReplyStreams):
    """Streams to gateways that are known by name."""

    def __init__(self) -> None:
        self.has_handles = True
        self.senders: dict[str, Sender] = {}
        open_sender: Any = self._open
        super().__init__(open_sender)

    def _open(self, address: str, keys: KeyPair, on_gone: Callable[[], None]) -> Sender:
        if not self.has_handles:
            raise zmq.ZMQError(errno.EMFILE)
        self.senders[address] = Sender(address, on_gone)
        return self.senders[address]

    def begin(self, seq_id: int, number: int, gateway: str) -> Any:
        address: Any = gateway
        return self.open(seq_id, number, address)


def chunk(seq_id: int, token: int, finish: FinishReason | None = None) -> Chunk:
    return Chunk(seq_id, 0, (token,), (Origin.PLAIN,), finish=finish)


def test_each_gateway_gets_one_message_a_round_with_its_own_numbers() -> None:
    async def main() -> None:
        streams = Streams()
        for seq_id, number, gateway in ((1, 70, "a"), (2, 71, "b"), (3, 72, "a")):
            streams.begin(seq_id, number, gateway)
        streams.send([chunk(i, 10 + i) for i in (1, 2, 3)], can_resume_elsewhere=False)
        assert [[c.seq_id for c in sent.chunks] for sent in streams.senders["a"].sent] == [[70, 72]]
        assert [[c.seq_id for c in sent.chunks] for sent in streams.senders["b"].sent] == [[71]]

    asyncio.run(main())


def test_a_gateway_that_cannot_be_sent_to_loses_its_own_requests_and_no_other() -> None:
    async def main() -> None:
        streams = Streams()
        lost, last = (streams.begin(i, 70 + i, "broken") for i in (1, 2))
        kept = streams.begin(3, 73, "b")
        streams.send(
            [chunk(1, 11), chunk(2, 12, FinishReason.STOP), chunk(3, 13)],
            can_resume_elsewhere=False,
        )
        assert [c.tokens for c in streams.senders["b"].sent[0].chunks] == [(13,)]
        for reply in (lost, last):
            error = reply.ended.result()
            assert isinstance(error, WorkerLost)
            assert "too many open files" in str(error)
        assert streams.discard(1), "its sequence must be cancelled"
        assert not kept.ended.done()

    asyncio.run(main())


@pytest.mark.parametrize("can_resume_elsewhere", [False, True])
def test_a_failed_request_ends_with_its_error_or_with_displaced_if_it_can_resume(
    can_resume_elsewhere: bool,
) -> None:
    async def main() -> None:
        streams = Streams()
        reply = streams.begin(1, 71, "a")
        failed = Chunk(1, 5, (), (), finish=FinishReason.ERROR, error="no progress")
        streams.send([failed], can_resume_elsewhere=can_resume_elsewhere)
        error = reply.ended.result()
        assert isinstance(error, Displaced) == can_resume_elsewhere
        assert len(streams.senders["a"].sent) == (not can_resume_elsewhere)
        assert not streams.discard(1)

    asyncio.run(main())


def test_the_sender_of_a_gateway_without_requests_is_closed_when_another_one_comes() -> None:
    async def main() -> None:
        streams = Streams()
        streams.begin(1, 71, "old")
        streams.send([chunk(1, 11, FinishReason.STOP)], can_resume_elsewhere=False)
        streams.begin(2, 72, "new")
        assert streams.senders["old"].is_closed
        assert not streams.senders["new"].is_closed
        streams.close()
        assert streams.senders["new"].is_closed

    asyncio.run(main())


def test_a_gateway_that_is_gone_has_its_sequences_cancelled_and_leaves_nothing() -> None:
    async def main() -> None:
        streams = Streams()
        lost, kept = streams.begin(1, 71, "gone"), streams.begin(2, 72, "b")
        streams.senders["gone"].on_gone()
        streams.send([chunk(1, 11), chunk(2, 12)], can_resume_elsewhere=False)
        assert isinstance(lost.ended.result(), WorkerLost)
        assert streams.senders["gone"].is_closed
        assert not streams.senders["gone"].sent
        assert streams.discard(1), "its sequence must be cancelled"
        assert not kept.ended.done()
        assert streams.senders["b"].sent

    asyncio.run(main())


def test_a_gateway_that_was_only_away_gets_a_new_sender_with_its_next_request() -> None:
    async def main() -> None:
        streams = Streams()
        streams.begin(1, 71, "away")
        old = streams.senders["away"]
        old.on_gone()
        streams.discard(1)
        streams.begin(2, 72, "away")
        streams.send([chunk(2, 12)], can_resume_elsewhere=False)
        assert streams.senders["away"] is not old
        assert [sent.chunks[0].tokens for sent in streams.senders["away"].sent] == [(12,)]

    asyncio.run(main())


def test_an_engine_without_file_handles_runs_no_request_that_it_could_not_answer() -> None:
    async def main() -> None:
        streams, submitted = Streams(), list[Any]()
        coordinator = SimpleNamespace(submit=submitted.append, cancel=lambda seq_id: None)
        engine: Any = SimpleNamespace(
            _replies=streams,
            _coordinator=coordinator,
            _running_engine=coordinator,
            _importer=None,
        )
        streams.has_handles = False
        request, address = cast("Any", "a request"), Address("127.0.0.1", 1, b"key")
        with pytest.raises(zmq.ZMQError, match="Too many open files"):
            await Engine.generate(engine, request, 7, address)
        assert not submitted
        streams.has_handles = True
        serving = asyncio.create_task(Engine.generate(engine, request, 8, address))
        await asyncio.sleep(0)
        assert submitted == ["a request"]
        serving.cancel()

    asyncio.run(main())


def test_a_displaced_sequence_ends_with_its_error_and_no_chunk() -> None:
    async def main() -> None:
        streams = Streams()
        displaced, other = streams.begin(1, 70, "a"), streams.begin(2, 71, "a")
        streams.end(1, Overloaded("full"))
        streams.end(9, Overloaded("full"))  # its caller has gone
        streams.send([chunk(1, 10), chunk(2, 11)], can_resume_elsewhere=False)
        assert isinstance(await displaced.ended, Overloaded)
        assert not streams.discard(1), "there is nothing to cancel"
        assert not other.ended.done()
        assert [c.seq_id for sent in streams.senders["a"].sent for c in sent.chunks] == [71]

    asyncio.run(main())
