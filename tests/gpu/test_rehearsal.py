"""The steps for a card run on an emulated one, so that they run on the day when one is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import check
from tests.gpu.__main__ import STEPS, main
from tests.gpu.sections import Results, Scale, run_sections
from tests.support import checkpoints
from tests.support.card import emulated_cards, flashinfer


@pytest.mark.parametrize("step", STEPS)
def test_every_section_of_a_step_runs(step: str, tmp_path: Path) -> None:
    for kind in checkpoints.ARCHITECTURES[:2]:
        check.checkpoint(kind)  # written by the host
    with emulated_cards(), flashinfer.installed():
        assert main([step, "--small", "--results", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / f"{step}.json").read_text())
    assert list(kept) == list(STEPS[step])
    assert all(section["results"] for section in kept.values())


def test_a_section_that_fails_takes_no_other_down(tmp_path: Path) -> None:
    def fail(scale: Scale) -> Results:
        raise RuntimeError("out of luck")

    sections = {"one": fail, "other": lambda scale: {"small": scale.is_small}}
    with emulated_cards():
        assert not run_sections("step", sections, Scale(True), tmp_path)
    kept = json.loads((tmp_path / "step.json").read_text())
    assert kept["one"]["results"]["failed"] == "RuntimeError: out of luck"
    assert kept["other"]["results"] == {"small": True}


def test_the_page_says_what_was_not_run(tmp_path: Path) -> None:
    results = {
        "ceilings": {"seconds": 1.5, "results": {"copy, TB/s": 3.1, "by size": {"8": "a|b"}}}
    }
    (tmp_path / "speed.json").write_text(json.dumps(results))
    out = tmp_path / "gpu.md"
    assert main(["page", "--results", str(tmp_path), "--out", str(out)]) == 0
    page = out.read_text()
    assert "| copy, TB/s | 3.1 |" in page
    assert "| by size: 8 | a\\|b |" in page
    assert page.count("**Not run.**") == len(STEPS) - 1
