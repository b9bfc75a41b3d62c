"""The fork server: what a forked process has, when it ends, and when the server ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from specserve.cluster.engine import fork_server

PATIENCE_S = 60.0
Fork = Callable[..., Connection]


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """Yield the process with which the fork server of a test ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def fork(parent: subprocess.Popen[bytes]) -> Iterator[Fork]:
    """Yield a function that forks from a fork server of this test alone."""
    key, connections = uuid.uuid4().hex, list[Connection]()

    def fork(*modules: str) -> Connection:
        connection = fork_server.fork(
            key, modules, parent_pid=parent.pid, worker_module="tests.support.echo_worker"
        )
        connections.append(connection)
        return connection

    yield fork
    for connection in connections:
        connection.close()


def ask(connection: Connection, question: object) -> Any:
    connection.send(question)
    assert connection.poll(PATIENCE_S), "the forked process does not answer"
    return connection.recv()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_processes_are_forked_from_one_server_that_has_imported_once(fork: Fork) -> None:
    first, second = (ask(connection, "process") for connection in (fork(), fork()))
    assert first[0] != second[0]
    assert first[1] == second[1] == first[2] == second[2]


def test_a_forked_process_shares_the_cores_of_its_session_and_gets_no_ctrl_c(fork: Fork) -> None:
    pid = ask(fork(), "process")[0]
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) != os.getpgid(0)


def test_modules_that_one_worker_needs_are_there_for_the_next_and_unknown_ones_do_no_harm(
    fork: Fork,
) -> None:
    assert not ask(fork(), ("imported", "colorsys"))
    assert ask(fork("no.such.module", "colorsys"), ("imported", "colorsys"))
    assert ask(fork(), ("imported", "colorsys"))


def test_the_imports_of_workers_start_no_threads_which_a_fork_would_lose() -> None:
    script = (
        "import os, specserve.cluster.engine.forked_worker, torch\n"
        "print(len(os.listdir('/proc/self/task')), torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | fork_server.FORK_SAFE,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", "False"]


def test_a_forked_process_has_the_environment_and_the_output_of_the_process_that_asked(
    fork: Fork, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fork()  # the server has the environment from before
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    connection = fork()
    assert ask(connection, ("variable", "CUDA_VISIBLE_DEVICES")) == "3,1"
    ask(connection, ("print", "from the fork"))
    assert "from the fork" in capfd.readouterr().out


def test_a_forked_process_ends_with_its_connection_whatever_it_is_doing(fork: Fork) -> None:
    connection = fork()
    pid = ask(connection, "process")[0]
    connection.send("sleep")
    connection.close()
    until(lambda: not psutil.pid_exists(pid))


def test_a_killed_process_ends_its_connection(fork: Fork) -> None:
    connection = fork()
    psutil.Process(ask(connection, "process")[0]).kill()
    assert connection.poll(PATIENCE_S)
    with pytest.raises((EOFError, ConnectionError)):
        connection.recv()


def test_a_killed_server_leaves_its_workers_alone_and_is_replaced(fork: Fork) -> None:
    before = fork()
    server = ask(before, "process")[1]
    psutil.Process(server).kill()
    until(lambda: not psutil.pid_exists(server))
    assert ask(fork(), "process")[1] != server
    assert ask(before, "process")[2] == server


def test_the_server_ends_with_its_parent(fork: Fork, parent: subprocess.Popen[bytes]) -> None:
    server = ask(fork(), "process")[1]
    parent.kill()
    parent.wait()
    until(lambda: not psutil.pid_exists(server))


def test_hosts_that_start_at_once_share_one_server(fork: Fork) -> None:
    with ThreadPoolExecutor(8) as pool:
        connections = list(pool.map(lambda _: fork(), range(8)))
    assert len({ask(connection, "process")[1] for connection in connections}) == 1
    assert os.getpid() not in {ask(connection, "process")[1] for connection in connections}
