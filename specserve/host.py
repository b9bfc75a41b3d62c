"""Memory and cores that a process can take of its host. Knows no devices and no models."""

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


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    `taskset` and Kubernetes' static CPU manager leave it certain cores; `docker run --cpus` and
    systemd's `CPUQuota` limit the time that its control group has: 2.5 cores count as 2.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min(cores, int(_quota())))


def _quota() -> float:
    """Return the cores that this process's group, or one around it, has the time of."""
    least = float(os.cpu_count() or 1)
    try:
        group = _own_group()
        for one in (group, *group.parents):
            if one != GROUPS and GROUPS not in one.parents:
                break
            if (one / "cpu.max").exists():
                stated, period = (one / "cpu.max").read_text(encoding="ascii").split()
                if stated != "max":
                    least = min(least, int(stated) / int(period))
    except (OSError, StopIteration, ValueError, ZeroDivisionError):
        pass  # a system without such groups
    return least


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
        group = _own_group()
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


def _own_group() -> Path:
    """Return the folder of this process's control group (version 2)."""
    own = next(
        line.split(":", 2)[2]
        for line in OWN_GROUP.read_text(encoding="utf-8").splitlines()
        if line.startswith("0::")
    )
    return GROUPS / own.lstrip("/")
