"""Plot of tokens per second by gamma, as an SVG file: bars, in one group per number of streams."""

from __future__ import annotations

from statistics import median


def plot(rates: dict[int, dict[str, list[float]]]) -> str:
    """Return the plot of a sweep, each batch relative to its own plain decoding.

    `rates` has the tokens per second of each turn, by number of streams and then by gamma.
    """
    width, height, left, base = 760, 300, 60, 250
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
        "<title>Tokens a second over those of plain decoding, by streams and gamma</title>",
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
                f'font-size="10">{bar / scale:.2f}</text>'
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
        f'<text x="{left}" y="20" font-size="14">tokens/s over plain decoding, by '
        "gamma</text></svg>"
    )
    return "\n".join(marks) + "\n"
