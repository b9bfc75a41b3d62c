"""A system in a process of its own, seen from the contest: started, asked in turn, ended. Knows nothing of what it runs."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import specserve
from benchmarks.peers.turn import Ask, question
from specserve.errors import SpecserveError

ROOT = Path(specserve.__file__).parent.parent
TIMEOUT_S, END_S = 900.0, 60.0


class PeerFailed(SpecserveError):
    """A system that could not be started, did not answer, or refused; the message is what the report says of it."""


class Process:
    """Idle between its turns. A question that it cannot answer fails alone; once it has died, every question fails."""

    def __init__(self, command: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> None:
        """Raises PeerFailed if there is no such program."""
        self._timeout_s = timeout_s
        self._noise = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (as long as the process)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._noise,
                text=True,
                encoding="utf-8",
                cwd=ROOT,
                start_new_session=True,  # a Ctrl-C is for the contest; it then ends its systems in order
            )
        except OSError as error:
            self._noise.close()
            raise PeerFailed(f"{command[0]}: {error.strerror}") from error

    def about(self) -> Mapping[str, str]:
        said: Mapping[str, str] = self._asked("about")["about"]
        return said

    def rate(self, ask: Ask) -> float:
        """Tokens a second."""
        answer = self._asked("run", ask)
        return float(answer["tokens"] / answer["seconds"])

    def texts(self, ask: Ask) -> tuple[str, ...]:
        return tuple(self._asked("texts", ask)["texts"])

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The end of its stdin is how it is told to end; it has Ray to take down, maybe."""
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        finally:
            self._noise.close()

    def _asked(self, verb: str, ask: Ask | None = None) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        alarm = threading.Timer(self._timeout_s, self._process.kill)
        alarm.start()
        try:
            self._process.stdin.write(question(verb, ask))
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = self._process.stdout.readline()  # why it did not open
        finally:
            alarm.cancel()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._noise.seek(0)
        lines = [line.strip() for line in self._noise if line.strip()]
        return f"its process ended with {code}: {lines[-1] if lines else 'no word'}"
