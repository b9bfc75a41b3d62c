"""A worker of another release is refused before it loads its weights, and ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from specserve.cluster.engine import group
from specserve.cluster.engine.group import _open_worker
from specserve.cluster.engine.worker_host import WorkerHello
from specserve.cluster.engine.worker_hosts import StartedWorker
from specserve.cluster.transport.endpoint import Address, KeyPair
from specserve.errors import VersionMismatch
from specserve.wire.version import VERSION


def test_a_worker_of_another_release_is_refused_before_it_opens_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[tuple[str, int]] = []
    monkeypatch.setattr(group, "kill_process", lambda node, pid: killed.append((node, pid)))
    keys = KeyPair.generate()
    theirs = replace(Address("127.0.0.1", 5, keys.public), version=VERSION + 1, release="9.9")
    host = SimpleNamespace()  # its `open` must not be called
    started = StartedWorker("target", 0, host, WorkerHello(theirs, "node", 77))
    with pytest.raises(VersionMismatch, match=rf"\(specserve 9\.9\).* version {VERSION}\b"):
        asyncio.run(_open_worker(started, keys))
    assert killed == [("node", 77)]
