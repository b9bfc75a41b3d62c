"""Links through a relay that loses, cuts, half-opens and partitions: each round runs once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from specserve.cluster.transport.endpoint import KeyPair, LinkTiming
from specserve.cluster.transport.link import Client, Server
from specserve.errors import WorkerLost
from specserve.types import Policy, Verdict, VerifyStep, Warp
from specserve.wire.messages import Stop, Verdicts, Verify
from tests.support.relay import HOST, Relay

SECONDS = 20  # until a test that hangs is given up
LONG_PROMPT = tuple(range(5000))
MESSAGE_BYTES = 4 * len(LONG_PROMPT)  # more than heartbeats and handshakes have together
FAST = LinkTiming(
    heartbeat_interval=0.05, heartbeat_timeout=0.4, handshake=0.6, connect=0.2, reconnect=0.02
)


def verify(number: int) -> Verify:
    step = VerifyStep(1, 0, LONG_PROMPT, (), None, Policy(Warp(), "block", 5, len(LONG_PROMPT)))
    return Verify(number, (step,))


class Worker:
    """Worker in a thread, which counts how often each round is computed."""

    def __init__(self, server: Server) -> None:
        self.computed: list[int] = []
        self.num_answered = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._server = server
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not isinstance(message := self._server.receive(SECONDS), Stop | None):
            assert isinstance(message, Verify)
            self.computed.append(message.number)
            assert self.may_answer.wait(SECONDS)
            self._server.send(
                Verdicts(message.number, tuple(Verdict(i, 0, 1, None) for i in range(2000)), 0.0, 0)
            )
            self.num_answered += 1
        self._server.close()

    def join(self) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


class Link:
    """Client and worker with a relay between them, and whether the worker's process runs."""

    def __init__(self, timing: LinkTiming) -> None:
        keys = KeyPair.generate()
        server = Server(KeyPair.generate(), HOST, keys.public, timing=timing)
        self.address, self.keys = server.address, keys
        self.relay = Relay.to(server.address)
        self.worker = Worker(server)
        self.runs = True
        self.num_examined = 0
        self.silences: list[WorkerLost] = []
        self.client = Client(
            keys, self.relay.through(server.address), is_running=self._is_running, timing=timing
        )
        self.client.on_silence = self.silences.append

    async def _is_running(self) -> bool:
        self.num_examined += 1
        return self.runs

    async def call(self, number: int, timeout_s: float = SECONDS) -> int:
        answer = await self.client.call(verify(number), timeout_s)
        assert isinstance(answer, Verdicts)
        return answer.number

    async def swallowed(self, num_before: int = 0) -> None:
        """Wait until the relay has swallowed a message, or one end has given the connection up.

        A busy machine may be silent for longer than heartbeats take. While messages are swallowed,
        nothing connects again.
        """
        await until(
            lambda: (
                self.relay.num_swallowed > num_before + MESSAGE_BYTES
                or not self.client.is_connected
            )
        )

    async def accepted_after(self, num_accepted: int) -> None:
        """Wait until the relay has accepted more connections than that."""
        await until(lambda: self.relay.num_accepted > num_accepted)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@contextmanager
def linked(timing: LinkTiming = FAST) -> Iterator[Link]:
    link = Link(timing)
    try:
        yield link
    finally:
        link.client.close()
        link.worker.may_answer.set()
        stop = Client(link.keys, link.address)
        stop.post(Stop())
        link.worker.join()
        stop.close()
        link.relay.close()


def run(link: Link, scenario: Callable[[Link], Awaitable[None]]) -> None:
    """Run the scenario between two rounds without faults, and check what was computed."""

    async def main() -> None:
        async with asyncio.timeout(SECONDS):
            assert await link.call(1) == 1
            await scenario(link)

    asyncio.run(main())
    assert link.worker.computed == sorted(set(link.worker.computed)), "a round ran twice"


async def lose_message(link: Link) -> asyncio.Future[int]:
    """Send round 2 into a network that loses it."""
    link.relay.swallow("to_target")
    call = asyncio.ensure_future(link.call(2))
    await link.swallowed()
    assert link.worker.computed == [1]
    return call


async def lose_answer(link: Link) -> asyncio.Future[int]:
    """Have round 2 computed, and lose what the worker answered."""
    link.relay.swallow("to_client")
    call = asyncio.ensure_future(link.call(2))
    await until(lambda: link.worker.num_answered == 2)
    await link.swallowed()
    assert link.worker.computed == [1, 2]
    return call


async def lose_both(link: Link) -> asyncio.Future[int]:
    """Lose round 2, then the answer to the message that was sent again."""
    call = await lose_message(link)
    link.worker.may_answer.clear()
    link.relay.heal()
    await until(lambda: link.worker.computed == [1, 2] and link.client.is_connected)
    num_before = link.relay.num_swallowed
    link.relay.swallow("to_client")
    link.worker.may_answer.set()
    await until(lambda: link.worker.num_answered == 2)
    await link.swallowed(num_before)
    return call


async def lose_nothing(link: Link) -> asyncio.Future[int]:
    """Stop the network while the worker computes round 2."""
    link.worker.may_answer.clear()
    call = asyncio.ensure_future(link.call(2))
    await until(lambda: link.worker.computed == [1, 2])
    return call


