"""Start the workers of one engine replica in its placement group, link them and supervise them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from specserve.cluster.engine.device_failures import DeviceId
from specserve.cluster.engine.hidden_relay import HiddenRelay
from specserve.cluster.engine.pass_watch import DraftWatch, PassWatch
from specserve.cluster.engine.process_state import process_runs_on
from specserve.cluster.engine.remote import (
    PushedProposals,
    RemoteDrafter,
    RemoteTarget,
    ReportExchange,
)
from specserve.cluster.engine.supervisor import (
    Join,
    Worker,
    Workers,
    WorkerSupervisor,
    kill_process,
)
from specserve.cluster.engine.worker_host import WorkerPlace, WorkerReady
from specserve.cluster.engine.worker_hosts import StartedWorker, WorkerHosts, result_of
from specserve.cluster.placement import (
    FEW_GPUS,
    FIRST_RANK,
    Bundle,
    explain_distance,
    with_devices,
    with_draft_placement,
)
from specserve.cluster.transport.endpoint import KeyPair
from specserve.cluster.transport.link import Client
from specserve.config.features import part
from specserve.config.sections import DraftConfig
from specserve.config.tree import Config
from specserve.engine.draft_placement import TOGETHER, PlacementChoice
from specserve.engine.stragglers import SlowPass
from specserve.engine.trace import AVOIDED_DEVICE, SLOW_PASS, DeviceEvent
from specserve.errors import DeviceFault, VersionMismatch, WorkerLost
from specserve.types import Curve, Drafter, ModelInfo, Request

log = logging.getLogger(__name__)

T = TypeVar("T")
ReportEvent = Callable[[DeviceEvent], None]
Expect = Callable[[int, Request], None]
TARGET, DRAFT = "target", "draft"
JOIN_PATIENCE_S = 120.0
"""Time that an engine waits for a shared drafter when it starts."""


class WorkerGroup:
    """Ranks of a target, with or without a drafter, and the supervisors that restart them.

    Rounds go on while the drafter is lost. When a rank is lost they wait until all ranks have been
    replaced.
    """

    def __init__(
        self,
        config: Config,
        wanted: Sequence[Bundle],
        keys: KeyPair,
        report: ReportExchange | None,
        report_event: ReportEvent | None,
        joins: Sequence[Join] = (),
    ) -> None:
        config = with_devices(config, wanted)
        self._joins, self._pool = joins, config.draft.pool.name
        if joins:
            config = replace(config, draft=DraftConfig(kind="none"))  # the ranks know of none
        self._config = with_draft_placement(config, wanted)
        self._draft_config, self._wanted, self._keys = config, wanted, keys
        self._report, self._report_event = report, report_event
        self._relay = HiddenRelay()
        self.target = RemoteTarget(
            deadline_s=config.faults.round_deadline_s,
            report=report,
            relay=self._relay,
            watch=PassWatch(**self._watch_options(TARGET)),
        )
        self.drafter: Drafter | None = None
        self.remote_drafters: tuple[RemoteDrafter, ...] = ()  # it, or its parts, on other devices
        self.expect: Expect | None = None  # what is to be called with each new request
        self.choice: PlacementChoice | None = None  # if the draft's placement was measured
        self.supervisors: tuple[WorkerSupervisor, ...] = ()
        self.draft_context: int | None = None
        self.info: ModelInfo
        self._curve: Curve | None = None  # measured by the first ranks
        self._hosts = WorkerHosts(wanted, self._report_avoided)

    @classmethod
    async def start(
        cls,
        config: Config,
        wanted: Sequence[Bundle],
        report: ReportExchange | None = None,
        report_event: ReportEvent | None = None,
        joins: Sequence[Join] = (),
    ) -> WorkerGroup:
        """Start all workers and load their models; report every exchange, and what devices do.

        With `joins` the drafters are shared ones, one for each. Raises the error of the first
        worker that failed, after killing all workers.
        """
        group = cls(config, wanted, KeyPair.generate(), report, report_event, joins)
        # The drafter's process starts while the ranks load their weights.
        drafter = None
        if group._config.draft.may_be_apart:
            drafter = asyncio.create_task(group._start_drafter())
        ranks: Workers = ()
        try:
            ranks = await group._open_first_ranks()
            group.info = _model_info(ranks)
            drafters: Sequence[Workers] = ()
            if group._settle_placement(ranks) and drafter is not None:
                drafters = (await group._open_first_drafter(await drafter),)
            elif joins:
                drafters = await group._join_first_drafters()
            elif drafter is not None:
                group._hosts.kill(await drafter)
        except BaseException:
            if drafter is not None:
                drafter.cancel()
            for rank in ranks:
                rank.kill()
            group._hosts.kill_all()
            raise
        group._supervise(ranks, drafters)
        return group

    def _settle_placement(self, ranks: Workers) -> bool:
        """Settle where the draft lives, for as long as the replica does; return whether apart.

        Ranks that are restarted later measure nothing.
        """
        draft, self.choice = self._config.draft, ranks[0].ready.choice
        if self.choice is not None:
            draft = replace(draft, placement=self.choice.placement)
        elif draft.kind != "none" and not draft.may_be_apart:
            draft = replace(draft, placement=TOGETHER)
        self._config = replace(self._config, draft=draft)
        if self._joins:
            # The times of its batches depend on other engines, so none counts as slow.
            self.remote_drafters = tuple(
                RemoteDrafter(deadline_s=self._config.faults.round_deadline_s, report=self._report)
                for _ in self._joins
            )
            self.drafter = self.remote_drafters[0]
            if len(self._joins) > 1:
                split = part("draft_pools.split:SplitDrafter")(self.remote_drafters)
                self.drafter, self.expect = split, split.expect
        if draft.kind == "none":
            return False
        if draft.placement == TOGETHER:
            self.drafter = PushedProposals(self.target)
            self.draft_context = ranks[0].ready.draft_context
            return False
        deadline_s = self._config.faults.round_deadline_s
        self.drafter = RemoteDrafter(
            deadline_s=deadline_s,
            report=self._report,
            relay=self._relay,
            watch=DraftWatch(**self._watch_options(DRAFT)),
        )
        self.remote_drafters = (self.drafter,)
        return True

    @property
    def drafts_prompts(self) -> bool:
        """True if the drafter can read a prompt while the target does."""
        return not self._config.draft.reads_sent_hidden

    @property
    def draft_placement(self) -> str | None:
        """Say where the draft lives, and why if that was measured; None without a draft."""
        if self.drafter is None:
            return None
        if self._joins:
            devices = "" if len(self._joins) == 1 else f"{len(self._joins)} devices of "
            return f"apart, in {devices}the pool {self._pool}"
        if self.choice is not None:
            return self.choice.reason
        placement = self._config.draft.placement
        # `auto` that was not measured and yet is together: `with_drafts_that_fit`
        was_moved = placement == TOGETHER and self._draft_config.draft.may_be_apart
        return f"{placement}, {FEW_GPUS}" if was_moved else placement

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Workers that are running at present."""
        return tuple(worker for supervisor in self.supervisors for worker in supervisor.workers)

    @property
    def draft_workers(self) -> Workers:
        return tuple(worker for worker in self.workers if worker.role != TARGET)

    @property
    def troubles(self) -> dict[str, str]:
        """Reasons why roles have no workers at present, by role."""
        return {
            supervisor.role: supervisor.trouble
            for supervisor in self.supervisors
            if supervisor.trouble is not None
        }

    @property
    def avoided_devices(self) -> dict[DeviceId, tuple[str, ...]]:
        """Devices that have failed repeatedly, with the workers that use them all the same."""
        return {
            device: tuple(
                name
                for name, place in self.places.items()
                if DeviceId(place.node, place.hardware) == device
            )
            for device in self._hosts.avoided
        }

    @property
    def restarts(self) -> dict[str, int]:
        return {supervisor.role: supervisor.num_restarts for supervisor in self.supervisors}

    @property
    def losses(self) -> tuple[str, ...]:
        """Why the workers of each role were last lost, if they ever were."""
        return tuple(
            f"{supervisor.role}: {supervisor.last_loss}"
            for supervisor in self.supervisors
            if supervisor.last_loss is not None
        )

    @property
    def is_lost(self) -> bool:
        """True if the target will not be restarted."""
        return any(
            supervisor.role == TARGET and supervisor.has_given_up for supervisor in self.supervisors
        )

    @property
    def places(self) -> dict[str, WorkerPlace]:
        """Place of each worker, by target-0, target-1, ..., draft."""
        ranks = self._workers_of(TARGET)
        places = {f"target-{number}": rank.ready.place for number, rank in enumerate(ranks)}
        return places | {draft.role: draft.ready.place for draft in self.draft_workers}

    async def close(self) -> None:
        """Stop the workers and close their links."""
        await asyncio.gather(*(supervisor.close() for supervisor in self.supervisors))
        self._hosts.kill_all()

    def _watch_options(self, role: str) -> dict[str, Any]:
        """Return what is done about slow passes of a role."""
        return {
            "max_slow_s": self._config.faults.max_slow_s,
            "on_slow_pass": partial(self._report_slow_pass, role),
            "on_too_slow": partial(self._avoid_slow_device, role),
        }

    def _report_slow_pass(self, role: str, slow: SlowPass) -> None:
        workers = self._workers_of(role)
        if self._report_event is not None and workers:
            about = asdict(slow) | {"node": workers[0].ready.place.node}
            self._report_event(DeviceEvent(SLOW_PASS, role, time.perf_counter(), about))

    def _avoid_slow_device(self, role: str) -> None:
        """Avoid the device of a single worker; of several ranks nothing says which one is slow."""
        workers = self._workers_of(role)
        if len(workers) == 1:
            self._hosts.avoid(role, workers[0].ready.place)

    def _workers_of(self, role: str) -> Workers:
        return tuple(worker for worker in self.workers if worker.role == role)

    def _supervise(self, ranks: Workers, drafters: Sequence[Workers]) -> None:
        """Create the supervisors.

        A drafter is restarted any number of times. A target that cannot be restarted gives way to
        another replica.
        """
        # Restarted ranks get as many pages as the first ones, since the scheduler relies on that
        # number.
        self._config = replace(
            self._config, cache=replace(self._config.cache, pages=self.info.num_pages)
        )
        self._curve = self.info.curve
        restarts = self._config.faults.max_restarts
        self.supervisors = (
            WorkerSupervisor(
                TARGET,
                ranks,
                self.target,
                self._open_ranks,
                max_restarts=restarts,
                on_failure=self._record_loss,
            ),
        )
        contexts = [worker.ready.context for workers in drafters for worker in workers]
        if contexts:
            self.draft_context = min(contexts)
        for number, (workers, remote) in enumerate(
            zip(drafters, self.remote_drafters, strict=True)
        ):
            self.supervisors += (
                WorkerSupervisor(
                    self._draft_role(number),
                    workers,
                    remote,
                    partial(self._join_drafter, number) if self._joins else self._restart_drafter,
                    max_restarts=None,
                    on_failure=None if self._joins else self._record_loss,
                ),
            )

    async def _open_first_ranks(self) -> Workers:
        """Open the ranks, once more if a device fails its self-test: it is avoided then."""
        try:
            return await self._open_ranks()
        except DeviceFault as fault:
            log.error("the ranks are started again: %s", fault)
            return await self._open_ranks()

    async def _open_ranks(self) -> Workers:
        started = await _all_or_none(
            self._start_rank(rank) for rank in range(self._config.target.tensor_parallel)
        )
        rendezvous = None
        if len(started) > 1:
            if self._curve is None:
                # Downloads of different nodes may differ by more than ranks wait for one another.
                await _all_or_none(
                    result_of(rank.host.find_checkpoint.remote()) for rank in started
                )
            rendezvous = await result_of(started[0].host.open_rendezvous.remote())
        ranks = await _all_or_none(
            self._open_worker(rank, rendezvous, self._curve) for rank in started
        )
        places = [rank.ready.place for rank in ranks]
        if distance := explain_distance([place.node for place in places if place.accelerators]):
            log.warning("%s", distance)
        return ranks

    async def _open_first_drafter(self, started: StartedWorker) -> Workers:
        """Open the drafter, once more if its device fails its self-test."""
        try:
            return await self._open_drafter(started)
        except DeviceFault as fault:
            log.error("the drafter is started again: %s", fault)
            return await self._restart_drafter()

    async def _open_drafter(self, started: StartedWorker) -> Workers:
        return (await self._open_worker(started, self.info),)

    async def _restart_drafter(self) -> Workers:
        return await self._open_drafter(await self._start_drafter())

    def _draft_role(self, number: int) -> str:
        return DRAFT if len(self.remote_drafters) == 1 else f"{DRAFT}-{number}"

    async def _join_drafter(self, number: int) -> Workers:
        return await self._joins[number](self._draft_role(number), self.info)

    async def _join_first_drafters(self) -> Sequence[Workers]:
        return await asyncio.gather(*map(self._join_first_drafter, range(len(self._joins))))

    async def _join_first_drafter(self, number: int) -> Workers:
        """Join; go on without a drafter after some time, since it may be about to be replaced."""
        try:
            return await asyncio.wait_for(self._join_drafter(number), JOIN_PATIENCE_S)
        except (WorkerLost, VersionMismatch, TimeoutError):
            log.warning(
                "the draft pool is away; rounds go on without draft tokens until it is back"
            )
            return ()

    async def _start_rank(self, rank: int) -> StartedWorker:
        call = ("TargetWorker", self._config, self._keys.public, rank)
        return await self._hosts.start(TARGET, FIRST_RANK + rank, call)

    async def _start_drafter(self) -> StartedWorker:
        call = ("DraftWorker", self._draft_config, self._keys.public)
        return await self._hosts.start(DRAFT, len(self._wanted) - 1, call)

    async def _open_worker(self, started: StartedWorker, *arguments: object) -> Worker:
        """Open a worker, and keep in mind which device it uses."""
        try:
            worker = await _open_worker(started, self._keys, *arguments)
        except DeviceFault as fault:
            self._hosts.record_fault(started, fault)
            raise
        self._hosts.record_device(started.number, worker.ready.place)
        return worker

    def _record_loss(self, worker: Worker) -> None:
        self._hosts.record_loss(worker.role, worker.ready.place)

    def _report_avoided(self, role: str, device: DeviceId) -> None:
        if self._report_event is not None:
            about = asdict(device)
            self._report_event(DeviceEvent(AVOIDED_DEVICE, role, time.perf_counter(), about))


