"""The workers of an engine: processes of one fork server that are replaced when they are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import psutil
import pytest

from specserve.cluster.engine.fork_server import KEY_VARIABLE
from specserve.cluster.engine.group import WorkerGroup
from specserve.cluster.placement import bundles
from specserve.cluster.ray_session import local_ray
from specserve.config.tree import config_from_keys
from specserve.errors import NoShardingPlan
from tests.support.processes import own_processes_named

PATIENCE_S = 120.0
KEYS: dict[str, object] = {
    "target.threads": 1,
    "draft.threads": 1,
    "draft.placement": "apart",
    "cache.pages": 64,
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Start a Ray whose workers have a fork server of their own, which a test kills."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(KEY_VARIABLE)
        with local_ray(num_cpus=4):
            yield


async def started(keys: dict[str, object]) -> WorkerGroup:
    config = config_from_keys(KEYS | keys)
    return await WorkerGroup.start(config, bundles(config, has_gpus=False))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


def process(group: WorkerGroup, name: str) -> psutil.Process:
    return psutil.Process(group.places[name].pid)


def replaced(group: WorkerGroup, name: str, before: int) -> bool:
    return not group.troubles and group.places[name].pid != before


def test_lost_workers_are_forked_again_by_the_same_server_and_nothing_remains_at_the_end() -> None:
    async def main() -> None:
        group = await started({"target.tensor_parallel": 2})
        first = {name: place.pid for name, place in group.places.items()}
        servers = {process(group, name).ppid() for name in first}
        assert len(servers) == 1
        assert process(group, "target-1").cmdline()[0].startswith("ray::TargetWorker.run")

        process(group, "target-1").kill()
        await until(lambda: replaced(group, "target-1", first["target-1"]))
        assert replaced(group, "target-0", first["target-0"]), "ranks restart together"
        assert group.places["draft"].pid == first["draft"]

        process(group, "draft").suspend()
        process(group, "draft").kill()
        await until(lambda: replaced(group, "draft", first["draft"]))
        assert group.restarts == {"target": 1, "draft": 1}
        assert [loss.partition(":")[0] for loss in group.losses] == ["target", "draft"]
        assert {process(group, name).ppid() for name in first} == servers

        last = [process(group, name) for name in first]
        hosts = own_processes_named("ray::WorkerHost")
        assert len(hosts) == len(first)
        await group.close()
        await until(lambda: not any(one.is_running() for one in (*last, *hosts)))

    asyncio.run(main())


def test_a_target_comes_back_when_its_host_or_the_fork_server_is_lost_too() -> None:
    async def main() -> None:
        group = await started({"draft.kind": "none", "draft.path": None})
        first = process(group, "target-0")
        psutil.Process(first.ppid()).kill()
        first.kill()
        await until(lambda: replaced(group, "target-0", first.pid))

        second = process(group, "target-0")
        (host,) = own_processes_named("ray::WorkerHost")
        host.kill()
        await until(lambda: replaced(group, "target-0", second.pid))
        await until(lambda: not second.is_running())  # a worker ends with its host
        await group.close()

    asyncio.run(main())


def test_the_draft_lives_where_its_measurement_says_and_stays_there() -> None:
    async def main() -> None:
        group = await started({"draft.placement": "auto"})
        assert group.choice is not None
        assert group.draft_placement == group.choice.reason
        assert all(rate > 0 for rate in (*group.choice.together, *group.choice.apart))
        is_apart = group.choice.placement == "apart"
        expected = {"target-0", "draft"} if is_apart else {"target-0"}
        assert group.places.keys() == expected
        first = process(group, "target-0")
        first.kill()
        await until(lambda: replaced(group, "target-0", first.pid))
        assert group.places.keys() == expected
        await group.close()

    asyncio.run(main())


def test_a_draft_together_with_its_target_has_no_bundle_and_no_process() -> None:
    async def main() -> None:
        group = await started({"draft.placement": "together"})
        assert group.places.keys() == {"target-0"}
        assert group.draft_placement == "together"
        assert group.draft_context is not None
        await group.close()

    asyncio.run(main())


def test_the_error_of_ranks_that_cannot_share_their_model_is_their_own() -> None:
    with pytest.raises(NoShardingPlan, match="3 ranks"):
        asyncio.run(started({"target.tensor_parallel": 3}))
