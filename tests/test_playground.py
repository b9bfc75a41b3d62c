"""The playground in a real Chromium, over an engine that follows a script: each thing that a person does there, and each that goes wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsing import PHONE, Slow, chromium, inside, tab
from served import TEXT, Running, demo_text, serving

from specserve.api.service import Status
from specserve.errors import Overloaded, RateLimited, Unavailable, WorkerLost

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

KEY = "a-key-of-the-tests"
DONE = re.compile(r"^Done: \d+ tokens")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(Slow(pace_s=0.005)) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Running) -> Iterator[Page]:
    with tab(browser, server.url) as opened:
        yield opened


@pytest.fixture
def keys(tmp_path: Path) -> str:
    (file := tmp_path / "keys").write_text(f"{KEY}\n")
    return str(file)


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect as expecting

    return expecting(locator)


def finish(page: Page, words: re.Pattern[str] = DONE) -> None:
    expect(page.locator("#outcome")).to_have_text(words, timeout=20_000)


def written(page: Page, lane: int = 0) -> str:
    return "".join(page.locator(".panel").nth(lane).locator(".token").all_text_contents())


def test_a_text_of_any_script_is_shown_whole_and_each_token_says_where_it_came_from_and_how_likely_it_was(page: Page, server: Running) -> None:
    page.get_by_label("Text to continue").fill("Once")
    page.get_by_role("button", name="Continue").click()
    finish(page)
    assert written(page) == TEXT
    counts = [int(text) for text in page.locator("#origins strong").all_text_contents()]
    num_tokens = len(demo_text().encode(TEXT)) + 1
    assert sum(counts) == num_tokens
    assert counts[0] > counts[2] > 0
    request = server.service.requests[-1]
    assert (demo_text().decode(request.prompt), request.max_tokens, request.speculation.gamma) == ("Once", 128, None)
    page.locator(".token", has_text="END").hover()
    shown = page.get_by_role("tooltip").inner_text()
    assert re.search(r"accepted|bonus", shown)
    assert f"{math.exp(-0.5) * 100:.1f} %" in shown
    page.locator(".token", has_text="日").first.hover()
    assert "tokens make “日" in page.get_by_role("tooltip").inner_text(), "half characters are no tokens of their own to a reader"


def test_what_a_model_writes_is_text_and_never_markup(browser: Browser) -> None:
    text = "<img src=x onerror=alert(1)><script>alert(2)</script><b>&amp;"
    with serving(Slow(written=text)) as server, tab(browser, server.url) as page:
        page.get_by_label("Text to continue").fill("<i>prompt</i>")
        page.get_by_role("button", name="Continue").click()
        finish(page)
        assert written(page) == text
        assert page.locator("#answers").locator("img, script, b, i").count() == 0


def test_every_parameter_arrives_and_what_is_empty_is_not_sent(page: Page, server: Running) -> None:
    page.get_by_label("Max tokens").fill("5")
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("Top p").fill("0.9")
    page.get_by_label("Gamma").fill("3")
    page.get_by_label("Verifier").select_option("speculative")
    page.get_by_label("Stop, one text a line").fill("END\n\nstop here\n")
    with page.expect_request("**/v1/completions") as sent:
        page.get_by_role("button", name="Continue").click()
    body = sent.value.post_data_json
    assert body["stop"] == ["END", "stop here"]
    assert body["speculation"] == {"gamma": 3, "verifier": "speculative"}
    assert not {"seed", "response_format", "messages"} & {*body}
    finish(page)
    request = server.service.requests[-1]
    assert (request.max_tokens, request.warp.temperature, request.warp.top_p, request.speculation.gamma) == (5, 0.3, 0.9, 3)
    assert request.seeded is False


def test_a_schema_is_sent_in_the_format_of_the_api_and_one_that_is_not_json_is_not_sent(page: Page, server: Running) -> None:
    field, asked = page.get_by_label("JSON schema"), len(server.service.requests)
    field.fill("{oops")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("alert")).to_contain_text("is not JSON")
    assert field.get_attribute("aria-invalid") == "true"
    assert len(server.service.requests) == asked
    field.fill('{"type": "object"}')
    with page.expect_request("**/v1/completions") as sent:
        page.get_by_role("button", name="Continue").click()
    assert sent.value.post_data_json["response_format"]["json_schema"] == {"name": "answer", "strict": True, "schema": {"type": "object"}}


def test_stopping_cancels_the_request_and_keeps_what_came(browser: Browser) -> None:
    with serving(Slow(hangs_after=6)) as server, tab(browser, server.url) as page:
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".token").nth(5)).to_be_visible()
        page.get_by_role("button", name="Stop").click()
        finish(page, re.compile(r"^Stopped after \d+ tokens"))
        assert server.until(lambda: server.service.num_live == 0), "the server goes on although nobody listens"
        assert TEXT.startswith(written(page))
        expect(page.get_by_role("button", name="Continue")).to_be_enabled()
        expect(page.get_by_role("alert")).to_be_hidden()


@pytest.mark.parametrize("order", ["one after the other", "at once"])
def test_a_race_asks_the_same_with_and_without_speculation(browser: Browser, order: str) -> None:
    with serving(Slow()) as server, tab(browser, server.url) as page:
        page.get_by_label(order).check()
        page.get_by_role("button", name="Race").click()
        expect(page.get_by_role("article", name="With speculation").locator(".token").first).to_be_visible()
        together = server.service.num_live
        finish(page, re.compile(r"times as fast.*tokens a second against.*The texts are the same", re.S))
        assert together == (1 if order == "one after the other" else 2)
        assert [request.speculation.gamma for request in server.service.requests] == [None, 0]
        assert written(page, 0) == written(page, 1) == TEXT
        expect(page.locator(".panel .speed").nth(1)).to_contain_text("tokens/s")


def test_a_chat_remembers_its_turns_until_it_is_begun_anew(page: Page) -> None:
    page.get_by_text("Chat", exact=True).click()
    bodies = []
    for said in ("hello", "and then?"):
        page.get_by_label("Message").fill(said)
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_role("button", name="Send").click()
        bodies.append(sent.value.post_data_json)
        finish(page)
        assert page.get_by_label("Message").input_value() == ""
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": TEXT}, {"role": "user", "content": "and then?"}]
    assert [body["messages"] for body in bodies] == [turns[:1], turns]
    assert page.locator(".said").all_inner_texts() == ["You\nhello", "You\nand then?"]
    assert written(page, 1) == TEXT
    page.get_by_text("Completion", exact=True).click()
    assert "fibonacci" in page.get_by_label("Text to continue").input_value(), "each way of asking keeps its own text"
    page.get_by_text("Chat", exact=True).click()
    expect(page.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"refusal": Overloaded("8 requests wait already")}, "The server is full: 8 requests wait already. Try again in 1 s."),
        ({"refusal": RateLimited("bob must wait 7 s", limit="tokens", retry_after_s=7)}, "This key has used up its share: bob must wait 7 s."),
        ({"refusal": Unavailable("the draft is loading")}, "The server takes no requests just now: the draft is loading."),
        ({"refusal": WorkerLost("rank 1 is gone")}, "Something went wrong on the server: rank 1 is gone."),
        ({"fails_after": 4}, "The server gave up in the middle: the target fell over."),
    ],
)
def test_what_goes_wrong_is_said_in_words_and_the_message_is_not_lost(browser: Browser, faults: dict[str, Any], words: str) -> None:
    with serving(Slow(**faults)) as server, tab(browser, server.url) as page:
        page.get_by_text("Chat", exact=True).click()
        page.get_by_label("Message").fill("hello")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("alert")).to_contain_text(words)
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        refused = "refusal" in faults
        assert page.get_by_label("Message").input_value() == ("hello" if refused else "")
        expect(page.locator(".turn")).to_have_count(0 if refused else 1)


def test_a_value_that_the_server_refuses_is_marked_where_it_stands(page: Page) -> None:
    page.get_by_label("Gamma").fill("99")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("alert")).to_contain_text("speculation.gamma must be at most 16")
    assert page.get_by_label("Gamma").get_attribute("aria-invalid") == "true"
    page.get_by_label("Gamma").fill("")
    page.get_by_role("button", name="Continue").click()
    finish(page)
    expect(page.get_by_role("alert")).to_be_hidden()
    assert page.get_by_label("Gamma").get_attribute("aria-invalid") is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"body": 'data: {"choices":[{"text":"Hm"}],"origins":["plain"]}\n\n'}, "The answer broke off"),
        ({"status": 502, "body": "<html>Bad gateway</html>"}, "The server cannot be reached just now"),
        (None, "The server does not answer"),
    ],
)
def test_a_connection_that_breaks_or_a_proxy_that_answers_is_told_in_words(page: Page, answer: dict[str, Any] | None, words: str) -> None:
    page.route("**/v1/completions", lambda route: route.abort() if answer is None else route.fulfill(**answer))
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
    with serving(Slow(pace_s=0), **{"http.api_keys_file": keys}) as server, tab(browser, server.url, ready=False) as page:
        dialog = page.get_by_role("dialog", name="API key")
        page.get_by_label("Key").fill("a-wrong-one")
        dialog.get_by_role("button", name="Use it").click()
        expect(dialog).to_contain_text("has not got one that it knows")
        page.get_by_label("Key").fill(KEY)
        page.keyboard.press("Enter")
        page.locator(".state.ready").wait_for()
        page.get_by_role("button", name="Continue").click()
        finish(page)
        kept = inside(page, "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie, location.href, document.body.innerHTML])")
        assert kept.count(KEY) == 1
        assert KEY in kept.partition("}")[0]
        page.reload()
        page.locator(".state.ready").wait_for()
        other = page.context.new_page()
        other.goto(server.url)
        expect(other.get_by_role("dialog", name="API key")).to_be_visible()
        page.get_by_role("button", name="API key: set").click()
        page.get_by_role("button", name="Forget it").click()
        assert inside(page, "sessionStorage.length") == 0
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_role("alert")).to_contain_text("wants an API key")
        expect(dialog).to_be_visible()


def test_everything_can_be_done_with_the_keyboard(browser: Browser) -> None:
    with serving(Slow(hangs_after=12)) as server, tab(browser, server.url) as page:
        reached = []
        for _ in range(24):
            page.keyboard.press("Tab")
            reached.append(inside(page, "document.activeElement.id || document.activeElement.name || document.activeElement.tagName"))
        controls = ["mode", "prompt", "go", "race", "max_tokens", "temperature", "top_p", "seed", "gamma", "verifier", "stop_texts", "response_format"]
        assert [name for name in reached if name in controls] == controls
        page.get_by_label("Text to continue").focus()
        page.keyboard.press("Control+Enter")
        expect(page.locator(".token").nth(12)).to_be_visible()
        page.locator("#stop").focus()
        page.keyboard.press("Enter")
        finish(page, re.compile("^Stopped"))
        assert inside(page, "document.activeElement.id") == "go", "a button that goes away hands its focus on"
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
        assert page.locator('.token[tabindex="0"]').count() == 1, "all tokens together are one stop of the Tab key"


def test_a_field_that_is_folded_away_is_shown_when_it_is_wrong(browser: Browser, server: Running) -> None:
    with tab(browser, server.url, size=PHONE) as page:
        expect(page.get_by_label("Max tokens")).to_be_hidden()
        page.get_by_text("Parameters").click()
        page.get_by_label("Max tokens").fill("")
        page.get_by_text("Parameters").click()
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_label("Max tokens")).to_be_visible()


@pytest.mark.parametrize("size", [PHONE, (320, 640)])
def test_nothing_is_wider_than_a_phone(browser: Browser, server: Running, size: tuple[int, int]) -> None:
    with tab(browser, server.url, size=size) as page:
        page.get_by_role("button", name="Race").click()
        finish(page, re.compile("times as fast"))
        assert inside(page, "document.documentElement.scrollWidth") <= size[0]


def test_who_wants_little_motion_gets_no_rounds_that_move(browser: Browser, server: Running) -> None:
    with tab(browser, server.url, reduced_motion="reduce") as page:
        assert page.get_by_role("button", name="Live").get_attribute("aria-pressed") == "false"
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.get_by_role("button", name="Continue").click()
        finish(page)
        page.wait_for_timeout(200)
        assert sum("/trace" in url for url in asked) == 1, "once, in the end"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_stand_out_and_every_control_has_a_name(browser: Browser, keys: str, scheme: str) -> None:
    with serving(Slow(pace_s=0), **{"http.api_keys_file": keys}) as server, tab(browser, server.url, scheme=scheme, key=KEY) as page:
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


def faint(page: Page) -> list[str]:
    """Texts whose contrast is below 4.5, and lines under tokens below 3, against what they stand on (WCAG 2.2, 1.4.3 and 1.4.11)."""
    found: list[str] = inside(page, CONTRAST)
    return found


def nameless(page: Page) -> list[str]:
    """Controls that a screen reader would announce by their kind alone."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "combobox", "radio", "link", "spinbutton", "dialog", "region", "form", "group", "progressbar", "img", "article"}
    seen = [node for node in nodes if not node.get("ignored") and node["role"]["value"] in roles]
    assert len(seen) > 3
    return [str(node) for node in seen if not node.get("name", {}).get("value") and node["role"]["value"] != "group"]


CONTRAST = """(() => {
  const rgba = colour => colour.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], ground) => [r, g, b].map((part, i) => part * a + ground[i] * (1 - a));
  const light = colour => colour.map(part => part / 255).map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const ground = element => element ? over(rgba(getComputedStyle(element).backgroundColor), ground(element.parentElement)) : [255, 255, 255];
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const element = node.parentElement, style = getComputedStyle(element);
    if (!node.data.trim() || !element.checkVisibility({visibilityProperty: true}) || element.closest(":disabled, .hidden, script, noscript, svg")) continue;
    if (contrast(over(rgba(style.color), ground(element)), ground(element)) < 4.5) found.push(element.className + ": " + node.data.slice(0, 40));
    if (style.textDecorationLine === "underline" && element.matches(".token, .sample")
      && contrast(rgba(style.textDecorationColor).slice(0, 3), ground(element)) < 3) found.push("line: " + element.className);
  }
  return found;
})()"""
