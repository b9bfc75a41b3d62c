"""The site says why it has no search where it was opened as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tests.support.pages import DOCS, ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGE = '<nav class="md-header__inner">specserve</nav><script src="{}"></script>'


def test_a_page_that_was_opened_as_a_file_says_that_the_search_needs_a_server(
    browser: Browser, tmp_path: Path
) -> None:
    tree = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert tree["use_directory_urls"] is False, "links would lead to folders"
    (script,) = tree["extra_javascript"]
    (tmp_path / "page.html").write_text(PAGE.format(DOCS / script), encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    said = page.locator(".md-header__inner").inner_text()
    page.close()
    assert said.startswith("specserve")
    assert "Search needs a server: python -m http.server -d site" in said
