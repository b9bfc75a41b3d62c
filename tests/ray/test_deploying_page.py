"""The block of deploying.md that starts a Ray for others runs as it stands, where no others are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import DOCS, ROOT, blocks_of

pytestmark = pytest.mark.long

LIMIT_S = 400.0
APART = (
    *("unshare", "--user", "--map-root-user", "--net"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)
"""Ports and processes of its own, so that `ray stop` finds the block's alone."""
PREPARE = """set -e
mount -t tmpfs tmpfs /tmp && mkdir /tmp/home && export HOME=/tmp/home
python -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 0x41))  # SIOCSIFFLAGS: up, running'
"""
STATUS = "serve status "
WAIT = "until serve status | grep -q 'status: RUNNING'; do sleep 1; done "


def test_serve_deploy_serves_a_request_and_ends_as_the_page_says() -> None:
    if shutil.which("curl") is None or subprocess.run([*APART, "true"], check=False).returncode:
        pytest.skip("needs curl, and namespaces of the kernel that this user may make")
    page = DOCS / "guides" / "deploying.md"
    found = blocks_of(page, page.read_text(encoding="utf-8"))
    (text,) = [block.text for block in found if "ray get-auth-token" in block.text]
    assert STATUS in text
    here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*APART, "bash", "-c", PREPARE + text.replace(STATUS, WAIT)],
        cwd=ROOT,
        env=os.environ | here,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"object":"text_completion"' in done.stdout
    assert "Ray processes" in done.stdout + done.stderr, "`ray stop` ended them"
