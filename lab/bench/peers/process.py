"""A system's process as the comparison sees it: start it, send it turns, pause it, end it.

Knows nothing of what the process runs.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

import specserve
from lab.bench.peers.turn import TurnRequest, encode_question
from specserve.errors import SpecserveError
from specserve.processor import foreign_environment

ROOT = Path(specserve.__file__).parent.parent
TIMEOUT_S, END_S = 1800.0, 60.0
AWAKE_S = 1.0
"""Time between the end of a pause and a turn, in which supervisors find everybody alive."""


class PeerFailed(SpecserveError):
    """A system did not start, did not answer, or refused; the report shows the message."""


class SystemProcess:
    """Process of one system, which rests between its blocks of turns.

    A question that the system cannot answer fails alone; after its death every question fails. At
    rest it and its descendants neither compute nor wake up: they are stopped by a signal or, if
    `rest_ends`, ended and restarted. Ray does not survive a long stop.
    """

    def __init__(
        self, command: Sequence[str], *, timeout_s: float = TIMEOUT_S, rest_ends: bool = False
    ) -> None:
        """Start `command`, or raise PeerFailed if there is no such program."""
        self._command, self._timeout_s, self._rest_ends = command, timeout_s, rest_ends
        self._is_paused = False
        self._start()

    def wake(self) -> bool:
        """End the rest, and return whether the system was restarted, so that it is cold."""
        if self._stderr.closed:
            self._start()
            return True
        self._resume()
        return False

    def rest(self) -> None:
        if self._rest_ends:
            self._end()
        else:
            self._pause()

    def about(self) -> Mapping[str, str]:
        about: Mapping[str, str] = self._request("about")["about"]
        return about

    def rate(self, request: TurnRequest) -> float:
        """Run the request and return tokens per second."""
        answer = self._request("run", request)
        return float(answer["tokens"] / answer["seconds"])

    def texts(self, request: TurnRequest) -> tuple[str, ...]:
        return tuple(self._request("texts", request)["texts"])

    def memory(self) -> int:
        """Return the bytes of all its processes; of shared pages each has its part."""
        sizes = []
        for process in self._tree():
            with suppress(psutil.Error):
                sizes.append(process.memory_full_info().pss)
        return sum(sizes)

    def __enter__(self) -> SystemProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resume()
        self._end()

    def _start(self) -> None:
        # open as long as the process lives
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
                cwd=ROOT,
                env=foreign_environment() | {"PYTHONPATH": str(ROOT)},
                # a Ctrl-C is for the comparison, which then ends its systems in order
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise PeerFailed(f"{self._command[0]}: {error.strerror}") from error

    def _end(self) -> None:
        """Close stdin, which ends the system, and wait: it may have to stop Ray."""
        if self._stderr.closed:
            return
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.communicate()
        finally:
            self._stderr.close()

    def _request(self, verb: str, request: TurnRequest | None = None) -> dict[str, Any]:
        alarm = threading.Timer(self._timeout_s, self._kill)
        alarm.start()
        try:
            line = self._ask(encode_question(verb, request))
        finally:
            alarm.cancel()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._exit_reason()}
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def _ask(self, question: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # of a system that did not open the answer is the reason
        with suppress(BrokenPipeError):
            self._process.stdin.write(question)
            self._process.stdin.flush()
        return self._process.stdout.readline()

    def _pause(self) -> None:
        """Stop parents before their children, whom they supervise."""
        for process in self._tree():
            with suppress(psutil.Error):
                process.suspend()
        self._is_paused = True

    def _resume(self) -> None:
        if not self._is_paused:
            return
        tree = self._tree()
        for process in reversed(tree):
            with suppress(psutil.Error):
                process.resume()
        self._is_paused = False
        if len(tree) > 1:
            time.sleep(AWAKE_S)

    def _kill(self) -> None:
        """Kill the process and its descendants, which it cannot end any more."""
        for process in self._tree():
            with suppress(psutil.Error):
                process.kill()

    def _tree(self) -> list[psutil.Process]:
        """Return the process and its descendants, parents first."""
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _exit_reason(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr if line.strip()]
        return f"its process ended with {code}: {lines[-1] if lines else 'no word'}"
