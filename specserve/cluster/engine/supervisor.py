"""Restart the workers of one role when one of them is lost, with growing backoff.

Knows what a worker's process and link are, and no models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from specserve.cluster.engine.worker_host import WorkerReady
from specserve.cluster.transport.link import Client
from specserve.errors import Displaced, WorkerLost, first_line
from specserve.types import ModelInfo
from specserve.wire.messages import Stop

log = logging.getLogger(__name__)

# The first restart comes at once; the backoff applies after starts that did not help.
FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
START_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's process, its link, and the call of its host that lasts as long as it lives."""

    role: str  # target or draft
    client: Client
    ready: WorkerReady
    run_call: Awaitable[None]
    # set when a shared worker asks to be exchanged for another one; None: it never does
    wants_exchange: asyncio.Event | None = None

    def stop(self) -> None:
        """Ask the worker to end."""
        self.client.post(Stop())

    def kill(self) -> None:
        """Close the link and kill the process by SIGKILL, even if it is dead or stopped."""
        self.client.close()
        kill_process(self.ready.place.node, self.ready.place.pid)


def kill_process(node: str, pid: int) -> None:
    """Kill a process of this or another node."""
    if node == ray.get_runtime_context().get_node_id():
        _kill(pid)
    else:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": strategy, "max_retries": 0}
        ray.remote(_kill).options(**options).remote(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class RemoteWorkers(Protocol):
    """User of the workers, which must know when they come and go: RemoteTarget or RemoteDrafter."""

    on_lost: Callable[[str], None]
    has_answered: bool  # True once the attached workers have answered a round

    def attach(self, workers: Sequence[Client]) -> None: ...
    def detach(self) -> None: ...
    def give_up(self, error: Displaced) -> None: ...


Workers = tuple[Worker, ...]
Start = Callable[[], Awaitable[Workers]]
Join = Callable[[str, ModelInfo], Awaitable[Workers]]
"""Links to a drafter that other engines use, too, given its role and the target."""
OnFailure = Callable[[Worker], None]


class WorkerSupervisor:
    """Supervisor of the workers of one role, which are replaced all together.

    `start` starts new workers for the whole role. The supervisor gives up after `max_restarts`
    consecutive restarts that did not help, or never if that is None.
    """

    def __init__(
        self,
        role: str,
        workers: Workers,
        remote: RemoteWorkers,
        start: Start,
        *,
        max_restarts: int | None,
        on_failure: OnFailure | None = None,
    ) -> None:
        """Attach the workers; `on_failure` is called with each one that fails by itself.

        Without workers the first are started at once.
        """
        self.role, self.workers = role, workers
        self.trouble: str | None = None  # why there are no workers at present
        self.has_given_up = False
        self.num_restarts = 0
        self.last_loss: str | None = None  # why workers were last lost
        self._remote, self._start, self._max_restarts = remote, start, max_restarts
        self._on_failure = on_failure
        # Consecutive failures: starts that failed, and workers that were lost before any answer.
        self._num_failures = 0
        self._lost = asyncio.Event()
        self._successors: Workers = ()  # of workers that ask to be exchanged
        remote.on_lost = self.mark_lost
        if workers:
            self._attach(workers)
        else:  # a shared one that is away, which `start` waits for
            self.trouble = f"the {role} has not been reached yet"
            self._lost.set()
        self._task = asyncio.create_task(self._supervise())

    def mark_lost(self, reason: str, worker: Worker | None = None) -> None:
        """Detach the workers and have them replaced. Calls after the first one are ignored.

        Several ranks fail together, so `worker` says which one caused it, if that is known.
        """
        if self._lost.is_set():
            return
        worker = self.workers[0] if len(self.workers) == 1 else worker
        if worker is not None and self._on_failure is not None:
            self._on_failure(worker)
        log.error("%s worker lost: %s", self.role, reason)
        self.last_loss = reason
        self.trouble = f"the {self.role} is being restarted: {reason}"
        self._num_failures = 0 if self._remote.has_answered else self._num_failures + 1
        self._remote.detach()
        for worker in self.workers:
            worker.client.fail(WorkerLost(f"a {self.role} worker was lost: {reason}"))
        self._lost.set()

    async def close(self) -> None:
        """Stop the workers, and kill those that have not ended within a second."""
        self._task.cancel()
        if not self._lost.is_set():
            for worker in self.workers:
                worker.stop()
            await asyncio.wait(
                [asyncio.ensure_future(worker.run_call) for worker in self.workers], timeout=1.0
            )
        for worker in (*self.workers, *self._successors):
            worker.kill()

    async def _supervise(self) -> None:
        while not self.has_given_up:
            watchers = [asyncio.create_task(self._watch(worker)) for worker in self.workers]
            exchanges = [asyncio.create_task(self._exchange(worker)) for worker in self.workers]
            try:
                await self._lost.wait()
            finally:
                for exchange in exchanges:
                    exchange.cancel()
            for watcher in watchers:
                watcher.cancel()
            for worker in self.workers:
                worker.kill()
            await self._restart()

    async def _watch(self, worker: Worker) -> None:
        """Mark the role as lost when the worker's `run` call ends, some 30 ms after its death."""
        try:
            await worker.run_call
            self.mark_lost("it has stopped", worker)
        except RayError as error:
            self.mark_lost(first_line(error), worker)

    async def _exchange(self, worker: Worker) -> None:
        """Exchange a worker that asks for it, once another one is ready to take its place.

        It serves on while there is none. A round under way ends as if the worker was lost.
        """
        while worker.wants_exchange is not None:
            await worker.wants_exchange.wait()
            worker.wants_exchange.clear()
            try:
                self._successors = await self._start()
            except Exception as error:  # any failure; the worker asks again
                log.warning("the %s is not exchanged: %s", self.role, error or type(error).__name__)
                continue
            log.info("the %s is exchanged for another one, as it asks", self.role)
            self._num_failures = 0
            self._remote.detach()
            worker.client.fail(WorkerLost(f"the {self.role} has been exchanged"))
            self._lost.set()
            return

    async def _restart(self) -> None:
        self.workers = ()
        if self._successors:
            workers, self._successors = self._successors, ()
            self._attach(workers)
            return
        while self._max_restarts is None or self._num_failures <= self._max_restarts:
            if self._num_failures:
                await asyncio.sleep(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**self._num_failures))
            try:
                workers = await asyncio.wait_for(self._start(), START_TIMEOUT_S)
            except Exception as error:  # any failure; the next try may succeed
                self._num_failures += 1
                self.trouble = (
                    f"the {self.role} cannot be restarted ({self._num_failures} tries): "
                    f"{error or type(error).__name__}"
                )
                log.exception("%s", self.trouble)
                continue
            self.num_restarts += 1
            self._attach(workers)
            return
        self.has_given_up = True
        self._remote.give_up(Displaced(self.trouble or f"the {self.role} is lost"))

    def _attach(self, workers: Workers) -> None:
        self.workers, self.trouble = workers, None
        self._lost.clear()
        for worker in workers:
            worker.client.on_silence = partial(self._on_silence, worker)
            worker.client.listen()
        self._remote.attach([worker.client for worker in workers])

    def _on_silence(self, worker: Worker, error: WorkerLost) -> None:
        self.mark_lost(str(error), worker)
