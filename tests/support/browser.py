"""A headless Chromium for the tests of the playground, and an engine slow enough to watch."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specserve.types import Chunk, Request
from tests.support.http_server import FakeService

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page
    from playwright.sync_api._generated import LocatorAssertions

ColorScheme = Literal["light", "dark"]
NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDE, PHONE = (1320, 900), (390, 844)
KEY = "a-key-of-the-tests"
DONE = re.compile(r"^Done: \d+ tokens")


@dataclass
class Slow(FakeService):
    """A service that waits before each chunk."""

    pace_s: float = 0.02

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(request):
            await asyncio.sleep(self.pace_s)
            yield chunk


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the Chromium of the system; nothing is downloaded."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=30_000)  # an expectation that is met does not wait
    path = next(filter(None, map(shutil.which, NAMES)), None)
    assert path, "no Chromium was found; on Debian or Ubuntu: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def tab(
    browser: Browser,
    url: str,
    *,
    size: tuple[int, int] = WIDE,
    scheme: ColorScheme = "light",
    key: str = "",
    ready: bool = True,
    **more: Any,
) -> Iterator[Page]:
    """Open a tab in a fresh context.

    Errors in its console fail the test, except errors of refused requests, which are logged there
    too.
    """
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, **more
    )
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda message: (
            complaints.append(message.text)
            if message.type == "error" and "Failed to load resource" not in message.text
            else None
        ),
    )
    page.goto(url)
    if key:
        page.get_by_role("textbox", name="Key").fill(key)
        page.keyboard.press("Enter")
    if ready:
        page.locator(".state.ready").wait_for()
    yield page
    context.close()
    assert not complaints


def inside(page: Page, expression: str) -> Any:
    """Evaluate an expression in the page, whose own policy forbids it to evaluate any."""
    session = page.context.new_cdp_session(page)
    answer: Mapping[str, Any] = session.send(
        "Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True}
    )
    session.detach()
    assert "exceptionDetails" not in answer, answer
    return answer["result"].get("value")


def expect(locator: Locator) -> LocatorAssertions:
    """Return assertions about a part of the page, which may come true a little later."""
    from playwright.sync_api import expect as expecting

    return expecting(locator)


def finish(page: Page, words: re.Pattern[str] = DONE, *, within_s: float = 30) -> None:
    """Wait until the page says that the request has ended."""
    expect(page.locator("#outcome")).to_have_text(words, timeout=within_s * 1000)


def written(page: Page, lane: int = 0) -> str:
    return "".join(page.locator(".panel").nth(lane).locator(".token").all_text_contents())
