"""Draw the medians of a comparison as an SVG: a group of bars for each load."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from lab.bench.peers.comparison import ComparisonRow
from lab.bench.peers.section import ComparisonSection

WIDTH, LEFT, BAR, GAP, HEAD = 760, 250, 16, 30, 34
SCALE = WIDTH - LEFT - 70
OURS_COLOUR, PEER_COLOUR = "#2a9d5c", "#8a94a6"


def plot(section: ComparisonSection) -> str:
    """Return the plot; each load has a scale of its own, and its spread is a line on the bar."""
    marks: list[str] = []
    y = HEAD
    for load in section.loads:
        rows = [row for row in section.rows_of(load) if row.rates]
        if rows:
            marks += _group(load, rows, y)
            y += GAP + BAR * len(rows)
    title = f"Tokens a second by load: {section.pair}, {section.interface}"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10}" '
        'font-family="sans-serif" font-size="11" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{y + 10}" fill="white"/>',
        f'<text x="8" y="18" font-size="13">{escape(title)}</text>',
    ]
    return "\n".join([*head, *marks, "</svg>"]) + "\n"


def _group(load: str, rows: Sequence[ComparisonRow], y: int) -> list[str]:
    scale = SCALE / max(max(row.rates) for row in rows)
    marks = [f'<text x="8" y="{y + 14}" font-weight="bold">{escape(load)}</text>']
    for number, row in enumerate(rows):
        top = y + 20 + BAR * number
        marks += _bar(row, top, scale)
    return marks


def _bar(row: ComparisonRow, top: int, scale: float) -> list[str]:
    colour = OURS_COLOUR if row.entry.is_ours else PEER_COLOUR
    low, high = (LEFT + scale * rate for rate in (min(row.rates), max(row.rates)))
    middle, name = top + BAR // 2 - 1, f"{row.entry.system}, {row.entry.name}"
    return [
        f'<text x="{LEFT - 6}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>',
        f'<rect x="{LEFT}" y="{top}" width="{scale * row.median_rate:.1f}" height="{BAR - 3}" '
        f'fill="{colour}"/>',
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke="#222"/>',
        f'<text x="{high + 6:.1f}" y="{middle + 4}">{row.median_rate:.1f}</text>',
    ]
