"""Links over real sockets: authentication, lost workers, malformed messages, and clean closing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import multiprocessing
import os
import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import psutil
import pytest
import uvloop
import zmq
from ray import cloudpickle

from specserve.cluster.engine.process_state import process_runs
from specserve.cluster.transport.chunk_stream import ChunkReceiver, ChunkSender, ReceivedChunks
from specserve.cluster.transport.endpoint import Address, KeyPair, LinkTiming
from specserve.cluster.transport.link import RECONNECT_GRACE_S, Client, Server
from specserve.errors import OutOfPages, VersionMismatch, WorkerLost
from specserve.types import (
    Chunk,
    Origin,
    Policy,
    Proposal,
    SparseDistribution,
    Verdict,
    VerifyStep,
    Warp,
)
from specserve.wire.messages import (
    Chunks,
    Failure,
    Message,
    Proposals,
    Propose,
    Stop,
    Verdicts,
    Verify,
    pack,
    unpack,
)
from specserve.wire.version import VERSION
from tests.support.forks import forks

HOST = "127.0.0.1"
SECONDS = 20  # until a test that hangs is given up


def later(condition: Callable[[], object]) -> bool:
    """Wait until the condition is true; return False if it is not within SECONDS."""
    until = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return bool(condition())


def num_sockets() -> int:
    return len(psutil.Process().net_connections())


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail if a socket, descriptor or thread outlives a link, ZeroMQ's own threads included."""
    process = psutil.Process()
    # Each of these opens something once, which must be open before the count.
    zmq.Context().term()
    uvloop.new_event_loop().close()
    resource_tracker.ensure_running()
    forks()
    before = process.num_threads(), process.num_fds(), num_sockets()
    yield
    assert later(lambda: process.num_threads() <= before[0]), threading.enumerate()
    assert later(lambda: (process.num_fds(), num_sockets()) <= before[1:])


Round = Propose | Verify


def number_of(message: Message | None) -> int:
    """Return the round of a message that belongs to one."""
    assert isinstance(message, (Propose, Proposals, Verify, Verdicts))
    return message.number


def answer(message: Message) -> Message:
    assert isinstance(message, (Verify, Propose))
    if isinstance(message, Propose):
        return Proposals(message.number, (), seconds=0.5, pages_used=len(message.steps))
    return Verdicts(
        message.number,
        tuple(Verdict(step.seq_id, 0, 1, None) for step in message.steps),
        seconds=0.5,
        pages_used=1,
    )


def serve(server: Server, respond: Callable[[Round], Message | None] = answer) -> None:
    """Answer messages as a worker does; if `respond` returns None, no answer is sent."""
    while not isinstance(message := server.receive(SECONDS), (Stop, type(None))):
        assert isinstance(message, (Propose, Verify))
        response = respond(message)
        if response is not None:
            server.send(response)
    server.close()


@contextmanager
def worker(
    server: Server, respond: Callable[[Round], Message | None] = answer
) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=serve, args=(server, respond))
    thread.start()
    try:
        yield thread
    finally:
        thread.join(SECONDS)
        assert not thread.is_alive()


def pair() -> tuple[Server, Client]:
    keys = KeyPair.generate()
    server = Server(KeyPair.generate(), HOST, keys.public)
    return server, Client(keys, server.address)


async def finish(client: Client, thread: threading.Thread) -> None:
    client.post(Stop())
    await asyncio.to_thread(thread.join, SECONDS)
    client.close()


