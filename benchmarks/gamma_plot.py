"""Tokens a second by gamma as a picture that stands alone: grouped bars, one group for each number of streams."""

from __future__ import annotations

from statistics import median


def plot(rates: dict[int, dict[str, list[float]]]) -> str:
    """The sweep as bars, each batch relative to its own plain decoding."""
    width, height, left, base = 760, 300, 60, 250
    highest = max(
        median(values) / median(found["0"]) for found in rates.values() for values in found.values()
    )
    scale = 200 / highest
    colours = {"0": "#8a94a6", "2": "#f3dfb4", "4": "#e09f3e", "8": "#b5651d", "auto": "#2a9d5c"}
    marks = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" role="img">'
    ]
    marks += [
        "<title>Tokens a second over those of plain decoding, by streams and gamma</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    marks += [
        f'<line x1="{left}" x2="{width - 20}" y1="{base - scale}" y2="{base - scale}" stroke="#999" stroke-dasharray="4 3"/>'
    ]
    for place, (batch, found) in enumerate(rates.items()):
        x = left + place * 172
        for i, (name, values) in enumerate(found.items()):
            tall = scale * median(values) / median(found["0"])
            marks.append(
                f'<rect x="{x + 28 * i}" y="{base - tall:.1f}" width="24" height="{tall:.1f}" fill="{colours[name]}"/>'
            )
            marks.append(
                f'<text x="{x + 28 * i + 12}" y="{base - tall - 4:.1f}" text-anchor="middle" font-size="10">{tall / scale:.2f}</text>'
            )
            marks.append(
                f'<text x="{x + 28 * i + 12}" y="{base + 14}" text-anchor="middle" font-size="10">{name}</text>'
            )
        marks.append(
            f'<text x="{x + 70}" y="{base + 34}" text-anchor="middle">{batch} stream{"s" if batch > 1 else ""}</text>'
        )
    marks.append(
        f'<text x="{left}" y="20" font-size="14">tokens/s over plain decoding, by gamma</text></svg>'
    )
    return "\n".join(marks) + "\n"
