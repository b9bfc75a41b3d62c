"""Check a page for faint text, for controls without a name, and by the rules of axe."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from tests.support.browser import inside

if TYPE_CHECKING:
    from playwright.sync_api import Page

CONTRAST = """(() => {
  const rgba = colour => colour.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], ground) =>
    [r, g, b].map((part, i) => part * a + ground[i] * (1 - a));
  const linear = part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const light = colour => colour.map(part => linear(part / 255))
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const ground = element => element
    ? over(rgba(getComputedStyle(element).backgroundColor), ground(element.parentElement))
    : [255, 255, 255];
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const element = node.parentElement, style = getComputedStyle(element);
    if (!node.data.trim() || !element.checkVisibility({visibilityProperty: true})) continue;
    if (element.closest(":disabled, .hidden, script, noscript, svg")) continue;
    if (contrast(over(rgba(style.color), ground(element)), ground(element)) < 4.5)
      found.push(element.className + ": " + node.data.slice(0, 40));
    if (style.textDecorationLine === "underline" && element.matches(".token, .sample")
      && contrast(rgba(style.textDecorationColor).slice(0, 3), ground(element)) < 3)
      found.push("line: " + element.className);
  }
  return found;
})()"""


def faint(page: Page) -> list[str]:
    """Return texts of a contrast below 4.5, and lines under tokens of one below 3.

    The contrast is that with the background (WCAG 2.2, 1.4.3 and 1.4.11).
    """
    found: list[str] = inside(page, CONTRAST)
    return found


def nameless(page: Page) -> list[str]:
    """Return controls that a screen reader would announce by their kind alone."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    roles = {
        "button",
        "textbox",
        "combobox",
        "radio",
        "link",
        "spinbutton",
        "dialog",
        "region",
        "form",
        "group",
        "progressbar",
        "img",
        "article",
    }
    seen = [node for node in nodes if not node.get("ignored") and node["role"]["value"] in roles]
    assert len(seen) > 3
    return [
        str(node)
        for node in seen
        if not node.get("name", {}).get("value") and node["role"]["value"] != "group"
    ]


AXE = """axe.run().then(found => found.violations.map(
  rule => rule.id + ": " + rule.nodes.map(node => node.target.join(" ")).join(", ")))"""


def violations(page: Page) -> list[str]:
    """Return the rules of axe-core that the page breaks, each with the elements that do."""
    inside(page, files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    broken: list[str] = inside(page, AXE)
    return broken
