"""How the ranks of a target join."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from specserve.cluster.engine import rendezvous, workers
from specserve.cluster.engine.group import WorkerGroup
from specserve.cluster.engine.worker_host import WorkerSite
from specserve.cluster.engine.workers import TargetWorker
from specserve.config.tree import config_from_keys
from tests.support.card import emulated_cards


@pytest.mark.parametrize("degree_invariant", [False, True])
def test_ranks_gather_exactly_where_the_config_asks_for_degree_invariance(
    monkeypatch: pytest.MonkeyPatch, degree_invariant: bool
) -> None:
    monkeypatch.setattr(workers, "Server", lambda *_: None)
    monkeypatch.setattr(rendezvous, "TCPStore", lambda *_, **__: HashStore())
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    target = {"tensor_parallel": 2, "degree_invariant": degree_invariant}
    site = WorkerSite("node", "127.0.0.1", ())
    worker = TargetWorker(site, config_from_keys({"target": target}), bytes(40), 1)
    shard = worker._join_ranks(("127.0.0.1", 1))
    assert shard is not None
    assert (shard.rank, shard.size, shard.gathers) == (1, 2, degree_invariant)


def test_ranks_on_cards_name_their_device_and_wait_for_one_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL would otherwise choose a device by itself, and connect in the first sum only."""
    joined: dict[str, Any] = {}
    monkeypatch.setattr(workers, "Server", lambda *_: None)
    monkeypatch.setattr(rendezvous, "TCPStore", lambda *_, **options: joined.update(options))
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *kind, **how: joined.update(how, kind=kind)
    )
    site = WorkerSite("node", "127.0.0.1", ("0",))
    target = {"tensor_parallel": 2, "device": "cuda"}
    with emulated_cards():
        worker = TargetWorker(site, config_from_keys({"target": target}), bytes(40), 1)
        worker._join_ranks(("127.0.0.1", 1))
    assert joined["kind"] == ("nccl",)
    assert joined["device_id"] == torch.device("cuda", 0)
    assert joined["timeout"] >= timedelta(minutes=30), "weights of 140 GB are read meanwhile"


def test_all_ranks_find_the_checkpoint_before_any_waits_for_another() -> None:
    """Downloads of nodes may differ by more than the time for which ranks wait."""
    events: list[str] = []

    class Host:
        """A rank's actor."""

        def __init__(self, rank: int) -> None:
            self._rank = rank
            self.find_checkpoint = SimpleNamespace(remote=self._find)
            self.open_rendezvous = SimpleNamespace(remote=self._meet)

        async def _find(self) -> None:
            await asyncio.sleep(0)  # the others go on
            events.append(f"rank {self._rank} has the files")

        async def _meet(self) -> tuple[str, int]:
            events.append("they meet")
            return "127.0.0.1", 1

    async def start_rank(rank: int) -> SimpleNamespace:
        return SimpleNamespace(host=Host(rank))

    async def open_worker(*_: object) -> SimpleNamespace:
        return SimpleNamespace(ready=SimpleNamespace(place=SimpleNamespace(accelerators=())))

    group: Any = object.__new__(WorkerGroup)
    group._config = config_from_keys({"target.tensor_parallel": 3})
    group._curve, group._start_rank, group._open_worker = None, start_rank, open_worker
    asyncio.run(group._open_ranks())
    assert events == [*(f"rank {rank} has the files" for rank in range(3)), "they meet"]
