"""Hosts of workers: in their bundle, and elsewhere once its device is avoided; without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from specserve.cluster.engine import worker_hosts
from specserve.cluster.engine.device_failures import MAX_FAILURES, DeviceId
from specserve.cluster.engine.worker_host import WorkerHello, WorkerPlace
from specserve.cluster.engine.worker_hosts import StartedWorker, WorkerHosts
from specserve.cluster.node_resources import ClusterResources
from specserve.cluster.placement import Bundle, NodeResources
from specserve.errors import DeviceFault, WorkerLost

CALL = ("TargetWorker",)
HOME_ID, ELSEWHERE_ID, OTHER_ID = (digit * 56 for digit in "abc")  # as Ray's ids
ADDRESS: Any = None


class Host:
    """Actor of a node, which starts workers there, or fails to."""

    def __init__(self, options: dict[str, Any], *, fails: bool) -> None:
        self.options, self.fails = options, fails
        strategy = options.get("scheduling_strategy")
        self.node = HOME_ID if strategy is None else strategy.node_id
        self.start = SimpleNamespace(remote=self._start)

    async def _start(self, *call: object) -> WorkerHello:
        if self.fails:
            raise WorkerLost("it has gone")
        return WorkerHello(ADDRESS, self.node, 1)


class Cluster:
    """Nodes, and the hosts that were created and killed there."""

    def __init__(self, patch: pytest.MonkeyPatch, nodes: Sequence[NodeResources]) -> None:
        self.created: list[Host] = []
        self.killed: list[Host] = []
        self.failing: set[str] = set()
        found = ClusterResources(tuple(nodes), ())
        patch.setattr(worker_hosts, "_HOST", SimpleNamespace(options=self._options))
        patch.setattr(worker_hosts, "cluster_resources", lambda: found)
        patch.setattr(worker_hosts, "get_current_placement_group", lambda: None)
        patch.setattr(ray, "kill", self.killed.append)

    def _options(self, **options: Any) -> Any:
        def create() -> Host:
            host = Host(options, fails=False)
            host.fails = host.node in self.failing
            self.created.append(host)
            return host

        return SimpleNamespace(remote=create)


def node(name: str, free: dict[str, float], labels: dict[str, str] | None = None) -> NodeResources:
    return NodeResources(f"address of {name}", free, free, labels or {}, name)


def hosts(bundle: dict[str, float], avoided: list[tuple[str, DeviceId]]) -> WorkerHosts:
    wanted = [Bundle("target-0", bundle, {"pool": "targets"})]
    return WorkerHosts(wanted, lambda role, device: avoided.append((role, device)))


PLACE = WorkerPlace(HOME_ID, 1, "cpu", ())


def run(start: Awaitable[StartedWorker]) -> StartedWorker:
    async def main() -> StartedWorker:
        return await start

    return asyncio.run(main())


HOME = node(HOME_ID, {"CPU": 0.0, "GPU": 0.0}, {"pool": "targets"})
ELSEWHERE = node(ELSEWHERE_ID, {"CPU": 4.0, "GPU": 1.0}, {"pool": "targets"})
OTHER_POOL = node(OTHER_ID, {"CPU": 64.0, "GPU": 8.0}, {"pool": "drafts"})
CPUS = {"CPU": 2.0}


def test_a_worker_whose_device_has_failed_often_starts_on_another_node_with_its_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, [HOME, OTHER_POOL, ELSEWHERE])
    avoided: list[tuple[str, DeviceId]] = []
    own = hosts(CPUS, avoided)
    for _ in range(MAX_FAILURES):
        assert run(own.start("target", 0, CALL)).hello.node == HOME_ID
        own.record_device(0, PLACE)
        own.record_loss("target", PLACE)
    assert len(cluster.created) == 1, "the host of the bundle starts all workers"
    assert avoided == [("target", DeviceId(HOME_ID, "cpu"))]

    assert run(own.start("target", 0, CALL)).hello.node == ELSEWHERE_ID
    assert cluster.killed == [cluster.created[0]]
    assert cluster.created[1].options["num_cpus"] == 2.0
    own.record_device(0, WorkerPlace(ELSEWHERE_ID, 2, "cpu", ()))
    run(own.start("target", 0, CALL))
    assert len(cluster.created) == 2, "later workers start in the host that it has moved to"


def test_a_failed_self_test_moves_the_next_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch, [HOME, ELSEWHERE])
    avoided: list[tuple[str, DeviceId]] = []
    own = hosts(CPUS, avoided)
    started = run(own.start("target", 0, CALL))
    own.record_fault(started, DeviceFault("wrong", node=HOME_ID, device="cpu"))
    assert own.avoided == (DeviceId(HOME_ID, "cpu"),)
    assert run(own.start("target", 0, CALL)).hello.node == ELSEWHERE_ID


def test_a_device_that_is_slow_for_too_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch, [HOME, ELSEWHERE])
    avoided: list[tuple[str, DeviceId]] = []
    own = hosts(CPUS, avoided)
    run(own.start("target", 0, CALL))
    own.record_device(0, PLACE)
    own.avoid("target", PLACE)
    own.record_loss("target", PLACE)  # by its restart
    assert avoided == [("target", DeviceId(HOME_ID, "cpu"))]
    assert run(own.start("target", 0, CALL)).hello.node == ELSEWHERE_ID


@pytest.mark.parametrize("fault", ["no room", "the other host fails"])
def test_where_a_worker_cannot_move_it_goes_on_with_its_device(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    cluster = Cluster(monkeypatch, [HOME, OTHER_POOL] + [ELSEWHERE] * (fault != "no room"))
    cluster.failing.add(ELSEWHERE_ID)
    own = hosts(CPUS, [])
    started = run(own.start("target", 0, CALL))
    own.record_fault(started, DeviceFault("wrong", node=HOME_ID, device="cpu"))
    assert run(own.start("target", 0, CALL)).hello.node == HOME_ID
    assert cluster.killed == cluster.created[1:]


def test_another_gpu_of_the_node_serves_where_no_other_node_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bundle keeps the GPU that has failed, so the node gives another one."""
    home = node(HOME_ID, {"CPU": 4.0, "GPU": 2.0}, {"pool": "targets"})
    cluster = Cluster(monkeypatch, [home])
    own = hosts({"CPU": 1.0, "GPU": 1.0}, [])
    started = run(own.start("target", 0, CALL))
    own.record_fault(started, DeviceFault("wrong", node=HOME_ID, device="GPU 3"))
    assert run(own.start("target", 0, CALL)).hello.node == HOME_ID
    assert len(cluster.created) == 2
    assert cluster.created[1].options["num_gpus"] == 1.0
