"""`specserve serve` as a process: what it prints, how it ends, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from rich.console import Console

from specserve.cli import serve as serve_command
from specserve.cli.main import main
from specserve.config.tree import Config, config_from_keys
from specserve.errors import ConfigError, Unavailable
from tests.support.processes import command_of, name_of, own_processes
from tests.support.ray_server import free_port

PATIENCE_S = 300.0  # on two otherwise idle cores it takes some 25 s
EMPTY = ("--set", "replicas.min=0", "--set", "replicas.upscale_delay_s=60")
"""Options of a server without engines; the first request would start one."""


def serve(*arguments: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "specserve",
        "serve",
        "--set",
        "target.threads=1",
        "--set",
        "draft.threads=1",
        "--set",
        "demo.size=none",
        *arguments,
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as of systemd, with a process group of its own
    )


def lines_until(process: subprocess.Popen[str], beginning: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith(beginning):
            return lines
    assert process.stderr is not None
    raise AssertionError(f"no line begins with {beginning!r}: {lines} {process.stderr.read()}")


def own_files() -> set[Path]:
    """Return what servers keep in /tmp; tests that run beside these have files of other names."""
    return set(Path("/tmp").glob("specserve-*")) - set(Path("/tmp").glob("specserve-gpu-*"))


def titles(processes: list[psutil.Process]) -> list[str]:
    """Return names and command lines of those that still run."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found.append(f"{process.name()} {' '.join(process.cmdline())}")
    return found


def require_free(port: int) -> None:
    """Raise OSError if something listens on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def models(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
        return [model["id"] for model in json.load(answer)["data"]]


@pytest.mark.long
def test_one_of_two_servers_is_killed_and_the_other_ends_with_ctrl_c() -> None:
    """Start two servers without engines at the same time, each on a Ray of its own."""
    ports, before = (free_port(), free_port()), own_files()
    first, second = (serve("--port", str(port), *EMPTY) for port in ports)
    try:
        for process in (first, second):
            lines_until(process, "curl ")
        started = own_processes(first.pid)
        assert any("haproxy" in title for title in titles(started))
        first.kill()
        _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
        assert alive == []
        require_free(ports[0])
        assert models(ports[1]) == ["demo"]
        os.killpg(second.pid, signal.SIGINT)
        _, errors = second.communicate(timeout=PATIENCE_S)
        assert (second.returncode, "Traceback" in errors) == (0, False)
        require_free(ports[1])
        assert own_files() <= before
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("killed", ["raylet", "the command"])
def test_a_server_of_which_a_part_is_killed_ends_and_leaves_nothing(killed: str) -> None:
    """Kill what requests, and Ctrl-C, would otherwise wait for."""
    port, before = free_port(), own_files()
    process = serve("--port", str(port), "--set", "replicas.min=0")
    try:
        lines_until(process, "curl ")
        started = own_processes(process.pid)
        if killed == "raylet":
            next(one for one in started if name_of(one) == "raylet").kill()
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 1
            assert "Ray's raylet has ended, and the server with it" in errors
        else:
            process.kill()
        _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
        assert alive == []
        require_free(port)
        assert own_files() <= before
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("killed", "line", "code"), [("ray::", "curl ", 0), ("gcs_server", "  board", 130)]
)
def test_ctrl_c_ends_a_server_whose_ray_has_just_been_killed(
    killed: str, line: str, code: int
) -> None:
    """Kill Serve's processes with Ray's agents, and Ray's server, which calls of Ray wait for.

    The server is ready, or still starts, where such a call holds the main thread.
    """
    port, before = free_port(), own_files()
    process = serve("--port", str(port), *EMPTY)
    try:
        lines_until(process, line)
        started = own_processes(process.pid)
        process.send_signal(signal.SIGSTOP)  # or it might see first that Ray has ended
        for one in started:
            if command_of(one).startswith(killed) or name_of(one) == killed:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, "Traceback" in errors) == (code, False)
        _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
        assert alive == []
        require_free(port)
        assert own_files() <= before
    finally:
        process.kill()
        process.communicate()


def test_it_says_when_it_is_ready_and_a_signal_leaves_nothing_behind() -> None:
    port, before = free_port(), own_files()
    process = serve("--port", str(port))
    try:
        lines = lines_until(process, "curl ")
        assert f"ready http://127.0.0.1:{port}" in lines
        body = json.dumps({"model": "demo", "prompt": "import os", "max_tokens": 4}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        started = own_processes(process.pid)
        # Other tests may start servers at the same time: this one's is named by its proxy.
        words = " ".join(titles(started))
        directories = [path for path in own_files() - before if str(path) in words]
        assert len(directories) == 1
        assert any("TargetWorker" in title for title in titles(started))
        process.terminate()  # as `timeout` does: once to the process, once to its group
        os.killpg(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert "Traceback" not in errors
        _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
        assert alive == []
        assert not directories[0].exists()
        require_free(port)
    finally:
        process.kill()
        process.communicate()


def test_a_cluster_that_cannot_serve_is_said_in_one_line() -> None:
    process = serve("--port", str(free_port()), "--set", "target.device=cuda")
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "needs 1 GPU (target-0 1), the cluster has 0" in errors
    assert len(errors.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "missing/entirely/model"], "missing/entirely/model does not exist"),
        (
            ["--set", "speculation.gama=3"],
            "unknown key speculation.gama; did you mean speculation.gamma?",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", str(free_port()), *arguments]) == 2
    errors = capfd.readouterr().err
    assert message in errors
    assert len(errors.strip().splitlines()) == 1


@pytest.mark.parametrize("join", [None, "127.0.0.1:1"])
def test_a_place_that_cannot_be_served_at_is_said_before_a_process_is_forked(
    join: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: Config) -> NoReturn:
        raise AssertionError("the models' files are checked already")

    monkeypatch.setattr(serve_command, "checkpoint_check", fail)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = config_from_keys({"http.port": taken.getsockname()[1]})
        with pytest.raises((ConfigError, Unavailable), match=r"cannot listen|no Ray cluster"):
            serve_command.serve_until_ended(config, print, Console(), join=join)
