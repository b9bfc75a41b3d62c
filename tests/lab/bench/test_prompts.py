"""The benchmark of new prompts and of equal prompts runs on today's engine."""

from __future__ import annotations

import sys

import pytest

from lab.bench import prompts
from specserve.config.tree import DEMO

TEXT = [(7 * i) % 1000 for i in range(2000)]
KEYS: dict[str, object] = {"cache.pages": 400}


def test_new_prompts_beside_running_sequences_get_their_token_in_time() -> None:
    figures = prompts.measure_new_prompts(
        DEMO / "target", TEXT, running=3, prompts=2, keys={**KEYS, "limits.max_batch_tokens": 64}
    )
    assert (len(figures.first_token), figures.num_starved) == (2, 0)
    assert min(figures.longest_gap) > 0
    assert "| 3 | 2 of 2 |" in str(figures)


def test_continuations_of_one_prompt_compute_it_once() -> None:
    figures = prompts.measure_equal_prompts(
        DEMO / "target", TEXT, prompts=1, continuations=8, keys={**KEYS, "speculation.gamma": 0}
    )
    assert figures.rows[0] <= prompts.PROMPT + 7 * 16 + 8


def test_the_command_prints_both_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prompts", "--quick", "--threads", "1"])
    prompts.main()
    printed = capsys.readouterr().out
    assert "| 4 | 2 of 2 |" in printed
    assert "| equal prompts at once |" in printed
