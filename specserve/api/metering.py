"""What the gateway counts and times. Knows names of metrics, so that nobody else here has to."""

from __future__ import annotations

from collections.abc import Callable

from specserve.api.continuation import Continuation
from specserve.metrics import Registry


class Meter:
    """Over the registry of this process."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._prompt_tokens = registry.counter("prompt_tokens_total")
        self._generation_tokens = registry.counter("generation_tokens_total")
        self._success = registry.counter("request_success_total")
        self._failure = registry.counter("request_failure_total")
        self._limited = registry.counter("rate_limited_total")
        self._first = registry.histogram("time_to_first_token_seconds")
        self._each = registry.histogram("time_per_output_token_seconds")
        self._all = registry.histogram("e2e_request_latency_seconds")

    def asked(self, num_tokens: int) -> None:
        """A prompt was handed to the engine."""
        self._prompt_tokens.add(num_tokens)

    def failed(self, status: int) -> None:
        """A request ended with an error, in its status or in mid-stream."""
        self._failure.add(1, str(status))

    def limited(self, limit: str) -> None:
        """A client was told to wait, for its requests or for its tokens a minute."""
        self._limited.add(1, limit)

    def watch(self, begun: float) -> Watch:
        return Watch(self, begun)

    def first(self, seconds: float) -> None:
        self._first.observe(seconds)

    def completed(self, continuation: Continuation, *, whole: float, after_first: float) -> None:
        assert continuation.finish is not None
        self._success.add(1, continuation.finish.value)
        self._all.observe(whole)
        if len(continuation.token_ids) > 1:
            self._each.observe(after_first / (len(continuation.token_ids) - 1))

    def written(self, num_tokens: int) -> None:
        self._generation_tokens.add(num_tokens)


class Watch:
    """Times one continuation."""

    __slots__ = ("_begun", "_first", "_meter")

    def __init__(self, meter: Meter, begun: float) -> None:
        self._meter, self._begun = meter, begun
        self._first: float | None = None

    def tokens(self, count: int) -> None:
        """So many have come."""
        self._meter.written(count)
        if self._first is None and count:
            self._first = self._meter.clock()
            self._meter.first(self._first - self._begun)

    def end(self, continuation: Continuation) -> None:
        now = self._meter.clock()
        self._meter.completed(
            continuation, whole=now - self._begun, after_first=now - (self._first or now)
        )
