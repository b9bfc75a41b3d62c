"""The HTTP client must read any stream as it was sent, and say when it broke off."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from specserve.errors import BadValue
from specserve.tools.bench.address import ServerAddress
from specserve.tools.bench.streams import Stream, _add_event, fetch, stream
from tests.support.http_server import FakeService, serving
from tests.support.scripted_server import Script, scripted_server

EVENTS = ((0.0, ("plain",)), (0.0, ("accepted", "accepted", "bonus")), (0.0, ("correction",)))


def _read(url: str) -> Stream:
    parts = urlsplit(url)
    return asyncio.run(stream("127.0.0.1", parts.port or 0, "/v1/completions", {"prompt": "a"}))


@pytest.mark.parametrize("piece", [None, 1, 7, 64])
def test_a_stream_reads_the_same_however_a_proxy_cuts_it(piece: int | None) -> None:
    with scripted_server(Script(EVENTS, speculation={"rounds": 3}, piece=piece)) as url:
        result = _read(url)
    assert [tuple(origins) for origins in result.origins] == [origins for _, origins in EVENTS]
    assert len(result.times) == 3
    assert result.usage == {"completion_tokens": 5}
    assert result.final is not None
    assert result.final["specserve"] == {"rounds": 3}
    assert result.ended is not None
    assert result.ended >= result.times[-1] >= result.sent


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2},
        ),
    ],
)
def test_the_answer_has_the_logprobs_of_every_token(path: str, body: dict[str, object]) -> None:
    with serving(FakeService()) as server:
        result = Stream()
        address = ServerAddress.from_url(server.url)
        asyncio.run(address.post(path, {"model": "demo", **body}, into=result))
    assert result.usage is not None
    assert len(result.logprobs) == result.usage["completion_tokens"] > 0
    assert result.answer == "".join(result.texts) + "".join(result.logprobs)


def test_the_answer_has_the_names_and_arguments_of_tool_calls() -> None:
    call = '<tool_call>\n{"name": "edit", "arguments": {"line": 3}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "edit", "parameters": {"type": "object"}}}
    body = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    with serving(FakeService(output=call)) as server:
        result = Stream()
        address = ServerAddress.from_url(server.url)
        asyncio.run(address.post("/v1/chat/completions", body, into=result))
    assert result.answer == 'edit{"line": 3}'


def test_the_role_that_begins_a_chat_is_no_token_unless_it_comes_with_one() -> None:
    result = Stream()
    for number, delta in enumerate(
        ({"role": "assistant", "content": ""}, {"content": "Par"}, {"content": "is"})
    ):
        _add_event({"choices": [{"delta": delta}]}, float(number), result)
    assert (result.times, result.texts) == ([1.0, 2.0], ["Par", "is"])
    held_back = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    _add_event(held_back | {"origins": ["plain"]}, 3.0, result)
    _add_event({"choices": [{"delta": {"role": "assistant", "content": "x"}}]}, 4.0, result)
    assert result.times == [1.0, 2.0, 3.0, 4.0]


def test_a_stream_that_breaks_off_keeps_what_came_and_has_no_end() -> None:
    with scripted_server(Script(EVENTS, breaks_after=2)) as url:
        parts = urlsplit(url)
        result = Stream()
        asyncio.run(stream("127.0.0.1", parts.port or 0, "/v1/completions", {}, into=result))
    assert (len(result.times), result.ended, result.final) == (2, None, None)


def test_a_server_that_does_not_speak_http_is_an_error() -> None:
    async def ask() -> None:
        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail.example\r\n")
            writer.close()

        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            await fetch("127.0.0.1", server.sockets[0].getsockname()[1], "/")

    with pytest.raises(EOFError, match="does not speak HTTP"):
        asyncio.run(ask())


def test_an_address_keeps_prefix_and_key_and_sends_both() -> None:
    script = Script()
    with scripted_server(script) as url:
        address = ServerAddress.from_url(url + "/behind/a/proxy/", "secret")
        asyncio.run(address.get("/v1/models"))
        asyncio.run(address.post("/v1/completions", {}, into=Stream()))
    assert [path for path, _, _ in script.requests] == [
        "/behind/a/proxy/v1/models",
        "/behind/a/proxy/v1/completions",
    ]
    assert all(headers["authorization"] == "Bearer secret" for _, headers, _ in script.requests)
    assert script.requests[1][1]["x-specserve-origins"] == "1"
    assert "secret" not in repr(address)


def test_the_scheme_decides_on_port_and_encryption() -> None:
    plain, secure = (
        ServerAddress.from_url("http://[::1]"),
        ServerAddress.from_url("https://models.example/llm"),
    )
    assert (plain.host, plain.port, plain.tls) == ("::1", 80, None)
    assert (secure.host, secure.port, secure.prefix) == ("models.example", 443, "/llm")
    assert secure.tls is not None
    assert str(secure) == "https://models.example:443/llm"


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://host:x",
        "http://host/?a=b",
        "http://me@host",
    ],
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(BadValue) as refusal:
        ServerAddress.from_url(url)
    assert refusal.value.param == "url"
