"""Encoder-decoders: the library's own texts, token for token in fp32, from sources of all lengths at once, however drafted, preempted or divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM

from specserve.drafters.ngram.build import open_statistical
from specserve.models.checkpoints.load import Loaded, load_model
from specserve.models.checkpoints.weights import Weights
from specserve.models.model import Placement, open_model
from specserve.models.runner import Runner
from specserve.models.shard import Shard
from specserve.models.t5 import T5Network
from specserve.types import Step
from tests.support import checkpoints
from tests.support.engines import Engine, Pacing, RandomPacer, greedy, library_greedy_from_sources

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
)  # around pages, far distances, blocks and rounds of 512 tokens
MAX_TOKENS = 24
DRAFT_NOISE = 0.02  # of the weights: a part of the drafts is accepted
FEW_PAGES = 26  # the longest source with its text alone takes 21
KINDS = tuple(checkpoints.ENCODER_DECODERS)
WRITING = ("t5", "t5_v1_1")  # mT5s differ in nothing that makes a text
Texts = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Pair:
    target: Path
    draft: Path
    texts: Texts


@pytest.fixture(scope="module")
def pairs(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Pair]:
    root = tmp_path_factory.mktemp("t5")
    return {name: make_pair(root, name) for name in WRITING}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    for name, config in checkpoints.ENCODER_DECODERS.items():
        checkpoints.write(config(), root / name)
    return root


def make_pair(root: Path, name: str) -> Pair:
    target = checkpoints.write(
        checkpoints.ENCODER_DECODERS[name](), root / name, seed=2
    )  # whose texts differ
    draft = checkpoints.perturbed(target, root / f"{name}_draft", DRAFT_NOISE)
    return Pair(
        target, draft, library_greedy_from_sources(target, sources(), max_tokens=MAX_TOKENS)
    )


def sources() -> Texts:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(3, checkpoints.VOCAB, length).tolist()) for length in LENGTHS]


@pytest.fixture(scope="module", params=WRITING)
def pair(request: pytest.FixtureRequest, pairs: Mapping[str, Pair]) -> Pair:
    return pairs[request.param]


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Engine:
    return Engine(pair.target, pair.draft)


def test_the_library_s_texts_are_worth_comparing(pair: Pair) -> None:
    assert len({token for text in pair.texts for token in text}) > 40
    assert len(set(pair.texts)) == len(LENGTHS)


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_texts_are_the_library_s_at_any_gamma(pair: Pair, engine: Engine, gamma: int) -> None:
    run = engine.run(greedy(sources(), max_tokens=MAX_TOKENS), gamma=gamma)
    assert run.texts == pair.texts
    assert 0 < run.accepted < run.drafted or gamma == 0


def test_texts_are_the_library_s_when_gamma_changes_and_branches_are_drafted_ahead(
    pair: Pair,
) -> None:
    engine = Engine(pair.target, pair.draft, draft_pages=800, ahead=True)
    run = engine.run(greedy(sources(), max_tokens=MAX_TOKENS), pacer=RandomPacer(max_gamma=6))
    assert run.texts == pair.texts
    assert sum(answer.stats.anticipated for answer in run.answers if answer.stats) > 0


@pytest.mark.parametrize("pacer", [None, RandomPacer(max_gamma=2)], ids=["plain", "random"])
def test_texts_are_the_library_s_when_pages_run_out(pair: Pair, pacer: Pacing | None) -> None:
    engine = Engine(pair.target, pair.draft, pages=FEW_PAGES, draft_pages=FEW_PAGES - 4)
    run = engine.run(
        greedy(sources(), max_tokens=MAX_TOKENS), pacer=pacer, drafts=pacer is not None, max_gamma=2
    )
    assert run.texts == pair.texts
    assert run.num_preempted > 0
    assert pacer is None or 0 < run.accepted < run.drafted


@pytest.mark.parametrize("kind", ["prompt_copy", "max_gram"])
def test_texts_are_the_library_s_when_drafts_are_copied(
    pair: Pair, engine: Engine, kind: str
) -> None:
    drafter = open_statistical(kind, path=None, learn=None, support=8, vocab_size=checkpoints.VOCAB)
    run = engine.run(greedy(sources(), max_tokens=MAX_TOKENS), with_drafter=drafter, gamma=4)
    assert run.texts == pair.texts
    assert run.drafted > 0


# The forward pass


@pytest.fixture(scope="module")
def texts() -> Texts:
    rng = np.random.default_rng(1)
    return [
        (checkpoints.PAD, *rng.integers(3, checkpoints.VOCAB, length).tolist())
        for length in (0, 1, 9, 40, 100)
    ]


def steps_of(texts: Texts) -> list[Step]:
    return [
        Step(i, 0, text, source)
        for i, (text, source) in enumerate(zip(texts, sources()[::3], strict=False))
    ]


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_the_library_s(root: Path, name: str, texts: Texts) -> None:
    """Of all positions of several texts beside one another: relu and gated, tied head and own, stacks of equal and other depths."""
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(
        root / name, dtype=torch.float32, attn_implementation="eager"
    )
    steps = steps_of(texts)
    with torch.inference_mode():
        wanted = [
            model(
                torch.tensor([step.source]),
                decoder_input_ids=torch.tensor([step.tokens]),
                use_cache=False,
            ).logits[0]
            for step in steps
        ]
    runner = open_model(root / name, Placement(dtype="float32", device="cpu", pages=100)).runner
    assert isinstance(runner.network, T5Network)
    ours = runner.run(steps, [len(step.tokens) for step in steps])
    assert (ours - torch.cat(wanted)).abs().max() < 1e-4 * ours.std()


def test_a_source_is_read_once_and_its_pages_are_given_back_with_the_last_who_look_at_it(
    root: Path,
) -> None:
    runner = open_model(root / "t5", Placement(dtype="float32", device="cpu", pages=100)).runner
    source, cache = tuple(range(3, 43)), runner.cache
    first = runner.run([Step(0, 0, (0, 5, 6), source)], [1])
    assert cache.num_used == 3 + 1
    again = runner.run([Step(0, 0, (0, 5, 6), source), Step(1, 0, (0,), source)], [1, 1])
    assert torch.allclose(again[:1], first, atol=1e-4)
    assert cache.num_used == 3 + 2
    runner.release([0])
    assert cache.num_used == 3 + 1
    runner.run([Step(1, 1, (5, 6))], [1])
    runner.release([1])
    assert cache.num_used == 0
    cache.check()


# The same bits


WIDE = {
    "d_model": 128,
    "d_kv": 32,
    "vocab_size": 320,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 16,
}


@pytest.fixture(scope="module", params=["relu", "gated-gelu"])
def bf16(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    config = checkpoints.T5Config(**{**checkpoints.T5, **WIDE}, feed_forward_proj=request.param)
    directory = checkpoints.write(config, tmp_path_factory.mktemp("invariance") / request.param)
    return open_model(directory, Placement(dtype="bfloat16", device="cpu", pages=160)).runner


def fed(
    runner: Runner, texts: Texts, sources: Texts, rng: np.random.Generator, *, largest: int
) -> list[Tensor]:
    """Logits of each text, fed in random chunks of up to `largest` tokens, a random number of the texts, and of new sources, in each pass."""
    parts: list[list[Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    while waiting := [i for i, text in enumerate(texts) if done[i] < len(text)]:
        chosen = rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)].tolist()
        counts = [min(int(rng.integers(1, largest + 1)), len(texts[i]) - done[i]) for i in chosen]
        steps = [
            Step(i, done[i], texts[i][done[i] : done[i] + n], () if done[i] else sources[i])
            for i, n in zip(chosen, counts, strict=True)
        ]
        for i, n, part in zip(chosen, counts, runner.run(steps, counts).split(counts), strict=True):
            parts[i].append(part)
            done[i] += n
    runner.release(range(len(texts)))
    return [torch.cat(own) for own in parts]


@pytest.mark.parametrize("largest", [8, 100])
def test_bits_do_not_depend_on_chunks_or_company(bf16: Runner, largest: int) -> None:
    rng = np.random.default_rng(0)
    texts = [(0, *rng.integers(3, 320, 99).tolist()) for _ in range(5)]
    read = [tuple(rng.integers(3, 320, length).tolist()) for length in (1, 17, 64, 150, 290)]
    whole = [
        fed(bf16, [text], [source], np.random.default_rng(0), largest=1)[0]
        for text, source in zip(texts, read, strict=True)
    ]
    mixed = fed(bf16, texts, read, np.random.default_rng(largest), largest=largest)
    differing = sum(int((a != b).any(-1).sum()) for a, b in zip(whole, mixed, strict=True))
    assert differing == 0, f"{differing} of 500 positions differ"


# A share of it


def share(directory: Path, shard: Shard | None) -> Loaded:
    return load_model(directory, dtype=torch.float32, device="cpu", shard=shard)


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_reads_and_holds_its_share_only(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = root / name
    whole: Any = share(directory, None).module
    head = whole.lm_head.weight.nbytes
    layers = sum(
        p.nbytes
        for part in (whole.encoder, whole.decoder)
        for p in part.block.parameters()
        if p.ndim > 1
    )
    vectors = sum(p.nbytes for p in whole.parameters() if p.ndim == 1)
    bound = whole.shared.weight.nbytes + 0.51 * head + 0.5 * layers + vectors
    sizes: list[int] = []
    original = Weights.read
    monkeypatch.setattr(
        Weights,
        "read",
        lambda self, name, **where: (
            sizes.append((read := original(self, name, **where)).nbytes),
            read,
        )[1],
    )
    for rank in range(2):
        sizes.clear()
        module: nn.Module = share(directory, Shard(rank, 2)).module
        held = {parameter.data_ptr(): parameter.nbytes for parameter in module.parameters()}
        assert sum(held.values()) <= bound
        assert sum(sizes) <= bound
