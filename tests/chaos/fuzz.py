"""Fuzzing: damaged frames, decoded directly and over a real link, and damaged HTTP requests.

`python tests/chaos/fuzz.py` measures what docs/measurements/reliability.md shows;
tests/chaos/test_fuzz.py sends a little of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgpack  # type: ignore[import-untyped]
import numpy as np
import psutil
import zmq

from specserve.cluster.transport.endpoint import KeyPair
from specserve.cluster.transport.link import Server
from specserve.errors import BadFrame
from specserve.types import (
    Chunk,
    DraftStep,
    FinishReason,
    Logprobs,
    Origin,
    Policy,
    PreparedProposal,
    Proposal,
    Span,
    SparseDistribution,
    Stats,
    Verdict,
    VerifyStep,
    Warp,
)
from specserve.wire.messages import (
    Chunks,
    Failure,
    Message,
    PreparedProposals,
    Proposals,
    Propose,
    Stop,
    Verdicts,
    Verify,
    pack,
    unpack,
)
from specserve.wire.version import VERSION
from tests.support.http_server import FakeService, RunningServer, serving

Frames = list[bytes]

PATIENCE_S = 20.0  # an input that takes longer hangs
MAX_AHEAD = 64  # frames sent before the next one waits for the receiver
# Bytes with a meaning to msgpack: containers, lengths, extensions.
MSGPACK_BYTES = bytes.fromhex(
    "80 8f 90 9f c0 c1 c2 c4 c6 c7 c9 cb cf d4 d9 db dc dd de df ff 00 7f"
)


@dataclass(frozen=True, slots=True)
class FuzzOutcome:
    """Results of one kind of input."""

    input: str
    sent: int
    results: Counter[str]
    seconds: float
    slowest_ms: float
    grown_mb: float  # growth of this process after the first tenth

    @property
    def row(self) -> str:
        results = ", ".join(f"{count:,} {result}" for result, count in self.results.most_common())
        return (
            f"| {self.input} | {self.sent:,} | {results} | {self.seconds:.0f} s "
            f"| {self.slowest_ms:.1f} ms | {self.grown_mb:+.1f} MB |"
        )


TABLE_HEAD = "| input | sent | result | time | slowest | memory |\n|---|---|---|---|---|---|"


def messages() -> list[Message]:
    """Return one message of each kind, with all that a frame can hold."""
    rng = np.random.default_rng(0)
    q = SparseDistribution(rng.integers(0, 4000, (3, 8)), rng.random((3, 8), dtype=np.float32))
    policy = Policy(
        Warp(temperature=0.7, top_k=5, logit_bias=((3, 1.5), (9, -2.0))),
        "block",
        seed=2**64 - 1,
        prompt_length=9,
        logprobs=2,
    )
    proposal = Proposal(1, 12, (3, 4, 5), q, 12)
    logprobs = (Logprobs(-0.1, (1, 2), (-0.1, -2.5)),)
    return [
        Propose(1, 0.25, (DraftStep(1, 2, (3, 4), 5, policy),), (6, 7)),
        Proposals(1, (proposal,), 0.01, 12, (Span("draft", 0.1, 0.2),)),
        PreparedProposals(1, (PreparedProposal(8, proposal),)),
        Verify(1, (VerifyStep(1, 12, (5,), (3, 4, 5), q, policy, True, gamma=2),), (6,)),
        Verdicts(1, (Verdict(1, 1, 2, logprobs),), 0.1, 3, 4, 5, (Span("verify", 0.1, 0.2),)),
        Failure(1, "OutOfPages", "no room"),
        Chunks(
            (
                Chunk(
                    1,
                    7,
                    (2,),
                    (Origin.BONUS,),
                    logprobs,
                    FinishReason.ERROR,
                    Stats("block", True, 1, 2, 3, 4),
                    "fell over",
                ),
            )
        ),
        Stop(),
    ]


def fuzzed_frames(rng: random.Random) -> Iterator[Frames]:
    """Yield damaged messages without end.

    Bits are flipped, bytes replaced, parts cut out, repeated or exchanged between messages, and
    heads made of plausible pieces.
    """
    good = [[bytes(frame) for frame in pack(message)] for message in messages()]
    mutations: tuple[Callable[[random.Random, bytes, list[Frames]], bytes], ...] = (
        _flip,
        _replace,
        _cut,
        _repeat,
        _splice,
        _invent,
    )
    while True:
        frames = list(rng.choice(good))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at = rng.randrange(len(frames))
            frames[at] = rng.choice(mutations)(rng, frames[at], good)
        if rng.random() < 0.05:
            frames = (
                frames[:-1] or [b""]
                if rng.random() < 0.5
                else [*frames, rng.randbytes(rng.randrange(64))]
            )
        yield frames


def _flip(rng: random.Random, frame: bytes, good: list[Frames]) -> bytes:
    damaged = bytearray(frame or b"\0")
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _replace(rng: random.Random, frame: bytes, good: list[Frames]) -> bytes:
    damaged = bytearray(frame or b"\0")
    for _ in range(rng.randint(1, 3)):
        damaged[rng.randrange(len(damaged))] = rng.choice(MSGPACK_BYTES)
    return bytes(damaged)


def _cut(rng: random.Random, frame: bytes, good: list[Frames]) -> bytes:
    first, second = sorted((rng.randrange(len(frame) + 1), rng.randrange(len(frame) + 1)))
    return frame[:first] + frame[second:]


def _repeat(rng: random.Random, frame: bytes, good: list[Frames]) -> bytes:
    first, second = sorted((rng.randrange(len(frame) + 1), rng.randrange(len(frame) + 1)))
    return frame[:second] + frame[first:second] * rng.randint(1, 50) + frame[second:]


def _splice(rng: random.Random, frame: bytes, good: list[Frames]) -> bytes:
    other = rng.choice(rng.choice(good))
    return frame[: rng.randrange(len(frame) + 1)] + other[rng.randrange(len(other) + 1) :]


def _invent(rng: random.Random, frame: bytes, good: list[Frames]) -> bytes:
    kind = rng.choice(
        (
            "Propose",
            "Proposals",
            "PreparedProposals",
            "Verify",
            "Verdicts",
            "Failure",
            "Chunks",
            "Stop",
            "Gossip",
            "",
        )
    )
    rows = [_value(rng, 3) for _ in range(rng.randrange(4))]
    opening = (b"specserve", VERSION, kind, rng.choice((len(rows), 0, 2**63, -1)), _value(rng, 3))
    return b"".join(map(msgpack.packb, (opening, *rows)))


def _value(rng: random.Random, depth: int) -> object:
    plain = (
        None,
        True,
        0,
        -1,
        2**63,
        1.5,
        math.nan,
        "",
        "block",
        *map(bytes, (0, 8, 16, 24, 40)),
        rng.randbytes(rng.randrange(80)),
    )
    return (
        rng.choice(plain)
        if not depth or rng.random() < 0.5
        else tuple(_value(rng, depth - 1) for _ in range(rng.randrange(6)))
    )


def fuzz_reader(count: int, seed: int = 0) -> FuzzOutcome:
    """Decode frames with `unpack`. A message that it accepts must be one that can be packed."""
    frames = fuzzed_frames(random.Random(seed))

    def decode_one() -> str:
        try:
            message = unpack(next(frames))
        except BadFrame:
            return "refused"
        pack(message)
        return "read as messages"

    return _measure("wire frames, read", count, decode_one)


def fuzz_link(count: int, seed: int = 1) -> FuzzOutcome:
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
            _wait_until(lambda: received[-1:] == [number], "a good message does not come through")
            return "sent, and a good one behind it came through"

        return _measure("wire frames, over a link", count, send_one)


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


def fuzz_http(count: int, seed: int = 2) -> FuzzOutcome:
    """Send invalid requests, and bytes that are no requests, to the app under uvicorn.

    Afterwards it must answer as before.
    """
    rng = random.Random(seed)
    service = FakeService(output="x " * 20)
    with serving(service, config={"limits.max_body_bytes": 200_000}) as server:

        def send_one() -> str:
            if rng.random() < 0.2:
                return _send_bytes(server, _damaged_bytes(rng))
            return _send_request(server, rng)

        outcome = _measure("HTTP", count, send_one)
        assert server.ask("/health").status == 200
        assert server.until(lambda: server.service.num_live == 0)
    server_errors = {result for result in outcome.results if result.startswith("5")}
    assert not server_errors, server_errors
    return outcome


GOOD: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/tokenize": {"prompt": "some text"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
PARAMETERS = (
    *(
        "prompt",
        "messages",
        "tokens",
        "model",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "stop",
    ),
    *(
        "stop_token_ids",
        "ignore_eos",
        "seed",
        "logprobs",
        "top_logprobs",
        "echo",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ),
    *(
        "logit_bias",
        "response_format",
        "stream",
        "stream_options",
        "user",
        "speculation",
        "tools",
        "best_of",
        "metadata",
        "nonsense",
    ),
    *(
        "guided",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "tool_choice",
        "parallel_tool_calls",
    ),
)


WORDS = (
    "required",
    "json_object",
    "json_schema",
    "function",
    "object",
    "(a",
    "start: /a/",
    '{"type": "object"}',
)
MEMBERS = (
    *(
        "5",
        "gamma",
        "role",
        "content",
        "type",
        "text",
        "x" * 300,
        "json_schema",
        "schema",
        "properties",
        "enum",
        "$ref",
        "regex",
        "choice",
    ),
    *("function", "name", "parameters", "tool_calls", "arguments"),
)


def _send_request(server: RunningServer, rng: random.Random) -> str:
    path = rng.choice(list(GOOD))
    body = dict(GOOD[path]) | {
        rng.choice(PARAMETERS): _json(rng, 3) for _ in range(rng.randrange(4))
    }
    data = json.dumps(body).encode()
    if rng.random() < 0.4:
        data = rng.choice((_flip, _cut, _repeat))(rng, data, [])
    headers = (
        {"X-Request-Id": "".join(map(chr, rng.choices(range(33, 126), k=rng.randrange(200))))}
        if rng.random() < 0.1
        else {}
    )
    try:
        return str(server.ask(path, data, headers=headers).status)
    except ConnectionError:  # the server does not read a body that is too long
        return "hung up on"


def _json(rng: random.Random, depth: int) -> object:
    plain = (
        None,
        True,
        False,
        0,
        1,
        -1,
        7,
        10**30,
        0.5,
        -2.5,
        1e308,
        math.nan,
        math.inf,
        "",
        "x",
        "\ud800",
        "日本",
        "x" * 3000,
        "auto",
        "block",
        *WORDS,
    )
    if not depth or rng.random() < 0.6:
        return rng.choice(plain)
    if rng.random() < 0.5:
        return [_json(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 5, 200)))]
    return {rng.choice(MEMBERS): _json(rng, depth - 1) for _ in range(rng.randrange(4))}


def _damaged_bytes(rng: random.Random) -> bytes:
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b'Content-Length: 15\r\n\r\n{"prompt": "x"}'
    )
    return (
        rng.choice((_flip, _cut, _repeat, _flip))(rng, request, [])
        if rng.random() < 0.8
        else rng.randbytes(rng.randrange(1, 400))
    )


def _send_bytes(server: RunningServer, data: bytes) -> str:
    """Send bytes on a connection of their own, which must end or answer in time."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        try:
            answer = connection.recv(4096)
        except ConnectionError:
            answer = b""
    status = answer[9:12].decode("latin1")
    return status if answer.startswith(b"HTTP/1.1 ") else "hung up on"


