"""Ranks of a model in threads, on an emulated card each, with collectives that are written down.

One rank runs at a time, until it enters a collective and waits there for the others. If a rank
fails, the others are not left waiting.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from specserve.models import shard as shard_module
from tests.support.card.ledger import CardError
from tests.support.card.tensors import CARDS, CardTensor, FactoryMode, Repeated

T = TypeVar("T")
PATIENCE_S = 60.0
REDUCTIONS: Mapping[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda parts: parts.sum(0),
    dist.ReduceOp.MIN: lambda parts: parts.amin(0),
    dist.ReduceOp.MAX: lambda parts: parts.amax(0),
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One call as a rank made it; NCCL hangs or mixes data up where ranks differ in any of this."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that each rank gives."""
        return math.prod(self.shape) * self.dtype.itemsize


class CardRanks:
    """The ranks of one process group and what they called."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[list[Collective]] = [[] for _ in range(size)]
        self._own = threading.local()
        self._running = threading.Lock()
        self._barrier = threading.Barrier(size)
        self._given: list[Tensor | None] = [None] * size

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Return what `work` returns on each rank. Raises the error of the first that failed."""
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(self._run_rank, rank, work) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        first = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        if errors:
            raise (first or errors)[0]
        return [future.result() for future in futures]

    def _run_rank(self, rank: int, work: Callable[[int], T]) -> T:
        self._own.rank = rank
        with self._running, FactoryMode():  # type: ignore[no-untyped-call]
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

    def exchange(self, kind: str, given: Tensor) -> list[Tensor]:
        """Return the tensors that all ranks gave to the same call."""
        if not isinstance(given, CardTensor):
            raise CardError(f"{kind}: NCCL takes tensors of cards only")
        if not given.is_contiguous():
            raise CardError(f"{kind}: NCCL takes contiguous tensors only")
        rank = self._own.rank
        self.calls[rank].append(Collective(kind, tuple(given.shape), given.dtype))
        self._given[rank] = given.host.clone()
        self._wait()
        parts = [part for part in self._given if part is not None]
        self._wait()  # before the next call overwrites them
        return parts

    @property
    def rank(self) -> int:
        return int(self._own.rank)

    def _wait(self) -> None:
        self._running.release()
        try:
            self._barrier.wait(PATIENCE_S)
        finally:
            self._running.acquire()


@contextmanager
def card_ranks(size: int) -> Iterator[CardRanks]:
    """Let the collectives of torch.distributed be collectives of ranks in threads."""
    ranks = CardRanks(size)

    def captured(tensor: Any, call: Callable[[], None]) -> None:
        """Make a call; during a capture, leave it to the replays."""
        CARDS[-1].record(tensor.card, (Repeated(call), (), {}, ()))
        if not CARDS[-1].recordings:
            call()

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: object = None) -> None:
        def call() -> None:
            parts = torch.stack(ranks.exchange("all_reduce", tensor))
            tensor.host.copy_(REDUCTIONS[op](parts))

        captured(tensor, call)

    def all_gather(parts: Any, part: Any, group: object = None) -> None:
        captured(part, lambda: parts.host.copy_(torch.cat(ranks.exchange("all_gather", part))))

    def all_to_all(shares: Any, given: Any, group: object = None) -> None:
        def call() -> None:
            chunks = [one.chunk(size)[ranks.rank] for one in ranks.exchange("all_to_all", given)]
            shares.host.copy_(torch.cat(chunks))

        captured(given, call)

    def gather(
        part: Any, parts: Sequence[Any] | None, group: object = None, group_dst: int = 0
    ) -> None:
        def call() -> None:
            given = ranks.exchange("gather", part)
            assert (parts is not None) == (ranks.rank == group_dst)
            for own, other in zip(parts or (), given, strict=False):
                own.host.copy_(other)

        captured(part, call)

    with (
        mock.patch.multiple(
            dist, all_reduce=all_reduce, gather=gather, all_to_all_single=all_to_all
        ),
        mock.patch.object(shard_module, "_all_gather", all_gather),
    ):
        yield ranks
