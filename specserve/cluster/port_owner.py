"""The process that listens on a port of this machine, as far as this user may see it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENING = "0A"


def port_owner(port: int) -> str | None:
    """Return name and id of a process that listens on a port; None if it is not to be seen."""
    sockets = {f"socket:[{inode}]" for inode in _listening_sockets(port)}
    for file in Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):
            if os.readlink(file) in sockets:
                process = file.parents[1]
                name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"{name} (process {process.name})"
    return None


def _listening_sockets(port: int) -> Iterator[str]:
    for table in TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                columns = line.split()
                address, state, inode = columns[1], columns[3], columns[9]
                if state == LISTENING and int(address.rpartition(":")[2], 16) == port:
                    yield inode
