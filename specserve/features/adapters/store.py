"""The adapters in a rank's memory: loaded when a sequence needs them, evicted when others do.

All ranks of a target take the same steps in the same order, so that they load and evict the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from specserve.config.tree import Config
from specserve.errors import AdapterError
from specserve.features.adapters.files import (
    WEIGHTS_FILE,
    AdapterFiles,
    LowRank,
    digest,
    read_adapter,
)
from specserve.features.adapters.layers import (
    AdaptedRows,
    Factors,
    PassAdapters,
    adapt_layers,
    adaptable_layers,
)
from specserve.models.checkpoints.library import empty_module
from specserve.models.checkpoints.load import make_division
from specserve.models.device_formats import resolve_device, resolve_dtype
from specserve.models.layers import PrivateWeights, linear_weights, make_linear
from specserve.models.shard import Division, Shard
from specserve.types import Adapter, Verdict, VerifyStep

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

T = TypeVar("T")

RANK_MULTIPLE = 16
"""Ranks are padded to a multiple with zeros, so that few shapes of products occur."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in memory."""

    factors: dict[str, Factors]
    num_bytes: int


class AdapterStore:
    """Loaded adapters within a budget; the least recently used is evicted first.

    An adapter that the pass under way needs is never evicted. One whose files cannot be used fails
    its own sequences alone.
    """

    def __init__(
        self,
        directory: Path,
        config: Any,
        module: nn.Module,
        *,
        max_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
        kernel: str = "auto",
    ) -> None:
        """Make the layers of the target's module adaptable; `config` is of the whole model."""
        self.max_bytes, self._dtype, self._device = max_bytes, dtype, device
        self._shard, self._kernel = shard, kernel
        self._layers = adaptable_layers(directory)
        self._shapes: dict[str, torch.Size] = {}
        self._division: Division | None = None
        if shard is not None and shard.size > 1:
            whole = empty_module(config, dtype=dtype, attention="eager")
            self._shapes = {name: whole.get_submodule(name).weight.shape for name in self._layers}
            self._division = make_division(whole, shard)
        self._in_pass = PassAdapters()
        adapt_layers(module, list(self._layers), self._in_pass)
        self._loaded: dict[Adapter, LoadedAdapter] = {}  # the most recently used is the last
        self._errors: dict[int, str] = {}  # of sequences that cannot go on
        self.num_loads = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the loaded adapters, counted as on one rank alone."""
        return sum(loaded.num_bytes for loaded in self._loaded.values())

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        return tuple(self._loaded)

    def verify(
        self,
        steps: Sequence[VerifyStep],
        verify: Callable[[Sequence[VerifyStep]], Sequence[Verdict]],
    ) -> list[Verdict]:
        """Verify steps in one pass, or in more if their adapters do not fit in memory together."""
        verdicts: dict[int, Verdict] = {}
        waiting = list(steps)
        while waiting:
            now, waiting = self._next_pass(waiting)
            verdicts |= {verdict.seq_id: verdict for verdict in verify(now)}
        for step in steps:
            if (error := self._errors.get(step.seq_id)) is not None:
                verdicts[step.seq_id] = Verdict(
                    step.seq_id, 0, 0, None, error, is_decision=step.needs_verdict
                )
        answered = [step.seq_id for step in steps if step.is_answered]
        return [verdicts[seq_id] for seq_id in answered if seq_id in verdicts]

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._errors.pop(seq_id, None)

    @contextmanager
    def running(self, adapters: Sequence[Adapter | None], counts: Sequence[int]) -> Iterator[None]:
        """Apply each sequence's adapter to its `counts[i]` rows of the pass that runs meanwhile."""
        self._in_pass.adapted = list(self._adapted_rows(adapters, counts))
        try:
            yield
        finally:
            self._in_pass.adapted = ()

    def _next_pass(
        self, waiting: Sequence[VerifyStep]
    ) -> tuple[list[VerifyStep], list[VerifyStep]]:
        """Return the steps of the next pass, whose adapters are then loaded, and the others."""
        now, later, in_use = list[VerifyStep](), list[VerifyStep](), set[Adapter]()
        for step in waiting:
            adapter = step.policy.adapter
            if step.seq_id in self._errors:
                continue
            try:
                fits = adapter is None or self._take(adapter, in_use)
            except AdapterError as error:
                assert adapter is not None
                log.warning("a sequence fails: %s", error)
                # A client may know the adapter's name, but not where it lies.
                self._errors[step.seq_id] = str(error).replace(
                    adapter.path, f"the adapter {adapter.name}"
                )
            else:
                (now if fits else later).append(step)
        return now, later

    def _take(self, adapter: Adapter, in_use: set[Adapter]) -> bool:
        """Load an adapter for a pass beside those in use; return False if it does not fit."""
        found = self._loaded.pop(adapter, None)
        if found is None:
            num_bytes = self._agreed(lambda: self._num_bytes(adapter))
            if not self._make_room(num_bytes, in_use):
                return False
            found = LoadedAdapter(self._agreed(lambda: self._load(adapter)), num_bytes)
            self.num_loads += 1
        self._loaded[adapter] = found
        in_use.add(adapter)
        return True

    def _make_room(self, num_bytes: int, in_use: set[Adapter]) -> bool:
        for adapter in list(self._loaded):
            if self.num_bytes + num_bytes <= self.max_bytes:
                break
            if adapter not in in_use:
                del self._loaded[adapter]
                log.info("adapter %s is evicted", adapter.name)
        return self.num_bytes + num_bytes <= self.max_bytes

    def _agreed(self, read: Callable[[], T]) -> T:
        """Return what `read` does; raise AdapterError on all ranks if it does so on one."""
        found, error = None, None
        try:
            found = read()
        except AdapterError as failure:
            error = failure
        if self._shard is not None and self._shard.size > 1:
            is_read = self._shard.minimum(int(error is None), device=self._device)
            if not is_read and error is None:
                error = AdapterError("another rank of the target cannot read the adapter's files")
        if error is not None:
            raise error
        assert found is not None
        return found

    def _num_bytes(self, adapter: Adapter) -> int:
        num_bytes = adapter_bytes(AdapterFiles.open(Path(adapter.path)), self._dtype)
        require_room_for(adapter, num_bytes, self.max_bytes)
        return num_bytes

    def _load(self, adapter: Adapter) -> dict[str, Factors]:
        directory = Path(adapter.path)
        if digest(directory) != adapter.version:
            raise AdapterError(f"{directory} has changed since it was named; load it again")
        files = AdapterFiles.open(directory)
        files.require_fits(self._layers)
        try:
            tensors = load_file(directory / WEIGHTS_FILE)
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{directory} cannot be read: {error}") from error
        with torch.inference_mode(), linear_weights(PrivateWeights(self._kernel)):
            return {
                name: self._factors(name, change, tensors) for name, change in files.changes.items()
            }

    def _factors(self, name: str, change: LowRank, tensors: dict[str, Tensor]) -> Factors:
        """Return this rank's part of a change, with its rank padded."""
        key = f"base_model.model.{name}.lora_"
        a, b = (tensors[f"{key}{factor}.weight"].float() for factor in "AB")
        b = b * change.scale
        part = self._division and self._division.part(f"{name}.weight", self._shapes[name])
        if part:
            # Rows of the weight as a product reads it are outputs.
            if (part.dim == -2) != self._layers[name].is_transposed:
                b = torch.cat([b[start:stop] for start, stop in part.ranges])
            else:
                a = torch.cat([a[:, start:stop] for start, stop in part.ranges], dim=1)
        padding = -change.rank % RANK_MULTIPLE
        a, b = F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))
        return Factors(*(make_linear(x.to(self._device, self._dtype)) for x in (a, b)))

    def _adapted_rows(
        self, adapters: Sequence[Adapter | None], counts: Sequence[int]
    ) -> Iterator[AdaptedRows]:
        rows: dict[Adapter, list[int]] = {}
        start = 0
        for adapter, count in zip(adapters, counts, strict=True):
            if adapter is not None:
                rows.setdefault(adapter, []).extend(range(start, start + count))
            start += count
        for adapter, own in rows.items():
            where = None if len(own) == start else torch.tensor(own, device=self._device)
            yield AdaptedRows(where, self._loaded[adapter].factors)


def require_adapters_fit(target: Path, config: Config) -> None:
    """Raise AdapterError unless every adapter of the config is one of the target."""
    layers = adaptable_layers(target)
    dtype = resolve_dtype(config.target.dtype, resolve_device(config.target.device))
    for name, path in config.adapters.paths.items():
        adapter = read_adapter(name, path)
        files = AdapterFiles.open(Path(adapter.path))
        files.require_fits(layers)
        require_room_for(adapter, adapter_bytes(files, dtype), config.adapters.num_bytes)


def adapter_bytes(files: AdapterFiles, dtype: torch.dtype) -> int:
    """Return the memory that an adapter takes, its rank padded."""
    return dtype.itemsize * sum(
        -(-change.rank // RANK_MULTIPLE) * RANK_MULTIPLE * (change.outputs + change.inputs)
        for change in files.changes.values()
    )


def require_room_for(adapter: Adapter, num_bytes: int, max_bytes: int) -> None:
    """Raise AdapterError for an adapter that would not fit alone."""
    if num_bytes > max_bytes:
        raise AdapterError(
            f"the adapter {adapter.name} takes {num_bytes / 2**20:.1f} MB, and adapters.memory_mb "
            f"is {max_bytes / 2**20:g}; raise it"
        )
