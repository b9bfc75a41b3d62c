"""The use of the playground in a real Chromium, over an engine that follows a script."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import DEMO
from tests.support.browser import Slow, expect, finish, tab, written
from tests.support.http_server import TEXT, RunningServer, demo_tokenizer, serving, serving_several

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from playwright.sync_api import Browser, Page

    from specserve.types import Chunk, Request


@dataclass
class Racing(Slow):
    """A service whose requests write nothing before `together` of them have run at once."""

    together: int = 1
    most_live: int = 0

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(request):
            self.most_live = max(self.most_live, self.num_live)
            while self.most_live < self.together:
                await asyncio.sleep(0.005)
            yield chunk


def test_text_of_any_script_is_whole_and_each_token_shows_its_origin_and_probability(
    page: Page, server: RunningServer
) -> None:
    page.get_by_label("Text to continue").fill("Once")
    page.get_by_role("button", name="Continue").click()
    finish(page)
    assert written(page) == TEXT
    counts = [int(text) for text in page.locator("#origins strong").all_text_contents()]
    num_tokens = len(demo_tokenizer().encode(TEXT)) + 1
    assert sum(counts) == num_tokens
    assert counts[0] > counts[2] > 0
    request = server.service.requests[-1]
    assert (
        demo_tokenizer().decode(request.prompt),
        request.max_tokens,
        request.speculation.gamma,
    ) == (
        "Once",
        128,
        None,
    )
    page.locator(".token", has_text="END").hover()
    shown = page.get_by_role("tooltip").inner_text()
    assert re.search(r"accepted|bonus", shown)
    assert f"{math.exp(-0.5) * 100:.1f} %" in shown
    page.locator(".token", has_text="日").first.hover()
    assert "tokens make “日" in page.get_by_role("tooltip").inner_text(), (
        "half characters are no tokens of their own to a reader"
    )


def test_what_a_model_writes_is_text_and_never_markup(browser: Browser) -> None:
    text = "<img src=x onerror=alert(1)><script>alert(2)</script><b>&amp;"
    with serving(Slow(output=text)) as server, tab(browser, server.url) as page:
        page.get_by_label("Text to continue").fill("<i>prompt</i>")
        page.get_by_role("button", name="Continue").click()
        finish(page)
        assert written(page) == text
        assert page.locator("#answers").locator("img, script, b, i").count() == 0


def test_one_of_several_models_is_chosen(browser: Browser) -> None:
    services = {"small": Slow(output="of the small one"), "large": Slow(output="of the large one")}
    config = {"models": [{"name": name} for name in services]}
    with serving_several(services, config) as server, tab(browser, server.url) as page:
        box = page.get_by_label("Model", exact=True)
        expect(box.locator("option")).to_have_text(["small", "large"])
        box.select_option("large")
        with page.expect_request("**/trace?*") as trace:
            page.get_by_role("button", name="Continue").click()
            finish(page)
        assert written(page) == "of the large one"
        assert "model=large" in trace.value.url
        assert not services["small"].requests


def test_a_single_model_is_named(page: Page) -> None:
    expect(page.locator("#model")).not_to_have_text("…")
    expect(page.get_by_label("Model", exact=True)).to_be_hidden()


def test_every_parameter_arrives_and_what_is_empty_is_not_sent(
    page: Page, server: RunningServer
) -> None:
    page.get_by_label("Max tokens").fill("5")
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("Top p").fill("0.9")
    page.get_by_label("Gamma").fill("3")
    page.get_by_label("Verifier").select_option("speculative")
    page.get_by_label("Stop, one text a line").fill("END\n\nstop here\n")
    with page.expect_request("**/v1/completions") as sent:
        page.get_by_role("button", name="Continue").click()
    body = sent.value.post_data_json
    assert body is not None
    assert body["stop"] == ["END", "stop here"]
    assert body["speculation"] == {"gamma": 3, "verifier": "speculative"}
    assert not {"seed", "response_format", "messages"} & {*body}
    finish(page)
    request = server.service.requests[-1]
    assert (
        request.max_tokens,
        request.warp.temperature,
        request.warp.top_p,
        request.speculation.gamma,
    ) == (5, 0.3, 0.9, 3)
    assert request.seeded is False


def test_a_schema_is_sent_in_the_format_of_the_api_and_one_that_is_not_json_is_not_sent(
    page: Page, server: RunningServer
) -> None:
    field, asked = page.get_by_label("JSON schema"), len(server.service.requests)
    field.fill("{oops")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("alert")).to_contain_text("is not JSON")
    expect(field).to_have_attribute("aria-invalid", "true")
    assert len(server.service.requests) == asked
    field.fill('{"type": "object"}')
    with page.expect_request("**/v1/completions") as sent:
        page.get_by_role("button", name="Continue").click()
    body = sent.value.post_data_json
    assert body is not None
    assert body["response_format"]["json_schema"] == {
        "name": "answer",
        "strict": True,
        "schema": {"type": "object"},
    }


def test_stopping_cancels_the_request_and_keeps_what_came(browser: Browser) -> None:
    with serving(Slow(hangs_after=6)) as server, tab(browser, server.url) as page:
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".token").nth(5)).to_be_visible()
        page.get_by_role("button", name="Stop").click()
        finish(page, re.compile(r"^Stopped after \d+ tokens"))
        assert server.until(lambda: server.service.num_live == 0), (
            "the server goes on without a reader"
        )
        assert TEXT.startswith(written(page))
        expect(page.get_by_role("button", name="Continue")).to_be_enabled()
        expect(page.get_by_role("alert")).to_be_hidden()


@pytest.mark.parametrize(("order", "together"), [("one after the other", 1), ("at once", 2)])
def test_a_race_asks_the_same_with_and_without_speculation(
    browser: Browser, order: str, together: int
) -> None:
    service = Racing(together=together)
    with serving(service) as server, tab(browser, server.url) as page:
        page.get_by_label(order).check()
        page.get_by_role("button", name="Race").click()
        finish(
            page,
            re.compile(r"times as fast.*tokens a second against.*The texts are the same", re.S),
        )
        assert service.most_live == together
        assert [request.speculation.gamma for request in service.requests] == [None, 0]
        assert written(page, 0) == written(page, 1) == TEXT
        expect(page.locator(".panel .speed").nth(1)).to_contain_text("tokens/s")


def test_a_chat_remembers_its_turns_until_a_new_one_is_started(page: Page) -> None:
    page.get_by_text("Chat", exact=True).click()
    bodies: list[Any] = []
    for said in ("hello", "and then?"):
        page.get_by_label("Message").fill(said)
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_role("button", name="Send").click()
        bodies.append(sent.value.post_data_json)
        finish(page)
        expect(page.get_by_label("Message")).to_have_value("")
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "and then?"},
    ]
    assert [body["messages"] for body in bodies] == [turns[:1], turns]
    assert page.locator(".said").all_inner_texts() == ["You\n\nhello", "You\n\nand then?"]
    assert written(page, 1) == TEXT
    page.get_by_text("Completion", exact=True).click()
    # Completions and chats keep texts of their own.
    expect(page.get_by_label("Text to continue")).to_have_value(re.compile("fibonacci"))
    page.get_by_text("Chat", exact=True).click()
    expect(page.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_a_model_with_a_template_is_met_in_a_chat(browser: Browser) -> None:
    made = AutoTokenizer.from_pretrained(DEMO / "target")
    made.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    with (
        serving(Slow(), tokenizer=Tokenizer(made)) as server,
        tab(browser, server.url) as page,
    ):
        expect(page.get_by_label("Message")).to_have_value("Why is the sky blue?")
        page.get_by_label("System prompt").fill("Be brief.")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_role("button", name="Race").click()
        finish(page, re.compile("times as fast", re.S))
    body: Any = sent.value.post_data_json
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why is the sky blue?"},
    ]
