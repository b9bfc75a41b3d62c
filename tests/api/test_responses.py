"""Responses, streamed or not, as the official client reads them and byte by byte."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from specserve.api import generation, responses
from specserve.api.responses import SLICE, _slices
from specserve.errors import Overloaded
from tests.support.http_server import (
    CONTEXT,
    TEXT,
    FakeService,
    Reply,
    RunningServer,
    demo_tokenizer,
    serving,
)

NUM_TOKENS = len(demo_tokenizer().encode(TEXT)) + 1  # with the one that ends it
CHAT: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def test_a_completion_has_text_usage_and_what_speculation_did(client: openai.OpenAI) -> None:
    answer: Any = client.completions.create(model="demo", prompt="hello", max_tokens=100)
    assert answer.choices[0].text == TEXT
    assert (
        answer.object,
        answer.model,
        answer.choices[0].finish_reason,
        answer.choices[0].logprobs,
    ) == ("text_completion", "demo", "stop", None)
    prompt_tokens = len(demo_tokenizer().encode("hello"))
    assert answer.usage.to_dict() == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": NUM_TOKENS,
        "total_tokens": prompt_tokens + NUM_TOKENS,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (
        answer.specserve["mean_accepted_length"]
        == answer.specserve["accepted"] / answer.specserve["rounds"]
        > 0
    )
    assert list(answer.specserve) == [
        "verifier",
        "lossless",
        "rounds",
        "drafts",
        "drafted",
        "accepted",
        "accepted_by_position",
        "mean_accepted_length",
        "target_passes",
        "anticipated",
        "resumed",
        "reproducible",
        "queue_time_ms",
        "prefill_time_ms",
        "time_to_first_token_ms",
    ]
    assert (answer.specserve["queue_time_ms"], answer.specserve["prefill_time_ms"]) == (1.5, 20.25)
    assert answer.specserve["time_to_first_token_ms"] > 0


def test_a_chat_answers_as_the_assistant(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(model="demo", messages=CHAT)
    assert (answer.object, answer.choices[0].message.role, answer.choices[0].message.content) == (
        "chat.completion",
        "assistant",
        TEXT,
    )
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", NUM_TOKENS)


def test_streams_add_up_to_the_whole_text(client: openai.OpenAI) -> None:
    chunks: list[Any] = list(
        client.completions.create(model="demo", prompt="hello", max_tokens=100, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "stop"
    ]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].specserve["verifier"] == "block"
    assert len(chunks) < NUM_TOKENS / 1.5  # several tokens of one round in one chunk


def test_a_chat_streams_its_role_once_and_first(client: openai.OpenAI) -> None:
    chunks: list[Any] = list(
        client.chat.completions.create(model="demo", messages=CHAT, stream=True)
    )
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (
        len(chunks) - 1
    )
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == TEXT
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_an_event_of_a_chat_without_text_has_no_content(server: RunningServer) -> None:
    body = {"messages": CHAT, "stop": TEXT[:3], "stream": True}
    events = server.ask("/v1/chat/completions", body).events
    first, last = (event["choices"][0] for event in events)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")


def test_the_async_client_reads_many_streams_at_once(server: RunningServer) -> None:
    async def read(client: openai.AsyncOpenAI, number: int) -> str:
        stream: Any = await client.chat.completions.create(
            model="demo", messages=CHAT, stream=True, max_tokens=NUM_TOKENS - number
        )
        return "".join([chunk.choices[0].delta.content async for chunk in stream])

    async def read_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="any", max_retries=0
        ) as client:
            whole = await client.completions.create(model="demo", prompt="x", max_tokens=100)
            assert whole.choices[0].text == TEXT
            return await asyncio.gather(*(read(client, number) for number in range(8)))

    texts = asyncio.run(read_all())
    assert texts[0] == TEXT
    assert [TEXT.startswith(text) for text in texts] == [True] * 8
    assert len(set(texts[1:])) == 7


def test_usage_comes_in_a_chunk_without_choices_just_before_the_end(server: RunningServer) -> None:
    body = {"messages": CHAT, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = server.ask("/v1/chat/completions", body).events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == NUM_TOKENS
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert last["specserve"] == chunks[-1]["specserve"]
    assert all(
        "usage" not in chunk
        for chunk in server.ask("/v1/chat/completions", body | {"stream_options": None}).events
    )


def test_origins_come_when_asked_for_one_a_token(server: RunningServer) -> None:
    body = {"prompt": "x", "max_tokens": 100, "stream": True}
    chunks = server.ask("/v1/completions", body, headers={"X-Specserve-Origins": "1"}).events
    origins = [origin for chunk in chunks for origin in chunk["origins"]]
    assert len(origins) == NUM_TOKENS
    assert set(origins) == {"accepted", "bonus"}
    assert all("origins" not in chunk for chunk in server.ask("/v1/completions", body).events)


@pytest.mark.parametrize("stop", ["END", "日本", " of it", "👧"])
def test_a_stop_string_is_never_shown_and_ends_the_work_at_once(stop: str) -> None:
    with serving() as server:
        body = {"prompt": "x", "max_tokens": 100, "stop": ["absent", stop]}
        whole = server.ask("/v1/completions", body).json
        expected = TEXT[: TEXT.index(stop)]
        assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (
            expected,
            "stop",
        )
        used = whole["usage"]["completion_tokens"]
        assert used < NUM_TOKENS - 1
        chunks = server.ask(
            "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}}
        ).events
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == expected
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["completion_tokens"] == used
        # The rounds after the stop string were not run.
        assert chunks[-1]["specserve"]["rounds"] * 2 == server.service.num_chunks
        assert server.service.num_live == 0


def test_several_prompts_and_n_are_choices_in_order(server: RunningServer) -> None:
    server.service.requests.clear()
    body = {"prompt": ["a", [1, 2], "ccc"], "n": 2, "max_tokens": 5, "seed": 7}
    answer = server.ask("/v1/completions", body).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    lengths = [len(request.prompt) for request in server.service.requests]
    assert answer["usage"] == {
        "prompt_tokens": sum(lengths) // 2,
        "completion_tokens": 30,
        "total_tokens": sum(lengths) // 2 + 30,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["specserve"]["rounds"] == answer["specserve"]["drafts"] == 6 * 3
    assert answer["specserve"]["accepted_by_position"] == [6, 6]
    assert not [name for name in answer["specserve"] if name.endswith("_ms")], "each has its own"
    assert len({request.seed for request in server.service.requests}) == 2
    chunks = server.ask("/v1/completions", body | {"stream": True}).events
    finished = [
        chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]
    ]
    assert sorted(finished) == [0, 1, 2, 3, 4, 5]
    assert [chunk for chunk in chunks if "specserve" in chunk] == chunks[-1:]
    for index in range(6):
        text = "".join(
            chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"][0]["index"] == index
        )
        assert text == answer["choices"][index]["text"]


@pytest.mark.parametrize(
    ("path", "members"),
    [
        ("/v1/completions", {"prompt": "x" * 90}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 90}]}),
    ],
)
def test_usage_says_how_much_of_the_prompt_was_cached(
    server: RunningServer, path: str, members: dict[str, object]
) -> None:
    server.service.cached_tokens = [48, 48]
    body = members | {"max_tokens": 5}
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [
        server.ask(path, body).json["usage"],
        *(
            chunk["usage"]
            for chunk in server.ask(path, body | {"stream": True, "stream_options": options}).events
        ),
    ]
    assert len(usages) > 3
    assert {usage["prompt_tokens_details"]["cached_tokens"] for usage in usages} == {48}


FIGURES = {
    "x-specserve-cached-tokens": "48",
    "x-specserve-queue-time-ms": "1.5",
    "x-specserve-prefill-time-ms": "20.25",
}
FIGURES_AT_END = {
    "x-specserve-drafts": "3",
    "x-specserve-drafted": "12",
    "x-specserve-accepted": "2",
    "x-specserve-accepted-by-position": "1,1",
}


def figure_headers(reply: Reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name in EVERY_FIGURE}


EVERY_FIGURE = {*FIGURES, *FIGURES_AT_END, "x-specserve-time-to-first-token-ms"}
MESSAGES = {"messages": CHAT, "max_tokens": 5}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 5}),
        ("/v1/chat/completions", MESSAGES),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 5}),
        ("/v1/messages", MESSAGES),
    ],
)
def test_the_figures_of_a_request_are_headers(
    server: RunningServer, path: str, body: dict[str, object]
) -> None:
    server.service.cached_tokens = [48, 48]
    found = figure_headers(server.ask(path, body))
    assert float(found.pop("x-specserve-time-to-first-token-ms")) > 0
    assert found == FIGURES | FIGURES_AT_END
    assert figure_headers(server.ask(path, body | {"stream": True})) == FIGURES


def test_times_are_no_headers_where_there_are_several_texts(server: RunningServer) -> None:
    body = {"prompt": "hello", "max_tokens": 5, "n": 2}
    found = figure_headers(server.ask("/v1/completions", body))
    assert sorted(found) == sorted([*FIGURES_AT_END, "x-specserve-cached-tokens"])
    assert figure_headers(server.ask("/v1/completions", body | {"stream": True})) == {}


def test_what_one_continuation_has_from_another_of_its_prompt_was_not_cached(
    server: RunningServer,
) -> None:
    server.service.cached_tokens = [16, 48, 32, 0]
    answer = server.ask("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 5}).json
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_echo_puts_the_prompt_in_front_once(server: RunningServer) -> None:
    body = {"prompt": ["日a", list(demo_tokenizer().encode("ü"))], "echo": True, "max_tokens": 1}
    assert [choice["text"] for choice in server.ask("/v1/completions", body).json["choices"]] == [
        "日aG",
        "üG",
    ]
    chunks = server.ask(
        "/v1/completions", {"prompt": "日a", "echo": True, "max_tokens": 100, "stream": True}
    ).events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "日a" + TEXT


@pytest.mark.parametrize(("most", "text"), [(0, ""), (100, TEXT)])
def test_echo_does_not_repeat_a_character_that_the_prompt_begins(
    server: RunningServer, most: int, text: str
) -> None:
    """The text begins another one."""
    begun = list(demo_tokenizer().encode("x é"))[:-1]
    body = {"prompt": begun, "echo": True, "max_tokens": most}
    for logprobs in ({}, {"logprobs": 1}):
        choice = server.ask("/v1/completions", body | logprobs).json["choices"][0]
        assert choice["text"] == "x \N{REPLACEMENT CHARACTER}" + text
        if logprobs and most:
            assert choice["logprobs"]["text_offset"][len(begun)] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_say_where_each_token_begins(
    server: RunningServer, stream: bool
) -> None:
    body = {"prompt": "x", "max_tokens": 100, "logprobs": 2, "stream": stream}
    reply = server.ask("/v1/completions", body)
    parts = [
        chunk["choices"][0]["logprobs"] for chunk in (reply.events if stream else [reply.json])
    ]
    offsets, tokens = (
        [item for part in parts for item in part[name]] for name in ("text_offset", "tokens")
    )
    assert len(tokens) == len(offsets) == NUM_TOKENS
    assert tokens[-1] == "<|endoftext|>"
    assert all(
        TEXT[offset:].startswith(token)
        for offset, token in zip(offsets[:-1], tokens[:-1], strict=True)
        if "bytes:" not in token
    )
    assert parts[0]["token_logprobs"][0] == -0.5
    assert parts[0]["top_logprobs"][0] == {"G": -0.5, "!": -9999.0}  # there is no infinity in JSON


def test_chat_logprobs_have_bytes_that_make_the_text(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(
        model="demo", messages=CHAT, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert bytes(byte for token in choice.logprobs.content for byte in token.bytes).decode() == TEXT
    assert {len(token.top_logprobs) for token in choice.logprobs.content} == {3}
    streamed: Any = client.chat.completions.create(
        model="demo", messages=CHAT, logprobs=True, top_logprobs=3, stream=True
    )
    tokens = [token for chunk in streamed for token in chunk.choices[0].logprobs.content]
    assert [token.to_dict() for token in tokens] == [
        token.to_dict() for token in choice.logprobs.content
    ]


def test_a_chat_may_fill_the_context_and_a_completion_writes_16_tokens(
    server: RunningServer,
) -> None:
    server.service.requests.clear()
    server.ask("/v1/chat/completions", {"messages": CHAT})
    server.ask("/v1/completions", {"prompt": "x"})
    chat, completion = server.service.requests
    assert (chat.max_tokens, completion.max_tokens) == (CONTEXT - len(chat.prompt), 16)


FAILURES = [
    FakeService(fails_after=3),
    FakeService(fails_after=3, error=RuntimeError("secret path /etc")),
    FakeService(fails_after=3, error=Overloaded("the queue is full")),
    FakeService(silent_after=3),
]


@pytest.mark.parametrize("service", FAILURES)
def test_a_failure_in_mid_stream_is_an_event_and_never_silence(service: FakeService) -> None:
    with (
        serving(service) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        *chunks, last = server.ask(
            "/v1/completions", {"prompt": "x", "max_tokens": 100, "stream": True}
        ).events
        assert TEXT.startswith("".join(chunk["choices"][0]["text"] for chunk in chunks))
        assert set(last) == {"error"}
        assert "secret" not in last["error"]["message"]
        with pytest.raises(openai.APIError):
            list(client.completions.create(model="demo", prompt="x", max_tokens=100, stream=True))
        assert server.service.num_live == 0
        failures = server.registry.counter("request_failure_total")
        assert server.until(lambda: sum(total for (total,) in failures.samples().values()) == 2)


@pytest.mark.parametrize("service", FAILURES)
def test_a_failure_before_an_answer_in_one_piece_has_a_status(service: FakeService) -> None:
    with serving(service) as server:
        reply = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 100})
        assert reply.status == (429 if isinstance(service.error, Overloaded) else 500)
        assert reply.error["type"] == (
            "rate_limit_error" if reply.status == 429 else "server_error"
        )
        assert "secret" not in reply.error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hangs_after", [0, 3])
def test_a_client_that_leaves_cancels_everything(stream: bool, hangs_after: int) -> None:
    with serving(FakeService(hangs_after=hangs_after)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 100, "stream": stream}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        assert server.until(lambda: server.service.num_live == 4)
        connection.close()
        assert server.until(lambda: server.service.num_live == 0)
        assert server.until(
            lambda: server.registry.counter("request_failure_total").samples() == {("499",): (1.0,)}
        )


def test_a_request_that_takes_too_long_is_cancelled_and_says_so() -> None:
    with serving(FakeService(hangs_after=3), config={"limits.request_timeout_s": 0.2}) as server:
        reply = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 100})
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")
        *_, last = server.ask(
            "/v1/completions", {"prompt": "x", "max_tokens": 100, "stream": True}
        ).events
        assert last["error"]["code"] == "request_timeout"
        assert server.service.num_live == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_gets_no_token_in_its_time_is_the_servers_failure(stream: bool) -> None:
    with serving(FakeService(hangs_after=0), config={"limits.request_timeout_s": 0.2}) as server:
        reply = server.ask("/v1/completions", {"prompt": "x", "stream": stream})
        assert (reply.status, reply.error["code"]) == (504, "request_timeout")
        assert server.until(
            lambda: server.registry.counter("request_failure_total").samples() == {("504",): (1.0,)}
        )


def test_a_long_answer_is_put_together_while_others_run() -> None:
    async def turns_of_another() -> tuple[int, str]:
        turns = 0

        async def another() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(another())
        slices = [part async for part in _slices(iter(["é" * 1000] * 1000))]
        task.cancel()
        assert max(map(len, slices)) < 2 * SLICE
        return turns, "".join(slices)

    turns, text = asyncio.run(turns_of_another())
    assert text == "é" * 1_000_000
    assert turns >= 1_000_000 // SLICE


def test_more_logprobs_than_one_answer_can_hold_are_refused(server: RunningServer) -> None:
    body = {"prompt": "x", "n": 72, "max_tokens": 2000, "logprobs": 20}
    reply = server.ask("/v1/completions", body)
    assert (reply.status, reply.error["param"]) == (400, "logprobs")
    assert "3,024,000 logprobs" in reply.error["message"]
    assert server.ask("/v1/completions", {**body, "stream": True}).status == 200


def test_an_answer_says_how_long_it_is(server: RunningServer) -> None:
    reply = server.ask("/v1/completions", {"prompt": "x", "n": 3, "max_tokens": 9, "logprobs": 1})
    assert int(reply.headers["content-length"]) > 500
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2]


def test_a_client_that_takes_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would otherwise hold its answer for as long as it likes."""
    monkeypatch.setattr(responses, "DELIVERY_S", 0.1)
    monkeypatch.setattr(generation, "MAX_BEHIND", 20)
    body = json.dumps({"prompt": "x", "n": 128, "max_tokens": 250, "logprobs": 20, "stream": True})
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    service = FakeService(output=TEXT * 100)
    with (
        serving(service, config={"limits.request_timeout_s": 3}) as server,
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(f"{head}\r\n{body}".encode())
        failed = server.registry.counter("request_failure_total")
        assert server.until(lambda: failed.samples() == {("499",): (1.0,)})
        assert service.num_live == 0
        assert service.num_chunks < 128 * 100, "the engine goes on writing"


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_that_runs_out_within_the_engine_is_answered(stream: bool) -> None:
    """The client is not the one that does not answer."""
    service = FakeService(fails_after=0, error=TimeoutError("a link"))
    with serving(service) as server:
        body = {"prompt": "x", "max_tokens": 9, "stream": stream}
        reply = server.ask("/v1/completions", body)
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
