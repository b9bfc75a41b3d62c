"""Find the processes that a test has started, beside others' on the same machine."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def own_processes(pid: int | None = None) -> list[psutil.Process]:
    """Return the processes below this one or `pid`, with fork servers of theirs and the workers."""
    root = psutil.Process(pid or os.getpid())
    found: list[psutil.Process] = root.children(recursive=True)
    owners = {str(one.pid) for one in (root, *found)}
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        if any("fork_server" in part for part in command) and command[-1] in owners:
            with suppress(psutil.NoSuchProcess):
                found += [process, *process.children(recursive=True)]
    return found


def own_processes_named(name: str) -> list[psutil.Process]:
    """Return the processes below this one whose command or title contains `name`."""
    return [one for one in own_processes() if name in command_of(one)]


def name_of(process: psutil.Process) -> str:
    """Return a process's name; empty if it has ended."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        name: str = process.name()
        return name
    return ""


def command_of(process: psutil.Process) -> str:
    """Return a process's command, or the title that it has given itself; empty if it has ended."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return ""
