"""A little of what `make fuzz` sends, which must end in a refusal or a message and nothing else."""

from __future__ import annotations

import logging

import pytest

from tests.chaos.fuzz import fuzz_http, fuzz_link, fuzz_reader


@pytest.fixture(autouse=True)
def no_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "specserve")
    caplog.set_level(logging.CRITICAL, "uvicorn.error")


def test_damaged_frames_are_refused_or_read_and_nothing_else() -> None:
    outcome = fuzz_reader(4000, seed=11)
    assert outcome.results["refused"] > 2000
    assert outcome.results["read as messages"] > 100
    assert outcome.grown_mb < 20


def test_a_link_works_on_after_damaged_frames() -> None:
    outcome = fuzz_link(1000, seed=12)
    assert outcome.results["sent, and a good one behind it came through"] == 1000 // 64


def test_damaged_requests_get_an_error_of_the_client() -> None:
    outcome = fuzz_http(400, seed=13)
    assert outcome.results["200"] > 20
    assert outcome.results["400"] > 100
    known = {"200", "400", "404", "405", "413", "421", "431", "hung up on"}
    assert set(outcome.results) <= known
