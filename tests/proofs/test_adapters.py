"""A text under an adapter is that of the adapted target: of W + scale * B A in place of W.

It is so beside plain texts and texts under other adapters, with drafts of the plain draft model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specserve.features.adapters.store import AdapterStore
from specserve.types import VERIFIERS, Adapter, Request, Speculation, Warp
from tests.support import checkpoints
from tests.support.adapters import MEBIBYTE, merge, write_adapter
from tests.support.continuations import PAGES, Case, Pairs, control, is_flagged, sample
from tests.support.engines import (
    GREEDY,
    PAGE_SIZE,
    Engine,
    RandomPacer,
    Run,
    greedy,
    library_greedy,
)
from tests.support.exact_distribution import LibraryModel

NAMES = ("llama", "gpt2", "phi3", "qwen3_moe", "gpt_neox", "gemma2")
"""Architectures with separate, fused, transposed and gated layers, and with experts."""
LENGTHS = (1, 5, 16, 17, 40, 70)
MAX_TOKENS = 16
Texts = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Adapted:
    """A target with a draft, and adapters with the library's texts of the merged targets."""

    target: Path
    draft: Path
    adapters: tuple[Adapter | None, ...]
    texts: tuple[Texts, ...]  # under each adapter


def prompts() -> Texts:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(3, checkpoints.VOCAB, length).tolist()) for length in LENGTHS]


@pytest.fixture(
    scope="module",
    params=[*NAMES[:4], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[4:])],
)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted(request.param, tmp_path_factory.mktemp("adapted"))


def make_adapted(name: str, root: Path) -> Adapted:
    target = checkpoints.make(name, root / name)
    draft = checkpoints.perturb(target, root / "draft", 0.05)
    every = write_adapter(target, root / "every", seed=1, strength=0.3)
    few = write_adapter(
        target, root / "few", seed=2, rank=24, only="layers.1" if name != "gpt2" else "h.1",
        use_rslora=True, strength=0.3,
    )  # fmt: skip
    merged = [merge(target, one, root / f"merged_{one.name}") for one in (every, few)]
    texts = tuple(
        library_greedy(path, prompts(), max_tokens=MAX_TOKENS) for path in (target, *merged)
    )
    return Adapted(target, draft, (None, every, few), texts)


def requests(adapted: Adapted) -> list[Request]:
    """Return every prompt under each adapter, one beside the other."""
    return [
        replace(request, adapter=adapter)
        for request in greedy(prompts(), max_tokens=MAX_TOKENS)
        for adapter in adapted.adapters
    ]


def expected(adapted: Adapted) -> Texts:
    return [texts[i] for i in range(len(LENGTHS)) for texts in adapted.texts]


def test_the_adapters_make_other_texts(adapted: Adapted) -> None:
    """Adapters that change nothing would hide mistakes."""
    plain, *others = adapted.texts
    for texts in (*others, others[0] if others[0] != others[1] else plain):
        assert sum(a != b for a, b in zip(texts, plain, strict=True)) >= len(LENGTHS) - 1


def test_texts_of_a_mixed_batch_are_those_of_the_merged_targets(adapted: Adapted) -> None:
    engine = Engine(adapted.target, adapted.draft, adapter_bytes=MEBIBYTE)
    for gamma in (0, 4):
        run = engine.run(requests(adapted), gamma=gamma)
        assert run.texts == expected(adapted)
    assert run.drafted > run.accepted > 0
    assert isinstance(engine.target.adapters, AdapterStore)
    assert engine.target.adapters.num_loads == 2


# One architecture in depth


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted("llama", tmp_path_factory.mktemp("llama"))


