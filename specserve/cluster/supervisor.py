"""Keeps the workers of one role alive: notices that one is lost, ends the others, and starts new ones, ever more slowly while that does not help."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from specserve.cluster.transport.link import Client
from specserve.cluster.workers import Ready
from specserve.errors import Displaced, WorkerLost, first_line
from specserve.wire.messages import Stop

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = (
    0.25,
    30.0,
)  # between starts that did not help; the first comes at once
START_S = 1800.0  # that workers may take to start


@dataclass(frozen=True, slots=True)
class Worker:
    """One actor, its link, and the call that lasts as long as it lives."""

    role: str  # target or draft
    actor: Any
    client: Client
    ready: Ready
    running: Awaitable[None]

    def end(self) -> None:
        """Also when it is dead already, or stopped: Ray alone asks a process to end first, and waits 40 s for one that cannot hear it."""
        self.client.close()
        end_process(self.ready.place.node, self.ready.place.pid)
        ray.kill(self.actor)


def end_process(node: str, pid: int) -> None:
    """Wherever it is."""
    if node == ray.get_runtime_context().get_node_id():
        _kill(pid)
    else:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        ray.remote(_kill).options(num_cpus=0, scheduling_strategy=there, max_retries=0).remote(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Remote(Protocol):
    """Who works with the workers: learns of those that come and go."""

    lose: Callable[[str], None]
    has_answered: bool  # whether those that are here have done anything yet

    def attach(self, workers: Sequence[Client]) -> None: ...
    def detach(self) -> None: ...
    def give_up(self, error: Displaced) -> None: ...


Workers = tuple[Worker, ...]
Start = Callable[[], Awaitable[Workers]]


class Keeper:
    """`start` makes all workers of the role anew. After `max_restarts` in a row that did not help there is no other try; None: there always is."""

    def __init__(
        self, role: str, workers: Workers, remote: Remote, start: Start, *, max_restarts: int | None
    ) -> None:
        self.role, self.workers = role, workers
        self.trouble: str | None = None  # why there are no workers now
        self.is_over = False  # whether there will be none
        self.num_restarts = 0
        self._remote, self._start, self._max_restarts = remote, start, max_restarts
        self._num_failures = 0  # lives without an answer, and starts that failed, in a row
        self._lost = asyncio.Event()
        remote.lose = self.lose
        self._greet(workers)
        self._keeping = asyncio.create_task(self._keep())

    def lose(self, why: str) -> None:
        """The workers are not to be relied on any more. What is said after the first time is not heard."""
        if self._lost.is_set():
            return
        log.error("%s worker lost: %s", self.role, why)
        self.trouble = f"the {self.role} is being restarted: {why}"
        self._num_failures = 0 if self._remote.has_answered else self._num_failures + 1
        self._remote.detach()
        for worker in self.workers:
            worker.client.fail(WorkerLost(f"a {self.role} worker was lost: {why}"))
        self._lost.set()

    async def close(self) -> None:
        """Ends the workers, with a second's time to end by themselves."""
        self._keeping.cancel()
        if not self._lost.is_set():
            for worker in self.workers:
                worker.client.post(Stop())
            await asyncio.wait(
                [asyncio.ensure_future(worker.running) for worker in self.workers], timeout=1.0
            )
        for worker in self.workers:
            worker.end()

    async def _keep(self) -> None:
        while not self.is_over:
            watches = [asyncio.create_task(self._watch(worker)) for worker in self.workers]
            await self._lost.wait()
            for watch in watches:
                watch.cancel()
            for worker in self.workers:
                worker.end()
            await self._revive()

    async def _watch(self, worker: Worker) -> None:
        """Learns within some 30 ms that a worker has died: then the call that was to last for ever ends."""
        try:
            await worker.running
            self.lose("it has stopped")
        except RayError as error:
            self.lose(first_line(error))

    async def _revive(self) -> None:
        self.workers = ()
        while self._max_restarts is None or self._num_failures <= self._max_restarts:
            if self._num_failures:
                await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._num_failures))
            try:
                workers = await asyncio.wait_for(self._start(), START_S)
            except Exception as error:  # whatever it is, the next try may go better
                self._num_failures += 1
                self.trouble = f"the {self.role} cannot be restarted ({self._num_failures} tries): {error or type(error).__name__}"
                log.exception("%s", self.trouble)
                continue
            self.num_restarts += 1
            self._greet(workers)
            return
        self.is_over = True
        self._remote.give_up(Displaced(self.trouble or f"the {self.role} is lost"))

    def _greet(self, workers: Workers) -> None:
        self.workers, self.trouble = workers, None
        self._lost.clear()
        for worker in workers:
            worker.client.on_silence = lambda error: self.lose(str(error))
            worker.client.listen()
        self._remote.attach([worker.client for worker in workers])
