"""Middleware of every request: ids, access log, keys, CORS, and limits on heads and bodies."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import openai
import psutil
import pytest

from specserve.api import app as app_module
from specserve.api.middleware import MAX_HEAD
from tests.support.claims import wait_until_claimed
from tests.support.http_server import FakeService, RunningServer, serving

LIMIT = 10_000
ORIGIN = "https://example.org"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# ours\nfirst-key\n\nsecond-key  # theirs\n", encoding="utf-8")
    with serving(
        config={
            "http.api_keys_file": str(file),
            "http.cors_origins": [ORIGIN],
            "limits.max_body_bytes": LIMIT,
        }
    ) as running:
        yield running


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_a_key_of_the_file_opens_the_server(locked: RunningServer, key: str) -> None:
    with openai.OpenAI(base_url=locked.url + "/v1", api_key=key, max_retries=0) as client:
        assert client.completions.create(model="demo", prompt="x").choices[0].text


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/trace", "/openapi.json", "/v1/nothing", "/version", "/ping"]
)
def test_without_a_valid_key_other_paths_are_refused(
    locked: RunningServer, path: str, headers: dict[str, str]
) -> None:
    reply = locked.ask(path, headers=headers)
    assert (reply.status, reply.error["code"], reply.headers["www-authenticate"]) == (
        401,
        "invalid_api_key",
        "Bearer",
    )


def test_the_official_client_sees_that_its_key_is_wrong(locked: RunningServer) -> None:
    with (
        openai.OpenAI(base_url=locked.url + "/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


@pytest.mark.parametrize("path", ["/", "/docs", "/health", "/ready", "/metrics"])
def test_probes_and_the_pages_need_no_key(locked: RunningServer, path: str) -> None:
    assert locked.ask(path).status == 200


@pytest.mark.parametrize(
    ("key", "opened"),
    [
        ("all-key", {"/v1/models", "/trace", "/metrics", "/health", "/ping", "/version"}),
        ("plain-key", {"/v1/models", "/health", "/ping", "/version"}),
        ("trace-key", {"/trace", "/health", "/ping", "/version"}),
        ("metrics-key", {"/metrics", "/health", "/ping", "/version"}),
    ],
)
def test_a_key_is_for_its_scopes(tmp_path: Path, key: str, opened: set[str]) -> None:
    (file := tmp_path / "keys").write_text(
        "a all-key\nb plain-key scopes=generate\nc trace-key scopes=trace\n"
        "d metrics-key scopes=metrics requests_per_minute=4\n"
    )
    config = {"http.api_keys_file": str(file), "http.open_paths": ["/"]}
    with serving(config=config) as running:
        headers = {"Authorization": f"Bearer {key}"}
        for path in ("/v1/models", "/trace", "/metrics", "/health", "/nothing"):
            reply = running.ask(path, headers=headers)
            if path in opened:
                assert reply.status == 200
            elif reply.status != 404:
                assert (reply.status, reply.error["code"]) == (403, "insufficient_scope")
        assert (reply.status == 404) == ("/v1/models" in opened)
        refused = running.ask("/v1/completions", {"prompt": "x"}, headers=headers)
        assert refused.status == (200 if "/v1/models" in opened else 403)
        assert running.ask("/metrics", headers=headers).status != 429, (
            "a refusal for the scope takes nothing from the rate"
        )


def test_browsers_of_the_named_origins_may_ask_and_others_may_not(locked: RunningServer) -> None:
    preflight = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    reply = locked.ask("/v1/completions", method="OPTIONS", headers=preflight)
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert reply.headers["x-request-id"]
    assert (
        locked.ask(
            "/v1/completions", method="OPTIONS", headers=preflight | {"Origin": "https://evil.org"}
        ).status
        == 400
    )
    refused = locked.ask("/v1/models", headers={"Origin": ORIGIN})
    # A browser may read why it was refused.
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    assert (
        "access-control-allow-origin"
        not in locked.ask("/health", headers={"Origin": "https://evil.org"}).headers
    )


def test_without_named_origins_no_browser_page_may_read_answers() -> None:
    with serving() as server:
        assert (
            "access-control-allow-origin"
            not in server.ask("/health", headers={"Origin": ORIGIN}).headers
        )


def test_a_valid_request_id_is_kept_in_response_and_log(
    locked: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Authorization": "Bearer first-key", "X-Request-Id": "trace-42.a"}
    with caplog.at_level(logging.INFO, "specserve"):
        reply = locked.ask("/v1/completions", {"prompt": "x"}, headers=headers)
        assert locked.until(
            lambda: any(
                "trace-42.a POST /v1/completions 200" in record.getMessage()
                for record in caplog.records
            )
        )
    assert (reply.headers["x-request-id"], reply.json["id"]) == ("trace-42.a", "cmpl-trace-42.a")


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "<script>", "ü"])
def test_any_other_request_gets_an_id_of_its_own(locked: RunningServer, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    ids = {
        locked.ask(path, headers=headers).headers["x-request-id"]
        for path in ("/health", "/nothing", "/v1/models")
    }
    assert len(ids) == 3
    assert given not in ids


def test_a_body_that_says_it_is_too_long_is_refused_unread(locked: RunningServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", locked.port, timeout=20)
    connection.putrequest("POST", "/v1/completions")
    for name, value in {
        "Authorization": "Bearer first-key",
        "Content-Type": "application/json",
        "Content-Length": str(100 * 10**6),
    }.items():
        connection.putheader(name, value)
    connection.endheaders()  # and not a byte of the body
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_of_100_mb_that_does_not_say_so_is_refused_and_not_held(
    locked: RunningServer,
) -> None:
    wait_until_claimed()
    process, before, most = psutil.Process(), psutil.Process().memory_info().rss, 0
    head = (
        b"POST /detokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first-key\r\n"
        b"Content-Type: application/json\r\n"
    )
    part = b"%x\r\n%s\r\n" % (1_000_000, b"x" * 1_000_000)
    with socket.create_connection(("127.0.0.1", locked.port), timeout=20) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + part[: LIMIT * 2])
        assert connection.recv(4096, socket.MSG_PEEK)[:12] == b"HTTP/1.1 413"  # long before the end
        with suppress(OSError):  # the server has said no, and may close the connection
            connection.sendall(part[LIMIT * 2 :])
            for _ in range(99):
                connection.sendall(part)
                most = max(most, process.memory_info().rss)
    assert most - before < 30e6
    assert locked.ask("/health").status == 200


def test_a_body_may_be_as_long_as_the_limit_and_no_byte_longer(locked: RunningServer) -> None:
    headers = {"Authorization": "Bearer first-key"}
    body = b'{"tokens": [1], "model": "demo"}'
    assert locked.ask("/detokenize", body.ljust(LIMIT), headers=headers).status == 200
    refused = locked.ask("/detokenize", body.ljust(LIMIT + 1), headers=headers)
    assert (refused.status, refused.error["code"]) == (413, "request_too_large")
    chunked = {**headers, "Transfer-Encoding": "chunked"}
    assert (
        locked.ask(
            "/detokenize", b"%x\r\n%s\r\n0\r\n\r\n" % (LIMIT, body.ljust(LIMIT)), headers=chunked
        ).status
        == 200
    )
    assert (
        locked.ask(
            "/detokenize",
            b"%x\r\n%s\r\n0\r\n\r\n" % (LIMIT + 1, body.ljust(LIMIT + 1)),
            headers=chunked,
        ).status
        == 413
    )


def test_a_path_or_headers_that_are_too_long_are_refused(locked: RunningServer) -> None:
    with_key = {"Authorization": "Bearer first-key"}
    assert (
        locked.ask("/v1/models", headers={**with_key, "X-Long": "x" * (MAX_HEAD - 1000)}).status
        == 200
    )
    for refused in (
        locked.ask("/v1/models", headers={**with_key, "X-Long": "x" * MAX_HEAD}),
        locked.ask("/v1/models?" + "x" * MAX_HEAD),
    ):
        assert (refused.status, refused.error["code"]) == (431, "headers_too_large")


def test_a_path_cannot_forge_a_line_of_the_log(
    locked: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "specserve"):
        assert (
            locked.ask(
                "/v1/models/x%0Aforged%20line%1b[2J", headers={"Authorization": "Bearer first-key"}
            ).status
            == 404
        )
        assert locked.until(
            lambda: any("forged" in record.getMessage() for record in caplog.records)
        )
    (line,) = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert line.isprintable()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_full_service_refuses_generations_unread_and_answers_the_rest(path: str) -> None:
    with serving(FakeService(full=True)) as server:
        reply = server.ask(path, {"not even": "a request"})
        assert (reply.status, reply.error["code"]) == (429, "overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        assert server.ask("/v1/models").status == server.ask("/health").status == 200


def test_in_a_full_service_only_a_client_with_less_than_another_may_ask_the_engine(
    tmp_path: Path,
) -> None:
    (file := tmp_path / "keys").write_text("greedy k1\nmodest k2\n")
    service = FakeService(hangs_after=1)
    with serving(service, config={"http.api_keys_file": str(file)}) as server:

        def ask(key: str, *, stream: bool = False) -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            body = json.dumps({"prompt": "x", "stream": stream})
            connection.request("POST", "/v1/completions", body, headers)
            return connection

        streams = [ask("k1", stream=True) for _ in range(2)]
        assert server.until(lambda: service.num_live == 2)
        service.full, service.hangs_after = True, None
        (refused, served) = ask("k1"), ask("k2")
        assert (refused.getresponse().status, served.getresponse().status) == (429, 200)
        for connection in (*streams, refused, served):
            connection.close()
        assert server.until(lambda: service.num_live == 0)
        alone = ask("k2")
        assert alone.getresponse().status == 429, "without another client there are no shares"
        alone.close()
    names = [request.client for request in service.requests]
    assert names == ["greedy", "greedy", "modest"]


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:8000", "LOCALHOST:1", "[::1]", "[::1]:8000"]
)
def test_a_server_of_this_machine_answers_to_its_own_names(host: str) -> None:
    with serving() as running:
        assert running.ask("/health", headers={"Host": host}).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example"])
def test_a_name_that_only_points_here_is_refused(host: str) -> None:
    """A page from elsewhere would otherwise read what this machine's user is served."""
    with serving() as running:
        reply = running.ask("/v1/models", headers={"Host": host})
        assert reply.status == 421
        assert "http.hosts" in reply.error["message"]


def test_named_hosts_alone_are_answered() -> None:
    with serving(config={"http.hosts": ["llm.example.org"]}) as running:
        assert running.ask("/health", headers={"Host": "llm.example.org:443"}).status == 200
        assert running.ask("/health", headers={"Host": "localhost"}).status == 421


def test_servers_of_other_addresses_answer_to_any_name() -> None:
    with serving(config={"http.host": "0.0.0.0"}) as running:
        assert running.ask("/health", headers={"Host": "llm.example.org"}).status == 200


def test_keys_open_a_server_to_any_name(locked: RunningServer) -> None:
    headers = {"Host": "llm.example.org", "Authorization": "Bearer first-key"}
    assert locked.ask("/v1/models", headers=headers).status == 200


def test_a_body_that_does_not_arrive_is_not_awaited_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_module, "BODY_S", 0.2)
    with (
        serving() as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection,
    ):
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt": ')
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.2 s" in answer


def test_failures_below_a_root_path_are_counted() -> None:
    with serving(config={"http.root_path": "/llm"}) as running:
        assert running.ask("/llm/v1/completions", {"prompt": 3.5}).status == 400
        failed = running.registry.counter("request_failure_total")
        assert failed.samples() == {("400",): (1.0,)}
