"""Sections of a page in Markdown, and their pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specserve.tools.plan.curves import Panel, draw


@dataclass(frozen=True, slots=True)
class Section:
    """Section of a page. Pictures are by the part of the file's name that differs."""

    title: str
    text: str
    pictures: Mapping[str, Sequence[Panel]] = field(default_factory=dict)

    def markdown(self) -> str:
        images = [
            f"![{' / '.join(panel.title for panel in panels)}](reproduction-{name}.png)"
            for name, panels in self.pictures.items()
        ]
        return "\n\n".join((f"## {self.title}", self.text.strip(), *images))

    def draw(self, directory: Path) -> None:
        for name, panels in self.pictures.items():
            draw(panels, directory / f"reproduction-{name}.png")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join((lines[0], "|---" * len(heads) + "|", *lines[1:]))
