"""Engine replicas behind a gateway: chunks by link, errors by call, and resumed requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError

from specserve.api.refusal import Refusal
from specserve.api.service import Status
from specserve.cluster import deployments
from specserve.cluster.board.status_board import EngineKeys
from specserve.cluster.gateway import replicas as replicas_module
from specserve.cluster.gateway.replicas import UNSUITABLE_S, EngineReplicas
from specserve.cluster.gateway.resume import ResumableRequest
from specserve.cluster.transport.chunk_stream import ChunkReceiver, ChunkSender
from specserve.cluster.transport.endpoint import Address, KeyPair, LinkTiming
from specserve.errors import (
    BadValue,
    Displaced,
    Overloaded,
    Unavailable,
    VersionMismatch,
    WorkerLost,
)
from specserve.types import Chunk, FinishReason, Origin, PromptLogprobs, Request, Stats, Warp
from specserve.wire.messages import Chunks
from specserve.wire.version import VERSION
from tests.support.relay import Relay

REQUEST = Request((1, 2), 8, Warp(), seed=1)


class Call:
    """Serve call that ends when its result is set."""

    def __init__(self, result: asyncio.Future[Any]) -> None:
        self.result, self.cancelled = result, False

    def __await__(self) -> Any:
        return self.result.__await__()

    def cancel(self) -> None:
        self.cancelled = True


class EngineHandle:
    """Handle of an engine, with `generate.remote`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.numbers: list[int] = []
        self.requests: list[Request] = []
        self.resumed: list[int] = []

    @property
    def generate(self) -> EngineHandle:
        return self

    def remote(self, request: Request, number: int, address: object) -> Call:
        self.calls.append(Call(asyncio.get_running_loop().create_future()))
        self.numbers.append(number)
        self.requests.append(request)
        return self.calls[-1]

    async def called(self, times: int) -> None:
        """Wait until the engine has been called that often."""
        while len(self.calls) != times:
            await asyncio.sleep(0.005)


def run(scenario: Callable[[EngineReplicas, EngineHandle, ChunkSender], Any]) -> None:
    async def main() -> None:
        receiver, engine, keys = ChunkReceiver("127.0.0.1"), EngineHandle(), KeyPair.generate()
        replicas, sender = (
            EngineReplicas(
                engine, None, receiver, replica_id="g", on_resume=lambda: engine.resumed.append(1)
            ),
            ChunkSender(receiver.address, keys),
        )
        replicas.admit_engines(EngineKeys(frozenset({keys.public}), is_complete=True))
        try:
            async with asyncio.timeout(10):
                await scenario(replicas, engine, sender)
        finally:
            sender.close()
            replicas.close()

    asyncio.run(main())


def chunk(number: int, start: int, token: int, finish: FinishReason | None = None) -> Chunk:
    return Chunk(number, start, (token,), (Origin.PLAIN,), finish=finish)


def test_each_request_gets_its_own_chunks_of_a_message_for_all() -> None:
    async def scenario(replicas: EngineReplicas, engine: EngineHandle, sender: ChunkSender) -> None:
        async def tokens() -> list[int]:
            return [chunk.tokens[0] async for chunk in replicas.generate(REQUEST)]

        first, second = asyncio.create_task(tokens()), asyncio.create_task(tokens())
        await asyncio.sleep(0.05)
        one, other = engine.numbers
        sender.send(Chunks((chunk(one, 0, 5), chunk(other, 0, 6))))
        sender.send(
            Chunks(
                (
                    chunk(other, 1, 7, FinishReason.LENGTH),
                    chunk(one, 1, 8, FinishReason.LENGTH),
                    chunk(99, 0, 9),
                )
            )
        )
        assert (await first, await second) == ([5, 8], [6, 7])
        assert not any(call.cancelled for call in engine.calls)

    run(scenario)


