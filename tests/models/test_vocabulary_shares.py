"""Tokens that ranks choose on their shares of the logits are those that one rank chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from specserve.models.model import open_model
from specserve.models.shard import GatheredHead, Shard
from specserve.models.target import TargetFollower, TargetModel
from specserve.models.vocabulary_shares import VocabularyShares, chosen_on_shares
from specserve.sampling.distribution import NOT_FINITE, WarpBatch, argmax
from specserve.sampling.drafts import DraftBatch
from specserve.sampling.verify import RandomStreams, coupled, verify_greedy
from specserve.types import (
    Policy,
    PromptScoring,
    SparseDistribution,
    TokenRule,
    Verdict,
    VerifyStep,
    Warp,
)
from tests.support import checkpoints
from tests.support.engines import load_target, model_options

S = TypeVar("S")
T = TypeVar("T")
GREEDY, SAMPLED = Warp(temperature=0.0), Warp(temperature=0.7)
ALONE = (
    Policy(GREEDY, "block", 1, 2),
    Policy(SAMPLED, "coupled", 2, 2),
    Policy(Warp(), "coupled", 3, 2),
    Policy(Warp(temperature=0.0, top_k=5, top_p=0.5), "speculative", 4, 2),
)
"""How tokens are drawn that are chosen on shares."""
WHOLE = (
    Policy(SAMPLED, "block", 5, 2),
    Policy(SAMPLED, "speculative", 6, 2),
    Policy(Warp(temperature=0.7, top_p=0.9), "coupled", 7, 2),
    Policy(Warp(top_k=4), "coupled", 8, 2),
    Policy(Warp(min_p=0.1), "coupled", 9, 2),
    Policy(GREEDY, "block", 10, 2, logprobs=3),
    Policy(Warp(temperature=0.0, presence_penalty=0.5), "block", 11, 2),
    Policy(Warp(temperature=0.0, logit_bias=((3, 4.0),)), "block", 12, 2),
    Policy(Warp(rule=TokenRule(min_tokens=9, end_ids=(2,))), "coupled", 13, 2),
)
"""How tokens are drawn that need whole rows."""


def joined(size: int, *, gathers: bool = False) -> list[Shard]:
    """Return the shards of ranks that are threads of this process."""
    store: Any = cast(Any, dist).HashStore()

    def join(rank: int) -> Shard:
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
        group: Any = dist.ProcessGroup(store, rank, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return Shard(rank, size, group, gathers)

    return at_once(join, range(size))


def at_once(work: Callable[[S], T], ranks: Iterable[S]) -> list[T]:
    """Return what the ranks do, each in a thread."""
    given = list(ranks)
    with ThreadPoolExecutor(len(given)) as threads:
        return list(threads.map(work, given))


def step(seq_id: int, policy: Policy, drafts: tuple[int, ...] = (4, 5)) -> VerifyStep:
    return VerifyStep(seq_id, 0, (1,) * (seq_id + 1), drafts, None, policy)


def choose(logits: Tensor, steps: list[VerifyStep], size: int) -> Tensor:
    """Return the tokens that ranks choose together from these rows."""

    def work(shard: Shard) -> Tensor | None:
        head = GatheredHead(nn.Identity(), logits.shape[1], shard)
        part = logits[:, shard.rank * head.share : (shard.rank + 1) * head.share]
        return VocabularyShares(head).exchange(part, steps).own

    own, *others = at_once(work, joined(size))
    assert own is not None
    assert others == [None] * (size - 1)
    return own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1003, 9, 8])
@pytest.mark.parametrize("size", [2, 4])
def test_ties_go_to_the_lowest_id_wherever_it_lies(
    size: int, vocab: int, dtype: torch.dtype
) -> None:
    # Few different values: in most rows the highest is on several ranks, and in some on all.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-4, 2, (90, vocab), generator=generator).to(dtype)
    logits[7] = -3.0
    steps = [step(i, ALONE[0]) for i in range(30)]
    assert torch.equal(choose(logits, steps, size), argmax(logits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1003, 9])
@pytest.mark.parametrize("size", [2, 4])
def test_draws_by_coupled_noise_are_those_from_whole_rows(
    size: int, vocab: int, dtype: torch.dtype
) -> None:
    logits = (3 * torch.randn(120, vocab, generator=torch.Generator().manual_seed(1))).to(dtype)
    logits[:, 1] = logits[:, vocab - 1] = 9.0  # on the first and the last rank
    steps = [step(i, ALONE[i % 4]) for i in range(40)]
    policies = [each.policy for each in steps]
    warps = WarpBatch([policy.warp for policy in policies], [3] * 40)
    weights = warps.probabilities(logits, as_weights=np.full(120, True))
    drafts = DraftBatch.from_tokens([each.drafts for each in steps], [None] * 40)
    streams = RandomStreams.from_seeds(
        [policy.seed for policy in policies], [each.stop for each in steps]
    )
    expected = coupled(weights, drafts, streams)
    found = verify_greedy(choose(logits, steps, size).tolist(), [each.drafts for each in steps])
    assert [accepted for accepted, _ in found] == expected.accepted.tolist()
    assert [token for _, token in found] == expected.next_token.tolist()
    drawn = [token for each, (_, token) in zip(steps, found, strict=True) if each.seq_id % 4 == 1]
    assert len(set(drawn)) > 1, "nothing was random"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("size", [2, 4])
def test_a_row_that_is_not_finite_on_any_rank_has_no_token(size: int, value: float) -> None:
    logits = torch.randn(48, 9, generator=torch.Generator().manual_seed(2))
    steps = [step(i, ALONE[i % 4]) for i in range(16)]
    expected = choose(logits, steps, size).clone()
    broken = torch.arange(0, 48, 5)
    logits[broken, broken % 9] = value
    expected[broken] = NOT_FINITE
    assert torch.equal(choose(logits, steps, size), expected)


def test_whatever_reads_more_of_a_row_has_it_gathered() -> None:
    steps = [step(i, policy) for i, policy in enumerate((*ALONE, *WHOLE))]
    assert chosen_on_shares(steps) == frozenset(range(len(ALONE)))
    constrained = Policy(GREEDY, "block", 1, 2, constrained=True)
    assert chosen_on_shares([step(0, constrained)]) == frozenset()
    scored = VerifyStep(9, 0, (1, 2), (), None, ALONE[0], scoring=PromptScoring(1, None))
    assert chosen_on_shares([step(0, ALONE[0]), scored]) == frozenset()


# Whole models


def rounds(policies: tuple[Policy, ...]) -> list[list[VerifyStep]]:
    """Return the steps of some passes: prompts, then draft tokens of several numbers."""
    random = np.random.default_rng(3)

    def tokens(num: int) -> tuple[int, ...]:
        return tuple(random.integers(3, checkpoints.VOCAB, num).tolist())

    passes = [
        [
            VerifyStep(i, 0, tokens(9 + i), (), None, policy, needs_verdict=i % 3 > 0)
            for i, policy in enumerate(policies)
        ]
    ]
    for turn in range(3):
        steps = []
        for i, policy in enumerate(policies):
            drafts = tokens((turn + i) % 4)
            probs = np.full((len(drafts), 1), 1.0, np.float32)
            q = SparseDistribution(np.array(drafts, np.int64)[:, None], probs) if i % 2 else None
            steps.append(VerifyStep(i, 9 + i + turn, tokens(1), drafts, q, policy))
        passes.append(steps)
    passes.append([VerifyStep(99, 0, tokens(40), (), None, policies[0], needs_verdict=False)])
    scored = VerifyStep(98, 0, tokens(20), (), None, ALONE[0], scoring=PromptScoring(1, None))
    return [*passes, [scored]]


@pytest.mark.parametrize("policies", [ALONE[:1], ALONE, (*WHOLE, *ALONE)], ids=len)
@pytest.mark.parametrize(("kind", "size"), [("llama", 2), ("phi3", 2), ("llama_four_kv_heads", 4)])
def test_ranks_decide_as_one_rank_does(
    kind: str, size: int, policies: tuple[Policy, ...], tmp_path: Path
) -> None:
    path = checkpoints.make(kind, tmp_path / kind)
    options = model_options(dtype="bfloat16", pages=200)
    alone = load_target(path, options)
    expected = [list(alone.verify(steps)) for steps in rounds(policies)]

    shards = joined(size, gathers=True)  # the products' bits are as on one rank
    first = load_target(path, options, shard=shards[0])
    followers = [
        TargetFollower(open_model(path, options, shard=shard).runner, first.info)
        for shard in shards[1:]
    ]

    def work(rank: TargetModel | TargetFollower) -> list[list[Verdict]]:
        return [list(rank.verify(steps)) for steps in rounds(policies)]

    ranks: list[TargetModel | TargetFollower] = [first, *followers]
    found = at_once(work, ranks)[0]
    for ours, theirs in zip(found, expected, strict=True):
        assert [_compared(one) for one in ours] == [_compared(one) for one in theirs]


def _compared(verdict: Verdict) -> tuple[object, ...]:
    scores = verdict.prompt_logprobs
    return (
        verdict.seq_id,
        verdict.accepted,
        verdict.next_token,
        verdict.logprobs,
        verdict.is_decision,
        None if scores is None else scores.token.tolist(),
    )
