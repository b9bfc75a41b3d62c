"""Two ranks of a target with adapters write the texts of the merged targets, as one rank does."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from specserve.errors import AdapterError
from specserve.features.adapters import files, store
from specserve.models.model import open_model
from specserve.models.shard import Shard
from specserve.models.target import TargetFollower
from specserve.types import Adapter, Request
from tests.proofs.test_adapters import MAX_TOKENS, Adapted, expected, make_adapted, requests
from tests.support.adapters import MEBIBYTE, write_adapter
from tests.support.engines import Engine, greedy, model_options
from tests.support.forks import run_ranks
from tests.support.rank_pairs import BroadcastTarget, follow

RANKS = 2
LOST = "lost"
"""An adapter that rank 0 can read, and rank 1 cannot."""


@dataclass(frozen=True, slots=True)
class RankCase:
    """A target whose row-wise layers sum over the ranks, or gather."""

    name: str
    gathers: bool = False
    adapter_bytes: int = MEBIBYTE

    def __str__(self) -> str:
        return f"{self.name}-{'gathers' if self.gathers else 'sums'}"


CASES = (
    RankCase("llama"),
    RankCase("llama", gathers=True, adapter_bytes=120_000),  # one adapter at a time
    RankCase("gpt2"),
    RankCase("phi3"),
)


def digest_without_lost(directory: Path) -> bytes:
    if directory.name == LOST:
        raise AdapterError("the disk of this rank is gone")
    return read_digest(directory)


read_digest = files.digest


def run_case(adapted: Adapted, lost: Adapter, case: RankCase, rank: int) -> Any:
    """Return what rank 0 finds: texts, errors, and how often it loaded an adapter."""
    shard = Shard(rank, RANKS, gathers=case.gathers)
    if rank > 0:
        opened = open_model(
            adapted.target, model_options(adapter_bytes=case.adapter_bytes), shard=shard
        )
        engine_info: Any = None
        with patch.object(store, "digest", digest_without_lost):
            follow(TargetFollower(opened.runner, engine_info, opened.adapters))
        return None
    engine = Engine(adapted.target, adapted.draft, shard=shard, adapter_bytes=case.adapter_bytes)
    adapters = engine.target.adapters
    rank_0 = BroadcastTarget(engine.target)
    engine.target = rank_0  # type: ignore[assignment]
    (first, *_) = greedy([(5, 6, 7)], max_tokens=MAX_TOKENS)
    asked: list[Request] = [*requests(adapted), replace(first, adapter=lost)]
    run = engine.run(asked, gamma=3, max_batch_tokens=64)
    rank_0.end()
    assert isinstance(adapters, store.AdapterStore)
    return run.texts[:-1], run.answers[-1].error, adapters.num_loads


def rank_main(rank: int, root: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    made: dict[str, tuple[Adapted, Adapter]] = pickle.loads(Path(root, "made.pickle").read_bytes())
    found = {case: run_case(*made[case.name], case, rank) for case in CASES}
    if rank == 0:
        Path(root, "found.pickle").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Adapted, Adapter]]:
    root = tmp_path_factory.mktemp("targets")
    found = {}
    for name in dict.fromkeys(case.name for case in CASES):
        adapted = make_adapted(name, root / name)
        found[name] = adapted, write_adapter(adapted.target, root / name / LOST, seed=9)
    return found


@pytest.fixture(scope="module")
def found(
    made: dict[str, tuple[Adapted, Adapter]], tmp_path_factory: pytest.TempPathFactory
) -> dict[RankCase, Any]:
    root = tmp_path_factory.mktemp("ranks")
    Path(root, "made.pickle").write_bytes(pickle.dumps(made))
    run_ranks(rank_main, root, ranks=RANKS)
    loaded: dict[RankCase, Any] = pickle.loads((root / "found.pickle").read_bytes())
    return loaded


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_write_the_texts_of_the_merged_targets(
    made: dict[str, tuple[Adapted, Adapter]], found: dict[RankCase, Any], case: RankCase
) -> None:
    texts, error, num_loads = found[case]
    assert texts == expected(made[case.name][0])
    assert error == "another rank of the target cannot read the adapter's files"
    assert num_loads == 2 if case.adapter_bytes == MEBIBYTE else num_loads > 10
