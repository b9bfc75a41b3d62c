"""Decide how many engines and gateways there should be, for Serve's autoscaler.

The number of requests alone says little about a language model's load: a few long texts fill a KV
cache that many short ones do not. So requests and pages both count, each as the number of replicas
that it would keep busy. With a target for first tokens, the engines measure how many requests one
of them can have. Serve adds bounds, delays and the look-back; the simulator uses the policies too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specserve.cluster.board.load_forecast import LoadForecast
from specserve.engine import Coordinator
from specserve.engine.first_tokens import BUCKET_RATIO, HALF_LIFE_S, FirstTokenRecord

PAGES_METRIC = "pages_wanted"
"""Pages that all sequences of a replica, waiting ones too, would fill, as a share of its cache."""
LIMIT_METRIC = "load_limit"
"""Requests up to which a replica's first tokens are on time; 0 while none was too late."""
HIGHEST_METRIC = "highest_load"
"""Most requests of a replica at which the times of first tokens are known; 0 at first."""
CPU_METRIC = "cpu_share"
"""Share of a core that a gateway uses."""
START_METRIC = "start_seconds"
"""Seconds that a replica needed to start its workers."""
GATEWAY_BUSY = 0.7
"""Share of its core that a gateway may use; closer to all of it, chunks wait for each other."""
FULL_SHARE = 0.8
"""Share of the cache beyond which sequences are preempted and recomputed."""
SHRINK_BELOW = 0.85
"""Load, as a share of what one replica fewer could serve, below which a replica is removed.

A higher share would add the replica again at once.
"""
_PLAN = "plan"  # the key of the state that Serve keeps from one decision to the next


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """State of `first_token_policy`, kept from one decision to the next."""

    forecast: LoadForecast
    limit: float | None = None  # requests of one replica; None: first tokens were never too late
    limit_since: float = 0.0
    lead_s: float = 0.0  # that a new replica needs to start

    def with_limit(self, now: float, measured: float | None) -> tuple[float | None, float]:
        """Return the limit and since when it holds, given what the replicas measure.

        A lower one holds at once. A higher one is approached by one step in each half-life of the
        counts, since counts of loads that are now avoided fade.
        """
        limit = self.limit
        if measured is not None and (limit is None or measured < limit):
            return measured, now
        if limit is not None and now - self.limit_since >= HALF_LIFE_S:
            higher = limit * BUCKET_RATIO
            return (higher if measured is None else min(higher, measured)), now
        return limit, self.limit_since


def autoscaling_stats(
    coordinator: Coordinator,
    *,
    num_pages: int,
    first_tokens: FirstTokenRecord | None = None,
    start_seconds: float = 0.0,
) -> dict[str, float]:
    """Return the metrics that a replica reports to the autoscaler."""
    stats = {PAGES_METRIC: coordinator.scheduler.num_wanted_pages / num_pages}
    if first_tokens is None:
        return stats
    return stats | {
        LIMIT_METRIC: first_tokens.limit or 0.0,
        HIGHEST_METRIC: first_tokens.highest_load,
        START_METRIC: start_seconds,
    }


def policy(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas for a `ray.serve.config.AutoscalingContext`, and no state."""
    by_requests = context.total_num_requests / context.config.get_target_ongoing_requests()
    return steady(context, max(by_requests, _by_pages(context))), {}


def first_token_policy(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas with which first tokens come in time, and the state.

    It is the load of the moment at which a new replica would be ready, over the limit of one
    replica: the mean of what they measure. While first tokens were never too late, that is
    `replicas.target_ongoing_requests`, or a higher load if it was seen.
    """
    now, load = context.current_time, context.total_num_requests
    plan: LoadPlan = context.policy_state.get(_PLAN) or LoadPlan(LoadForecast(now, load))
    limits = [limit for limit in _newest(context, LIMIT_METRIC) if limit]
    measured = sum(limits) / len(limits) if limits else None
    limit, limit_since = plan.with_limit(now, measured)
    lead_s = max(_newest(context, START_METRIC), default=plan.lead_s)
    forecast = plan.forecast.observe(now, load)
    capacity = limit or max(
        [context.config.get_target_ongoing_requests(), *_newest(context, HIGHEST_METRIC)]
    )
    by_first_tokens = max(load, forecast.upper(lead_s)) / capacity if load else 0.0
    state = {_PLAN: LoadPlan(forecast, limit, limit_since, lead_s)}
    return steady(context, max(by_first_tokens, _by_pages(context))), state


def gateway_policy(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the number of gateways by streams, or by CPU if that needs more, and no state.

    A gateway's work is by chunks (0.17 ms each), so fast streams fill its core before slow ones do.
    """
    by_streams = context.total_num_requests / context.config.get_target_ongoing_requests()
    used: float = sum(context.aggregated_metrics.get(CPU_METRIC, {}).values())
    return steady(context, max(by_streams, used / GATEWAY_BUSY)), {}


def steady(context: Any, wanted: float) -> float:
    """Return the current number if one replica fewer would hardly do."""
    current: int = context.target_num_replicas
    fewer = current - 1
    return current if SHRINK_BELOW * fewer < wanted <= fewer else wanted


def _by_pages(context: Any) -> float:
    pages: float = sum(context.aggregated_metrics.get(PAGES_METRIC, {}).values())
    return pages / FULL_SHARE


def _newest(context: Any, metric: str) -> Iterable[float]:
    """Return the last reading of each replica; a mean over the look-back may be of no use."""
    series = context.raw_metrics.get(metric, {}).values()
    return [readings[-1].value for readings in series if readings]
