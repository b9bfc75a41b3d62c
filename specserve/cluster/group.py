"""Start the workers of one engine replica in its placement group, link them and supervise them."""

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
from specserve.cluster.remote import PushedProposals, RemoteDrafter, RemoteTarget, ReportExchange
from specserve.cluster.supervisor import Worker, Workers, WorkerSupervisor, kill_process
from specserve.cluster.transport.link import Client, KeyPair
from specserve.cluster.workers import (
    DraftWorker,
    TargetWorker,
    WorkerHello,
    WorkerPlace,
    WorkerReady,
)
from specserve.config.tree import KINDS_WITHOUT_WORKER, Config
from specserve.errors import ModelError, SpecserveError, WorkerLost
from specserve.types import ModelInfo

TARGET, DRAFT = "target", "draft"
# Created once, so that the classes are sent to the cluster once and not at each start.
_ACTORS: dict[type[Any], Any] = {kind: ray.remote(kind) for kind in (TargetWorker, DraftWorker)}


class WorkerGroup:
    """Ranks of a target, with or without a drafter, and the supervisors that restart them.

    Rounds go on while the drafter is lost. When a rank is lost they wait until all ranks have been
    replaced.
    """

    def __init__(
        self, config: Config, wanted: Sequence[Bundle], keys: KeyPair, report: ReportExchange | None
    ) -> None:
        self._config, self._draft_config, self._wanted, self._keys = config, config, wanted, keys
        deadline_s = config.faults.round_deadline_s
        self.target = RemoteTarget(deadline_s=deadline_s, report=report)
        self.drafter: RemoteDrafter | PushedProposals | None = None
        if config.draft.kind not in KINDS_WITHOUT_WORKER:
            self.drafter = RemoteDrafter(deadline_s=deadline_s, report=report)
        elif config.draft.kind != "none":
            self.drafter = PushedProposals(self.target)
        self.supervisors: tuple[WorkerSupervisor, ...] = ()
        self.draft_context: int | None = None
        self.info: ModelInfo

    @classmethod
    async def start(
        cls, config: Config, wanted: Sequence[Bundle], report: ReportExchange | None = None
    ) -> WorkerGroup:
        """Start all workers and load their models; `report` is called with every exchange.

        Raises the error of the first worker that failed, after killing all workers.
        """
        group = cls(config, wanted, KeyPair.generate(), report)
        # The drafter's process starts while the ranks load their weights.
        drafter = group._create_drafter() if isinstance(group.drafter, RemoteDrafter) else None
        with _kill_on_failure([] if drafter is None else [drafter]):
            ranks = await group._start_ranks()
            group.info = _model_info(ranks)
        try:
            drafters = () if drafter is None else await group._open_drafter(drafter)
        except BaseException:
            for rank in ranks:
                rank.kill()
            raise
        group._supervise(ranks, drafters)
        return group

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Workers that are running at present."""
        return tuple(worker for supervisor in self.supervisors for worker in supervisor.workers)

    @property
    def draft_worker(self) -> Worker | None:
        return next((worker for worker in self.workers if worker.role == DRAFT), None)

    @property
    def troubles(self) -> dict[str, str]:
        """Reasons why roles have no workers at present, by role."""
        return {
            supervisor.role: supervisor.trouble
            for supervisor in self.supervisors
            if supervisor.trouble is not None
        }

    @property
    def restarts(self) -> dict[str, int]:
        return {supervisor.role: supervisor.num_restarts for supervisor in self.supervisors}

    @property
    def is_lost(self) -> bool:
        """True if the target will not be restarted."""
        return any(
            supervisor.role == TARGET and supervisor.has_given_up for supervisor in self.supervisors
        )

    @property
    def places(self) -> dict[str, WorkerPlace]:
        """Place of each worker, by target-0, target-1, ..., draft."""
        ranks = [worker for worker in self.workers if worker.role == TARGET]
        places = {f"target-{number}": rank.ready.place for number, rank in enumerate(ranks)}
        draft = self.draft_worker
        return places if draft is None else places | {"draft": draft.ready.place}

    async def close(self) -> None:
        """Stop the workers and close their links."""
        await asyncio.gather(*(supervisor.close() for supervisor in self.supervisors))

    def _supervise(self, ranks: Workers, drafters: Workers) -> None:
        """Create the supervisors.

        A drafter is restarted any number of times. A target that cannot be restarted gives way to
        another replica.
        """
        # Restarted ranks get as many pages as the first ones, since the scheduler relies on that
        # number.
        self._config = replace(
            self._config, cache=replace(self._config.cache, pages=self.info.num_pages)
        )
        restarts = self._config.faults.max_restarts
        self.supervisors = (
            WorkerSupervisor(TARGET, ranks, self.target, self._start_ranks, max_restarts=restarts),
        )
        self.draft_context = drafters[0].ready.context if drafters else None
        if isinstance(self.drafter, RemoteDrafter):
            self.supervisors += (
                WorkerSupervisor(
                    DRAFT, drafters, self.drafter, self._start_drafter, max_restarts=None
                ),
            )

    async def _start_ranks(self) -> Workers:
        config, client_key = self._config, self._keys.public
        bundles = self._wanted[FIRST_RANK : FIRST_RANK + config.target.tensor_parallel]
        actors = [
            _create_actor(TargetWorker, bundle, FIRST_RANK + rank, config, rank, client_key)
            for rank, bundle in enumerate(bundles)
        ]
        with _kill_on_failure(actors):
            rendezvous = None
            if len(actors) > 1:
                rendezvous = await _result(actors[0].open_rendezvous.remote())
            return tuple(
                await asyncio.gather(
                    *(_open_worker(TARGET, actor, self._keys, rendezvous) for actor in actors)
                )
            )

    async def _start_drafter(self) -> Workers:
        return await self._open_drafter(self._create_drafter())

    def _create_drafter(self) -> Any:
        last = len(self._wanted) - 1
        return _create_actor(
            DraftWorker, self._wanted[last], last, self._draft_config, self._keys.public
        )

    async def _open_drafter(self, actor: Any) -> Workers:
        with _kill_on_failure([actor]):
            return (await _open_worker(DRAFT, actor, self._keys, self.info),)


@contextlib.contextmanager
def _kill_on_failure(actors: Sequence[Any]) -> Iterator[None]:
    """Kill the actors if the block raises."""
    try:
        yield
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise


def _model_info(ranks: Workers) -> ModelInfo:
    info = ranks[0].ready.info
    assert info is not None
    return info


def _create_actor(kind: type[Any], bundle: Bundle, number: int, *arguments: object) -> Any:
    """Create an actor in the replica's placement group, or, outside of Serve, on any node."""
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