def test_adapters_that_do_not_fit_together_run_in_passes_of_their_own(
    llama: Adapted, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the two fits in memory, so that every round loads one and evicts the other."""
    whole = Engine(llama.target, adapter_bytes=MEBIBYTE)
    whole.run(requests(llama)[:3])
    assert isinstance(whole.target.adapters, AdapterStore)
    most = max(loaded.num_bytes for loaded in whole.target.adapters._loaded.values())
    engine = Engine(llama.target, llama.draft, adapter_bytes=most)
    run = engine.run(requests(llama), gamma=3, max_batch_tokens=64)
    assert run.texts == expected(llama)
    assert isinstance(engine.target.adapters, AdapterStore)
    assert engine.target.adapters.num_loads > 10
    assert "the target failed" not in caplog.text  # after which it would isolate sequences
    assert engine.target.adapters.num_bytes <= most


def test_no_page_is_shared_between_adapters(llama: Adapted) -> None:
    """Run each prompt under every adapter, again and again, with the prefix cache."""
    engine = Engine(llama.target, adapter_bytes=MEBIBYTE)
    cache = engine.target.runner.cache
    for adapter, texts in zip(llama.adapters, llama.texts, strict=True):
        own = [replace(one, adapter=adapter) for one in greedy(prompts(), max_tokens=MAX_TOKENS)]
        before = cache.prefix_hits
        assert engine.run(own).texts == texts
        assert cache.prefix_hits == before
    for adapter, texts in zip(llama.adapters, llama.texts, strict=True):
        own = [replace(one, adapter=adapter) for one in greedy(prompts(), max_tokens=MAX_TOKENS)]
        before = cache.prefix_hits
        assert engine.run(own).texts == texts
        assert cache.prefix_hits >= before + 3 * PAGE_SIZE


def test_chunked_prompts_and_changing_numbers_of_drafts_change_no_text(llama: Adapted) -> None:
    engine = Engine(llama.target, llama.draft, adapter_bytes=MEBIBYTE)
    run = engine.run(requests(llama), pacer=RandomPacer(max_gamma=3), max_batch_tokens=48)
    assert run.texts == expected(llama)


def test_an_adapter_whose_files_change_fails_its_own_requests_alone(
    llama: Adapted, tmp_path: Path
) -> None:
    gone = write_adapter(llama.target, tmp_path / "gone", seed=5)
    (tmp_path / "gone" / "adapter_model.safetensors").unlink()
    engine = Engine(llama.target, llama.draft, adapter_bytes=MEBIBYTE)
    long = [replace(one, adapter=gone) for one in greedy(prompts(), max_tokens=4)]
    run = engine.run([*long, *requests(llama)], gamma=3, max_batch_tokens=48)
    assert run.texts[len(long) :] == expected(llama)
    assert all("has no adapter_model.safetensors" in str(one.error) for one in run.answers[:6])
    changed = write_adapter(llama.target, tmp_path / "changed", seed=6)
    write_adapter(llama.target, tmp_path / "other" / "changed", seed=7)
    (tmp_path / "changed" / "adapter_model.safetensors").write_bytes(
        (tmp_path / "other" / "changed" / "adapter_model.safetensors").read_bytes()
    )
    (answer,) = engine.run([replace(long[0], adapter=changed)]).answers
    assert str(answer.error) == "the adapter changed has changed since it was named; load it again"


# Bits, in bf16


WIDTHS = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 128}


@pytest.fixture(scope="module", params=["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    root = tmp_path_factory.mktemp("wide")
    config: Any = checkpoints.CONFIGS[request.param]()
    for width, value in WIDTHS.items():
        setattr(config, width, value)
    target = checkpoints.write(config, root / "target")
    draft = checkpoints.perturb(target, root / "draft", 0.05)
    a, b = (
        write_adapter(target, root / name, seed=seed, rank=rank, strength=0.2)
        for seed, (name, rank) in enumerate((("a", 8), ("b", 20)))
    )
    return Adapted(target, draft, (None, a, b), ())


def mixed_requests(adapted: Adapted) -> list[Request]:
    """Return greedy requests under every verifier and seeded ones, each under all adapters."""
    found = []
    for i, prompt in enumerate(prompts()):
        warp = GREEDY if i % 2 == 0 else Warp(temperature=0.9, top_p=0.95)
        speculation = Speculation(verifier=VERIFIERS[i % 4] if i % 2 == 0 else None)
        found += [
            Request(
                prompt, MAX_TOKENS, warp, i, seeded=i % 2 == 1, ignore_eos=True,
                speculation=speculation, adapter=adapter,
            )
            for adapter in adapted.adapters
        ]  # fmt: skip
    return found


def test_in_bf16_neither_company_nor_drafts_nor_the_load_change_a_token(wide: Adapted) -> None:
    engine = Engine(wide.target, wide.draft, dtype="bfloat16", adapter_bytes=8 * MEBIBYTE)
    alone = engine.run(mixed_requests(wide), drafts=False, max_running=1).texts
    assert len(set(alone)) > len(alone) * 0.8
    for running, gamma in ((18, 4), (5, None)):
        pacer = RandomPacer(max_gamma=4, seed=running) if gamma is None else None
        run = engine.run(
            mixed_requests(wide),
            pacer=pacer,
            gamma=gamma,
            max_gamma=4,
            max_running=running,
            max_batch_tokens=48,
        )
        assert run.texts == alone
        assert run.drafted > run.accepted > 0


# Distributions


class AdaptedEngine:
    """An engine whose requests have an adapter, beside plain ones and ones under another."""

    def __init__(self, engine: Engine, adapter: Adapter, other: Adapter) -> None:
        self._engine, self._adapter, self._other = engine, adapter, other
        self.target = engine.target

    def run(self, requests: Sequence[Request], **options: Any) -> Run:
        own = [replace(request, adapter=self._adapter) for request in requests]
        company = [
            replace(request, adapter=None if i % 2 else self._other)
            for i, request in enumerate(requests[::8])
        ]
        options["max_queued"] = len(own) + len(company)
        run = self._engine.run([*company, *own], **options)
        return Run(run.answers[len(company) :], run.num_preempted, run.num_rounds)


class AdaptedPairs(Pairs):
    """The pairs of a tiny Llama, whose p is that of the merged target."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        target = directory / "target"
        adapter, other = (
            write_adapter(target, directory / name, seed=seed, strength=0.3)
            for seed, name in enumerate(("own", "other"), 11)
        )
        merged = merge(target, adapter, directory / "merged")
        self._target = LibraryModel(merged, vocab=8)
        self.engines: Mapping[str, Any] = {  # type: ignore[assignment]
            name: AdaptedEngine(
                Engine(
                    target,
                    directory / "draft",
                    pages=PAGES,
                    draft_pages=2 * PAGES,
                    support=3,
                    ahead=name == "ahead",
                    adapter_bytes=MEBIBYTE,
                ),
                adapter,
                other,
            )
            for name in ("top 3", "ahead")
        }
        self.cache_distributions()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> AdaptedPairs:
    return AdaptedPairs(tmp_path_factory.mktemp("pairs"))


CASES = (
    Case("speculative", "top 3", 2),
    Case("block", "top 3", 4),
    Case("coupled", "top 3", 2),
    Case("lenient", "top 3", 1),
    Case("each", "ahead", None, "mixed"),
)
SAMPLES, SEED = 500, 1 << 44


each_case = pytest.mark.parametrize(
    "case",
    [*CASES[:-1], pytest.param(CASES[-1], marks=pytest.mark.long)],
    ids=lambda case: f"{case.verifier}-{case.warps}",
)


@each_case
def test_continuations_have_the_adapted_targets_distribution(
    pairs: AdaptedPairs, case: Case
) -> None:
    result = sample(pairs, case, samples=SAMPLES, first_seed=SEED + CASES.index(case) * SAMPLES)
    assert result.drafted > result.accepted > 0
    assert result.preempted > 0
    fit = pairs.fit(result)
    assert fit.dof > 30
    assert not is_flagged(pairs, result)
    if result.acceptance is not None and case.verifier != "coupled":
        assert abs(result.acceptance.num_standard_errors) < 3


@each_case
def test_a_verifier_that_accepts_too_much_is_flagged(pairs: AdaptedPairs, case: Case) -> None:
    result = control(pairs, case, CASES.index(case), samples=SAMPLES // 2)
    assert is_flagged(pairs, result)
