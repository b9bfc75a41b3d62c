"""The link of an engine to a draft pool, which serves other engines too and outlives this one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from specserve.cluster.engine.process_state import process_runs_on
from specserve.cluster.engine.supervisor import Join, Worker, Workers
from specserve.cluster.engine.worker_host import WorkerReady
from specserve.cluster.transport.endpoint import KeyPair
from specserve.cluster.transport.link import Client
from specserve.config.pool import PoolConfig
from specserve.errors import SpecserveError, WorkerLost, first_line
from specserve.types import ModelInfo
from specserve.wire.version import Versioned


@dataclass(frozen=True, slots=True)
class JoiningEngine(Versioned):
    """An engine that wants to join a pool: its process, its key, and the target to draft for."""

    node: str
    pid: int
    public_key: bytes
    target: ModelInfo


Membership = Callable[[JoiningEngine], AsyncIterator[WorkerReady]]
"""Joins a pool: yields when it is open, and again to ask for a move; lasts as long as the pool."""


def joining(pool: Any, config: PoolConfig) -> tuple[Join, ...]:
    """Return how an engine joins each of its devices in the pool of this Serve handle."""
    devices = EngineDevices(pool.join.options(stream=True).remote)
    return (devices.join,) * config.devices_per_engine


@dataclass(frozen=True, slots=True)
class PoolLink(Worker):
    """A draft worker that is shared: an engine leaves it, and never ends its process.

    `run_call` is the membership. It ends with the pool, and cancelling it is leaving.
    """

    run_call: asyncio.Task[None]

    @property
    def is_member(self) -> bool:
        """False once the pool has ended or the engine has begun to leave it."""
        return not (self.run_call.done() or self.run_call.cancelling())

    def stop(self) -> None:
        """Leave the pool."""
        self.run_call.cancel()

    def kill(self) -> None:
        """Close the link and leave the pool."""
        self.client.close()
        self.run_call.cancel()


class EngineDevices:
    """The devices of a pool that draft for one engine, each by a membership of its own."""

    def __init__(self, join: Membership) -> None:
        self._join = join
        self._joined: list[PoolLink] = []
        self._one_at_a_time = asyncio.Lock()  # Serve counts a call once it has sent it

    async def join(self, role: str, target: ModelInfo) -> Workers:
        """Join another device of the pool; raise WorkerLost if there is none at present."""
        async with self._one_at_a_time:
            link = await join_pool(self._join, role, target)
            self._joined = [one for one in self._joined if one.is_member]
            if any(link.ready.place == other.ready.place for other in self._joined):
                link.kill()
                raise WorkerLost("no other device of the draft pool has room at present")
            self._joined.append(link)
            return (link,)


async def join_pool(join: Membership, role: str, target: ModelInfo) -> PoolLink:
    """Join a pool and link to it; raise WorkerLost, or what the pool refuses with."""
    keys = KeyPair.generate()
    exchange = asyncio.Event()
    node = ray.get_runtime_context().get_node_id()
    members = join(JoiningEngine(node, os.getpid(), keys.public, target))
    try:
        ready = await anext(members)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SpecserveError):
            raise cause from error
        raise WorkerLost(f"the draft pool failed: {first_line(cause or error)}") from error
    except (RayError, RayServeException, StopAsyncIteration) as error:
        raise WorkerLost(f"the draft pool is away: {type(error).__name__}") from error
    except asyncio.CancelledError:
        await _leave(members)
        raise
    is_running = partial(process_runs_on, ready.place.node, ready.place.pid)
    membership = asyncio.create_task(_stay(members, exchange))
    try:
        await asyncio.sleep(0)  # a task that is cancelled before it runs would leave nothing
        client = Client(keys, ready.address, is_running=is_running)
    except BaseException:
        membership.cancel()
        raise
    return PoolLink(role, client, ready, membership, exchange)


async def _stay(members: AsyncIterator[WorkerReady], exchange: asyncio.Event) -> None:
    """Return when the pool ends the membership; leave it when cancelled.

    Sets `exchange` each time that the pool asks the engine to move to another of its devices.
    """
    try:
        async for _ in members:
            exchange.set()
    finally:
        await _leave(members)


async def _leave(members: AsyncIterator[WorkerReady]) -> None:
    for name in ("cancel", "aclose"):  # of a handle's stream, or of a generator
        if (close := getattr(members, name, None)) is not None:
            result = close()
            if asyncio.iscoroutine(result):
                await result
            break
