"""How the ranks of a target join."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from specserve.cluster import workers
from specserve.cluster.worker_host import WorkerSite
from specserve.cluster.workers import TargetWorker
from specserve.config.tree import config_from_keys


@pytest.mark.parametrize("degree_invariant", [False, True])
def test_ranks_gather_exactly_where_the_config_asks_for_degree_invariance(
    monkeypatch: pytest.MonkeyPatch, degree_invariant: bool
) -> None:
    monkeypatch.setattr(workers, "Server", lambda *_: None)
    monkeypatch.setattr(workers, "TCPStore", lambda *_, **__: HashStore())
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    target = {"tensor_parallel": 2, "degree_invariant": degree_invariant}
    site = WorkerSite("node", "127.0.0.1", ())
    worker = TargetWorker(site, config_from_keys({"target": target}), bytes(40), 1)
    shard = worker._join_ranks(("127.0.0.1", 1))
    assert shard is not None
    assert (shard.rank, shard.size, shard.gathers) == (1, 2, degree_invariant)
