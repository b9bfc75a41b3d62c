"""Damaged HTTP requests: handed to the app as a server would, and as bytes over a socket."""

from __future__ import annotations

import asyncio
import json
import random
import socket

from starlette.types import ASGIApp, Message, Scope

from tests.chaos.fuzz.mutations import cut, flip_bits, json_value, repeat, truncate
from tests.chaos.fuzz.outcome import PATIENCE_S, FuzzOutcome, measure
from tests.support.http_server import FakeService, RunningServer, app_over, serving

MAX_BODY = 200_000
CONFIG = {"limits.max_body_bytes": MAX_BODY}
TRUE_SERVER_ERRORS = {"503", "504"}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
GOOD: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/tokenize": {"prompt": "some text"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
OTHER_PATHS = (
    *"/v1/models /v1/models/demo /v1/models/%2e%2e /health /ready /metrics /trace".split(),
    *("/", "/nowhere"),
    *("", "//", "/v1/completions/", "/page/../../x", "/\x00", "/é\udce9", "/" + "a/" * 5000),
)
METHODS = "POST GET HEAD PUT DELETE PATCH OPTIONS TRACE CONNECT post BREW".split()
PARAMETERS = """
    prompt messages tokens model max_tokens max_completion_tokens temperature top_p top_k min_p n
    stop stop_token_ids ignore_eos seed logprobs top_logprobs prompt_logprobs echo presence_penalty
    frequency_penalty repetition_penalty logit_bias response_format stream stream_options user
    speculation tools best_of metadata nonsense guided guided_json guided_regex guided_choice
    guided_grammar tool_choice parallel_tool_calls add_special_tokens suffix
    min_tokens bad_words allowed_token_ids priority
""".split()
WORDS = (
    *"auto block required json_object json_schema function object user assistant tool demo".split(),
    *("(a", "start: /a/", '{"type": "object"}'),
)
MEMBERS = (
    *"5 gamma role content type text json_schema schema properties enum $ref regex choice".split(),
    *"function name parameters tool_calls arguments include_usage".split(),
    "x" * 300,
)
HEADER_NAMES = (
    *"x-request-id authorization content-type content-length host accept origin user-agent".split(),
    *"x-specserve-origins transfer-encoding expect upgrade connection cookie range".split(),
    *"x-request-timeout-seconds access-control-request-method traceparent".split(),
)
HEADER_VALUES = (
    *(b"", b"0", b"-1", b"99999999999999999999", b"1e400", b"chunked", b"gzip", b"websocket"),
    *(b"application/json", b"text/plain; charset=utf-16", b"multipart/form-data", b"*/*"),
    *(b"Bearer ", b"Bearer key", b"caf\xe9", b"\xff\xfe\x00", "日本".encode(), b"a" * 40_000),
)
TRACE_QUERIES = (
    b"",
    b"rounds=5",
    b"rounds=-1",
    b"rounds=x",
    b"rounds=%ff",
    b"\xff&=&&&",
    b"a" * 999,
)


def fuzz_requests(count: int, seed: int = 2) -> FuzzOutcome:
    """Hand invalid requests to the app: bodies, headers, paths, methods, and bodies cut short.

    None may end in an error of the server, or without an answer.
    """
    rng, service = random.Random(seed), FakeService(output="x " * 20)
    app = app_over(service, config=CONFIG)
    loop = asyncio.new_event_loop()

    def send_one() -> str:
        result = loop.run_until_complete(_call(app, rng))
        service.requests.clear()
        return result

    try:
        outcome = measure("HTTP requests, to the app", count, send_one)
    finally:
        loop.close()
    assert service.num_live == 0
    _require_no_server_error(outcome)
    return outcome


def fuzz_sockets(count: int, seed: int = 3) -> FuzzOutcome:
    """Send invalid requests, and bytes that are no requests, to the app under uvicorn.

    Afterwards it must answer as before.
    """
    rng = random.Random(seed)
    service = FakeService(output="x " * 20)
    with serving(service, config=CONFIG) as server:

        def send_one() -> str:
            service.requests.clear()
            return (
                _send_bytes(server, _damaged_bytes(rng))
                if rng.random() < 0.5
                else _send_request(server, rng)
            )

        outcome = measure("HTTP bytes, over a socket", count, send_one)
        assert server.ask("/health").status == 200
        assert server.until(lambda: server.service.num_live == 0)
    _require_no_server_error(outcome)
    return outcome


