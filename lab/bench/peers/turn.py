"""Protocol between the comparison and a system's process: a line of JSON each way.

Knows only the standard library: some systems live in an environment without our dependencies.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import IO, Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Prompts to continue greedily by `max_tokens` each, past end tokens.

    They run together in one batch, or one after the other.
    """

    mode: str
    gamma: int | None
    """None is the system's own choice."""
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    together: bool

    @property
    def num_counted(self) -> int:
        """Number of tokens that make the rate: of the prompts, if each gets one token only."""
        if self.max_tokens == 1:
            return sum(map(len, self.prompts))
        return len(self.prompts) * self.max_tokens

    @property
    def batches(self) -> Sequence[tuple[tuple[int, ...], ...]]:
        return [self.prompts] if self.together else [(prompt,) for prompt in self.prompts]


class System(Protocol):
    """System that generates text in the process that opened it."""

    def about(self) -> Mapping[str, str]:
        """Return the version, threads and precision for the report."""

    def run(self, request: TurnRequest) -> int:
        """Generate, and return the number of new tokens; this is what is timed."""

    def texts(self, request: TurnRequest) -> Sequence[str]: ...


@runtime_checkable
class PreparedSystem(System, Protocol):
    """System that may have something to do before a request, which is not timed."""

    def prepare(self, request: TurnRequest) -> None: ...


def encode_question(verb: str, request: TurnRequest | None = None) -> str:
    fields = None if request is None else asdict(request)
    return json.dumps({"verb": verb, "request": fields}) + "\n"


def serve_turns(open_system: Callable[[], AbstractContextManager[System]]) -> None:
    """Run a system's process: answer each line of stdin, and close the system when stdin ends."""
    answers = _take_stdout()
    try:
        with open_system() as system:
            _serve(system, sys.stdin, answers)
    except Exception as error:  # the first question is answered with the reason
        _send(answers, {"error": describe_error(error)})
        raise


def describe_error(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'it does not say why'}"


def _serve(system: System, questions: Iterable[str], answers: IO[str]) -> None:
    verbs: Mapping[str, Callable[..., Mapping[str, object]]] = {
        "about": lambda _: {"about": dict(system.about())},
        "run": lambda request: _timed_run(system, request),
        "texts": lambda request: {"texts": list(system.texts(request))},
    }
    for line in questions:
        question = json.loads(line)
        try:
            answer = verbs[question["verb"]](_parse_request(question["request"]))
        except Exception as error:  # this mode fails; the system continues
            answer = {"error": describe_error(error)}
        _send(answers, answer)


def _timed_run(system: System, request: TurnRequest) -> Mapping[str, object]:
    if isinstance(system, PreparedSystem):
        system.prepare(request)
    started = time.perf_counter()
    tokens = system.run(request)
    seconds = time.perf_counter() - started
    if tokens != (expected := len(request.prompts) * request.max_tokens):
        raise ValueError(f"{tokens} tokens came of {expected}")
    return {"seconds": seconds, "tokens": request.num_counted}


def _parse_request(fields: dict[str, Any] | None) -> TurnRequest | None:
    return (
        None
        if fields is None
        else TurnRequest(**{**fields, "prompts": tuple(map(tuple, fields["prompts"]))})
    )


def _take_stdout() -> IO[str]:
    """Return a file for our answers at the old stdout, and send all other output to stderr.

    Libraries may thus print without disturbing the answers.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _send(answers: IO[str], answer: Mapping[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
