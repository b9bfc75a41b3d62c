"""A little of what `python -m tests.chaos.fuzz` sends: each input is taken or refused."""

from __future__ import annotations

import logging

import pytest

from tests.chaos.fuzz.__main__ import KINDS

REFUSALS = {"400", "404", "405", "413", "421", "431"}


@pytest.fixture(autouse=True)
def no_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "specserve")
    caplog.set_level(logging.CRITICAL, "uvicorn.error")


def test_damaged_frames_are_refused_or_decoded_and_nothing_else() -> None:
    outcome = KINDS["frames"].send(4000, 11)
    assert outcome.results["refused"] > 2000
    assert outcome.results["decoded as messages"] > 100
    assert outcome.grown_mb < 20


def test_a_link_works_on_after_damaged_frames() -> None:
    outcome = KINDS["links"].send(1000, 12)
    assert outcome.results["sent, and a good one behind it came through"] == 1000 // 64


def test_damaged_requests_get_an_error_of_the_client() -> None:
    outcome = KINDS["requests"].send(800, 13)
    assert outcome.results["200"] > 40
    assert outcome.results["400"] > 200
    assert set(outcome.results) <= {"200", "hung up", *REFUSALS}


def test_damaged_bytes_on_a_socket_get_an_error_of_the_client() -> None:
    outcome = KINDS["sockets"].send(200, 14)
    assert outcome.results["400"] > 50
    assert set(outcome.results) <= {"200", "401", "hung up on", *REFUSALS}


def test_damaged_grammars_are_refused_or_followed() -> None:
    outcome = KINDS["grammars"].send(150, 15)
    assert outcome.results["refused"] > 30
    assert outcome.results["accepted"] > 20


def test_damaged_key_files_are_refused_or_read() -> None:
    outcome = KINDS["key_files"].send(300, 16)
    assert set(outcome.results) == {"refused", "read"}


def test_damaged_config_files_are_refused_or_read() -> None:
    outcome = KINDS["config_files"].send(150, 17)
    assert set(outcome.results) == {"refused", "read"}


def test_mangled_checkpoints_are_refused_or_served() -> None:
    outcome = KINDS["checkpoints"].send(25, 18)
    assert outcome.results["refused"] > 10
    assert set(outcome.results) <= {"refused", "served"}
