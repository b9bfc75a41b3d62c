"""The playground's drawing of /metrics: what it shows, and that it can be read as words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from specserve.api.service import Status
from specserve.metrics import Registry, Snapshot
from tests.support.accessibility import faint, nameless
from tests.support.browser import KEY, PHONE, ColorScheme, Slow, expect, inside, tab
from tests.support.http_server import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

NOTHING = "\N{EN DASH}"


def of_an_engine(*, tokens: int, accepted: int, running: int, restarts: int = 0) -> Status:
    registry = Registry()
    registry.counter("generation_tokens_total").add(tokens)
    registry.counter("spec_decode_num_draft_tokens_total").add(2 * accepted)
    registry.counter("spec_decode_num_accepted_tokens_total").add(accepted)
    registry.counter("worker_restarts_total").add(restarts, "draft")
    registry.counter("worker_restarts_total").add(restarts, "target")
    registry.gauge("num_requests_running").set(running)
    registry.gauge("num_requests_waiting").set(0)
    registry.gauge("kv_cache_usage_perc").set(0.25, "target")
    registry.gauge("kv_cache_usage_perc").set(0.75, "draft")
    return status(registry.snapshot())


def status(snapshot: Snapshot) -> Status:
    return Status(ready=True, healthy=True, replicas=1, metrics=(snapshot,))


def chart(page: Page, name: str) -> Locator:
    return page.locator("#history figure", has_text=name)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_rates_are_of_the_seconds_between_two_readings_and_can_be_read_as_a_table(
    browser: Browser, scheme: ColorScheme
) -> None:
    service = Slow(state=of_an_engine(tokens=100_000, accepted=500, running=0))
    with serving(service) as server, tab(browser, server.url, scheme=scheme) as page:
        expect(page.locator("#history-words")).to_contain_text("Collecting")
        service.state = of_an_engine(tokens=101_000, accepted=800, running=3, restarts=1)
        expect(page.locator("#history-words")).to_contain_text("Since this page was opened")
        rate = chart(page, "Tokens a second").locator("strong").inner_text()
        assert 10 < float(rate.removesuffix(" tokens/s")) < 400, "1000 tokens in about 5 s"
        assert chart(page, "Drafts accepted").locator("strong").inner_text() == "50.0 %"
        assert chart(page, "Requests running").locator("strong").inner_text() == "3"
        assert chart(page, "KV cache in use").locator("strong").inner_text() == "25.0 %"
        assert chart(page, "First token after").locator("strong").inner_text() == NOTHING
        drawn = page.get_by_role("img", name=re.compile("Requests running: now 3, from"))
        assert drawn.locator("text").first.text_content() == "0"
        page.locator("#history-table summary").click()
        row = page.locator("#history-table tr", has_text="Workers restarted")
        assert row.locator("td").all_inner_texts()[0] == "2", "of target and draft together"
        assert faint(page) == []
        assert nameless(page) == []


def test_a_server_that_was_started_again_shows_as_a_gap_and_not_as_a_fall(
    browser: Browser,
) -> None:
    service = Slow(state=of_an_engine(tokens=5_000, accepted=500, running=1))
    with serving(service) as server, tab(browser, server.url, size=PHONE) as page:
        expect(page.locator("#history-words")).to_contain_text("Collecting")
        service.state = of_an_engine(tokens=10, accepted=5, running=1)
        expect(page.locator("#history-words")).to_contain_text("Since this page was opened")
        assert chart(page, "Tokens a second").locator("strong").inner_text() == NOTHING
        assert chart(page, "Tokens a second").locator(".line, .point").count() == 0
        assert chart(page, "Requests running").locator("strong").inner_text() == "1"
        assert inside(page, "document.documentElement.scrollWidth") <= PHONE[0]


def test_metrics_that_the_key_does_not_open_are_said_to_be_closed(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"mine {KEY} scopes=generate\n")
    with (
        serving(
            Slow(), config={"http.api_keys_file": str(file), "http.open_paths": ["/"]}
        ) as server,
        tab(browser, server.url, key=KEY) as page,
    ):
        expect(page.locator("#history-words")).to_contain_text("The metrics cannot be read.")
        assert page.locator("#history figure").count() == 0
