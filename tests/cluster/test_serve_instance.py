"""Names, paths and addresses of applications on one Serve: what is refused, and the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray import serve
from ray.exceptions import GetTimeoutError, RayError

from specserve.cluster.serve_instance import (
    LAST_ANSWERS_S,
    ServeInstance,
    delete_application,
)
from specserve.config.tree import config_from_keys
from specserve.errors import ConfigError

SERVE = ServeInstance("127.0.0.1", 8000, paths={"specserve-demo-8000": "/", "other": "/other"})


def require_place(keys: dict[str, object], *, replace: bool = False) -> None:
    SERVE.require_place(config_from_keys(keys), replace=replace)


def test_an_application_with_a_name_and_a_path_of_its_own_finds_a_place() -> None:
    require_place({"name": "second", "http.root_path": "/second"})


def test_a_running_application_is_replaced_only_when_asked() -> None:
    with pytest.raises(ConfigError, match=r"specserve-demo-8000 runs .*--name.*--replace"):
        require_place({})
    require_place({}, replace=True)


@pytest.mark.parametrize(
    ("keys", "replace", "message"),
    [
        (
            {"name": "second"},
            False,
            r"specserve-demo-8000 answers at / .*http.root_path=/second.*--own-ray",
        ),
        (
            {"http.root_path": "/other"},
            True,
            r"other answers at /other .*http.root_path=/specserve-demo-8000",
        ),
        (
            {"name": "second", "http.port": 9000},
            False,
            r"listens on 127.0.0.1:8000, not on 127.0.0.1:9000; .*--port 8000.*--own-ray",
        ),
        (
            {"name": "second", "http.host": "0.0.0.0"},
            False,
            r"listens on 127.0.0.1:8000, not on 0.0.0.0:8000; give --host 127.0.0.1",
        ),
        (
            {"name": "third"},
            True,
            r"no application third runs .* has other, specserve-demo-8000; .*--name",
        ),
        (
            {"name": "second", "http.tls_cert": "cert.pem", "http.tls_key": "key.pem"},
            False,
            r"without TLS",
        ),
    ],
)
def test_a_taken_name_path_or_port_is_refused_with_the_remedy(
    keys: dict[str, object], replace: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_place(keys, replace=replace)


def test_the_address_is_that_of_serve() -> None:
    assert ServeInstance("::1", 8443, has_tls=True).url == "https://[::1]:8443"


@pytest.mark.parametrize(
    ("states", "seconds"),
    [
        ([True, True, False], 0.2),
        ([True], LAST_ANSWERS_S),
        ([RayError("it died"), False], 0.1),
        ([GetTimeoutError("it does not come back")], LAST_ANSWERS_S),
    ],
    ids=["it goes", "it waits for requests", "a lost controller", "a controller that stays away"],
)
def test_an_application_is_waited_for_only_for_its_last_answers(
    monkeypatch: pytest.MonkeyPatch, states: list[bool | RayError], seconds: float
) -> None:
    now, deleted = 0.0, list[str]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def get(reference: object, *, timeout: float) -> dict[str, Any]:
        state = states.pop(0) if len(states) > 1 else states[0]
        if isinstance(state, GetTimeoutError):
            sleep(timeout)
        if isinstance(state, RayError):
            raise state
        return {"applications": {"it": {}} if state else {}}

    client = SimpleNamespace(_controller=MagicMock())
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda **_: client)
    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr(serve, "delete", lambda name, _blocking: deleted.append(name))
    monkeypatch.setattr("time.sleep", sleep)
    delete_application("it", clock=lambda: now)
    assert deleted == ["it"]
    assert now == pytest.approx(seconds, abs=0.15)
