"""Plots as SVG text: histograms, bars with marks, steps over time.

Knows values and units; neither the page around a plot nor what the values mean. Written by hand,
so that the HTML report needs no plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 40
_BINS = 40
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from 0 to `end`, mapped to a range of pixels."""

    end: float
    start_px: float
    end_px: float
    label: str
    counts: bool = False  # whole numbers only

    def at(self, value: float) -> float:
        return self.start_px + (self.end_px - self.start_px) * min(1.0, value / self.end)

    def ticks(self) -> list[float]:
        """Return about five round numbers, or fewer where they count something."""
        step = 10 ** math.floor(math.log10(self.end / 5))
        step = next(step * factor for factor in (1, 2, 5, 10) if self.end / (step * factor) <= 6)
        step = max(step, 1.0) if self.counts else step
        return [step * number for number in range(int(self.end / step + 1e-9) + 1)]


def histogram(values: Sequence[float], *, label: str, marks: Mapping[str, float]) -> str:
    """Return a histogram. The few very large values share the last bin.

    `marks` are named values, such as percentiles.
    """
    ordered = sorted(values)
    across = _across(
        min(ordered[-1], 2 * ordered[math.ceil(0.99 * (len(ordered) - 1))]) * 1.0001, label
    )
    end = across.end
    counts = [0] * _BINS
    for value in ordered:
        counts[min(_BINS - 1, int(value / end * _BINS))] += 1
    up = _up(max(counts) * 1.2, "count", counts=True)
    bars = [
        _bar(
            across.at(end * i / _BINS),
            across.at(end * (i + 1) / _BINS),
            up,
            count,
            f"{count} from {end * i / _BINS:.3g} "
            f"to {end * (i + 1) / _BINS if i < _BINS - 1 else ordered[-1]:.3g}",
        )
        for i, count in enumerate(counts)
        if count
    ]
    return _plot([*_axes(across, up), *bars, *_marks(marks, across)], label)


def steps(values: Sequence[float], *, end: float, x_label: str, y_label: str) -> str:
    """Return a step plot with a value for each of equal intervals from 0 to `end`."""
    across, up = _across(end, x_label), _up(max(values, default=0.0) * 1.1, y_label)
    width = end / max(1, len(values))
    points = [
        f"{across.at(x):.1f},{up.at(value):.1f}"
        for i, value in enumerate(values)
        for x in (i * width, (i + 1) * width)
    ]
    floor = up.at(0)
    area = (
        f'<polygon class="area" points="{across.at(0):.1f},{floor:.1f} {" ".join(points)} '
        f'{across.at(end):.1f},{floor:.1f}"/>'
    )
    return _plot(
        [*_axes(across, up), area, f'<polyline class="line" points="{" ".join(points)}"/>'], y_label
    )


def bars(
    values: Sequence[float],
    *,
    notes: Sequence[str],
    predicted: Sequence[float],
    x_label: str,
    y_label: str,
) -> str:
    """Return a bar with a share for each position from 1 on, and a dot for its prediction."""
    count = max(len(values), 1)
    across, up = Axis(count, _LEFT, WIDTH - _RIGHT, x_label), _up(1.0, y_label)
    shapes = [
        _bar(across.at(i + 0.15), across.at(i + 0.85), up, value, note)
        for i, (value, note) in enumerate(zip(values, notes, strict=True))
    ]
    dots = [
        f'<circle class="mark" cx="{across.at(i + 0.5):.1f}" cy="{up.at(value):.1f}" r="4"/>'
        for i, value in enumerate(predicted)
    ]
    names = [
        _text(across.at(i + 0.5), HEIGHT - _BOTTOM + 15, str(i + 1)) for i in range(len(values))
    ]
    return _plot([*_frame(across, up), *_grid(up), *shapes, *dots, *names], y_label)


def _across(end: float, label: str) -> Axis:
    return Axis(_shown(end), _LEFT, WIDTH - _RIGHT, label)


def _up(end: float, label: str, *, counts: bool = False) -> Axis:
    return Axis(_shown(end), HEIGHT - _BOTTOM, _TOP, label, counts)


def _shown(end: float) -> float:
    """Return the end of an axis: 1 where all values are almost 0."""
    return end if end > _TINY else 1.0


def _plot(parts: Sequence[str], name: str) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">\n'
        f"{body}\n</svg>"
    )


def _axes(across: Axis, up: Axis) -> Iterator[str]:
    yield from _frame(across, up)
    yield from _grid(up)
    for tick in across.ticks():
        yield _text(across.at(tick), HEIGHT - _BOTTOM + 15, f"{tick:g}")


def _frame(across: Axis, up: Axis) -> Iterator[str]:
    floor = up.at(0)
    yield (
        f'<line class="axis" x1="{_LEFT}" y1="{floor:.1f}" x2="{WIDTH - _RIGHT}" y2="{floor:.1f}"/>'
    )
    yield _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 6, across.label)
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    yield (
        f'<text x="12" y="{middle:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {middle:.1f})">{escape(up.label)}</text>'
    )


def _grid(up: Axis) -> Iterator[str]:
    for tick in up.ticks():
        yield (
            f'<line class="grid" x1="{_LEFT}" y1="{up.at(tick):.1f}" '
            f'x2="{WIDTH - _RIGHT}" y2="{up.at(tick):.1f}"/>'
        )
        yield _text(_LEFT - 5, up.at(tick) + 4, f"{tick:g}", anchor="end")


def _bar(left: float, right: float, up: Axis, value: float, note: str) -> str:
    top, floor = up.at(value), up.at(0)
    size = (
        f'x="{left + 0.5:.1f}" y="{top:.1f}" '
        f'width="{max(0.5, right - left - 1):.1f}" height="{floor - top:.1f}"'
    )
    return f'<rect class="bar" {size}><title>{escape(note)}</title></rect>'


def _marks(marks: Mapping[str, float], across: Axis) -> Iterator[str]:
    """Yield a vertical line for each mark, with the names one below the other."""
    for row, (name, value) in enumerate(marks.items()):
        x = across.at(value)
        anchor, gap = ("start", 4) if x < (_LEFT + WIDTH) * 0.6 else ("end", -4)
        yield (
            f'<line class="quantile" x1="{x:.1f}" y1="{_TOP}" '
            f'x2="{x:.1f}" y2="{HEIGHT - _BOTTOM}"/>'
        )
        yield _text(x + gap, _TOP + 12 + 14 * row, f"{name} {value:.3g}", anchor=anchor)


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
