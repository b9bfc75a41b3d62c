"""Copies between the host and a device, with as few waits of the host as can be.

Knows tensors and arrays, no models.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DTYPES = {torch.int64: np.int64, torch.float32: np.float32}
"""Types that are fetched from devices."""


def to_device(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """Return an array as a tensor of the device.

    From pinned memory a copy to a GPU is enqueued after the work there; any other copy would wait
    for that work. On the CPU nothing is copied.
    """
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[NDArray[Any]]:
    """Return tensors of one device as arrays, after a single wait for it."""
    if tensors[0].is_cpu:
        return [tensor.numpy() for tensor in tensors]
    if len(tensors) == 1:
        return [tensors[0].cpu().numpy()]
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    joined = torch.cat(parts).cpu().numpy()
    ends = accumulate((len(part) for part in parts), initial=0)
    arrays = [joined[first:stop] for first, stop in pairwise(ends)]
    return [
        array.copy().view(DTYPES[tensor.dtype]).reshape(tensor.shape)  # copied: aligned
        for array, tensor in zip(arrays, tensors, strict=True)
    ]