async def _open_worker(role: str, actor: Any, keys: KeyPair, argument: object) -> Worker:
    """Link a worker, have it load its model, and start its `run` call.

    The link comes before the weights, so that its heartbeat covers loading. A worker that was
    stopped while loading would otherwise be waited for as long as the largest weights may take.
    """
    hello: WorkerHello = await _result(actor.hello.remote())
    client = Client(keys, hello.address)
    try:
        ready = await _wait_unless_silent(client, _result(actor.open.remote(argument)))
    except BaseException:
        client.close()
        kill_process(hello.node, hello.pid)
        raise
    return Worker(role, actor, client, ready, asyncio.wrap_future(actor.run.remote().future()))


async def _wait_unless_silent(
    client: Client, opening: Coroutine[Any, Any, WorkerReady]
) -> WorkerReady:
    """Wait for the worker to be ready; raise WorkerLost if it falls silent before."""
    silence: asyncio.Future[WorkerReady] = asyncio.get_running_loop().create_future()
    client.on_silence = lambda error: None if silence.done() else silence.set_exception(error)
    client.listen()
    futures = asyncio.ensure_future(opening), silence
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for future in futures:
            future.cancel()


async def _result(reference: Awaitable[Any]) -> Any:
    """Return the result of an actor's method; re-raise errors of errors.py as themselves."""
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
