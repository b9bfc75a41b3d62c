"""A system's process as the comparison sees it: start it, send it turns, end it.

Knows nothing of what the process runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import specserve
from benchmarks.peers.turn import TurnRequest, encode_question
from specserve.errors import SpecserveError

ROOT = Path(specserve.__file__).parent.parent
TIMEOUT_S, END_S = 900.0, 60.0


class PeerFailed(SpecserveError):
    """A system did not start, did not answer, or refused; the report shows the message."""


class SystemProcess:
    """Process of one system, idle between its turns.

    A question that the system cannot answer fails alone; after its death every question fails.
    """

    def __init__(self, command: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> None:
        """Start `command`, or raise PeerFailed if there is no such program."""
        self._timeout_s = timeout_s
        # open as long as the process lives
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                # a Ctrl-C is for the comparison, which then ends its systems in order
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise PeerFailed(f"{command[0]}: {error.strerror}") from error

    def about(self) -> Mapping[str, str]:
        about: Mapping[str, str] = self._request("about")["about"]
        return about

    def rate(self, request: TurnRequest) -> float:
        """Run the request and return tokens per second."""
        answer = self._request("run", request)
        return float(answer["tokens"] / answer["seconds"])

    def texts(self, request: TurnRequest) -> tuple[str, ...]:
        return tuple(self._request("texts", request)["texts"])

    def __enter__(self) -> SystemProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close stdin, which ends the system, and wait: it may have to stop Ray."""
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        finally:
            self._stderr.close()

    def _request(self, verb: str, request: TurnRequest | None = None) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        alarm = threading.Timer(self._timeout_s, self._process.kill)
        alarm.start()
        try:
            self._process.stdin.write(encode_question(verb, request))
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = self._process.stdout.readline()  # the reason why the system did not open
        finally:
            alarm.cancel()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._exit_reason()}
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def _exit_reason(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr if line.strip()]
        return f"its process ended with {code}: {lines[-1] if lines else 'no word'}"
