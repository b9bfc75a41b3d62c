"""The error table, row by row, as the official client sees it."""

from __future__ import annotations

import openai
import pytest

from specserve import errors
from specserve.api.refusal import ERROR_KINDS, Refusal
from tests.support.http_server import FakeService, serving

ROWS = [
    (errors.BadValue("bad", param="top_p"), openai.BadRequestError, 400, None, "top_p"),
    (errors.UnknownToken("no such id"), openai.BadRequestError, 400, None, None),
    (
        errors.TooLong("too long", param="prompt"),
        openai.BadRequestError,
        400,
        "context_length_exceeded",
        "prompt",
    ),
    (errors.NotBegun("late"), openai.InternalServerError, 504, "request_timeout", None),
    (errors.TimedOut("late"), openai.APIStatusError, 408, "request_timeout", None),
    (errors.Overloaded("the queue is full"), openai.RateLimitError, 429, "overloaded", None),
    (errors.Unavailable("starting"), openai.InternalServerError, 503, "unavailable", None),
    (errors.WorkerLost("a worker died"), openai.InternalServerError, 500, "worker_lost", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "kind", "status", "code", "param"), ROWS)
def test_what_the_engine_refuses_has_its_status_streaming_or_not(
    error: Exception,
    kind: type[openai.APIStatusError],
    status: int,
    code: str,
    param: str | None,
    stream: bool,
) -> None:
    with (
        serving(FakeService(refusal=error)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(kind) as raised:
            client.completions.create(model="demo", prompt="x", n=2, stream=stream)
        seen = raised.value
        assert isinstance(seen.body, dict)
        assert (seen.status_code, seen.code, seen.param, seen.body["message"]) == (
            status,
            code,
            param,
            str(error),
        )
        assert ("retry-after" in seen.response.headers) == (status in (429, 503))
        assert seen.response.headers["x-request-id"]
        assert server.until(
            lambda: (
                server.registry.counter("request_failure_total").samples()
                == {(str(status),): (1.0,)}
            )
        )
        assert server.service.num_live == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_error_is_a_500_without_details(stream: bool) -> None:
    with serving(FakeService(refusal=RuntimeError("secret path /etc"))) as server:
        reply = server.ask("/v1/completions", {"prompt": "x", "stream": stream})
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
        assert b"secret" not in reply.body
        assert reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "body", "method", "status", "code"),
    [
        ("/v1/nothing", None, "GET", 404, "not_found"),
        ("/v1/models/other", None, "GET", 404, "model_not_found"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, "POST", 404, "model_not_found"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "model": "other"},
            "POST",
            404,
            "model_not_found",
        ),
        ("/tokenize", {"prompt": "x", "model": "other"}, "POST", 404, "model_not_found"),
        ("/v1/completions", None, "GET", 405, "method_not_allowed"),
        ("/health", {}, "POST", 405, "method_not_allowed"),
    ],
)
def test_paths_models_and_methods_that_are_not_there(
    path: str, body: object, method: str, status: int, code: str
) -> None:
    with serving() as server:
        reply = server.ask(path, body, method=method)
        assert (reply.status, reply.error["code"]) == (status, code)
        assert ("allow" in reply.headers) == (status == 405)


def test_every_refusal_that_a_request_may_meet_has_a_row() -> None:
    meant_for_clients = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.BadRequest)
        and kind is not errors.BadRequest
    }
    for kind in meant_for_clients | set(ERROR_KINDS):
        assert Refusal.from_error(kind("why")).message == "why"
        assert Refusal.from_error(kind("why")).status == (
            400 if kind in meant_for_clients - {errors.NotServed} else ERROR_KINDS[kind].status
        )


def test_a_refusal_may_quote_what_is_no_unicode() -> None:
    refusal = Refusal.from_error(errors.BadValue("not '\ud800'", param="\ud800"))
    assert bytes(refusal.response().body).isascii()
