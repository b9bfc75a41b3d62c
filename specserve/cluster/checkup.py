"""What `specserve doctor` wants to know of Ray and Serve: versions, the cluster that runs here if one does, HAProxy and its ports. Starts nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from specserve.cluster.placement import bundles, check_fits
from specserve.cluster.ray_session import HA_PROXY, joined, ours_would_hold, serve_runs
from specserve.config.tree import Config
from specserve.errors import ConfigError, first_line


@dataclass(frozen=True, slots=True)
class Checkup:
    """None of what was not there, or could not be asked."""

    version: str
    joins: bool  # whether a cluster runs here, which serving would join
    serves: bool  # whether Serve runs on it
    resources: Mapping[str, float]  # of that cluster, or of the one that serving would start
    refusal: str | None  # why the config finds no place on it
    proxy: str | None  # where HAProxy lies
    proxy_trouble: str  # why it cannot be used
    proxy_ports: Mapping[str, int]  # by the variables that say otherwise


def check(config: Config, *, num_gpus: int) -> Checkup:
    """Joins a cluster for a moment, and leaves it."""
    import ray

    joins = joined()
    try:
        resources = (
            dict(ray.cluster_resources()) if joins else ours_would_hold(config, num_gpus=num_gpus)
        )
        serves = joins and serve_runs()
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
    """As Serve finds it, and why not."""
    from ray.serve._private.haproxy import get_haproxy_binary

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # what is to be said, we say
    try:
        return str(get_haproxy_binary()), ""
    except (ImportError, OSError) as error:
        return None, first_line(error)


def _proxy_ports(config: Config) -> Mapping[str, int]:
    """Of HAProxy, unless TLS keeps it out."""
    if config.http.tls_cert is not None or os.environ.get(HA_PROXY) == "0":
        return {}
    from ray.serve._private import constants

    names = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
    return {name: int(getattr(constants, name)) for name in names}
