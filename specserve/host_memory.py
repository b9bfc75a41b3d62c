"""Memory of the host that a process can still take. Knows no devices and no models."""

from __future__ import annotations

import os
from pathlib import Path

from specserve.claimed_memory import ClaimedMemory

MEMINFO, OWN_GROUP, GROUPS = (
    Path("/proc/meminfo"),
    Path("/proc/self/cgroup"),
    Path("/sys/fs/cgroup"),
)


def available_memory() -> int:
    """Return the bytes that this process can take without swapping.

    Files that the system keeps in memory count as available, since it drops them when memory is
    wanted: on a host that has read checkpoints they fill nearly all of it.
    """
    available = [_available_on_host(), _left_in_group()]
    least = min(one for one in available if one is not None)
    return max(0, least - ClaimedMemory.num_unclaimed())


def _available_on_host() -> int:
    if MEMINFO.exists():
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_group() -> int | None:
    """Return what the limit of this process's control group leaves; None without a limit.

    Containers have one (version 2 of control groups).
    """
    try:
        own = next(
            line.split(":", 2)[2]
            for line in OWN_GROUP.read_text(encoding="utf-8").splitlines()
            if line.startswith("0::")
        )
        group = GROUPS / own.lstrip("/")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = dict(
            line.split()
            for line in (group / "memory.stat").read_text(encoding="ascii").splitlines()
        )
        files = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        return max(0, int(limit) - used + files)
    except (OSError, StopIteration, ValueError):
        return None
