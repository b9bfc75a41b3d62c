"""Inspect Ray and Serve for `specserve doctor`: version, cluster, HAProxy and its ports.

Starts nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from specserve.cluster import haproxy
from specserve.cluster.cluster_address import running_clusters
from specserve.cluster.placement import (
    NodeResources,
    gateway_bundle,
    require_places,
    with_drafts_that_fit,
)
from specserve.cluster.preflight import require_serve
from specserve.cluster.proxy_settings import HA_PROXY, PROXY_PORTS
from specserve.cluster.ray_session import default_resources, join_cluster
from specserve.cluster.serve_instance import ServeInstance
from specserve.config.tree import Config
from specserve.errors import ConfigError, Unavailable, first_line


@dataclass(frozen=True, slots=True)
class Checkup:
    """State of Ray and Serve on this machine."""

    version: str
    joins: str | None  # address of the cluster that serving would join
    running: tuple[str, ...]  # clusters of this machine
    serves: bool  # Serve runs on the cluster that would be joined
    resources: Mapping[str, float]  # of that cluster, or of the one that serving would start
    refusal: str | None  # why it cannot be joined, or the config finds no place on it
    proxy: str | None  # path of HAProxy
    proxy_trouble: str  # why it cannot be used
    proxy_ports: Mapping[str, int]  # that the environment sets, by its variables
    uses_proxy: bool = True
    splices: bool = False  # for want of the command that switches it off
    moves_draft: bool = False  # into the target's process, for want of a GPU for it


def check(config: Config, *, num_gpus: int, join: str | None) -> Checkup:
    """Inspect Ray and Serve; joins the cluster at that address meanwhile. Raises Unavailable."""
    import ray

    require_serve()
    serves, resources, refusal = (
        _inspect_own(config, num_gpus) if join is None else _inspect_joined(config, join)
    )
    proxy, trouble = _proxy()
    uses_proxy = config.http.tls_cert is None and os.environ.get(HA_PROXY) != "0"
    return Checkup(
        ray.__version__,
        join,
        running_clusters(),
        serves,
        resources,
        refusal,
        proxy,
        trouble,
        {name: int(os.environ[name]) for name in PROXY_PORTS if name in os.environ},
        uses_proxy,
        haproxy.BINARY_PATH not in os.environ and haproxy.find_command() is None,
        refusal is None
        and with_drafts_that_fit(config, num_gpus=resources.get("GPU", 0.0)) != config,
    )


def _inspect_own(config: Config, num_gpus: int) -> tuple[bool, Mapping[str, float], str | None]:
    resources = default_resources(config, num_gpus=num_gpus)
    node = NodeResources("this machine", resources, resources, {})
    return False, resources, _refusal(config, (node,), None)


def _inspect_joined(config: Config, address: str) -> tuple[bool, Mapping[str, float], str | None]:
    import ray

    from specserve.cluster.node_resources import cluster_resources

    try:
        join_cluster(address)
    except (ConfigError, Unavailable) as error:
        return False, {}, str(error)
    try:
        found = ServeInstance.find()
        refusal = _refusal(config, cluster_resources().nodes, found)
        return found is not None, dict(ray.cluster_resources()), refusal
    finally:
        ray.shutdown()


def _refusal(
    config: Config, nodes: tuple[NodeResources, ...], serve: ServeInstance | None
) -> str | None:
    try:
        if serve is not None:
            serve.require_place(config, replace=False)
        require_places(config, nodes, gateway=gateway_bundle(config))
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
