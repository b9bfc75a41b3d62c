"""The choice of the Ray cluster, and one line when none answers there."""

from __future__ import annotations

import socket

import pytest

from specserve.cluster import cluster_address
from specserve.cluster.cluster_address import address_to_join, require_answer, resolve
from specserve.errors import ConfigError, Unavailable


@pytest.mark.parametrize(
    ("join", "own_ray", "environment", "joined"),
    [
        (None, False, None, None),
        (None, False, "", None),
        (None, False, "local", None),
        (None, False, "10.0.0.1:6379", "10.0.0.1:6379"),
        (None, True, "10.0.0.1:6379", None),
        ("10.0.0.2:6379", False, "10.0.0.1:6379", "10.0.0.2:6379"),
        ("auto", False, None, "auto"),
    ],
)
def test_a_cluster_is_joined_only_when_asked(
    join: str | None, own_ray: bool, environment: str | None, joined: str | None
) -> None:
    variables = {} if environment is None else {"RAY_ADDRESS": environment}
    assert address_to_join(join, own_ray=own_ray, environment=variables) == joined


@pytest.mark.parametrize(
    ("running", "message"),
    [
        ((), r"no Ray cluster runs on this machine; --join HOST:PORT"),
        (("10.0.0.1:1", "10.0.0.1:2"), r"several .*: 10.0.0.1:1, 10.0.0.1:2; .*--join 10.0.0.1:1"),
    ],
)
def test_auto_is_the_one_cluster_of_this_machine(
    running: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster_address, "running_clusters", lambda: running)
    with pytest.raises(ConfigError, match=message):
        resolve("auto")


@pytest.mark.parametrize("address", ["nonsense", "ray://head:10001"])
def test_what_is_no_address_of_a_cluster_is_refused_with_one(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot join {address}.*--join HOST:PORT"):
        resolve(address)


def test_an_address_without_a_cluster_is_said_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(Unavailable, match=rf"no Ray cluster answers at {address}; .*--own-ray"):
        require_answer(address)


def test_what_listens_and_is_no_cluster_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_address, "ANSWER_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable, match=rf"no Ray cluster answers at {address}"):
            require_answer(address)
