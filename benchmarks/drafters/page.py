"""The page that the sections make up. One that was not measured anew stays as the page had it."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from specserve.tools.reproduce.page import Section

TITLE = "# What each kind of drafter is worth"
ABOUT = """`make bench-drafters` writes this page, `python -m benchmarks.drafters --only NAME` a section of it. How each kind works is
told in [architecture.md](architecture.md) and [cascades.md](cascades.md); how the papers' figures compare, in [reproduction.md](reproduction.md)."""


def write(file: Path, fresh: Sequence[Section], titles: Sequence[str]) -> None:
    """In the order of `titles`."""
    sections = kept(file) | {section.title: section.markdown() for section in fresh}
    file.write_text(
        "\n\n".join((TITLE, ABOUT, *(sections[title] for title in titles if title in sections)))
        + "\n",
        encoding="utf-8",
    )


def kept(file: Path) -> dict[str, str]:
    """The sections of a page as they stand, by title."""
    if not file.is_file():
        return {}
    parts = re.split(r"^(?=## )", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0].removeprefix("## "): part.strip() for part in parts}


def circumstances(threads: int) -> str:
    """Of a measurement."""
    return f"{date.today()}, {platform.machine()}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}"
