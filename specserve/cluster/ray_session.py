"""Join a Ray cluster or start a local one, and check that the config fits."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from specserve.cluster.cluster_address import WAYS, require_answer, resolve, running_clusters
from specserve.cluster.logs import without_dead_workers
from specserve.cluster.placement import (
    GATEWAY_CPUS,
    Bundle,
    bundles,
    bundles_beside,
    gateway_bundle,
    require_places,
)
from specserve.cluster.port_owner import port_owner
from specserve.cluster.proxy_settings import proxy_ports, proxy_settings, serve_settings
from specserve.cluster.ray_guard import RayGuard
from specserve.config.tree import Config
from specserve.errors import ConfigError, Unavailable, first_line
from specserve.host import usable_cores

QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
# Used even if TMPDIR is set, because the path of a socket must be short.
SHORT_TMP = "/tmp" if os.path.isdir("/tmp") else None
RELEASE_S = 3.0


@contextlib.contextmanager
def ray_session(
    config: Config, say: Callable[[str], None], *, join: str | None = None, may_wait: bool = False
) -> Iterator[RayGuard | None]:
    """Join or start Ray, yield the guard of one that starts here, and leave or stop it at the end.

    Raises ConfigError when the cluster is too small for the config, unless it `may_wait` for
    nodes, or when a port is taken.
    """
    # Serve reads the settings when it is imported and when it starts.
    for name, value in serve_settings(config).items():
        os.environ.setdefault(name, value)
    import ray

    with contextlib.ExitStack() as stack:
        stack.enter_context(without_dead_workers())
        guard = None
        if join is None:
            guard = _start_ray(config, say, stack)
        else:
            join_cluster(join)
        stack.callback(ray.shutdown)
        if join is not None:
            say(_joined())
        if not may_wait:
            require_room(config, gateway=gateway_bundle(config))
        yield guard


def _start_ray(config: Config, say: Callable[[str], None], stack: contextlib.ExitStack) -> RayGuard:
    require_free_port(config)
    beside = "".join(
        f", beside the cluster at {address} (--join {address} would join it)"
        for address in running_clusters()[:1]
    )
    say(f"starting a Ray of its own{beside}")
    stack.enter_context(_environment(proxy_ports(excluded=config.http.port)))
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="specserve-", dir=SHORT_TMP))
    stack.enter_context(_environment(proxy_settings(config, directory)))
    guard = RayGuard(directory)
    stack.callback(guard.close)
    with guard.group():
        _start_local(_num_cpus(config))
    return guard


def _start_local(num_cpus: int) -> None:
    """Start a Ray. Raises Unavailable if its processes do not answer in the time that it gives."""
    import ray

    try:
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **QUIET)
    except SystemExit as error:  # of Ray's own handler of SIGTERM
        raise KeyboardInterrupt from error
    except Exception as error:  # Ray raises a plain one after half a minute of waiting
        raise Unavailable(
            f"Ray did not start on this machine: {first_line(error)} "
            "Where other work keeps it busy, end that, or join a Ray that runs (--join ADDRESS)"
        ) from error


def _joined() -> str:
    """Say which cluster was joined, and what is free on it."""
    import ray

    free, total = ray.available_resources(), ray.cluster_resources()
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    counts = ", ".join(
        f"{free.get(kind, 0):g} of {total[kind]:g} {kind}s"
        for kind in ("CPU", "GPU")
        if kind in total
    )
    return (
        f"joined the Ray cluster at {ray.get_runtime_context().gcs_address} "
        f"({num_nodes} node{'' if num_nodes == 1 else 's'}; {counts or 'no CPUs'} free)"
    )


def require_room(config: Config, *, gateway: Bundle) -> None:
    """Raise ConfigError if the config does not fit beside what runs.

    A cluster that is large enough when empty is queried again, since Ray takes a moment to count
    what others have just released.
    """
    from specserve.cluster.node_resources import cluster_resources

    until = time.monotonic() + RELEASE_S
    while True:
        try:
            require_places(config, cluster_resources().nodes, gateway=gateway)
        except ConfigError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
        else:
            return


@contextlib.contextmanager
def local_ray(*, num_cpus: int) -> Iterator[None]:
    """Start a local Ray without Serve, for measurements.

    `num_cpus` is only a count for the scheduler; processes are not pinned to CPUs.
    """
    import ray

    _start_local(num_cpus)
    try:
        yield
    finally:
        ray.shutdown()


def require_free_port(config: Config) -> None:
    host, port = config.http.host, config.http.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            owner = port_owner(port)
            listens = "" if owner is None else f", {owner} listens there"
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}{listens}; "
                "choose another with --port (http.port), or end what listens there"
            ) from error


def join_cluster(address: str) -> None:
    """Join the cluster there. Raises Unavailable when none answers, instead of waiting for it."""
    import ray
    from ray.exceptions import RayError

    resolved = resolve(address)
    require_answer(resolved)
    try:
        ray.init(address=resolved, **QUIET)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise Unavailable(f"cannot join {resolved}: {first_line(error)}; {WAYS}") from error


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the variables, which a Ray that starts hands to its processes, and restore them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def default_resources(config: Config, *, num_gpus: int) -> dict[str, float]:
    """Return the resources of a Ray that `ray_session` would start."""
    return {"CPU": float(_num_cpus(config)), "GPU": float(num_gpus)}


def _num_cpus(config: Config) -> int:
    """Return the number of CPUs to declare to Ray, at least what our processes ask for.

    Ray only counts CPUs, so a small machine can declare more than it has.
    """
    engines = sum(
        part.replicas.max * bundle.resources["CPU"]
        for part in config.each_model
        for bundle in bundles(part, has_gpus=False)
    )
    others = sum(
        bundle.resources["CPU"] for bundle in bundles_beside(config, has_gpus=False, at_most=True)
    )
    gateways = config.replicas.gateways * GATEWAY_CPUS
    return max(usable_cores(), int(engines + gateways + others) + 1)