def _require_no_server_error(outcome: FuzzOutcome) -> None:
    errors = {result for result in outcome.results if result.startswith("5")} - TRUE_SERVER_ERRORS
    assert not errors, errors
    assert "no answer" not in outcome.results


async def _call(app: ASGIApp, rng: random.Random) -> str:
    """Call the app with one request and return its status, or "hung up" of the client."""
    scope, data = _scope_and_body(rng)
    pieces = _pieces(rng, data)
    is_cut_short = rng.random() < 0.05
    statuses: list[int] = []
    is_answered = asyncio.Event()

    async def receive() -> Message:
        if pieces:
            piece = pieces.pop(0)
            more = bool(pieces) or is_cut_short
            return {"type": "http.request", "body": piece, "more_body": more}
        if not is_cut_short:
            await is_answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            assert not statuses, "the answer begins twice"
            statuses.append(message["status"])
            for name, value in message["headers"]:
                assert b"\n" not in name + value
                assert b"\r" not in name + value
        elif not message.get("more_body", False):
            is_answered.set()

    async with asyncio.timeout(PATIENCE_S):
        await app(scope, receive, send)
    if is_answered.is_set():
        return str(statuses[0])
    return "hung up" if is_cut_short else "no answer"


def _scope_and_body(rng: random.Random) -> tuple[Scope, bytes]:
    path = rng.choice(list(GOOD) if rng.random() < 0.85 else OTHER_PATHS)
    data = _damaged_body(rng, path)
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    if rng.random() < 0.3:
        headers += [_header(rng) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.5:
        headers.append((b"content-length", str(len(data)).encode()))
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST" if rng.random() < 0.9 else rng.choice(METHODS),
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(errors="replace"),
        "query_string": rng.choice(TRACE_QUERIES) if rng.random() < 0.1 else b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 9),
        "server": ("127.0.0.1", 8000),
    }
    return scope, data


def _header(rng: random.Random) -> tuple[bytes, bytes]:
    value = rng.choice(HEADER_VALUES) if rng.random() < 0.6 else rng.randbytes(rng.randrange(60))
    return rng.choice(HEADER_NAMES).encode(), value.translate(None, b"\r\n")


def _damaged_body(rng: random.Random, path: str) -> bytes:
    body = dict(GOOD.get(path, CHAT))
    for _ in range(rng.randrange(4)):
        body[rng.choice(PARAMETERS)] = json_value(rng, 3, words=WORDS, members=MEMBERS)
    data = json.dumps(body).encode()
    if rng.random() < 0.4:
        data = rng.choice((flip_bits, cut, repeat, truncate))(rng, data)
    return data


def _pieces(rng: random.Random, data: bytes) -> list[bytes]:
    if rng.random() < 0.7:
        return [data]
    ends = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(1, 3)))
    return [data[a:b] for a, b in zip((0, *ends), (*ends, len(data)), strict=True)]


def _send_request(server: RunningServer, rng: random.Random) -> str:
    path = rng.choice(list(GOOD))
    headers = (
        {"X-Request-Id": "".join(map(chr, rng.choices(range(33, 256), k=rng.randrange(200))))}
        if rng.random() < 0.1
        else {}
    )
    try:
        return str(server.ask(path, _damaged_body(rng, path), headers=headers).status)
    except ConnectionError:  # the server does not read a body that is too long
        return "hung up on"


def _damaged_bytes(rng: random.Random) -> bytes:
    name, value = _header(rng)
    body = b'f\r\n{"prompt": "x"}\r\n0\r\n\r\n'
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        + b"%b: %b\r\n" % (name, value)
        + rng.choice(
            (
                b'Content-Length: 15\r\n\r\n{"prompt": "x"}',
                b"Transfer-Encoding: chunked\r\n\r\n" + body,
                b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n" + body,
            )
        )
    )
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(1, 400))
    return (
        rng.choice((flip_bits, cut, repeat, truncate))(rng, request)
        if rng.random() < 0.8
        else request
    )


def _send_bytes(server: RunningServer, data: bytes) -> str:
    """Send bytes on a connection of their own, which must end or answer in time."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(4096)
        except ConnectionError:
            answer = b""
    status = answer[9:12].decode("latin1")
    return status if answer.startswith(b"HTTP/1.1 ") else "hung up on"
