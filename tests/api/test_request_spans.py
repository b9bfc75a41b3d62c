"""One trace of a request: the parent that it names, the gateway's span and the engine's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, Tracer

from specserve.engine.trace import Round
from specserve.errors import Unavailable
from specserve.tracing import EngineSpans
from specserve.types import Chunk, Request
from tests.support.asgi import send
from tests.support.clock import Clock
from tests.support.fakes import FakeDrafter, FakeTarget, model_info, open_coordinator
from tests.support.http_server import FakeService, app_over

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"model": "demo", "prompt": "def f(x):", "max_tokens": 24}


class Exported:
    """Spans that end in memory."""

    def __init__(self) -> None:
        self._memory = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.tracer: Tracer = provider.get_tracer("test")

    def span(self, name: str) -> ReadableSpan:
        (found,) = (span for span in self._memory.get_finished_spans() if span.name == name)
        return found


@dataclass
class TracedEngine(FakeService):
    """A real coordinator over workers without models, whose requests have spans."""

    exported: Exported = field(default_factory=Exported)

    def __post_init__(self) -> None:
        info, self._clock = replace(model_info(), vocab_size=4096), Clock()
        self._coordinator = open_coordinator(
            FakeTarget(info, clock=self._clock, seconds=0.01),
            FakeDrafter(0.7, seed=0, clock=self._clock, seconds=0.001),
            info=info,
            emit=self._emit,
            report=self._report,
            clock=self._clock,
            gamma=2,
        )
        self._spans = EngineSpans(self.exported.tracer, replica="a1", started=self._started)
        self._emitted: list[Chunk] = []

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        seq_id = self._coordinator.submit(request)
        self._spans.begin(seq_id, request, load=1)
        while self._coordinator.has_work:
            await self._coordinator.round()
            emitted, self._emitted = self._emitted, []
            for chunk in emitted:
                yield chunk

    def _started(self) -> set[int]:
        return {one.seq_id for one in self._coordinator.scheduler.running if one.target_cached}

    def _emit(self, chunks: Sequence[Chunk]) -> None:
        self._spans.observe(chunks)
        self._emitted += chunks

    def _report(self, done: Round) -> None:
        self._spans.record_round(self._clock() - done.start)


@pytest.mark.parametrize("max_tokens", [1, 24], ids=["one round", "several rounds"])
def test_a_request_is_one_trace_from_its_parent_to_the_engine(max_tokens: int) -> None:
    engine = TracedEngine()
    reply = send(
        app_over(engine, tracer=engine.exported.tracer),
        "/v1/completions",
        BODY | {"max_tokens": max_tokens},
        {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"},
    )
    assert reply.status == 200
    gateway, generated = map(engine.exported.span, ("POST /v1/completions", "generate"))
    assert gateway.context is not None
    assert gateway.parent is not None
    assert generated.context is not None
    assert generated.parent is not None
    assert gateway.parent.span_id == int(PARENT, 16)
    assert generated.parent.span_id == gateway.context.span_id
    assert {gateway.context.trace_id, generated.context.trace_id} == {int(TRACE, 16)}
    assert generated.context.trace_state.get("vendor") == "1"
    assert gateway.attributes is not None
    assert gateway.attributes["http.response.status_code"] == 200
    assert gateway.attributes["specserve.request_id"] == reply.headers["x-request-id"]
    times = {event.name: event.timestamp for event in generated.events}
    assert sorted(times) == ["first token", "prompt", "queued"]
    assert times["prompt"] <= times["first token"]
    about = generated.attributes
    assert about is not None
    assert about["gen_ai.usage.output_tokens"] == max_tokens
    rounds, drafted, accepted = (
        about[f"specserve.{name}"] for name in ("rounds", "draft_tokens", "accepted_tokens")
    )
    assert isinstance(rounds, int)
    assert isinstance(drafted, int)
    assert isinstance(accepted, int)
    assert max_tokens <= rounds + accepted <= max_tokens + 1, "the last token may be cut off"
    assert accepted <= drafted
    assert about["gen_ai.response.finish_reasons"] == ("length",)


@pytest.mark.parametrize(
    "parent",
    [
        f"00-{TRACE}-{PARENT}",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        "nonsense",
        "",
    ],
)
def test_a_traceparent_that_the_specification_forbids_begins_a_new_trace(parent: str) -> None:
    engine = TracedEngine()
    app = app_over(engine, tracer=engine.exported.tracer)
    assert send(app, "/v1/completions", BODY, {"traceparent": parent}).status == 200
    gateway = engine.exported.span("POST /v1/completions")
    assert gateway.parent is None
    assert gateway.context is not None
    assert gateway.context.trace_id != int(TRACE, 16)


def test_a_parent_that_is_not_sampled_leaves_no_spans() -> None:
    engine = TracedEngine()
    app = app_over(engine, tracer=engine.exported.tracer)
    header = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert send(app, "/v1/completions", BODY, header).status == 200
    with pytest.raises(ValueError, match="not enough values"):
        engine.exported.span("generate")


def test_an_error_of_the_server_is_one_in_its_span() -> None:
    exported = Exported()
    app = app_over(FakeService(refusal=Unavailable("no engine")), tracer=exported.tracer)
    assert send(app, "/v1/completions", BODY).status == 503
    assert exported.span("POST /v1/completions").status.status_code is StatusCode.ERROR


def test_requests_carry_nothing_where_there_is_no_tracer() -> None:
    service = FakeService()
    header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    assert send(app_over(service), "/v1/completions", BODY, header).status == 200
    assert service.requests[0].trace_context == ()
