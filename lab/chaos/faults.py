"""Faults injected into the processes of a server on this machine, found by role in /proc.

Knows neither Ray nor HTTP.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from specserve.errors import BadValue

# Ray titles a process after the method that it runs, so a worker that still loads its weights
# does not match.
TITLES = {
    "draft": re.compile(rb"ray::DraftWorker\.run"),
    "target": re.compile(rb"ray::TargetWorker\.run"),
    "coordinator": re.compile(rb"ray::ServeReplica:[^:]+:Engine\b"),  # of any application
    "controller": re.compile(rb"ray::ServeController"),
}
KILLED, STOPPED = "killed", "stopped"
SIGNALS = {KILLED: signal.SIGKILL, STOPPED: signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was injected. Times are of this machine's monotonic clock."""

    at: float
    role: str
    kind: str  # such as KILLED or STOPPED
    pid: int
    until: float = 0.0  # end of a fault that lasts, such as an update


def parse_roles(roles: str) -> tuple[str, ...]:
    """Return the roles in the value of --roles, which separates them by commas.

    Raises BadValue for an unknown one.
    """
    names = tuple(name.strip() for name in roles.split(","))
    for name in names:
        if name not in TITLES:
            raise BadValue(f"--roles knows {', '.join(TITLES)}, not {name!r}", param="roles")
    return names


def find_pids(role: str) -> list[int]:
    """Return the running processes of a role. Stopped and dead ones do not count."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and _has_role(entry, role)
    ]


def inject_fault(role: str, kind: str, rng: random.Random) -> Fault | None:
    """Kill or stop a random process of a role. Return None if there is none."""
    pids = sorted(find_pids(role))
    if not pids:
        return None
    pid = rng.choice(pids)
    at = time.monotonic()
    try:
        os.kill(pid, SIGNALS[kind])
    except ProcessLookupError:
        return None
    return Fault(at, role, kind, pid)


def _has_role(entry: Path, role: str) -> bool:
    try:
        title = (entry / "cmdline").read_bytes()
        state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:  # it has just ended
        return False
    return TITLES[role].match(title) is not None and state not in (b"T", b"Z", b"X")
