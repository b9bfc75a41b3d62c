"""All parts of the suite must count, and every file must be in one of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.suite import (
    BROWSED_RAY,
    DEFAULT_S,
    FOLDERS,
    NO_TESTS,
    PARTS,
    ROOT,
    TESTS,
    deal,
    deal_part,
    mark_of,
    run,
    write_durations,
)

NAMES = ("alone", "clustered", "behind")
"""Files of a test each: the first in a lane of its own, beside the other two."""


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of pytest start in a second, without the plugins that are installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run_files(folder: Path, *options: str, **passes: bool) -> int:
    """Return the exit status of a suite of three files of one test each."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    files = {name: folder / f"test_{name}.py" for name in NAMES}
    for name, file in files.items():
        file.write_text(f"def test_{name}():\n    assert {passes.get(name, True)}\n", "utf-8")
    first, then, beside = ([str(files[name])] for name in ("clustered", "behind", "alone"))
    settings = ["-q", "-c", str(folder / "pytest.ini")]
    return run([*settings, *options], [[first, then], [beside, []]])


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize("part", NAMES)
def test_a_failure_in_any_part_fails_the_suite(part: str, tmp_path: Path) -> None:
    assert run_files(tmp_path, **{part: False}) == 1


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize(("name", "status"), [("alone", 0), ("neither", NO_TESTS)])
def test_a_part_without_tests_counts_as_passed(name: str, status: int, tmp_path: Path) -> None:
    assert run_files(tmp_path, "-k", name) == status


@pytest.mark.parametrize("durations", [lambda file: DEFAULT_S, len], ids=["default", "measured"])
def test_every_file_is_run_once_by_both_parts_together(durations: Callable[[str], float]) -> None:
    expected = sorted(str(path.relative_to(ROOT)) for path in TESTS.rglob("test_*.py"))
    measured = {file: float(durations(file)) for file in expected}
    parts = [deal_part(part, measured, with_browser=True) for part in PARTS]
    assert sorted(file for lanes in parts for lane in lanes for run in lane for file in run) == (
        expected
    )


def test_all_files_on_ray_run_in_one_lane_before_its_others() -> None:
    (*on_ray, then), beside = deal_part("rest", {})
    assert {mark_of(ROOT / file) for run in on_ray for file in run} == {"ray"}
    others = {mark_of(ROOT / file) for run in (then, *beside) for file in run}
    assert others.isdisjoint({"ray", "browser"})


def test_the_browser_has_processes_of_its_own_and_its_server_stands_with_the_others_on_ray() -> (
    None
):
    (*_, with_server, _), (pages, _) = deal_part("rest", {}, with_browser=True)
    assert with_server == [BROWSED_RAY]
    assert {mark_of(ROOT / file) for file in pages} == {"browser"}
    serving = re.compile(r"^from tests\.support\.ray_server", re.MULTILINE)
    assert not [file for file in pages if serving.search((ROOT / file).read_text("utf-8"))]


def test_a_file_ahead_counts_in_the_lane_that_it_runs_in() -> None:
    assert deal("abc", dict.fromkeys("abc", 1.0), ahead_s=[0.0, 2.5]) == (["a", "b", "c"], [])


def test_the_longest_files_are_dealt_first_and_the_lanes_end_together() -> None:
    seconds = {"a": 3.0, "b": 8.0, "c": 5.0, "d": 6.0}
    assert deal(seconds, seconds) == (["b", "a"], ["d", "c"])
    assert deal(seconds, seconds, ahead_s=[20.0, 0.0]) == ([], ["b", "d", "c", "a"])


def test_no_test_has_a_mark_that_its_folder_does_not_give() -> None:
    """A test on Ray among the core's might run in both lanes at once."""
    names = "|".join(FOLDERS)
    for path in TESTS.rglob("*.py"):
        for mark in re.findall(rf"pytest\.mark\.({names})\b", path.read_text(encoding="utf-8")):
            assert mark == mark_of(path), f"{path} has a test for the folder tests/{mark}"


def test_recorded_seconds_replace_older_ones_and_files_that_are_gone_are_dropped(
    tmp_path: Path,
) -> None:
    file = tmp_path / "durations.json"
    file.write_text('{"tests/test_gone.py": 4.0, "tests/test_suite.py": 9.0}', encoding="utf-8")
    (tmp_path / "v" / "tests").mkdir(parents=True)
    (tmp_path / "v" / "tests" / "test_suite.py").write_text("1.26", encoding="utf-8")
    write_durations(tmp_path / "v", file)
    assert json.loads(file.read_text(encoding="utf-8")) == {"tests/test_suite.py": 1.3}


def test_a_run_records_the_seconds_of_its_files(tmp_path: Path) -> None:
    file = Path("tests", "test_progress.py")
    settings = ["-q", "-o", f"cache_dir={tmp_path}"]
    assert run([*settings, "--record-seconds"], [[[str(ROOT / file)]], [[]]]) == 0
    assert json.loads((tmp_path / "v" / "seconds" / file).read_text(encoding="utf-8")) > 0
