"""A real server on this machine: Ray, Serve, HAProxy, gateway, engine and workers."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from specserve.cluster.cluster_address import ANY_RUNNING
from specserve.cluster.launch import deploy
from specserve.cluster.ray_session import SERVE_SETTINGS, proxy_ports, ray_session
from specserve.config.tree import Config, config_from_keys

SERVE_COMMAND_S = 400.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def served(
    keys: Mapping[str, object] | None = None,
    *,
    join: bool = False,
    engine: type[Any] | None = None,
) -> Iterator[tuple[str, Config]]:
    """Serve on a Ray of its own or on the running one, and yield the URL and the config.

    `engine` replaces the Engine class.
    """
    given = keys or {}
    # A placement that is measured may come out either way. Several models say each their own.
    says = {"draft.kind", "draft.placement", "models"} & given.keys()
    placement = {} if says else {"draft.placement": "apart"}
    config = config_from_keys({"http.port": free_port(), **placement, **given})
    said: list[str] = []
    with (
        ray_session(config, said.append, join=ANY_RUNNING if join else None) as owns_ray,
        deploy(config, said.append, owns_ray=owns_ray, engine=engine) as url,
    ):
        yield url, config


def serve_command(
    dashboard: str, command: str, *arguments: str, env: Mapping[str, str] | None = None
) -> str:
    """Run the command line of Ray Serve and return what it prints. Raises AssertionError."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "serve"), command, *arguments, "-a", dashboard],
        env=env,
        capture_output=True,
        text=True,
        timeout=SERVE_COMMAND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def ray_with_dashboard(num_cpus: int, *, without: Sequence[str] = ()) -> Iterator[str]:
    """Start a Ray with a dashboard, which takes what `serve deploy` sends, and yield its URL.

    `num_cpus` is for Ray's scheduler. `without` names environment variables that it does not get.
    """
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SERVE_SETTINGS, **proxy_ports(excluded=port)}.items():
            patch.setenv(name, value)
        for name in without:
            patch.delenv(name, raising=False)
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": num_cpus,
                "num_gpus": 0,
                "include_dashboard": True,
                "dashboard_port": port,
            },
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            cluster.shutdown()
