"""Spans of requests for OpenTelemetry, made only where its environment variables want them.

Knows requests, chunks and the SDK, which is imported if it is wanted. No HTTP, no rounds.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specserve.types import Chunk, FinishReason, Request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)

TraceContext = tuple[tuple[str, str], ...]
"""W3C's headers `traceparent` and `tracestate` with their values; () for a request without any."""
HEADERS = ("traceparent", "tracestate")
SERVICE_NAME = "specserve"
"""Name of the service where neither OTEL_SERVICE_NAME nor OTEL_RESOURCE_ATTRIBUTES has one."""
OTLP_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
"""Modules by OTEL_EXPORTER_OTLP_PROTOCOL; `specserve[otel]` installs the first."""


def tracer_from_environment(environment: Mapping[str, str] = os.environ) -> Tracer | None:
    """Return the tracer that the environment configures, or None if it wants no spans.

    It wants some if it names an endpoint or an exporter. An exporter that is not installed is
    named in the log, and there are no spans.
    """
    try:
        exporter = _exporter(environment)
    except ImportError as error:
        log.warning(
            "no spans are exported: %s; pip install 'specserve[otel]', or set "
            "OTEL_TRACES_EXPORTER=none",
            error,
        )
        return None
    if exporter is None:
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    is_named = "OTEL_SERVICE_NAME" in environment or "service.name" in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if is_named else {"service.name": SERVICE_NAME})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider.get_tracer("specserve")


def _exporter(environment: Mapping[str, str]) -> SpanExporter | None:
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    has_endpoint = any(
        environment.get(name)
        for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )
    name = environment.get("OTEL_TRACES_EXPORTER") or ("otlp" if has_endpoint else "none")
    if name == "none":
        return None
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
    )
    if name != "otlp" or protocol not in OTLP_EXPORTERS:
        log.warning(
            "no spans are exported: OTEL_TRACES_EXPORTER is %r and the protocol %r; set otlp or "
            "console, and one of %s",
            name,
            protocol,
            ", ".join(OTLP_EXPORTERS),
        )
        return None
    exporter: SpanExporter = importlib.import_module(OTLP_EXPORTERS[protocol]).OTLPSpanExporter()
    return exporter


def start_child(
    tracer: Tracer, name: str, parent: TraceContext, attributes: Mapping[str, str | int]
) -> Span:
    """Start a span under a parent; one that W3C's rules do not allow counts as none."""
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(dict(parent), context=Context())
    return tracer.start_span(name, context, kind=SpanKind.SERVER, attributes=attributes)


def context_of(span: Span) -> TraceContext:
    """Return the headers that make a span the parent of others."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context=set_span_in_context(span))
    return tuple(carrier.items())


def set_failed(span: Span, why: str) -> None:
    """Mark a span as one that ended with an error."""
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR, why)


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of a worker so far, or since a sequence began."""

    num_answers: int = 0
    seconds: float = 0.0
    ended_ns: int = 0

    def __sub__(self, before: _Work) -> _Work:
        return _Work(
            self.num_answers - before.num_answers, self.seconds - before.seconds, self.ended_ns
        )


@dataclass(slots=True)
class _EngineSpan:
    span: Span
    num_tokens: int = 0
    # When its first round began, and the work of the workers before that.
    began_ns: int | None = None
    work_before: Mapping[str, _Work] = field(default_factory=dict)
    ended_ns: int | None = None  # if it waits for the report of its first round


