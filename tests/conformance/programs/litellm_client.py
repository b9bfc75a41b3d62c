"""Checks with litellm, as a client of a server with OpenAI's API and as one of vLLM."""

from __future__ import annotations

import json
from typing import Any

import litellm
from pydantic import BaseModel

from tests.conformance.checks import MODEL, CheckList, Endpoint

check = CheckList(("litellm",))
HELLO: Any = [{"role": "user", "content": "Say hello."}]
QUESTION: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class City(BaseModel):
    """A structured answer."""

    name: str
    size: int


def settings(endpoint: Endpoint, provider: str = "openai") -> dict[str, Any]:
    return {
        "model": f"{provider}/{MODEL}",
        "api_base": endpoint.url,
        "api_key": "none",
        "num_retries": 0,
    }


@check
def a_chat_is_answered(endpoint: Endpoint) -> None:
    for provider in ("openai", "hosted_vllm", "litellm_proxy", "custom_openai"):
        reply = litellm.completion(messages=HELLO, **settings(endpoint, provider))
        assert reply.choices[0].message.content == "Answer 1: you said Say hello.", provider
        assert reply.usage.completion_tokens > 0


@check
def a_chat_streams_with_its_usage(endpoint: Endpoint) -> None:
    chunks = list(
        litellm.completion(
            messages=HELLO,
            stream=True,
            stream_options={"include_usage": True},
            **settings(endpoint),
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Answer 1: you said Say hello."
    whole = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert whole.usage.completion_tokens > 0


@check
async def the_asynchronous_call_streams(endpoint: Endpoint) -> None:
    stream = await litellm.acompletion(messages=HELLO, stream=True, **settings(endpoint))
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == "Answer 1: you said Say hello."


@check
def a_text_is_completed(endpoint: Endpoint) -> None:
    given = settings(endpoint, "text-completion-openai")
    reply = litellm.text_completion(prompt="one", max_tokens=8, **given)
    assert reply.choices[0].text


@check
def a_tool_is_called_and_its_result_answered(endpoint: Endpoint) -> None:
    given = settings(endpoint)
    reply = litellm.completion(messages=QUESTION, tools=[WEATHER], **given)
    message = reply.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "17"}
    reply = litellm.completion(messages=[*QUESTION, message, result], tools=[WEATHER], **given)
    assert reply.choices[0].message.content == "The result is 17."


@check
def a_streamed_call_is_put_together(endpoint: Endpoint) -> None:
    chunks = list(
        litellm.completion(messages=QUESTION, tools=[WEATHER], stream=True, **settings(endpoint))
    )
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Paris"},
    )


@check
def a_structured_answer_validates(endpoint: Endpoint) -> None:
    reply = litellm.completion(
        messages=[{"role": "user", "content": "Paris has 2100000 people."}],
        response_format=City,
        **settings(endpoint),
    )
    city = City.model_validate_json(reply.choices[0].message.content)
    assert city == City(name="Paris", size=2100000)


@check
def a_response_is_answered(endpoint: Endpoint) -> None:
    reply = litellm.responses(input="Say hello.", **settings(endpoint))
    (message,) = reply.output
    assert message.content[0].text == "Answer 1: you said Say hello."


@check
def errors_have_the_client_s_classes(endpoint: Endpoint) -> None:
    for kind, extra in (
        (litellm.NotFoundError, {"model": "openai/other"}),
        (litellm.BadRequestError, {"temperature": -1.0}),
        (
            litellm.ContextWindowExceededError,
            {"messages": [{"role": "user", "content": "x " * 40000}]},
        ),
    ):
        try:
            litellm.completion(**{"messages": HELLO, **settings(endpoint), **extra})
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    check.main()
