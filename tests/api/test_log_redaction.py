"""Prompts stay out of the logs, however a request ends, unless `logs.prompts` allows them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve.api.service import Status
from specserve.errors import Overloaded, WorkerLost
from tests.support.http_server import FakeService, RunningServer, serving

MARK = "MARK-of-a-secret"
BODY = {"prompt": f"{MARK} one two", "user": MARK, "stop": [MARK + "!"], "max_tokens": 40}


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def quoting(error: Exception) -> Exception:
    """Return an error as a library might raise it, with another one as its cause."""
    try:
        try:
            raise KeyError(MARK)
        except KeyError as cause:
            raise error from cause
    except Exception as raised:
        return raised


ENDINGS: dict[str, FakeService] = {
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
    chat = {key: value for key, value in BODY.items() if key != "prompt"} | {
        "messages": [{"role": "user", "content": BODY["prompt"]}]
    }
    message = {
        "messages": chat["messages"],
        "system": MARK,
        "metadata": {"user_id": MARK},
        "stop_sequences": [MARK + "!"],
        "max_tokens": 40,
    }
    for stream in (False, True):
        yield "/v1/messages", message | {"stream": stream}
        yield "/v1/completions", BODY | {"stream": stream}
        yield "/v1/chat/completions", chat | {"stream": stream}


def lines(caplog: pytest.LogCaptureFixture) -> str:
    """Return all that any handler could make of the records, attached fields included."""
    formatted = [
        logging.Formatter().format(record) + repr(vars(record))
        for record in caplog.records
        if record.name.startswith(("specserve", "uvicorn"))
    ]
    assert formatted
    return "\n".join(formatted)


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_line_quotes_a_request_however_it_ends(
    ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(ENDINGS[ending], config={"limits.request_timeout_s": 0.3}) as server:
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
def test_no_line_quotes_a_refused_request(
    change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(config={"limits.max_body_bytes": 100_000}) as server:
        assert server.ask("/v1/completions", BODY | change).status in (400, 404)
        assert server.ask("/v1/completions", b'{"prompt": "' + MARK.encode()).status == 400
        assert server.ask("/v1/completions", MARK.encode().ljust(100_001)).status == 413
    assert MARK not in lines(caplog)


def test_no_line_quotes_a_client_that_is_refused_or_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys").write_text(f"alice {MARK} requests_per_minute=1")
    with serving(
        FakeService(hangs_after=1), config={"http.api_keys_file": str(tmp_path / "keys")}
    ) as server:
        assert server.ask("/v1/completions", BODY).status == 401
        assert (
            server.ask("/v1/completions", BODY, headers={"Authorization": f"Bearer {MARK}x"}).status
            == 401
        )
        leave(server)
        assert server.until(lambda: server.service.num_live == 0 and "alice" in caplog.text)
        assert (
            server.ask("/v1/completions", BODY, headers={"Authorization": f"Bearer {MARK}"}).status
            == 429
        )
    assert MARK not in lines(caplog)


def leave(server: RunningServer) -> None:
    """Send a request and close the connection in mid-stream."""
    body = b'{"prompt": "%s", "stream": true, "max_tokens": 40}' % MARK.encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n"
        "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall((head % (MARK, len(body))).encode() + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_an_unexpected_failure_is_logged_with_its_type_and_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(FakeService(refusal=quoting(RuntimeError(MARK)))) as server:
        request_id = server.ask("/v1/completions", BODY).headers["x-request-id"]
    assert f"{request_id} failed: RuntimeError" in caplog.text
    assert "in generate" in caplog.text
    assert "KeyError at" in caplog.text


def test_an_operator_may_allow_prompts_in_logs(caplog: pytest.LogCaptureFixture) -> None:
    with serving(
        FakeService(refusal=RuntimeError("the very words")), config={"logs.prompts": True}
    ) as server:
        server.ask("/v1/completions", BODY)
    assert MARK in caplog.text
    assert "the very words" in caplog.text
