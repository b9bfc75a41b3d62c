"""Prompts that one engine computes for another: pages sent piece by piece, and imported by hash.

Whatever fails, the engine that has the request computes the rest of its prompt itself. Knows no
Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from specserve.cluster.page_relay import PageRelay
from specserve.engine.admission import page_salt
from specserve.errors import SpecserveError, VersionMismatch, WorkerLost, first_line
from specserve.metrics import Registry
from specserve.models.pages import page_hashes
from specserve.page_transfers import PageData, PageQuery
from specserve.types import Chunk, FinishReason, ModelInfo, Request, Warp
from specserve.wire.version import Versioned

log = logging.getLogger(__name__)

PIECE_TIMEOUT_S = 5.0
"""Longest wait for the next pages, from the other engine or into the ranks' caches.

Longer, and the engine computes the prompt itself.
"""
BACKOFF_S = 5.0
"""Time after a failure in which prompts are computed here."""


@dataclass(frozen=True, slots=True)
class WantedPages(Versioned):
    """A prompt whose pages another engine wants, from page `first` on."""

    request: Request
    page_version: bytes
    first: int


@dataclass(frozen=True, slots=True)
class PagePiece(Versioned):
    """Consecutive pages of a prompt, as each rank has them."""

    hashes: tuple[bytes, ...]
    ranks: tuple[bytes, ...]


Fetch = Callable[[WantedPages], AsyncGenerator[PagePiece, None]]
"""Asks an engine for pages; raises SpecserveError if there will be no more."""


def prompt_hashes(request: Request, page_size: int) -> tuple[bytes, ...]:
    """Return the hashes of a prompt's full pages, but for its last token, which is computed."""
    tokens = array("q", (*request.prompt, *request.generated)[:-1])
    return tuple(page_hashes(page_salt(request), tokens, page_size))


