"""Plots must show all values at their positions, whatever the values are."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specserve.tools.bench.plots import HEIGHT, WIDTH, Axis, bars, histogram, steps

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@given(VALUES)
@example([5e-324])
def test_a_histogram_counts_every_value_once(values: list[float]) -> None:
    plot = ET.fromstring(histogram(values, label="ms", marks={"p50": values[0]}))
    counts = [int((box.findtext("title") or "").split()[0]) for box in plot.iter("rect")]
    assert sum(counts) == len(values)
    for box in plot.iter("rect"):
        assert 0 <= float(box.attrib["x"]) <= WIDTH
        assert 0 < float(box.attrib["height"]) < HEIGHT


def test_a_few_large_values_do_not_squeeze_the_rest() -> None:
    plot = ET.fromstring(
        histogram([1.0 + 0.01 * i for i in range(300)] + [10_000.0], label="ms", marks={})
    )
    assert len(list(plot.iter("rect"))) > 10
    assert any("to 1e+04" in (title.text or "") for title in plot.iter("title"))


@pytest.mark.parametrize("end", [1e-6, 0.003, 1.0, 7.3, 59.0, 2e9])
def test_ticks_are_round_few_and_on_the_axis(end: float) -> None:
    ticks = Axis(end, 0, 100, "").ticks()
    assert 3 <= len(ticks) <= 7
    assert ticks[0] == 0
    assert ticks[-1] <= end * (1 + 1e-9)
    assert all(len(f"{tick:g}") <= 7 for tick in ticks)


@pytest.mark.parametrize("end", [1.2, 3.6, 7.3, 59.0])
def test_an_axis_of_counts_has_whole_numbers_only(end: float) -> None:
    ticks = Axis(end, 0, 100, "", counts=True).ticks()
    assert len(ticks) > 1
    assert all(tick == int(tick) for tick in ticks)


def test_steps_are_as_high_as_their_values() -> None:
    plot = ET.fromstring(steps([0.0, 10.0], end=4.0, x_label="s", y_label="tokens/s"))
    line = plot.find("polyline")
    assert line is not None
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    (left, low), (middle, _), (also_middle, high), (right, _) = points
    assert middle == also_middle == pytest.approx((left + right) / 2, abs=0.1)
    assert high < low
    ET.fromstring(steps([0.0], end=1.0, x_label="", y_label=""))  # without any tokens


def test_bars_and_dots_are_drawn_side_by_side() -> None:
    plot = ET.fromstring(
        bars(
            [1.0, 0.5],
            notes=["4 of 4", "<2> of 4"],
            predicted=[0.75, 0.75],
            x_label="position",
            y_label="accepted",
        )
    )
    tall, short = (float(box.attrib["height"]) for box in plot.iter("rect"))
    assert short == pytest.approx(tall / 2, abs=0.1)
    assert [title.text for title in plot.iter("title")] == ["4 of 4", "<2> of 4"]
    assert len({dot.attrib["cy"] for dot in plot.iter("circle")}) == 1
