"""Build the Serve application from a config tree.

`serve run`, `serve build` and `serve deploy` call `build`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import yaml
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException

from specserve.cluster.board.autoscaling import (
    first_token_policy,
    gateway_policy,
    policy,
)
from specserve.cluster.board.placement_watch import PlacementWatch
from specserve.cluster.board.status_board import Board
from specserve.cluster.deployments import Engine, Gateway
from specserve.cluster.gateway.request_router import REPORT_EVERY_S, PrefixRequestRouter
from specserve.cluster.logs import logging_config
from specserve.cluster.model_paths import require_local_models
from specserve.cluster.placement import (
    COORDINATOR,
    Bundle,
    bundles,
    engine_deployments,
    has_room,
    with_drafts_that_fit,
)
from specserve.config.features import part
from specserve.config.hub_models import unpinned_models
from specserve.config.sections import ReplicasConfig
from specserve.config.tree import Config, config_from_keys
from specserve.errors import SpecserveError

log = logging.getLogger(__name__)

Policy = Callable[[Any], tuple[float, dict[str, Any]]]

GATEWAY_STREAMS = 4096
"""Most streams of one gateway; the engines refuse requests long before."""
GATEWAY_TARGET = 256
"""Streams of one gateway beyond which another one is started."""
DEFAULT_SURGE_PERCENT = 25
BURST = 64
"""Requests on their way to an engine that it does not count yet."""
LOOK_BACK_S = 30.0
REPORTS_PER_LOOK_BACK = 4
"""Reports of its load that a replica or gateway sends to the autoscaler during the look-back."""


def build(args: Mapping[str, object]) -> Application:
    """Build the application from config keys; dotted keys, as `serve run` gives them, hold YAML.

    Raises RayServeException for what is wrong with them, of which alone Serve shows the message
    without a traceback. Replicas that run are not touched then.
    """
    try:
        config = config_from_keys({key: _parse_yaml(value) for key, value in args.items()})
        for model in unpinned_models(config):
            log.warning("%s", model)
        if ray.is_initialized():  # not for `serve build`, whose file is for other machines
            require_local_models(config)
        return application(config)
    except SpecserveError as error:
        raise RayServeException(str(error)) from error


def application(config: Config, *, engine: type[Any] | None = None) -> Application:
    """Build the application: gateways, engines as the load demands, and a board between them.

    Several models have a deployment of engines each. `engine` may be another class with the
    methods of Engine.
    """
    config = _with_shared_weights(config)
    num_gpus = ray.cluster_resources().get("GPU", 0.0) if ray.is_initialized() else 0.0
    models, has_gpus = engine_deployments(config), num_gpus > 0
    fitted = with_drafts_that_fit(config, num_gpus=num_gpus)
    wanted = {
        name: bundles(model, has_gpus=has_gpus)
        for name, model in engine_deployments(fitted).items()
    }
    surges = {name: _surge_percent(model.replicas, wanted[name]) for name, model in models.items()}
    board = _board(config, PlacementWatch(fitted))
    pools: dict[str | None, Any] = {}
    if config.shares_drafts:
        pools = part("draft_pools.application:pools")(config, board, has_gpus=has_gpus)
    engines = [
        serve.deployment(
            name=name,
            logging_config=logging_config(config),
            max_surge_percent=surges[name],
            **engine_options(model, wanted[name]),
            **_scaling_options(model.replicas),
        )(engine or Engine).bind(
            model,
            wanted[name],
            board,
            *([model.model] if len(config.models) > 1 else []),
            **({"pool": pools[model.draft.pool.name]} if model.draft.is_pooled else {}),
        )
        for name, model in models.items()
    ]
    return _gateway(config, board, engines, surge_percent=100 if all(surges.values()) else 0)


def _board(config: Config, watch: PlacementWatch) -> Application:
    has_several = len(config.models) > 1
    board: Application = serve.deployment(
        name="Board",
        ray_actor_options=_http_node_options(config, num_cpus=0),
        logging_config=logging_config(config),
    )(Board).bind(
        may_sleep=config.replicas.min == 0,
        models={one.model: one.replicas.min == 0 for one in config.models if has_several},
        min_gateways=config.replicas.min_gateways,
        watch=watch,
    )
    return board


def _gateway(
    config: Config, board: Application, engines: Sequence[Application], *, surge_percent: int
) -> Application:
    gateway: Application = serve.deployment(
        name="Gateway",
        logging_config=logging_config(config),
        max_surge_percent=surge_percent,
        **_gateway_options(config),
    )(Gateway).bind(config, board, *engines)
    return gateway


def _with_shared_weights(config: Config) -> Config:
    """Return the config with weights shared unless it says no: a server restarts its workers."""
    shared = config.weights.shared is not False
    return replace(
        config,
        weights=replace(config.weights, shared=shared),
        models=tuple(map(_with_shared_weights, config.models)),
    )


def engine_options(config: Config, wanted: tuple[Bundle, ...]) -> dict[str, Any]:
    """Return the options of an engine's replicas, apart from their number."""
    limits = config.limits
    options: dict[str, Any] = {
        "placement_group_bundles": [dict(bundle.resources) for bundle in wanted],
        "placement_group_strategy": "PACK",
        "ray_actor_options": {"num_cpus": wanted[COORDINATOR].resources["CPU"]},
        # The engine itself refuses what is too much, with a helpful message.
        "max_ongoing_requests": limits.max_running + limits.max_queued + BURST,
        "max_queued_requests": limits.max_queued + BURST,
        "health_check_period_s": 1.0,
        # The health check only reads counters. An engine that is slow under load is not unhealthy.
        "health_check_timeout_s": 60.0,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": 20.0,
        "max_constructor_retry_count": 3,
    }
    if config.replicas.routing == "prefix" and config.cache.prefix_caching:
        routing: dict[str, Any] = {
            "request_router_class": PrefixRequestRouter,
            "request_router_kwargs": {"max_running": limits.max_running},
            "request_routing_stats_period_s": REPORT_EVERY_S,
        }
        options["request_router_config"] = RequestRouterConfig(**routing)
    if any(bundle.labels for bundle in wanted):
        options["placement_group_bundle_label_selector"] = [
            dict(bundle.labels) for bundle in wanted
        ]
    return options


