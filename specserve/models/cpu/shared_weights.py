"""Weights in memory that all processes of a node share, on CPUs.

The first process reads and packs a checkpoint into a file; the others map that file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from specserve.models.checkpoints.load import LoadedModel
from specserve.models.checkpoints.packed import PackedCheckpoint, PackedWriter
from specserve.models.checkpoints.store import UnsafeDirectory, WeightStore
from specserve.models.checkpoints.weights import weight_files
from specserve.models.cpu.linear_kernels import LinearKernel
from specserve.models.cpu.mapped_file import can_map
from specserve.models.layers import linear_weights
from specserve.models.memory import free_memory, release_freed_memory
from specserve.processor import CAP_VARIABLES, CPU_INFO

log = logging.getLogger(__name__)

ROOM = 1.1
"""Room that a file may take, over the parameters' own size: packing pads some of them."""


def open_shared_weights(
    checkpoint: Path,
    directory: Path | None,
    *,
    dtype: torch.dtype,
    num_bytes: Callable[[], int],
    kernel: LinearKernel,
    part: object,
    load: Callable[[], LoadedModel],
    build: Callable[[LoadedModel], object],
) -> PackedCheckpoint | None:
    """Return a checkpoint's packed weights, mapped; None if they have to stay in private memory.

    `part` says which of the weights are meant, and `num_bytes` what they take; `load` and `build`
    make a network, which is done only if no process has written the file yet.
    """

    def write(file: BinaryIO) -> None:
        writer = PackedWriter(file, kernel)
        loaded = load()
        with torch.inference_mode(), linear_weights(writer):
            build(loaded)
        writer.finish(loaded.module)
        release_freed_memory()

    try:
        if not can_map():
            raise OSError("this system or this build of torch cannot map them")
        store = WeightStore(directory)
        key = weights_key(checkpoint, dtype, (kernel.name, part))
        if not store.has(key):
            _require_room(store, num_bytes())
        return store.get(key, partial(PackedCheckpoint, kernel=kernel), write)
    except (OSError, UnsafeDirectory) as error:
        log.warning("weights are not shared with other processes: %s", error)
        return None


def weights_key(checkpoint: Path, dtype: torch.dtype, part: object) -> str:
    """Return the name of a file of packed weights: a hash of all that its contents depend on.

    The checkpoint's files count by their identity and the times of their last change, so that
    nothing of them is read.
    """
    parts = (
        _code(),
        importlib.metadata.version("transformers"),
        str(torch.__version__),
        _processor(),
        torch.get_num_threads(),  # oneDNN may choose another layout
        str(dtype),
        part,
        *(_identity(path) for path in (checkpoint / "config.json", *weight_files(checkpoint))),
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@cache
def _code() -> str:
    """Return a hash of this package, which decides what is in the files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _identity(path: Path) -> tuple[object, ...]:
    status = path.stat()
    return (
        str(path.resolve()),
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _processor() -> tuple[Any, ...]:
    """Return what oneDNN chooses its layouts by."""
    described = CPU_INFO.read_text().partition("\n\n")[0].splitlines()
    return (
        *(
            line
            for line in described
            if line.startswith(("model", "vendor_id", "flags", "CPU", "Features"))
        ),
        *(os.environ.get(name) for name in CAP_VARIABLES),
    )


def _require_room(store: WeightStore, num_bytes: int) -> None:
    """Raise OSError if a file does not fit beside those in use."""
    needed = int(num_bytes * ROOM)
    if needed > _room(store):
        store.remove_unused()
    free = _room(store)
    if needed > free:
        raise OSError(
            f"{store.directory} has room for {free / 2**30:.1f} GiB, and they take "
            f"{needed / 2**30:.1f} GiB; make room, or set weights.directory to one that has it"
        )


def _room(store: WeightStore) -> int:
    """Return the bytes that a file may take: the directory may be memory."""
    return min(store.free_bytes(), free_memory(torch.device("cpu")))
