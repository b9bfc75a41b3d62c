"""A process of each node that has imported torch and transformers, and forks the workers there.

A worker forked from it starts in milliseconds and shares the memory of the imports. It ends a
while after its last worker, or with the Ray node. Knows Unix sockets and processes; no models.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
WORKER_MODULE = "specserve.cluster.engine.forked_worker"
KEY_VARIABLE = "SPECSERVE_FORK_SERVER"
"""Environment variable with the key of a fork server that was started before Ray."""
FORK_SAFE = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for GPUs must not initialise CUDA
    "OPENBLAS_NUM_THREADS": "1",  # numpy would start threads at its import
}
"""Environment in which the imports leave nothing that a forked process could not use."""
LINGER_S = 60.0
"""Time without workers after which it ends; until then a replica may come to replace a lost one."""
CHECK_EVERY_S = 0.5
BACKLOG = 64
MAX_RECEIVED = 2**16  # bytes at once
HEADER = struct.Struct("!I")  # length of a request
Work = Callable[[Connection], None]
"""What a forked process does with its end of the connection."""


def fork(
    key: str, modules: Sequence[str], *, parent_pid: int, worker_module: str = WORKER_MODULE
) -> Connection:
    """Return a connection to a newly forked process, after starting a fork server if need be.

    `key` names the fork server on this machine; it ends with the process `parent_pid`. `modules`
    are imported before the fork, so that later forks have them. The process takes over this
    process's environment and output, calls `work` of `worker_module` with its end of the
    connection, and ends when this end is closed.
    """
    connected = _connect(_address(f"{worker_module} {key}"), worker_module, parent_pid)
    try:
        _check_user(connected)
        request = json.dumps([list(modules), dict(os.environ)]).encode()
        socket.send_fds(connected, [HEADER.pack(len(request)) + request], [1, 2])
    except BaseException:
        connected.close()
        raise
    return Connection(connected.detach())


def _address(key: str) -> str:
    """Return the address of a fork server of this user, interpreter and code."""
    identity = [key, os.getuid(), sys.executable, str(PACKAGE), _code_version()]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    name = f"specserve-fork-{digest[:32]}"
    return f"\0{name}" if sys.platform == "linux" else f"{tempfile.gettempdir()}/{name}"


@cache
def _code_version() -> int:
    """Return the time of the newest file, as this process has found it."""
    return max(file.stat().st_mtime_ns for file in PACKAGE.rglob("*.py"))


def _connect(address: str, worker_module: str, parent_pid: int) -> socket.socket:
    """Connect to the fork server, or start one; of two that start one at once, one succeeds."""
    while True:
        connected = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            connected.connect(address)
            return connected
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
            if not address.startswith("\0"):
                Path(address).unlink(missing_ok=True)
            listener.bind(address)
            listener.listen(BACKLOG)
            connected.connect(address)  # answered once the imports are done
            _start(listener, worker_module, parent_pid)
            return connected
        connected.close()


def _check_user(connected: socket.socket) -> None:
    """Raise PermissionError if the socket that accepts the connection is another user's."""
    if sys.platform == "linux":
        length = struct.calcsize("3i")
        peer = struct.unpack(
            "3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, length)
        )
        if peer[1] != os.getuid():
            raise PermissionError("the socket of the fork server belongs to another user")


def _start(listener: socket.socket, worker_module: str, parent_pid: int) -> None:
    """Start a fork server that is no child of this process, whose end it survives."""
    command = "from specserve.cluster.engine.fork_server import main; main()"
    subprocess.run(
        [sys.executable, "-c", command, str(listener.fileno()), worker_module, str(parent_pid)],
        pass_fds=[listener.fileno()],
        env=os.environ | FORK_SAFE | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        # It may outlive us for a while, and must not hold open what reads our output. A forked
        # process has the output of the one that requested it.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # No session of its own: Linux divides the cores among sessions first, and beside a busy one
        # a session that waits often may get next to nothing.
        process_group=0,
        check=True,
    )


def main() -> None:
    """Import, then fork a process for each connection, until there are no more workers."""
    if os.fork():
        os._exit(0)
    listener, parent_pid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[3])
    work = importlib.import_module(sys.argv[2]).work
    gc.collect()
    children: set[int] = set()
    busy_at = time.monotonic()
    while _runs(parent_pid) and time.monotonic() - busy_at < LINGER_S:
        if select.select([listener], [], [], CHECK_EVERY_S)[0]:
            connected = listener.accept()[0]
            with connected, contextlib.suppress(EOFError, OSError):  # its owner has gone
                children.add(_fork_for(connected, listener, work))
        children -= {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
        if children:
            busy_at = time.monotonic()


def _fork_for(connected: socket.socket, listener: socket.socket, work: Work) -> int:
    """Fork a process for a connection and return its id."""
    modules, environment, output = _receive_request(connected)
    for module in modules:
        with contextlib.suppress(Exception):  # the worker says what is wrong with its model
            importlib.import_module(module)
    gc.freeze()  # collections in the forked process would copy these pages
    child = os.fork()
    if not child:
        listener.close()
        _run(work, Connection(connected.detach()), environment, output)
    for descriptor in output:
        os.close(descriptor)
    return child


def _receive_request(connected: socket.socket) -> tuple[list[str], dict[str, str], list[int]]:
    data, output, _, _ = socket.recv_fds(connected, MAX_RECEIVED, 2)
    while len(data) < HEADER.size or len(data) < HEADER.size + HEADER.unpack_from(data)[0]:
        if not (more := connected.recv(MAX_RECEIVED)):
            raise EOFError
        data += more
    modules, environment = json.loads(data[HEADER.size :])
    return modules, environment, list(output)


def _run(
    work: Work, connection: Connection, environment: dict[str, str], output: list[int]
) -> None:
    """Be the worker, and never return."""
    code = 1
    try:
        for descriptor, standard in zip(output, (1, 2), strict=True):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        threading.Thread(target=_exit_with_owner, args=(connection.fileno(),), daemon=True).start()
        work(connection)
        code = 0
    except EOFError:  # the owner has gone
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_with_owner(descriptor: int) -> None:
    """End this process when the other end of its connection is closed, whatever it is doing."""
    hangup = select.poll()
    hangup.register(descriptor, 0)  # hangups are always reported
    hangup.poll()
    os._exit(0)


def _runs(pid: int) -> bool:
    """Return whether a process has not ended; one that was not waited for has."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
