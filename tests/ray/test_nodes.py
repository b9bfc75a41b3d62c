"""Three raylets on this machine with declared GPUs: places of workers, and texts of one process."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import ray
from ray.cluster_utils import Cluster

from specserve import LLM, Sampling
from specserve.cluster.engine.group import TARGET, WorkerGroup
from specserve.cluster.engine.process_state import process_runs_on
from specserve.cluster.engine.supervisor import kill_process
from specserve.cluster.engine.worker_host import WorkerHello, WorkerPlace
from specserve.cluster.engine.worker_hosts import StartedWorker
from specserve.cluster.launch import handle
from specserve.cluster.placement import FIRST_RANK, bundles
from specserve.config.tree import config_from_keys
from specserve.engine.trace import AVOIDED_DEVICE, DeviceEvent
from specserve.errors import DeviceFault
from tests.support.checkpoints import add_tokenizer, make, perturb
from tests.support.ray_server import served

ANYWHERE: Any = None
PROMPTS = [[7, 11, 13], [5] * 40, list(range(3, 90))]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Start a head without GPUs, a node with four GPUs, and one with a single GPU for drafts.

    Yields the ids of the nodes by their pools.
    """
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 8, "num_gpus": 0, "include_dashboard": False},
    )
    nodes = {
        "targets": cluster.add_node(num_cpus=8, num_gpus=4, labels={"pool": "targets"}),
        "drafts": cluster.add_node(num_cpus=8, num_gpus=1, labels={"pool": "drafts"}),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield {name: node.node_id for name, node in nodes.items()}
    cluster.shutdown()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make an fp32 pair with four heads for keys and values, so that four ranks can share it."""
    root = tmp_path_factory.mktemp("pair")
    target = make("llama_four_kv_heads", root / "target")
    add_tokenizer(target)
    return target, perturb(target, root / "draft", 0.3)


@pytest.fixture(scope="module")
def alone(pair: tuple[Path, Path]) -> list[str]:
    """Return the texts of the target in one process, with nothing drafted."""
    keys: dict[str, object] = {
        "target": {"path": str(pair[0]), "dtype": "float32", "threads": 1},
        "draft": {"kind": "none"},
        "cache": {"pages": 256},
    }
    with LLM.from_config(config_from_keys(keys)) as llm:
        outputs = llm.generate(PROMPTS, Sampling(max_tokens=24, temperature=0, ignore_eos=True))
    return [output.text for output in outputs]


def texts(url: str) -> list[str]:
    """Return the texts that the official client receives."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answers = [
        client.completions.create(
            model="tiny", prompt=ids, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
        )
        for ids in PROMPTS
    ]
    return [answer.choices[0].text for answer in answers]


@pytest.mark.parametrize("ranks", [1, 4])
def test_each_worker_is_on_the_device_and_node_that_the_config_asks_for_and_the_text_is_the_same(
    cluster: dict[str, str], pair: tuple[Path, Path], alone: list[str], ranks: int
) -> None:
    keys: dict[str, object] = {
        "model": "tiny",
        "target": {
            "path": str(pair[0]),
            "dtype": "float32",
            "tensor_parallel": ranks,
            "threads": 1,
            "label_selector": {"pool": "targets"},
        },
        "draft": {
            "path": str(pair[1]),
            "dtype": "float32",
            "threads": 1,
            "label_selector": {"pool": "drafts"},
        },
        "speculation": {"gamma": 3},
        "cache": {"pages": 256},
    }
    with served(keys, join=True) as (url, config):
        places: dict[str, WorkerPlace] = handle(config, "Engine").places.remote().result()
        written = texts(url)
    assert {name: place.node for name, place in places.items()} == {
        **{f"target-{rank}": cluster["targets"] for rank in range(ranks)},
        "draft": cluster["drafts"],
    }
    assert (
        len({place.accelerators for name, place in places.items() if name != "draft"}) == ranks
    ), "two ranks share a device"
    assert places["draft"].accelerators == ("0",)
    assert written == alone


def test_a_process_is_examined_on_its_own_node(cluster: dict[str, str]) -> None:
    ray.init()
    try:
        nodes = cluster["drafts"], ray.get_runtime_context().get_node_id()
        with subprocess.Popen(["sleep", "60"]) as process:
            assert all(asyncio.run(process_runs_on(node, process.pid)) for node in nodes)
            process.kill()
            process.wait()
            for node in nodes:
                assert asyncio.run(process_runs_on(node, process.pid)) is False
    finally:
        ray.shutdown()


def test_a_worker_whose_device_has_failed_is_restarted_on_another_node(
    cluster: dict[str, str], pair: tuple[Path, Path]
) -> None:
    events: list[DeviceEvent] = []
    keys = {
        "target": {"path": str(pair[0]), "dtype": "float32", "threads": 1, "device": "cpu"},
        "draft": {"kind": "none"},
        "cache": {"pages": 256},
    }

    async def main() -> None:
        config = config_from_keys(keys)
        wanted = bundles(config, has_gpus=False)
        group = await WorkerGroup.start(config, wanted, None, events.append)
        first = group.places["target-0"]
        started = StartedWorker(TARGET, FIRST_RANK, None, WorkerHello(ANYWHERE, first.node, 1))
        group._hosts.record_fault(started, DeviceFault("wrong", node=first.node, device="cpu"))
        assert list(group.avoided_devices.values()) == [("target-0",)]
        kill_process(first.node, first.pid)
        async with asyncio.timeout(120):
            while group.troubles or group.places["target-0"].pid == first.pid:
                await asyncio.sleep(0.02)
        assert group.places["target-0"].node in {*cluster.values(), head} - {first.node}
        assert list(group.avoided_devices.values()) == [()], "nothing uses it any more"
        assert [event.name for event in events] == [AVOIDED_DEVICE]
        await group.close()

    ray.init()
    head = ray.get_runtime_context().get_node_id()
    try:
        asyncio.run(main())
    finally:
        ray.shutdown()
