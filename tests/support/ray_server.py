"""The real thing on this machine, for tests of the whole: Ray, Serve, HAProxy, gateway, engine, workers."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from specserve.cluster.launch import deployed
from specserve.cluster.ray_session import ray_here
from specserve.config.tree import Config, parse


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def served(
    keys: Mapping[str, object] | None = None, *, join: bool = False
) -> Iterator[tuple[str, Config]]:
    """On a Ray of its own, or joining the one that runs."""
    config = parse({"http.port": free_port(), **(keys or {})})
    said: list[str] = []
    with (
        ray_here(config, said.append, join=join) as ours,
        deployed(config, said.append, ours=ours) as url,
    ):
        yield url, config
