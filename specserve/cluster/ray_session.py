"""The Ray that serves: the one that runs here already, or one of our own, which ends with us. And whether it can hold what is asked for."""

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
    HA_PROXY: "1",  # a sixth of the CPU a streamed chunk that Serve's own proxy takes
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # the only balancer in front is Serve's own, which knows at once;
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",  # with the default of 30 s Ctrl-C would take as long
}
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
SHORT = (
    "/tmp" if os.path.isdir("/tmp") else None
)  # whatever TMPDIR says: the path of a socket must be short
GATEWAY_CPUS = 1.0


@contextlib.contextmanager
def ray_here(config: Config, say: Callable[[str], None], *, join: bool = True) -> Iterator[bool]:
    """Whether it is our own. Raises ConfigError when the cluster is too small for the config, or its port is taken."""
    for name, value in _serve_settings(
        config
    ).items():  # read where Serve starts, and when it is imported
        os.environ.setdefault(name, value)
    import ray

    with contextlib.ExitStack() as stack:
        ours = not (join and joined())
        if ours:
            require_free_port(config)
            say("starting Ray")
            _keep_proxy_files_in(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="specserve-", dir=SHORT))
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
        yield ours


@contextlib.contextmanager
def own_ray(*, num_cpus: int) -> Iterator[None]:
    """A Ray of our own without Serve, for measurements. CPUs are counted, not divided."""
    import ray

    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **QUIET)
    try:
        yield
    finally:
        ray.shutdown()


def serve_runs() -> bool:
    """Whether Serve has been started on the cluster, by whomever."""
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
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --port (http.port), or end what listens there"
            ) from error


def _serve_settings(config: Config) -> dict[str, str]:
    """Serve's HAProxy takes no certificate, and would speak plainly to gateways that expect TLS; Serve's own proxy takes one."""
    files = [file for file in (config.http.tls_cert, config.http.tls_key) if file is not None]
    if not files:
        return SERVE_SETTINGS
    for file in files:
        if not os.access(file, os.R_OK):
            raise ConfigError(
                f"{file}, of http.tls_cert and http.tls_key, cannot be read; both name PEM files that this user may read"
            )
    if os.environ.get(HA_PROXY, "0") == "1":
        raise ConfigError(
            f"Serve's HAProxy cannot speak TLS: unset {HA_PROXY}, or leave http.tls_cert out and end TLS in a proxy in front"
        )
    return SERVE_SETTINGS | {HA_PROXY: "0"}


def joined() -> bool:
    """Whether a cluster runs here; then this process has joined it."""
    import ray

    try:
        ray.init(address="auto", **QUIET)
    except ConnectionError:
        return False
    return True


def _keep_proxy_files_in(directory: str) -> None:
    """Serve would leave its HAProxy's socket and files behind under /tmp."""
    os.environ["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"] = f"{directory}/haproxy.cfg"
    os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"] = f"{directory}/admin.sock"
    os.environ["RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"] = f"{directory}/metrics.sock"
    os.environ["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"] = directory
    os.environ["RAY_SERVE_HAPROXY_SERVER_STATE_FILE"] = f"{directory}/server-state"


def ours_would_hold(config: Config, *, num_gpus: int) -> dict[str, float]:
    """The resources of a Ray that we would start."""
    return {"CPU": float(_num_cpus(config)), "GPU": float(num_gpus)}


def _num_cpus(config: Config) -> int:
    """Ray counts CPUs, it does not divide them: on a small machine we declare as many as our parts ask for."""
    each = sum(bundle.resources["CPU"] for bundle in bundles(config, has_gpus=False))
    return max(os.cpu_count() or 1, int(config.replicas.max * each + GATEWAY_CPUS) + 1)
