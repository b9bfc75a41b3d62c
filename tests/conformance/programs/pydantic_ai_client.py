"""Checks with pydantic-ai, by chat completions and by responses: output modes, tools, streams."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, NativeOutput, RunContext, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.conformance.checks import MODEL, CheckList, Endpoint

check = CheckList(("pydantic-ai-slim", "openai"))
MODELS: tuple[Any, ...] = (OpenAIChatModel, OpenAIResponsesModel)


class Person(BaseModel):
    """A structured answer."""

    name: str
    age: int


ADA = Person(name="Ada", age=36)
QUESTION = "Ada is 36 years old."


def agents(endpoint: Endpoint, **settings: Any) -> list[Agent[Any, Any]]:
    """Return the agent on each of the two paths."""
    provider = OpenAIProvider(base_url=endpoint.url, api_key="none")
    return [Agent(model(MODEL, provider=provider), **settings) for model in MODELS]


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"17 degrees in {city}"


@check
async def an_agent_answers(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, instructions="Be brief."):
        result = await agent.run("Say hello.")
        assert result.output == "Answer 1: you said Say hello."


@check
async def an_answer_is_a_type_by_a_tool(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, output_type=ToolOutput(Person)):
        assert (await agent.run(QUESTION)).output == ADA


@check
async def an_answer_is_a_type_by_the_response_format(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, output_type=NativeOutput(Person)):
        assert (await agent.run(QUESTION)).output == ADA


@check
async def a_union_of_types_is_answered_by_several_tools(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, output_type=[Person, int]):
        assert (await agent.run(QUESTION)).output in (ADA, 36)


@check
async def a_tool_is_called_and_its_result_answered(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, tools=[get_weather]):
        result = await agent.run("How is the weather in Paris?")
        assert result.output == "The result is 17 degrees in Paris."


@check
async def a_tool_is_called_before_an_answer_of_a_type(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, tools=[get_weather], output_type=NativeOutput(Person)):
        result = await agent.run("How is the weather at Ada?")
        assert result.output == Person(name="Ada", age=17)


@check
async def a_call_that_fails_is_tried_again(endpoint: Endpoint) -> None:
    for agent in agents(endpoint):
        calls = 0

        @agent.tool
        def get_weather(context: RunContext[Any], city: str) -> str:
            nonlocal calls
            calls += 1
            if context.retry == 0:
                raise ModelRetry("Try once more.")
            return f"17 degrees in {city}"

        result = await agent.run("How is the weather in Paris?", output_type=str)
        assert result.output
        assert calls >= 1


@check
async def a_text_streams(endpoint: Endpoint) -> None:
    for agent in agents(endpoint):
        async with agent.run_stream("Say hello.") as stream:
            texts = [text async for text in stream.stream_text(delta=True, debounce_by=None)]
        assert len(texts) > 1
        assert "".join(texts) == "Answer 1: you said Say hello."


@check
async def an_answer_of_a_type_streams(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, output_type=Person):
        async with agent.run_stream(QUESTION) as stream:
            assert await stream.get_output() == ADA


@check
async def a_conversation_goes_on(endpoint: Endpoint) -> None:
    for agent in agents(endpoint):
        first = await agent.run("Say one.")
        result = await agent.run("Say two.", message_history=first.all_messages())
        assert result.output == "Answer 2: you said Say two."


@check
async def the_usage_of_all_turns_is_counted(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, tools=[get_weather]):
        result = await agent.run("How is the weather in Paris?")
        usage = result.usage() if callable(result.usage) else result.usage
        assert usage.requests == 2
        assert usage.output_tokens > 0


if __name__ == "__main__":
    check.main()
