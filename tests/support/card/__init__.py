"""Emulated cards: `cuda` devices made of the host's memory, with a card's rules and a ledger.

They need neither a driver nor a CUDA build of torch, and show what a card refuses (tensors of
different devices, a read of the host during a capture), what the host waits for, how many kernels
run, and what a captured graph computes when it is replayed. They show nothing of the kernels that a
card would choose, of their rounding, of the time that they take, of NCCL, or of what streams do at
the same time: an event has always come, and a copy has always ended.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import modeling_utils

from specserve.models.gpu.float8_kernels import float8_fault
from specserve.models.model import ModelOptions, open_model
from tests.support import checkpoints
from tests.support.card.kernels import no_kernels
from tests.support.card.ledger import CardError, Ledger
from tests.support.card.tensors import (
    CARDS,
    CardMemory,
    Cards,
    CardTensor,
    FactoryMode,
    Recording,
    to_card,
)

__all__ = ["CardError", "CardTensor", "Ledger", "emulated_cards"]

HOPPER = (9, 0)


class CardStream:
    """A stream of a card, which does at once what it is given."""

    def __init__(self, device: Any = None, **_: object) -> None:
        number = CARDS[-1].current if device is None else CARDS[-1].number_of(device)
        assert number is not None
        self.card = number

    def wait_stream(self, other: object) -> None: ...


class CardEvent:
    """An event, which has always come."""

    def __init__(self, *, enable_timing: bool = False) -> None: ...

    def record(self, stream: CardStream) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: CardEvent) -> float:
        return 1.0  # of a clock that knows nothing


class CardGraph:
    """A captured graph: its replay runs the recorded operations on the recorded tensors."""

    def __init__(self, *_: object, **__: object) -> None:
        self.recording: Recording | None = None

    def replay(self) -> None:
        assert self.recording is not None, "a graph that was never captured"
        CARDS[-1].ledger.add_replay()
        self.recording.replay(CARDS[-1])


class CudaStandIn:
    """The parts of `torch.cuda`, and of torch, that code calls to reach a card."""

    def __init__(self, cards: Cards) -> None:
        self._cards = cards
        self._default_stream: CardStream | None = None  # as torch has it: of the first capture
        self._make_tensor = torch.tensor

    @contextmanager
    def capture(
        self, graph: CardGraph, pool: object = None, stream: CardStream | None = None, **_: object
    ) -> Iterator[None]:
        if stream is None:
            stream = self._default_stream = self._default_stream or CardStream()
        graph.recording = Recording(stream.card)
        self._cards.ledger.num_graphs += 1
        self._cards.recordings.append(graph.recording)
        try:
            yield
        finally:
            self._cards.recordings.pop().end()

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, number = self._cards.current, self._cards.number_of(device)
        assert number is not None
        self._cards.current = number
        try:
            yield
        finally:
            self._cards.current = before

    def tensor(self, data: Any, *, device: Any = None, **options: Any) -> Tensor:
        number = self._cards.number_of(device)
        if number is None:
            return self._make_tensor(data, device=device, **options)
        return to_card(self._cards, self._make_tensor(data, **options), number)

    def pin(self, host: Tensor) -> Tensor:
        pinned = host.clone()
        self._cards.pinned[pinned.untyped_storage().data_ptr()] = pinned
        return pinned

    def free_and_total(self, device: Any = None) -> tuple[int, int]:
        memory = self._memory(device)
        return memory.total - memory.allocated, memory.total

    def reset_peak(self, device: Any = None) -> None:
        memory = self._memory(device)
        memory.peak = memory.allocated

    def _memory(self, device: Any) -> CardMemory:
        number = self._cards.current if device is None else self._cards.number_of(device)
        assert number is not None
        return self._cards.memory_of[number]

    def names(self) -> dict[str, Any]:
        """Return what stands in the place of parts of `torch.cuda`, by their names."""
        return {
            "CUDAGraph": CardGraph,
            "Event": CardEvent,
            "Stream": CardStream,
            "current_stream": CardStream,
            "device": self.device,
            "device_count": lambda: self._cards.count,
            "empty_cache": lambda: None,
            "get_device_capability": lambda device=None: HOPPER,
            "get_device_name": lambda device=None: "an emulated card",
            "graph": self.capture,
            "graph_pool_handle": lambda: (0, self._cards.current),
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: bool(self._cards.recordings),
            "max_memory_allocated": lambda device=None: self._memory(device).peak,
            "memory_allocated": lambda device=None: self._memory(device).allocated,
            "mem_get_info": self.free_and_total,
            "reset_peak_memory_stats": self.reset_peak,
            "set_sync_debug_mode": lambda mode: None,
            "stream": nullcontext,
            "synchronize": lambda device=None: self._cards.wait("synchronize"),
            "_lazy_init": lambda: None,
        }


@cache
def _open_on_the_host() -> None:
    """Open a model before there are cards.

    What the library sets up for the first model of a process would otherwise be made of a card's
    tensors, and wrong for all others.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = checkpoints.make("llama", Path(directory) / "llama")
        open_model(path, ModelOptions(dtype="float32", device="cpu", pages=1))


@contextmanager
def emulated_cards(
    count: int = 1,
    *,
    ledger: Ledger | None = None,
    memory_bytes: int = 2**34,
    has_values: bool = True,
) -> Iterator[Ledger]:
    """Emulate this many cards in this thread, and yield the ledger of them all.

    Without values their tensors take no memory.
    """
    _open_on_the_host()
    cards = Cards(count, ledger or Ledger(), memory_bytes=memory_bytes, has_values=has_values)
    stand_in = CudaStandIn(cards)
    with (
        mock.patch.multiple(torch.cuda, **stand_in.names()),
        mock.patch.object(torch, "tensor", stand_in.tensor),
        mock.patch.object(Tensor, "pin_memory", lambda host: stand_in.pin(host)),
        # The library reserves memory first, which fails on cards smaller than any real one.
        mock.patch.object(modeling_utils, "caching_allocator_warmup"),
        # It reads weights in several threads otherwise.
        mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}),
        no_kernels(),
        FactoryMode(),  # type: ignore[no-untyped-call]
    ):
        CARDS.append(cards)
        float8_fault.cache_clear()  # what it has found of a device was of other cards
        try:
            yield cards.ledger
        finally:
            CARDS.pop()
            float8_fault.cache_clear()
