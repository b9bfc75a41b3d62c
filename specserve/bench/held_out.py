"""Prompts of the text that the demo pair was not trained on."""

from __future__ import annotations

from specserve.api.text import Text
from specserve.config import DEMO
from specserve.demo.train import standard_library


def held_out_prompts(*, count: int, length: int) -> tuple[tuple[int, ...], ...]:
    """The beginnings of held-out files, past their first lines."""
    text = Text.load(DEMO / "target")
    contents = [content[200:] for content in standard_library().held_out if len(content) > 4000]
    return tuple(text.encode(content)[:length] for content in contents[:count])
