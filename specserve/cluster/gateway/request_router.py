"""Ray Serve's router of requests to engines: where a prompt's prefix is cached, unless it is busy.

It runs in each gateway, inside the handle of the engines. Knows no HTTP and no pages.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from specserve.cluster.gateway.prefix_affinity import MAX_COMPARED, EngineState, PrefixAffinity
from specserve.types import Request
from specserve.wire.version import VERSION

if TYPE_CHECKING:
    from ray.serve._private.common import RequestMetadata

CACHED_TOKENS, RESTARTS, PROTOCOL = "cached_tokens", "restarts", "protocol"
"""What an engine reports to routers every REPORT_EVERY_S."""
REPORT_EVERY_S = 1.0


class PrefixRequestRouter(FIFOMixin, RequestRouter):
    """Router that prefers the engine which has most of a prompt cached and least to do.

    Calls that are no generations go to the least busy engine. A call gets the engine that was
    chosen for it. Serve would look it up by an id that all calls of one HTTP request share, such as
    the calls for its several prompts, and find only the first; or, in order of arrival, give the
    engine to a call that waits for another engine's answer.
    """

    # Serve calls it once, with the keyword arguments of the deployment.
    def initialize_state(self, *, max_running: int) -> None:  # type: ignore[override]
        self._affinity, self._max_running = PrefixAffinity(), max_running
        self._known: dict[ReplicaID, str] = {}  # names of the replicas at the last change
        self._ids: dict[str, ReplicaID] = {}  # and the reverse
        self._under_way: Counter[str] = Counter()  # sent by this router
        self._calls: Counter[tuple[str, str]] = Counter()  # of these, by HTTP request and engine
        self._routed: WeakKeyDictionary[asyncio.Task[Any], PendingRequest] = WeakKeyDictionary()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return replicas, the best first, those that can take a request before the others.

        All of a few; of many those that `PrefixAffinity` finds worth a comparison. Serve asks again
        if none of them takes the request.
        """
        request = _generation(pending_request)
        tokens, salt = ((), b"") if request is None else (_text(request), request.cache_salt)
        if len(candidate_replicas) > MAX_COMPARED:
            candidate_replicas = self._compared(tokens, salt) or candidate_replicas
        candidate_replicas = _of_this_release(candidate_replicas)
        available = self.select_available_replicas(candidate_replicas)
        by_name = {str(replica.replica_id): replica for replica in available or candidate_replicas}
        engines = {name: self._state(replica) for name, replica in by_name.items()}
        ranked = self._affinity.rank(tokens, salt, engines)
        task = asyncio.current_task()
        if pending_request is not None and task is not None:
            self._routed[task] = pending_request
            # Serve waits between two attempts only where a router says that it should.
            pending_request.routing_context.should_backoff = True
        if request is not None and ranked:
            # Recorded at once: an equal prompt may come before the engine has answered.
            self._affinity.record(ranked[0], tokens, salt, engines[ranked[0]])
        return [[by_name[name]] for name in ranked]

    def _get_pending_request_matching_metadata(
        self, request_metadata: RequestMetadata | None = None
    ) -> PendingRequest | None:
        """Return the call for which the task that asks has chosen an engine."""
        task = asyncio.current_task()
        pending = None if task is None else self._routed.get(task)
        return pending if pending is not None and not pending.future.done() else None

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Record which engine has taken a request."""
        name = str(replica_id)
        self._calls[pending_request.metadata.internal_request_id, name] += 1
        self._under_way[name] += 1
        request, replica = _generation(pending_request), self.curr_replicas.get(replica_id)
        if request is not None and replica is not None:
            self._affinity.record(name, _text(request), request.cache_salt, self._state(replica))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request no longer, unless the engine had refused it."""
        name = str(replica_id)
        call = internal_request_id, name
        if call not in self._calls:
            return
        self._calls[call] -= 1
        if not self._calls[call]:
            del self._calls[call]
        self._under_way[name] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Drop what was sent to engines that are gone.

        Serve calls it for every report of an engine as well, and then there is nothing to drop.
        """
        super().update_replicas(replicas)
        if self._known.keys() == self.curr_replicas.keys():
            return
        self._known = {replica_id: str(replica_id) for replica_id in self.curr_replicas}
        self._ids = {name: replica_id for replica_id, name in self._known.items()}
        names = self._ids.keys()
        self._affinity.keep(names)
        for name in self._under_way.keys() - names:
            del self._under_way[name]
        self._calls = Counter({call: n for call, n in self._calls.items() if call[1] in names})

    def _compared(self, tokens: Sequence[int], salt: bytes) -> list[RunningReplica]:
        """Return the replicas that are compared for a prompt, without those that have died."""
        running, ids = self.curr_replicas, self._ids
        names = self._affinity.candidates(tokens, salt)
        return [running[ids[name]] for name in names if ids.get(name) in running]

    def _state(self, replica: RunningReplica) -> EngineState:
        """Return what is known of an engine.

        Serve's own count, which has the requests of other gateways, comes with answers and is
        dropped when it is old.
        """
        stats = replica.routing_stats or {}
        counted = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return EngineState(
            requests=max(counted, self._under_way[str(replica.replica_id)]),
            max_running=self._max_running,
            cached_tokens=stats.get(CACHED_TOKENS),
            restarts=stats.get(RESTARTS, 0),
        )


def _of_this_release(replicas: list[RunningReplica]) -> list[RunningReplica]:
    """Return the replicas that speak this version of the protocol, if any is known to.

    In an update the others refuse what this gateway sends. One that has not reported yet is only
    called if none of this version is there.
    """
    versions = [(replica.routing_stats or {}).get(PROTOCOL) for replica in replicas]
    for wanted in (VERSION, None):
        chosen = [one for one, version in zip(replicas, versions, strict=True) if version == wanted]
        if chosen:
            return chosen
    return replicas


def _generation(pending: PendingRequest | None) -> Request | None:
    """Return the generation that a call asks for; None if it is another call."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Request) else None


def _text(request: Request) -> Sequence[int]:
    """Return the tokens that an engine has to compute before the next one."""
    return request.prompt + request.generated
