"""The workers of one engine replica: started in its placement group, opened together, linked, and watched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specserve.cluster.link import Client, Keys
from specserve.cluster.placement import FIRST_RANK, Bundle
from specserve.cluster.remote import RemoteDrafter, RemoteTarget, Report, SentAhead
from specserve.cluster.workers import DraftWorker, Place, Ready, TargetWorker
from specserve.config import WITHOUT_WORKER, Config
from specserve.errors import ModelError, SpecserveError, WorkerLost
from specserve.types import ModelInfo
from specserve.wire import Stop

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Worker:
    """One actor, its link, and the call that lasts as long as it lives."""

    role: str  # target or draft
    actor: Any
    client: Client
    ready: Ready
    running: Awaitable[None]


class Group:
    """A target of some ranks and perhaps a drafter. Without the drafter the rounds go on; without a rank they cannot."""

    def __init__(self, ranks: tuple[Worker, ...], drafter: Worker | None, *, deadline_s: float, report: Report | None = None) -> None:
        self.ranks, self.draft_worker = ranks, drafter
        self.target = RemoteTarget([rank.client for rank in ranks], deadline_s=deadline_s, report=report)
        self.drafter: RemoteDrafter | SentAhead | None = None
        if drafter is not None:
            self.drafter = RemoteDrafter(drafter.client, deadline_s=deadline_s, report=report)
        elif ranks[0].ready.drafts:
            self.drafter = SentAhead(ranks[0].client)
        self._dead: str | None = None
        self._watches = [asyncio.create_task(self._watch(worker)) for worker in self.workers]

    @classmethod
    async def start(cls, config: Config, wanted: Sequence[Bundle], report: Report | None = None) -> Group:
        """Starts and opens all workers; raises what the first of them raised, and leaves none behind then. `report` hears of every exchange."""
        keys = Keys.fresh()
        actors = _actors(config, wanted, keys.public)
        try:
            ranks = await _open_ranks(actors.ranks, keys)
            drafter = None
            if actors.draft is not None:
                assert ranks[0].ready.info is not None
                drafter = _linked("draft", actors.draft, await _answer(actors.draft.open.remote(ranks[0].ready.info)), keys)
        except BaseException:
            for actor in (*actors.ranks, actors.draft):
                if actor is not None:
                    ray.kill(actor)
            raise
        return cls(ranks, drafter, deadline_s=config.faults.round_deadline_s, report=report)

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self.ranks if self.draft_worker is None else (*self.ranks, self.draft_worker)

    @property
    def lost(self) -> str | None:
        """Which rank has died, or hangs, once one does."""
        return self._dead or self.target.lost

    @property
    def info(self) -> ModelInfo:
        info = self.ranks[0].ready.info
        assert info is not None
        return info

    @property
    def places(self) -> dict[str, Place]:
        """Where each worker is: target-0, target-1, ..., draft."""
        places = {f"target-{number}": rank.ready.place for number, rank in enumerate(self.ranks)}
        return places if self.draft_worker is None else places | {"draft": self.draft_worker.ready.place}

    async def close(self) -> None:
        """Ends the workers and their links."""
        for watch in self._watches:
            watch.cancel()
        for worker in self.workers:
            worker.client.post(Stop())
        await asyncio.wait([asyncio.ensure_future(worker.running) for worker in self.workers], timeout=1.0)
        for worker in self.workers:
            worker.client.close()
            ray.kill(worker.actor)

    async def _watch(self, worker: Worker) -> None:
        """Learns within some 30 ms that a worker has died: then the call that was to last for ever ends."""
        try:
            await worker.running
            why = "it has stopped"
        except RayError as error:
            why = str(error).strip().splitlines()[0]
        message = f"a {worker.role} worker was lost: {why}"
        log.error("%s", message)
        if worker.role == "target":
            self._dead = message
        worker.client.fail(WorkerLost(message))


@dataclass(frozen=True, slots=True)
class _Actors:
    ranks: tuple[Any, ...]
    draft: Any


def _actors(config: Config, wanted: Sequence[Bundle], admits: bytes) -> _Actors:
    last = len(wanted) - 1
    ranks = tuple(
        _actor(TargetWorker, wanted[FIRST_RANK + rank], FIRST_RANK + rank, config, rank, admits) for rank in range(config.target.tensor_parallel)
    )
    draft = None if config.draft.kind in WITHOUT_WORKER else _actor(DraftWorker, wanted[last], last, config, admits)
    return _Actors(ranks, draft)


def _actor(kind: type[Any], bundle: Bundle, number: int, *arguments: object) -> Any:
    """In the replica's placement group; outside of Serve, wherever there is room."""
    group = get_current_placement_group()
    strategy = None if group is None else PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    options: dict[str, Any] = {"num_cpus": bundle.resources.get("CPU", 0), "num_gpus": bundle.resources.get("GPU", 0), "max_restarts": 0}
    if strategy is None:
        options["label_selector"] = dict(bundle.labels)
    else:
        options["scheduling_strategy"] = strategy
    return cast(Any, ray.remote(kind)).options(**options).remote(*arguments)


async def _open_ranks(actors: tuple[Any, ...], keys: Keys) -> tuple[Worker, ...]:
    meeting = await _answer(actors[0].meet.remote()) if len(actors) > 1 else None
    readies = await asyncio.gather(*(_answer(actor.open.remote(meeting)) for actor in actors))
    return tuple(_linked("target", actor, ready, keys) for actor, ready in zip(actors, readies, strict=True))


def _linked(role: str, actor: Any, ready: Ready, keys: Keys) -> Worker:
    return Worker(role, actor, Client(keys, ready.address), ready, asyncio.wrap_future(actor.run.remote().future()))


async def _answer(reference: Awaitable[Any]) -> Any:
    """What an actor's method gave; a refusal that it raised comes out as itself."""
    try:
        return await reference
    except RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, SpecserveError) else ModelError(f"a worker could not start: {cause or error}") from error
    except RayActorError as error:
        raise WorkerLost(f"a worker died while it started: {error}") from error
