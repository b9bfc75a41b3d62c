"""Servers of one engine whose mode is fixed when they start: one process for each mode and gamma.

Knows how to start, await and end a server; no engine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import IO

from lab.bench.peers.completions import CompletionsClient, free_port
from lab.bench.peers.turn import TurnRequest
from specserve.processor import foreign_environment

START_S, END_S, POLL_S = 400.0, 20.0, 0.1
WARMING_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Command that serves on a port of 127.0.0.1, and further variables of its environment."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class PeerServer:
    """Process of one server that answers /health, in a process group of its own."""

    def __init__(self, command: ServerCommand, *, port: int) -> None:
        """Start it, and wait until it is healthy; raise RuntimeError with its last line if not."""
        self.url = f"http://127.0.0.1:{port}"
        self._log: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command.arguments,
            stdout=self._log,
            stderr=self._log,
            # its own packages, not this repository's
            env={**foreign_environment(), "PYTHONPATH": "", **command.environment},
            cwd=tempfile.gettempdir(),
            start_new_session=True,
        )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server, and then whatever it left in its process group."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()

    def _wait_until_healthy(self) -> None:
        until = time.monotonic() + START_S
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise RuntimeError(self._last_error())
            if time.monotonic() > until:
                raise RuntimeError(f"the server was not healthy after {START_S:.0f} s")
            time.sleep(POLL_S)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=POLL_S * 50) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _last_error(self) -> str:
        """Return the last line of the log that names an error, or the last one."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        return (errors or lines or ["the server ended and did not say why"])[-1]


class ServerPool:
    """Servers by mode and gamma, each started at its first use; the least recently used end.

    A mode whose server has failed to start fails at once from then on.
    """

    def __init__(
        self,
        command: Callable[[TurnRequest, int], ServerCommand],
        *,
        limit: int,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        self._command, self._limit, self._extra = command, limit, extra or {}
        self._servers: dict[tuple[str, int | None], PeerServer] = {}
        self._failures: dict[tuple[str, int | None], str] = {}

    def prepare(self, request: TurnRequest) -> None:
        """Start the server of the request if it does not run, and run a few tokens on it."""
        if (request.mode, request.gamma) not in self._servers:
            self.client(request).run(replace(request, max_tokens=WARMING_TOKENS))

    def client(self, request: TurnRequest) -> CompletionsClient:
        key = request.mode, request.gamma
        if key in self._failures:
            raise RuntimeError(self._failures[key])
        server = self._servers.pop(key, None)
        if server is None:
            while len(self._servers) >= self._limit:
                self._servers.pop(next(iter(self._servers))).close()
            try:
                port = free_port()
                server = PeerServer(self._command(request, port), port=port)
            except (OSError, RuntimeError) as error:
                self._failures[key] = str(error)
                raise
        self._servers[key] = server  # as the most recently used
        return CompletionsClient(server.url, self._extra)

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._servers:
            self._servers.popitem()[1].close()