def _surge_percent(replicas: ReplicasConfig, wanted: tuple[Bundle, ...]) -> int:
    """Return the share of new replicas that an update starts before it stops old ones.

    It is 0 where there is no room for a new replica, since the update would wait forever.
    """
    if replicas.surge_percent is not None:
        return replicas.surge_percent
    return (
        DEFAULT_SURGE_PERCENT
        if ray.is_initialized() and has_room(wanted, ray.available_resources())
        else 0
    )


def _http_node_options(config: Config, *, num_cpus: int) -> dict[str, Any]:
    """Return the options of a gateway, or of the board, on which their readiness depends."""
    labels = dict(config.http.label_selector)
    return {"num_cpus": num_cpus, **({"label_selector": labels} if labels else {})}


def _gateway_options(config: Config) -> dict[str, Any]:
    options: dict[str, Any] = {
        "ray_actor_options": _http_node_options(config, num_cpus=1),
        "max_ongoing_requests": GATEWAY_STREAMS,
        "max_constructor_retry_count": 3,
        # One that died is found, and replaced, by its next check.
        "health_check_period_s": 1.0,
        # The streams of a gateway cannot move elsewhere, since their connections end here.
        "graceful_shutdown_timeout_s": max(
            part.limits.request_timeout_s for part in config.each_model
        ),
    }
    replicas = config.replicas
    if replicas.min_gateways == replicas.gateways:
        return options | {"num_replicas": replicas.gateways}
    return options | {
        "autoscaling_config": {
            "policy": _named(gateway_policy),
            "min_replicas": replicas.min_gateways,
            "max_replicas": replicas.gateways,
            "target_ongoing_requests": GATEWAY_TARGET,
        }
    }


def _scaling_options(replicas: ReplicasConfig) -> dict[str, Any]:
    decide = policy if replicas.target_ttft_s is None else first_token_policy
    return replica_options(replicas, decide)


def replica_options(replicas: ReplicasConfig, decide: Policy) -> dict[str, Any]:
    """Return how many replicas a deployment has; between fewest and most `decide` says it."""
    if replicas.min == replicas.max:
        return {"num_replicas": replicas.min}
    # With a look-back longer than the delays the autoscaler oscillates: it would react
    # again to load that it has already scaled for.
    look_back_s = max(1.0, min(LOOK_BACK_S, replicas.upscale_delay_s, replicas.downscale_delay_s))
    return {
        "autoscaling_config": {
            "policy": _named(decide),
            "min_replicas": replicas.min,
            "max_replicas": replicas.max,
            "target_ongoing_requests": replicas.target_ongoing_requests,
            "upscale_delay_s": replicas.upscale_delay_s,
            "downscale_delay_s": replicas.downscale_delay_s,
            "look_back_period_s": look_back_s,
            # Serve's 10 s would be longer than a short look-back, and delay each decision.
            "metrics_interval_s": look_back_s / REPORTS_PER_LOOK_BACK,
        }
    }


def _named(decide: Policy) -> dict[str, str]:
    return {"policy_function": f"{decide.__module__}:{decide.__qualname__}"}


def _parse_yaml(value: object) -> object:
    return yaml.safe_load(value) if isinstance(value, str) else value
