"""Ports of Serve's proxies, which several servers of one machine must not share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from specserve.cluster.proxy_settings import (
    PROXY_PORT_RANGE,
    PROXY_PORTS,
    SERVE_SETTINGS,
    proxy_ports,
    proxy_settings,
)
from specserve.cluster.ray_session import _environment, local_ray
from specserve.config.tree import config_from_keys
from specserve.errors import ConfigError, Unavailable


def test_each_proxy_gets_a_free_port_that_is_not_the_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in PROXY_PORTS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("specserve.cluster.proxy_settings.PROXY_PORT_RANGE", range(20000, 20005))
    monkeypatch.setattr("specserve.cluster.proxy_settings._is_free", lambda port: port != 20001)
    chosen = proxy_ports(excluded=20003)
    assert set(chosen) == set(PROXY_PORTS)
    assert set(chosen.values()) == {"20000", "20002", "20004"}


def test_a_port_that_the_environment_sets_is_kept_or_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv(PROXY_PORTS[0], str(port))
        with pytest.raises(ConfigError, match=rf"{PROXY_PORTS[0]} is {port}, .* leave it out"):
            proxy_ports(excluded=1)
    assert PROXY_PORTS[0] not in proxy_ports(excluded=1)


def test_a_ray_that_does_not_start_in_time_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nMore of it.")

    monkeypatch.setattr("ray.init", time_out)
    with (
        pytest.raises(Unavailable, match=r"timed out during startup\. Where other work"),
        local_ray(num_cpus=1),
    ):
        pytest.fail("it went on without Ray")


def test_the_system_and_ray_hand_out_none_of_these_ports() -> None:
    workers, gateways, system = 19999, 30000, 32768
    assert workers < PROXY_PORT_RANGE.start < PROXY_PORT_RANGE.stop <= gateways < system


def test_the_environment_is_as_it_was_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSERVE_A", "before")
    monkeypatch.delenv("SPECSERVE_B", raising=False)
    with _environment({"SPECSERVE_A": "1", "SPECSERVE_B": "2"}):
        assert (os.environ["SPECSERVE_A"], os.environ["SPECSERVE_B"]) == ("1", "2")
    assert os.environ["SPECSERVE_A"] == "before"
    assert "SPECSERVE_B" not in os.environ


def test_streams_outlast_the_replacement_of_the_proxy_that_carries_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
    monkeypatch.delenv(name, raising=False)
    config = config_from_keys({"limits.request_timeout_s": 900.5})
    assert proxy_settings(config, "/anywhere")[name] == "901"


def test_serve_gives_its_proxies_the_minute_that_is_set() -> None:
    name = "PROXY_READY_CHECK_TIMEOUT_S"
    code = f"from ray.serve._private.constants import {name}; print({name})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **SERVE_SETTINGS},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout.splitlines()[-1]) == 60
