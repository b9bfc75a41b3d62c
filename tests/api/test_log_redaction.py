"""What was asked stays out of the logs, however the request ends, unless the operator wants it there."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve.api.service import Status
from specserve.errors import Overloaded, WorkerLost
from tests.support.http_server import FakeService, Running, serving

MARK = "MARK-of-a-secret"
HOLDS = {"prompt": f"{MARK} one two", "user": MARK, "stop": [MARK + "!"], "max_tokens": 40}


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def quoting(error: Exception) -> Exception:
    """As an error of some library might, with another one as its cause."""
    try:
        try:
            raise KeyError(MARK)
        except KeyError as cause:
            raise error from cause
    except Exception as raised:
        return raised


WAYS: dict[str, FakeService] = {
    "served": FakeService(),
    "refused": FakeService(refusal=Overloaded("full")),
    "failed before the first chunk": FakeService(refusal=quoting(RuntimeError(f"no {MARK}"))),
    "failed in mid-stream": FakeService(fails_after=2, error=quoting(RuntimeError(f"no {MARK}"))),
    "lost in mid-stream": FakeService(fails_after=2, error=WorkerLost("gone")),
    "given up": FakeService(fails_after=1),
    "silent": FakeService(silent_after=1),
    "late": FakeService(hangs_after=1),
    "not well": FakeService(state=Status(ready=False, healthy=False, why="dead")),
}


def bodies() -> Iterator[tuple[str, dict[str, object]]]:
    chat = {key: value for key, value in HOLDS.items() if key != "prompt"} | {
        "messages": [{"role": "user", "content": HOLDS["prompt"]}]
    }
    for stream in (False, True):
        yield "/v1/completions", HOLDS | {"stream": stream}
        yield "/v1/chat/completions", chat | {"stream": stream}


def lines(caplog: pytest.LogCaptureFixture) -> str:
    """All that any handler could make of the records, attached fields included."""
    formatted = [
        logging.Formatter().format(record) + repr(vars(record))
        for record in caplog.records
        if record.name.startswith(("specserve", "uvicorn"))
    ]
    assert formatted
    return "\n".join(formatted)


@pytest.mark.parametrize("way", WAYS)
def test_no_line_quotes_a_request_whatever_becomes_of_it(way, caplog):
    with serving(WAYS[way], **{"limits.request_timeout_s": 0.3}) as server:
        for path, body in bodies():
            server.ask(path, body)
        server.ask("/tokenize", {"prompt": MARK})
    assert MARK not in lines(caplog)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": MARK},
        {MARK: 1},
        {"model": MARK},
        {"prompt": MARK * 5000},
        {"prompt": [MARK, {"x": MARK}]},
        {"logit_bias": {MARK: 1}},
        {"n": 0},
    ],
)
def test_no_line_quotes_what_was_refused(change, caplog):
    with serving(**{"limits.max_body_bytes": 100_000}) as server:
        assert server.ask("/v1/completions", HOLDS | change).status in (400, 404)
        assert server.ask("/v1/completions", b'{"prompt": "' + MARK.encode()).status == 400
        assert server.ask("/v1/completions", MARK.encode().ljust(100_001)).status == 413
    assert MARK not in lines(caplog)


def test_no_line_quotes_who_is_refused_or_leaves(tmp_path: Path, caplog):
    (tmp_path / "keys").write_text(f"alice {MARK} requests_per_minute=1")
    with serving(
        FakeService(hangs_after=1), **{"http.api_keys_file": str(tmp_path / "keys")}
    ) as server:
        assert server.ask("/v1/completions", HOLDS).status == 401
        assert (
            server.ask(
                "/v1/completions", HOLDS, headers={"Authorization": f"Bearer {MARK}x"}
            ).status
            == 401
        )
        leave(server)
        assert server.until(lambda: server.service.num_live == 0 and "alice" in caplog.text)
        assert (
            server.ask("/v1/completions", HOLDS, headers={"Authorization": f"Bearer {MARK}"}).status
            == 429
        )
    assert MARK not in lines(caplog)


def leave(server: Running) -> None:
    """In mid-stream."""
    body = b'{"prompt": "%s", "stream": true, "max_tokens": 40}' % MARK.encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall((head % (MARK, len(body))).encode() + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_an_unexpected_failure_is_still_told_by_its_kind_and_place(caplog):
    with serving(FakeService(refusal=quoting(RuntimeError(MARK)))) as server:
        request_id = server.ask("/v1/completions", HOLDS).headers["x-request-id"]
    assert f"{request_id} failed: RuntimeError" in caplog.text
    assert "in generate" in caplog.text
    assert "KeyError at" in caplog.text


def test_an_operator_may_ask_for_the_words(caplog):
    with serving(
        FakeService(refusal=RuntimeError("the very words")), **{"logs.prompts": True}
    ) as server:
        server.ask("/v1/completions", HOLDS)
    assert MARK in caplog.text
    assert "the very words" in caplog.text
