"""Greedy text equals that of the library's generate(), token for token, in fp32.

It does so with any batching, drafter, preemption and number of ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import GenerationConfig

from specserve.models.network import LLAMA_SHAPED
from specserve.models.shard import Shard
from specserve.models.target import TargetFollower
from specserve.types import FinishReason
from tests.support import checkpoints
from tests.support.engines import (
    PAGE_SIZE,
    Engine,
    PacerLike,
    RandomPacer,
    greedy,
    library_greedy,
    load_target,
    model_options,
)
from tests.support.forks import run_ranks
from tests.support.rank_pairs import BroadcastTarget, follow

# around pages, windows, and rounds of 512 tokens
LENGTHS = (
    1,
    2,
    5,
    15,
    16,
    17,
    31,
    33,
    48,
    64,
    100,
    129,
    180,
    222,
    256,
    300,
)
MAX_TOKENS = 24
DRAFT_NOISE = 0.05  # of the weights: a tenth to two thirds of the draft tokens are accepted
FEW_PAGES = 26  # the longest text alone takes 21
RANKS = 2
Texts = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Pair:
    """A checkpoint, a draft that agrees with it in part, and the library's texts."""

    name: str
    target: Path
    draft: Path
    texts: Texts


@pytest.fixture(scope="module")
def pairs(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Pair]:
    root = tmp_path_factory.mktemp("greedy")
    return {name: make_pair(root, name) for name in checkpoints.ARCHITECTURES}


def make_pair(root: Path, name: str) -> Pair:
    target = checkpoints.make(name, root / name)
    draft = checkpoints.perturb(target, draft_of(target), DRAFT_NOISE)
    return Pair(name, target, draft, library_greedy(target, prompts(), max_tokens=MAX_TOKENS))


def draft_of(target: Path) -> Path:
    return target.with_name(f"{target.name}_draft")


def prompts() -> Texts:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(3, checkpoints.VOCAB, length).tolist()) for length in LENGTHS]


@pytest.fixture(scope="module", params=checkpoints.ARCHITECTURES)
def pair(request: pytest.FixtureRequest, pairs: Mapping[str, Pair]) -> Pair:
    return pairs[request.param]


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Engine:
    return Engine(pair.target, pair.draft)


def test_the_library_s_texts_are_worth_comparing(pair: Pair) -> None:
    """Texts of one repeated token, or texts that ignore their prompt, would hide mistakes."""
    assert len({token for text in pair.texts for token in text}) > 50
    assert len(set(pair.texts)) == len(LENGTHS)


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_texts_are_the_library_s_at_any_gamma(pair: Pair, engine: Engine, gamma: int) -> None:
    run = engine.run(greedy(prompts(), max_tokens=MAX_TOKENS), gamma=gamma)
    assert run.texts == pair.texts
    assert 0 < run.accepted < run.drafted or gamma == 0


def test_texts_are_the_library_s_when_gamma_changes_every_round(pair: Pair, engine: Engine) -> None:
    run = engine.run(greedy(prompts(), max_tokens=MAX_TOKENS), pacer=RandomPacer(max_gamma=7))
    assert run.texts == pair.texts
    assert 0 < run.accepted < run.drafted


@pytest.mark.parametrize("pacer", [None, RandomPacer(max_gamma=2)], ids=["plain", "random"])
def test_texts_are_the_library_s_when_pages_run_out(pair: Pair, pacer: PacerLike | None) -> None:
    engine = Engine(pair.target, pair.draft, pages=FEW_PAGES, draft_pages=FEW_PAGES - 4)
    run = engine.run(
        greedy(prompts(), max_tokens=MAX_TOKENS), pacer=pacer, drafts=pacer is not None, max_gamma=2
    )
    assert run.texts == pair.texts
    assert run.num_preempted > 0
    assert pacer is None or 0 < run.accepted < run.drafted


