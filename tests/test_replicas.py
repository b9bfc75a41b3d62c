"""The engine replicas behind a gateway: chunks by the link, refusals by the call, and no request that ends without a reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from specserve.cluster.link import Inbox, Outlet
from specserve.cluster.replicas import Replicas
from specserve.errors import BadValue, Overloaded, WorkerLost
from specserve.types import Chunk, Finish, Origin, Request, Warp
from specserve.wire import Chunks

ASKED = Request((1, 2), 8, Warp(), seed=1)


class Call:
    """A Serve call that ends as it is told to."""

    def __init__(self, result: asyncio.Future[Any]) -> None:
        self.result, self.cancelled = result, False

    def __await__(self) -> Any:
        return self.result.__await__()

    def cancel(self) -> None:
        self.cancelled = True


class Engine:
    """The handle of an engine: `generate.remote`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.numbers: list[int] = []

    @property
    def generate(self) -> Engine:
        return self

    def remote(self, request: Request, number: int, ticket: object) -> Call:
        self.calls.append(Call(asyncio.get_running_loop().create_future()))
        self.numbers.append(number)
        return self.calls[-1]


def run(scenario: Callable[[Replicas, Engine, Outlet], Any]) -> None:
    async def main() -> None:
        inbox, engine = Inbox("127.0.0.1"), Engine()
        replicas, outlet = Replicas(engine, None, inbox, own="g"), Outlet(inbox.ticket)
        try:
            async with asyncio.timeout(10):
                await scenario(replicas, engine, outlet)
        finally:
            outlet.close()
            replicas.close()

    asyncio.run(main())


def chunk(number: int, token: int, finish: Finish | None = None) -> Chunk:
    return Chunk(number, (token,), (Origin.PLAIN,), finish=finish)


def test_each_request_gets_its_own_chunks_of_a_message_for_all() -> None:
    async def scenario(replicas: Replicas, engine: Engine, outlet: Outlet) -> None:
        async def tokens() -> list[int]:
            return [chunk.tokens[0] async for chunk in replicas.generate(ASKED)]

        first, second = asyncio.create_task(tokens()), asyncio.create_task(tokens())
        await asyncio.sleep(0.05)
        one, other = engine.numbers
        outlet.send(Chunks((chunk(one, 5), chunk(other, 6))))
        outlet.send(Chunks((chunk(other, 7, Finish.LENGTH), chunk(one, 8, Finish.LENGTH), chunk(99, 9))))
        assert (await first, await second) == ([5, 8], [6, 7])
        assert not any(call.cancelled for call in engine.calls)

    run(scenario)


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        (lambda result: result.set_result(BadValue("gamma is too large", param="speculation.gamma")), BadValue),
        (lambda result: result.set_exception(BackPressureError(5, 5)), Overloaded),
        (lambda result: result.set_exception(ActorDiedError()), WorkerLost),
    ],
    ids=["refused", "full", "dead"],
)
def test_a_call_that_ends_without_a_last_chunk_is_an_error_of_the_request(ending: Callable[[Any], None], kind: type[Exception]) -> None:
    async def scenario(replicas: Replicas, engine: Engine, outlet: Outlet) -> None:
        chunks = replicas.generate(ASKED)
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0.05)
        ending(engine.calls[0].result)
        with pytest.raises(kind):
            await waiting
        assert not engine.calls[0].cancelled, "what has ended cannot be cancelled"

    run(scenario)


def test_whoever_stops_listening_cancels_the_call() -> None:
    async def scenario(replicas: Replicas, engine: Engine, outlet: Outlet) -> None:
        chunks = replicas.generate(ASKED)
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0.05)
        outlet.send(Chunks((chunk(engine.numbers[0], 5),)))
        await waiting
        await chunks.aclose()
        assert engine.calls[0].cancelled

    run(scenario)


def test_a_last_chunk_that_is_lost_does_not_leave_the_request_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.cluster.replicas.LAST_CHUNK_S", 0.1)

    async def scenario(replicas: Replicas, engine: Engine, outlet: Outlet) -> None:
        waiting = asyncio.ensure_future(anext(replicas.generate(ASKED)))
        await asyncio.sleep(0.05)
        engine.calls[0].result.set_result(None)
        with pytest.raises(WorkerLost, match="end of the text was lost"):
            await waiting

    run(scenario)