class EngineSpans:
    """A span for each sequence of an engine, from `begin` to its last chunk.

    It has a child for each role of workers, with their passes while the sequence ran.
    """

    def __init__(
        self,
        tracer: Tracer,
        *,
        replica: str,
        started: Callable[[], Collection[int]],
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Make spans; `started()` are the ids of running sequences that had a pass."""
        self._tracer, self._replica, self._started = tracer, replica, started
        self._now_ns = now_ns
        self._spans: dict[int, _EngineSpan] = {}
        self._work: dict[str, _Work] = {}  # by role
        self._work_before: Mapping[str, _Work] = {}  # at the end of the last round

    def begin(self, seq_id: int, request: Request, *, load: int) -> None:
        """Start the span of a request; `load` is the number of the engine's requests."""
        attributes: dict[str, str | int] = {
            "specserve.replica": self._replica,
            "specserve.load": load,
            "gen_ai.usage.input_tokens": len(request.prompt),
        }
        if request.generated:
            attributes["specserve.resumed_tokens"] = len(request.generated)
        span = start_child(self._tracer, "generate", request.trace_context, attributes)
        span.add_event("queued", timestamp=self._now_ns())
        self._spans[seq_id] = _EngineSpan(span)

    def observe(self, chunks: Iterable[Chunk]) -> None:
        """Record first tokens and ends among these chunks."""
        now = self._now_ns()
        for chunk in chunks:
            one = self._spans.get(chunk.seq_id)
            if one is None:
                continue
            if chunk.tokens and not one.num_tokens:
                one.span.add_event("first token", timestamp=now)
            one.num_tokens += len(chunk.tokens)
            if chunk.finish is None:
                continue
            _describe_end(one, chunk)
            if one.num_tokens and one.began_ns is None:
                one.ended_ns = now  # its only round is yet to be reported
            else:
                self._end(chunk.seq_id, now)

    def record_exchange(self, role: str, seconds: float, seconds_ago: float) -> None:
        """Record how long a worker of a role worked for an answer, and how long ago it ended."""
        before = self._work.get(role, _Work())
        ended = self._now_ns() - round(seconds_ago * 1e9)
        self._work[role] = _Work(before.num_answers + 1, before.seconds + seconds, ended)

    def record_round(self, seconds_ago: float) -> None:
        """Record that a round, which began so long ago, was the first one of some sequences."""
        before, self._work_before = self._work_before, dict(self._work)
        new = {seq_id: one for seq_id, one in self._spans.items() if one.began_ns is None}
        if not new:
            return
        began, started = self._now_ns() - round(seconds_ago * 1e9), self._started()
        for seq_id, one in new.items():
            if one.ended_ns is not None or seq_id in started:
                one.began_ns, one.work_before = began, before
                one.span.add_event("prompt", timestamp=began)
            if one.ended_ns is not None:
                self._end(seq_id, one.ended_ns)

    def drop(self, seq_id: int) -> None:
        """End the span of a sequence that gets no chunk, since another took its place."""
        one = self._spans.get(seq_id)
        if one is not None:
            set_failed(one.span, "displaced from the queue")
            self._end(seq_id, self._now_ns())

    def _end(self, seq_id: int, ended_ns: int) -> None:
        one = self._spans.pop(seq_id)
        if one.began_ns is not None:
            for role, work in self._work.items():
                done = work - one.work_before.get(role, _Work())
                if done.num_answers:
                    self._export_work(one, role, one.began_ns, done)
        one.span.end(end_time=ended_ns)

    def _export_work(self, parent: _EngineSpan, role: str, began_ns: int, work: _Work) -> None:
        from opentelemetry.trace import set_span_in_context

        child = self._tracer.start_span(
            role,
            set_span_in_context(parent.span),
            start_time=began_ns,
            attributes={
                "specserve.answers": work.num_answers,
                "specserve.busy_seconds": work.seconds,
            },
        )
        child.end(end_time=max(began_ns, work.ended_ns))


def _describe_end(one: _EngineSpan, chunk: Chunk) -> None:
    assert chunk.finish is not None
    one.span.set_attribute("gen_ai.usage.output_tokens", one.num_tokens)
    one.span.set_attribute("gen_ai.response.finish_reasons", (chunk.finish.value,))
    if chunk.finish is FinishReason.ERROR:
        set_failed(one.span, chunk.error or "")
    if (stats := chunk.stats) is not None:
        counts: Sequence[tuple[str, str | int]] = (
            ("verifier", stats.verifier),
            ("rounds", stats.rounds),
            ("draft_tokens", stats.drafted),
            ("accepted_tokens", stats.accepted),
            ("target_passes", stats.target_passes),
            ("anticipated_proposals", stats.anticipated),
        )
        for name, value in counts:
            one.span.set_attribute(f"specserve.{name}", value)
