"""Blocks of the pages that need no server do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_pages import RUN, block_name, folder, run
from tests.support.pages import URL, Block

__all__ = ["folder"]  # a fixture


@pytest.mark.parametrize("block", [block for block in RUN if not block.asks_server], ids=block_name)
def test_it_does_what_it_says(
    block: Block, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(block, URL, capsys)
