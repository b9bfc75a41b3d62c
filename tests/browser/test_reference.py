"""The API's reference, in a real Chromium, shows every path and every parameter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from docs._build.endpoints import openapi
from tests.support.browser import KEY, expect, tab
from tests.support.http_server import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_every_path_and_parameter_is_shown_and_a_key_is_asked_for(
    browser: Browser, tmp_path: Path
) -> None:
    (file := tmp_path / "keys").write_text(KEY)
    description = openapi()
    with (
        serving(config={"http.api_keys_file": str(file)}) as server,
        tab(browser, server.url + "/docs", ready=False) as page,
    ):
        page.get_by_label("Key", exact=True).fill(KEY)
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#state")).to_have_text("Model demo.")
        titles = page.locator("#paths h2").all_inner_texts()
        for path, methods in description["paths"].items():
            assert {f"{method.upper()} {path}" for method in methods} <= {*titles}
        shown = {*page.locator("#paths td:first-child code").all_inner_texts()}
        for shape in description["components"]["schemas"].values():
            assert {*shape.get("properties", ())} <= shown
        targets = page.locator("#paths a, nav a").evaluate_all(
            "links => links.map((link) => link.getAttribute('href'))"
        )
        for target in {*targets}:
            assert re.fullmatch(r"#[a-z0-9-]+", target)
            expect(page.locator(target)).to_have_count(1)
