"""Parameters that change the form of an answer: its text's end, ids, usage, choice and name."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from specserve.types import Chunk, Logprobs, Request
from tests.support.asgi import send
from tests.support.http_server import TEXT, FakeService, app_over
from tests.support.templates import family

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, object]] = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 60},
    CHATS: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60},
}
both_paths = pytest.mark.parametrize("path", list(BODIES))


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def app(service: FakeService) -> FastAPI:
    return app_over(service)


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice, whole or of a chunk."""
    inner = choice.get("message") or choice.get("delta") or choice
    return inner.get("text", inner.get("content")) or ""


@both_paths
@pytest.mark.parametrize("stop", ["END of", ["of it", "END o"]])
def test_the_text_ends_with_the_stop_string_if_that_is_asked_for(
    app: FastAPI, path: str, stop: object
) -> None:
    first = "END of" if isinstance(stop, str) else "END o"
    end = TEXT.index(first)
    for included, expected in ((False, TEXT[:end]), (True, TEXT[:end] + first)):
        body = BODIES[path] | {"stop": stop, "include_stop_str_in_output": included}
        assert text_of(send(app, path, body).json["choices"][0]) == expected
        events = send(app, path, body | {"stream": True}).events
        assert "".join(text_of(event["choices"][0]) for event in events) == expected


def test_special_tokens_appear_by_their_names_if_that_is_asked_for() -> None:
    tokenizer = family("hermes")
    end = "<|im_end|>"
    service = FakeService(output=f"a{end}b", tokenizer=tokenizer)
    app = app_over(service, tokenizer=tokenizer, vocab_size=5000)
    for skips, expected in ((True, "ab"), (False, f"a{end}b")):
        body = BODIES[COMPLETIONS] | {"skip_special_tokens": skips, "logprobs": 0}
        choice = send(app, COMPLETIONS, body).json["choices"][0]
        assert choice["text"] == expected
        assert choice["logprobs"]["text_offset"][:3] == [0, 1, expected.index("b")]


