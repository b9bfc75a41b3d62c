"""Requests under way whose key is removed or expires: they end, and free what they held."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path

import pytest

from specserve.api.access import KeyUse
from specserve.api.keys import ApiClient
from specserve.api.rates import Account
from specserve.errors import KeyRevoked
from tests.support.http_server import FakeService, RunningServer, serving

BODY = {"prompt": "x", "max_tokens": 40}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (file := tmp_path / "keys").write_text("alice k1\nalice k2 expires=2027-01-31\nbob k3\n")
    return file


@pytest.fixture
def server(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """Serve streams that never end by themselves, and look for changed keys all the time."""
    monkeypatch.setattr("specserve.api.key_file.CHECK_EVERY_S", 0.0)
    monkeypatch.setattr("specserve.api.access.CHECK_EVERY_S", 0.01)
    monkeypatch.setattr("specserve.api.keys.utc_today", lambda: date(2027, 1, 31))
    service = FakeService(hangs_after=2)
    with serving(service, config={"http.api_keys_file": str(file)}) as running:
        yield running


@contextmanager
def asked(server: RunningServer, key: str, *, stream: bool) -> Iterator[http.client.HTTPConnection]:
    """Send a request that goes on until its key is revoked."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    num_live = server.service.num_live
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/completions", json.dumps(BODY | {"stream": stream}), headers)
    try:
        assert server.until(lambda: server.service.num_live == num_live + 1)
        yield connection
    finally:
        connection.close()


def test_a_removed_key_ends_its_streams_with_an_error_event_and_no_others(
    server: RunningServer, file: Path
) -> None:
    with asked(server, "k1", stream=True) as removed, asked(server, "k2", stream=True):
        file.write_text("alice k2\nbob k3\n")
        response = removed.getresponse()
        *_, error, done, rest = response.read().decode().split("\n\n")
        assert (response.status, done, rest) == (200, "data: [DONE]", "")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "invalid_api_key"
        assert server.service.num_live == 1, "the other key of the client is valid"
        assert server.registry.counter("request_failure_total").samples() == {("401",): (1.0,)}


def test_an_answer_that_has_not_begun_is_refused_with_401(
    server: RunningServer, file: Path
) -> None:
    with asked(server, "k3", stream=False) as removed:
        file.write_text("alice k1\n")
        response = removed.getresponse()
        assert response.status == 401
        assert "no longer valid" in json.loads(response.read())["error"]["message"]
    assert server.until(lambda: server.service.num_live == 0)


def test_a_key_that_expires_ends_its_requests(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asked(server, "k2", stream=True) as expired, asked(server, "k1", stream=True):
        monkeypatch.setattr("specserve.api.keys.utc_today", lambda: date(2027, 2, 1))
        assert b"no longer valid" in expired.getresponse().read()
        assert server.service.num_live == 1


def test_a_broken_file_ends_no_request_even_behind_the_grace(
    server: RunningServer, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asked(server, "k1", stream=True):
        monkeypatch.setattr("specserve.api.key_file.GRACE_S", 0.0)
        file.write_text("")
        headers = {"Authorization": "Bearer k3"}
        assert server.until(lambda: server.ask("/v1/models", headers=headers).status == 503)
        assert server.service.num_live == 1
        file.write_text("bob k3\n")
        assert server.until(lambda: server.service.num_live == 0)


def test_a_revocation_before_the_generation_begins_ends_it_all_the_same() -> None:
    ends: list[KeyRevoked] = []
    account = Account("alice", lambda: 0.0, lambda limit: None)
    use = KeyUse(ApiClient("alice", b"1"), account, ExitStack())
    use.revoke()
    use.on_revoked(ends.append)
    use.revoke()
    assert len(ends) == 1
