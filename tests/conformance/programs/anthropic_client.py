"""Checks with Anthropic's client: messages, streams, tools, counts, errors."""

from __future__ import annotations

from typing import Any

import anthropic

from tests.conformance.checks import MODEL, CheckList, Endpoint

check = CheckList(("anthropic",))
HELLO: Any = [{"role": "user", "content": "Say hello."}]
GREEDY = {"temperature": 0}
"""Sent by its name: newer clients have no argument for it."""
QUESTION: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def connect(endpoint: Endpoint) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=endpoint.root, api_key="none", max_retries=0)


def create(endpoint: Endpoint, messages: Any, **arguments: Any) -> Any:
    given: Any = {"max_tokens": 200, "messages": messages, **arguments}
    return connect(endpoint).messages.create(model=MODEL, **given)


def num_input(message: Any) -> int:
    """Return the tokens of the prompt; what was cached is counted apart."""
    return int(message.usage.input_tokens + message.usage.cache_read_input_tokens)


@check
def a_greedy_stream_is_the_text_of_the_whole_answer(endpoint: Endpoint) -> None:
    whole = create(endpoint, HELLO, max_tokens=16, extra_body=GREEDY)
    with connect(endpoint).messages.stream(
        model=MODEL, messages=HELLO, max_tokens=16, extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens, num_input(final)) == (
        whole.stop_reason,
        whole.usage.output_tokens,
        num_input(whole),
    )


@check
def tokens_are_counted_as_a_message_uses_them(endpoint: Endpoint) -> None:
    parts: Any = {"system": "Be brief.", "tools": [WEATHER], "tool_choice": {"type": "auto"}}
    count = connect(endpoint).messages.count_tokens(model=MODEL, messages=HELLO, **parts)
    assert num_input(create(endpoint, HELLO, max_tokens=2, **parts)) == count.input_tokens


@check
def a_text_that_is_cut_says_so(endpoint: Endpoint) -> None:
    reply = create(endpoint, HELLO, max_tokens=2)
    assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 2)


@check
def a_seed_repeats_a_sampled_text(endpoint: Endpoint) -> None:
    texts = {
        create(endpoint, HELLO, max_tokens=12, extra_body={"seed": 5}).content[0].text
        for _ in range(3)
    }
    assert len(texts) == 1


@check
async def the_asynchronous_client_streams(endpoint: Endpoint) -> None:
    async with anthropic.AsyncAnthropic(base_url=endpoint.root, api_key="none") as client:
        stream = await client.messages.create(
            model=MODEL, messages=HELLO, max_tokens=8, stream=True
        )
        types = [event.type async for event in stream]
    assert (types[0], types[-2:]) == ("message_start", ["message_delta", "message_stop"])


@check
def errors_have_the_client_s_classes(endpoint: Endpoint) -> None:
    client = connect(endpoint)
    for kind, arguments in (
        (anthropic.NotFoundError, {"model": "other", "messages": HELLO}),
        (anthropic.BadRequestError, {"model": MODEL, "messages": HELLO, "stop_sequences": [""]}),
        (anthropic.BadRequestError, {"model": MODEL, "messages": []}),
    ):
        try:
            client.messages.create(max_tokens=8, **arguments)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__} for {arguments}")


@check.scripted
def a_stop_sequence_ends_the_text_before_it(endpoint: Endpoint) -> None:
    reply = create(endpoint, HELLO, stop_sequences=["no", "said"])
    assert reply.content[0].text == "Answer 1: you "
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "said")


@check.scripted
def a_conversation_reaches_the_model_whole(endpoint: Endpoint) -> None:
    first = create(endpoint, HELLO)
    again: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello 日本."}]}]
    reply = create(endpoint, [*HELLO, first.to_param(), *again], system="Be brief.")
    assert reply.content[0].text == "Answer 2: you said Hello 日本."
    assert reply.stop_reason == "end_turn"


@check.scripted
def a_tool_is_called_and_its_result_answered(endpoint: Endpoint) -> None:
    reply = create(endpoint, QUESTION, tools=[WEATHER])
    assert reply.stop_reason == "tool_use"
    (call,) = (block for block in reply.content if block.type == "tool_use")
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "17 degrees"}
    messages = [*QUESTION, reply.to_param(), {"role": "user", "content": [result]}]
    reply = create(endpoint, messages, tools=[WEATHER])
    assert reply.content[0].text == "The result is 17 degrees."


@check.scripted
def a_demanded_tool_is_called_although_nothing_asks_for_it(endpoint: Endpoint) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        reply = create(endpoint, HELLO, tools=[WEATHER], tool_choice=choice)
        assert [block.type for block in reply.content] == ["tool_use"]


@check.scripted
def tool_choice_none_calls_nothing(endpoint: Endpoint) -> None:
    reply = create(endpoint, QUESTION, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block.type for block in reply.content] == ["text"]


@check.scripted
def a_streamed_call_adds_up_in_the_client_s_helper(endpoint: Endpoint) -> None:
    with connect(endpoint).messages.stream(
        model=MODEL, messages=QUESTION, max_tokens=200, tools=[WEATHER]
    ) as stream:
        final = stream.get_final_message()
    (call,) = (block for block in final.content if block.type == "tool_use")
    assert (call.input, final.stop_reason) == ({"city": "Paris"}, "tool_use")


@check.scripted
def the_client_s_runner_answers_calls_until_there_are_none(endpoint: Endpoint) -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        return f"17 degrees in {city}"

    runner = connect(endpoint).beta.messages.tool_runner(
        model=MODEL, max_tokens=200, messages=QUESTION, tools=[get_weather], thread=False
    )
    final: Any = runner.until_done()
    assert final.content[0].text == "The result is 17 degrees in Paris."


if __name__ == "__main__":
    check.main()
