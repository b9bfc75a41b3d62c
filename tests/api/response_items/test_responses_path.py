"""`/v1/responses` through the official client, whose types validate every item and event.

A fake engine writes the answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from specserve.errors import WorkerLost
from tests.support.http_server import TEXT, FakeService, Reply, RunningServer, serving
from tests.support.reasoners import reasoner
from tests.support.templates import call_format, family

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}
CALLS = [("look", '{"a": 1}'), ("look", '{"a": 2}')]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as made:
        yield made


def events(reply: Reply) -> list[dict[str, Any]]:
    """Return the events of a stream, each valid by its type and by the order of numbers."""
    *lines, rest = reply.body.decode().split("\n\n")
    assert (reply.status, rest) == (200, "")
    found = []
    for number, line in enumerate(lines):
        name, data = line.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        parsed = EVENT.validate_python(event)
        assert parsed.type == event["type"]
        found.append(event)
    return found


def ask(server: RunningServer, **parameters: Any) -> Reply:
    return server.ask("/v1/responses", {"input": "hi", "max_output_tokens": 200, **parameters})


MESSAGE_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
REASONING_EVENTS = [one.replace("output_text", "reasoning_text") for one in MESSAGE_EVENTS]
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


def names(found: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, with one delta for several in a row."""
    types = [event["type"] for event in found]
    return [one for before, one in zip([None, *types], types, strict=False) if before != one]


def test_a_text_is_answered_with_a_message(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="demo", input="hi", instructions="Be brief.")
    Response.model_validate(answer.model_dump(by_alias=True))
    assert (answer.status, answer.output_text, answer.error) == ("completed", TEXT, None)
    assert (answer.instructions, answer.store if hasattr(answer, "store") else False) == (
        "Be brief.",
        False,
    )
    assert answer.id.startswith("resp_")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens > 10


def test_a_stream_has_the_events_of_a_message_in_order(server: RunningServer) -> None:
    found = events(ask(server, stream=True))
    assert names(found) == [
        "response.created",
        "response.in_progress",
        *MESSAGE_EVENTS,
        "response.completed",
    ]
    deltas = [event["delta"] for event in found if event["type"].endswith("text.delta")]
    assert "".join(deltas) == TEXT
    assert len(deltas) > 3
    final = found[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == TEXT
    assert final["specserve"]["lossless"]


def test_the_client_puts_a_stream_together(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input="hi") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == TEXT


def test_a_text_that_is_cut_is_incomplete(server: RunningServer) -> None:
    whole = ask(server, max_output_tokens=3).json
    assert (whole["status"], whole["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert events(ask(server, max_output_tokens=3, stream=True))[-1]["type"] == (
        "response.incomplete"
    )


def test_reasoning_is_an_item_before_the_message() -> None:
    service = FakeService("Hm.\n</think>\n\nYes.", tokenizer=reasoner("open"))
    with serving(service, tokenizer=reasoner("open"), max_context=2048, vocab_size=4200) as server:
        whole = ask(server).json
        found = events(ask(server, stream=True))
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert [item["content"][0]["text"] for item in whole["output"]] == ["Hm.", "Yes."]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 1
    assert names(found)[2:-1] == [*REASONING_EVENTS, *MESSAGE_EVENTS]
    assert [event["output_index"] for event in found if event["type"].endswith("item.done")] == [
        0,
        1,
    ]


def test_calls_are_items_and_their_outputs_come_back_as_items() -> None:
    output = "So:\n" + call_format("hermes").format.render(CALLS)
    service = FakeService(output, tokenizer=family("hermes"))
    with (
        serving(service, tokenizer=family("hermes"), max_context=2048, vocab_size=4200) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        tools: Any = [TOOL]
        answer = client.responses.create(model="demo", input="hi", tools=tools)
        found = events(ask(server, tools=tools, stream=True))
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in calls] == CALLS
        assert answer.output_text == "So:\n"
        talk: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
        talk += [item.model_dump(exclude_none=True) for item in answer.output]
        talk += [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"it is {number}"}
            for number, call in enumerate(calls)
        ]
        service.output = "Done."
        assert client.responses.create(model="demo", input=talk, tools=tools).output_text == "Done."
        prompt = family("hermes")._tokenizer.decode(service.requests[-1].prompt)
    at = [prompt.index(part) for part in ("So:", '{"a": 1}', '{"a": 2}', "it is 0", "it is 1")]
    assert at == sorted(at)
    assert prompt.count("<|im_start|>assistant") == 2, "text and calls are one message"
    assert names(found)[2:-1] == [*MESSAGE_EVENTS, *CALL_EVENTS, *CALL_EVENTS]


def test_a_schema_constrains_the_text(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "name": "nothing", "schema": schema, "strict": True}
    assert ask(server, text={"format": form}).json["text"]["format"]["schema"] == schema
    grammar = server.service.requests[-1].grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema


@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"background": True}, "background", "keeps no responses"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "keeps no responses"),
        ({"tools": [{"type": "web_search", "filters": {}}]}, "tools[0].type", "runs no tools"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "runs no tools"),
        ({"input": []}, "input", ""),
        ({"input": [{"type": "message", "role": "user"}]}, "input[0].content", "needed"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "needed"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "nothing to answer"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "not supported"),
        ({"reasoning": {"effort": "high"}}, "effort", "not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", ""),
        ({"temperature": 101}, "temperature", "from 0 to 100"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
        ({"max_tokens": 5}, "max_tokens", "unknown"),
        ({"model": "other"}, "model", "not served"),
        ({"input": "x" * 9000}, "input", "context"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name_and_with_its_reason(
    server: RunningServer, parameters: dict[str, Any], param: str, words: str
) -> None:
    reply = ask(server, **parameters)
    assert (reply.status in (400, 404), reply.error["param"]) == (True, param), reply.error
    assert words in reply.error["message"]


def test_a_text_may_go_on_behind_its_end_as_in_a_chat(server: RunningServer) -> None:
    assert ask(server, ignore_eos=True).status == 200
    assert server.service.requests[-1].ignore_eos


def test_values_that_change_nothing_are_taken(server: RunningServer) -> None:
    harmless = {
        "store": True,
        "background": False,
        "truncation": "disabled",
        "include": [],
        "metadata": {"a": "b"},
        "reasoning": {"effort": None},
        "tools": [],
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
    }
    answer = ask(server, **harmless).json
    assert (answer["status"], answer["store"], answer["metadata"]) == (
        "completed",
        False,
        {"a": "b"},
    )


@pytest.mark.parametrize("path", ["resp_1", "resp_1/input_items"])
def test_an_earlier_response_is_a_404_that_says_why(server: RunningServer, path: str) -> None:
    reply = server.ask(f"/v1/responses/{path}")
    assert (reply.status, "keeps no responses" in reply.error["message"]) == (404, True)


def test_a_failure_in_mid_stream_is_an_event() -> None:
    service = FakeService(fails_after=4, error=WorkerLost("rank 1 is gone"))
    with serving(service) as server:
        last = events(ask(server, stream=True))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "rank 1 is gone"}


def test_a_refusal_before_the_first_token_has_its_own_status() -> None:
    with serving(FakeService(refusal=WorkerLost("none is left"))) as server:
        assert ask(server, stream=True).status == 500
    with serving(FakeService(full=True)) as server:
        assert ask(server).status == 429
