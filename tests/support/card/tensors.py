"""Tensors of emulated cards: they say `cuda:N`, compute on the host, and keep the rules of a card.

A `CardTensor` wraps a tensor of the host. torch's C++ takes it for one on `meta`, the only device
that needs no driver, so every operation on it comes here. An operation either is a view, which
launches nothing; or is a read by the host, which waits; or moves data between host and card; or
launches a kernel. Kernels refuse tensors of the host and of other cards.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.support.card.ledger import CardError, Ledger, place

VIEWS = frozenset(
    "alias as_strided chunk detach diagonal expand flatten lift_fresh movedim narrow permute "
    "reshape select slice split split_with_sizes squeeze squeeze_ t transpose unbind unfold "
    "unsqueeze view view_as _reshape_alias _unsafe_view".split()
)
"""Operations whose results share memory with their inputs."""
NO_KERNELS = VIEWS | frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided is_contiguous sym_numel "
    "sym_size".split()
)
HOST_READS = frozenset(
    "_local_scalar_dense bincount equal is_nonzero item masked_select nonzero nonzero_static "
    "unique unique_consecutive unique_dim _unique2".split()
)
"""Operations whose result, or its shape, the host must know before it goes on."""
SCALAR_READS = frozenset("_local_scalar_dense equal is_nonzero item".split())
INDEXING = frozenset("index index_put index_put_ _index_put_impl_".split())
ONE_KERNEL = {
    torch.rms_norm,
    F.linear,
    F.rms_norm,
    F.scaled_dot_product_attention,
    F.silu,
}
"""Functions of one kernel on a card, which torch's C++ would take apart on `meta`."""


class Cards:
    """The cards that there are: which one is current, what is counted and what is captured.

    Without values, tensors have shapes only: models of any size fit, and what the host fetches is
    zeros.
    """

    def __init__(
        self, count: int, ledger: Ledger, *, memory_bytes: int, has_values: bool = True
    ) -> None:
        self.count, self._own = count, ThreadState()
        self.ledger, self.has_values = ledger, has_values
        self.memory = torch.device("cpu" if has_values else "meta")
        self.memory_of = [CardMemory(memory_bytes) for _ in range(count)]
        # Memory that a card copies from by itself, by its address; kept, so that no other gets it.
        self.pinned: dict[int, Tensor] = {}
        self.makers: list[int] = []  # cards of the tensors whose functions are running

    @property
    def current(self) -> int:
        """The current card of this thread."""
        return self._own.current

    @current.setter
    def current(self, number: int) -> None:
        self._own.current = number

    @property
    def recordings(self) -> list[Recording]:
        """The captures under way in this thread."""
        return self._own.recordings

    def number_of(self, device: Any) -> int | None:
        """Return the number of the card that a device is; None: it is no card."""
        if device is None:
            return None
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "cuda":
            number = self.current if device.index is None else device.index
            if number >= self.count:
                raise CardError("CUDA error: invalid device ordinal")
            return number
        # C++ makes what is to lie beside one of our tensors on `meta`.
        return self.makers[-1] if device.type == "meta" and self.makers else None

    def wait(self, reason: str) -> None:
        if self.recordings:
            raise CardError(f"{reason} during a capture, at {place()}")
        self.ledger.add_wait(reason, place())

    def hold(self, host: Tensor) -> Tensor:
        """Return a copy of a host's tensor that can stand in a card's memory."""
        return host.clone() if self.has_values else torch.empty_like(host, device="meta")

    def fetch(self, held: Tensor) -> Tensor:
        """Return what the host gets of a tensor in a card's memory."""
        return held if self.has_values else torch.zeros(held.shape, dtype=held.dtype)

    def record(self, number: int, call: tuple[Any, ...]) -> None:
        """Keep a call for the replays of the capture under way, if it is on the capture's card."""
        if self.recordings and self.recordings[-1].card == number:
            self.recordings[-1].calls.append(call)

    @contextmanager
    def making(self, number: int) -> Iterator[None]:
        self.makers.append(number)
        try:
            yield
        finally:
            self.makers.pop()


