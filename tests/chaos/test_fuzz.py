"""A little of what `python -m tests.chaos.fuzz` sends: each input is taken or refused."""

from __future__ import annotations

import logging

import pytest

from tests.chaos.fuzz.checkpoints import fuzz_checkpoints
from tests.chaos.fuzz.config_files import fuzz_config_files
from tests.chaos.fuzz.frames import fuzz_frames
from tests.chaos.fuzz.grammars import fuzz_grammars
from tests.chaos.fuzz.key_files import fuzz_key_files
from tests.chaos.fuzz.links import fuzz_links
from tests.chaos.fuzz.requests import fuzz_requests, fuzz_sockets

REFUSALS = {"400", "404", "405", "413", "421", "431"}


@pytest.fixture(autouse=True)
def no_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "specserve")
    caplog.set_level(logging.CRITICAL, "uvicorn.error")


def test_damaged_frames_are_refused_or_decoded_and_nothing_else() -> None:
    outcome = fuzz_frames(4000, seed=11)
    assert outcome.results["refused"] > 2000
    assert outcome.results["decoded as messages"] > 100
    assert outcome.grown_mb < 20


def test_a_link_works_on_after_damaged_frames() -> None:
    outcome = fuzz_links(1000, seed=12)
    assert outcome.results["sent, and a good one behind it came through"] == 1000 // 64


def test_damaged_requests_get_an_error_of_the_client() -> None:
    outcome = fuzz_requests(800, seed=13)
    assert outcome.results["200"] > 40
    assert outcome.results["400"] > 200
    assert set(outcome.results) <= {"200", "hung up", *REFUSALS}


def test_damaged_bytes_on_a_socket_get_an_error_of_the_client() -> None:
    outcome = fuzz_sockets(200, seed=14)
    assert outcome.results["400"] > 50
    assert set(outcome.results) <= {"200", "401", "hung up on", *REFUSALS}


def test_damaged_grammars_are_refused_or_followed() -> None:
    outcome = fuzz_grammars(150, seed=15)
    assert outcome.results["refused"] > 30
    assert outcome.results["accepted"] > 20


def test_damaged_key_files_are_refused_or_read() -> None:
    outcome = fuzz_key_files(300, seed=16)
    assert set(outcome.results) == {"refused", "read"}


def test_damaged_config_files_are_refused_or_read() -> None:
    outcome = fuzz_config_files(150, seed=17)
    assert set(outcome.results) == {"refused", "read"}


def test_mangled_checkpoints_are_refused_or_served() -> None:
    outcome = fuzz_checkpoints(25, seed=18)
    assert outcome.results["refused"] > 10
    assert set(outcome.results) <= {"refused", "served"}
