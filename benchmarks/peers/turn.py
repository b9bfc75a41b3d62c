"""What passes between a contest and a system in a process of its own: a line of JSON each way.

Knows the standard library alone: some systems live in an environment that has none of our dependencies.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import IO, Any, Protocol


@dataclass(frozen=True, slots=True)
class Ask:
    """Continue the prompts greedily, by `max_tokens` each, whatever the end token says: together, or one after the other."""

    mode: str
    gamma: int | None  # None: the system's own choice
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    together: bool

    @property
    def batches(self) -> Sequence[tuple[tuple[int, ...], ...]]:
        return [self.prompts] if self.together else [(prompt,) for prompt in self.prompts]


class System(Protocol):
    """One that writes text, in the process that it was opened in."""

    def about(self) -> Mapping[str, str]:
        """Versions, threads, precision: what the report must say of it."""

    def run(self, ask: Ask) -> int:
        """How many tokens it wrote; this is what is timed."""

    def texts(self, ask: Ask) -> Sequence[str]: ...


def question(verb: str, ask: Ask | None = None) -> str:
    return json.dumps({"verb": verb, "ask": None if ask is None else asdict(ask)}) + "\n"


def answer_turns(open_system: Callable[[], AbstractContextManager[System]]) -> None:
    """The life of a system's process: opens it, answers each line of stdin, and closes it when stdin ends."""
    answers = _own_stdout()
    try:
        with open_system() as system:
            _answer(system, sys.stdin, answers)
    except Exception as error:  # it did not open: the first question is answered with why
        _send(answers, {"error": described(error)})
        raise


def described(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'it does not say why'}"


def _answer(system: System, questions: Iterable[str], answers: IO[str]) -> None:
    verbs: Mapping[str, Callable[..., Mapping[str, object]]] = {
        "about": lambda _: {"about": dict(system.about())},
        "run": lambda ask: _timed(system, ask),
        "texts": lambda ask: {"texts": list(system.texts(ask))},
    }
    for line in questions:
        asked = json.loads(line)
        try:
            answer = verbs[asked["verb"]](_ask(asked["ask"]))
        except Exception as error:  # this mode fails, the system stays
            answer = {"error": described(error)}
        _send(answers, answer)


def _timed(system: System, ask: Ask) -> Mapping[str, object]:
    begun = time.perf_counter()
    tokens = system.run(ask)
    seconds = time.perf_counter() - begun
    if tokens != (wanted := len(ask.prompts) * ask.max_tokens):
        raise ValueError(f"{tokens} tokens came of {wanted}")
    return {"seconds": seconds, "tokens": tokens}


def _ask(fields: dict[str, Any] | None) -> Ask | None:
    return (
        None
        if fields is None
        else Ask(**{**fields, "prompts": tuple(map(tuple, fields["prompts"]))})
    )


def _own_stdout() -> IO[str]:
    """Our answers alone go where stdout went; what libraries print joins stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _send(answers: IO[str], answer: Mapping[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
