"""Each parameter that clients of other servers send has its effect, or a 400 that names it."""

from __future__ import annotations

from dataclasses import fields
from functools import reduce
from typing import Any

import pytest
from fastapi import FastAPI

from specserve.api.chat_schema import ChatBody
from specserve.api.dialects import DIALECTS
from specserve.api.schema import CompletionBody
from specserve.sampling_params import Sampling
from tests.api.parameter_table import BOTH, CHATS, COMPLETIONS, Effect, Row
from tests.support.asgi import send
from tests.support.http_server import CONTEXT, FakeService, Reply, app_over

PATHS = {"/v1/completions": "text", "/v1/chat/completions": "message"}
PLAIN: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "hello there"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello there"}]},
}
# Given unless the row gives it, so that two answers can be compared.
FIXED: dict[str, object] = {"max_tokens": 8, "seed": 1}
ANOTHER_NAME = {"max_completion_tokens": "max_tokens", "n_predict": "max_tokens"}
ROWS = [
    *(("/v1/completions", *row) for row in BOTH + COMPLETIONS),
    *(("/v1/chat/completions", *row) for row in BOTH + CHATS),
]


@pytest.fixture(scope="module")
def service() -> FakeService:
    return FakeService()


@pytest.fixture(scope="module")
def app(service: FakeService) -> FastAPI:
    return app_over(service, config={"http.hosts": ["127.0.0.1"]})


def ask(app: FastAPI, service: FakeService, path: str, **given: object) -> Reply:
    service.requests.clear()
    left_out = {ANOTHER_NAME.get(name, name) for name in given}
    fixed = {name: value for name, value in FIXED.items() if name not in left_out}
    return send(app, path, PLAIN[path] | fixed | given)


def member(value: Any, path: str) -> Any:
    """Return the member of JSON, or the attribute of an object, at a dotted path."""

    def step(inside: Any, name: str) -> Any:
        if isinstance(inside, dict):
            return inside[name]
        return inside[int(name)] if isinstance(inside, list) else getattr(inside, name)

    return reduce(step, path.split("."), value)


@pytest.mark.parametrize(("path", "name", "value", "effect"), ROWS)
def test_a_parameter_has_its_effect_or_is_refused(
    app: FastAPI, service: FakeService, path: str, name: str, value: object, effect: Effect
) -> None:
    reply = ask(app, service, path, **{name: value})
    if effect.where == "refused":
        assert (reply.status, service.requests) == (400, [])
        assert (reply.error["param"] or "").partition(".")[0] in (name, name.partition(".")[0])
        assert effect.value in reply.error["message"]
        return
    assert reply.status == 200, reply.body
    request, answer = service.requests[0], reply.json
    if effect.where == "engine":
        expected = CONTEXT - len(request.prompt) if effect.value == "ROOM" else effect.value
        assert member(request, effect.path) == expected
    elif effect.where == "answer":
        expected = list(request.prompt) if effect.value == "PROMPT" else effect.value
        assert member(answer, effect.path) == expected
    else:
        plain = ask(app, service, path).json
        assert service.requests == [request]
        assert [answer["choices"], answer["usage"]] == [plain["choices"], plain["usage"]]


def test_the_table_has_what_the_server_claims_of_other_servers() -> None:
    assert len(BOTH + COMPLETIONS + CHATS) >= 220
    listed = {name for name, _, _ in BOTH}
    assert len(DIALECTS.keys() - listed) < 20, "most of the foreign parameters have a row"


@pytest.mark.parametrize("name", DIALECTS)
def test_null_is_neutral_and_so_is_each_neutral_value(
    app: FastAPI, service: FakeService, name: str
) -> None:
    for value in (None, *DIALECTS[name].neutral):
        assert ask(app, service, "/v1/completions", **{name: value}).status == 200


@pytest.mark.parametrize(
    ("body", "rows", "elsewhere"),
    [
        (CompletionBody, COMPLETIONS, {"prompt"}),
        (ChatBody, CHATS, {"messages", "thinking_token_budget"}),
    ],
)
def test_a_field_without_a_row_is_one_of_sampling(
    body: type[CompletionBody | ChatBody], rows: list[Row], elsewhere: set[str]
) -> None:
    """Other fields might be taken and have no effect; the budget has tests in `reasoning/`."""
    listed = {name for name, _, _ in BOTH + rows} | {field.name for field in fields(Sampling)}
    assert set(body.model_fields) - listed == elsewhere


def test_no_row_is_there_twice() -> None:
    def keys(rows: list[Row]) -> list[str]:
        return [repr((name, value)) for name, value, _ in rows]

    for rows in (BOTH + COMPLETIONS, BOTH + CHATS):
        shared = {repr(("request_id", "mine:1"))}  # once for what stays, once for the id
        assert len(keys(rows)) - len(set(keys(rows))) <= len(shared)
