"""Wrap the prose of pages at 100 columns, for pages that a command has written.

`python -m docs._build.prose docs/measurements/fleet.md`. Knows no words: tables, blocks of code,
headings, images and comments stay as they are; code that is only indented does not.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

COLUMNS = 100
KEPT = re.compile(r"^(?:[|#<]|!\[|-{3,}$)")
"""Beginnings of lines that stay as they are."""
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +")
MARKER = re.compile(r"[-*+#>]+$|\d+[.)]$|[>|]")
"""Words that would begin a list, a heading, a quotation or a table at the head of a line."""


def wrap(markdown: str) -> str:
    """Return the page with its paragraphs and list items filled to COLUMNS."""
    done: list[str] = []
    paragraph: list[str] = []
    fence = "---" if markdown.startswith("---\n") else ""
    for number, line in enumerate(markdown.split("\n")):
        text = line.strip()
        opened = re.match(r"`{3,}", text)
        if fence or opened or not text or KEPT.match(text):
            done += _filled(paragraph)
            paragraph = []
            done.append(line)
            if fence and number:
                fence = "" if text == fence else fence
            elif opened:
                fence = opened[0]
        elif ITEM.match(line):
            done += _filled(paragraph)
            paragraph = [line]
        else:
            paragraph.append(line)
    return "\n".join(done + _filled(paragraph))


def _filled(paragraph: list[str]) -> list[str]:
    """Return the lines of one paragraph or list item, no code span of it broken."""
    if not paragraph:
        return []
    item = ITEM.match(paragraph[0])
    indent = len(paragraph[0]) - len(paragraph[0].lstrip())
    first = item[0] if item else " " * indent
    text = " ".join([paragraph[0][len(first) :], *paragraph[1:]])
    lines = [first]
    for word in _words(text):
        if lines[-1] != first and len(lines[-1]) + len(word) >= COLUMNS:
            if MARKER.match(word):
                lines[-1], _, before = lines[-1].rpartition(" ")
                word = f"{before} {word}"
            lines.append(" " * len(first) + word)
        else:
            lines[-1] += word if lines[-1] == first else f" {word}"
    return lines


def _words(text: str) -> list[str]:
    """Return the words of `text`; a code span counts as part of one word."""
    return [found[0] for found in re.finditer(r"(?:(`+).+?\1|[^\s`]|`)+", text)]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(wrap(page.read_text(encoding="utf-8")), encoding="utf-8")
