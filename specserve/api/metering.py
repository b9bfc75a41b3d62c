"""Count and time requests in the gateway. The only module of the API that knows metric names."""

from __future__ import annotations

from collections.abc import Callable

from specserve.api.continuation import Continuation
from specserve.metrics import Registry


class RequestMetrics:
    """Counters and histograms of requests, in the registry of this process."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._prompt_tokens = registry.counter("prompt_tokens_total")
        self._generation_tokens = registry.counter("generation_tokens_total")
        self._success = registry.counter("request_success_total")
        self._failure = registry.counter("request_failure_total")
        self._time_to_first_token = registry.histogram("time_to_first_token_seconds")
        self._first_token_engine = registry.histogram("time_to_first_token_engine_seconds")
        self._first_token_framework = registry.histogram("time_to_first_token_framework_seconds")
        self._time_per_token = registry.histogram("time_per_output_token_seconds")
        self._inter_token = registry.histogram("inter_token_latency_seconds")
        self._latency = registry.histogram("e2e_request_latency_seconds")

    def count_prompt_tokens(self, num_tokens: int) -> None:
        """Count the tokens of prompts that go to the engine."""
        self._prompt_tokens.add(num_tokens)

    def count_failure(self, status: int) -> None:
        """Count a request that ended with an error, in its status or in mid-stream."""
        self._failure.add(1, str(status))

    def start_timer(self, start: float) -> RequestTimer:
        """Return a timer for one continuation of a request that arrived at `start`."""
        return RequestTimer(self, start)

    def observe_first_token(self, seconds: float) -> None:
        self._time_to_first_token.observe(seconds)

    def observe_later_tokens(self, seconds: float) -> None:
        """Record the time between two chunks of a text."""
        self._inter_token.observe(seconds)

    def observe_finished(
        self, continuation: Continuation, *, latency: float, after_first: float
    ) -> None:
        """Count a finished continuation, with its seconds in total and after its first token."""
        assert continuation.finish is not None
        self._success.add(1, continuation.finish.value)
        self._latency.observe(latency)
        stats, first_token = continuation.stats, continuation.time_to_first_token
        if stats is not None and first_token is not None:
            engine = (stats.queue_time_ms + stats.prefill_time_ms) / 1e3
            self._first_token_engine.observe(engine)
            self._first_token_framework.observe(max(0.0, first_token - engine))
        if len(continuation.token_ids) > 1:
            self._time_per_token.observe(after_first / (len(continuation.token_ids) - 1))

    def count_generated_tokens(self, num_tokens: int) -> None:
        self._generation_tokens.add(num_tokens)


class KeyMetrics:
    """Counts of the refusals of clients with keys, and whether their file can be used."""

    def __init__(self, registry: Registry) -> None:
        self._rate_limited = registry.counter("rate_limited_total")
        self._keys_valid = registry.gauge("api_keys_valid")

    def count_rate_limited(self, limit: str) -> None:
        """Count a refusal for the `requests` or the `tokens` a minute of a client."""
        self._rate_limited.add(1, limit)

    def set_keys_valid(self, valid: bool) -> None:
        """Record whether the file of keys could be read when it was read last."""
        self._keys_valid.set(float(valid))


class RequestTimer:
    """Times of one continuation."""

    __slots__ = ("_first_token", "_last_tokens", "_metrics", "_start")

    def __init__(self, metrics: RequestMetrics, start: float) -> None:
        self._metrics, self._start = metrics, start
        self._first_token: float | None = None
        self._last_tokens = start

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the request's arrival; None before the first token."""
        return None if self._first_token is None else self._first_token - self._start

    def add_tokens(self, count: int) -> None:
        """Count tokens that have arrived."""
        self._metrics.count_generated_tokens(count)
        if not count:
            return
        now = self._metrics.clock()
        if self._first_token is None:
            self._first_token = now
            self._metrics.observe_first_token(now - self._start)
        else:
            self._metrics.observe_later_tokens(now - self._last_tokens)
        self._last_tokens = now

    def finish(self, continuation: Continuation) -> None:
        now = self._metrics.clock()
        self._metrics.observe_finished(
            continuation,
            latency=now - self._start,
            after_first=now - (self._first_token or now),
        )
