"""How long bundles may wait for a node before a deployment is given up, and which they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from specserve.cluster.board.placement_watch import PATIENCE_S, PlacementWatch
from specserve.cluster.board.status_board import CHECK_PLACEMENT_EVERY_S, Board
from specserve.cluster.node_resources import ClusterResources
from specserve.cluster.placement import NodeResources
from specserve.config.tree import config_from_keys


@dataclass
class FakeCluster:
    """A cluster of one node, and the time."""

    free: float
    engine_waits: bool = True
    actors: list[dict[str, float]] = field(default_factory=list)
    now: float = 0.0

    def resources(self) -> ClusterResources:
        node = NodeResources("one", {"CPU": 8.0}, {"CPU": self.free}, {})
        return ClusterResources((node,), tuple(self.actors))

    def watch(self) -> PlacementWatch:
        return PlacementWatch(
            config_from_keys({"target.threads": 2, "draft.threads": 1}),
            clock=lambda: self.now,
            resources=self.resources,
            has_waiting_engine=lambda app, deployment: (
                self.engine_waits and (app, deployment) == ("specserve-demo-8000", "Engine")
            ),
        )


def test_bundles_that_wait_too_long_are_named_with_what_they_lack() -> None:
    cluster = FakeCluster(free=3)
    watch = cluster.watch()
    assert watch.check(gateway_runs=True) is None, "Ray may need a moment"
    cluster.now += PATIENCE_S
    why = watch.check(gateway_runs=True)
    assert why is not None
    assert why.startswith("no node has room for draft (1 CPU) beside target-0, coordinator:")


def test_the_time_begins_again_once_all_have_found_a_node() -> None:
    cluster = FakeCluster(free=3)
    watch = cluster.watch()
    watch.check(gateway_runs=True)
    cluster.now, cluster.free = PATIENCE_S - 1, 4
    assert watch.check(gateway_runs=True) is None
    cluster.now, cluster.free = PATIENCE_S + 1, 3
    assert watch.check(gateway_runs=True) is None


def test_an_engine_that_has_its_bundles_may_take_long_to_start() -> None:
    cluster = FakeCluster(free=0, engine_waits=False)
    watch = cluster.watch()
    watch.check(gateway_runs=True)
    cluster.now = 1e3
    assert watch.check(gateway_runs=True) is None


def test_a_gateway_that_finds_no_cpu_is_named_unless_it_runs() -> None:
    cluster = FakeCluster(free=0, engine_waits=False, actors=[{"CPU": 1.0}])
    watch = cluster.watch()
    watch.check(gateway_runs=False)
    cluster.now = PATIENCE_S
    why = watch.check(gateway_runs=False)
    assert why is not None
    assert why.startswith("no node has room for gateway (1 CPU): one has 0 of 8 CPUs free")
    assert watch.check(gateway_runs=True) is None


def test_health_names_what_an_engine_without_a_node_lacks() -> None:
    cluster = FakeCluster(free=3)
    board = Board(lambda: cluster.now, watch=cluster.watch())
    for cluster.now in (0.0, CHECK_PLACEMENT_EVERY_S):
        assert board.status().why == "no engine replica reports"
    cluster.now += PATIENCE_S
    why = board.status().why
    assert why.startswith("an engine waits for a node: no node has room for draft (1 CPU)")
    cluster.free = 4
    cluster.now += CHECK_PLACEMENT_EVERY_S
    assert board.status().why == "no engine replica reports"
