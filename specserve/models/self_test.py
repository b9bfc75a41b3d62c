"""Test a device before weights are read: products and memory patterns with known results.

All numbers are integers that the number format holds exactly, partial sums included, so a right
result has the same bits whatever kernel computes it, in whatever order. Knows no model.
"""

from __future__ import annotations

import logging
import math
import time

import torch
from torch import Tensor

from specserve.errors import first_line
from specserve.models.memory import free_memory

log = logging.getLogger(__name__)

TIME_LIMIT_S = 1.0
"""Time after which no further block of memory is tested."""
TILE = 256
"""Rows, columns and summands of the product whose result the host computes."""
NUM_TILES = {"cuda": 8}
"""Tiles along each side of a product, 1 elsewhere: 2048 x 2048 give each multiprocessor a part."""
NUM_RUNS = 2
"""Runs of each product, which are compared with one another where one is wrong."""
FORMATS = (torch.float32, torch.bfloat16)
EXACT_BITS = {torch.float32: 24, torch.bfloat16: 8}
MAX_FACTOR = 127
"""Largest factor, which TensorFloat-32 holds exactly, too."""
BLOCK_BYTES = 2**26
NUM_BLOCKS = {"cuda": 4}
"""Blocks of memory that are written and read, one of SMALL_BLOCK_BYTES elsewhere."""
SMALL_BLOCK_BYTES = 2**20
FREE_SHARE = 8
"""One part in that many of the free memory is tested at most."""
STRIDE = 0x9E3779B97F4A7C1
"""Odd factor between the numbers of a pattern, so that each place holds another number."""


def find_fault(device: torch.device) -> str | None:
    """Return how the device's results differ from the known ones, or None if they do not.

    On one thread of a CPU it takes some 10 ms, and 35 ms in a process that has computed nothing.
    """
    started = time.monotonic()
    try:
        for dtype in FORMATS:
            if (fault := _find_wrong_product(device, dtype)) is not None:
                return fault
        fault = _find_wrong_memory(device, until=started + TIME_LIMIT_S)
    except torch.OutOfMemoryError:  # no fault of the device; loading says what does not fit
        log.warning("the memory of %s was not tested, since it is full", device)
        return None
    except RuntimeError as error:
        return f"its self-test ended with: {first_line(error)}"
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the weights
    log.info("self-test of %s: %.0f ms", device, (time.monotonic() - started) * 1e3)
    return fault


def _find_wrong_product(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return how products of repeated tiles differ from the tile that the host has computed."""
    largest = min(MAX_FACTOR, math.isqrt(2 ** EXACT_BITS[dtype] // TILE))
    generator = torch.Generator().manual_seed(TILE)
    left, right = (  # [TILE, TILE]
        torch.randint(-largest, largest + 1, (TILE, TILE), generator=generator, device="cpu")
        for _ in range(2)
    )
    expected = (left.double() @ right.double()).to(dtype).to(device)
    num_tiles = NUM_TILES.get(device.type, 1)
    tall = left.to(dtype).to(device).repeat(num_tiles, 1)  # [tiles * TILE, TILE]
    wide = right.to(dtype).to(device).repeat(1, num_tiles)  # [TILE, tiles * TILE]
    wanted = expected.repeat(num_tiles, num_tiles)
    runs = [torch.mm(tall, wide) for _ in range(NUM_RUNS)]
    wrong = [int((run != wanted).sum()) for run in runs]
    if not any(wrong):
        return None
    is_steady = all(torch.equal(run, runs[0]) for run in runs)
    return (
        f"{max(wrong)} of {wanted.numel()} elements of a product in {_name(dtype)} are wrong, "
        f"{'the same' if is_steady else 'others'} in each of {NUM_RUNS} runs; "
        f"{_first_difference(runs[wrong.index(max(wrong))], wanted)}"
    )


def _find_wrong_memory(device: torch.device, *, until: float) -> str | None:
    """Return how memory differs from what was written to it: a pattern, then its complement."""
    num_bytes = BLOCK_BYTES if device.type in NUM_BLOCKS else SMALL_BLOCK_BYTES
    length = min(num_bytes, free_memory(device) // FREE_SHARE) // 8  # of 8 bytes each
    blocks: list[Tensor] = []  # [length] each, all kept so that no two share memory
    while len(blocks) < NUM_BLOCKS.get(device.type, 1) and time.monotonic() < until:
        blocks.append(_pattern(length, len(blocks), device))
    for number, block in enumerate(blocks):
        wanted = _pattern(length, number, device)
        for tested, written in ((block, wanted), (block.bitwise_not_(), wanted.bitwise_not_())):
            wrong = int((tested != written).sum())
            if wrong:
                return f"{wrong} of {length} numbers in memory were read otherwise than written"
    return None


def _pattern(length: int, number: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device).mul_(STRIDE).add_(number)


def _first_difference(found: Tensor, wanted: Tensor) -> str:
    row, column = (int(index) for index in (found != wanted).nonzero()[0])
    return (
        f"row {row}, column {column} is {float(found[row, column]):g} "
        f"instead of {float(wanted[row, column]):g}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
