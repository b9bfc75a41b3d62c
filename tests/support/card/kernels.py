"""Triton's kernels on emulated cards: Triton's own interpreter runs them on the host.

That takes a millisecond or more for each block of threads, so tests ask for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from specserve.models.gpu.card_kernels import card_kernels
from specserve.sampling.row_draws import draw_kernel_of
from tests.support.card.ledger import CardError
from tests.support.card.tensors import CARDS, launch


def run_interpreted(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Take the place of `JITFunction.run`."""
    cards = CARDS[-1]

    def interpreted(*args: Any, **options: Any) -> None:
        if cards.has_values:
            interpret(kernel, *args, grid=grid, **options)

    interpreted.__name__ = kernel.fn.__name__
    launch(cards, interpreted, args, options)


def interpret(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
    """Run a kernel on tensors of the host; functions that it calls are interpreted, too."""
    from triton import JITFunction
    from triton.runtime.interpreter import InterpretedFunction

    def call(function: Any, *args: Any, **options: Any) -> Any:
        return InterpretedFunction(function.fn)(*args, **options)

    with mock.patch.object(JITFunction, "__call__", call):
        InterpretedFunction(kernel.fn).run(*args, grid=grid, warmup=False, **options)


def refuse(kernel: Any, *_: Any, **__: Any) -> None:
    """Take the place of `JITFunction.run` where no kernel is interpreted."""
    raise CardError("Triton has no compiler here")


@contextmanager
def no_kernels() -> Iterator[None]:
    """Let every kernel fail that is launched meanwhile, as without a compiler."""
    with _launched_by(refuse):
        yield


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Let Triton interpret the kernels that are launched meanwhile; each is tried again."""
    trials = (card_kernels, draw_kernel_of)
    try:
        for trial in trials:
            trial.cache_clear()
        with _launched_by(run_interpreted):
            yield
    finally:
        for trial in trials:
            trial.cache_clear()


@contextmanager
def _launched_by(run: Any) -> Iterator[None]:
    try:
        from triton import JITFunction
    except ImportError:
        yield
        return
    with mock.patch.object(JITFunction, "run", run):
        yield