def test_texts_are_the_library_s_when_prompts_come_in_chunks_or_out_of_the_prefix_cache(
    pair: Pair,
) -> None:
    engine = Engine(pair.target, pair.draft)
    requests, cache = greedy(prompts(), max_tokens=MAX_TOKENS), engine.target.runner.cache
    chunked = engine.run(requests, gamma=3, max_batch_tokens=90)
    before = cache.prefix_hits
    cached = engine.run(requests, gamma=3, max_batch_tokens=2 * sum(LENGTHS))
    expected = sum((n - 1) // PAGE_SIZE * PAGE_SIZE for n in LENGTHS)
    assert cache.prefix_hits - before >= expected
    assert chunked.texts == cached.texts == pair.texts


@pytest.mark.parametrize(("gamma", "max_tokens"), [(0, 1), (3, 8)])
def test_equal_prompts_at_once_are_computed_once_and_every_text_is_the_library_s(
    pairs: Mapping[str, Pair], gamma: int, max_tokens: int
) -> None:
    pair, longest = pairs["qwen2"], max(LENGTHS)
    engine = Engine(pair.target, pair.draft)
    requests = greedy([prompts()[-1]] * 8, max_tokens=max_tokens)
    run = engine.run(requests, gamma=gamma, max_batch_tokens=2 * longest)
    assert run.texts == [pair.texts[-1][:max_tokens]] * 8
    assert engine.drafter is not None
    for model in (engine.target, engine.drafter)[: 1 + (gamma > 0)]:
        cache = model.runner.cache
        assert longest <= cache.prefix_queries - cache.prefix_hits <= longest + 8 * PAGE_SIZE


@pytest.mark.parametrize("gamma", [0, 5])
def test_texts_end_at_the_end_tokens_where_the_library_s_do(
    pairs: Mapping[str, Pair], tmp_path: Path, gamma: int
) -> None:
    # each text ends soon, at another position
    ends = sorted({text[i] for i, text in enumerate(pairs["qwen2"].texts) if len(text) > i})
    target = checkpoints.make("qwen2", tmp_path / "qwen2")
    config_class: Any = GenerationConfig
    config_class(eos_token_id=ends, pad_token_id=checkpoints.PAD).save_pretrained(target)
    run = Engine(target, pairs["qwen2"].draft).run(
        greedy(prompts(), max_tokens=MAX_TOKENS), gamma=gamma
    )
    assert run.texts == library_greedy(target, prompts(), max_tokens=MAX_TOKENS)
    assert all(answer.finish is FinishReason.STOP for answer in run.answers)
    assert len({len(text) for text in run.texts}) > 5


# Two ranks


@dataclass(frozen=True, slots=True)
class TwoRankCase:
    """A target on two ranks, through the fused forward pass or the library's code."""

    name: str
    fused: bool
    gamma: int

    def __str__(self) -> str:
        return f"{self.name}-{'fused' if self.fused else 'library'}-{self.gamma}"


TWO_RANK_CASES = [
    *(
        TwoRankCase(name, name in LLAMA_SHAPED, gamma)
        for name in checkpoints.ARCHITECTURES
        for gamma in (0, 5)
    ),
    *(TwoRankCase(name, False, 5) for name in LLAMA_SHAPED if name in checkpoints.ARCHITECTURES),
]
TWO_RANK_TOKENS = 12  # of each text: an all-reduce between two processes takes milliseconds


def rank_main(rank: int, root: str) -> None:
    """Serve each target on two ranks in turn.

    Rank 0 has the draft and the coordinator, and writes the texts to a file.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    texts_by_case: dict[TwoRankCase, Texts] = {}
    for name, fused in dict.fromkeys((case.name, case.fused) for case in TWO_RANK_CASES):
        gammas = [case.gamma for case in TWO_RANK_CASES if (case.name, case.fused) == (name, fused)]
        with patch("specserve.models.network.can_fuse", return_value=fused):
            texts = shared_texts(Path(root) / name, gammas, Shard(rank, RANKS))
        texts_by_case |= {
            TwoRankCase(name, fused, gamma): own
            for gamma, own in zip(gammas, texts, strict=rank == 0)
        }
    if rank == 0:
        Path(root, "texts.pickle").write_bytes(pickle.dumps(texts_by_case))
    dist.destroy_process_group()


def shared_texts(target: Path, gammas: Sequence[int], shard: Shard) -> list[Texts]:
    """Return the texts of rank 0 with each gamma; nothing on the other rank."""
    if shard.rank > 0:
        other = load_target(target, model_options(), shard=shard)
        follow(TargetFollower(other.runner, other.info))
        return []
    engine = Engine(target, draft_of(target), shard=shard)
    rank_0 = BroadcastTarget(engine.target)
    engine.target = rank_0  # type: ignore[assignment]
    requests = greedy(prompts(), max_tokens=TWO_RANK_TOKENS)
    texts = [
        engine.run(requests, gamma=gamma, max_batch_tokens=sum(LENGTHS)).texts for gamma in gammas
    ]
    rank_0.end()
    return texts


@pytest.fixture(scope="module")
def texts_of_two_ranks(pairs: Mapping[str, Pair]) -> Mapping[TwoRankCase, Texts]:
    root = pairs["llama"].target.parent
    run_ranks(rank_main, root, ranks=RANKS)
    return pickle.loads((root / "texts.pickle").read_bytes())  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", TWO_RANK_CASES, ids=str)
def test_two_ranks_write_the_library_s_texts(
    pairs: Mapping[str, Pair], texts_of_two_ranks: Mapping[TwoRankCase, Texts], case: TwoRankCase
) -> None:
    assert texts_of_two_ranks[case] == [text[:TWO_RANK_TOKENS] for text in pairs[case.name].texts]
