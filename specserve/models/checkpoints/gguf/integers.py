"""Take integers, scales and minima out of the blocks of ggml's types that are made of such."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int8]
Floats = NDArray[np.float32]
Parts = tuple[Numbers, Floats] | tuple[Numbers, Floats, Floats]


def split_blocks(blocks: Bytes, kind: str) -> list[Tensor]:
    """Return the integers [blocks, numbers] in int8, and their scales [blocks, groups] in fp32.

    A third tensor is of the groups' minima, if the type has any.
    """
    return [torch.from_numpy(part) for part in SPLITS[kind](np.array(blocks))]


def _q8_0(blocks: Bytes) -> Parts:
    return blocks[:, 2:].view(np.int8).copy(), _half(blocks[:, :2])


def _q4_0(blocks: Bytes) -> Parts:
    return _halves(blocks[:, 2:]).view(np.int8) - np.int8(8), _half(blocks[:, :2])


def _q5_0(blocks: Bytes) -> Parts:
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little") << 4
    codes = _halves(blocks[:, 6:]) | fifth
    return codes.view(np.int8) - np.int8(16), _half(blocks[:, :2])


def _q6_k(blocks: Bytes) -> Parts:
    low = _fields(blocks[:, :128], 64, (0, 4)) & 15
    high = _fields(blocks[:, 128:192], 32, (0, 2, 4, 6)) & 3
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (low | high << 4).view(np.int8) - np.int8(32), scales * _half(blocks[:, 208:])


def _q4_1(blocks: Bytes) -> Parts:
    codes = _halves(blocks[:, 4:]).view(np.int8)
    return codes, _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q5_1(blocks: Bytes) -> Parts:
    fifth = np.unpackbits(blocks[:, 4:8], axis=1, bitorder="little") << 4
    codes = (_halves(blocks[:, 8:]) | fifth).view(np.int8)
    return codes, _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q4_k(blocks: Bytes) -> Parts:
    codes = _fields(blocks[:, 16:], 32, (0, 4)) & 15
    return codes.view(np.int8), *_scales_and_minima(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    fifth = _fields(blocks[:, 16:48], 32, tuple(range(8))) & 1
    codes = _fields(blocks[:, 48:], 32, (0, 4)) & 15
    return (codes | fifth << 4).view(np.int8), *_scales_and_minima(blocks)


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return the scales and minima of the 8 groups of a block of Q4_K or Q5_K.

    They have 6 bits each. The last four groups' lie in the upper two bits of the first four's
    bytes, and in the halves of four bytes of their own.
    """
    scales, minima, halves = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    of_scales = np.concatenate([scales & 63, halves & 15 | scales >> 6 << 4], axis=1)
    of_minima = np.concatenate([minima & 63, halves >> 4 | minima >> 6 << 4], axis=1)
    return (
        _half(blocks[:, :2]) * of_scales.astype(np.float32),
        -_half(blocks[:, 2:4]) * of_minima.astype(np.float32),
    )


def _half(data: Bytes) -> Floats:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _halves(data: Bytes) -> Bytes:
    """Return the lower halves of all bytes of a block, and then the upper ones."""
    return np.concatenate((data & 15, data >> 4), axis=1)


def _fields(data: Bytes, width: int, shifts: tuple[int, ...]) -> Bytes:
    """Return runs of `width` bytes, each of them once shifted by each of the shifts."""
    runs = data.reshape(len(data), -1, 1, width)
    shifted: Bytes = runs >> np.array(shifts, np.uint8).reshape(-1, 1)
    return shifted.reshape(len(data), -1)


SPLITS: Mapping[str, Callable[[Bytes], Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
GROUPS: Mapping[str, int] = {kind: 16 if kind == "Q6_K" else 32 for kind in SPLITS}
"""Numbers that share a scale."""
WITH_MINIMA = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
"""Types whose numbers have the minimum of their group added."""
