"""A real server on this machine: Ray, Serve, HAProxy, gateway, engine and workers."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from ray.serve._private.router import SharedRouterLongPollClient

from specserve.cluster.cluster_address import ANY_RUNNING
from specserve.cluster.launch import deploy
from specserve.cluster.proxy_settings import SERVE_SETTINGS, proxy_ports, proxy_settings
from specserve.cluster.ray_session import SHORT_TMP, ray_session
from specserve.config.tree import Config, config_from_keys

SERVE_COMMAND_S = 400.0
UNASSIGNED = range(20_000, 32_768)
"""Ports between the ranges of Ray's workers and of Linux, which gives any of its own: a raylet
that began meanwhile has listened on one."""
SHARED_CPUS = 32
"""For Ray's scheduler, which counts them only: more than any application of the tests asks for."""


@dataclass(frozen=True, slots=True)
class SharedServe:
    """A Ray that this process joins and leaves, and the port of the Serve that runs on it."""

    address: str
    port: int

    def config(self, keys: Mapping[str, object] | None = None) -> Config:
        """Return a config of a server here, whose draft is apart unless the keys place it."""
        return config_from_keys({"http.port": self.port, **with_placement(keys or {})})

    @contextmanager
    def join(self) -> Iterator[None]:
        """Join the Ray, on which applications may then be deployed in turn."""
        with forgotten_polls(), ray_session(self.config(), print, join=self.address):
            yield

    @contextmanager
    def served(
        self, keys: Mapping[str, object] | None = None, *, engine: type[Any] | None = None
    ) -> Iterator[tuple[str, Config]]:
        """Serve here, and yield the URL and the config. `engine` replaces the Engine class."""
        config = self.config(keys)
        # Serve runs on afterwards, as on a Ray that the server owns and is about to stop.
        with self.join(), deploy(config, print, owns_ray=True, engine=engine) as url:
            yield url, config


@contextmanager
def forgotten_polls() -> Iterator[None]:
    """Drop what Serve keeps of a connection to Ray, so that handles of the next one get news.

    It keeps what polls for news by the id of Serve's controller, which another Ray may give again.
    """
    try:
        yield
    finally:
        SharedRouterLongPollClient.get_or_create.cache_clear()


@contextmanager
def shared_ray() -> Iterator[SharedServe]:
    """Start a Ray whose Serve has files and ports of its own; the first to deploy starts Serve."""
    port = free_port()
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="specserve-", dir=SHORT_TMP) as directory,
    ):
        for name, value in {
            **SERVE_SETTINGS,
            **proxy_ports(excluded=port),
            **proxy_settings(config_from_keys({}), directory),
        }.items():
            patch.setenv(name, value)
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": SHARED_CPUS, "num_gpus": 0, "include_dashboard": False},
        )
        patch.undo()  # other servers of this process have their own
        try:
            yield SharedServe(cluster.address, port)
        finally:
            cluster.shutdown()


def with_placement(keys: Mapping[str, object]) -> Mapping[str, object]:
    """Return the keys with a draft apart, unless they say themselves where it is.

    A placement that is measured may come out either way. Several models say each their own.
    """
    says = {"draft.kind", "draft.placement", "models"} & keys.keys()
    return keys if says else {"draft.placement": "apart", **keys}


def free_port() -> int:
    """Return a port that nothing listens on, and that no process is given before it is used."""
    while True:
        port = secrets.choice(UNASSIGNED)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
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
    config = config_from_keys({"http.port": free_port(), **with_placement(keys or {})})
    said: list[str] = []
    with (
        forgotten_polls(),
        ray_session(config, said.append, join=ANY_RUNNING if join else None) as guard,
        deploy(config, said.append, owns_ray=guard is not None, engine=engine) as url,
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