def test_an_engine_cannot_send_chunks_of_requests_that_others_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(replicas: EngineReplicas, engine: EngineHandle, sender: ChunkSender) -> None:
        received: list[int] = []

        async def listen() -> None:
            async for each in replicas.generate(REQUEST):
                received.extend(each.tokens)

        tasks = [asyncio.create_task(listen()) for _ in range(3)]
        await engine.called(3)
        first, second, third = engine.numbers
        assert len({second - first, third - second, 1}) == 3, "numbers can be counted"
        assert min(engine.numbers) > 2**32, "and tried"
        forged = another_engine(replicas)
        for number in engine.numbers:
            sender.send(Chunks((chunk(number, 0, 5),)))
        await until(lambda: len(received) == 3)
        forged.send(Chunks((chunk(second, 1, 666, FinishReason.LENGTH), chunk(first + 1, 1, 666))))
        await until(lambda: "that another engine has" in caplog.text)
        for number in engine.numbers:
            sender.send(Chunks((chunk(number, 1, 6, FinishReason.LENGTH),)))
        await asyncio.gather(*tasks)
        forged.close()
        assert sorted(received) == [5, 5, 5, 6, 6, 6]

    run(scenario)


def another_engine(replicas: EngineReplicas) -> ChunkSender:
    """Return the sender of a second engine, which is admitted."""
    keys = KeyPair.generate()
    replicas.admit_engines(EngineKeys(frozenset({keys.public}), is_complete=False))
    return ChunkSender(replicas._receiver.address, keys)


def test_only_a_complete_answer_of_the_board_ends_the_trust_in_an_engine() -> None:
    async def scenario(replicas: EngineReplicas, engine: EngineHandle, sender: ChunkSender) -> None:
        # A board that has just restarted names one engine only.
        another = KeyPair.generate().public
        replicas.admit_engines(EngineKeys(frozenset({another}), is_complete=False))
        waiting = asyncio.ensure_future(anext(replicas.generate(REQUEST)))
        await engine.called(1)
        sender.send(Chunks((chunk(engine.numbers[0], 0, 4),)))
        assert (await waiting).tokens == (4,)
        replicas.admit_engines(EngineKeys(frozenset(), is_complete=True))
        waiting = asyncio.ensure_future(anext(replicas.generate(REQUEST)))
        await engine.called(2)
        assert not replicas.unknown_engine.is_set()
        sender.send(Chunks((chunk(engine.numbers[1], 0, 4),)))
        await replicas.unknown_engine.wait()
        assert not waiting.done()
        waiting.cancel()

    run(scenario)


OTHER_RELEASE = VersionMismatch("version 9 (specserve 9.9), and this one version 8")


@pytest.mark.parametrize(
    "ending",
    [
        lambda result: result.set_result(OTHER_RELEASE),
        lambda result: result.set_exception(
            RayTaskError("generate", "traceback", AttributeError(str(OTHER_RELEASE)))
        ),
    ],
    ids=["refused", "failed on the call itself"],
)
def test_engines_of_another_release_are_tried_for_a_while_and_then_the_request_is_refused(
    ending: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("specserve.cluster.gateway.replicas.FIRST_UNSUITABLE_RETRY_S", 0.0)

    async def scenario(replicas: EngineReplicas, engine: EngineHandle, sender: ChunkSender) -> None:
        nonlocal now
        replicas._clock = lambda: now
        waiting = asyncio.ensure_future(anext(replicas.generate(REQUEST)))
        for life in range(1, 8):
            await engine.called(life)
            ending(engine.calls[-1].result)
        await engine.called(8)
        sender.send(Chunks((chunk(engine.numbers[-1], 0, 4),)))
        assert (await waiting).tokens == (4,), "from the eighth"
        waiting = asyncio.ensure_future(anext(replicas.generate(REQUEST)))
        for life in range(9, 11):
            await engine.called(life)
            ending(engine.calls[-1].result)
        await engine.called(11)
        now += UNSUITABLE_S + 0.1
        ending(engine.calls[-1].result)
        with pytest.raises(Unavailable, match=r"specserve 9\.9\), and this one version 8") as error:
            await waiting
        assert Refusal.from_error(error.value).status == 503
        assert not engine.resumed

    run(scenario)


def test_an_engine_refuses_the_request_of_a_gateway_of_another_release() -> None:
    address = replace(
        Address("127.0.0.1", 5, KeyPair.generate().public), version=VERSION + 1, release="9.9"
    )
    engine: Any = SimpleNamespace()  # nothing of the request may be looked at
    refused = asyncio.run(deployments.Engine.generate(engine, REQUEST, 7, address))
    assert isinstance(refused, VersionMismatch)
    assert "(specserve 9.9)" in str(refused)


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        (
            lambda result: result.set_result(
                BadValue("gamma is too large", param="speculation.gamma")
            ),
            BadValue,
        ),
        (lambda result: result.set_exception(BackPressureError(5, 5)), Overloaded),
    ],
    ids=["refused", "full"],
)
def test_a_call_that_ends_without_a_last_chunk_is_an_error_of_the_request(
    ending: Callable[[Any], None], kind: type[Exception]
) -> None:
    async def scenario(replicas: EngineReplicas, engine: EngineHandle, sender: ChunkSender) -> None:
        chunks = replicas.generate(REQUEST)
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0.05)
        ending(engine.calls[0].result)
        with pytest.raises(kind):
            await waiting
        assert not engine.calls[0].cancelled, "what has ended cannot be cancelled"

    run(scenario)


