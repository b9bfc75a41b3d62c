"""Ranks on emulated cards compute the whole model's logits, and all make the same collectives."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specserve.models.model import ModelOptions, open_model
from specserve.models.shard import GatheredHead, Shard
from specserve.models.target import TargetFollower
from specserve.models.vocabulary_shares import VocabularyShares
from specserve.types import ModelInfo, Policy, Step, Verdict, VerifyStep, Warp
from tests.support import checkpoints
from tests.support.card import CardError, emulated_cards
from tests.support.card.ranks import card_ranks
from tests.support.engines import load_target

TEXT = tuple(np.random.default_rng(0).integers(3, checkpoints.VOCAB, 300).tolist())
PASSES = (
    ([Step(0, 0, TEXT[:40]), Step(1, 0, TEXT[:9])], [1, 1]),
    ([Step(0, 40, TEXT[40:45]), Step(1, 9, TEXT[9:10])], [5, 1]),
    ([Step(1, 10, TEXT[10:13])], [3]),
)
POLICIES = {
    "greedy": Policy(Warp(temperature=0.0), "block", 1, 9),
    "coupled": Policy(Warp(temperature=0.7), "coupled", 2, 9),
    "block": Policy(Warp(temperature=0.7), "block", 3, 9),
}
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


@pytest.mark.parametrize("name", ["greedy", "coupled", "both", "block"])
def test_ranks_exchange_tokens_where_no_more_is_needed(name: str, tmp_path: Path) -> None:
    path, size = checkpoints.make("llama", tmp_path / "llama"), 2
    policies = [POLICIES[name]] * 2 if name in POLICIES else list(POLICIES.values())[:2]
    prompts = [VerifyStep(i, 0, TEXT[: 9 + i], (), None, policies[i]) for i in range(2)]
    verified = [VerifyStep(0, 9, TEXT[9:10], TEXT[10:15], None, policies[0])]
    verified.append(VerifyStep(1, 10, TEXT[10:11], (), None, policies[1]))
    passes, rows = [prompts, verified], (2, 7)
    where = ModelOptions(dtype="bfloat16", device="cpu", attention="invariant", pages=60)

    def verdicts(rank: int) -> list[list[Verdict]]:
        options, shard = replace(where, device=f"cuda:{rank}"), Shard(rank, size)
        if rank == 0:
            model = load_target(path, options, shard=shard)
            return [list(model.verify(steps)) for steps in passes]
        opened = open_model(path, options, shard=shard)
        info = ModelInfo(checkpoints.VOCAB, checkpoints.CONTEXT, frozenset(), 16, 60)
        follower = TargetFollower(opened.runner, info)
        return [list(follower.verify(steps)) for steps in passes]

    with emulated_cards(size), card_ranks(size) as ranks:
        found = ranks.run(verdicts)
    calls = ranks.calls[0]
    assert all(other == calls for other in ranks.calls)
    assert [[one.seq_id for one in each] for each in found[0]] == [[0, 1], [0, 1]]
    gathered = [call.num_bytes for call in calls if call.kind == "gather"]
    maxima = [call.shape for call in calls if call.dtype == torch.float32]
    whole = [num * -(-checkpoints.VOCAB // size) * 2 for num in rows]
    assert gathered == (whole if name == "block" else [num * 8 for num in rows])
    drawn = {"coupled": rows, "both": (1, 1)}.get(name, ())  # rows of the sampled sequences
    assert maxima == [(num, 1) for num in drawn]


@pytest.mark.parametrize("batch", [1, 32])
def test_bytes_of_a_round_at_a_real_vocabulary(batch: int) -> None:
    """Compare 8 rows of each sequence on four ranks, gathered and as tokens."""
    vocab, size = 128_256, 4
    steps = [VerifyStep(i, 0, (1,), (2,) * 7, None, POLICIES["greedy"]) for i in range(batch)]

    def exchange(rank: int, keeps: bool) -> torch.Tensor | None:
        head = GatheredHead(torch.nn.Identity(), vocab, Shard(rank, size))
        part = torch.zeros(8 * batch, head.share, dtype=torch.bfloat16, device=f"cuda:{rank}")
        return VocabularyShares(head).exchange(part, steps).own if keeps else head(part)

    num_bytes = {}
    for keeps in (False, True):
        with emulated_cards(size), card_ranks(size) as ranks:
            ranks.run(lambda rank, keeps=keeps: exchange(rank, keeps))  # type: ignore[misc]
        num_bytes[keeps] = sum(call.num_bytes for call in ranks.calls[1])
    assert num_bytes == {False: 513_024 * batch, True: 64 * batch}


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
