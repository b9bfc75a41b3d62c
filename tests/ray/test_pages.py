"""Blocks of the pages that ask a server do what they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_pages import RUN, block_name, folder, run
from tests.support.pages import Block
from tests.support.ray_server import SharedServe

__all__ = ["folder"]  # a fixture


@pytest.fixture(scope="module")
def url(shared_serve: SharedServe) -> Iterator[str]:
    with shared_serve.served({"target.threads": 1, "draft.threads": 1}) as (url, _):
        yield url


@pytest.mark.parametrize("block", [block for block in RUN if block.asks_server], ids=block_name)
def test_it_does_what_it_says_to_a_server(
    block: Block, url: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(block, url, capsys)
