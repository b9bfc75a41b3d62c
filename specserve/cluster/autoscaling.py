"""How many engine replicas there should be: a policy for Serve's autoscaler, which adds bounds, delays and the look-back by itself.

Requests alone tell little of a language model's load: a few long texts fill a cache that many short ones do not. So both count, each as
the number of replicas that it would keep busy.
"""

from __future__ import annotations

from typing import Any

from specserve.engine import Coordinator

PAGES = "pages_wanted"  # of a replica: what all its sequences fill, those that wait included, as a share of its cache
FULL = 0.8  # of a cache: beyond that sequences are preempted, and their work is done twice
SLACK = 0.85  # of what one replica fewer could do: only below that one is given up, lest it come back at once


def stats(coordinator: Coordinator, *, num_pages: int) -> dict[str, float]:
    """What a replica tells the autoscaler."""
    return {PAGES: coordinator.scheduler.num_wanted / num_pages}


def policy(context: Any) -> tuple[float, dict[str, Any]]:
    """Of a `ray.serve.config.AutoscalingContext`: the replicas wanted, and nothing to remember."""
    current = context.target_num_replicas
    by_requests = context.total_num_requests / context.config.get_target_ongoing_requests()
    by_pages = sum(context.aggregated_metrics.get(PAGES, {}).values()) / FULL
    wanted = max(by_requests, by_pages)
    fewer = current - 1
    return (current if SLACK * fewer < wanted <= fewer else wanted), {}
