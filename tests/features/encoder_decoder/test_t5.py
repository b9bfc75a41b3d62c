"""Encoder-decoders: the library's texts, token for token in fp32, from inputs of all lengths.

That holds however they are drafted, preempted or divided among ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, T5Config

from specserve.drafters.ngram.build import open_ngram_drafter
from specserve.features.encoder_decoder.t5 import T5Network
from specserve.models.checkpoints.load import LoadedModel, load_model
from specserve.models.checkpoints.weights import Weights
from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.models.shard import Shard
from specserve.types import Step
from tests.support import checkpoints
from tests.support.engines import (
    Engine,
    PacerLike,
    RandomPacer,
    greedy,
    library_greedy_encoder_decoder,
)

# Around pages, long distances, blocks, and rounds of 512 tokens.
LENGTHS = (1, 2, 5, 15, 16, 17, 31, 33, 48, 64, 100, 129, 180, 222, 256, 300)
MAX_TOKENS = 24
DRAFT_NOISE = 0.02  # of the weights: some draft tokens are accepted
FEW_PAGES = 26  # the longest encoder input with its text takes 21
KINDS = tuple(checkpoints.ENCODER_DECODERS)
GENERATING = ("t5", "t5_v1_1")  # mT5s generate as these do
Texts = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft model, with the library's texts of the target."""

    target: Path
    draft: Path
    texts: Texts


@pytest.fixture(scope="module")
def pairs(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Pair]:
    root = tmp_path_factory.mktemp("t5")
    return {name: make_pair(root, name) for name in GENERATING}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    for name, config in checkpoints.ENCODER_DECODERS.items():
        checkpoints.write(config(), root / name)
    return root


def make_pair(root: Path, name: str) -> Pair:
    # With this seed the texts differ.
    target = checkpoints.write(checkpoints.ENCODER_DECODERS[name](), root / name, seed=2)
    draft = checkpoints.perturb(target, root / f"{name}_draft", DRAFT_NOISE)
    return Pair(
        target,
        draft,
        library_greedy_encoder_decoder(target, encoder_inputs(), max_tokens=MAX_TOKENS),
    )


def encoder_inputs() -> Texts:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(3, checkpoints.VOCAB, length).tolist()) for length in LENGTHS]


@pytest.fixture(scope="module", params=GENERATING)
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
    run = engine.run(greedy(encoder_inputs(), max_tokens=MAX_TOKENS), gamma=gamma)
    assert run.texts == pair.texts
    assert 0 < run.accepted < run.drafted or gamma == 0


def test_texts_are_the_library_s_when_gamma_changes_and_branches_are_drafted_ahead(
    pair: Pair,
) -> None:
    engine = Engine(pair.target, pair.draft, draft_pages=800, ahead=True)
    run = engine.run(
        greedy(encoder_inputs(), max_tokens=MAX_TOKENS), pacer=RandomPacer(max_gamma=6)
    )
    assert run.texts == pair.texts
    assert sum(answer.stats.anticipated for answer in run.answers if answer.stats) > 0


@pytest.mark.parametrize("pacer", [None, RandomPacer(max_gamma=2)], ids=["plain", "random"])
def test_texts_are_the_library_s_when_pages_run_out(pair: Pair, pacer: PacerLike | None) -> None:
    engine = Engine(pair.target, pair.draft, pages=FEW_PAGES, draft_pages=FEW_PAGES - 4)
    run = engine.run(
        greedy(encoder_inputs(), max_tokens=MAX_TOKENS),
        pacer=pacer,
        drafts=pacer is not None,
        max_gamma=2,
    )
    assert run.texts == pair.texts
    assert run.num_preempted > 0
    assert pacer is None or 0 < run.accepted < run.drafted


@pytest.mark.parametrize("kind", ["prompt_copy", "max_gram"])
def test_texts_are_the_library_s_when_drafts_are_copied(
    pair: Pair, engine: Engine, kind: str
) -> None:
    drafter = open_ngram_drafter(
        kind, path=None, learn=None, support=8, vocab_size=checkpoints.VOCAB
    )
    run = engine.run(greedy(encoder_inputs(), max_tokens=MAX_TOKENS), with_drafter=drafter, gamma=4)
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


