"""Modules with shapes instead of weights, built in one thread beside others that need weights.

Knows neither files nor configs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


class _Builder(threading.local):
    """How many blocks of `shapes_only` this thread is in."""

    depth = 0


_builder = _Builder()


@contextmanager
def shapes_only() -> Iterator[None]:
    """Put parameters that this thread registers on the meta device; buffers stay as they are."""
    _watch_parameters()
    _builder.depth += 1
    try:
        yield
    finally:
        _builder.depth -= 1


@cache
def _watch_parameters() -> None:
    # Once for the process: a hook that comes and goes would meet modules that others are building.
    hook: Any = _shape_of  # whose result torch's annotations do not know
    register_module_parameter_registration_hook(hook)


def _shape_of(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Return what stands for a parameter; None leaves it as it is."""
    if not _builder.depth or parameter is None or parameter.is_meta:
        return None
    shape = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
    shape.__dict__.update(parameter.__dict__)  # marks of the library
    return shape