class ThreadState(threading.local):
    """The state of one thread: ranks capture and run beside one another."""

    def __init__(self) -> None:
        self.current = 0
        self.recordings: list[Recording] = []


class CardMemory:
    """The bytes of a card that its tensors hold."""

    def __init__(self, total: int) -> None:
        self.total, self.allocated, self.peak = total, 0, 0
        self._holders: Counter[int] = Counter()  # tensors of each storage

    def add(self, tensor: CardTensor) -> None:
        """Count a tensor's storage until its last tensor is gone."""
        storage = tensor.host.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if not self._holders[address]:
            if self.allocated + size > self.total:
                gc.collect()  # a card would not: it keeps one rare failure of unknown cause away
            if self.allocated + size > self.total:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
        self._holders[address] += 1
        # Not by a weak reference: torch swaps no tensors that have any.
        tensor.holder = MemoryHolder(self, address, size)

    def drop(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            del self._holders[address]
            self.allocated -= size


class MemoryHolder:
    """Belongs to a tensor of a card, and gives its memory back with it."""

    def __init__(self, memory: CardMemory, address: int, size: int) -> None:
        self._memory, self._address, self._size = memory, address, size

    def __del__(self) -> None:
        self._memory.drop(self._address, self._size)


class Repeated:
    """A call that a replay makes as it stands, on tensors of cards."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call


class Recording:
    """The calls of a capture, on the very tensors that it used."""

    def __init__(self, card: int) -> None:
        self.card = card
        self.calls: list[tuple[Any, ...]] = []
        self.made: list[CardTensor] = []

    def end(self) -> None:
        """Count the memory of what was made no longer: all graphs of a pool use it in turn."""
        for tensor in self.made:
            del tensor.holder

    def replay(self, cards: Cards) -> None:
        for function, args, kwargs, out in self.calls:
            if isinstance(function, Repeated):
                function.call()
                continue
            if name_of(function) in VIEWS:
                continue  # the recorded view looks at the recorded memory
            if name_of(function) not in NO_KERNELS:
                cards.ledger.add_replayed(
                    name_of(function), _tensors((args, kwargs)), _tensors(out)
                )
            if hasattr(function, "work"):
                cards.ledger.add_paged_attention(*function.work(*args[:3]))
            if not cards.has_values:
                continue
            args, kwargs = _in_memory(cards, (args, kwargs))
            new = _compute(function, args, kwargs)
            for old, fresh in zip(_tensors(out), _tensors(new), strict=True):
                if isinstance(old, CardTensor) and not _shares_memory(old.host, fresh):
                    old.host.copy_(fresh)


CARDS: list[Cards] = []
"""The emulation in force, if there is one."""


class CardTensor(torch.Tensor):
    """A tensor of a card, whose values lie in a tensor of the host."""

    host: Tensor
    card: int
    holder: MemoryHolder

    @staticmethod
    def __new__(cls, host: Tensor, card: int) -> CardTensor:
        make: Any = torch.Tensor._make_wrapper_subclass
        with torch._C._InferenceMode(False):  # tensors of inference may not be changed outside
            wrapper: CardTensor = make(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device="meta",
            )
        wrapper.host, wrapper.card = host, card
        if CARDS:
            CARDS[-1].memory_of[card].add(wrapper)
            for recording in CARDS[-1].recordings:
                recording.made.append(wrapper)
        return wrapper

    def __init__(self, host: Tensor, card: int) -> None:
        pass

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"CardTensor({tuple(self.shape)}, {self.dtype}, cuda:{self.card})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.card)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    # With these two, `Module.to` puts other parameters in the place of its own.
    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["host"], self.card

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], card: int, *_: object) -> CardTensor:
        return CardTensor(inner["host"], card)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: object, **__: object) -> Any:
        raise TypeError(f"can't convert cuda:{self.card} device type tensor to numpy")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        cards = CARDS[-1]
        own = next(tensor for tensor in _tensors((args, kwargs)) if isinstance(tensor, CardTensor))
        if func is torch.Tensor.copy_:  # its C++ asks for the driver of `cuda`
            return _copy(cards, *args, **kwargs)
        if func is torch.Tensor.detach:  # its C++ asks wrappers for versions, in inference mode
            return CardTensor(own.host.detach(), own.card)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], _index_on_card(cards, own.card, args[1]), *args[2:])
        if func in ONE_KERNEL:
            return launch(cards, func, args, kwargs)
        with (
            torch._C.DisableTorchFunctionSubclass(),
            torch._C._InferenceMode(False),
            torch.no_grad(),
            cards.making(own.card),
        ):
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


class FactoryMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Catches operations that make tensors of a card out of none."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C._InferenceMode(False), torch.no_grad():
            return _dispatch(func, args, kwargs or {})


def to_card(cards: Cards, tensor: Tensor, number: int) -> CardTensor:
    """Copy a tensor of the host to a card."""
    cards.wait("copy from pageable memory")
    return CardTensor(cards.hold(tensor), number)


def name_of(function: Any) -> str:
    return _operation(function) if isinstance(function, OpOverload) else str(function.__name__)


@cache
def _operation(function: OpOverload) -> str:
    return str(function._schema.name.partition("::")[2])


def _dispatch(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    cards, name = CARDS[-1], name_of(function)
    if name in ("_to_copy", "to"):
        given = dict(zip((part.name for part in function._schema.arguments), args, strict=False))
        given |= kwargs
        if isinstance(like := given.get("other"), Tensor):
            given |= {"device": like.device, "dtype": like.dtype}
        target = cards.number_of(given.get("device"))
        if isinstance(given["self"], CardTensor) or target is not None:
            return _move(cards, given, target, must_copy=name == "_to_copy")
    if name in ("copy_", "_copy_from"):
        return _copy(cards, *args, **kwargs)
    if (
        not any(isinstance(tensor, CardTensor) for tensor in _tensors((args, kwargs)))
        and cards.number_of(kwargs.get("device")) is None
    ):
        return function(*args, **kwargs)
    if name in INDEXING:
        _check_indices(cards, args[1])
    if name in HOST_READS or (
        name == "repeat_interleave" and any(isinstance(given, Tensor) for given in args[1:2])
    ):
        cards.wait(name)
    return launch(cards, function, args, kwargs)


def launch(cards: Cards, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute on the host what a card would, and wrap the results."""
    name = name_of(function)
    numbers, tensors = set[int](), _tensors((args, kwargs))
    for tensor in tensors:
        if isinstance(tensor, CardTensor):
            numbers.add(tensor.card)
        elif tensor.dim() > 0 and not (name in INDEXING or name.endswith("_like")):
            shape = tuple(tensor.shape)
            raise CardError(f"{name}: {shape} of the host beside a card's tensors, at {place()}")
    made_on = cards.number_of(kwargs.get("device"))
    number = numbers.pop() if numbers else made_on
    assert number is not None
    if numbers:
        raise CardError(f"{name}: tensors of different cards, at {place()}")
    owners = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, CardTensor)}
    if not cards.has_values and name in SCALAR_READS:
        return True
    held_args, held_kwargs = _in_memory(cards, (args, kwargs))

    def on_card(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return owners[id(part)] if id(part) in owners else CardTensor(part, number)

    out = _mapped(on_card, _compute(function, held_args, held_kwargs))
    if name not in NO_KERNELS and name not in HOST_READS:
        cards.ledger.add_kernel(name, tensors, _tensors(out))
    if name != "sym_size":
        cards.record(number, (function, args, kwargs, out))
    return out


def _compute(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    has_mode = torch.is_inference_mode_enabled() or torch.is_grad_enabled()
    if has_mode or torch._C._len_torch_dispatch_stack():  # seldom within a dispatch of its own
        with torch._C._InferenceMode(False), torch.no_grad(), _disable_current_modes():
            return _compute(function, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if name_of(function) == "histc" and not args[0].is_floating_point():
            # Integers are counted by cards alone.
            return function(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        return function(*args, **kwargs)


def _move(cards: Cards, given: Mapping[str, Any], target: int | None, *, must_copy: bool) -> Tensor:
    """Move a tensor between host and card or between cards, or change its type."""
    tensor: Tensor = given["self"]
    dtype = given.get("dtype") or tensor.dtype
    source = tensor.card if isinstance(tensor, CardTensor) else None
    if given.get("device") is None:
        target = source
    host = tensor.host if isinstance(tensor, CardTensor) else tensor
    must_copy |= bool(given.get("copy"))
    if source == target and dtype == tensor.dtype and not must_copy:
        return tensor
    to = torch.ops.aten._to_copy.default
    fresh = _compute(to, (host,), {"dtype": dtype})
    if source == target:
        assert source is not None
        out = CardTensor(fresh, source)
        cards.ledger.add_kernel("_to_copy", [tensor], [out])
        cards.record(source, (to, (tensor,), {"dtype": dtype}, out))
        return out
    if tensor.numel() and (source is None or target is None):
        _count_copy(cards, tensor, is_asynchronous=bool(given.get("non_blocking")))
    if target is None:
        return cards.fetch(fresh)
    return CardTensor(fresh if source is not None else cards.hold(fresh), target)


def _copy(cards: Cards, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy values into a tensor that there is, on either side."""
    is_on_card = isinstance(into, CardTensor)
    if is_on_card != isinstance(source, CardTensor) and source.dim() > 0:
        # Copies to the host are asynchronous only into pinned memory.
        pinned = source if is_on_card else into
        _count_copy(cards, pinned, is_asynchronous=non_blocking)
    held = source.host if isinstance(source, CardTensor) else source
    with torch._C._InferenceMode(False), torch.no_grad():
        if isinstance(into, CardTensor):
            into.host.copy_(held)
        else:
            into.copy_(cards.fetch(held))
    if isinstance(into, CardTensor):
        cards.ledger.add_kernel("copy_", [source], [into])
        cards.record(into.card, (torch.ops.aten.copy_.default, (into, source), {}, into))
    return into


def _count_copy(cards: Cards, of_host: Tensor, *, is_asynchronous: bool) -> None:
    if isinstance(of_host, CardTensor):
        cards.wait("copy to the host")
    elif is_asynchronous and of_host.untyped_storage().data_ptr() in cards.pinned:
        if cards.recordings:
            raise CardError(f"a copy between host and card during a capture, at {place()}")
    else:
        cards.wait("copy from pageable memory")


def _index_on_card(cards: Cards, number: int, key: Any) -> Any:
    """Return an index with its lists as tensors of the card, which they become there."""

    def made(part: Any) -> Any:
        if isinstance(part, list | range):
            return to_card(cards, torch.as_tensor(list(part)), number)
        return part

    return tuple(map(made, key)) if isinstance(key, tuple) else made(key)


def _check_indices(cards: Cards, indices: Iterable[Tensor | None]) -> None:
    for index in indices:
        if index is None:
            continue
        if not isinstance(index, CardTensor):
            cards.wait("an index of the host")
        if index.dtype in (torch.bool, torch.uint8):
            cards.wait("a mask as an index")


def _in_memory(cards: Cards, tree: Any) -> Any:
    """Return arguments with held tensors and their device in the place of the card's."""

    def held(part: Any) -> Any:
        if isinstance(part, CardTensor):
            return part.host
        return cards.memory if isinstance(part, torch.device) else part

    return _mapped(held, tree)


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested arguments or results with each part that is no container changed.

    torch's pytree does this, too, and takes half of an operation's time.
    """
    if type(tree) in (tuple, list):
        return type(tree)([_mapped(change, part) for part in tree])
    if type(tree) is dict:
        return {key: _mapped(change, part) for key, part in tree.items()}
    return change(tree)


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in nested arguments or results."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if not isinstance(tree, tuple | list):
        return []
    return [tensor for part in tree for tensor in _tensors(part)]


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
