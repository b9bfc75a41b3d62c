"""The two halves of the suite must both count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.suite import NO_TESTS, run

FILE = """
import pytest

def test_alone():
    assert {alone}

@pytest.mark.ray
def test_on_a_cluster():
    assert {clustered}
"""


def run_file(folder: Path, *options: str, alone: bool = True, clustered: bool = True) -> int:
    """Return the exit status of a suite of two tests, of which each half has one."""
    file, settings = folder / "test_halves.py", folder / "pytest.ini"
    file.write_text(FILE.format(alone=alone, clustered=clustered), encoding="utf-8")
    settings.write_text("[pytest]\nmarkers = ray\n", encoding="utf-8")
    return run(["-q", "-c", str(settings), str(file), *options], ("not ray", "ray"))


def test_a_failure_in_either_half_fails_the_suite(tmp_path: Path) -> None:
    assert run_file(tmp_path, alone=False) == 1
    assert run_file(tmp_path, clustered=False) == 1


@pytest.mark.parametrize(("name", "status"), [("alone", 0), ("neither", NO_TESTS)])
def test_a_half_without_tests_counts_as_passed(name: str, status: int, tmp_path: Path) -> None:
    assert run_file(tmp_path, "-k", name) == status
