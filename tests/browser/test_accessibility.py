"""The playground with a keyboard, a screen reader, reduced motion, or on a phone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.accessibility import faint, nameless, violations
from tests.support.browser import KEY, PHONE, ColorScheme, Slow, expect, finish, inside, tab
from tests.support.http_server import RunningServer, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_everything_can_be_done_with_the_keyboard(browser: Browser) -> None:
    with serving(Slow(hangs_after=12)) as server, tab(browser, server.url) as page:
        reached = []
        for _ in range(24):
            page.keyboard.press("Tab")
            reached.append(
                inside(
                    page,
                    "document.activeElement.id || document.activeElement.name"
                    " || document.activeElement.tagName",
                )
            )
        controls = [
            "mode",
            "prompt",
            "go",
            "race",
            "max_tokens",
            "temperature",
            "top_p",
            "seed",
            "gamma",
            "verifier",
            "stop_texts",
            "response_format",
        ]
        assert [name for name in dict.fromkeys(reached) if name in controls] == controls
        page.get_by_label("Text to continue").focus()
        page.keyboard.press("Control+Enter")
        expect(page.locator(".token").nth(12)).to_be_visible()
        page.locator("#stop").focus()
        page.keyboard.press("Enter")
        finish(page, re.compile("^Stopped"))
        expect(page.locator("#go")).to_be_focused()  # a button that goes away hands its focus on
        page.locator(".token").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        third = page.locator(".token").nth(2)
        expect(third).to_be_focused()
        assert third.get_attribute("aria-describedby") == "inspector"
        expect(page.get_by_role("tooltip")).to_contain_text("60.7 %")
        page.keyboard.press("Escape")
        expect(page.get_by_role("tooltip")).to_be_hidden()
        page.keyboard.press("End")
        expect(page.locator(".token").last).to_be_focused()
        assert page.locator('.token[tabindex="0"]').count() == 1, (
            "all tokens together are one stop of the Tab key"
        )


def test_a_field_that_is_folded_away_is_shown_when_it_is_wrong(
    browser: Browser, server: RunningServer
) -> None:
    with tab(browser, server.url, size=PHONE) as page:
        expect(page.get_by_label("Max tokens")).to_be_hidden()
        page.get_by_text("Parameters").click()
        page.get_by_label("Max tokens").fill("")
        page.get_by_text("Parameters").click()
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_label("Max tokens")).to_be_visible()


@pytest.mark.parametrize("size", [PHONE, (320, 640)])
def test_nothing_is_wider_than_a_phone(
    browser: Browser, server: RunningServer, size: tuple[int, int]
) -> None:
    with tab(browser, server.url, size=size) as page:
        page.get_by_role("button", name="Race").click()
        finish(page, re.compile("times as fast"))
        assert inside(page, "document.documentElement.scrollWidth") <= size[0]


def test_the_hint_of_the_keyboard_is_not_shown_on_phones(
    browser: Browser, server: RunningServer
) -> None:
    with tab(browser, server.url) as page:
        expect(page.locator("#prompt-hint")).to_be_visible()
    with tab(browser, server.url, size=PHONE, has_touch=True, is_mobile=True) as page:
        expect(page.locator("#prompt-hint")).to_be_hidden()


def test_with_reduced_motion_rounds_are_drawn_once_at_the_end(
    browser: Browser, server: RunningServer
) -> None:
    with tab(browser, server.url, reduced_motion="reduce") as page:
        assert page.get_by_role("button", name="Live").get_attribute("aria-pressed") == "false"
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        with page.expect_request("**/trace*"):
            page.get_by_role("button", name="Continue").click()
            finish(page)
        page.wait_for_timeout(200)
        assert sum("/trace" in url for url in asked) == 1, "once, in the end"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_stand_out_and_every_control_has_a_name(
    browser: Browser, keys: str, scheme: ColorScheme
) -> None:
    with (
        serving(Slow(pace_s=0), config={"http.api_keys_file": keys}) as server,
        tab(browser, server.url, scheme=scheme, key=KEY) as page,
    ):
        page.get_by_label("Gamma").fill("99")
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_role("alert")).to_be_visible()
        assert faint(page) == []
        page.get_by_label("Gamma").fill("")
        page.get_by_role("button", name="Race").click()
        finish(page, re.compile("times as fast"))
        page.locator(".token").nth(3).hover()
        assert faint(page) == []
        assert nameless(page) == []
        page.get_by_role("button", name="API key: set").click()
        assert faint(page) == []
        assert nameless(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation_in_any_state_of_the_page(
    browser: Browser, keys: str, scheme: ColorScheme
) -> None:
    with (
        serving(Slow(pace_s=0), config={"http.api_keys_file": keys}) as server,
        tab(browser, server.url, scheme=scheme, key=KEY) as page,
    ):
        page.get_by_label("Gamma").fill("99")
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_role("alert")).to_be_visible()
        assert violations(page) == [], "with an error"
        page.get_by_label("Gamma").fill("")
        page.get_by_role("button", name="Race").click()
        finish(page, re.compile("times as fast"))
        expect(page.locator("#history figure").first).to_be_visible()
        page.locator("#history-table summary").click()
        assert violations(page) == [], "after a race, with the metrics drawn and as a table"
        page.get_by_text("Chat", exact=True).click()
        assert violations(page) == [], "as a chat"
        page.get_by_role("button", name="API key: set").click()
        assert violations(page) == [], "with the dialog"
        page.goto(f"{server.url}/docs")
        page.locator("h1").wait_for()
        assert violations(page) == [], "the reference"
