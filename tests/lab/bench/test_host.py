"""Budgets of the host's calls in a round. They may fall, and never rise."""

from __future__ import annotations

import pytest
import torch

from lab.bench.host import measure

ROUNDS = 3
BUDGETS = {
    (1, 0, 0.0): 320,
    (32, 0, 0.0): 3600,
    (1, 3, 0.0): 700,
    (32, 3, 0.0): 7600,
    (1, 0, 1.0): 410,
}
"""Calls of Python functions, by sequences, draft tokens and temperature."""


@pytest.mark.parametrize("setting", BUDGETS, ids=str)
def test_round_calls_no_more_than_its_budget(setting: tuple[int, int, float]) -> None:
    torch.set_num_threads(1)
    found = measure(*setting, ROUNDS).num_calls
    assert found <= BUDGETS[setting], f"{found:.0f} calls"
