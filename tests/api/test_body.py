"""Bodies that are too long, compressed or broken get an answer that their client can read."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Iterator
from contextlib import suppress

import openai
import pytest

from specserve.api import body as body_module
from tests.support.asgi import send
from tests.support.http_server import FakeService, RunningServer, app_over, serving

LIMIT = 10_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(config={"limits.max_body_bytes": LIMIT}) as running:
        yield running


def read_answer(connection: socket.socket) -> bytes:
    """Return all that the server sends until it closes; a reset raises."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_client_that_sends_all_before_it_reads_can_read_the_413(
    server: RunningServer, is_chunked: bool
) -> None:
    size = 8_000_000  # more than the buffers of both sockets hold
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        if is_chunked:
            part = b"%x\r\n%s\r\n" % (size, b"x" * size)
            connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + part + b"0\r\n\r\n")
        else:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % size + b"x" * size)
        answer = read_answer(connection)
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in head.lower()
    assert json.loads(content)["error"]["code"] == "request_too_large"
    assert server.ask("/health").status == 200


def test_the_official_client_gets_the_413_as_a_status(server: RunningServer) -> None:
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client,
        pytest.raises(openai.APIStatusError, match="10000 bytes") as refused,
    ):
        client.completions.create(model="demo", prompt="x" * 8_000_000)
    assert refused.value.status_code == 413


def test_a_client_that_sends_without_end_is_cut_off(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "MAX_DRAIN", 100_000)
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(HEAD + b"Content-Length: 2000000000\r\n\r\n")
        with suppress(OSError):
            while sent < 2_000_000_000:
                sent += connection.send(b"x" * 1_000_000)
    assert sent < 100_000_000


def test_a_client_that_stays_silent_is_cut_off(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "DRAIN_S", 0.05)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(HEAD + b"Content-Length: 2000000000\r\n\r\n")
        assert read_answer(connection).startswith(b"HTTP/1.1 413")


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


BODY = json.dumps({"prompt": "x" * 200, "max_tokens": 2}).encode()
GOOD = [
    ("gzip", gzip.compress(BODY)),
    ("GZIP", gzip.compress(BODY)),
    ("x-gzip", gzip.compress(BODY)),
    ("deflate", zlib.compress(BODY)),
    ("deflate", raw_deflate(BODY)),
    ("identity", BODY),
    ("", BODY),
]


@pytest.mark.parametrize(("coding", "data"), GOOD)
def test_a_compressed_body_is_taken_as_the_plain_one(
    server: RunningServer, coding: str, data: bytes
) -> None:
    server.service.requests.clear()
    reply = server.ask("/v1/completions", data, headers={"Content-Encoding": coding})
    assert reply.status == 200, reply.body
    assert server.service.requests[0].prompt == server.service.tokenizer.encode("x" * 200)


BOMB = gzip.compress(b"x" * (50 * LIMIT))
REFUSED = [
    ("br", BODY, 415, "gzip"),
    ("gzip, gzip", gzip.compress(gzip.compress(BODY)), 415, "content encoding"),
    ("ü", BODY, 415, "content encoding"),
    ("gzip", BOMB, 413, "decompressed body is longer than the 10000 bytes"),
    ("deflate", zlib.compress(b"x" * (LIMIT + 1)), 413, "decompressed"),
    ("gzip", b"x" * (LIMIT + 1), 413, "the body is longer"),
    ("gzip", BODY, 400, "not valid gzip"),
    ("gzip", gzip.compress(BODY)[:-9], 400, "it is cut"),
    ("gzip", gzip.compress(BODY) + b"more", 400, "behind its end"),
    ("gzip", b"", 400, "it is cut"),
    ("deflate", b"\x00\x01", 400, "not valid deflate"),
    ("gzip", gzip.compress(b"{"), 400, "not valid JSON"),
]


@pytest.mark.parametrize(("coding", "data", "status", "words"), REFUSED)
def test_what_cannot_be_decompressed_is_refused_in_words(
    server: RunningServer, coding: str, data: bytes, status: int, words: str
) -> None:
    reply = server.ask("/v1/completions", data, headers={"Content-Encoding": coding})
    assert reply.status == status
    assert words in reply.error["message"]


def test_a_bomb_is_not_unpacked_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []
    decoder = zlib.decompressobj

    class Watched:
        def __init__(self, wbits: int) -> None:
            self._inner = decoder(wbits)

        def decompress(self, data: bytes, max_length: int) -> bytes:
            decoded = self._inner.decompress(data, max_length)
            most.append(len(decoded))
            return decoded

    monkeypatch.setattr(zlib, "decompressobj", Watched)
    app = app_over(FakeService(), config={"limits.max_body_bytes": LIMIT, "http.hosts": ["x"]})
    assert send(app, "/v1/completions", BOMB, {"Content-Encoding": "gzip"}).status == 413
    assert most == [LIMIT + 1]
