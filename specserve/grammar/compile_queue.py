"""Grammars that are compiled in a thread of their own, while passes of the target go on.

It knows neither tokens nor sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass, field
from functools import cached_property

from llguidance import LLMatcher

from specserve.errors import SpecserveError
from specserve.types import Grammar

MAX_COMPILE_S = 2.0
"""Seconds of one grammar, not counting the seconds of grammars before it.

The most expensive one known that passes the check takes 0.06 s. The library cannot be interrupted:
the thread goes on, within the library's own limits, and the next grammar begins when it is done.
"""
GRACE_S = 0.02
"""Time from its request on for which a pass waits for a grammar. Most take a millisecond or two."""
MAX_FINISHED = 64
"""Finished grammars that are kept until they are taken."""


@dataclass(slots=True)
class _Job:
    """A grammar that is being compiled, or waits for that."""

    requested_at: float
    began_at: float | None = None
    result: Future[LLMatcher] = field(default_factory=Future)


class CompileQueue:
    """Grammars that are compiled one after the other, in the order of their requests."""

    def __init__(
        self,
        compile_grammar: Callable[[Grammar], LLMatcher],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compile, self._clock = compile_grammar, clock
        self._jobs: dict[Grammar, _Job] = {}

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "compile-grammars")

    def run(self, task: Callable[[], object]) -> None:
        """Run something else in the thread, before the grammars that are requested later."""
        self._thread.submit(task)

    def request(self, grammar: Grammar) -> None:
        """Compile the grammar in the background, unless that was requested before."""
        if grammar not in self._jobs:
            self._drop_finished()
            job = self._jobs[grammar] = _Job(self._clock())
            job.result = self._thread.submit(self._run, job, grammar)

    def is_ready(self, grammar: Grammar, *, until: float) -> bool:
        """Return whether `take` answers at once, after a short wait that may last `until` then.

        It does once the grammar is compiled, has failed, or has taken too long.
        """
        self.request(grammar)
        job = self._jobs[grammar]
        wait_s = max(job.requested_at + GRACE_S, until) - self._clock()
        return self._is_settled(job, min(wait_s, MAX_COMPILE_S))

    def take(self, grammar: Grammar) -> LLMatcher:
        """Return the compiled grammar, waiting for it, and drop it.

        Raises what its compilation raised, or SpecserveError if that has taken too long.
        """
        self.request(grammar)
        job = self._jobs[grammar]
        while not self._is_settled(job, MAX_COMPILE_S):
            pass
        if not job.result.done():
            # Kept until it is done: a second request of it must not wait for itself.
            raise SpecserveError("the grammar takes too long to compile; simplify it")
        del self._jobs[grammar]
        return job.result.result()

    def drop(self, grammar: Grammar) -> None:
        """Drop a grammar that no text waits for; it is not compiled if that has not begun."""
        job = self._jobs.get(grammar)
        if job is not None and (job.result.cancel() or job.result.done()):
            del self._jobs[grammar]

    def _run(self, job: _Job, grammar: Grammar) -> LLMatcher:
        job.began_at = self._clock()
        return self._compile(grammar)

    def _is_settled(self, job: _Job, wait_s: float) -> bool:
        try:
            job.result.exception(max(0.0, wait_s))
        except StillRunning:
            return job.began_at is not None and self._clock() - job.began_at >= MAX_COMPILE_S
        return True

    def _drop_finished(self) -> None:
        """Drop the oldest finished grammars beyond those that are kept."""
        finished = [grammar for grammar, job in self._jobs.items() if job.result.done()]
        for grammar in finished[: max(0, len(finished) - MAX_FINISHED)]:
            del self._jobs[grammar]
