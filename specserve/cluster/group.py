"""The workers of one engine replica: started in its placement group, opened together, linked, and kept alive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specserve.cluster.placement import FIRST_RANK, Bundle
from specserve.cluster.remote import RemoteDrafter, RemoteTarget, Report, SentAhead
from specserve.cluster.supervisor import Keeper, Worker, Workers, end_process
from specserve.cluster.transport.link import Client, Keys
from specserve.cluster.workers import Born, DraftWorker, Place, Ready, TargetWorker
from specserve.config.tree import WITHOUT_WORKER, Config
from specserve.errors import ModelError, SpecserveError, WorkerLost
from specserve.types import ModelInfo

TARGET, DRAFT = "target", "draft"
_ACTORS: dict[type[Any], Any] = {
    kind: ray.remote(kind) for kind in (TargetWorker, DraftWorker)
}  # sent to the cluster once, and not at each start


class Group:
    """A target of some ranks and perhaps a drafter. Without the drafter the rounds go on; without a rank they wait until all ranks are new."""

    def __init__(
        self, config: Config, wanted: Sequence[Bundle], keys: Keys, report: Report | None
    ) -> None:
        self._config, self._draft_config, self._wanted, self._keys = config, config, wanted, keys
        deadline_s = config.faults.round_deadline_s
        self.target = RemoteTarget(deadline_s=deadline_s, report=report)
        self.drafter: RemoteDrafter | SentAhead | None = None
        if config.draft.kind not in WITHOUT_WORKER:
            self.drafter = RemoteDrafter(deadline_s=deadline_s, report=report)
        elif config.draft.kind != "none":
            self.drafter = SentAhead(self.target)
        self.keepers: tuple[Keeper, ...] = ()
        self.draft_context: int | None = None
        self.info: ModelInfo

    @classmethod
    async def start(
        cls, config: Config, wanted: Sequence[Bundle], report: Report | None = None
    ) -> Group:
        """Starts and opens all workers; raises what the first of them raised, and leaves none behind then. `report` hears of every exchange."""
        group = cls(config, wanted, Keys.fresh(), report)
        drafter = (
            group._new_drafter() if isinstance(group.drafter, RemoteDrafter) else None
        )  # its process starts while the ranks read their weights
        with _none_left([] if drafter is None else [drafter]):
            ranks = await group._start_ranks()
            group.info = _info(ranks)
        try:
            drafters = () if drafter is None else await group._opened(drafter)
        except BaseException:
            for rank in ranks:
                rank.end()
            raise
        group._keep(ranks, drafters)
        return group

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those that are there now."""
        return tuple(worker for keeper in self.keepers for worker in keeper.workers)

    @property
    def draft_worker(self) -> Worker | None:
        return next((worker for worker in self.workers if worker.role == DRAFT), None)

    @property
    def troubles(self) -> dict[str, str]:
        """By role, why it is not at work now."""
        return {
            keeper.role: keeper.trouble for keeper in self.keepers if keeper.trouble is not None
        }

    @property
    def restarts(self) -> dict[str, int]:
        return {keeper.role: keeper.num_restarts for keeper in self.keepers}

    @property
    def is_lost(self) -> bool:
        """Whether the target will not come back."""
        return any(keeper.role == TARGET and keeper.is_over for keeper in self.keepers)

    @property
    def places(self) -> dict[str, Place]:
        """Where each worker is: target-0, target-1, ..., draft."""
        ranks = [worker for worker in self.workers if worker.role == TARGET]
        places = {f"target-{number}": rank.ready.place for number, rank in enumerate(ranks)}
        draft = self.draft_worker
        return places if draft is None else places | {"draft": draft.ready.place}

    async def close(self) -> None:
        """Ends the workers and their links."""
        await asyncio.gather(*(keeper.close() for keeper in self.keepers))

    def _keep(self, ranks: Workers, drafters: Workers) -> None:
        """A drafter is worth any number of tries; a target that does not come back makes place for another replica."""
        tries = self._config.faults.max_restarts
        # Ranks that come back have as many pages as the first: the scheduler counts on them.
        self._config = replace(
            self._config, cache=replace(self._config.cache, pages=self.info.num_pages)
        )
        self.keepers = (Keeper(TARGET, ranks, self.target, self._start_ranks, max_restarts=tries),)
        self.draft_context = drafters[0].ready.context if drafters else None
        if isinstance(self.drafter, RemoteDrafter):
            self.keepers += (
                Keeper(DRAFT, drafters, self.drafter, self._start_drafter, max_restarts=None),
            )

    async def _start_ranks(self) -> Workers:
        config, first = (
            self._config,
            self._wanted[FIRST_RANK : FIRST_RANK + self._config.target.tensor_parallel],
        )
        actors = [
            _actor(TargetWorker, bundle, FIRST_RANK + rank, config, rank, self._keys.public)
            for rank, bundle in enumerate(first)
        ]
        with _none_left(actors):
            meeting = await _answer(actors[0].meet.remote()) if len(actors) > 1 else None
            return tuple(
                await asyncio.gather(
                    *(_opened(TARGET, actor, self._keys, meeting) for actor in actors)
                )
            )

    async def _start_drafter(self) -> Workers:
        return await self._opened(self._new_drafter())

    def _new_drafter(self) -> Any:
        last = len(self._wanted) - 1
        return _actor(DraftWorker, self._wanted[last], last, self._draft_config, self._keys.public)

    async def _opened(self, actor: Any) -> Workers:
        with _none_left([actor]):
            return (await _opened(DRAFT, actor, self._keys, self.info),)


