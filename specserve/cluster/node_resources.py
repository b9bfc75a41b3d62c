"""Read from Ray what each node has free, and what waits for resources. Knows no config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray._private.worker import global_worker
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.util import placement_group_table

from specserve.cluster.placement import NodeResources

REPLICA_PREFIX = "SERVE_REPLICA::"  # of the names that Serve gives to placement groups


@dataclass(frozen=True, slots=True)
class ClusterResources:
    """Nodes that live, and the resources of actors that wait for a node."""

    nodes: tuple[NodeResources, ...]
    waiting_actors: tuple[Mapping[str, float], ...]

    @property
    def num_gpus(self) -> float:
        return sum(node.total.get("GPU", 0.0) for node in self.nodes)

    def has_waiting_actor(self, resources: Mapping[str, float]) -> bool:
        return any(dict(waiting) == dict(resources) for waiting in self.waiting_actors)


def cluster_resources() -> ClusterResources:
    """Return the state that Ray's autoscaler would act on, whether there is one or not."""
    worker: Any = global_worker
    state = get_cluster_resource_state(worker.gcs_client)
    nodes = tuple(
        NodeResources(
            node.node_ip_address,
            dict(node.total_resources),
            dict(node.available_resources),
            dict(node.labels),
            node.node_id.hex(),
        )
        for node in state.node_states
        if node.total_resources
    )
    waiting = tuple(
        dict(demand.request.resources_bundle) for demand in state.pending_resource_requests
    )
    return ClusterResources(nodes, waiting)


def has_waiting_group(app: str, deployment: str) -> bool:
    """Return whether a placement group of a replica waits for its resources."""
    prefix = f"{REPLICA_PREFIX}{app}#{deployment}#"
    return any(
        group["name"].startswith(prefix) and group["state"] == "PENDING"
        for group in placement_group_table().values()
    )