class PromptExporter:
    """The prompts that this engine computes for others."""

    def __init__(
        self,
        info: ModelInfo,
        pages: PageRelay,
        registry: Registry,
        *,
        submit: Callable[[Request], int],
        cancel: Callable[[int], None],
    ) -> None:
        self._info, self._pages, self._submit, self._cancel = info, pages, submit, cancel
        self._sent = registry.counter("prefill_pages_sent_total")
        self._computing: dict[int, asyncio.Future[None]] = {}  # by sequence

    def observe(self, chunks: Sequence[Chunk]) -> None:
        """Take the chunks of a round."""
        for chunk in chunks:
            if chunk.finish is FinishReason.ERROR:
                self.end(chunk.seq_id, WorkerLost(chunk.error or "the engine ends"))
            elif chunk.finish is not None and chunk.seq_id in self._computing:
                self._computing[chunk.seq_id].set_result(None)

    def end(self, seq_id: int, error: SpecserveError) -> None:
        """End a prompt that is not computed any further."""
        if (computed := self._computing.get(seq_id)) is not None:
            computed.set_exception(error)

    async def send(self, wanted: WantedPages) -> AsyncGenerator[PagePiece, None]:
        """Compute a prompt, and yield its pages as they are finished.

        Pages that others need the space of are left out, with all behind them.
        """
        wanted.require_same_version()
        if wanted.page_version != self._info.page_version:
            raise VersionMismatch(
                "the engines' weights, devices or settings differ, so they exchange no pages"
            )
        request = wanted.request
        hashes = prompt_hashes(request, self._info.page_size)[wanted.first :]
        seq_id = self._submit(_prefill_of(request))
        computed = self._computing[seq_id] = asyncio.get_running_loop().create_future()
        try:
            while hashes:
                is_last = computed.done()
                answers = await self._pages.ask(PageQuery(hashes, wants_data=True))
                if (count := len(answers[0].data) // self._info.page_bytes) > 0:
                    self._sent.add(count)
                    yield PagePiece(hashes[:count], tuple(bytes(answer.data) for answer in answers))
                    hashes = hashes[count:]
                elif is_last and not answers[0].num_pages:
                    computed.result()
                    return
        finally:
            del self._computing[seq_id]
            if not computed.done():
                self._cancel(seq_id)
            elif not computed.cancelled():
                computed.exception()  # retrieved


class PromptImporter:
    """The long prompts of this engine that others compute."""

    def __init__(
        self,
        info: ModelInfo,
        pages: PageRelay,
        registry: Registry,
        *,
        num_ranks: int,
        prefill_from: int,
        fetch: Fetch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an importer for prompts that lack more than `prefill_from` tokens."""
        self._info, self._pages, self._num_ranks = info, pages, num_ranks
        self._prefill_from, self._fetch, self._clock = prefill_from, fetch, clock
        self._imported = registry.counter("prefill_pages_imported_total")
        self._fallbacks = registry.counter("prefill_fallbacks_total")
        self._not_before = 0.0
        self._under_way: dict[bytes, asyncio.Task[None]] = {}  # by the last page's hash

    async def prepare(self, request: Request) -> None:
        """Return once pages of a long prompt are in the prefix cache, or none will come.

        Equal prompts wait for the same pages.
        """
        length = len(request.prompt) + len(request.generated)
        if (
            length <= self._prefill_from
            or not self._info.prefix_caching
            or request.prompt_logprobs is not None  # such a prompt is computed whole
            or self._clock() < self._not_before
        ):
            return
        hashes = prompt_hashes(request, self._info.page_size)
        if not hashes:
            return
        task = self._under_way.get(hashes[-1])
        if task is None:
            task = self._under_way[hashes[-1]] = asyncio.create_task(self._import(request, hashes))
            task.add_done_callback(lambda _: self._under_way.pop(hashes[-1], None))
        await asyncio.shield(task)

    async def _import(self, request: Request, hashes: tuple[bytes, ...]) -> None:
        """Fetch the pages that are missing. Any failure means only that they stay missing."""
        try:
            async with asyncio.timeout(PIECE_TIMEOUT_S):
                found = (await self._pages.ask(PageQuery(hashes)))[0].num_pages
            missing = len(request.prompt) + len(request.generated) - found * self._info.page_size
            if missing > self._prefill_from:
                wanted = WantedPages(request, self._info.page_version, found)
                async with aclosing(self._fetch(wanted)) as pieces:
                    await self._take(pieces, hashes[found:])
        except Exception as error:  # of whatever kind: the request does not depend on it
            self._fallbacks.add(1)
            self._not_before = self._clock() + BACKOFF_S
            log.warning(
                "a prompt's pages do not come from another engine, and are computed here: %s",
                first_line(error),
            )

    async def _take(self, pieces: AsyncIterator[PagePiece], hashes: tuple[bytes, ...]) -> None:
        """Import pieces until there are no more, or no room; raise for what is not these pages."""
        while hashes:
            async with asyncio.timeout(PIECE_TIMEOUT_S):
                piece = await anext(pieces, None)
            if piece is None:
                return
            piece.require_same_version()
            self._require_fits(piece, hashes)
            ranks = [PageData(piece.hashes, data) for data in piece.ranks]
            imported = await self._pages.put(ranks, timeout_s=PIECE_TIMEOUT_S)
            self._imported.add(imported)
            if imported < len(piece.hashes):
                raise WorkerLost("the cache has no room for more pages")
            hashes = hashes[len(piece.hashes) :]

    def _require_fits(self, piece: PagePiece, hashes: tuple[bytes, ...]) -> None:
        count = len(piece.hashes)
        if not count or piece.hashes != hashes[:count]:
            raise WorkerLost("other pages were sent than were asked for")
        if len(piece.ranks) != self._num_ranks or any(
            len(data) != count * self._info.page_bytes for data in piece.ranks
        ):
            raise WorkerLost("pages of another size, or of other ranks, were sent")


def _prefill_of(request: Request) -> Request:
    """Return a request that computes the same pages and generates nothing."""
    return Request(
        prompt=(*request.prompt, *request.generated),
        max_tokens=0,
        warp=Warp(temperature=0.0),
        seed=0,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        priority=request.priority,
        client=request.client,
    )
