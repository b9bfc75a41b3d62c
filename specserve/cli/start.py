"""Start and end a command that opens models without what takes time and changes nothing."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from specserve.config.tree import Config

INTERRUPTED = 130
"""Exit code of what SIGINT ends, as of a shell's commands."""


@contextmanager
def quick_start(config: Config) -> Iterator[None]:
    """Import and load modules in this context.

    Kernels compile on another core meanwhile: LLVM holds no lock of Python. Modules are never
    garbage, and to search them at every threshold took a tenth of `specserve generate`.
    """
    gc.disable()
    compiling = threading.Thread(target=_compile, args=(config,), name="compile")
    # Both threads would import torch and wait for one another.
    import torch  # noqa: F401

    compiling.start()
    try:
        yield
    finally:
        compiling.join()
        gc.enable()


def quick_exit(code: int) -> NoReturn:
    """Exit without taking the modules apart, which took a second. Nothing else may be running."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # its reader has gone
            code = code or 1
    os._exit(code)


def _compile(config: Config) -> None:
    from specserve.models.cpu.linear_kernels import compile_ahead

    if config.weights.kernel != "onednn" and config.target.device in ("auto", "cpu"):
        compile_ahead()
