"""Find out that the node of a target's rank is being drained. Knows node ids, and no requests.

Ray Serve moves a replica whose own node is drained, and knows nothing of workers on other nodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ray._private.worker import global_worker

from specserve.cluster.engine.group import DRAFT
from specserve.cluster.engine.worker_host import WorkerPlace

log = logging.getLogger(__name__)

CHECK_EVERY_S = 2.0
"""A spot node is announced 30 s or more before it goes; a replica may take 20 s to stop."""
RAY_ANSWERS_S = 5.0


def draining_nodes() -> Collection[str]:
    """Return Ray's ids of the nodes that are being drained; Ray has no public call for it."""
    worker: Any = global_worker
    nodes: Mapping[str, int] = worker.gcs_client.get_draining_nodes(timeout=RAY_ANSWERS_S)
    return nodes.keys()


class DrainWatch:
    """Watch of the nodes of an engine's ranks.

    A draft on a draining node is left alone: rounds go on without one until it runs elsewhere.
    """

    def __init__(
        self,
        places: Callable[[], Mapping[str, WorkerPlace]],
        own_node: str,
        *,
        nodes: Callable[[], Collection[str]] = draining_nodes,
        every_s: float = CHECK_EVERY_S,
    ) -> None:
        """Watch the nodes of `places()`, by worker; `own_node` is the coordinator's."""
        self._places, self._own_node = places, own_node
        self._nodes, self._every_s = nodes, every_s
        self.trouble: str | None = None  # why this replica must end, or None

    async def run(self) -> None:
        """Look for draining nodes until cancelled."""
        while True:
            try:
                self.trouble = self._find_trouble(await asyncio.to_thread(self._nodes))
            except Exception:  # Ray's head may be away; the next look may succeed
                log.warning("it is not known which nodes are draining", exc_info=True)
            await asyncio.sleep(self._every_s)

    def _find_trouble(self, draining: Collection[str]) -> str | None:
        """Return which ranks lose their nodes; None if Serve moves the replica by itself."""
        if self._own_node in draining:
            return None
        lost = [
            worker
            for worker, place in self._places().items()
            if worker != DRAFT and place.node in draining
        ]
        return f"the node of {', '.join(lost)} is being drained" if lost else None
