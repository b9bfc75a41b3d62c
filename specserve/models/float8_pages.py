"""Keys and values in pages of FP8 numbers, with two scales a layer. Knows no files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specserve.models.float8_weight import FLOAT8, LARGEST_FLOAT8

STORED_AS = torch.uint8
"""What operations that copy numbers take FP8 for: torch has not all of them for its own type."""


@dataclass(frozen=True, slots=True)
class PageScales:
    """The scales of a layer: a key is the number in its page, times `keys`."""

    keys: float = 1.0
    values: float = 1.0


UNSCALED = PageScales()


def to_float8(x: Tensor, scale: float) -> Tensor:
    """Return x / scale in FP8, as bytes; what is too large is cut off."""
    scaled = x if scale == 1.0 else x.float() / scale
    return scaled.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8).view(STORED_AS)
