"""Decide how many engine replicas there should be, as a policy for Serve's autoscaler.

The number of requests alone says little about a language model's load: a few long texts fill a KV
cache that many short ones do not. So requests and pages both count, each as the number of replicas
that it would keep busy. Serve adds bounds, delays and the look-back.
"""

from __future__ import annotations

from typing import Any

from specserve.engine import Coordinator

PAGES_METRIC = "pages_wanted"
"""Pages that all sequences of a replica, waiting ones too, would fill, as a share of its cache."""
FULL_SHARE = 0.8
"""Share of the cache beyond which sequences are preempted and recomputed."""
SHRINK_BELOW = 0.85
"""Load, as a share of what one replica fewer could serve, below which a replica is removed.

A higher share would add the replica again at once.
"""


def autoscaling_stats(coordinator: Coordinator, *, num_pages: int) -> dict[str, float]:
    """Return the metrics that a replica reports to the autoscaler."""
    return {PAGES_METRIC: coordinator.scheduler.num_wanted_pages / num_pages}


def policy(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas for a `ray.serve.config.AutoscalingContext`, and no state."""
    current = context.target_num_replicas
    by_requests = context.total_num_requests / context.config.get_target_ongoing_requests()
    by_pages = sum(context.aggregated_metrics.get(PAGES_METRIC, {}).values()) / FULL_SHARE
    wanted = max(by_requests, by_pages)
    fewer = current - 1
    return (current if SHRINK_BELOW * fewer < wanted <= fewer else wanted), {}
