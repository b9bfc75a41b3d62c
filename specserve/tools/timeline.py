"""Draw a trace: target and draft as two lanes, draft tokens coloured by their verification.

`python -m specserve.tools.timeline trace.json --out trace.svg` draws a trace of `GET /trace` or of
`specserve generate --trace`, after Figure 5 of arXiv 2211.17192.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from specserve.errors import BadValue

WIDTH, LEFT, RIGHT = 1100, 74, 20
LANE, GAP, TOP = 46, 20, 58
COLOURS = {
    "accepted": "#2a9d5c",
    "rejected": "#d1495b",
    "next": "#3d6fb6",
    "plain": "#8a94a6",
    "draft": "#e09f3e",
    "anticipate": "#f3dfb4",
}
LEGEND = {
    "accepted": "accepted draft",
    "rejected": "rejected draft",
    "next": "the target's own token",
    "plain": "a pass without drafts",
    "draft": "drafting that the target waits for",
    "anticipate": "preparing the next proposal",
}


@dataclass(frozen=True, slots=True)
class TraceBar:
    """Event in one lane, in microseconds."""

    name: str
    start: float
    end: float
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """The rounds that are drawn, and the events of both devices meanwhile."""

    rounds: tuple[TraceBar, ...]
    verify: tuple[TraceBar, ...]
    draft: tuple[TraceBar, ...]

    @property
    def start(self) -> float:
        return min(bar.start for bar in (*self.rounds, *self.verify))

    @property
    def end(self) -> float:
        return max(bar.end for bar in (*self.rounds, *self.verify))

    @property
    def busy(self) -> float:
        """Share of the time in which the target verifies."""
        return sum(bar.end - bar.start for bar in self.verify) / (self.end - self.start)


def select_rounds(trace: Mapping[str, Any], *, first: int | None, count: int) -> TraceWindow:
    """Return `count` rounds that decode, from round `first` on, or from the middle."""
    bars = [_bar(event) for event in trace["traceEvents"] if event["ph"] == "X"]
    lanes = {
        event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"
    }
    lane_of = [lanes[event["tid"]] for event in trace["traceEvents"] if event["ph"] == "X"]
    rounds = [
        bar
        for bar, lane in zip(bars, lane_of, strict=True)
        if bar.name == "round" and not bar.about["prompt_tokens"]
    ]
    if not rounds:
        raise BadValue("the trace has no round that decodes")
    begin = (
        len(rounds) // 2
        if first is None
        else next((i for i, bar in enumerate(rounds) if bar.about["round"] >= first), 0)
    )
    shown = rounds[begin : begin + count]
    start, end = shown[0].start, shown[-1].end

    def events(lane: str) -> tuple[TraceBar, ...]:
        return tuple(
            bar
            for bar, name in zip(bars, lane_of, strict=True)
            if name == lane and bar.end > start and bar.start < end
        )

    return TraceWindow(tuple(shown), events("target"), events("draft"))


def draw(window: TraceWindow) -> str:
    """Return the rounds as SVG, from the start of the first to the end of the last."""
    height = TOP + 2 * LANE + GAP + 64
    scale = (WIDTH - LEFT - RIGHT) / (window.end - window.start)
    body = [*_title(window), *_lane("target", 0), *_lane("draft", 1)]
    body += [
        mark
        for bar in window.verify
        for mark in _verified(bar, _round_of(bar, window), window, scale)
    ]
    body += [
        _box(bar, window, scale, y=_y(1), colour=COLOURS[bar.name])
        for bar in window.draft
        if bar.name in COLOURS
    ]
    body += [*_axis(window, scale), *_legend(height - 12)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" role="img">'
    )
    return "\n".join(
        [head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *body, "</svg>\n"]
    )


def _bar(event: Mapping[str, Any]) -> TraceBar:
    return TraceBar(event["name"], event["ts"], event["ts"] + event["dur"], event["args"])


def _round_of(bar: TraceBar, window: TraceWindow) -> TraceBar | None:
    """Return the round that a verification belongs to."""
    middle = (bar.start + bar.end) / 2
    return next((done for done in window.rounds if done.start <= middle <= done.end), None)


def _verified(
    bar: TraceBar, done: TraceBar | None, window: TraceWindow, scale: float
) -> Iterator[str]:
    """Yield a cell for each row of the pass: accepted, rejected, or added by the target."""
    if done is None:
        yield _box(bar, window, scale, y=_y(0), colour=COLOURS["plain"])
        return
    drafted, accepted, count = (
        int(done.about[key]) for key in ("drafted", "accepted", "sequences")
    )
    cells = (
        ["accepted"] * accepted
        + ["rejected"] * (drafted - accepted)
        + ["next" if drafted else "plain"] * count
    )
    each = (bar.end - bar.start) / len(cells)
    for i, kind in enumerate(cells):
        yield _box(
            TraceBar(kind, bar.start + i * each, bar.start + (i + 1) * each, {}),
            window,
            scale,
            y=_y(0),
            colour=COLOURS[kind],
        )
    x, width = LEFT + (bar.start - window.start) * scale, (bar.end - bar.start) * scale
    yield (
        f'<text x="{x + width / 2:.1f}" y="{_y(0) - 5}" text-anchor="middle" '
        f'fill="#333">+{done.about["committed"]}</text>'
    )


def _box(bar: TraceBar, window: TraceWindow, scale: float, *, y: float, colour: str) -> str:
    x, stop = (
        max(LEFT, LEFT + (time - window.start) * scale)
        for time in (bar.start, min(bar.end, window.end))
    )
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{max(stop - x, 0.4):.2f}" height="{LANE}" '
        f'fill="{colour}" stroke="white" stroke-width="0.6"/>'
    )


def _title(window: TraceWindow) -> Iterator[str]:
    committed = sum(int(done.about["committed"]) for done in window.rounds)
    hits, misses = (
        sum(int(done.about[key]) for done in window.rounds) for key in ("hits", "misses")
    )
    each = median(done.end - done.start for done in window.rounds) / 1e3
    words = (
        f"{len(window.rounds)} rounds, {committed} tokens, {each:.1f} ms a round; "
        f"target busy {window.busy:.0%} of the time"
    )
    words += f"; {hits} of {hits + misses} proposals prepared in advance" if hits + misses else ""
    yield f"<title>{words}</title>"
    yield f'<text x="{LEFT}" y="22" font-size="14" fill="#111">{words}</text>'


def _lane(name: str, number: int) -> Iterator[str]:
    y, width = _y(number), WIDTH - LEFT - RIGHT
    middle = y + LANE / 2 + 4
    yield f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end" fill="#111">{name}</text>'
    yield f'<rect x="{LEFT}" y="{y}" width="{width}" height="{LANE}" fill="#f4f5f7"/>'


def _axis(window: TraceWindow, scale: float) -> Iterator[str]:
    span, y = (window.end - window.start) / 1e3, _y(1) + LANE + 14  # ms
    step = next(
        step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if span / step <= 14
    )
    for tick in range(0, int(span) + 1, step):
        yield (
            f'<text x="{LEFT + tick * 1e3 * scale:.1f}" y="{y}" text-anchor="middle" '
            f'fill="#555" font-size="11">{tick} ms</text>'
        )


def _legend(y: float) -> Iterator[str]:
    x: float = LEFT
    for kind, words in LEGEND.items():
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield f'<text x="{x + 17}" y="{y}" fill="#333">{words}</text>'
        x += 34 + 6.2 * len(words)


def _y(lane: int) -> float:
    return TOP + lane * (LANE + GAP)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--first", type=int, help="the round to begin with; one in the middle by default"
    )
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args(arguments)
    options.out.write_text(
        draw(
            select_rounds(
                json.loads(options.trace.read_text()), first=options.first, count=options.rounds
            )
        )
    )


if __name__ == "__main__":
    main()