def _model_info(ranks: Workers) -> ModelInfo:
    """Return what the first rank says of the model, and why any of them is not reproducible."""
    infos = [rank.ready.info for rank in ranks if rank.ready.info is not None]
    reasons = (info.irreproducible for info in infos if info.irreproducible is not None)
    return replace(infos[0], irreproducible=next(reasons, None))


async def _open_worker(started: StartedWorker, keys: KeyPair, *arguments: object) -> Worker:
    """Link a worker, have it load its model, and start its `run` call.

    The link comes before the weights, so that its heartbeat covers loading. A worker that was
    stopped while loading would otherwise be waited for as long as the largest weights may take.
    """
    hello, host = started.hello, started.host
    is_running = partial(process_runs_on, hello.node, hello.pid)
    try:
        client = Client(keys, hello.address, is_running=is_running)
        try:
            ready = await _wait_unless_silent(client, result_of(host.open.remote(*arguments)))
        except BaseException:
            client.close()
            raise
    except BaseException:
        kill_process(hello.node, hello.pid)
        raise
    return Worker(started.role, client, ready, asyncio.wrap_future(host.run.remote().future()))


async def _all_or_none(coroutines: Iterable[Coroutine[Any, Any, T]]) -> tuple[T, ...]:
    """Return all results, or raise the first error once the others have been cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return tuple(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


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
