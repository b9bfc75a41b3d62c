"""The playground in a real Chromium against a real server: Ray, gateway, engine and demo pair.

`--screenshots` takes the pictures of the docs.
"""

from __future__ import annotations

import json
import math
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from specserve.config.demo import WIDENED
from tests.support.browser import KEY, PHONE, expect, finish, inside, tab
from tests.support.ray_server import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROMPT = "class Queue:\n    def __init__(self):\n"
NUM_TOKENS = 96


@dataclass(frozen=True)
class Server:
    url: str

    def complete(self) -> Any:
        """Return the response that a client other than the page receives."""
        body = json.dumps(
            {
                "prompt": PROMPT,
                "max_tokens": NUM_TOKENS,
                "temperature": 0.7,
                "seed": 11,
                "logprobs": 0,
            }
        ).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.url}/v1/completions", body, headers), timeout=120
        ) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    (keys := tmp_path_factory.mktemp("keys") / "keys").write_text(f"{KEY}\n")
    # The pictures show what `specserve serve` serves, where a draft pays.
    size = WIDENED if request.config.getoption("--screenshots") else "none"
    of_models = {"demo.size": size, "target.threads": 1, "draft.threads": 1}
    with served({"http.api_keys_file": str(keys), **of_models}) as (url, _):
        yield Server(url)


