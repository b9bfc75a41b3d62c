"""Writes what the demo pair was trained on, and what was held out, as text files: `python -m specserve.demo.corpus DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

from specserve.demo.train import standard_library


def write(directory: Path) -> None:
    """DIR/train and DIR/held_out, a file for each module."""
    corpus = standard_library()
    for name, texts in (("train", corpus.train), ("held_out", corpus.held_out)):
        (directory / name).mkdir(parents=True, exist_ok=True)
        for i, text in enumerate(texts):
            (directory / name / f"{i:04}.py").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
