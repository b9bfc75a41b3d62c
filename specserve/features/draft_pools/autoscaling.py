"""Decide how many devices a draft pool should have, for Serve's autoscaler."""

from __future__ import annotations

from typing import Any

from specserve.cluster.board.autoscaling import steady

DRAFTS_METRIC = "drafts_wanted"
"""Devices that the load of one device of a draft pool would keep as busy as they may be."""
ENGINES_METRIC = "pool_engines"
"""Engines that one device of a draft pool drafts for."""


def pool_policy(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the number of devices that a draft pool's load keeps busy, and no state.

    An engine drafts on one, so more devices than engines would be of no use.
    """
    drafts, engines = (
        sum(context.aggregated_metrics.get(metric, {}).values())
        for metric in (DRAFTS_METRIC, ENGINES_METRIC)
    )
    return steady(context, min(drafts, engines)), {}
