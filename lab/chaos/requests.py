"""Requests of a chaos run: of several kinds, each with exactly one right answer.

Knows bodies and paths; sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specserve.tools.bench.prompts import CODE_PROMPTS

_SCHEMA: Mapping[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "lines": {
            "type": "array",
            "items": {"type": "string", "maxLength": 40},
            "minItems": 12,
            "maxItems": 24,
        },
    },
    "required": ["name", "lines"],
    "additionalProperties": False,
}
_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {"name": "edit", "description": "Replace lines.", "parameters": _SCHEMA},
}


@dataclass(frozen=True, slots=True)
class RequestKind:
    """A path, and the members of the body by the request's number, prompt and length excepted."""

    path: str
    body: Callable[[int], Mapping[str, object]]


def _seeded(number: int) -> dict[str, object]:
    return {"temperature": 1, "seed": number}


KINDS: Mapping[str, RequestKind] = {
    "greedy": RequestKind("/v1/completions", lambda number: {"temperature": 0, "ignore_eos": True}),
    "seeded": RequestKind(
        "/v1/completions", lambda number: {"ignore_eos": True, **_seeded(number)}
    ),
    "structured": RequestKind(
        "/v1/completions",
        lambda number: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "file", "schema": _SCHEMA},
            },
            **_seeded(number),
        },
    ),
    "logprobs": RequestKind(
        "/v1/completions", lambda number: {"temperature": 0, "logprobs": 2, "ignore_eos": True}
    ),
    "tool call": RequestKind(
        "/v1/chat/completions",
        lambda number: {"tools": [_TOOL], "tool_choice": "required", **_seeded(number)},
    ),
}
KIND_NAMES = tuple(KINDS)


def kind_of(number: int) -> str:
    """Return the kind of a request; the kinds take turns."""
    return KIND_NAMES[number % len(KIND_NAMES)]


def path_and_body(number: int, *, max_tokens: int) -> tuple[str, dict[str, object]]:
    """Return where the request is posted, and its body without the model."""
    kind = KINDS[kind_of(number)]
    prompt = f"# {number}\n{CODE_PROMPTS[number % len(CODE_PROMPTS)]}"
    content: dict[str, object] = (
        {"messages": [{"role": "user", "content": prompt}]}
        if kind.path.startswith("/v1/chat")
        else {"prompt": prompt}
    )
    return kind.path, {**content, "max_tokens": max_tokens, **kind.body(number)}
