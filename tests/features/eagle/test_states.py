"""States of the target that arrive, and wait for steps that read them."""

from __future__ import annotations

import pytest
import torch

from specserve.features.eagle.states import ArrivedStates
from specserve.models.hidden_taps import HiddenRows

WIDTH = 4


def states() -> ArrivedStates:
    return ArrivedStates(lambda taps: taps)


def rows(start: int, stop: int) -> HiddenRows:
    numbers = torch.arange(start, stop, dtype=torch.float32)
    return HiddenRows(0, start, numbers[:, None].expand(-1, WIDTH))


def positions(found: ArrivedStates) -> list[tuple[int, list[float]]]:
    return [(part.start, part.rows[:, 0].tolist()) for part in found.parts(0)]


def test_newer_states_replace_those_of_the_same_and_later_positions() -> None:
    found = states()
    found.receive([rows(0, 4)])
    found.receive([rows(4, 6)])
    found.receive([rows(6, 9)])
    found.receive([rows(5, 7)])
    assert positions(found) == [(0, [0, 1, 2, 3]), (4, [4]), (5, [5, 6])]
    found.receive([rows(2, 3)])
    assert positions(found) == [(0, [0, 1]), (2, [2])]
    found.receive([rows(0, 1)])
    assert positions(found) == [(0, [0])]


def test_a_round_costs_as_much_after_a_thousand_in_which_nothing_was_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, cut = states(), []
    between = HiddenRows.between

    def counted(self: HiddenRows, start: int, stop: int | None = None) -> HiddenRows:
        cut.append(start)
        return between(self, start, stop)

    monkeypatch.setattr(HiddenRows, "between", counted)
    for position in range(1000):
        found.receive([rows(position, position + 1)])
    assert len(positions(found)) == 1000
    assert len(cut) <= 1000
