"""A coordinator over fakes, for tests of what a client gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from specserve.types import Chunk, Drafter, ModelInfo, Request, Speculation, Stats, Warp
from tests.support.clock import Clock
from tests.support.fakes import FakeDrafter, FakeTarget, model_info, open_coordinator


class Served:
    """A coordinator over fakes, and the chunks that it has emitted."""

    def __init__(
        self,
        *,
        alpha: float | None = 0.7,  # None: no drafter
        drafter: Drafter | None = None,  # instead of a fake one
        info: ModelInfo | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.info = info or model_info()
        self.clock = Clock()
        self.target = FakeTarget(self.info, clock=self.clock, seconds=0.01)
        self._drafter = (
            None
            if alpha is None
            else FakeDrafter(alpha, seed=seed, clock=self.clock, seconds=0.001)
        )
        self.emitted: list[Sequence[Chunk]] = []
        options = {"max_gamma": 6, "max_batch_tokens": 32, "max_running": 8, **options}
        self.coordinator = open_coordinator(
            self.target,
            self._drafter if drafter is None else drafter,
            info=self.info,
            emit=self.emitted.append,
            clock=self.clock,
            **options,
        )

    @property
    def has_drafter(self) -> bool:
        return self._drafter is not None

    @property
    def drafter(self) -> FakeDrafter:
        assert self._drafter is not None
        return self._drafter

    def submit(
        self,
        *prompt: int,
        max_tokens: int = 20,
        gamma: int | None = None,
        verifier: str | None = None,
        **fields: Any,
    ) -> int:
        request = Request(
            prompt, max_tokens, Warp(), seed=3, speculation=Speculation(gamma, verifier), **fields
        )
        return self.coordinator.submit(request)

    def rounds(self, count: int = 1) -> None:
        async def play() -> None:
            for _ in range(count):
                await self.coordinator.round()

        asyncio.run(play())

    def finish(self, *, limit: int = 5000) -> None:
        async def play() -> None:
            for _ in range(limit):
                if not self.coordinator.has_work:
                    return
                await self.coordinator.round()
            raise AssertionError("work is left")

        asyncio.run(play())
        assert self.target.caches == {}
        assert self._drafter is None or self._drafter.caches == {}

    def chunks(self, seq_id: int) -> list[Chunk]:
        return [chunk for chunks in self.emitted for chunk in chunks if chunk.seq_id == seq_id]

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks(seq_id) for token in chunk.tokens)

    def last(self, seq_id: int) -> Chunk:
        *before, last = self.chunks(seq_id)
        assert all(chunk.finish is None for chunk in before)
        assert last.finish is not None
        return last

    def stats(self, seq_id: int) -> Stats:
        stats = self.last(seq_id).stats
        assert stats is not None
        return stats
