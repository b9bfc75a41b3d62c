"""Spans of an engine, and what of the environment turns them on."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from specserve.tracing import EngineSpans, tracer_from_environment
from specserve.types import Chunk, FinishReason, Request, Warp

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
REQUEST = Request((1, 2), 9, Warp(), seed=0)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "mine"},
        ENDPOINT | {"OTEL_SDK_DISABLED": "true"},
        ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_there_are_no_spans_unless_the_environment_asks_for_them(
    environment: dict[str, str],
) -> None:
    assert tracer_from_environment(environment) is None


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
    ],
)
def test_an_exporter_that_is_not_known_is_named_once_in_the_log(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert tracer_from_environment(environment) is None
    (record,) = caplog.records
    assert "OTEL_TRACES_EXPORTER" in record.getMessage()


def test_an_exporter_that_is_missing_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp", None)
    assert tracer_from_environment(ENDPOINT) is None
    assert "pip install 'specserve[otel]'" in caplog.text


def test_spans_go_to_the_terminal_if_the_environment_says_so() -> None:
    assert tracer_from_environment({"OTEL_TRACES_EXPORTER": "console"}) is not None


def test_the_sdk_is_not_imported_without_a_reason() -> None:
    program = (
        "import sys; import specserve.api.app; from specserve.tracing import "
        "tracer_from_environment; assert tracer_from_environment({}) is None; "
        "sys.exit('opentelemetry.sdk' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class Spans:
    """Spans of an engine in which a sequence waits, and what they export."""

    def __init__(self) -> None:
        self.memory, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.started: set[int] = set()
        self.engine = EngineSpans(
            provider.get_tracer("test"), replica="a1", started=lambda: self.started
        )
        self.engine.begin(0, REQUEST, load=1)


def test_a_sequence_that_ends_in_the_queue_has_a_span_that_ends() -> None:
    spans = Spans()
    spans.engine.observe([Chunk(0, 0, (), (), finish=FinishReason.CANCELLED)])
    (span,) = spans.memory.get_finished_spans()
    assert [event.name for event in span.events] == ["queued"]
    assert span.status.status_code is StatusCode.UNSET


def test_a_failed_and_a_displaced_sequence_have_spans_with_errors() -> None:
    spans = Spans()
    spans.engine.begin(1, REQUEST, load=2)
    spans.engine.observe([Chunk(0, 0, (), (), finish=FinishReason.ERROR, error="it fell over")])
    spans.engine.drop(1)
    failed, displaced = spans.memory.get_finished_spans()
    assert failed.status.description == "it fell over"
    assert displaced.status.status_code is StatusCode.ERROR


def test_workers_have_spans_of_the_passes_while_the_sequence_ran() -> None:
    spans = Spans()
    engine, started = spans.engine, spans.started
    engine.record_exchange("target", 5.0, 0.0)  # a round in which it waited
    engine.record_round(6.0)
    started.add(0)
    for _ in range(3):
        engine.record_exchange("draft", 0.25, 0.0)
        engine.record_exchange("target", 0.5, 0.0)
        engine.record_round(1.0)
    engine.observe([Chunk(0, 0, (1, 2), (), finish=FinishReason.LENGTH)])
    draft, target, generate = sorted(
        spans.memory.get_finished_spans(), key=lambda span: "draft target generate".index(span.name)
    )
    assert draft.parent == target.parent == generate.context
    assert draft.attributes == {"specserve.answers": 3, "specserve.busy_seconds": 0.75}
    assert target.attributes == {"specserve.answers": 3, "specserve.busy_seconds": 1.5}
    (prompt,) = (event for event in generate.events if event.name == "prompt")
    assert target.start_time == draft.start_time == prompt.timestamp


def test_a_sequence_of_a_single_round_has_its_pass() -> None:
    spans = Spans()
    spans.engine.record_exchange("target", 0.5, 0.0)
    spans.engine.observe([Chunk(0, 0, (1,), (), finish=FinishReason.LENGTH)])
    spans.engine.record_round(1.0)
    target, generate = spans.memory.get_finished_spans()
    assert (target.name, target.parent) == ("target", generate.context)
    assert target.attributes == {"specserve.answers": 1, "specserve.busy_seconds": 0.5}
