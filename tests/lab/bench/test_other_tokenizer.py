"""The comparison of a draft with another tokenizer runs, on a draft that has hardly learnt."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab.bench.drafters import other_tokenizer


@pytest.mark.long
def test_both_drafts_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--minutes 0.05 --size none --turns 1 --prompts 1 --max-tokens 8".split()
    monkeypatch.setattr(sys, "argv", ["other_tokenizer", "--out", str(tmp_path / "d"), *options])
    other_tokenizer.main()
    printed = capsys.readouterr().out
    assert "alpha by p and q: demo draft 0." in printed
    assert printed.count("| other tokenizer |") == 2