def make_steps(texts: Texts) -> list[Step]:
    return [
        Step(i, 0, text, encoder_input)
        for i, (text, encoder_input) in enumerate(zip(texts, encoder_inputs()[::3], strict=False))
    ]


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_the_library_s(root: Path, name: str, texts: Texts) -> None:
    """Logits of all positions of several texts in one pass.

    The models are relu and gated, with tied and untied heads, with stacks of equal and unequal
    depth.
    """
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(
        root / name, dtype=torch.float32, attn_implementation="eager"
    )
    steps = make_steps(texts)
    with torch.inference_mode():
        expected = [
            model(
                torch.tensor([step.encoder_input]),
                decoder_input_ids=torch.tensor([step.tokens]),
                use_cache=False,
            ).logits[0]
            for step in steps
        ]
    runner = open_model(root / name, ModelOptions(dtype="float32", device="cpu", pages=100)).runner
    assert isinstance(runner.network, T5Network)
    ours = runner.run(steps, [len(step.tokens) for step in steps])
    assert (ours - torch.cat(expected)).abs().max() < 1e-4 * ours.std()


def test_an_encoder_input_is_encoded_once_and_released_with_its_last_holder(
    root: Path,
) -> None:
    runner = open_model(root / "t5", ModelOptions(dtype="float32", device="cpu", pages=100)).runner
    encoder_input, cache = tuple(range(3, 43)), runner.cache
    first = runner.run([Step(0, 0, (0, 5, 6), encoder_input)], [1])
    assert cache.num_used == 3 + 1
    again = runner.run(
        [Step(0, 0, (0, 5, 6), encoder_input), Step(1, 0, (0,), encoder_input)], [1, 1]
    )
    assert torch.allclose(again[:1], first, atol=1e-4)
    assert cache.num_used == 3 + 2
    runner.release([0])
    assert cache.num_used == 3 + 1
    runner.run([Step(1, 1, (5, 6))], [1])
    runner.release([1])
    assert cache.num_used == 0
    cache.check()


# Row invariance


WIDE = {
    "d_model": 128,
    "d_kv": 32,
    "vocab_size": 320,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 16,
}


@pytest.fixture(scope="module", params=["relu", "gated-gelu"])
def bf16(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    config = T5Config(**{**checkpoints.T5, **WIDE}, feed_forward_proj=request.param)
    directory = checkpoints.write(config, tmp_path_factory.mktemp("invariance") / request.param)
    return open_model(directory, ModelOptions(dtype="bfloat16", device="cpu", pages=160)).runner


def feed(
    runner: Runner, texts: Texts, inputs: Texts, rng: np.random.Generator, *, largest: int
) -> list[Tensor]:
    """Return the logits of each text, computed in random chunks of up to `largest` tokens.

    Each pass has a random number of the texts, and of new encoder inputs.
    """
    parts: list[list[Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    while waiting := [i for i, text in enumerate(texts) if done[i] < len(text)]:
        chosen = rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)].tolist()
        counts = [min(int(rng.integers(1, largest + 1)), len(texts[i]) - done[i]) for i in chosen]
        steps = [
            Step(i, done[i], texts[i][done[i] : done[i] + n], () if done[i] else inputs[i])
            for i, n in zip(chosen, counts, strict=True)
        ]
        logits = torch.split(runner.run(steps, counts), counts)
        for i, n, part in zip(chosen, counts, logits, strict=True):
            parts[i].append(part)
            done[i] += n
    runner.release(range(len(texts)))
    return [torch.cat(own) for own in parts]


@pytest.mark.parametrize("largest", [8, 100])
def test_bits_do_not_depend_on_chunks_or_on_other_texts(bf16: Runner, largest: int) -> None:
    rng = np.random.default_rng(0)
    texts = [(0, *rng.integers(3, 320, 99).tolist()) for _ in range(5)]
    inputs = [tuple(rng.integers(3, 320, length).tolist()) for length in (1, 17, 64, 150, 290)]
    whole = [
        feed(bf16, [text], [encoder_input], np.random.default_rng(0), largest=1)[0]
        for text, encoder_input in zip(texts, inputs, strict=True)
    ]
    mixed = feed(bf16, texts, inputs, np.random.default_rng(largest), largest=largest)
    differing = sum(int((a != b).any(-1).sum()) for a, b in zip(whole, mixed, strict=True))
    assert differing == 0, f"{differing} of 500 positions differ"
    assert {part.dtype for part in whole} == {torch.float32}, "logits are not rounded to bf16"


# Tensor parallelism


def load_share(directory: Path, shard: Shard | None) -> LoadedModel:
    return load_model(directory, dtype=torch.float32, device="cpu", shard=shard)


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_reads_and_holds_its_share_only(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = root / name
    whole: Any = load_share(directory, None).module
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

    def read(self: Weights, name: str, **where: Any) -> Tensor:
        tensor = original(self, name, **where)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(Weights, "read", read)
    for rank in range(2):
        sizes.clear()
        module: nn.Module = load_share(directory, Shard(rank, 2)).module
        held = {parameter.data_ptr(): parameter.nbytes for parameter in module.parameters()}
        assert sum(held.values()) <= bound
        assert sum(sizes) <= bound
