"""Find out whether a process of this or another node runs. Knows no links.

Importing this module is cheap: the Ray task on another node imports nothing else.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import ray
from ray.exceptions import NodeDiedError, RayError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ANSWER_TIMEOUT_S = 5.0
"""Time for another node's answer, which may have to start a process for it."""
STOPPED_OR_DEAD = frozenset("TtZXx")
"""States of proc_pid_stat(5): stopped, stopped by a debugger, zombie, dead."""


def process_runs(pid: int) -> bool | None:
    """Return whether a process of this machine runs, or None where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False if Path("/proc/self/stat").exists() else None
    return stat.rpartition(")")[2].split()[0] not in STOPPED_OR_DEAD


async def process_runs_on(node: str, pid: int) -> bool | None:
    """Return whether a process of this or another node runs, or None if that is unknown.

    True if the node does not answer in time: the network between may be broken, not the process.
    """
    if node == ray.get_runtime_context().get_node_id():
        return process_runs(pid)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": strategy, "max_retries": 0}
    answer = ray.remote(process_runs).options(**options).remote(pid)
    try:
        runs: bool | None = await asyncio.wait_for(answer, ANSWER_TIMEOUT_S)
    except (NodeDiedError, TaskUnschedulableError):
        return False
    except (RayError, TimeoutError):
        return True
    return runs
