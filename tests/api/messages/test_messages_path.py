"""`/v1/messages` through Anthropic's client, whose types validate every message and event.

A fake engine writes the answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from specserve.errors import WorkerLost
from tests.support.http_server import TEXT, FakeService, Reply, RunningServer, serving
from tests.support.reasoners import reasoner
from tests.support.templates import call_format, family

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HELLO: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "name": "look",
    "description": "Look.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALLS = [("look", '{"a": 1}'), ("look", '{"a": 2}')]
TEXT_EVENTS = ["content_block_start", "text_delta", "content_block_stop"]
THINKING_EVENTS = ["content_block_start", "thinking_delta", "content_block_stop"]
CALL_EVENTS = ["content_block_start", "input_json_delta", "content_block_stop"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


def connect(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with connect(server) as made:
        yield made


@contextmanager
def reasoning(name: str, output: str) -> Iterator[RunningServer]:
    service = FakeService(output, tokenizer=reasoner(name))
    with serving(service, tokenizer=reasoner(name), max_context=2048, vocab_size=4200) as server:
        yield server


@contextmanager
def calling(output: str) -> Iterator[RunningServer]:
    service = FakeService(output, tokenizer=family("hermes"))
    with serving(service, tokenizer=family("hermes"), max_context=2048, vocab_size=4200) as server:
        yield server


def ask(server: RunningServer, **parameters: Any) -> Reply:
    return server.ask("/v1/messages", {"messages": HELLO, "max_tokens": 200, **parameters})


def events(reply: Reply) -> list[dict[str, Any]]:
    """Return the events of a stream, each valid by its type."""
    *lines, rest = reply.body.decode().split("\n\n")
    assert (reply.status, rest) == (200, "")
    found = []
    for line in lines:
        name, data = line.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "error":
            assert EVENT.validate_python(event).type == event["type"]
        found.append(event)
    return found


def names(found: list[dict[str, Any]]) -> list[str]:
    """Return the types of events or of their deltas, with one delta for several in a row."""
    types = [event.get("delta", {}).get("type") or event["type"] for event in found]
    return [one for before, one in zip([None, *types], types, strict=False) if before != one]


def test_a_chat_is_answered_with_a_message(client: anthropic.Anthropic) -> None:
    answer: Any = client.messages.create(
        model="demo", max_tokens=200, messages=HELLO, system="Be brief."
    )
    Message.model_validate(answer.model_dump())
    assert [(block.type, block.text) for block in answer.content] == [("text", TEXT)]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == (
        "assistant",
        "end_turn",
        None,
    )
    assert answer.id == f"msg_{answer._request_id}"
    assert (answer.usage.input_tokens > 5, answer.usage.output_tokens > 10) == (True, True)
    assert answer.usage.cache_read_input_tokens == 0
    assert answer.specserve["lossless"]


def test_a_stream_has_the_events_of_a_message_in_order(server: RunningServer) -> None:
    found = events(ask(server, stream=True))
    assert names(found) == ["message_start", *TEXT_EVENTS, "message_delta", "message_stop"]
    deltas = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert ("".join(deltas), len(deltas) > 3) == (TEXT, True)
    assert found[0]["message"]["content"] == []
    whole, end = ask(server).json, found[-2]
    assert end["usage"] == whole["usage"]
    assert end["specserve"] | {"time_to_first_token_ms": 0} == (
        whole["specserve"] | {"time_to_first_token_ms": 0}
    )


def test_cached_tokens_of_the_prompt_are_no_input_tokens(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 90}]}
    length = ask(server, **body).json["usage"]["input_tokens"]
    server.service.cached_tokens = [48, 48]
    usage, streamed = ask(server, **body).json["usage"], events(ask(server, **body, stream=True))
    found = [usage, streamed[0]["message"]["usage"], streamed[-2]["usage"]]
    assert [(one["input_tokens"], one["cache_read_input_tokens"]) for one in found] == (
        3 * [(length - 48, 48)]
    )


def test_the_client_puts_a_stream_together(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="demo", max_tokens=200, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == TEXT
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens > 10) == ("end_turn", True)


@pytest.mark.parametrize(
    ("parameters", "text", "end"),
    [
        ({"max_tokens": 2}, "Gr", ("max_tokens", None)),
        ({"stop_sequences": ["never", " aus"]}, "Grüße", ("stop_sequence", " aus")),
        ({"stop_sequences": ["never"]}, TEXT, ("end_turn", None)),
    ],
)
def test_a_message_says_why_it_ends(
    server: RunningServer, parameters: Any, text: str, end: tuple[str, str | None]
) -> None:
    whole = ask(server, **parameters).json
    assert (whole["content"][0]["text"][: len(text)], whole["stop_reason"]) == (text, end[0])
    delta = events(ask(server, stream=True, **parameters))[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == end
    assert whole["stop_sequence"] == end[1]


def test_thinking_is_a_block_before_the_text() -> None:
    with reasoning("open", "Hm.\n</think>\n\nYes.") as server:
        whole = ask(server).json
        found = events(ask(server, stream=True))
        with connect(server) as client:
            talk: Any = [*HELLO, {"role": "assistant", "content": whole["content"]}, *HELLO]
            client.messages.create(model="demo", max_tokens=9, messages=talk)
        prompt = reasoner("open")._tokenizer.decode(server.service.requests[-1].prompt)
    Message.model_validate(whole)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert (whole["content"][0]["thinking"], whole["content"][1]["text"]) == ("Hm.", "Yes.")
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 1
    assert names(found)[1:-2] == [*THINKING_EVENTS, *TEXT_EVENTS]
    ends = [event["index"] for event in found if event["type"] == "content_block_stop"]
    assert ends == [0, 1]
    assert "Hm.Yes." in prompt, "the template gets reasoning that comes back"


def test_calls_are_blocks_and_their_results_come_back_as_blocks() -> None:
    with (
        calling("So:\n" + call_format("hermes").format.render(CALLS)) as server,
        connect(server) as client,
    ):
        answer: Any = client.messages.create(
            model="demo", max_tokens=200, messages=HELLO, tools=[TOOL]
        )
        found = events(ask(server, tools=[TOOL], stream=True))
        with client.messages.stream(
            model="demo", max_tokens=200, messages=HELLO, tools=[TOOL]
        ) as stream:
            streamed = stream.get_final_message()
        text, *calls = answer.content
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": f"it is {number}"}
            for number, call in enumerate(calls)
        ]
        turns: Any = [
            *HELLO,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]},
        ]
        server.service.output = "Done."
        last: Any = client.messages.create(
            model="demo", max_tokens=200, messages=turns, tools=[TOOL]
        )
        prompt = family("hermes")._tokenizer.decode(server.service.requests[-1].prompt)
    assert answer.stop_reason == streamed.stop_reason == "tool_use"
    assert text.text == "So:\n"
    assert [(call.name, call.input) for call in calls] == [("look", {"a": 1}), ("look", {"a": 2})]
    assert [block.to_dict() for block in streamed.content if block.type == "tool_use"] == [
        call.to_dict() | {"id": block.id}
        for call, block in zip(calls, streamed.content[1:], strict=True)
        if block.type == "tool_use"
    ]
    assert names(found)[1:-2] == [*TEXT_EVENTS, *CALL_EVENTS, *CALL_EVENTS]
    assert last.content[0].text == "Done."
    parts = ("So:", '{"a": 1}', '{"a": 2}', "it is 0", "it is 1", "And now?")
    at = [prompt.index(part) for part in parts]
    assert at == sorted(at)
    assert prompt.count("<|im_start|>tool") == 2


def test_a_call_that_is_cut_has_what_was_whole_of_its_arguments() -> None:
    output = call_format("hermes").format.render([("look", '{"a": 1, "b": 2}')])
    cut = len(family("hermes").encode(output[: output.index("2}")]))
    with calling(output) as server:
        answer = ask(server, tools=[TOOL], max_tokens=cut).json
    (block,) = answer["content"]
    assert (block["input"].get("a"), answer["stop_reason"]) == (1, "max_tokens")


def test_a_failure_in_mid_stream_is_an_event() -> None:
    with serving(FakeService(fails_after=4, error=WorkerLost("rank 1 is gone"))) as server:
        reply = ask(server, stream=True)
        with (
            connect(server) as client,
            pytest.raises(anthropic.APIStatusError, match="rank 1 is gone"),
            client.messages.stream(model="demo", max_tokens=200, messages=HELLO) as stream,
        ):
            stream.until_done()
        failures = server.registry.counter("request_failure_total").samples()
    assert events(reply)[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "rank 1 is gone"},
        "request_id": reply.headers["request-id"],
    }
    assert failures == {("500",): (2.0,)}
