"""Inspect Ray and Serve for `specserve doctor`: version, running cluster, HAProxy and its ports.

Starts nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from specserve.cluster.placement import bundles, check_fits
from specserve.cluster.ray_session import (
    HA_PROXY,
    default_resources,
    is_serve_running,
    join_cluster,
)
from specserve.config.tree import Config
from specserve.errors import ConfigError, first_line


@dataclass(frozen=True, slots=True)
class Checkup:
    """State of Ray and Serve on this machine."""

    version: str
    joins: bool  # a cluster runs here, which serving would join
    serves: bool  # Serve runs on it
    resources: Mapping[str, float]  # of that cluster, or of the one that serving would start
    refusal: str | None  # why the config does not fit on it
    proxy: str | None  # path of HAProxy
    proxy_trouble: str  # why it cannot be used
    proxy_ports: Mapping[str, int]  # by the environment variables that change them


def check(config: Config, *, num_gpus: int) -> Checkup:
    """Inspect Ray and Serve; joins a running cluster meanwhile."""
    import ray

    joins = join_cluster()
    try:
        resources = (
            dict(ray.cluster_resources()) if joins else default_resources(config, num_gpus=num_gpus)
        )
        serves = joins and is_serve_running()
    finally:
        if joins:
            ray.shutdown()
    proxy, trouble = _proxy()
    return Checkup(
        ray.__version__,
        joins,
        serves,
        resources,
        _refusal(config, resources),
        proxy,
        trouble,
        _proxy_ports(config),
    )


def _refusal(config: Config, resources: Mapping[str, float]) -> str | None:
    try:
        check_fits(
            bundles(config, has_gpus=resources.get("GPU", 0) > 0),
            resources,
            replicas=max(1, config.replicas.min),
        )
    except ConfigError as error:
        return str(error)
    return None


def _proxy() -> tuple[str | None, str]:
    """Return the path of HAProxy as Serve finds it, or None and the reason."""
    from ray.serve._private.haproxy import get_haproxy_binary

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # we report what matters
    try:
        return str(get_haproxy_binary()), ""
    except (ImportError, OSError) as error:
        return None, first_line(error)


def _proxy_ports(config: Config) -> Mapping[str, int]:
    """Return HAProxy's ports, or none if HAProxy is not used because of TLS or the environment."""
    if config.http.tls_cert is not None or os.environ.get(HA_PROXY) == "0":
        return {}
    from ray.serve._private import constants

    names = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
    return {name: int(getattr(constants, name)) for name in names}
