"""Join the Ray cluster that runs here or start a local one, and check that the config fits."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from specserve.cluster.placement import bundles, check_fits
from specserve.config.tree import Config
from specserve.errors import ConfigError

HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
SERVE_SETTINGS = {
    # HAProxy takes a sixth of the CPU that Serve's own proxy takes for a streamed chunk.
    HA_PROXY: "1",
    # The only load balancer in front is Serve's own, which needs no time to learn of a removal.
    # With the default of 30 s Ctrl-C would take as long.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",
}
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
# Used even if TMPDIR is set, because the path of a socket must be short.
SHORT_TMP = "/tmp" if os.path.isdir("/tmp") else None
GATEWAY_CPUS = 1.0


@contextlib.contextmanager
def ray_session(config: Config, say: Callable[[str], None], *, join: bool = True) -> Iterator[bool]:
    """Join or start Ray, yield whether it was started here, and leave or stop it at the end.

    Raises ConfigError when the cluster is too small for the config, or its port is taken.
    """
    # Serve reads the settings when it is imported and when it starts.
    for name, value in _serve_settings(config).items():
        os.environ.setdefault(name, value)
    import ray

    with contextlib.ExitStack() as stack:
        is_local = not (join and join_cluster())
        if is_local:
            require_free_port(config)
            say("starting Ray")
            _set_proxy_directory(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="specserve-", dir=SHORT_TMP))
            )
            ray.init(address="local", num_cpus=_num_cpus(config), include_dashboard=False, **QUIET)
        else:
            say("joined the Ray cluster that runs here")
        stack.callback(ray.shutdown)
        resources = ray.cluster_resources()
        check_fits(
            bundles(config, has_gpus=resources.get("GPU", 0) > 0),
            resources,
            replicas=max(1, config.replicas.min),
        )
        yield is_local


@contextlib.contextmanager
def local_ray(*, num_cpus: int) -> Iterator[None]:
    """Start a local Ray without Serve, for measurements.

    `num_cpus` is only a count for the scheduler; processes are not pinned to CPUs.
    """
    import ray

    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **QUIET)
    try:
        yield
    finally:
        ray.shutdown()


def is_serve_running() -> bool:
    """Return whether Serve runs on the cluster, started here or elsewhere."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def require_free_port(config: Config) -> None:
    host, port = config.http.host, config.http.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; "
                "choose another with --port (http.port), or end what listens there"
            ) from error


def _serve_settings(config: Config) -> dict[str, str]:
    """Return the environment of Serve, without HAProxy if TLS is configured.

    Serve's HAProxy takes no certificate and would send plain HTTP to gateways that expect TLS.
    Serve's own proxy takes one.
    """
    files = [file for file in (config.http.tls_cert, config.http.tls_key) if file is not None]
    if not files:
        return SERVE_SETTINGS
    for file in files:
        if not os.access(file, os.R_OK):
            raise ConfigError(
                f"{file}, of http.tls_cert and http.tls_key, cannot be read; "
                "both name PEM files that this user may read"
            )
    if os.environ.get(HA_PROXY, "0") == "1":
        raise ConfigError(
            f"Serve's HAProxy cannot speak TLS: unset {HA_PROXY}, "
            "or leave http.tls_cert out and end TLS in a proxy in front"
        )
    return SERVE_SETTINGS | {HA_PROXY: "0"}


def join_cluster() -> bool:
    """Join the cluster that runs on this machine; return False if there is none."""
    import ray

    try:
        ray.init(address="auto", **QUIET)
    except ConnectionError:
        return False
    return True


def _set_proxy_directory(directory: str) -> None:
    """Keep HAProxy's socket and files in `directory`; Serve would leave them behind under /tmp."""
    os.environ["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"] = f"{directory}/haproxy.cfg"
    os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"] = f"{directory}/admin.sock"
    os.environ["RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"] = f"{directory}/metrics.sock"
    os.environ["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"] = directory
    os.environ["RAY_SERVE_HAPROXY_SERVER_STATE_FILE"] = f"{directory}/server-state"


def default_resources(config: Config, *, num_gpus: int) -> dict[str, float]:
    """Return the resources of a Ray that `ray_session` would start."""
    return {"CPU": float(_num_cpus(config)), "GPU": float(num_gpus)}


def _num_cpus(config: Config) -> int:
    """Return the number of CPUs to declare to Ray, at least what our processes ask for.

    Ray only counts CPUs, so a small machine can declare more than it has.
    """
    each = sum(bundle.resources["CPU"] for bundle in bundles(config, has_gpus=False))
    return max(os.cpu_count() or 1, int(config.replicas.max * each + GATEWAY_CPUS) + 1)