def test_after_a_refusal_no_request_is_sent_to_a_full_engine_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specserve.cluster.gateway.replicas.PROBE_EVERY_S", 1.0)

    async def scenario(replicas: EngineReplicas, engine: EngineHandle, sender: ChunkSender) -> None:
        async def refused() -> bool:
            try:
                replicas.require_room()  # as the gateway does before it reads the request
                return [chunk async for chunk in replicas.generate(REQUEST)] == []
            except Overloaded:
                return True

        first = asyncio.create_task(refused())
        await engine.called(1)
        engine.calls[0].result.set_result(Overloaded("the queue is full"))
        assert await first
        assert await refused()
        assert len(engine.calls) == 1, "the second was refused without a call"
        await asyncio.sleep(1.0)
        late = asyncio.create_task(refused())
        await engine.called(2)
        sender.send(Chunks((chunk(engine.numbers[1], 0, 5, FinishReason.LENGTH),)))
        assert not await late

    run(scenario)


def test_each_request_that_ends_lets_one_through_to_a_full_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specserve.cluster.gateway.replicas.PROBE_EVERY_S", 60.0)
    monkeypatch.setattr("specserve.cluster.gateway.replicas.FULL_FOR_S", 60.0)

    async def scenario(replicas: EngineReplicas, engine: EngineHandle, sender: ChunkSender) -> None:
        async def answered() -> bool:
            replicas.require_room()
            return [chunk async for chunk in replicas.generate(REQUEST)] != []

        running = asyncio.create_task(answered())
        refused = asyncio.create_task(answered())
        await engine.called(2)
        engine.calls[1].result.set_result(Overloaded("the queue is full"))
        with pytest.raises(Overloaded):
            await refused
        with pytest.raises(Overloaded):
            replicas.require_room()
        sender.send(Chunks((chunk(engine.numbers[0], 0, 5, FinishReason.LENGTH),)))
        assert await running
        next_one, other = (asyncio.create_task(answered()) for _ in range(2))
        with pytest.raises(Overloaded):
            await other
        assert len(engine.calls) == 3, "one request ended, so one was sent"
        next_one.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await next_one
        next_one = asyncio.create_task(answered())
        await engine.called(4)
        assert len(engine.calls) == 4, "one that waited was cancelled, so one was sent"
        sender.send(Chunks((chunk(engine.numbers[3], 0, 5, FinishReason.LENGTH),)))
        assert await next_one

    run(scenario)


def test_requests_are_sent_again_a_while_after_the_last_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specserve.cluster.gateway.replicas.PROBE_EVERY_S", 60.0)
    monkeypatch.setattr("specserve.cluster.gateway.replicas.FULL_FOR_S", 0.0)

    async def scenario(replicas: EngineReplicas, engine: EngineHandle, sender: ChunkSender) -> None:
        refused = asyncio.ensure_future(anext(replicas.generate(REQUEST)))
        await engine.called(1)
        engine.calls[0].result.set_result(Overloaded("the queue is full"))
        with pytest.raises(Overloaded):
            await refused
        replicas.require_room()

    run(scenario)


def test_closing_the_stream_cancels_the_call() -> None:
    async def scenario(replicas: EngineReplicas, engine: EngineHandle, sender: ChunkSender) -> None:
        chunks = replicas.generate(REQUEST)
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0.05)
        sender.send(Chunks((chunk(engine.numbers[0], 0, 5),)))
        await waiting
        await chunks.aclose()
        assert engine.calls[0].cancelled

    run(scenario)


