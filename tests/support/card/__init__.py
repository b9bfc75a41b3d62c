"""Emulated cards: `cuda` devices made of the host's memory, with a card's rules and a ledger.

They need neither a driver nor a CUDA build of torch, and show what a card refuses (tensors of
different devices, a read of the host during a capture), what the host waits for, how many kernels
run, and what a captured graph computes when it is replayed. They show nothing of the kernels that a
card would choose, of their rounding, of the time that they take, of NCCL, or of what streams do at
the same time: an event has always come, and a copy has always ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support.card.ledger import CardError, Ledger
from tests.support.card.tensors import CARDS, Cards, CardTensor, FactoryMode, Recording, to_card

__all__ = ["CardError", "CardTensor", "Ledger", "emulated_cards"]

HOPPER = (9, 0)


class CardStream:
    """A stream of a card, which does at once what it is given."""

    def __init__(self, device: Any = None, **_: object) -> None:
        self.card = CARDS[-1].current if device is None else CARDS[-1].number_of(device)

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None:
        CARDS[-1].wait("synchronize", 0)


class CardEvent:
    """An event, which has always come."""

    def record(self, stream: CardStream) -> None: ...

    def synchronize(self) -> None: ...


class CardGraph:
    """A captured graph: its replay runs the recorded operations on the recorded tensors."""

    def __init__(self, *_: object, **__: object) -> None:
        self.recording: Recording | None = None

    def replay(self) -> None:
        assert self.recording is not None, "a graph that was never captured"
        CARDS[-1].ledger.num_replays += 1
        self.recording.replay()


@contextmanager
def emulated_cards(
    count: int = 1, *, free_bytes: int = 2**34, capability: tuple[int, int] = HOPPER
) -> Iterator[Ledger]:
    """Emulate this many cards, and yield the ledger of them all."""
    cards = Cards(count)
    default_streams: list[CardStream] = []  # as torch has it: one, on the first capture's card
    make_tensor = torch.tensor

    @contextmanager
    def capture(
        graph: CardGraph, pool: object = None, stream: Any = None, **_: object
    ) -> Iterator[None]:
        if stream is None:
            default_streams[:] = default_streams or [CardStream()]
            stream = default_streams[0]
        graph.recording = Recording(stream.card)
        cards.ledger.num_graphs += 1
        cards.recordings.append(graph.recording)
        try:
            yield
        finally:
            cards.recordings.pop()

    @contextmanager
    def current(device: Any) -> Iterator[None]:
        before = cards.current
        set_current(device)
        try:
            yield
        finally:
            cards.current = before

    @contextmanager
    def on_stream(stream: CardStream) -> Iterator[None]:
        yield

    def set_current(device: Any) -> None:
        number = device if isinstance(device, int) else cards.number_of(device)
        assert number is not None
        cards.current = number

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        number = cards.number_of(device)
        if number is None:
            return make_tensor(data, device=device, **options)
        return to_card(cards, make_tensor(data, **options), number)

    def pin(host: Tensor, *_: object) -> Tensor:
        pinned = host.clone()
        cards.pinned[pinned.untyped_storage().data_ptr()] = pinned
        return pinned

    with (
        mock.patch.multiple(
            torch.cuda,
            CUDAGraph=CardGraph,
            Event=CardEvent,
            Stream=CardStream,
            current_device=lambda: cards.current,
            current_stream=lambda device=None: CardStream(device),
            device=current,
            device_count=lambda: count,
            empty_cache=lambda: None,
            get_device_capability=lambda device=None: capability,
            get_device_name=lambda device=None: "an emulated card",
            graph=capture,
            graph_pool_handle=lambda: (0, cards.current),
            is_available=lambda: count > 0,
            is_bf16_supported=lambda including_emulation=True: (
                including_emulation or capability >= (8, 0)
            ),
            is_current_stream_capturing=lambda: bool(cards.recordings),
            mem_get_info=lambda device=None: (free_bytes, free_bytes),
            set_device=set_current,
            stream=on_stream,
            synchronize=lambda device=None: cards.wait("synchronize", 0),
            _lazy_init=lambda: None,
        ),
        mock.patch.object(torch, "tensor", tensor),
        mock.patch.object(Tensor, "pin_memory", pin),
        FactoryMode(),  # type: ignore[no-untyped-call]
    ):
        CARDS.append(cards)
        try:
            yield cards.ledger
        finally:
            CARDS.pop()
