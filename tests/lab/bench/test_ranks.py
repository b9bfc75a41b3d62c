"""The benchmark of sums over ranks runs, and writes its tables into the file that is named."""

from __future__ import annotations

from pathlib import Path

from lab.bench.ranks import main


def test_the_quick_form_measures_sums_passes_and_blocks(tmp_path: Path) -> None:
    main(["--quick", "--pairs", "2", "--out", str(tmp_path / "ranks.md")])
    lines = (tmp_path / "ranks.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "| 1 |" in line]
    assert [row[:-3] for row in rows] == [["2", "1", "64"], ["2", "1"], ["1"]]
    assert all(float(seconds) > 0 for row in rows for seconds in row[-3:-1])