def _measure(name: str, count: int, send_one: Callable[[], str]) -> FuzzOutcome:
    """Send inputs and count the results.

    Memory growth is measured after the first tenth, because caches fill until then.
    """
    results: Counter[str] = Counter()
    slowest, first, started = 0.0, 0, time.perf_counter()
    for number in range(count):
        if number == count // 10:
            first = _memory()
        sent = time.perf_counter()
        results[send_one()] += 1
        slowest = max(slowest, time.perf_counter() - sent)
    assert slowest < PATIENCE_S, f"an input took {slowest:.1f} s"
    return FuzzOutcome(
        name,
        count,
        results,
        time.perf_counter() - started,
        slowest * 1e3,
        (_memory() - first) / 1e6,
    )


def _memory() -> int:
    gc.collect()
    rss: int = psutil.Process().memory_info().rss
    return rss


def _wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Sends damaged frames and requests, and counts the results."
    )
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--link", type=int, default=10_000)
    parser.add_argument("--http", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.frames, options.link, options.http = 200, 50, 20
    logging.disable(logging.CRITICAL)  # not a line for each input
    try:
        print(TABLE_HEAD)
        for fuzz, count in (
            (fuzz_reader, options.frames),
            (fuzz_link, options.link),
            (fuzz_http, options.http),
        ):
            print(fuzz(count, options.seed).row, flush=True)
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    main()
