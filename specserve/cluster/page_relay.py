"""Transfers of pages that go to the ranks with the next round's message, and their answers.

So pages move between two passes, and no message is added. Knows no tensors and no sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specserve.cluster.import_budget import ImportBudget
from specserve.page_transfers import (
    MAX_MESSAGE_BYTES,
    PageAnswer,
    PageData,
    PageQuery,
    PageTransfer,
)

Answers = tuple[PageAnswer, ...]


@dataclass(frozen=True, slots=True)
class PendingTransfer:
    """A transfer that waits for its answers, one from each rank."""

    transfers: tuple[PageTransfer, ...]  # one for all ranks, or one for each
    answers: asyncio.Future[Answers]

    @property
    def num_bytes(self) -> int:
        """Return the bytes that a rank is sent."""
        first = self.transfers[0]
        return len(first.data) if isinstance(first, PageData) else 0

    @property
    def num_hashes(self) -> int:
        return len(self.transfers[0].hashes)

    def of_rank(self, rank: int) -> PageTransfer:
        return self.transfers[rank if len(self.transfers) > 1 else 0]

    def resolve(self, answers: Answers) -> None:
        if not self.answers.done():
            self.answers.set_result(answers)

    def fail(self, error: Exception) -> None:
        if not self.answers.done():
            self.answers.set_exception(error)

    def cancel(self) -> None:
        """Send it no more if it waits still, and ask for its answers or error no more."""
        self.answers.cancel()  # done or not; asyncio logs no error of it afterwards


class PageRelay:
    """Queue of transfers for the ranks of one target."""

    def __init__(self) -> None:
        self.on_waiting: Callable[[], None] = lambda: None  # called when one needs a round
        self._waiting: deque[PendingTransfer] = deque()
        self._budget = ImportBudget()

    async def ask(self, query: PageQuery) -> Answers:
        """Return what each rank answers; raise WorkerLost if the round fails."""
        return await self._enqueue((query,)).answers

    async def put(self, pages: Sequence[PageData], *, timeout_s: float) -> int:
        """Hand each rank its own pages, and return how many of them its cache has then.

        They go in parts that each fit into a round, up to one that finds no room. Raises WorkerLost
        as `ask` does, and TimeoutError for a part that takes longer than `timeout_s` by itself.
        """
        parts = [self._enqueue(part) for part in self._parts(pages)]
        found = 0
        try:
            for part in parts:
                async with asyncio.timeout(timeout_s):
                    answers = await part.answers
                found += answers[0].num_pages
                if answers[0].num_pages < part.num_hashes:
                    break
        finally:
            for part in parts:
                part.cancel()
        return found

    def take(self, *, delays_sequences: bool) -> list[PendingTransfer]:
        """Return what goes with the next message.

        If it delays sequences, pages have at most the bytes of the budget, or are one transfer.
        """
        max_bytes = MAX_MESSAGE_BYTES
        if delays_sequences:
            max_bytes = min(max_bytes, self._budget.num_bytes)
        taken, num_bytes = list[PendingTransfer](), 0
        while self._waiting:
            first = self._waiting[0]
            if not first.answers.done():  # it has been cancelled otherwise
                if num_bytes and num_bytes + first.num_bytes > max_bytes:
                    break
                num_bytes += first.num_bytes
                taken.append(first)
            self._waiting.popleft()
        if self._waiting:
            self.on_waiting()  # for the round after
        return taken

    def observe(
        self, taken: Sequence[PendingTransfer], *, pass_s: float | None, overhead_s: float
    ) -> None:
        """Take the times of a round, as ImportBudget.observe does, and what went with it."""
        num_bytes = sum(each.num_bytes for each in taken)
        self._budget.observe(num_bytes, pass_s=pass_s, overhead_s=overhead_s)

    def _parts(self, pages: Sequence[PageData]) -> Iterator[tuple[PageData, ...]]:
        """Yield consecutive pages of all ranks, as many as fit into a round by now."""
        hashes = pages[0].hashes
        page_bytes = len(pages[0].data) // len(hashes)  # of every rank
        count = max(1, min(self._budget.num_bytes, MAX_MESSAGE_BYTES) // page_bytes)
        for first in range(0, len(hashes), count):
            chosen = hashes[first : first + count]
            where = slice(first * page_bytes, (first + len(chosen)) * page_bytes)
            yield tuple(PageData(chosen, memoryview(each.data)[where]) for each in pages)

    def _enqueue(self, transfers: tuple[PageTransfer, ...]) -> PendingTransfer:
        pending = PendingTransfer(transfers, asyncio.get_running_loop().create_future())
        self._waiting.append(pending)
        self.on_waiting()
        return pending
