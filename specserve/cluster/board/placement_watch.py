"""Watch whether the replicas of an application that starts find nodes. Deploys nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from specserve.cluster.node_resources import ClusterResources, cluster_resources, has_waiting_group
from specserve.cluster.placement import (
    Bundle,
    bundles,
    bundles_beside,
    engine_deployments,
    explain_waiting,
    gateway_bundle,
)
from specserve.config.tree import Config

PATIENCE_S = 5.0
"""Time that bundles may wait: Ray needs a moment to place them, or to free what others held."""


class PlacementWatch:
    """Bundles of an application that wait for a node, and how long they have."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Callable[[], float] = time.monotonic,
        resources: Callable[[], ClusterResources] = cluster_resources,
        has_waiting_engine: Callable[[str, str], bool] = has_waiting_group,
    ) -> None:
        self._config, self._clock = config, clock
        self._resources, self._has_waiting_engine = resources, has_waiting_engine
        self._since: float | None = None

    def check(self, *, gateway_runs: bool) -> str | None:
        """Return why bundles wait, once they have waited for PATIENCE_S."""
        found = self._resources()
        why = explain_waiting(self._waiting(found, gateway_runs=gateway_runs), found.nodes)
        if why is None:
            self._since = None
            return None
        now = self._clock()
        self._since = now if self._since is None else self._since
        return why if now - self._since >= PATIENCE_S else None

    def _waiting(self, found: ClusterResources, *, gateway_runs: bool) -> tuple[Bundle, ...]:
        gateway = gateway_bundle(self._config)
        has_gpus = any(node.total.get("GPU") for node in found.nodes)
        engines = tuple(
            bundle
            for deployment, part in engine_deployments(self._config).items()
            if self._has_waiting_engine(self._config.name, deployment)
            for bundle in bundles(part, has_gpus=has_gpus)
        )
        beside = tuple(
            bundle
            for bundle in bundles_beside(self._config, has_gpus=has_gpus)
            if found.has_waiting_actor(bundle.resources)
        )
        waits = not gateway_runs and found.has_waiting_actor(gateway.resources)
        return (*engines, *beside, gateway) if waits else (*engines, *beside)