@pytest.fixture
def picture(request: pytest.FixtureRequest) -> Callable[[Page, str], None]:
    """Return a function that takes a picture of the whole page, if `--screenshots` is given."""
    folder = request.config.getoption("--screenshots")

    def take(page: Page, name: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            if "Collecting" in page.locator("#history-words").inner_text():
                page.locator("#history svg").first.wait_for(timeout=30_000)
            page.screenshot(path=f"{folder}/{name}.png", full_page=True)

    return take


def ask(page: Page, button: str, outcome: str, *, prompt: str = PROMPT) -> None:
    page.locator("#prompt").fill(prompt)
    page.get_by_role("button", name=button, exact=True).click()
    finish(page, re.compile(outcome), within_s=120)


def parameters(page: Page, **values: object) -> None:
    if not page.get_by_label("Max tokens").is_visible():
        page.get_by_role("heading", name="Parameters").click()
    for label, value in values.items():
        page.get_by_label(label.replace("_", " ")).fill(str(value))


TWO_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def settle(page: Page) -> None:
    """Wait until the last rounds of the request that has just ended are drawn."""
    page.locator("#lanes .cell.next").first.wait_for(timeout=30_000)
    page.wait_for_timeout(1000)


def test_the_page_shows_text_origins_probabilities_and_rounds_of_the_server(
    server: Server, browser: Browser, picture: Callable[[Page, str], None]
) -> None:
    with tab(browser, server.url, key=KEY) as page:
        parameters(page, Max_tokens=NUM_TOKENS, Temperature=0.7, Seed=11, Gamma=4)
        ask(page, "Continue", r"^Done: \d+ tokens")
        settle(page)  # the page looks at the last rounds, which must not be another request's
        answer = server.complete()  # with a seed, the text is the same whatever was drafted
        choice, stats = answer["choices"][0], answer["specserve"]
        num_tokens = answer["usage"]["completion_tokens"]
        assert num_tokens > NUM_TOKENS / 2
        expect(page.locator("#outcome")).to_have_text(re.compile(rf"^Done: {num_tokens} tokens"))
        tokens = page.locator(".token")
        assert "".join(tokens.all_text_contents()) == choice["text"]
        counts = dict(
            zip(
                ("accepted", "correction", "bonus", "plain"),
                map(int, page.locator("#origins strong").all_text_contents()),
                strict=True,
            )
        )
        assert sum(counts.values()) == num_tokens
        assert counts["accepted"] > 10
        assert stats["lossless"] is True
        assert f"{num_tokens} tokens in" in page.locator(".facts").inner_text()
        drawn = re.match(r"(\d+) rounds, \d+ tokens", page.locator("#rounds-words").inner_text())
        assert drawn
        assert 1 <= int(drawn[1]) <= 12
        for kind in ("accepted", "next"):
            assert page.locator(f"#lanes svg[role=img] .cell.{kind}").count() > 0
        assert (
            page.locator(
                "#lanes svg[role=img] .cell.draft, #lanes svg[role=img] .cell.anticipate"
            ).count()
            > 0
        ), "the draft's lane is empty"
        assert page.locator("#gamma-now").inner_text().isdecimal()
        expect(page.locator("#hits")).to_have_text(re.compile(r"^[\d.]+ %$"))
        assert float(page.locator("#accepted").inner_text()) == pytest.approx(
            counts["accepted"] / (num_tokens - counts["accepted"]), rel=0.3
        )
        page.get_by_role("region", name="The last rounds").get_by_text("As a table").click()
        # The table is filled a moment after the click.
        expect(page.locator("#rounds-table tbody tr")).to_have_count(int(drawn[1]))
        page.get_by_role("region", name="The last rounds").get_by_text("As a table").click()
        place = next(
            i for i, text in enumerate(tokens.all_text_contents()) if text.strip() and i > 8
        )
        tokens.nth(place).scroll_into_view_if_needed()
        page.evaluate(TWO_FRAMES)  # a scroll event comes with the next frame, and closes it
        tokens.nth(place).hover()
        found = re.search(r"([\d.]+) %", page.get_by_role("tooltip").inner_text())
        assert found
        share = float(found[1])
        near = [100 * math.exp(logprob) for logprob in choice["logprobs"]["token_logprobs"]]
        assert min(abs(share - one) for one in near) < 0.06
        picture(page, "light")


def test_a_race_shows_the_same_text_twice_once_without_a_single_draft(
    server: Server, browser: Browser, picture: Callable[[Page, str], None]
) -> None:
    with tab(browser, server.url, scheme="dark", key=KEY) as page:
        parameters(page, Max_tokens=NUM_TOKENS, Gamma=4)
        expect(page.get_by_label("Temperature")).to_have_value("0")
        ask(page, "Race", "tokens a second against.*The texts are the same")
        fast, plain = (
            page.get_by_role("article", name=f"{name} speculation") for name in ("With", "Without")
        )
        assert fast.locator(".accepted").count() > 10
        assert plain.locator(".token:not(.plain)").count() == 0
        assert (
            plain.locator(".token").all_text_contents()
            == fast.locator(".token").all_text_contents()
        )
        assert "no drafts" in plain.inner_text()
        settle(page)
        picture(page, "race")


def test_a_chat_of_two_turns_on_a_phone(
    server: Server, browser: Browser, picture: Callable[[Page, str], None]
) -> None:
    with tab(browser, server.url, size=PHONE, key=KEY) as page:
        parameters(page, Max_tokens=32, Temperature=0, Gamma=4)
        page.get_by_role("heading", name="Parameters").click()
        page.get_by_text("Chat", exact=True).click()
        for said in ("def add(a, b):", "class Stack:"):
            ask(page, "Send", "^Done", prompt=said)
        assert page.locator(".turn").count() == 2
        assert page.locator(".turn").nth(1).locator(".token").count() > 0
        assert inside(page, "document.documentElement.scrollWidth") <= PHONE[0]
        settle(page)
        picture(page, "phone")


def test_what_the_server_refuses_is_said_in_words(
    server: Server, browser: Browser, picture: Callable[[Page, str], None]
) -> None:
    with tab(browser, server.url, key=KEY) as page:
        page.get_by_label("Gamma").fill("99")
        page.get_by_role("button", name="Continue").click()
        page.get_by_role("alert").wait_for()
        assert "speculation.gamma must be at most 16" in page.get_by_role("alert").inner_text()
        picture(page, "error")
