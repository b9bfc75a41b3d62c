"""The pods of the manifest with a draft pool: enough for its engines and devices, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from specserve.cluster.placement import bundles
from specserve.config.tree import config_from_keys
from specserve.features.draft_pools.sharers import pool_bundles

Tree = dict[str, Any]
MANIFEST = Path(__file__).parents[3] / "deploy/kuberay-pool.yaml"


def _with_pool() -> tuple[Tree, dict[str, Tree]]:
    """Return the application of the RayService, and its worker groups."""
    trees = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    (service,) = [tree for tree in trees if tree["kind"] == "RayService"]
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return application, {group["groupName"]: group for group in groups}


def _room(group: Tree) -> dict[str, float]:
    """Return what Ray may hand out in a pod."""
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    limits = container["resources"]["limits"]
    return {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}


def test_engines_have_a_pod_each_and_the_pool_one_for_each_device() -> None:
    application, groups = _with_pool()
    config = config_from_keys(application["args"])
    replicas, pool = config.replicas, config.draft.pool
    wanted = bundles(config, has_gpus=True)
    for resource, amount in _room(groups["engines"]).items():
        assert sum(one.resources.get(resource, 0) for one in wanted) <= amount
    assert (groups["engines"]["minReplicas"], groups["engines"]["maxReplicas"]) == (
        replicas.min,
        replicas.max,
    )
    drafts = pool_bundles(config, has_gpus=True, at_most=True)
    for draft in drafts:
        assert draft.labels.items() <= groups["drafts"]["labels"].items()
        assert all(
            draft.resources.get(key, 0) <= has for key, has in _room(groups["drafts"]).items()
        )
    assert (groups["drafts"]["minReplicas"], groups["drafts"]["maxReplicas"]) == (
        pool.devices,
        len(drafts),
    )
    assert len(drafts) == pool.max_devices


def test_no_rank_takes_a_pods_gpu_that_is_the_pools() -> None:
    application, groups = _with_pool()
    config = config_from_keys(application["args"])
    for bundle in bundles(config, has_gpus=True):
        if bundle.resources.get("GPU"):
            assert bundle.labels.items() <= groups["engines"]["labels"].items()
            assert not bundle.labels.items() <= groups["drafts"]["labels"].items()
