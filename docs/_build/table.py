"""Tables and code in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; line breaks in cells become spaces."""
    lines = [head, ["---"] * len(head), *rows]
    assert all(len(line) == len(head) for line in lines), "every row has a cell for each column"
    return (
        "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines) + "\n"
    )


def code(text: object) -> str:
    """Return the text as code, between two backticks if it contains one."""
    plain = str(text)
    return f"`` {plain} ``" if "`" in plain else f"`{plain}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
