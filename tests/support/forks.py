"""Processes of one fork server, which has imported what tests of the transport need."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

IMPORTED = (
    "tests.cluster.transport.test_connection_watch",
    "tests.cluster.transport.test_link",
)
"""Files whose functions run in such processes."""


def forks() -> ForkServerContext:
    """Return the context of the fork server, which runs from the first call to the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    forkserver.ensure_running()
    return context
