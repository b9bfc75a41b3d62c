"""Processes of one fork server, which has imported what is slow to import."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import start_processes

IMPORTED = (
    "tests.cluster.transport.test_connection_watch",
    "tests.cluster.transport.test_link",
    "specserve.cluster.engine.forked_worker",
    "tests.support.engines",
)
"""Files whose functions run in such processes, and what imports and compiles for all."""


def forks() -> ForkServerContext:
    """Return the context of the fork server, which runs from the first call to the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    forkserver.ensure_running()
    return context


def run_ranks(rank_main: Callable[[int, str], None], root: Path, *, ranks: int) -> None:
    """Call a function with each rank and a directory, each rank in a process of its own."""
    forks()
    start: Any = start_processes
    start(rank_main, (str(root),), nprocs=ranks, start_method="forkserver")