ENDINGS = {
    "dead": lambda result: result.set_exception(ActorDiedError()),
    "closing": lambda result: result.set_result(Displaced("the engine was closed")),
    "lost end": lambda result: result.set_result(None),
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_a_text_resumes_on_another_engine_where_it_was(
    ending: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve.cluster.gateway.replicas.LAST_CHUNK_S", 0.05)

    async def scenario(replicas: EngineReplicas, engine: EngineHandle, sender: ChunkSender) -> None:
        async def listen() -> list[Chunk]:
            return [chunk async for chunk in replicas.generate(REQUEST)]

        listening = asyncio.create_task(listen())
        lost = Stats(
            *("block", True, 1, 3, 2, 2),
            irreproducible="a GPU",
            drafts=1,
            accepted_by_position=(1, 1),
        )
        for life, tokens in enumerate(((5, 6), (), (7,))):
            await engine.called(life + 1)
            for start, token in enumerate(tokens, len(engine.requests[-1].generated)):
                sender.send(
                    Chunks(
                        (
                            replace(
                                chunk(engine.numbers[life], start, token),
                                stats=replace(
                                    lost, queue_time_ms=life + 1.0, cached_tokens=16 + life
                                ),
                            ),
                        )
                    )
                )
            await asyncio.sleep(0.05)
            ending(engine.calls[life].result)
        await engine.called(4)
        sender.send(Chunks((chunk(engine.numbers[0], 3, 99),)))  # an engine that was thought dead
        stats = Stats(
            *("block", True, 1, 3, 2, 2),
            drafts=1,
            accepted_by_position=(1, 0, 1),
            queue_time_ms=9.0,
            cached_tokens=32,
        )
        sender.send(
            Chunks((replace(chunk(engine.numbers[3], 3, 8, FinishReason.LENGTH), stats=stats),))
        )
        heard = await listening
        assert [token for one in heard for token in one.tokens] == [5, 6, 7, 8]
        assert [request.generated for request in engine.requests] == [(), (5, 6), (5, 6), (5, 6, 7)]
        assert heard[-1].stats == Stats(
            *("block", True, 3, 9, 6, 6),
            resumed=3,
            irreproducible="a GPU",
            drafts=3,
            accepted_by_position=(3, 2, 1),
            cached_tokens=16,
        )
        assert heard[-1].stats.queue_time_ms == 1, "of the engine that began"
        assert len(engine.resumed) == 3

    run(scenario)


def test_a_request_that_loses_every_engine_without_getting_further_fails_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specserve.cluster.gateway.resume.FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr("specserve.cluster.gateway.resume.MAX_STALL_S", 0.5)

    async def scenario(replicas: EngineReplicas, engine: EngineHandle, sender: ChunkSender) -> None:
        waiting = asyncio.ensure_future(anext(replicas.generate(REQUEST)))
        for life in range(8):
            await engine.called(life + 1)
            if life == 7:
                await asyncio.sleep(0.6)
            engine.calls[life].result.set_exception(ActorDiedError())
        with pytest.raises(WorkerLost, match="lost its engine 8 times"):
            await waiting

    run(scenario)


def test_logprobs_of_a_prompt_that_did_not_come_are_asked_for_again() -> None:
    def part(start: int, size: int) -> Chunk:
        reals, counts = np.zeros((size, 1), np.float32), np.ones((size, 1), np.uint32)
        scores = PromptLogprobs(start, reals[:, 0], counts[:, 0], counts, reals)
        return Chunk(0, 0, (), (), prompt_logprobs=scores)

    resumable = ResumableRequest(REQUEST)
    for arrived in (part(1, 4), part(5, 2), part(1, 3), part(4, 9)):  # computed again from 1 on
        assert resumable.record_chunk(arrived) is arrived
    with pytest.raises(WorkerLost, match="logprobs of the prompt were lost"):
        resumable.record_chunk(part(14, 2))
    resumable.on_engine_lost(WorkerLost("gone"))
    assert resumable.request.generated == ()
    assert resumable.record_chunk(part(1, 20)) is not None


def test_a_request_is_given_up_after_many_losses_and_a_long_time_without_a_token() -> None:
    now = 0.0
    resumable = ResumableRequest(REQUEST, lambda: now)
    pauses = [resumable.on_engine_lost(Displaced("gone")) for _ in range(20)]
    assert pauses[0] == 0.0
    assert all(
        0.5 * least < pause < 1.5 * least
        for pause, least in zip(pauses[1:6], (0.1, 0.3, 0.7, 1.5, 3.0), strict=True)
    )
    assert len(set(pauses[5:])) == 15, "the pauses are not in step with the kills"
    now = 119.0
    resumable.record_chunk(chunk(0, 0, 4))
    now = 238.0
    for _ in range(6):
        resumable.on_engine_lost(Displaced("gone"))
    now = 240.0
    with pytest.raises(
        WorkerLost, match="lost its engine 7 times without getting any further: gone"
    ):
        resumable.on_engine_lost(Displaced("gone"))
    late = ResumableRequest(REQUEST, lambda: now)
    now = 1000.0
    assert [late.on_engine_lost(Displaced("gone")) for _ in range(5)], (
        "a long wait for the first engine is no loss"
    )


def test_a_text_that_has_begun_waits_where_every_queue_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specserve.cluster.gateway.replicas.FULL_RETRY_S", 0.01)

    async def scenario(replicas: EngineReplicas, engine: EngineHandle, sender: ChunkSender) -> None:
        waiting = asyncio.ensure_future(anext(replicas.generate(REQUEST)))
        await engine.called(1)
        engine.calls[0].result.set_exception(ActorDiedError())
        for life in range(1, 9):
            await engine.called(life + 1)
            engine.calls[life].result.set_exception(BackPressureError(5, 5))
        await engine.called(10)
        sender.send(Chunks((chunk(engine.numbers[-1], 0, 4),)))
        assert (await waiting).tokens == (4,)

    run(scenario)


@pytest.mark.parametrize("num_lost", [1, 3])
def test_a_chunk_whose_predecessor_was_lost_is_dropped_and_the_text_resumes_before_it(
    num_lost: int,
) -> None:
    async def scenario(replicas: EngineReplicas, engine: EngineHandle, sender: ChunkSender) -> None:
        async def listen() -> list[Chunk]:
            return [chunk async for chunk in replicas.generate(REQUEST)]

        def stats(rounds: int) -> Stats:
            return Stats("block", True, rounds, rounds * 3, rounds * 2, rounds)

        def send(life: int, start: int, rounds: int, finish: FinishReason | None = None) -> None:
            one = replace(chunk(engine.numbers[life], start, start, finish), stats=stats(rounds))
            sender.send(Chunks((one,)))

        listening = asyncio.create_task(listen())
        await engine.called(1)
        send(0, 0, rounds=1)
        send(0, 1, rounds=2)
        send(0, 1, rounds=2)  # a repeat
        send(0, 2 + num_lost, rounds=3 + num_lost, finish=FinishReason.LENGTH)
        await engine.called(2)
        assert engine.requests[1].generated == (0, 1)
        send(1, 2, rounds=1, finish=FinishReason.LENGTH)
        heard = await listening
        assert [token for one in heard for token in one.tokens] == [0, 1, 2]
        assert heard[-1].stats == replace(stats(3), resumed=1), "of the tokens that were received"

    run(scenario)


NUM_TOKENS = 40
FAST = LinkTiming(
    heartbeat_interval=0.05, heartbeat_timeout=0.4, handshake=0.6, connect=0.2, reconnect=0.02
)


class Writer(EngineHandle):
    """Engine that writes the tokens 0, 1, ... through a link, and pauses after half of them."""

    def __init__(self, sender: ChunkSender) -> None:
        super().__init__()
        self._sender, self.pace_s = sender, 0.001
        self.num_written, self.goes_on = 0, asyncio.Event()
        self._writing: set[asyncio.Task[None]] = set()

    def remote(self, request: Request, number: int, address: object) -> Call:
        call = super().remote(request, number, address)
        writing = asyncio.create_task(self._write(call, number, len(request.generated)))
        self._writing.add(writing)
        return call

    async def _write(self, call: Call, number: int, start: int) -> None:
        for token in range(start, NUM_TOKENS):
            finish = FinishReason.LENGTH if token == NUM_TOKENS - 1 else None
            self._sender.send(Chunks((chunk(number, token, token, finish),)))
            await asyncio.sleep(self.pace_s)
            self.num_written += 1
            if token == NUM_TOKENS // 2:
                await self.goes_on.wait()
        if not call.result.done():  # else the attempt has ended
            call.result.set_result(None)


FAULTS: dict[str, Callable[[Relay], None]] = {
    "fin": lambda relay: relay.cut(),
    "rst": lambda relay: relay.cut(reset=True),
    "half-open": lambda relay: relay.half_open(),
    "partition": lambda relay: relay.partition(),
    "swallowed": lambda relay: relay.swallow(),
}


@pytest.mark.parametrize("tail_is_lost", [False, True], ids=["middle", "tail"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_text_is_whole_whatever_a_broken_connection_loses(
    fault: Callable[[Relay], None], tail_is_lost: bool
) -> None:
    async def scenario(engine: Writer, relay: Relay, listening: asyncio.Task[list[int]]) -> None:
        fault(relay)
        if fault is FAULTS["half-open"]:
            await until(lambda: relay.num_accepted > 1)
        engine.goes_on.set()
        await until(lambda: engine.num_written >= (NUM_TOKENS if tail_is_lost else 30))
        relay.heal()
        assert await listening == list(range(NUM_TOKENS))

    run_with_relay(scenario)


def test_a_text_is_whole_although_its_last_chunks_found_a_full_queue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("specserve.cluster.transport.chunk_stream.SENDER_HIGH_WATER_MARK", 10)

    async def scenario(engine: Writer, relay: Relay, listening: asyncio.Task[list[int]]) -> None:
        relay.partition()
        relay.cut()
        engine.goes_on.set()
        await until(lambda: engine.num_written == NUM_TOKENS)
        assert "takes no messages" in caplog.text
        engine.pace_s = 0.02  # the small queue must not fill again
        relay.heal()
        assert await listening == list(range(NUM_TOKENS))
        assert engine.resumed

    run_with_relay(scenario)


def run_with_relay(
    scenario: Callable[[Writer, Relay, asyncio.Task[list[int]]], Any],
) -> None:
    """Run the scenario once the first half of a text has arrived through a relay."""

    async def main() -> None:
        receiver, keys = ChunkReceiver("127.0.0.1", timing=FAST), KeyPair.generate()
        receiver.admit([keys.public])
        relay = Relay.to(receiver.address)
        sender = ChunkSender(relay.through(receiver.address), keys, timing=FAST)
        engine = Writer(sender)
        replicas = EngineReplicas(
            engine, None, receiver, replica_id="g", on_resume=lambda: engine.resumed.append(1)
        )
        tokens: list[int] = []

        async def listen() -> list[int]:
            async for each in replicas.generate(REQUEST):
                tokens.extend(each.tokens)
            return tokens

        try:
            async with asyncio.timeout(20):
                listening = asyncio.create_task(listen())
                await until(lambda: len(tokens) > NUM_TOKENS // 2)
                await scenario(engine, relay, listening)
        finally:
            sender.close()
            replicas.close()
            relay.close()

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


class BoardHandle:
    """Handle of a board whose answer is a status, or an error, or that never answers."""

    def __init__(self) -> None:
        self.answer: Status | Exception | None = None
        self.status = self

    async def remote(self, replica_id: str) -> Status:
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        assert self.answer is not None
        return self.answer


def replicas_of(board: BoardHandle, clock: SimpleNamespace) -> EngineReplicas:
    return EngineReplicas(
        EngineHandle(),
        board,
        ChunkReceiver("127.0.0.1"),
        replica_id="g",
        on_resume=lambda: None,
        clock=lambda: clock.now,
    )


@pytest.mark.parametrize("away", [ActorDiedError(), None], ids=["dead", "silent"])
def test_gateways_stay_ready_while_the_board_is_away(
    monkeypatch: pytest.MonkeyPatch, away: Exception | None
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(replicas_module, "BOARD_ANSWERS_S", 0.05)
    healthy = Status(ready=True, healthy=True, replicas=2)
    board = BoardHandle()

    async def statuses() -> None:
        replicas = replicas_of(board, clock)
        try:
            board.answer = away
            assert not (await replicas.status()).ready, "nothing is known yet"
            board.answer = healthy
            assert await replicas.status() == healthy
            board.answer = away
            clock.now += 50.0
            assert await replicas.status() == healthy
            clock.now += 20.0
            assert not (await replicas.status()).ready, "that is too long"
        finally:
            replicas.close()

    asyncio.run(statuses())


def test_a_board_that_has_just_restarted_makes_no_gateway_unready() -> None:
    clock = SimpleNamespace(now=100.0)
    board, healthy = BoardHandle(), Status(ready=True, healthy=True, replicas=2)
    empty = Status(ready=False, healthy=False, why="no engine replica reports")

    async def statuses() -> None:
        replicas = replicas_of(board, clock)
        try:
            board.answer = healthy
            await replicas.status()
            board.answer = empty
            clock.now += 2.0
            assert await replicas.status() == healthy
            clock.now += 2.0
            assert await replicas.status() == empty
        finally:
            replicas.close()

    asyncio.run(statuses())
