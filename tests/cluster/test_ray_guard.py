"""The guard of a Ray of our own ends what is left of it, also when we are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ray._private import services

from specserve.cluster.port_owner import port_owner
from specserve.cluster.ray_guard import RayGuard

PATIENCE_S = 60.0
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
KILLED = f"""
import subprocess, sys
from ray._private import services
from specserve.cluster.ray_guard import RayGuard
guard, sleep = RayGuard(sys.argv[1]), {SLEEP!r}
with guard.group():
    print(services.ConsolePopen(sleep, creationflags=0).pid)
print(subprocess.Popen([*sleep, sys.argv[1] + "/haproxy.cfg"], start_new_session=True).pid)
sys.stdout.flush()
sys.stdin.read()
"""


def test_it_ends_its_group_and_what_has_a_file_in_the_directory_when_we_are_killed(
    tmp_path: Path,
) -> None:
    (directory := tmp_path / "of-the-proxy").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as owner:
        assert owner.stdout is not None
        left = [psutil.Process(int(owner.stdout.readline())) for _ in range(2)]
        assert os.getpgid(left[0].pid) not in (owner.pid, left[0].pid), "it is in the guard's group"
        os.killpg(owner.pid, signal.SIGTERM)
        owner.wait()
        _, alive = psutil.wait_procs(left, timeout=PATIENCE_S)
    assert alive == []
    assert not directory.exists()


def test_closed_it_ends_what_ray_has_left_and_ray_starts_as_before(tmp_path: Path) -> None:
    before = services.ConsolePopen
    guard = RayGuard(str(tmp_path / "none"))
    with guard.group():
        left = services.ConsolePopen(SLEEP, creationflags=0)
    assert services.ConsolePopen is before
    guard.close()
    assert left.wait(PATIENCE_S) == -signal.SIGKILL


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_owner_of_a_port_is_named() -> None:
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
    code += "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        port = int(owner.stdout.readline())
        assert f"(process {owner.pid})" in (port_owner(port) or "")
        owner.kill()
        owner.wait()
        assert port_owner(port) is None
