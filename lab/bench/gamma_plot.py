"""A sweep of gammas beside the pacer's choice: in which order, and as a table and an SVG plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

CHOICES: dict[str, int | None] = {"0": 0, "2": 2, "4": 4, "8": 8, "auto": None}
Rates = dict[int, dict[str, list[float]]]
"""Tokens a second of each turn, by number of streams and gamma."""


def in_turn(turn: int) -> Iterator[str]:
    """Yield the choices in an order of their own each turn: the machine changes in its course."""
    names = list(CHOICES)
    yield from (names[(turn + position) % len(names)] for position in range(len(names)))


def table(rates: Rates) -> Iterator[str]:
    """Yield a line for each number of streams: medians, and the pacer beside the best gamma."""
    names = [name for name in CHOICES if name != "auto"]
    yield (
        f"| streams | {' | '.join(f'gamma {name}' for name in names)} | auto (spread) "
        "| auto / best fixed | auto / gamma 0 |"
    )
    yield "|---" * (len(names) + 4) + "|"
    for count, by_gamma in rates.items():
        medians = {name: median(values) for name, values in by_gamma.items()}
        best = max(names, key=lambda name: medians[name])
        auto = by_gamma["auto"]
        cells = " | ".join(f"{medians[name]:.0f}" for name in names)
        yield (
            f"| {count} | {cells} | {medians['auto']:.0f} ({min(auto):.0f} to {max(auto):.0f}) "
            f"| {_ratio(auto, by_gamma[best]):.3f} (of gamma {best}) "
            f"| {_ratio(auto, by_gamma['0']):.3f} |"
        )


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the median of the ratios of each turn."""
    return median(a / b for a, b in zip(one, other, strict=True))


def plot(rates: Rates) -> str:
    """Return the plot of a sweep: bars over plain decoding's, with the table's tokens/s."""
    width, height, left, base = max(760, 72 + 172 * len(rates)), 300, 60, 250
    highest = max(
        median(values) / median(by_gamma["0"])
        for by_gamma in rates.values()
        for values in by_gamma.values()
    )
    scale = 200 / highest
    colours = {"0": "#8a94a6", "2": "#f3dfb4", "4": "#e09f3e", "8": "#b5651d", "auto": "#2a9d5c"}
    marks = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" role="img">'
    ]
    marks += [
        "<title>Tokens a second by streams and gamma, beside plain decoding</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    marks += [
        f'<line x1="{left}" x2="{width - 20}" y1="{base - scale}" y2="{base - scale}" '
        'stroke="#999" stroke-dasharray="4 3"/>'
    ]
    for group, (batch, by_gamma) in enumerate(rates.items()):
        x = left + group * 172
        for i, (name, values) in enumerate(by_gamma.items()):
            bar = scale * median(values) / median(by_gamma["0"])
            marks.append(
                f'<rect x="{x + 28 * i}" y="{base - bar:.1f}" width="24" height="{bar:.1f}" '
                f'fill="{colours[name]}"/>'
            )
            marks.append(
                f'<text x="{x + 28 * i + 12}" y="{base - bar - 4:.1f}" text-anchor="middle" '
                f'font-size="10">{median(values):.0f}</text>'
            )
            marks.append(
                f'<text x="{x + 28 * i + 12}" y="{base + 14}" text-anchor="middle" '
                f'font-size="10">{name}</text>'
            )
        marks.append(
            f'<text x="{x + 70}" y="{base + 34}" text-anchor="middle">{batch} '
            f"stream{'s' if batch > 1 else ''}</text>"
        )
    marks.append(
        f'<text x="{left}" y="20" font-size="14">tokens/s by gamma; the dashed line is plain '
        "decoding of as many streams</text></svg>"
    )
    return "\n".join(marks) + "\n"
