"""A server without file handles must go on with its streams, and answer again when it has some."""

from __future__ import annotations

import http.client
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection

from tests.support.http_server import serving

SPARE, FLOOD = 12, 64
SECONDS = 30
DONE = b"data: [DONE]\n\n"


def serve_with_few_handles(pipe: Connection) -> None:
    with serving() as server:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + SPARE, used + SPARE))
        pipe.send(server.port)
        pipe.recv()


@contextmanager
def server_with_few_handles() -> Iterator[int]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_with_few_handles, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def stream(connection: http.client.HTTPConnection) -> bytes:
    """Return the body of a streamed answer."""
    body = b'{"model": "demo", "prompt": "x", "stream": true}'
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    with connection.getresponse() as answer:
        return answer.read()


def stream_when_accepted(port: int) -> bytes:
    """Return the body of a streamed answer on a new connection.

    The server closes connections that it accepts before it has closed the flood's.
    """
    until = time.monotonic() + SECONDS
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        with closing(connection):
            try:
                return stream(connection)
            except ConnectionError:
                assert time.monotonic() < until, "it accepts no connection any more"
        time.sleep(0.01)


def test_a_flood_beyond_the_file_handles_leaves_open_connections_alone_and_passes() -> None:
    with server_with_few_handles() as port:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as before:
            assert stream(before).endswith(DONE)
            with ExitStack() as flood:
                for _ in range(FLOOD):
                    flood.enter_context(socket.create_connection(("127.0.0.1", port)))
                for _ in range(3):
                    assert stream(before).endswith(DONE)
        assert stream_when_accepted(port).endswith(DONE)
