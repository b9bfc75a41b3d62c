"""A service over a real engine of this process, behind the real HTTP server."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from specserve.config.tree import Config
from specserve.engine import Coordinator
from specserve.llm.inprocess import open_parts
from specserve.types import Chunk, Request
from tests.support.http_server import FakeService


class EngineService(FakeService):
    """A service for one request at a time. The engine keeps its pages between them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        parts = open_parts(config)
        self._emitted: list[Chunk] = []
        self._coordinator = Coordinator(
            parts.target,
            parts.drafter,
            info=parts.info,
            limits=config.limits,
            speculation=config.speculation,
            emit=self._emitted.extend,
            draft_context=parts.draft_context,
            drafts_prompts=parts.drafts_prompts,
        )

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self._coordinator.submit(request)
        while self._coordinator.has_work:
            await self._coordinator.round()
            chunks = self._emitted.copy()
            self._emitted.clear()
            for chunk in chunks:
                yield chunk
