"""The table of a link's pauses can be made: `--quick`, with the faults that take no time."""

from __future__ import annotations

from tests.chaos.link_pauses import report


def test_every_round_around_a_cut_is_answered_and_the_table_has_its_pause() -> None:
    table = report(times=1, longest_s=0.0)
    assert "| cut by FIN | 1 |" in table
    assert "| cut by RST | 1 |" in table