LOSSES = [lose_message, lose_answer, lose_both, lose_nothing]
FAULTS: dict[str, Callable[[Relay], None]] = {
    "fin": lambda relay: relay.cut(),
    "rst": lambda relay: relay.cut(reset=True),
    "half-open": lambda relay: relay.half_open(),
    "partition": lambda relay: relay.partition(),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("lose", LOSSES)
def test_a_round_whose_message_or_answer_is_lost_is_answered_and_runs_once(
    lose: Callable[[Link], Awaitable[asyncio.Future[int]]], fault: Callable[[Relay], None]
) -> None:
    async def scenario(link: Link) -> None:
        call = await lose(link)
        fault(link.relay)
        await until(lambda: link.num_examined)
        link.relay.heal()
        link.worker.may_answer.set()
        assert await call == 2
        assert await link.call(3) == 3
        assert link.worker.computed == [1, 2, 3]
        assert link.silences == []

    with linked() as link:
        run(link, scenario)


def test_a_repeat_that_comes_while_its_round_is_computed_is_answered_once_it_is() -> None:
    async def scenario(link: Link) -> None:
        call = await lose_nothing(link)
        for _ in range(3):
            accepted = link.relay.num_accepted
            link.relay.cut()
            await link.accepted_after(accepted)
        link.worker.may_answer.set()
        assert await call == 2
        assert await link.call(3) == 3

    with linked() as link:
        run(link, scenario)


def test_a_message_older_than_the_last_is_not_computed() -> None:
    async def scenario(link: Link) -> None:
        assert await link.call(7) == 7
        link.client.post(verify(6))
        assert await link.call(8) == 8
        assert link.worker.computed == [1, 7, 8]

    with linked() as link:
        run(link, scenario)


@pytest.mark.parametrize("fault", ["half-open", "partition"])
def test_a_partition_longer_than_the_deadline_loses_the_round_and_says_why(fault: str) -> None:
    async def scenario(link: Link) -> None:
        FAULTS[fault](link.relay)
        with pytest.raises(WorkerLost, match=r"within 3 s; the connection to it is broken"):
            await link.call(2, timeout_s=3)
        assert link.client.is_late
        link.relay.heal()
        await until(lambda: not link.client.is_late)  # the message was sent again, and answered
        assert await link.call(3) == 3
        assert link.worker.computed == [1, 2, 3]
        assert link.silences == []

    with linked() as link:
        run(link, scenario)


def test_a_delay_shorter_than_the_heartbeats_timeout_breaks_nothing() -> None:
    async def scenario(link: Link) -> None:
        link.relay.delay(0.5)
        assert await link.call(2) == 2
        assert link.relay.num_accepted == 1

    with linked(LinkTiming()) as link:
        run(link, scenario)


def test_a_delay_longer_than_the_heartbeats_timeout_ends_in_the_answer_once_it_is_over() -> None:
    async def scenario(link: Link) -> None:
        link.relay.delay(2.0)
        call = asyncio.ensure_future(link.call(2))
        await until(lambda: link.num_examined)
        link.relay.heal()
        assert await call == 2

    with linked() as link:
        run(link, scenario)


def test_a_connection_that_flaps_between_rounds_loses_no_worker() -> None:
    async def scenario(link: Link) -> None:
        for number in range(2, 12):
            accepted = link.relay.num_accepted
            link.relay.cut(reset=number % 2 == 0)
            await link.accepted_after(accepted)
            assert await link.call(number) == number
        assert link.silences == []

    with linked() as link:
        run(link, scenario)


def test_a_worker_found_stopped_behind_a_broken_connection_is_lost_at_once() -> None:
    async def scenario(link: Link) -> None:
        link.relay.partition()
        call = asyncio.ensure_future(link.call(2))
        await until(lambda: link.num_examined >= 2)
        assert not call.done(), "a running process is waited for"
        link.runs = False
        with pytest.raises(WorkerLost, match="silent"):
            await call
        assert len(link.silences) == 1

    with linked() as link:
        run(link, scenario)


def test_clients_are_admitted_while_a_worker_is_busy_longer_than_a_handshake_may_take() -> None:
    """Weights take minutes to load: the worker must neither count as silent nor be dropped."""

    async def scenario(link: Link) -> None:
        call = await lose_nothing(link)
        link.relay.half_open()
        await until(lambda: link.num_examined)
        link.relay.heal()
        await until(lambda: link.client.is_connected)
        await asyncio.sleep(FAST.handshake)
        assert link.client.is_connected
        link.worker.may_answer.set()
        assert await call == 2

    with linked() as link:
        run(link, scenario)


def test_a_repeat_by_a_client_with_another_key_is_not_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(link: Link) -> None:
        assert await link.call(2) == 2
        forged = Client(KeyPair.generate(), link.relay.through(link.address), timing=FAST)

        async def answer() -> object:
            # a socket that was refused takes no messages for a moment
            return await forged.call(verify(2), SECONDS)

        answered = asyncio.ensure_future(answer())
        await until(lambda: "with another key" in caplog.text)
        forged.close()
        with pytest.raises(WorkerLost):
            await answered
        assert await link.call(3) == 3

    with linked() as link:
        run(link, scenario)
