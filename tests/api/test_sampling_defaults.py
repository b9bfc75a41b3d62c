"""The sampling that a model recommends holds for requests that do not say otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from specserve.types import Warp
from tests.support.http_server import RunningServer, serving

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01}
CHAT = [{"role": "user", "content": "hi"}]
PATHS: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 5},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(sampling_defaults=RECOMMENDED | {"repetition_penalty": 1.05}) as running:
        yield running


def warp_of(server: RunningServer, path: str, **body: object) -> Warp:
    """Return what the engine gets of a body."""
    reply = server.ask(path, PATHS[path] | body)
    assert reply.status == 200, reply.body
    return server.service.requests[-1].warp


@pytest.mark.parametrize("path", PATHS)
def test_what_a_request_does_not_name_is_as_the_model_recommends(
    server: RunningServer, path: str
) -> None:
    expected = Warp(temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.05)
    assert warp_of(server, path) == expected
    assert warp_of(server, path, temperature=None) == expected, "null is nothing"


@pytest.mark.parametrize("path", PATHS)
def test_what_a_request_names_is_the_request_s(server: RunningServer, path: str) -> None:
    warp = warp_of(server, path, temperature=0, top_p=0.5, top_k=-1)
    assert (warp.temperature, warp.top_p, warp.top_k, warp.min_p) == (0, 0.5, 0, 0.01)


def test_a_recommended_penalty_is_named_where_it_is_in_the_way(server: RunningServer) -> None:
    body = {"prompt": "hi", "repeat_last_n": 64}
    reply = server.ask("/v1/completions", body)
    assert reply.status == 400
    assert b"there is repetition_penalty 1.05, sent or recommended by the model" in reply.body
    assert server.ask("/v1/completions", body | {"repetition_penalty": 1}).status == 200


def test_a_response_says_with_what_it_was_sampled(server: RunningServer) -> None:
    stated = json.loads(server.ask("/v1/responses", {"input": "hi", "top_p": 0.5}).body)
    assert (stated["temperature"], stated["top_p"]) == (0.6, 0.5)
