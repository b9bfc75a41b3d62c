"""The real thing on this machine, for tests of the whole: Ray, Serve, HAProxy, gateway, engine, workers."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from specserve.cluster.launch import running
from specserve.config import Config, parse


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def served(keys: Mapping[str, object] | None = None) -> Iterator[tuple[str, Config]]:
    """Joins the Ray that runs here, or starts one."""
    config = parse({"http.port": free_port(), **(keys or {})})
    said: list[str] = []
    with running(config, said.append) as url:
        yield url, config
