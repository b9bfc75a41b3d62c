"""Hash of all that the contents of a target's pages depend on, but for their tokens.

Engines exchange pages only if their hashes are equal: the text then has the bits that it would have
without.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from dataclasses import replace
from pathlib import Path

import torch

from specserve.config.tree import Config
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.weights import weight_files
from specserve.wire.version import RELEASE

NUM_SAMPLES, SAMPLE_BYTES = 64, 2**14
"""Parts of each file of weights that are read, besides its header."""
HEADER_BYTES = 2**20


def page_version(checkpoint: Path, config: Config, cache: PagedCache) -> bytes:
    """Return the hash for a target of this checkpoint and config, and for this device.

    Of the weights it reads samples: other weights of the same shape differ nearly everywhere.
    """
    target = replace(
        config.target, path="", revision=None, device="", threads=None, label_selector={}
    )
    digest = hashlib.blake2b(digest_size=16)
    for part in (
        RELEASE,
        str(torch.__version__),
        importlib.metadata.version("transformers"),
        _device_name(cache.device),
        target,
        config.weights.kernel,
        config.adapters.num_bytes > 0,
        config.cache.page_size,
        [(str(pool.dtype), len(pool), tuple(pool.shape[2:])) for pool in cache.pools],
        (checkpoint / "config.json").read_bytes(),
    ):
        digest.update(repr(part).encode())
    for file in weight_files(checkpoint):
        digest.update(_samples(file))
    return digest.digest()


def _samples(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.blake2b(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        digest.update(file.read(HEADER_BYTES))
        for number in range(NUM_SAMPLES):
            file.seek(number * max(0, size - SAMPLE_BYTES) // NUM_SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
