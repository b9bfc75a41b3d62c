"""Damaged frames over a real link, from a peer that has its key."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from specserve.cluster.transport.endpoint import KeyPair
from specserve.cluster.transport.link import Server
from specserve.wire.messages import PreparedProposals, pack
from tests.chaos.fuzz.frames import fuzzed_frames
from tests.chaos.fuzz.outcome import PATIENCE_S, FuzzOutcome, measure, wait_until

MAX_AHEAD = 64  # frames sent before the next one waits for the receiver


def fuzz_links(count: int, seed: int = 1) -> FuzzOutcome:
    """Send frames over a real socket from a faulty peer that has the key.

    Every so often a good message must still arrive.
    """
    frames, number = fuzzed_frames(random.Random(seed)), 0
    with _linked() as (peer, received):

        def send_one() -> str:
            nonlocal number
            number += 1
            peer.send_multipart(next(frames))
            if number % MAX_AHEAD:
                return "sent"
            peer.send_multipart(pack(PreparedProposals(number, ())))
            wait_until(lambda: received[-1:] == [number], "a good message does not come through")
            return "sent, and a good one behind it came through"

        return measure("wire frames, over an encrypted link", count, send_one)


@contextmanager
def _linked() -> Iterator[tuple[zmq.Socket[bytes], list[int]]]:
    """Yield a peer's bare socket, and the number of the last good message that a worker received.

    A good message has no proposals. It is no round, since a damaged number may be higher than all
    that follow, and a worker ignores rounds that are older than the last.
    """
    keys, ended = KeyPair.generate(), threading.Event()
    received: list[int] = []
    server = Server(KeyPair.generate(), "127.0.0.1", keys.public)

    def serve() -> None:
        while not ended.is_set():
            message = server.receive(0.1)
            if isinstance(message, PreparedProposals) and not message.prepared_proposals:
                received[:] = [message.number]
        server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.CURVE_PUBLICKEY, keys.public),
        (zmq.CURVE_SECRETKEY, keys.secret),
    ):
        peer.set(option, value)
    peer.set(zmq.CURVE_SERVERKEY, server.address.public)
    peer.connect(server.address.endpoint)
    try:
        yield peer, received
    finally:
        peer.close()
        context.term()
        ended.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
