"""Prompts of eight kinds, from which a draft for a chat model learns; none is one of `tasks`.

Templates and what they are filled with stand in chat_prompts.json. What a draft learns from is the
form that the answers of each kind have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any


def prompts(count: int, *, seed: int) -> Iterator[str]:
    """Yield prompts, the kinds in turn."""
    random = Random(seed)
    for number in range(count):
        yield KINDS[number % len(KINDS)](random)


@cache
def parts() -> dict[str, Any]:
    """Return templates and what they are filled with, by name."""
    file = Path(__file__).parent / "chat_prompts.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def one_of(random: Random, name: str) -> str:
    """Draw one of the parts with that name."""
    drawn: str = random.choice(parts()[name])
    return drawn


def _chat(random: Random) -> str:
    template = one_of(random, "asks")
    life, fact, topic = (one_of(random, name) for name in ("lives", "facts", "topics"))
    return template.format(life=life, fact=fact, topic=topic)


def _explanation(random: Random) -> str:
    topic, other = random.sample(parts()["topics"], 2)
    return one_of(random, "explain").format(topic=topic, other=other)


def _code(random: Random) -> str:
    return one_of(random, "code").format(job=one_of(random, "jobs"))


def _summary(random: Random) -> str:
    sentences = parts()["sentences"]
    start = random.randrange(len(sentences) - 6)
    template = one_of(random, "summary")
    return template.format(text=" ".join(sentences[start : start + random.randint(3, 6)]))


def _translation(random: Random) -> str:
    template = one_of(random, "translate")
    return template.format(saying=one_of(random, "sayings"), language=one_of(random, "languages"))


def _list(random: Random) -> str:
    template = one_of(random, "lists")
    return template.format(count=one_of(random, "counts"), things=one_of(random, "things"))


def _tool(random: Random) -> str:
    call, wishes = random.choice(tuple(parts()["calls"].items()))
    city, goal = random.sample(parts()["cities"], 2)
    wish = random.choice(wishes).format(
        city=city,
        goal=goal,
        name=one_of(random, "names"),
        day=one_of(random, "days"),
        hour=random.randint(6, 22),
        count=random.randint(2, 90),
        topic=one_of(random, "topics"),
        language=one_of(random, "languages"),
    )
    return one_of(random, "tools").format(call=call, wish=wish)


def _json(random: Random) -> str:
    thing, fields = random.choice(tuple(parts()["objects"].items()))
    template = one_of(random, "object_prompts")
    return template.format(thing=thing, fields=fields, count=one_of(random, "counts"))


KINDS: tuple[Callable[[Random], str], ...] = (
    _chat,
    _explanation,
    _code,
    _summary,
    _translation,
    _list,
    _tool,
    _json,
)
