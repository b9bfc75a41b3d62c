"""Start workers in hosts with the resources of their bundles, away from devices that fail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from specserve.cluster.engine.device_failures import DeviceFailures, DeviceId
from specserve.cluster.engine.worker_host import WorkerHello, WorkerHost, WorkerPlace
from specserve.cluster.node_resources import cluster_resources
from specserve.cluster.placement import Bundle, find_other_node
from specserve.errors import DeviceFault, ModelError, SpecserveError, WorkerLost

log = logging.getLogger(__name__)

HOST_TIMEOUT_S = 10.0
"""Time for a host that has lost its worker to start another one, before it is replaced too."""
MOVE_TIMEOUT_S = 120.0
"""Time for a host on another node, whose fork server may have to import everything first."""
# Created once, so that the class is sent to the cluster once and not at each start.
_HOST: Any = ray.remote(WorkerHost)

OnAvoided = Callable[[str, DeviceId], None]


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A worker that has not loaded its model yet."""

    role: str
    number: int  # of its bundle
    host: Any
    hello: WorkerHello


class WorkerHosts:
    """Hosts of one replica's workers, by the number of their bundle, and failures of devices."""

    def __init__(self, wanted: Sequence[Bundle], on_avoided: OnAvoided) -> None:
        """Start nothing; `on_avoided` is called with role and device once one is avoided."""
        self._wanted, self._on_avoided = wanted, on_avoided
        self._hosts: dict[int, Any] = {}  # actors
        self._devices: dict[int, DeviceId] = {}  # last used for a bundle
        self._failures = DeviceFailures()

    @property
    def avoided(self) -> tuple[DeviceId, ...]:
        return self._failures.avoided

    async def start(self, role: str, number: int, call: tuple[object, ...]) -> StartedWorker:
        """Start a worker in the host of its bundle, or in a new one if that does not answer.

        A worker whose device is avoided is started elsewhere if there is room.
        """
        if self._devices.get(number) in self.avoided:
            moved = await self._start_elsewhere(role, number, call)
            if moved is not None:
                return moved
        host = self._hosts.get(number)
        if host is not None:
            with contextlib.suppress(WorkerLost, TimeoutError):
                hello = await asyncio.wait_for(result_of(host.start.remote(*call)), HOST_TIMEOUT_S)
                return StartedWorker(role, number, host, hello)
            ray.kill(host)
        host = self._hosts[number] = _create_host(self._wanted[number], number)
        return StartedWorker(role, number, host, await result_of(host.start.remote(*call)))

    def record_device(self, number: int, place: WorkerPlace) -> None:
        """Keep in mind which device the worker of a bundle uses."""
        self._devices[number] = DeviceId(place.node, place.hardware)

    def record_fault(self, started: StartedWorker, fault: DeviceFault) -> None:
        """Avoid a device that has failed the self-test of a worker."""
        device = self._devices[started.number] = DeviceId(fault.node, fault.device)
        self._avoid(started.role, device)

    def avoid(self, role: str, place: WorkerPlace) -> None:
        """Avoid a device that a worker runs on, for instance since it is slow."""
        self._avoid(role, DeviceId(place.node, place.hardware))

    def record_loss(self, role: str, place: WorkerPlace) -> None:
        """Count a lost worker as a failure of its device."""
        device = DeviceId(place.node, place.hardware)
        if self._failures.record_loss(device):
            self._report(role, device)

    def kill(self, worker: StartedWorker) -> None:
        """End a worker that is not needed, with its host."""
        self._hosts = {n: host for n, host in self._hosts.items() if host is not worker.host}
        ray.kill(worker.host)

    def kill_all(self) -> None:
        for host in self._hosts.values():
            ray.kill(host)
        self._hosts.clear()

    def _avoid(self, role: str, device: DeviceId) -> None:
        if self._failures.record_fault(device):
            self._report(role, device)

    def _report(self, role: str, device: DeviceId) -> None:
        log.error("%s is avoided from now on", device)
        self._on_avoided(role, device)

    async def _start_elsewhere(
        self, role: str, number: int, call: tuple[object, ...]
    ) -> StartedWorker | None:
        """Start a worker away from its device, or return None if there is no room.

        Its bundle stays reserved, so the replica's own group keeps others from that device.
        """
        bundle, device = self._wanted[number], self._devices[number]
        avoided = {device.node for device in self.avoided}
        node = find_other_node(bundle, cluster_resources().nodes, avoided)
        if node is None:
            log.error("%s goes on with %s: no other node has room for it", bundle.name, device)
            return None
        log.warning("%s moves from %s to node %s", bundle.name, device, node.node)
        host = _HOST.options(
            **_options(bundle),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node, soft=False),
        ).remote()
        try:
            hello = await asyncio.wait_for(result_of(host.start.remote(*call)), MOVE_TIMEOUT_S)
        except (WorkerLost, TimeoutError):
            log.exception("%s has not moved", bundle.name)
            ray.kill(host)
            return None
        except BaseException:
            ray.kill(host)
            raise
        if (before := self._hosts.get(number)) is not None:
            ray.kill(before)
        self._hosts[number] = host
        return StartedWorker(role, number, host, hello)


async def result_of(reference: Awaitable[Any]) -> Any:
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


def _create_host(bundle: Bundle, number: int) -> Any:
    """Create a host in the replica's placement group, or, outside of Serve, on any node."""
    group = get_current_placement_group()
    options = _options(bundle)
    if group is None:
        options["label_selector"] = dict(bundle.labels)
    else:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=number
        )
    return _HOST.options(**options).remote()


def _options(bundle: Bundle) -> dict[str, Any]:
    return {
        "num_cpus": bundle.resources.get("CPU", 0),
        "num_gpus": bundle.resources.get("GPU", 0),
        "max_restarts": 0,
    }
