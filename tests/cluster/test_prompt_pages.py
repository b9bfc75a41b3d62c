"""Prompts that one engine computes for another: texts, partial imports, and what fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specserve.cluster import prompt_pages
from specserve.cluster.prompt_pages import (
    PagePiece,
    PromptExporter,
    PromptImporter,
    WantedPages,
    prompt_hashes,
)
from specserve.cluster.remote import RemoteTarget
from specserve.config.tree import config_from_keys
from specserve.engine import Coordinator
from specserve.errors import ConfigError, VersionMismatch, WorkerLost
from specserve.metrics import Registry
from specserve.models import page_exchange
from specserve.models.page_exchange import page_bytes
from specserve.types import Chunk, FinishReason, ModelInfo, Request, Warp
from tests.support import checkpoints
from tests.support.engines import load_target, model_options
from tests.support.fakes import open_coordinator
from tests.support.local_worker import LocalWorker

PATIENCE_S = 120.0
PAGE_SIZE = 4
NUM_TOKENS = 24
LENGTHS = (90, 61, 130, 40)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("models") / "target")


class Engine:
    """A coordinator with a target worker in this process, as one role or the other."""

    def __init__(self, *checkpoints: Path, pages: int = 400) -> None:
        """Open a target. With several checkpoints their models stand for ranks of one."""
        options = model_options(dtype="bfloat16", pages=pages, page_size=PAGE_SIZE)
        models = [load_target(each, options) for each in checkpoints]
        self.model, self.num_ranks = models[0], len(models)
        self.cache, self.caches = models[0].runner.cache, [one.runner.cache for one in models]
        self.info: ModelInfo = replace(
            self.model.info, page_bytes=page_bytes(self.cache), page_version=b"version"
        )
        self.target = RemoteTarget(deadline_s=30.0)
        ranks: Any = [LocalWorker(model) for model in models]
        for model in models:
            model.on_hidden = None
        self.target.attach(ranks)
        self.registry = Registry()
        self.coordinator: Coordinator = open_coordinator(
            self.target, None, info=self.info, emit=self._emit, max_batch_tokens=32
        )
        self.target.pages.on_waiting = self.coordinator.request_round
        self.exporter = PromptExporter(
            self.info,
            self.target.pages,
            self.registry,
            submit=self.coordinator.submit,
            cancel=self.coordinator.cancel,
        )
        self.importer: PromptImporter | None = None
        self._texts: dict[int, list[int]] = {}
        self._ends: dict[int, asyncio.Future[FinishReason]] = {}

    def import_from(
        self, fetch: Callable[[WantedPages], AsyncGenerator[PagePiece, None]], prefill_from: int = 8
    ) -> None:
        self.importer = PromptImporter(
            self.info,
            self.target.pages,
            self.registry,
            num_ranks=self.num_ranks,
            prefill_from=prefill_from,
            fetch=fetch,
            clock=lambda: 0.0,
        )
        self.importer._not_before = -1.0

    async def generate(self, request: Request) -> tuple[int, ...]:
        if self.importer is not None:
            await self.importer.prepare(request)
            self.importer._not_before = -1.0  # each request tries again
        seq_id = self.coordinator.submit(request)
        self._texts[seq_id] = []
        end = self._ends[seq_id] = asyncio.get_running_loop().create_future()
        assert await asyncio.wait_for(end, PATIENCE_S) is FinishReason.LENGTH
        return tuple(self._texts[seq_id])

    def count(self, name: str) -> float:
        samples = self.registry.snapshot().samples.get(name, {}).values()
        return sum(sample[0] for sample in samples)

    def _emit(self, chunks: Sequence[Chunk]) -> None:
        self.exporter.observe(chunks)
        for chunk in chunks:
            if chunk.seq_id in self._texts:
                self._texts[chunk.seq_id] += chunk.tokens
                if chunk.finish is not None:
                    self._ends[chunk.seq_id].set_result(chunk.finish)


@asynccontextmanager
async def running(*engines: Engine) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(engine.coordinator.run()) for engine in engines]
    try:
        yield
    finally:
        for engine in engines:
            engine.coordinator.close()
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        for engine in engines:
            engine.cache.check()


def requests(vocab: int) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, vocab, length).tolist()) for length in LENGTHS]
    return [
        Request(prompt, NUM_TOKENS, Warp(temperature), seed=seed, seeded=True, ignore_eos=True)
        for seed, prompt in enumerate(prompts)
        for temperature in (0.0, 1.0)
    ]


async def texts_alone(checkpoint: Path) -> list[tuple[int, ...]]:
    alone = Engine(checkpoint)
    async with running(alone):
        return [await alone.generate(each) for each in requests(alone.info.vocab_size)]


def test_texts_keep_their_bits_when_another_engine_computes_the_prompts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        expected = await texts_alone(checkpoint)
        # Small pieces, so that a prompt takes several rounds.
        small = page_bytes(Engine(checkpoint).cache) * 3
        monkeypatch.setattr(
            page_exchange.exchange, "__kwdefaults__", {"max_bytes": small}, raising=True
        )
        prefill, decoding = Engine(checkpoint), Engine(checkpoint)
        decoding.import_from(prefill.exporter.send)
        wanted = requests(decoding.info.vocab_size)
        async with running(prefill, decoding):
            together = await asyncio.gather(*(decoding.generate(each) for each in wanted))
        assert together == expected
        imported = decoding.count("prefill_pages_imported_total")
        assert imported == prefill.count("prefill_pages_sent_total")
        # Equal prompts are fetched once; of each at most the last page is left to the engine.
        full = sum((length - 1) // PAGE_SIZE for length in LENGTHS)
        assert full - len(LENGTHS) * 2 <= imported <= full
        assert decoding.count("prefill_fallbacks_total") == 0
        assert decoding.cache.prefix_hits >= imported * PAGE_SIZE

    asyncio.run(main())


def test_each_rank_gets_the_bits_that_it_would_compute(checkpoint: Path, tmp_path: Path) -> None:
    async def main() -> None:
        other = checkpoints.perturb(checkpoint, tmp_path / "other", 0.05)
        prefill, decoding, alone = (Engine(checkpoint, other) for _ in range(3))
        decoding.import_from(prefill.exporter.send)
        request = requests(alone.info.vocab_size)[0]
        async with running(prefill, decoding, alone):
            assert decoding.importer is not None
            await decoding.importer.prepare(request)
            await alone.generate(request)
        assert decoding.count("prefill_fallbacks_total") == 0
        hashes = prompt_hashes(request, PAGE_SIZE)
        for theirs, ours in zip(decoding.caches, alone.caches, strict=True):
            pages, own = theirs.find_pages(hashes), ours.find_pages(hashes)
            assert len(pages) > 10
            for imported, computed in zip(theirs.pools, ours.pools, strict=True):
                assert imported[:, pages].equal(computed[:, own[: len(pages)]])
        first, second = (cache.pools[0] for cache in decoding.caches)
        assert not first.equal(second), "ranks that hold the same would prove nothing"

    asyncio.run(main())


@dataclass
class Broken:
    """A prefill engine that fails after some pieces, in one way or another."""

    engine: Engine
    change: Callable[[int, PagePiece], PagePiece]

    async def send(self, wanted: WantedPages) -> AsyncGenerator[PagePiece, None]:
        number = 0
        async for piece in self.engine.exporter.send(wanted):
            for at, page_hash in enumerate(piece.hashes):
                size = self.engine.info.page_bytes
                one = piece.ranks[0][at * size : (at + 1) * size]
                yield self.change(number, PagePiece((page_hash,), (one,)))
                number += 1


def dies(number: int, piece: PagePiece) -> PagePiece:
    if number == 3:
        raise WorkerLost("killed")
    return piece


def crashes(number: int, piece: PagePiece) -> PagePiece:
    if number == 3:
        raise RuntimeError("an error of an unknown kind")
    return piece


def sends_other_pages(number: int, piece: PagePiece) -> PagePiece:
    return replace(piece, hashes=(bytes(16),)) if number == 3 else piece


def sends_too_little(number: int, piece: PagePiece) -> PagePiece:
    return replace(piece, ranks=(piece.ranks[0][1:],)) if number == 3 else piece


def sends_of_two_ranks(number: int, piece: PagePiece) -> PagePiece:
    return replace(piece, ranks=piece.ranks * 2) if number == 3 else piece


def is_of_another_release(number: int, piece: PagePiece) -> PagePiece:
    return replace(piece, version=1) if number == 3 else piece


@pytest.mark.parametrize(
    "change",
    [
        dies,
        crashes,
        sends_other_pages,
        sends_too_little,
        sends_of_two_ranks,
        is_of_another_release,
    ],
)
def test_whatever_a_prefill_engine_does_wrong_the_rest_is_computed_here(
    checkpoint: Path, change: Callable[[int, PagePiece], PagePiece]
) -> None:
    async def main() -> None:
        expected = await texts_alone(checkpoint)
        prefill, decoding = Engine(checkpoint), Engine(checkpoint)
        decoding.import_from(Broken(prefill, change).send)
        wanted = requests(decoding.info.vocab_size)
        async with running(prefill, decoding):
            assert [await decoding.generate(each) for each in wanted] == expected
            assert not prefill.exporter._computing
        assert decoding.count("prefill_fallbacks_total") > 0
        assert decoding.count("prefill_pages_imported_total") >= 3

    asyncio.run(main())


def test_an_engine_that_falls_silent_is_waited_for_in_vain_only_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_pages, "PIECE_TIMEOUT_S", 0.01)
    calls: list[WantedPages] = []

    async def silent(wanted: WantedPages) -> AsyncGenerator[PagePiece, None]:
        calls.append(wanted)
        await asyncio.Event().wait()
        yield PagePiece((), ())

    async def main() -> None:
        decoding = Engine(checkpoint)
        decoding.import_from(silent)
        first, _, second, *_ = requests(decoding.info.vocab_size)
        async with running(decoding):
            assert decoding.importer is not None
            await asyncio.wait_for(decoding.importer.prepare(first), PATIENCE_S)
            await asyncio.wait_for(decoding.importer.prepare(second), PATIENCE_S)

    asyncio.run(main())
    assert len(calls) <= 1


def test_engines_of_other_weights_exchange_nothing(checkpoint: Path) -> None:
    async def main() -> None:
        prefill = Engine(checkpoint)
        request = requests(prefill.info.vocab_size)[0]
        async with running(prefill):
            with pytest.raises(VersionMismatch, match="exchange no pages"):
                await anext(prefill.exporter.send(WantedPages(request, b"other", 0)))

    asyncio.run(main())


def test_a_cache_without_room_takes_what_fits(checkpoint: Path) -> None:
    async def main() -> None:
        prefill, decoding = Engine(checkpoint), Engine(checkpoint, pages=40)
        decoding.import_from(prefill.exporter.send)
        wanted = requests(decoding.info.vocab_size)
        expected = await texts_alone(checkpoint)
        async with running(prefill, decoding):
            texts = await asyncio.gather(*(decoding.generate(each) for each in wanted))
        assert texts == expected

    asyncio.run(main())


def test_short_cached_and_scored_prompts_stay_here(checkpoint: Path) -> None:
    calls: list[WantedPages] = []

    async def fetch(wanted: WantedPages) -> AsyncGenerator[PagePiece, None]:
        calls.append(wanted)
        for piece in list[PagePiece]():
            yield piece

    async def main() -> None:
        decoding = Engine(checkpoint)
        decoding.import_from(fetch, prefill_from=50)
        first, *_, short, _ = requests(decoding.info.vocab_size)
        async with running(decoding):
            assert decoding.importer is not None
            await decoding.generate(short)
            await decoding.importer.prepare(replace(first, prompt_logprobs=0))
            assert not calls
            await decoding.generate(first)
            assert len(calls) == 1
            await decoding.generate(first)
            assert len(calls) == 1, "its prompt is cached by now"
            await decoding.generate(replace(first, cache_salt=b"another client"))
            assert [each.first for each in calls] == [0, 0]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"cache.prefix_caching": False}, "cache.prefix_caching is false"),
        ({"draft.kind": "eagle", "draft.path": "head"}, "draft.kind eagle reads"),
    ],
)
def test_prefill_engines_that_cannot_work_are_refused(
    keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_keys({"replicas.prefill": 1, **keys})
