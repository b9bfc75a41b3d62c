"""A record of the files of weights that are opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import safetensors


@contextmanager
def recorded_reads() -> Iterator[list[object]]:
    """Record every opening of a file of weights."""
    opened: list[object] = []
    real: Any = safetensors.safe_open

    def record(path: object, *args: Any, **options: Any) -> Any:
        opened.append(path)
        return real(path, *args, **options)

    with (
        patch("specserve.models.checkpoints.tensors.safe_open", record),
        patch("transformers.modeling_utils.safe_open", record),
    ):
        yield opened