@both_paths
def test_ids_of_prompt_and_answer_are_there_whole_and_in_a_stream(
    app: FastAPI, service: FakeService, path: str
) -> None:
    body = BODIES[path] | {"return_token_ids": True}
    whole = send(app, path, body).json
    prompt, ids = list(service.requests[0].prompt), [*service.tokenizer.encode(TEXT), 0]
    assert whole["choices"][0]["token_ids"] == ids
    holder = whole["choices"][0] if path == COMPLETIONS else whole
    assert holder["prompt_token_ids"] == prompt
    first, *rest = events = send(app, path, body | {"stream": True}).events
    streamed = [event["choices"][0]["token_ids"] for event in events]
    assert list(itertools.chain(*streamed)) == ids
    assert (first["choices"][0] if path == COMPLETIONS else first)["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in event["choices"][0] | event for event in rest)
    plain = send(app, path, BODIES[path]).json
    assert "token_ids" not in plain["choices"][0]


@both_paths
@pytest.mark.parametrize("includes", [True, None])
def test_every_chunk_has_the_usage_so_far(app: FastAPI, path: str, includes: bool | None) -> None:
    options = {"include_usage": includes, "continuous_usage_stats": True}
    body = BODIES[path] | {"stream": True, "stream_options": options, "n": 2}
    events = send(app, path, body | {"return_token_ids": True}).events
    sent = 0
    for event in events:
        sent += sum(len(choice["token_ids"]) for choice in event["choices"])
        assert event["usage"]["completion_tokens"] == sent
        assert event["usage"]["total_tokens"] == sent + event["usage"]["prompt_tokens"]
    assert (events[-1]["choices"] == []) == (includes is True)


@both_paths
def test_a_stream_that_excludes_usage_has_none_in_any_chunk(app: FastAPI, path: str) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    events = send(app, path, BODIES[path] | {"stream": True, "stream_options": options}).events
    assert not any("usage" in event for event in events)


class RankedService(FakeService):
    """An engine whose logprobs grow with the request's number: 3 are -3, -2 and -1 a token."""

    def _chunks(self, request: Request) -> Iterator[Chunk]:
        number = len(self.requests) - 4
        self.output = f"text {number}"
        for chunk in super()._chunks(request):
            logprobs = tuple(Logprobs(float(number), (), ()) for _ in chunk.tokens)
            yield Chunk(
                chunk.seq_id,
                chunk.start,
                chunk.tokens,
                chunk.origins,
                logprobs,
                chunk.finish,
                chunk.stats,
            )


@both_paths
@pytest.mark.parametrize("with_logprobs", [True, False])
def test_the_likeliest_continuations_are_sent(path: str, with_logprobs: bool) -> None:
    service = RankedService()
    shown = {"logprobs": 0 if path == COMPLETIONS else True} if with_logprobs else {}
    reply = send(app_over(service), path, BODIES[path] | {"best_of": 3, "n": 2} | shown)
    assert reply.status == 200, reply.body
    choices = reply.json["choices"]
    assert [text_of(choice) for choice in choices] == ["text -1", "text -2"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [choice["logprobs"] is not None for choice in choices] == [with_logprobs] * 2
    num_tokens = sum(len(service.tokenizer.encode(f"text {-n}")) + 1 for n in (1, 2, 3))
    assert reply.json["usage"]["completion_tokens"] == num_tokens, "all of them were generated"
    assert {request.logprobs for request in service.requests} == {0}


@both_paths
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"best_of": 3, "stream": True}, "cannot be streamed"),
        ({"best_of": 2, "n": 3}, "from n, 3, to 128"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(
    app: FastAPI, path: str, given: dict[str, object], words: str
) -> None:
    reply = send(app, path, BODIES[path] | given)
    assert (reply.status, reply.error["param"]) == (400, "best_of")
    assert words in reply.error["message"]


def test_best_of_equal_to_n_is_no_choice_and_can_be_streamed(app: FastAPI) -> None:
    body = BODIES[COMPLETIONS] | {"best_of": 2, "n": 2, "stream": True}
    assert send(app, COMPLETIONS, body).status == 200


def test_the_last_tokens_of_a_prompt_are_kept_and_echoed(
    app: FastAPI, service: FakeService
) -> None:
    text = "one two three " * 300
    ids = service.tokenizer.encode(text)
    refused = send(app, COMPLETIONS, {"prompt": text})
    assert refused.error["code"] == "context_length_exceeded"
    for keep, kept in ((5, 5), (-1, 256 - 10)):
        body = {"prompt": text, "max_tokens": 10, "truncate_prompt_tokens": keep, "echo": True}
        reply = send(app, COMPLETIONS, body)
        assert service.requests[-1].prompt == ids[-kept:]
        assert reply.json["choices"][0]["text"].startswith(service.tokenizer.decode(ids[-kept:]))
    by_ids = send(app, COMPLETIONS, {"prompt": list(ids), "truncate_prompt_tokens": 5})
    assert by_ids.status == 200
    too_long = send(app, COMPLETIONS, {"prompt": text, "truncate_prompt_tokens": 10_000})
    assert too_long.error["code"] == "context_length_exceeded"


def test_the_same_pages_are_not_shared_if_the_prompt_must_not_be_cached(
    app: FastAPI, service: FakeService
) -> None:
    for _ in range(2):
        send(app, COMPLETIONS, BODIES[COMPLETIONS] | {"cache_prompt": False})
    salts = [request.cache_salt for request in service.requests]
    assert len({b"", *salts}) == 3


def test_penalties_on_a_part_of_the_text_are_refused(app: FastAPI) -> None:
    body = BODIES[COMPLETIONS] | {"repeat_penalty": 1.1, "repeat_last_n": 64}
    assert send(app, COMPLETIONS, body).error["param"] == "repeat_last_n"
    assert send(app, COMPLETIONS, body | {"repeat_last_n": -1}).status == 200


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"n_predict": 3, "max_tokens": 4}, "n_predict"),
        ({"repeat_penalty": 2, "repetition_penalty": 3}, "repeat_penalty"),
        ({"structured_outputs": {"regex": "a"}, "json_schema": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ],
)
def test_two_names_for_one_thing_with_two_values_are_refused(
    app: FastAPI, given: dict[str, object], param: str
) -> None:
    reply = send(app, COMPLETIONS, {"prompt": "x"} | given)
    assert (reply.status, reply.error["param"]) == (400, param)


@both_paths
def test_unknown_parameters_follow_the_setting(path: str, caplog: pytest.LogCaptureFixture) -> None:
    body = BODIES[path] | {"hyper drive": 1, "wärp": {"a": 1}, "x" * 300: 2}
    for setting, status in (("refuse", 400), ("warn", 200), ("ignore", 200)):
        app = app_over(FakeService(), config={"http.unknown_parameters": setting})
        caplog.clear()
        with caplog.at_level(logging.WARNING, "specserve"):
            reply = send(app, path, body)
            streamed = send(app, path, body | {"stream": True})
        assert (reply.status, streamed.status) == (status, status)
        names = rf"hyper drive, w\xe4rp, {'x' * 100}" if setting == "warn" else None
        assert [one.headers.get("x-specserve-ignored") for one in (reply, streamed)] == [names] * 2
        logged = [record for record in caplog.records if "unknown" in record.getMessage()]
        assert len(logged) == (2 if setting == "warn" else 0)
        many = send(app, path, BODIES[path] | {f"k{i}": 0 for i in range(30_000)})
        assert len(many.headers.get("x-specserve-ignored", "")) < 2000
