"""Two `specserve serve` on one machine, each with a Ray of its own, as a page of the guide says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ray_server import free_port

pytestmark = pytest.mark.long

SMALL = ["--draft", "none", "--set", "target.threads=1", "--set", "replicas.min=0"]
"""An engine would be started by the first request."""


@contextmanager
def server(port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server by its command line, and yield it once it says that it is ready."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "specserve", "serve", "--port", str(port), *SMALL],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        while f"ready http://127.0.0.1:{port}\n" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def model_at(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as response:
        (model,) = json.load(response)["data"]
        return str(model["id"])


def test_a_second_server_needs_another_port_alone_and_its_end_leaves_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ports = free_port(), free_port()
    logs = [tmp_path / "first", tmp_path / "second"]
    with server(ports[0], logs[0]) as first:
        with server(ports[1], logs[1]) as second:
            assert "starting a Ray of its own, beside the cluster at" in logs[1].read_text()
            assert [model_at(port) for port in ports] == ["demo", "demo"]
        assert second.returncode == 0
        assert model_at(ports[0]) == "demo"
    assert first.returncode == 0
