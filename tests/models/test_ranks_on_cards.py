"""Ranks on emulated cards compute the whole model's logits, and all make the same collectives."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from specserve.models.model import ModelOptions, open_model
from specserve.models.shard import Shard
from specserve.types import Step
from tests.support import checkpoints
from tests.support.card import CardError, emulated_cards
from tests.support.card.ranks import card_ranks

TEXT = tuple(np.random.default_rng(0).integers(3, checkpoints.VOCAB, 300).tolist())
PASSES = (
    ([Step(0, 0, TEXT[:40]), Step(1, 0, TEXT[:9])], [1, 1]),
    ([Step(0, 40, TEXT[40:45]), Step(1, 9, TEXT[9:10])], [5, 1]),
    ([Step(1, 10, TEXT[10:13])], [3]),
)
KINDS = ("llama", "gemma2", "qwen3_moe", "gpt_oss")


def logits(path: Path, device: str, shard: Shard | None) -> torch.Tensor:
    options = ModelOptions(dtype="float32", device=device, attention="invariant", pages=60)
    runner = open_model(path, options, shard=shard).runner
    return torch.cat([runner.run(steps, counts) for steps, counts in PASSES]).cpu()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_make_the_same_collectives_and_the_whole_models_logits(
    kind: str, size: int, tmp_path: Path
) -> None:
    path = checkpoints.make(kind, tmp_path / kind)
    expected = logits(path, "cpu", None)
    with emulated_cards(size), card_ranks(size) as ranks:
        found = ranks.run(lambda rank: logits(path, f"cuda:{rank}", Shard(rank, size)))
    assert ranks.calls[0], "nothing was exchanged"
    assert all(calls == ranks.calls[0] for calls in ranks.calls)
    kinds = {call.kind for call in ranks.calls[0]}
    assert kinds == {"all_reduce", "gather"}, "one sum a row-wise layer, and the logits"
    torch.testing.assert_close(found[0], expected, atol=2e-4, rtol=2e-4)


def test_a_rank_that_fails_is_not_waited_for() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank 1 is out of memory")
        ranks.exchange("all_reduce", torch.zeros(3, device=f"cuda:{rank}"))

    with emulated_cards(3), card_ranks(3) as ranks, pytest.raises(ValueError, match="rank 1"):
        ranks.run(work)


def test_tensors_that_nccl_does_not_take_are_refused() -> None:
    with emulated_cards(2), card_ranks(2) as ranks:
        with pytest.raises((CardError, threading.BrokenBarrierError), match=r"contiguous|^$"):
            ranks.run(lambda rank: ranks.exchange("sum", torch.zeros(2, 3, device="cuda").t()))
        assert ranks.calls == [[], []]
