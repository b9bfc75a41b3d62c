"""The benchmark of shared weights runs, and its second process opens what the first has packed."""

from __future__ import annotations

import pytest

from lab.bench.shared_weights import main
from specserve.models.cpu.mapped_file import can_map


@pytest.mark.skipif(not can_map(), reason="weights cannot be mapped here")
def test_the_quick_form_measures_processes_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| ")]
    [opened] = [row for row in rows if row[0] == " shared "]
    assert all(float(cell) > 0 for cell in opened[1:])
    assert [row[0] for row in rows[-3:]] == [" 1 ", " 4 ", " 8 "]
