"""The time to a first token is split into the engine's part and the rest."""

from __future__ import annotations

import pytest

from specserve.api.continuation import Continuation
from specserve.api.metering import RequestMetrics
from specserve.metrics import Registry
from specserve.types import Chunk, FinishReason, Origin, Stats
from tests.support.http_server import demo_tokenizer


@pytest.mark.parametrize(("arrives_at", "framework"), [(5.0, 0.75), (4.2, 0.0)])
def test_what_the_engine_did_not_take_of_a_first_token_is_the_frameworks(
    arrives_at: float, framework: float
) -> None:
    registry, now = Registry(), [4.0]
    timer = RequestMetrics(registry, lambda: now[0]).start_timer(4.0)
    stats = Stats("block", True, 1, 0, 0, 1, queue_time_ms=50.0, prefill_time_ms=200.0)
    continuation = Continuation(demo_tokenizer(), (5, 6))
    now[0] = arrives_at
    continuation.add_chunk(
        Chunk(0, 0, (7,), (Origin.PLAIN,), None, finish=FinishReason.LENGTH, stats=stats)
    )
    timer.add_tokens(1)
    continuation.time_to_first_token = timer.time_to_first_token
    timer.finish(continuation)
    samples = registry.snapshot().samples
    name = "time_to_first_token_{}_seconds"
    found = [samples[name.format(part)][()] for part in ("engine", "framework")]
    assert [sum(counts) for *counts, _ in found] == [1, 1]
    assert [seconds for *_, seconds in found] == pytest.approx([0.25, framework])
