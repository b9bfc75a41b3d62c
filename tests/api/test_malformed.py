"""Malformed requests are refused as the client's fault, and the server goes on.

Bodies are made from the OpenAPI page by fuzzing, and by hand where no generator would make them.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok
from schemathesis.generation.modes import GenerationMode

from tests.support.http_server import FakeService, RunningServer, serving

EXAMPLES = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
CHAT = b'{"messages": [{"role": "user", "content": "x"}]'
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(
        FakeService(output="x " * 20), config={"limits.max_body_bytes": 2_000_000}
    ) as running:
        yield running


MALFORMED = [
    b"",
    b"{",
    b'{"prompt": "x"',
    b'{"prompt": "x", "max_tokens": }',
    b'{"prompt": "x"}}',
    b"null",
    b"5",
    b'"text"',
    b"[]",
    b"[{}]",
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "\\ud800"}',
    b'{"\\ud800": 1}',
    b'{"prompt": "x", "max_tokens": NaN}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}",
    b'{"prompt": "x", "max_tokens": 1e400}',
    b'{"prompt": "x", "seed": 1' + b"0" * 4000 + b"}",
    b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
    b'{"prompt": "x", "n": 1' + b"0" * 4000 + b"}",
    b'{"prompt": "x", "speculation": {"gamma": 1' + b"0" * 4000 + b"}}",
    b'{"prompt": [1' + b"0" * 4000 + b"]}",
    b'{"tokens": [1' + b"0" * 4000 + b"]}",
    b'{"prompt": "x", "logit_bias": {"1' + b"0" * 4000 + b'": 1}}',
    b'{"prompt": "x", "logit_bias": {"5": 1' + b"0" * 4000 + b"}}",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    b"[" * 1_000_000,
    b'{"prompt": [' + b"{}," * 600_000 + b"{}]}",
    b'{"prompt": [' + b'"",' * 600_000 + b'""]}',
    b'{"prompt": "x", "stop": [' + b"1," * 600_000 + b"1]}",
    b"{" + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"}",
    b'{"' + b"k" * 1_000_000 + b'": 1}',
    CHAT + b', "messages": [' + b"{}," * 600_000 + b"{}]}",
    CHAT + b', "tools": [{"type": "function"}]}',
    b'{"messages": [{"role": "user", "content": [' + b"{}," * 600_000 + b"{}]}]}",
    b"\x1f\x8b\x08\x00\x00\x00",
    b"prompt=x&n=1",
    b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--",
]


@pytest.mark.parametrize("number", range(len(MALFORMED)))
@pytest.mark.parametrize("path", PATHS)
def test_a_malformed_body_is_a_400(server: RunningServer, path: str, number: int) -> None:
    reply = server.ask(path, MALFORMED[number])
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert len(reply.body) < 2000


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=b",
        "nonsense",
        "application/xml",
    ],
)
def test_a_body_of_another_kind_is_a_400(server: RunningServer, kind: str) -> None:
    assert (
        server.ask("/v1/completions", b'{"prompt": "x"}', headers={"Content-Type": kind}).status
        == 400
    )


@pytest.mark.parametrize("path", PATHS)
def test_every_cut_of_a_good_body_is_a_400(server: RunningServer, path: str) -> None:
    body = (
        CHAT
        if "chat" in path
        else b'{"tokens": [1, 2]'
        if path == "/detokenize"
        else b'{"prompt": "text"'
    )
    assert server.ask(path, body + b"}").status == 200
    assert {server.ask(path, body[:end]).status for end in range(0, len(body) + 1, 3)} == {400}


@pytest.mark.parametrize(
    "raw",
    [
        b"GET",
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ],
)
def test_a_request_that_is_no_http_breaks_only_its_own_connection(
    server: RunningServer, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(4096)[:12] in (b"", b"HTTP/1.1 400")
    assert server.ask("/health").status == 200


def test_memory_does_not_grow_with_refused_requests(server: RunningServer) -> None:
    def refuse_all() -> int:
        for body in MALFORMED:
            server.ask("/v1/completions", body)
        gc.collect()
        rss: int = psutil.Process().memory_info().rss
        return rss

    refuse_all()
    assert refuse_all() - refuse_all() > -20e6


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = (
    *(
        "prompt",
        "messages",
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "stop",
        "stop_token_ids",
        "seed",
        "logprobs",
        "echo",
        "logit_bias",
        "min_tokens",
        "bad_words",
        "allowed_token_ids",
        "priority",
    ),
    *(
        "response_format",
        "stream",
        "stream_options",
        "speculation",
        "tools",
        "tokens",
        "model",
        "guided",
        "guided_json",
        "guided_regex",
    ),
    *("guided_choice", "guided_grammar", "tool_choice", "parallel_tool_calls"),
)


@settings(EXAMPLES, max_examples=150)
@given(path=st.sampled_from(PATHS), body=st.dictionaries(st.sampled_from(NAMES), JSON))
def test_any_json_under_any_known_name_is_no_failure_of_the_server(
    server: RunningServer, path: str, body: dict[str, object]
) -> None:
    base = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    assert server.ask(path, base | body).status in (200, 400, 404)


def error_members(path: str) -> set[str]:
    return {"type", "error", "request_id"} if path.startswith("/v1/messages") else {"error"}


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_requests_made_from_the_openapi_page_never_break_the_server(
    server: RunningServer, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = []
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operations.append(found.ok())
    assert len(operations) == 16
    statuses: set[int] = set()
    for operation in operations:
        takes_nothing = operation.method == "get" or operation.path == "/ping"
        if mode is GenerationMode.NEGATIVE and takes_nothing:
            continue  # there is nothing in it that could be wrong

        @EXAMPLES
        @given(case=operation.as_strategy(generation_mode=mode))
        def fuzz(case: schemathesis.Case[Any]) -> None:
            response = case.call(timeout=20)
            statuses.add(response.status_code)
            if response.status_code >= 400:
                assert set(response.json()) == error_members(case.path)

        fuzz()
    assert (400 if mode is GenerationMode.NEGATIVE else 200) in statuses
    assert statuses <= {200, 400, 404, 405}
    assert server.service.num_live == 0