@contextlib.contextmanager
def _none_left(actors: Sequence[Any]) -> Iterator[None]:
    """Ends the actors if not all of them can be used."""
    try:
        yield
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise


def _info(ranks: Workers) -> ModelInfo:
    info = ranks[0].ready.info
    assert info is not None
    return info


def _actor(kind: type[Any], bundle: Bundle, number: int, *arguments: object) -> Any:
    """In the replica's placement group; outside of Serve, wherever there is room."""
    group = get_current_placement_group()
    strategy = (
        None
        if group is None
        else PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=number
        )
    )
    options: dict[str, Any] = {
        "num_cpus": bundle.resources.get("CPU", 0),
        "num_gpus": bundle.resources.get("GPU", 0),
        "max_restarts": 0,
    }
    if strategy is None:
        options["label_selector"] = dict(bundle.labels)
    else:
        options["scheduling_strategy"] = strategy
    return _ACTORS[kind].options(**options).remote(*arguments)


async def _opened(role: str, actor: Any, keys: Keys, argument: object) -> Worker:
    """Linked before it reads its weights: what is stopped while it reads would be waited for, for as long as the largest weights may take."""
    born: Born = await _answer(actor.born.remote())
    client = Client(keys, born.address)
    try:
        ready = await _unless_silent(client, _answer(actor.open.remote(argument)))
    except BaseException:
        client.close()
        end_process(born.node, born.pid)
        raise
    return Worker(role, actor, client, ready, asyncio.wrap_future(actor.run.remote().future()))


async def _unless_silent(client: Client, opening: Coroutine[Any, Any, Ready]) -> Ready:
    silence: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    client.on_silence = lambda error: None if silence.done() else silence.set_exception(error)
    client.listen()
    both = asyncio.ensure_future(opening), silence
    try:
        done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for one in both:
            one.cancel()


async def _answer(reference: Awaitable[Any]) -> Any:
    """What an actor's method gave; a refusal that it raised comes out as itself."""
    try:
        return await reference
    except RayTaskError as error:
        cause = error.cause
        raise (
            cause
            if isinstance(cause, SpecserveError)
            else ModelError(f"a worker could not start: {cause or error}")
        ) from error
    except RayActorError as error:
        raise WorkerLost(f"a worker died while it started: {error}") from error
