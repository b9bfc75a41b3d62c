"""An engine must leave before the node of one of its ranks does, and its texts must go on."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest
from ray._private.worker import global_worker
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from specserve.cluster.engine.node_drain import DrainWatch
from specserve.cluster.engine.worker_host import WorkerPlace
from specserve.cluster.launch import handle
from tests.support.ray_server import served

HEAD, FIRST, SECOND, THIRD = "head", "first", "second", "third"
NOTICE_S = 120
TEXTS, TOKENS = 128, 900


def places(**nodes: str) -> dict[str, WorkerPlace]:
    return {name.replace("_", "-"): WorkerPlace(node, 1, "cpu", ()) for name, node in nodes.items()}


class Nodes:
    """Answers about draining nodes, the last of which is repeated; an exception is raised."""

    def __init__(self, *answers: Collection[str] | Exception) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    def __call__(self) -> Collection[str]:
        self.num_asked += 1
        answer = self._answers[min(self.num_asked, len(self._answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


def trouble_after(nodes: Nodes, looks: int, workers: Mapping[str, WorkerPlace]) -> str | None:
    """Return the trouble of an engine on HEAD after a number of looks."""

    async def main() -> str | None:
        watch = DrainWatch(lambda: workers, HEAD, nodes=nodes, every_s=0)
        task = asyncio.create_task(watch.run())
        while nodes.num_asked <= looks:
            await asyncio.sleep(0)
        task.cancel()
        return watch.trouble

    return asyncio.run(asyncio.wait_for(main(), 10))


def test_a_rank_on_a_draining_node_ends_its_replica() -> None:
    workers = places(target_0=FIRST, target_1=SECOND, draft=THIRD)
    assert trouble_after(Nodes({SECOND}), 1, workers) == ("the node of target-1 is being drained")


def test_a_draining_node_without_a_rank_is_no_trouble() -> None:
    """Check a node of another engine, and the draft's, without which rounds go on."""
    workers = places(target_0=FIRST, draft=SECOND)
    assert trouble_after(Nodes({SECOND, THIRD}), 1, workers) is None


def test_a_replica_that_serve_moves_by_itself_goes_on_serving_meanwhile() -> None:
    """Check that Serve, which starts the new replica first, is not kept from doing so."""
    workers = places(target_0=HEAD, target_1=FIRST)
    assert trouble_after(Nodes({HEAD, FIRST}), 1, workers) is None


def test_a_head_that_is_away_changes_nothing() -> None:
    workers = places(target_0=FIRST)
    away = RuntimeError("Ray's head does not answer")
    assert trouble_after(Nodes({FIRST}, away, away), 3, workers) is not None
    assert trouble_after(Nodes((), away, away), 3, workers) is None


@pytest.fixture
def nodes() -> Iterator[dict[str, str]]:
    """Start a head, and two nodes that have room for a rank each and nothing else."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 6, "include_dashboard": False}
    )
    ids = {
        name: cluster.add_node(num_cpus=1, labels={"pool": "spot"}).node_id
        for name in (FIRST, SECOND)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield ids
    cluster.shutdown()


def _drain(node: str) -> None:
    worker: Any = global_worker
    words: Any = autoscaler_pb2
    deadline_ms = int(1000 * (time.time() + NOTICE_S))
    reason = words.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = worker.gcs_client.drain_node(node, reason, "a spot notice", deadline_ms)
    assert accepted, why


@pytest.mark.long
def test_a_text_goes_on_elsewhere_when_the_node_of_its_rank_is_drained(
    nodes: dict[str, str],
) -> None:
    keys = {
        "target.label_selector": {"pool": "spot"},
        "target.threads": 1,
        "draft.threads": 1,
        "limits.max_running": TEXTS,
    }
    with served(keys, join=True) as (url, config):
        engine = handle(config, "Engine")
        place: WorkerPlace = engine.places.remote().result()["target-0"]
        assert place.node in nodes.values(), "the rank is on a node without its coordinator"
        wanted = {"prompt": "import", "n": TEXTS, "max_tokens": TOKENS, "ignore_eos": True}
        body = {
            "model": "demo",
            "stream": True,
            "stream_options": {"include_usage": True},
            **wanted,
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=300) as stream:
            lines = (line[6:] for line in stream if line.startswith(b"data: {"))
            assert b"error" not in next(lines)
            _drain(place.node)
            events = [json.loads(line) for line in lines]
        assert events[-1]["usage"]["completion_tokens"] == TEXTS * TOKENS
        moved: WorkerPlace = engine.places.remote().result()["target-0"]
        assert moved.node in set(nodes.values()) - {place.node}
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            resumed = re.search(rb"^specserve_requests_resumed_total (\d+)", answer.read(), re.M)
        assert resumed is not None
        assert int(resumed[1]) > 0, "every text had ended before its replica was stopped"
