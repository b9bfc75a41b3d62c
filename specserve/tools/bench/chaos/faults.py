"""The processes of a server on this machine, by what they do. Reads /proc; knows neither Ray nor HTTP."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from specserve.errors import BadValue

TITLES = {  # Ray names its processes after what they run; workers that are at work, not those that still read their weights
    "draft": "ray::DraftWorker.run",
    "target": "ray::TargetWorker.run",
    "coordinator": "ray::ServeReplica:specserve:Engine",
    "controller": "ray::ServeController",
}
KILLED, STOPPED = "killed", "stopped"
SIGNALS = {KILLED: signal.SIGKILL, STOPPED: signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Blow:
    """What was done to whom, and when, by this machine's monotonic clock."""

    at: float
    role: str
    how: str  # KILLED or STOPPED
    pid: int
    until: float = 0.0  # of what takes a while


def check_roles(roles: str) -> tuple[str, ...]:
    """Of an option: names with commas between them."""
    names = tuple(name.strip() for name in roles.split(","))
    for name in names:
        if name not in TITLES:
            raise BadValue(f"--chaos knows {', '.join(TITLES)}, not {name!r}", param="chaos")
    return names


def processes(role: str) -> list[int]:
    """Those that run now; what is stopped or dead has left."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and _plays(entry, role)
    ]


def strike(role: str, how: str, chance: random.Random) -> Blow | None:
    """One of them, if there are any."""
    pids = sorted(processes(role))
    if not pids:
        return None
    pid = chance.choice(pids)
    at = time.monotonic()
    try:
        os.kill(pid, SIGNALS[how])
    except ProcessLookupError:
        return None
    return Blow(at, role, how, pid)


def _plays(entry: Path, role: str) -> bool:
    try:
        title = (entry / "cmdline").read_bytes()
        state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:  # it has just ended
        return False
    return title.startswith(TITLES[role].encode()) and state not in (b"T", b"Z", b"X")
