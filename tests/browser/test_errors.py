"""Errors and missing keys in the playground, in a real Chromium, are shown in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from specserve.api.service import Status
from specserve.errors import Overloaded, RateLimited, Unavailable, WorkerLost
from tests.support.browser import KEY, Slow, expect, finish, inside, tab, written
from tests.support.http_server import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (
            {"refusal": Overloaded("8 requests wait already")},
            "The server is full: 8 requests wait already. Try again in 1 s.",
        ),
        (
            {"refusal": RateLimited("bob must wait 7 s", limit="tokens", retry_after_s=7)},
            "This key has used up its share: bob must wait 7 s.",
        ),
        (
            {"refusal": Unavailable("the draft is loading")},
            "The server takes no requests just now: the draft is loading.",
        ),
        (
            {"refusal": WorkerLost("rank 1 is gone")},
            "Something went wrong on the server: rank 1 is gone.",
        ),
        ({"fails_after": 4}, "The server gave up in the middle: the target fell over."),
    ],
)
def test_what_goes_wrong_is_said_in_words_and_the_message_is_not_lost(
    browser: Browser, faults: dict[str, Any], words: str
) -> None:
    with serving(Slow(**faults)) as server, tab(browser, server.url) as page:
        page.get_by_text("Chat", exact=True).click()
        page.get_by_label("Message").fill("hello")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("alert")).to_contain_text(words)
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        refused = "refusal" in faults
        expect(page.get_by_label("Message")).to_have_value("hello" if refused else "")
        expect(page.locator(".turn")).to_have_count(0 if refused else 1)


def test_a_value_that_the_server_refuses_is_marked_where_it_stands(page: Page) -> None:
    page.get_by_label("Gamma").fill("99")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("alert")).to_contain_text("speculation.gamma must be at most 16")
    expect(page.get_by_label("Gamma")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Gamma").fill("")
    page.get_by_role("button", name="Continue").click()
    finish(page)
    expect(page.get_by_role("alert")).to_be_hidden()
    assert page.get_by_label("Gamma").get_attribute("aria-invalid") is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            {"body": 'data: {"choices":[{"text":"Hm"}],"origins":["plain"]}\n\n'},
            "The answer broke off",
        ),
        (
            {"status": 502, "body": "<html>Bad gateway</html>"},
            "The server cannot be reached just now",
        ),
        (None, "The server does not answer"),
    ],
)
def test_a_broken_connection_or_a_proxy_error_is_shown_in_words(
    page: Page, answer: dict[str, Any] | None, words: str
) -> None:
    page.route(
        "**/v1/completions",
        lambda route: route.abort() if answer is None else route.fulfill(**answer),
    )
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("alert")).to_contain_text(words)
    assert written(page) == ("Hm" if "broke off" in words else "")


def test_a_server_that_is_still_starting_says_so_and_then_is_ready(browser: Browser) -> None:
    service = Slow(state=Status(ready=False, healthy=True, why="loading weights"))
    with serving(service) as server, tab(browser, server.url, ready=False) as page:
        expect(page.locator("#state")).to_contain_text("loading weights")
        service.state = Status(ready=True, healthy=True)
        expect(page.locator("#state")).to_have_text("Ready")


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Browser, keys: str) -> None:
    with (
        serving(Slow(pace_s=0), config={"http.api_keys_file": keys}) as server,
        tab(browser, server.url, ready=False) as page,
    ):
        dialog = page.get_by_role("dialog", name="API key")
        page.get_by_role("textbox", name="Key").fill("a-wrong-one")
        dialog.get_by_role("button", name="Use it").click()
        expect(dialog).to_contain_text("has not got one that it knows")
        page.get_by_role("textbox", name="Key").fill(KEY)
        page.keyboard.press("Enter")
        page.locator(".state.ready").wait_for()
        page.get_by_role("button", name="Continue").click()
        finish(page)
        kept = inside(
            page,
            "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie,"
            " location.href, document.body.innerHTML])",
        )
        assert kept.count(KEY) == 1
        assert KEY in kept.partition("}")[0]
        page.reload()
        page.locator(".state.ready").wait_for()
        other = page.context.new_page()
        other.goto(server.url)
        expect(other.get_by_role("dialog", name="API key")).to_be_visible()
        page.get_by_role("button", name="API key: set").click()
        page.get_by_role("button", name="Forget it").click()
        page.get_by_role("button", name="API key: none").wait_for()
        assert inside(page, "sessionStorage.length") == 0
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_role("alert")).to_contain_text("wants an API key")
        expect(dialog).to_be_visible()
