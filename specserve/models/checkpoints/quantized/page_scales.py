"""Read what a checkpoint says about a KV cache in FP8: its scheme, and the scales of each layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specserve.models.checkpoints.quantized.float8 import is_float8
from specserve.models.checkpoints.quantized.formats import read_format, stated_config
from specserve.models.checkpoints.tensors import StoredTensors
from specserve.models.float8_pages import UNSCALED, PageScales

SCALE = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)*([kv])_scale$")


def states_float8_pages(directory: Path) -> bool:
    """Return whether a checkpoint's config asks for a KV cache in FP8 with scales of layers."""
    if read_format(directory) is None:
        return False
    scheme: Any = stated_config(directory).get("kv_cache_scheme")
    return (
        is_float8(scheme)
        and scheme.get("strategy", "tensor") == "tensor"
        and scheme.get("dynamic") is not True
    )


def read_page_scales(stored: StoredTensors, layers: Sequence[int]) -> list[PageScales]:
    """Return the scales of these layers; 1 where a checkpoint has none."""
    found: dict[tuple[int, str], float] = {}
    for name in stored.names():
        if (match := SCALE.search(name)) is not None:
            found[int(match[1]), match[2]] = float(stored.read(name).float().amax())
    return [
        PageScales(found.get((layer, "k"), UNSCALED.keys), found.get((layer, "v"), UNSCALED.values))
        for layer in layers
    ]
