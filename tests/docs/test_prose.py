"""The prose of the pages is short, and its lines fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs._build.prose import COLUMNS, wrap
from tests.support.pages import DOCS, ROOT
from tests.support.survey import prose, prose_words

PAGES = sorted(DOCS.rglob("*.md"))
MOST_WORDS = 45_000
"""Words of all pages outside tables and blocks of code."""


def test_the_pages_have_no_more_words_than_a_reader_can_read() -> None:
    words = {page: prose_words(page.read_text(encoding="utf-8")) for page in PAGES}
    assert sum(words.values()) <= MOST_WORDS, "see `python -m tests.support.survey`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_lines_of_prose_fit(page: Path) -> None:
    wide = [
        line
        for line in prose(page.read_text(encoding="utf-8"))
        if len(line) > COLUMNS and not line.lstrip().startswith("![")
    ]
    name = page.relative_to(ROOT)
    assert not wide, f"{wide}: wrap them by `python -m docs._build.prose {name}`"


def test_wrapping_keeps_words_tables_and_blocks() -> None:
    sentence = "A round drafts, verifies and commits once, for `all running` sequences. " * 9
    kept = f"# {sentence}\n\n| {sentence} |\n|---|\n\n```sh\n{sentence}\n```\n"
    page = f"{kept}\n{sentence}\n\n1. {sentence}\n"
    wrapped = wrap(page)
    assert wrapped.startswith(kept)
    assert wrapped.split() == page.split()
    assert all(len(line) <= COLUMNS for line in prose(wrapped) if not line.startswith("#"))
    assert not re.search(r"`all$", wrapped, re.MULTILINE)
    assert wrap(wrapped) == wrapped


@pytest.mark.parametrize(
    ("markdown", "count"),
    [
        ("one two\n\nthree\n", 3),
        ("one\n\n| two |\n|---|\n", 1),
        ("one\n\n```sh\ntwo\n```\n\nthree\n", 2),
        ("1. one\n\n    ```sh\n    two\n    ```\n", 2),
    ],
)
def test_words_of_tables_and_blocks_do_not_count(markdown: str, count: int) -> None:
    assert prose_words(markdown) == count
