"""Transfers of pages that go to the ranks with the next round's message, and their answers.

So pages move between two passes, and no message is added. Knows no tensors and no sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specserve.page_transfers import MAX_ROUND_BYTES, PageAnswer, PageData, PageQuery, PageTransfer

Answers = tuple[PageAnswer, ...]


@dataclass(frozen=True, slots=True)
class PendingTransfer:
    """A transfer that waits for its answers, one from each rank."""

    transfers: tuple[PageTransfer, ...]  # one for all ranks, or one for each
    answers: asyncio.Future[Answers]

    @property
    def num_bytes(self) -> int:
        """Bytes that a rank is sent."""
        first = self.transfers[0]
        return len(first.data) if isinstance(first, PageData) else 0

    def of_rank(self, rank: int) -> PageTransfer:
        return self.transfers[rank if len(self.transfers) > 1 else 0]

    def resolve(self, answers: Answers) -> None:
        if not self.answers.done():
            self.answers.set_result(answers)

    def fail(self, error: Exception) -> None:
        if not self.answers.done():
            self.answers.set_exception(error)


class PageRelay:
    """Queue of transfers for the ranks of one target."""

    def __init__(self) -> None:
        self.on_waiting: Callable[[], None] = lambda: None  # called when one needs a round
        self._waiting: deque[PendingTransfer] = deque()

    async def ask(self, query: PageQuery) -> Answers:
        """Return what each rank answers; raise WorkerLost if the round fails."""
        return await self._send((query,))

    async def put(self, pages: Sequence[PageData]) -> Answers:
        """Hand each rank its own pages, and return the answers; raise WorkerLost as `ask` does."""
        return await self._send(tuple(pages))

    def take(self) -> list[PendingTransfer]:
        """Return what goes with the next message; pages of at most MAX_ROUND_BYTES, or one."""
        taken, num_bytes = list[PendingTransfer](), 0
        while self._waiting:
            first = self._waiting[0]
            if not first.answers.done():  # it has been cancelled otherwise
                if num_bytes and num_bytes + first.num_bytes > MAX_ROUND_BYTES:
                    break
                num_bytes += first.num_bytes
                taken.append(first)
            self._waiting.popleft()
        if self._waiting:
            self.on_waiting()  # for the round after
        return taken

    async def _send(self, transfers: tuple[PageTransfer, ...]) -> Answers:
        pending = PendingTransfer(transfers, asyncio.get_running_loop().create_future())
        self._waiting.append(pending)
        self.on_waiting()
        return await pending.answers
