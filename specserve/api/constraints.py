"""The constraint on a text, which has many names in a body: `guided`, vLLM's and llama.cpp's.

Knows no grammars; `Sampling` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from specserve.api.schema import GenerationBody
from specserve.api.strict_model import StrictModel
from specserve.errors import BadValue

FLAT_NAMES: Mapping[str, str] = {
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_json": "json",
    "guided_choice": "choice",
    "json_schema": "json",
    "grammar": "grammar",
}
"""Parameters that stand for one member of `guided`."""


def members(given: StrictModel | None) -> dict[str, object] | None:
    """Return members by the names that clients use, without those that are null."""
    if given is None:
        return None
    dumped = given.model_dump(by_alias=True)
    return {name: value for name, value in dumped.items() if value is not None}


def constraint_name(body: GenerationBody) -> str | None:
    """Return the name under which a constraint was given; raise BadValue for several."""
    names = [
        name
        for name in ("guided", "structured_outputs", *FLAT_NAMES)
        if getattr(body, name) is not None
    ]
    if len(names) > 1:
        raise BadValue(
            f"{names[0]} and {names[1]} both say what the text must be; give one of them",
            param=names[0],
        )
    return names[0] if names else None


def parse_constraint(body: GenerationBody) -> dict[str, object] | None:
    """Return the constraint as `guided` takes it."""
    name = constraint_name(body)
    if name is None or name == "guided":
        return members(body.guided)
    if name == "structured_outputs":
        given = members(body.structured_outputs) or {}
        if given.pop("json_object", False):
            given.setdefault("json", {"type": "object"})
        return given
    return {FLAT_NAMES[name]: getattr(body, name)}


@contextmanager
def errors_as_sent(body: GenerationBody) -> Iterator[None]:
    """Let errors name parameters as the client did, not by the name that checks use."""
    try:
        yield
    except BadValue as error:
        name = error.param or ""
        sent = body.sent_names.get(name)
        if name == "guided":
            sent = constraint_name(body)
        if sent in (None, name):
            raise
        assert sent is not None
        # A name such as guided_regex stands for guided.regex.
        escaped = re.escape(name)
        pattern = rf"\b{escaped}\b(\.\w+)?" if sent in FLAT_NAMES else rf"\b{escaped}\b"
        raise BadValue(re.sub(pattern, sent, str(error)), param=sent) from error