def run(
    main: Awaitable[None], *, loop: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> None:
    async def limited() -> None:
        async with asyncio.timeout(SECONDS):
            await main

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(limited())


def verify(number: int, *, num_steps: int = 3) -> Verify:
    rng = np.random.default_rng(number)
    q = SparseDistribution(rng.integers(0, 99, (2, 64)), rng.random((2, 64), dtype=np.float32))
    return Verify(
        number,
        tuple(
            VerifyStep(i, 7, (1,), (2, 3), q, Policy(Warp(), "block", 5, 7))
            for i in range(num_steps)
        ),
        (8,),
    )


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_each_call_gets_its_own_answer(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    server, client = pair()
    asked: list[Round] = []

    def respond(message: Round) -> Message:
        asked.append(message)
        return answer(message)

    async def main(thread: threading.Thread) -> None:
        for number in range(300):
            got = await client.call(verify(number, num_steps=number % 40), SECONDS)
            assert isinstance(got, Verdicts)
            assert (got.number, len(got.verdicts)) == (number, number % 40)
        assert isinstance(await client.call(Propose(300, math.inf, ()), SECONDS), Proposals)
        await finish(client, thread)

    with worker(server, respond) as thread:
        run(main(thread), loop=loop)
    assert [message.number for message in asked] == list(range(301))
    assert isinstance(asked[7], Verify)
    received, sent = asked[7].steps[6].q, verify(7).steps[0].q
    assert received is not None
    assert sent is not None
    assert received.probs.tobytes() == sent.probs.tobytes()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_coordinator_has_calls_to_many_workers_under_way_at_once(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    pairs = [pair() for _ in range(3)]

    async def main(threads: list[threading.Thread]) -> None:
        for number in range(50):
            answers = await asyncio.gather(
                *(client.call(verify(number), SECONDS) for _, client in pairs)
            )
            assert [number_of(each) for each in answers] == [number] * 3
        for (_, client), thread in zip(pairs, threads, strict=True):
            await finish(client, thread)

    with worker(pairs[0][0]) as one, worker(pairs[1][0]) as two, worker(pairs[2][0]) as three:
        run(main([one, two, three]), loop=loop)


def test_messages_of_megabytes_pass() -> None:
    server, client = pair()
    prompt = tuple(range(300_000))

    async def main(thread: threading.Thread) -> None:
        step = VerifyStep(1, 0, prompt, (), None, Policy(Warp(), "block", 5, len(prompt)))
        assert number_of(await client.call(Verify(1, (step,)), SECONDS)) == 1
        await finish(client, thread)

    def respond(message: Round) -> Message:
        assert message.steps[0].tokens == prompt
        return answer(message)

    with worker(server, respond) as thread:
        run(main(thread))


def test_a_late_answer_to_an_earlier_round_is_dropped() -> None:
    server, client = pair()

    def respond(message: Round) -> Message | None:
        if message.number == 2:  # round 1 is answered only now
            server.send(answer(verify(1)))
        return None if message.number == 1 else answer(message)

    async def main(thread: threading.Thread) -> None:
        with pytest.raises(WorkerLost):
            await client.call(verify(1), 0.05)
        for number in (2, 3):
            assert number_of(await client.call(verify(number), SECONDS)) == number
        await finish(client, thread)

    with worker(server, respond) as thread:
        run(main(thread))


def test_a_worker_that_does_not_answer_is_lost_at_the_deadline_and_not_later() -> None:
    server, client = pair()

    async def main(thread: threading.Thread) -> None:
        begun = time.monotonic()
        with pytest.raises(WorkerLost, match=r"127\.0\.0\.1:\d+ has not answered within 0.2 s"):
            await client.call(verify(1), 0.2)
        assert 0.19 < time.monotonic() - begun < SECONDS
        await finish(client, thread)

    with worker(server, lambda message: None) as thread:
        run(main(thread))


def test_an_answer_that_a_busy_loop_finds_with_the_deadline_is_not_late() -> None:
    server, client = pair()

    async def main(thread: threading.Thread) -> None:
        await client.call(verify(1), SECONDS)  # both ends are connected
        call = asyncio.ensure_future(client.call(verify(2), 0.01))
        assert later(lambda: server._conversation.has_answered(2))
        time.sleep(0.1)  # the loop stands still, and finds both at once
        assert number_of(await call) == 2
        assert not client.is_late, "a drafter that is late is not asked before it answers"
        await finish(client, thread)

    with worker(server) as thread:
        run(main(thread))


def test_a_worker_that_fails_raises_at_the_coordinator_what_it_raised() -> None:
    server, client = pair()
    errors = {1: OutOfPages("no room"), 2: ZeroDivisionError("by zero")}

    async def main(thread: threading.Thread) -> None:
        with pytest.raises(OutOfPages, match="no room"):
            await client.call(verify(1), SECONDS)
        with pytest.raises(WorkerLost, match="ZeroDivisionError: by zero"):
            await client.call(verify(2), SECONDS)
        assert number_of(await client.call(verify(3), SECONDS)) == 3
        await finish(client, thread)

    with worker(
        server,
        lambda message: (
            Failure.from_error(message.number, errors[message.number])
            if message.number in errors
            else answer(message)
        ),
    ) as thread:
        run(main(thread))


def die(connection: Any, client_key: bytes) -> None:
    server = Server(KeyPair.generate(), HOST, client_key)
    connection.send(server.address)
    message = server.receive(SECONDS)
    assert isinstance(message, Verify)
    server.send(answer(message))
    server.receive(SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_in_a_round_leaves_the_coordinator_a_deadline_and_nothing_else() -> None:
    keys = KeyPair.generate()
    ours, theirs = multiprocessing.Pipe()
    process = forks().Process(target=die, args=(theirs, keys.public))
    process.start()
    client = Client(keys, ours.recv())

    async def main() -> None:
        assert number_of(await client.call(verify(1), SECONDS)) == 1
        with pytest.raises(WorkerLost):
            await client.call(verify(2), 0.5)
        await asyncio.to_thread(process.join, SECONDS)
        with pytest.raises(WorkerLost):
            await client.call(verify(3), 0.1)
        client.close()

    run(main())
    for each in (ours, theirs, process):
        each.close()


def answer_all(pipe: Any, client_key: bytes) -> None:
    server = Server(KeyPair.generate(), "127.0.0.1", client_key)
    pipe.send(server.address)
    while True:
        message = server.receive()
        assert isinstance(message, (Propose, Verify))
        time.sleep(3.0 if message.number == 2 else 0.0)
        server.send(Verdicts(message.number, (), 0.0, 0))


@pytest.mark.parametrize("ipc_name", [True, False], ids=["ipc", "tcp"])
def test_a_stopped_worker_is_noticed_within_five_seconds_and_a_busy_one_is_not_lost(
    ipc_name: bool,
) -> None:
    keys = KeyPair.generate()
    ours, theirs = multiprocessing.Pipe()
    process = forks().Process(target=answer_all, args=(theirs, keys.public))
    process.start()
    address = ours.recv()
    client = Client(keys, address if ipc_name else replace(address, ipc_name=""))
    silences: list[WorkerLost] = []

    async def main() -> None:
        client.on_silence = silences.append
        assert number_of(await client.call(verify(1), SECONDS)) == 1
        assert number_of(await client.call(verify(2), SECONDS)) == 2, (
            "a long pass was taken for a death"
        )
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="silent"):  # not by the call's own deadline
            await client.call(verify(3), SECONDS)
        client.close()

    run(main())
    assert len(silences) == 1
    timing = LinkTiming()
    assert timing.heartbeat_interval + timing.heartbeat_timeout + RECONNECT_GRACE_S < 5
    process.kill()
    process.join()
    for each in (ours, theirs, process):
        each.close()


def load_for_ever(pipe: Any, client_key: bytes) -> None:
    server = Server(KeyPair.generate(), HOST, client_key)
    pipe.send(server.address)
    time.sleep(3600)


def test_a_worker_stopped_while_it_loads_is_noticed_within_five_seconds() -> None:
    keys = KeyPair.generate()
    ours, theirs = multiprocessing.Pipe()
    process = forks().Process(target=load_for_ever, args=(theirs, keys.public))
    process.start()
    address = ours.recv()
    assert process.pid is not None
    pid = process.pid

    async def is_running() -> bool | None:
        return process_runs(pid)

    async def main() -> None:
        client = Client(keys, replace(address, ipc_name=""), is_running=is_running)
        silence = asyncio.get_running_loop().create_future()
        client.on_silence = silence.set_result
        client.listen()
        while not client.is_connected:
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(5):
            assert "silent" in str(await silence)
        client.close()

    run(main())
    process.kill()
    process.join()
    for each in (ours, theirs, process):
        each.close()


def test_fail_ends_the_call_under_way_and_all_later_ones() -> None:
    server, client = pair()

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.05, client.fail, WorkerLost("it was killed"))
        for _ in range(2):
            with pytest.raises(WorkerLost, match="it was killed"):
                await client.call(verify(1), SECONDS)
        client.close()

    run(main())
    server.close()


def test_closing_a_client_ends_its_call() -> None:
    server, client = pair()

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.05, client.close)
        with pytest.raises(WorkerLost, match="closed"):
            await client.call(verify(1), SECONDS)

    run(main())
    server.close()


def test_a_cancelled_call_leaves_the_client_usable() -> None:
    server, client = pair()

    async def main(thread: threading.Thread) -> None:
        call = asyncio.ensure_future(client.call(verify(1), SECONDS))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert number_of(await client.call(verify(2), SECONDS)) == 2
        await finish(client, thread)

    # The first call is not answered: an answer might come before it is cancelled.
    with worker(server, lambda message: None if message.number == 1 else answer(message)) as thread:
        run(main(thread))


def test_a_server_waits_no_longer_than_asked_and_says_when_something_is_there() -> None:
    server, client = pair()
    begun = time.monotonic()
    assert server.receive(0.1) is None
    assert 0.09 < time.monotonic() - begun < SECONDS
    assert server.receive(0.0) is None
    assert not server.has_message()
    client.post(verify(1))
    assert number_of(server.receive(SECONDS)) == 1
    client.post(verify(2))
    assert later(server.has_message)
    assert number_of(server.receive(0.0)) == 2
    assert not server.has_message()
    client.close()
    server.close()


def unauthenticated_peer(
    context: zmq.Context[Any],
    address: Address,
    *,
    client: KeyPair | None,
    server: bytes,
    kind: int = zmq.DEALER,
) -> Any:
    """Return a socket that connects to the address with these keys, or without any."""
    peer = context.socket(kind)
    peer.set(zmq.LINGER, 0)
    if client is not None:
        peer.set(zmq.CURVE_SERVERKEY, server)
        peer.set(zmq.CURVE_PUBLICKEY, client.public)
        peer.set(zmq.CURVE_SECRETKEY, client.secret)
    peer.connect(address.endpoint)
    return peer


@pytest.mark.parametrize("secret", ["wrong key", "no key", "wrong server", "http"])
def test_peers_without_the_right_key_are_refused_and_logged_and_the_worker_goes_on(
    secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server, client = pair()
    asked: list[int] = []
    context: zmq.Context[Any] = zmq.Context()
    if secret == "http":
        peer: Any = socket.create_connection((HOST, server.address.port))
        peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(200))
    else:
        wrong = KeyPair.generate()
        peer_keys = None if secret == "no key" else wrong
        peer = unauthenticated_peer(
            context,
            server.address,
            client=peer_keys,
            server=wrong.public if secret == "wrong server" else server.address.public,
        )
        with contextlib.suppress(zmq.Again):  # it is refused already, and takes no message
            peer.send_multipart(pack(verify(99)), zmq.NOBLOCK)

    def respond(message: Round) -> Message:
        asked.append(message.number)
        return answer(message)

    async def main(thread: threading.Thread) -> None:
        for number in range(20):
            assert number_of(await client.call(verify(number), SECONDS)) == number
            await asyncio.sleep(0.01)
        # ZeroMQ hangs up on HTTP by itself, without an event.
        assert secret == "http" or await asyncio.to_thread(later, lambda: "refused" in caplog.text)
        await finish(client, thread)

    with worker(server, respond) as thread:
        run(main(thread))
    assert asked == list(range(20))
    assert ("with another key" in caplog.text) == (secret == "wrong key")
    # The peer keeps retrying, but refusals are logged once a second.
    assert len([record for record in caplog.records if "refused" in record.message]) < 20
    peer.close()
    context.term()


def test_a_refusal_is_logged_although_another_one_was_just_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, client = pair()
    context: zmq.Context[Any] = zmq.Context()
    address = server.address
    peers = [unauthenticated_peer(context, address, client=None, server=b"")]
    assert later(lambda: "refused" in caplog.text)
    wrong = KeyPair.generate()
    peers.append(unauthenticated_peer(context, address, client=wrong, server=address.public))
    assert later(lambda: "with another key" in caplog.text)
    for each in (*peers, client, server):
        each.close()
    context.term()


def test_malformed_and_foreign_frames_of_the_admitted_are_logged_and_the_worker_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = KeyPair.generate()
    server = Server(KeyPair.generate(), HOST, keys.public)
    context: zmq.Context[Any] = zmq.Context()
    peer = unauthenticated_peer(context, server.address, client=keys, server=server.address.public)
    good = [bytes(frame) for frame in pack(verify(5))]
    bad = [
        [b""],
        [b"hello"],
        [bytes(1000)] * 3,
        [good[0]],
        [good[0][:-1], good[1]],
        [good[0], good[1][:-8]],
        [*good, b""],
    ]
    for frames in bad:
        peer.send_multipart(frames)
    peer.send_multipart(good)
    message = server.receive(SECONDS)
    assert isinstance(message, Verify)
    assert message.number == 5
    assert len(caplog.records) == len(bad)
    peer.close()
    context.term()
    server.close()


def test_garbage_from_a_worker_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    server, client = pair()

    def respond(message: Round) -> Message:
        server._socket.send_multipart([server._conversation.peer, b"garbage"])
        server.send(Stop())  # well-formed, but no answer
        return answer(message)

    async def main(thread: threading.Thread) -> None:
        assert number_of(await client.call(verify(1), SECONDS)) == 1
        await finish(client, thread)

    with worker(server, respond) as thread:
        run(main(thread))
    assert "ignored" in caplog.text


def test_a_coordinator_that_reconnects_is_answered_on_its_new_connection() -> None:
    keys = KeyPair.generate()
    server = Server(KeyPair.generate(), HOST, keys.public)

    async def main(thread: threading.Thread) -> None:
        first, second = Client(keys, server.address), Client(keys, server.address)
        for number in range(10):
            for client in (first, second):
                assert number_of(await client.call(verify(number), SECONDS)) == number
        first.close()
        assert number_of(await second.call(verify(99), SECONDS)) == 99
        await finish(second, thread)

    with worker(server) as thread:
        run(main(thread))


def chunks(engine: int, number: int) -> Chunks:
    return Chunks((Chunk(engine, number, (number,), (Origin.PLAIN,)),))


def received(engine: KeyPair, number: int) -> ReceivedChunks:
    return ReceivedChunks(engine.public, chunks(0, number).chunks)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_chunks_of_two_engines_arrive_complete_and_each_in_order(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    receiver = ChunkReceiver(HOST)
    engine_keys = [KeyPair.generate() for _ in range(2)]
    receiver.admit([keys.public for keys in engine_keys])
    senders = [ChunkSender(receiver.address, keys) for keys in engine_keys]

    async def main() -> None:
        got: dict[int, list[int]] = {0: [], 1: []}
        for start in range(0, 2000, 100):
            for number in range(start, start + 100):
                for engine, sender in enumerate(senders):
                    sender.send(chunks(engine, number))
            await asyncio.sleep(0)
        while sum(map(len, got.values())) < 4000:
            message = await receiver.receive()
            (chunk,) = message.chunks
            assert message.engine == engine_keys[chunk.seq_id].public
            got[chunk.seq_id] += chunk.tokens
        assert got == {0: list(range(2000)), 1: list(range(2000))}
        receiver.close()

    run(main(), loop=loop)
    for sender in senders:
        sender.close()


def test_what_an_engine_sent_before_it_closed_still_arrives() -> None:
    receiver, keys = ChunkReceiver(HOST), KeyPair.generate()
    receiver.admit([keys.public])

    async def main() -> None:
        sender = ChunkSender(receiver.address, keys)
        for number in range(100):
            sender.send(chunks(0, number))
        sender.close()
        assert [(await receiver.receive()).chunks[0].tokens[0] for _ in range(100)] == list(
            range(100)
        )
        receiver.close()

    run(main())


def test_a_chunk_receiver_admits_the_keys_that_it_was_given_and_survives_garbage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    receiver, keys, peer_keys = ChunkReceiver(HOST), KeyPair.generate(), KeyPair.generate()
    receiver.admit([keys.public, peer_keys.public])
    sender, forged = (
        ChunkSender(receiver.address, keys),
        ChunkSender(receiver.address, KeyPair.generate()),
    )
    context: zmq.Context[Any] = zmq.Context()
    peer = unauthenticated_peer(
        context,
        receiver.address,
        client=peer_keys,
        server=receiver.address.public,
        kind=zmq.PUSH,
    )

    async def main() -> None:
        forged.send(chunks(0, 666))
        peer.send(b"garbage")
        peer.send_multipart(pack(verify(1)))  # well-formed, but not for a chunk receiver
        peer.send_multipart(pack(chunks(0, 1)))
        assert await receiver.receive() == received(peer_keys, 1)
        sender.send(chunks(0, 2))
        assert await receiver.receive() == received(keys, 2)
        while "with another key" not in caplog.text:
            await asyncio.sleep(0.01)
        receiver.close()

    run(main())
    assert "ignored" in caplog.text
    for each in (sender, forged):
        each.close()
    peer.close()
    context.term()


def test_an_engine_whose_key_is_not_known_yet_waits_until_it_is_admitted() -> None:
    receiver, keys = ChunkReceiver(HOST), KeyPair.generate()
    num_asked = 0

    def look_up() -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:  # the first connection waits in vain, and the engine tries again
            receiver.admit([keys.public])

    async def main() -> None:
        receiver.on_unknown_engine = look_up
        sender = ChunkSender(receiver.address, keys)
        sender.send(chunks(0, 1))
        assert await receiver.receive() == received(keys, 1)
        sender.close()
        receiver.close()

    run(main())
    assert num_asked == 2


def test_an_engine_that_is_gone_is_no_longer_believed_although_its_connection_stays() -> None:
    receiver, kept, gone = ChunkReceiver(HOST), KeyPair.generate(), KeyPair.generate()
    receiver.admit([kept.public, gone.public])

    async def main() -> None:
        senders = {keys.public: ChunkSender(receiver.address, keys) for keys in (kept, gone)}
        for number, keys in enumerate((gone, kept)):
            senders[keys.public].send(chunks(0, number))
            assert await receiver.receive() == received(keys, number)
        asked = asyncio.Event()
        receiver.on_unknown_engine = asked.set
        receiver.admit([kept.public])
        senders[gone.public].send(chunks(0, 7))
        await asked.wait()
        senders[kept.public].send(chunks(0, 8))
        assert await receiver.receive() == received(kept, 8)
        receiver.admit([kept.public, gone.public])
        senders[gone.public].send(chunks(0, 9))
        assert await receiver.receive() == received(gone, 9)
        for sender in senders.values():
            sender.close()
        receiver.close()

    run(main())


def test_a_chunk_sender_never_blocks_and_logs_once_that_it_drops(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve.cluster.transport.chunk_stream.SENDER_HIGH_WATER_MARK", 50)
    receiver = ChunkReceiver(HOST)
    receiver.close()
    sender = ChunkSender(receiver.address, KeyPair.generate())
    begun = time.monotonic()
    for number in range(100):
        sender.send(chunks(0, number))
    sender.close()
    assert time.monotonic() - begun < 30, "a send that blocks would never return"
    assert len([record for record in caplog.records if "takes no messages" in record.message]) == 1


def sender_process(pipe: Any, address: Address) -> None:
    keys = KeyPair.generate()
    pipe.send(keys.public)
    sender = ChunkSender(address, keys)
    sender.send(chunks(0, 7))
    sender.close()


def test_an_engine_in_another_process_needs_an_address_and_sends_back_a_public_key() -> None:
    receiver, (ours, theirs) = ChunkReceiver(HOST), multiprocessing.Pipe()
    process = forks().Process(target=sender_process, args=(theirs, receiver.address))
    process.start()
    public: bytes = ours.recv()
    receiver.admit([public])

    async def main() -> None:
        assert await receiver.receive() == ReceivedChunks(public, chunks(0, 7).chunks)
        receiver.close()

    run(main())
    process.join(SECONDS)
    assert process.exitcode == 0
    process.close()


def test_addresses_can_be_sent_to_other_processes_and_secret_keys_cannot() -> None:
    keys = KeyPair.generate()
    address = Address("::1", 5, keys.public)
    assert pickle.loads(pickle.dumps(address)) == address
    assert hash(pickle.loads(pickle.dumps(address))) == hash(address)
    assert address.endpoint == "tcp://[::1]:5"
    assert Address(HOST, 5, b"").endpoint == "tcp://127.0.0.1:5"
    for dumps in (pickle.dumps, cloudpickle.dumps):
        with pytest.raises(TypeError, match="secret key"):
            dumps(keys)
    assert keys.secret.decode() not in repr(keys)


OTHER_VERSION = [msgpack.packb((b"specserve", VERSION + 1, "Verdicts", {"other": "shape"}))]
BOTH_VERSIONS = rf"version {VERSION + 1}\b.* version {VERSION}\b"
LONG_S = 600.0  # a deadline that no test waits for


def test_an_answer_of_another_version_fails_its_call_at_once_and_the_worker_is_lost() -> None:
    server, client = pair()
    losses: list[WorkerLost] = []
    client.on_silence = losses.append

    def respond(message: Round) -> None:
        server._socket.send_multipart([server._conversation.peer, *OTHER_VERSION])

    async def main(thread: threading.Thread) -> None:
        for _ in range(2):
            with pytest.raises(WorkerLost, match=BOTH_VERSIONS):
                await client.call(verify(1), LONG_S)
        assert len(losses) == 1
        await finish(client, thread)

    with worker(server, respond) as thread:
        run(main(thread))


def test_a_message_of_another_version_is_answered_at_once_with_this_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = KeyPair.generate()
    server = Server(KeyPair.generate(), HOST, keys.public)
    context: zmq.Context[Any] = zmq.Context()
    peer = unauthenticated_peer(context, server.address, client=keys, server=server.address.public)
    peer.send_multipart(OTHER_VERSION)
    assert later(lambda: server.receive(0.05) is None and peer.poll(0))
    answer = unpack(peer.recv_multipart())
    assert isinstance(answer, Failure)
    assert re.search(BOTH_VERSIONS, answer.message)
    assert re.search(BOTH_VERSIONS, caplog.text)
    peer.send_multipart(pack(verify(5)))
    assert number_of(server.receive(SECONDS)) == 5
    peer.close()
    context.term()
    server.close()


@pytest.mark.parametrize("end", [Client, ChunkSender])
def test_nothing_connects_to_a_process_of_another_release(end: type[Any]) -> None:
    keys = KeyPair.generate()
    theirs = replace(Address(HOST, 5, keys.public), version=VERSION + 1, release="9.9")
    arguments = (keys, theirs) if end is Client else (theirs, keys)
    with pytest.raises(VersionMismatch, match=rf"\(specserve 9\.9\).* version {VERSION}\b"):
        end(*arguments)


def test_what_passes_over_a_link_cannot_be_read_on_the_way() -> None:
    """Check the bytes on the wire, as a relay in the middle sees them."""
    keys = KeyPair.generate()
    server = Server(KeyPair.generate(), HOST, keys.public)
    seen = bytearray()
    with socket.create_server((HOST, 0)) as relay:
        client = Client(keys, Address(HOST, relay.getsockname()[1], server.address.public))
        client_side, _ = relay.accept()
    server_side = socket.create_connection((HOST, server.address.port))

    def forward(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(65536):
            seen.extend(data)
            sink.sendall(data)
        with contextlib.suppress(OSError):  # the other direction has ended first
            sink.shutdown(socket.SHUT_WR)

    threads = [
        threading.Thread(target=forward, args=ends)
        for ends in ((client_side, server_side), (server_side, client_side))
    ]
    for thread in threads:
        thread.start()

    async def main(thread: threading.Thread) -> None:
        assert number_of(await client.call(verify(1), SECONDS)) == 1
        await finish(client, thread)

    with worker(server) as thread:
        run(main(thread))
    for each in threads:
        each.join(SECONDS)
    assert b"CURVE" in seen
    assert b"specserve" not in seen
    assert b"Verify" not in seen
    for end in (client_side, server_side):
        end.close()


def test_a_proposal_reaches_the_target_with_the_same_bits() -> None:
    server, client = pair()
    q = SparseDistribution(np.array([[5, 6]]), np.array([[0.1, 0.9]], dtype=np.float32))

    async def main(thread: threading.Thread) -> None:
        got = await client.call(Propose(1, 0.5, ()), SECONDS)
        assert isinstance(got, Proposals)
        back = got.proposals[0].q
        assert back is not None
        assert (back.ids.tolist(), back.probs.tobytes()) == ([[5, 6]], q.probs.tobytes())
        await finish(client, thread)

    with worker(
        server, lambda message: Proposals(message.number, (Proposal(1, 2, (5,), q, 3),), 0.0, 0)
    ) as thread:
        run(main(thread))
