"""Devices are avoided after repeated failures within a while, and get another chance after it."""

from __future__ import annotations

from specserve.cluster.engine.device_failures import (
    MAX_FAILURES,
    WINDOW_S,
    DeviceFailures,
    DeviceId,
)
from specserve.engine.crash_tracker import MAX_LOSSES
from tests.support.clock import Clock

GPU, OTHER = DeviceId("a1", "GPU 3"), DeviceId("a1", "GPU 4")


def test_a_device_is_avoided_after_repeated_losses_and_is_named_once() -> None:
    failures = DeviceFailures(Clock())
    assert [failures.record_loss(GPU) for _ in range(MAX_FAILURES + 1)] == [
        *[False] * (MAX_FAILURES - 1),
        True,
        False,
    ]
    failures.record_loss(OTHER)
    assert failures.avoided == (GPU,)
    assert str(GPU) == "GPU 3 of node a1"


def test_a_failed_self_test_is_enough() -> None:
    failures = DeviceFailures(Clock())
    assert failures.record_fault(GPU)
    assert failures.avoided == (GPU,)


def test_failures_count_for_a_while() -> None:
    clock = Clock()
    failures = DeviceFailures(clock)
    for _ in range(MAX_FAILURES):
        clock.now += WINDOW_S / (MAX_FAILURES - 1)
        assert not failures.record_loss(GPU), "the first one is too long ago"
    clock.now += 1.0
    failures.record_fault(GPU)
    clock.now += WINDOW_S + 1.0
    assert failures.avoided == ()
    assert failures.record_fault(GPU)


def test_one_request_that_crashes_its_workers_does_not_mark_their_device() -> None:
    assert MAX_LOSSES < MAX_FAILURES
