"""A picture of a trace: target and draft as two lanes, each round's drafts coloured by what became of them (after Figure 5 of arXiv 2211.17192).

`python -m specserve.tools.timeline trace.json --out trace.svg`, with a trace of `GET /trace` or of `specserve generate --trace`.
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
    "refused": "#d1495b",
    "next": "#3d6fb6",
    "plain": "#8a94a6",
    "draft": "#e09f3e",
    "anticipate": "#f3dfb4",
}
LEGEND = {
    "accepted": "accepted draft",
    "refused": "refused draft",
    "next": "the target's own token",
    "draft": "drafting that the target waits for",
    "anticipate": "preparing the next proposal",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """Something in one lane, in microseconds."""

    name: str
    begun: float
    ended: float
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scene:
    """The rounds that are shown, and what both devices did in their time."""

    rounds: tuple[Bar, ...]
    verify: tuple[Bar, ...]
    draft: tuple[Bar, ...]

    @property
    def begun(self) -> float:
        return min(bar.begun for bar in (*self.rounds, *self.verify))

    @property
    def ended(self) -> float:
        return max(bar.ended for bar in (*self.rounds, *self.verify))

    @property
    def busy(self) -> float:
        """The target's share of the time."""
        return sum(bar.ended - bar.begun for bar in self.verify) / (self.ended - self.begun)


def read(trace: Mapping[str, Any], *, first: int | None, count: int) -> Scene:
    """`count` rounds that decode, from round `first` on; by default from the middle."""
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
    since, until = shown[0].begun, shown[-1].ended

    def of(lane: str) -> tuple[Bar, ...]:
        return tuple(
            bar
            for bar, name in zip(bars, lane_of, strict=True)
            if name == lane and bar.ended > since and bar.begun < until
        )

    return Scene(tuple(shown), of("target"), of("draft"))


def draw(scene: Scene) -> str:
    """As SVG. The lanes' time runs from the first round's beginning to the last one's end."""
    height = TOP + 2 * LANE + GAP + 64
    scale = (WIDTH - LEFT - RIGHT) / (scene.ended - scene.begun)
    body = [*_title(scene), *_lane("target", 0), *_lane("draft", 1)]
    body += [
        mark for bar in scene.verify for mark in _verified(bar, _round_of(bar, scene), scene, scale)
    ]
    body += [
        _box(bar, scene, scale, y=_y(1), colour=COLOURS[bar.name])
        for bar in scene.draft
        if bar.name in COLOURS
    ]
    body += [*_axis(scene, scale), *_legend(height - 12)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12" role="img">'
    return "\n".join(
        [head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *body, "</svg>\n"]
    )


def _bar(event: Mapping[str, Any]) -> Bar:
    return Bar(event["name"], event["ts"], event["ts"] + event["dur"], event["args"])


def _round_of(bar: Bar, scene: Scene) -> Bar | None:
    """The round that a verification belongs to."""
    middle = (bar.begun + bar.ended) / 2
    return next((done for done in scene.rounds if done.begun <= middle <= done.ended), None)


def _verified(bar: Bar, done: Bar | None, scene: Scene, scale: float) -> Iterator[str]:
    """A cell for each share of the pass's rows: accepted, refused, and what the target added."""
    if done is None:
        yield _box(bar, scene, scale, y=_y(0), colour=COLOURS["plain"])
        return
    drafted, accepted, count = (
        int(done.about[key]) for key in ("drafted", "accepted", "sequences")
    )
    cells = (
        ["accepted"] * accepted
        + ["refused"] * (drafted - accepted)
        + ["next" if drafted else "plain"] * count
    )
    each = (bar.ended - bar.begun) / len(cells)
    for i, kind in enumerate(cells):
        yield _box(
            Bar(kind, bar.begun + i * each, bar.begun + (i + 1) * each, {}),
            scene,
            scale,
            y=_y(0),
            colour=COLOURS[kind],
        )
    x, width = LEFT + (bar.begun - scene.begun) * scale, (bar.ended - bar.begun) * scale
    yield f'<text x="{x + width / 2:.1f}" y="{_y(0) - 5}" text-anchor="middle" fill="#333">+{done.about["committed"]}</text>'


def _box(bar: Bar, scene: Scene, scale: float, *, y: float, colour: str) -> str:
    x, stop = (
        max(LEFT, LEFT + (time - scene.begun) * scale)
        for time in (bar.begun, min(bar.ended, scene.ended))
    )
    return f'<rect x="{x:.2f}" y="{y}" width="{max(stop - x, 0.4):.2f}" height="{LANE}" fill="{colour}" stroke="white" stroke-width="0.6"/>'


def _title(scene: Scene) -> Iterator[str]:
    committed = sum(int(done.about["committed"]) for done in scene.rounds)
    hits, misses = (
        sum(int(done.about[key]) for done in scene.rounds) for key in ("hits", "misses")
    )
    each = median(done.ended - done.begun for done in scene.rounds) / 1e3
    words = f"{len(scene.rounds)} rounds, {committed} tokens, {each:.1f} ms a round; target busy {scene.busy:.0%} of the time"
    words += f"; {hits} of {hits + misses} proposals prepared in advance" if hits + misses else ""
    yield f"<title>{words}</title>"
    yield f'<text x="{LEFT}" y="22" font-size="14" fill="#111">{words}</text>'


def _lane(name: str, number: int) -> Iterator[str]:
    yield f'<text x="{LEFT - 10}" y="{_y(number) + LANE / 2 + 4}" text-anchor="end" fill="#111">{name}</text>'
    yield f'<rect x="{LEFT}" y="{_y(number)}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}" fill="#f4f5f7"/>'


def _axis(scene: Scene, scale: float) -> Iterator[str]:
    span, y = (scene.ended - scene.begun) / 1e3, _y(1) + LANE + 14  # ms
    step = next(
        step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if span / step <= 14
    )
    for tick in range(0, int(span) + 1, step):
        yield f'<text x="{LEFT + tick * 1e3 * scale:.1f}" y="{y}" text-anchor="middle" fill="#555" font-size="11">{tick} ms</text>'


def _legend(y: float) -> Iterator[str]:
    x = LEFT
    for kind, words in LEGEND.items():
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield f'<text x="{x + 17}" y="{y}" fill="#333">{words}</text>'
        x += 40 + 7 * len(words)


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
        draw(read(json.loads(options.trace.read_text()), first=options.first, count=options.rounds))
    )


if __name__ == "__main__":
    main()
