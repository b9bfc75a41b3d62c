"""All parts of the suite must count."""

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

@pytest.mark.proofs
def test_behind():
    assert {behind}
"""
LANES = (("not ray and not proofs",), ("ray", "proofs"))


def run_file(folder: Path, *options: str, **passes: bool) -> int:
    """Return the exit status of a suite of three tests, of which each part has one."""
    file, settings = folder / "test_parts.py", folder / "pytest.ini"
    passing = {"alone": True, "clustered": True, "behind": True, **passes}
    file.write_text(FILE.format(**passing), encoding="utf-8")
    settings.write_text("[pytest]\nmarkers =\n    ray\n    proofs\n", encoding="utf-8")
    return run(["-q", "-c", str(settings), str(file), *options], LANES)


@pytest.mark.parametrize("part", ["alone", "clustered", "behind"])
def test_a_failure_in_any_part_fails_the_suite(part: str, tmp_path: Path) -> None:
    assert run_file(tmp_path, **{part: False}) == 1


@pytest.mark.parametrize(("name", "status"), [("alone", 0), ("neither", NO_TESTS)])
def test_a_part_without_tests_counts_as_passed(name: str, status: int, tmp_path: Path) -> None:
    assert run_file(tmp_path, "-k", name) == status
