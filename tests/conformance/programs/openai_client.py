"""Checks with OpenAI's client: chats, completions, responses, tools, structured answers, errors."""

from __future__ import annotations

import json
from typing import Any

import openai
from pydantic import BaseModel

from tests.conformance.checks import MODEL, CheckList, Endpoint

check = CheckList(("openai",))
HELLO: Any = [{"role": "user", "content": "Say hello."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CACHED = {"prompt_tokens_details": None}  # a repeated prompt may be found
QUESTION: Any = [{"role": "user", "content": "How is the weather in Paris?"}]


class Person(BaseModel):
    """A structured answer."""

    name: str
    age: int


def connect(endpoint: Endpoint) -> openai.OpenAI:
    return openai.OpenAI(base_url=endpoint.url, api_key="none", max_retries=0)


@check
def models_are_listed_and_retrieved(endpoint: Endpoint) -> None:
    client = connect(endpoint)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


@check
def a_completion_has_text_and_usage(endpoint: Endpoint) -> None:
    reply = connect(endpoint).completions.create(model=MODEL, prompt="import os\n", max_tokens=8)
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


@check
def several_prompts_and_choices_come_in_order(endpoint: Endpoint) -> None:
    reply = connect(endpoint).completions.create(
        model=MODEL, prompt=["one", "two"], n=2, max_tokens=4
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]


@check
def a_greedy_stream_is_the_text_of_the_whole_answer(endpoint: Endpoint) -> None:
    client = connect(endpoint)
    arguments: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    chunks = list(
        client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage.to_dict() | CACHED == whole.usage.to_dict() | CACHED


@check
def token_logprobs_come_with_their_alternatives(endpoint: Endpoint) -> None:
    reply = connect(endpoint).chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=3
    )
    found = reply.choices[0].logprobs
    assert found is not None
    assert found.content
    assert all(len(token.top_logprobs) == 3 for token in found.content)


@check
def a_seed_repeats_a_sampled_text(endpoint: Endpoint) -> None:
    client = connect(endpoint)
    texts = {
        client.completions.create(model=MODEL, prompt="def", max_tokens=12, temperature=1.0, seed=5)
        .choices[0]
        .text
        for _ in range(3)
    }
    assert len(texts) == 1


@check
def a_response_is_answered_and_streamed(endpoint: Endpoint) -> None:
    client = connect(endpoint)
    reply = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16)
    assert reply.status in ("completed", "incomplete")
    events = list(
        client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16, stream=True)
    )
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")


@check
async def the_asynchronous_client_streams(endpoint: Endpoint) -> None:
    async with openai.AsyncOpenAI(base_url=endpoint.url, api_key="none") as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=8, stream=True
        )
        finishes = [chunk.choices[0].finish_reason async for chunk in stream]
    assert [finish for finish in finishes if finish] in (["stop"], ["length"])


@check
def errors_have_the_client_s_classes(endpoint: Endpoint) -> None:
    client = connect(endpoint)
    for kind, arguments in (
        (openai.NotFoundError, {"model": "other", "messages": HELLO}),
        (openai.BadRequestError, {"model": MODEL, "messages": HELLO, "temperature": -1}),
        (openai.BadRequestError, {"model": MODEL, "messages": []}),
    ):
        try:
            client.chat.completions.create(**arguments)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__} for {arguments}")


@check.scripted
def a_stop_string_ends_the_text_before_it(endpoint: Endpoint) -> None:
    reply = connect(endpoint).chat.completions.create(model=MODEL, messages=HELLO, stop=["said"])
    assert reply.choices[0].message.content == "Answer 1: you "
    assert reply.choices[0].finish_reason == "stop"


@check.scripted
def a_conversation_reaches_the_model_whole(endpoint: Endpoint) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "Hello 日本."}, *HELLO]
    reply = connect(endpoint).chat.completions.create(model=MODEL, messages=messages)
    assert reply.choices[0].message.content == "Answer 2: you said Say hello."


@check.scripted
def a_tool_is_called_and_its_result_answered(endpoint: Endpoint) -> None:
    client = connect(endpoint)
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER])
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls
    call: Any = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Paris"},
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": "17 degrees"}
    messages: Any = [*QUESTION, message, result]
    reply = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert reply.choices[0].message.content == "The result is 17 degrees."


@check.scripted
def a_required_tool_is_called_although_nothing_asks_for_it(endpoint: Endpoint) -> None:
    reply = connect(endpoint).chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER], tool_choice="required"
    )
    assert reply.choices[0].message.tool_calls


@check.scripted
def tool_choice_none_calls_nothing(endpoint: Endpoint) -> None:
    reply = connect(endpoint).chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="none"
    )
    assert not reply.choices[0].message.tool_calls


@check.scripted
def a_streamed_call_adds_up_in_the_client_s_helper(endpoint: Endpoint) -> None:
    client = connect(endpoint)
    strict: Any = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=[strict]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    assert message.tool_calls[0].function.parsed_arguments == {"city": "Paris"}


@check.scripted
def a_structured_answer_is_parsed(endpoint: Endpoint) -> None:
    reply = connect(endpoint).chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Ada is 36 years old."}],
        response_format=Person,
    )
    assert reply.choices[0].message.parsed == Person(name="Ada", age=36)


@check.scripted
def a_structured_response_is_parsed(endpoint: Endpoint) -> None:
    reply = connect(endpoint).responses.parse(
        model=MODEL, input="Ada is 36 years old.", text_format=Person
    )
    assert reply.output_parsed == Person(name="Ada", age=36)


@check.scripted
def a_response_calls_a_tool_and_takes_its_result(endpoint: Endpoint) -> None:
    client = connect(endpoint)
    tool: Any = {"type": "function", **WEATHER["function"], "strict": True}
    reply = client.responses.create(model=MODEL, input=QUESTION, tools=[tool])
    (call,) = (item for item in reply.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "17 degrees"}
    asked: Any = [*QUESTION, call.model_dump(exclude_none=True), result]
    reply = client.responses.create(model=MODEL, input=asked, tools=[tool])
    assert reply.output_text == "The result is 17 degrees."


if __name__ == "__main__":
    check.main()
