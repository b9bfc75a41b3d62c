"""The draft pools of a Serve application: one deployment each, which engines get a handle of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray import serve

from specserve.cluster.app import replica_options
from specserve.cluster.logs import logging_config
from specserve.config.tree import Config
from specserve.features.draft_pools.autoscaling import pool_policy
from specserve.features.draft_pools.deployment import DraftPool, pool_deployment_name
from specserve.features.draft_pools.sharers import (
    engines_per_draft,
    pool_bundles,
    pool_sharers,
    shared_draft_config,
)

LEAVE_TIMEOUT_S = 15.0
"""Time that engines have to leave a device of a pool that is removed: it notices in 5 s."""


def pools(config: Config, board: Any, *, has_gpus: bool) -> dict[str, Any]:
    """Return the pools of an application, by their names."""
    return {
        name: _pool(sharers, board, has_gpus=has_gpus)
        for name, sharers in pool_sharers(config).items()
    }


def _pool(sharers: Sequence[Config], board: Any, *, has_gpus: bool) -> Any:
    """Return the pool that the engines of these models share: one replica a device."""
    config = shared_draft_config(sharers)
    wanted = pool_bundles(config, has_gpus=has_gpus)[0]
    actor: dict[str, Any] = {
        "num_cpus": wanted.resources.get("CPU", 0),
        "num_gpus": wanted.resources.get("GPU", 0),
    }
    if wanted.labels:
        actor["label_selector"] = dict(wanted.labels)
    return serve.deployment(
        name=pool_deployment_name(config),
        logging_config=logging_config(config),
        **_scaling_options(config),
        ray_actor_options=actor,
        # An engine's call lasts as long as it stays, so Serve spreads engines over devices.
        max_ongoing_requests=engines_per_draft(config),
        health_check_period_s=1.0,
        # Its thread computes for long stretches; an engine finds a drafter that hangs by itself.
        health_check_timeout_s=60.0,
        # Engines that can move to another device do so; others go on without drafts until there is
        # one.
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=LEAVE_TIMEOUT_S,
        max_constructor_retry_count=3,
        max_surge_percent=0,
    )(DraftPool).bind(config, board, tuple(part.target for part in sharers[1:]))


def _scaling_options(config: Config) -> dict[str, Any]:
    """Return how many replicas a pool has, with the delays of the first model's engines."""
    pool, replicas = config.draft.pool, config.replicas
    return replica_options(replace(replicas, min=pool.devices, max=pool.most_devices), pool_policy)
