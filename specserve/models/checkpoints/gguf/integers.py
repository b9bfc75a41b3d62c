"""Take the integers and the scales out of the blocks of ggml's types that are such products.

Types whose numbers have a minimum added (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K) are none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int8]


def split_blocks(blocks: Bytes, kind: str) -> tuple[Tensor, Tensor]:
    """Return the integers [blocks, numbers] in int8, and their scales [blocks, groups] in fp32."""
    integers, scales = SPLITS[kind](np.array(blocks))
    return torch.from_numpy(integers), torch.from_numpy(scales)


def _q8_0(blocks: Bytes) -> tuple[Numbers, NDArray[np.float32]]:
    return blocks[:, 2:].view(np.int8).copy(), _half(blocks[:, :2])


def _q4_0(blocks: Bytes) -> tuple[Numbers, NDArray[np.float32]]:
    return _halves(blocks[:, 2:]).view(np.int8) - np.int8(8), _half(blocks[:, :2])


def _q5_0(blocks: Bytes) -> tuple[Numbers, NDArray[np.float32]]:
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little") << 4
    codes = _halves(blocks[:, 6:]) | fifth
    return codes.view(np.int8) - np.int8(16), _half(blocks[:, :2])


def _q6_k(blocks: Bytes) -> tuple[Numbers, NDArray[np.float32]]:
    low = _fields(blocks[:, :128], 64, (0, 4)) & 15
    high = _fields(blocks[:, 128:192], 32, (0, 2, 4, 6)) & 3
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (low | high << 4).view(np.int8) - np.int8(32), scales * _half(blocks[:, 208:])


def _half(data: Bytes) -> NDArray[np.float32]:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _halves(data: Bytes) -> Bytes:
    """Return the lower halves of all bytes of a block, and then the upper ones."""
    return np.concatenate((data & 15, data >> 4), axis=1)


def _fields(data: Bytes, width: int, shifts: tuple[int, ...]) -> Bytes:
    """Return runs of `width` bytes, each of them once shifted by each of the shifts."""
    runs = data.reshape(len(data), -1, 1, width)
    shifted: Bytes = runs >> np.array(shifts, np.uint8).reshape(-1, 1)
    return shifted.reshape(len(data), -1)


SPLITS: Mapping[str, Callable[[Bytes], tuple[Numbers, NDArray[np.float32]]]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q6_K": _q6_k,
}
GROUPS: Mapping[str, int] = {"Q8_0": 32, "Q4_0": 32, "Q5_0": 32, "Q6_K": 16}
"""Numbers that share a scale."""
