"""A gateway that dies or stops must be noticed soon, and one that is cut off for a moment must not.

The receivers are processes of their own, as gateways are.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import uvloop

from specserve.cluster.transport.chunk_stream import SENDER_TIMING, ChunkReceiver, ChunkSender
from specserve.cluster.transport.connection_watch import AwayTimes
from specserve.cluster.transport.endpoint import Address, KeyPair
from tests.support.forks import forks
from tests.support.relay import Relay

HOST = "127.0.0.1"
SECONDS = 20
ENGINE = KeyPair.generate()
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def receive_forever(pipe: Connection, engine_key: bytes) -> None:
    receiver = ChunkReceiver(HOST)
    receiver.admit([engine_key])
    pipe.send(receiver.address)

    async def main() -> None:
        while True:
            await receiver.receive()

    asyncio.run(main())


@contextmanager
def gateway() -> Iterator[tuple[int, Address]]:
    """Start a process with a receiver; yield its id and address."""
    context = forks()
    ours, theirs = context.Pipe()
    process = context.Process(target=receive_forever, args=(theirs, ENGINE.public), daemon=True)
    process.start()
    assert process.pid is not None
    yield process.pid, ours.recv()
    process.kill()
    process.join()


def run(main: Coroutine[Any, Any, None], loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(main, SECONDS))


def use_away_times(monkeypatch: pytest.MonkeyPatch, *, first: float = SECONDS) -> None:
    """Let watches wait as long as the tests do, or `first` seconds for the first connection."""
    monkeypatch.setattr(
        "specserve.cluster.transport.connection_watch.AwayTimes",
        lambda: AwayTimes(local=SECONDS, remote=SECONDS, first=first),
    )


async def connected(sender: ChunkSender) -> None:
    assert sender._watch is not None
    while sender._watch._deadline is not None:
        await asyncio.sleep(0.01)


@LOOPS
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_gateway_that_is_killed_or_stopped_is_reported(
    sent: signal.Signals, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        gone = asyncio.Event()
        sender = ChunkSender(address, ENGINE, on_gone=gone.set)
        await connected(sender)
        os.kill(pid, sent)
        await gone.wait()
        sender.close()

    with gateway() as (pid, address):
        run(main(), loop)


@LOOPS
def test_a_gateway_is_reported_whose_host_accepts_connections_and_closes_them(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main(address: Address, relay: Relay) -> None:
        gone = asyncio.Event()
        sender = ChunkSender(relay.through(address), ENGINE, on_gone=gone.set)
        await connected(sender)
        os.kill(pid, signal.SIGKILL)
        await gone.wait()
        sender.close()

    with gateway() as (pid, address):
        relay = Relay.to(address)
        try:
            run(main(address, relay), loop)
        finally:
            relay.close()


@LOOPS
def test_a_gateway_that_is_cut_off_is_reported(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main(address: Address, relay: Relay) -> None:
        gone = asyncio.Event()
        sender = ChunkSender(relay.through(address), ENGINE, on_gone=gone.set)
        await connected(sender)
        relay.partition()
        await gone.wait()
        sender.close()

    with gateway() as (_, address):
        relay = Relay.to(address)
        try:
            run(main(address, relay), loop)
        finally:
            relay.close()


def test_a_silent_gateway_counts_as_gone_within_the_two_seconds_that_are_promised() -> None:
    """The sums of the settings: measured times are in docs/measurements/reliability.md."""
    timing, away = SENDER_TIMING, AwayTimes()
    assert timing.heartbeat_interval + timing.heartbeat_timeout + away.remote <= 1.65
    assert timing.local_heartbeat_interval + timing.local_heartbeat_timeout + away.local <= 1.75


def test_a_lost_attempt_to_connect_again_makes_no_gateway_gone() -> None:
    """Each wait between two attempts is at most twice `reconnect`."""
    timing, local_round_trip_s = SENDER_TIMING, 0.01
    longest = 2 * timing.reconnect + timing.connect + 2 * timing.reconnect + 4 * local_round_trip_s
    assert longest < AwayTimes().remote


@LOOPS
def test_a_gateway_that_was_never_reached_is_reported(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_away_times(monkeypatch, first=0.2)  # no other time may be the one that ends
    receiver = ChunkReceiver(HOST)
    receiver.close()

    async def main() -> None:
        gone = asyncio.Event()
        sender = ChunkSender(receiver.address, ENGINE, on_gone=gone.set)
        await gone.wait()
        sender.close()

    run(main(), loop)


@LOOPS
def test_a_connection_that_is_cut_and_comes_back_reports_nothing(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy the machine is: only a peer that stays away would be reported.
    use_away_times(monkeypatch)

    async def main(address: Address, relay: Relay) -> None:
        gone = asyncio.Event()
        sender = ChunkSender(relay.through(address), ENGINE, on_gone=gone.set)
        await connected(sender)
        for reset in (True, False):
            accepted = relay.num_accepted
            relay.cut(reset=reset)
            while relay.num_accepted == accepted:
                await asyncio.sleep(0.01)
            await connected(sender)
        assert not gone.is_set()
        sender.close()

    with gateway() as (_, address):
        relay = Relay.to(address)
        try:
            run(main(address, relay), loop)
        finally:
            relay.close()


def test_a_reconnection_that_a_busy_loop_has_not_read_yet_counts() -> None:
    async def main() -> None:
        gone = asyncio.Event()
        sender = ChunkSender(address, ENGINE, on_gone=gone.set)
        watch = sender._watch
        assert watch is not None
        # The first connection is made by ZeroMQ's thread; a loop that never reads its events would
        # find a deadline that has passed.
        asyncio.get_running_loop().remove_reader(watch._monitor.FD)
        while not watch._monitor.poll(10):
            await asyncio.sleep(0.01)
        watch._on_deadline()
        assert not gone.is_set()
        sender.close()

    with gateway() as (_, address):
        run(main(), asyncio.new_event_loop)
