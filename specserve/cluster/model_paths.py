"""Refuse a config whose local models lie on no node that could hold them.

An update with such a config would stop running replicas for ones that cannot start. Hub names are
left to the engine. Reads no files but their names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from specserve.cluster.node_resources import cluster_resources
from specserve.cluster.placement import (
    FIRST_RANK,
    Bundle,
    NodeResources,
    bundles,
    bundles_beside,
    could_hold,
    gateway_bundle,
    with_drafts_that_fit,
)
from specserve.config.hub_models import is_hub_name
from specserve.config.kinds import NGRAM_KINDS
from specserve.config.sections import HIDDEN_STATE_KINDS
from specserve.config.tree import Config
from specserve.errors import ModelNotFound, first_line
from specserve.models.checkpoints.gguf.files import find_gguf

log = logging.getLogger(__name__)

LOOK_S = 60.0
"""Seconds for the answers of other nodes, each of which may have to start a worker process."""

FindTrouble = Callable[[str, str], str | None]
"""Returns what is wrong with a path on a node, by Ray's id, or None if nothing is."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A path in the config, and the bundle whose process opens it."""

    key: str
    path: str
    bundle: Bundle
    is_checkpoint: bool  # rather than tables or heads


def require_local_models(config: Config) -> None:
    """Raise ModelNotFound for a local path that no node has which could hold its process.

    Where no such node is up yet, or none answers, nothing is known and nothing is raised.
    """
    found = cluster_resources()
    nodes, fitted = found.nodes, with_drafts_that_fit(config, num_gpus=found.num_gpus)
    for part in fitted.each_model:
        for model in local_models(part, has_gpus=found.num_gpus > 0):
            look = partial(_trouble_on, is_checkpoint=model.is_checkpoint)
            require_on_a_node(model, nodes, look)


def local_models(config: Config, *, has_gpus: bool) -> Iterator[LocalModel]:
    """Yield the local paths of target and drafters, and the target's once more for the gateway."""
    wanted, target = bundles(config, has_gpus=has_gpus), config.target.path
    if not is_hub_name(target):
        yield LocalModel("target.path", target, wanted[FIRST_RANK], is_checkpoint=True)
        yield LocalModel("target.path", target, gateway_bundle(config), is_checkpoint=True)
    for number, draft in enumerate(config.draft.drafter_configs):
        key = f"draft.stages[{number}].path" if config.draft.stages else "draft.path"
        has_files = draft.path is not None and draft.kind != "none"
        # Only a draft model and a head may come from the hub.
        may_be_on_hub = draft.kind in ("neural", *HIDDEN_STATE_KINDS)
        if has_files and not (may_be_on_hub and is_hub_name(draft.path or "")):
            beside = bundles_beside(config, has_gpus=has_gpus)
            apart = beside[:1] or wanted[-1:]
            is_apart = config.draft.may_be_apart or config.draft.is_pooled
            holder = apart[0] if is_apart else wanted[FIRST_RANK]
            is_checkpoint = draft.kind not in (*NGRAM_KINDS, "heads")
            yield LocalModel(key, draft.path or "", holder, is_checkpoint=is_checkpoint)


def require_on_a_node(
    model: LocalModel, nodes: Sequence[NodeResources], find_trouble: FindTrouble
) -> None:
    """Raise ModelNotFound if each node that could hold the model's bundle is known to lack it."""
    troubles: list[str] = []
    for node in nodes:
        if could_hold(node, model.bundle):
            trouble = find_trouble(node.node, model.path)
            if trouble is None:
                return
            troubles.append(f"{node.address}: it {trouble}")
    if troubles:
        raise ModelNotFound(
            f"{model.key} {model.path} is on no node that could hold the {model.bundle.name} "
            f"({'; '.join(troubles)}); give a directory that is there, or a hub name",
            param=model.key,
        )


def path_trouble(path: str, *, is_checkpoint: bool) -> str | None:
    """Return what is wrong with a path on this node, or None if nothing is."""
    found = Path(path).expanduser()
    if not found.exists():
        return "does not exist"
    if not is_checkpoint or find_gguf(found) is not None:
        return None
    if not found.is_dir():
        return "is a file"
    if not (found / "config.json").is_file():
        return "has no config.json"
    return None


def _trouble_on(node: str, path: str, *, is_checkpoint: bool) -> str | None:
    """Return what is wrong with a path on a node, or None if nothing is, or it does not answer."""
    if node == ray.get_runtime_context().get_node_id():
        return path_trouble(path, is_checkpoint=is_checkpoint)
    placed = NodeAffinitySchedulingStrategy(node, soft=False)
    remote: Any = ray.remote  # whose types know no keyword arguments
    look = remote(path_trouble).options(num_cpus=0, scheduling_strategy=placed, max_retries=0)
    try:
        trouble: str | None = ray.get(
            look.remote(path, is_checkpoint=is_checkpoint), timeout=LOOK_S
        )
    except RayError as error:
        log.warning("node %s did not say whether it has %s: %s", node, path, first_line(error))
        return None
    return trouble
