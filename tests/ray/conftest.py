"""One fork server for the workers of these tests, and one Ray with Serve for most modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specserve.cluster.checkpoint_check import checkpoint_check
from specserve.config.tree import config_from_keys
from tests.support.ray_server import SharedServe, shared_ray

BESIDE_OTHERS = {
    # Ray's own niceness of 15 lets its workers hardly run beside the other lane of the tests.
    "RAY_worker_niceness": "0",
    # A thread that waits for another would otherwise keep it from its core.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Environment of processes on a machine whose few cores have other work, too."""


@pytest.fixture(scope="session", autouse=True)
def beside_others() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in BESIDE_OTHERS.items():
            patch.setenv(name, value)
        # A handle that polls for news of its deployment as this process leaves a Ray would join the
        # next one by itself.
        patch.setattr("ray._private.auto_init_hook.enable_auto_connect", False)
        yield


@pytest.fixture(scope="session", autouse=True)
def fork_server(beside_others: None) -> Iterator[None]:
    """Import torch once for the workers of all servers, as `specserve serve` does for its own."""
    with checkpoint_check(config_from_keys({})) as wait:
        wait()
        yield


@pytest.fixture(scope="session")
def shared_serve(fork_server: None) -> Iterator[SharedServe]:
    """Start a Ray and its Serve on which modules deploy in turn; this process joins and leaves."""
    with shared_ray() as serve:
        yield serve
