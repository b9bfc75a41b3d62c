"""Clients of HTTP/1.0 get answers without chunks, and every answer has one request id."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator

import pytest
from ray.serve._private.http_util import RequestIdMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.cluster.gateway.header_encoding import middlewares
from tests.support.http_server import TEXT, RunningServer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


def exchange(server: RunningServer, request: bytes) -> tuple[bytes, bytes]:
    """Return head and body of the answer; the server closes the connection after it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


def post(body: dict[str, object], *more: bytes) -> bytes:
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
    lines = b"".join(line + b"\r\n" for line in more)
    return head + lines + b"Content-Length: %d\r\n\r\n" % len(data) + data


@pytest.mark.parametrize("host", [(), (b"Host: localhost",)])
def test_an_answer_in_http_1_0_has_a_length(server: RunningServer, host: tuple[bytes, ...]) -> None:
    head, body = exchange(server, post({"prompt": "x", "max_tokens": 60}, *host))
    assert b" 200 ok" in head
    assert b"transfer-encoding" not in head
    assert json.loads(body)["choices"][0]["text"] == TEXT
    assert exchange(server, b"GET /health HTTP/1.0\r\n\r\n")[0].startswith(b"http/1.1 200")


def test_a_stream_in_http_1_0_comes_as_a_whole_and_without_chunks(server: RunningServer) -> None:
    head, body = exchange(server, post({"prompt": "x", "max_tokens": 60, "stream": True}))
    assert b"transfer-encoding" not in head
    assert b"content-length: %d" % len(body) in head
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT


def test_a_client_of_http_1_0_that_leaves_cancels_its_stream(server: RunningServer) -> None:
    server.service.hangs_after = 2
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(post({"prompt": "x", "stream": True}))
            assert server.until(lambda: server.service.num_live == 1)
        assert server.until(lambda: server.service.num_live == 0)
    finally:
        server.service.hangs_after = None


@pytest.mark.parametrize("given", [None, b"mine", b"caf\xe9", b"\xff\xfe", "日本".encode(), b"a b"])
@pytest.mark.parametrize("path", [b"/health", b"/nothing"])
def test_an_answer_has_one_request_id(
    server: RunningServer, path: bytes, given: bytes | None
) -> None:
    line = b"" if given is None else b"X-Request-Id: " + given + b"\r\n"
    head, _ = exchange(server, b"GET " + path + b" HTTP/1.0\r\n" + line + b"\r\n")
    ids = [one for one in head.split(b"\r\n") if one.startswith(b"x-request-id: ")]
    assert len(ids) == 1
    assert (ids[0] == b"x-request-id: mine") == (given == b"mine")


@pytest.mark.parametrize("own", [[(b"x-request-id", b"ours")], []])
def test_behind_serve_an_answer_has_one_request_id(own: list[tuple[bytes, bytes]]) -> None:
    sent: list[Message] = []

    async def gateway(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(own)})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        raise AssertionError

    async def keep(message: Message) -> None:
        sent.append(message)

    app: ASGIApp = RequestIdMiddleware(gateway)
    for middleware in middlewares():  # in Serve's order: the last is the outermost
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)

    async def run() -> None:
        await app({"type": "http", "headers": [(b"x-request-id", b"theirs")]}, receive, keep)

    asyncio.run(run())
    ids = [value for name, value in sent[0]["headers"] if name.lower() == b"x-request-id"]
    assert ids == [b"ours" if own else b"theirs"]
