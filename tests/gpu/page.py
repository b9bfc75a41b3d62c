"""The page of what was run on a card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path

MODELS = """The models of `decode` have the shapes of Llama 3.1 8B and of a 1B with heads of 128,
and compute what the demo pair computes (`tests/gpu/true_shapes.py`): 128 tokens of a prompt, 256 of
text, greedy unless T is named, the median of three runs and the range. Texts of drafts differ from
those without by near ties, which other kernels decide otherwise. Other steps have random weights
unless a section says otherwise."""


def write_page(results: Path, steps: Sequence[str], out: Path) -> None:
    """Write a page of the results of these steps; a step that was not run is said to be missing."""
    out.write_text("\n".join(_lines(results, steps)) + "\n", encoding="utf-8")


def _lines(results: Path, steps: Sequence[str]) -> Iterator[str]:
    yield "# On a GPU"
    yield ""
    yield f"{date.today()}; `make gpu`. {MODELS}"
    for step in steps:
        file = results / f"{step}.json"
        yield ""
        yield f"## {step.capitalize()}"
        if not file.exists():
            yield ""
            yield "**Not run.**"
            continue
        for name, section in json.loads(file.read_text()).items():
            yield ""
            yield f"### {name}"
            yield ""
            yield f"{section['seconds']} s"
            yield ""
            yield from _table(section["results"])


def _table(found: Mapping[str, object]) -> Iterator[str]:
    yield "| | |"
    yield "|---|---|"
    for name, value in found.items():
        if isinstance(value, Mapping) and value:
            for part, inner in value.items():
                yield f"| {name}: {part} | {_cell(inner)} |"
        else:
            yield f"| {name} | {_cell(value)} |"


def _cell(value: object) -> str:
    if isinstance(value, list):
        value = "; ".join(str(part).strip() for part in value)
    return str(value).replace("|", "\\|").replace("\n", " ")
