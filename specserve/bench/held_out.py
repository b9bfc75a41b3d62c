"""Prompts of the text that the demo pair was not trained on."""

from __future__ import annotations

from itertools import chain

from specserve.api.text import Text
from specserve.config import DEMO
from specserve.demo.train import standard_library

STRETCH = 1024  # tokens of one file


def held_out_prompts(*, count: int, length: int) -> tuple[tuple[int, ...], ...]:
    """The beginnings of held-out files, past their first lines."""
    text = Text.load(DEMO / "target")
    contents = [content[200:] for content in standard_library().held_out if len(content) > 4000]
    return tuple(text.encode(content)[:length] for content in contents[:count])


def held_out_tokens(limit: int) -> list[int]:
    """Stretches of as many held-out files as there are, one behind the other."""
    prompts = held_out_prompts(count=64, length=STRETCH)
    return list(chain.from_iterable(prompts))[:limit]
