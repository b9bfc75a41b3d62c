"""Checks with openai-agents, by chat completions and by responses: tools, handoffs, sessions."""

from __future__ import annotations

from typing import Any

import openai
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    InputGuardrailTripwireTriggered,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

from tests.conformance.checks import MODEL, CheckList, Endpoint

check = CheckList(("openai-agents", "openai"))
set_tracing_disabled(True)
MODELS: tuple[Any, ...] = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


class Person(BaseModel):
    """A structured answer."""

    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"17 degrees in {city}"


def agents(endpoint: Endpoint, **settings: Any) -> list[Agent[Any]]:
    """Return the agent on each of the two paths."""
    client = openai.AsyncOpenAI(base_url=endpoint.url, api_key="none", max_retries=0)
    return [
        Agent(name="agent", model=model(model=MODEL, openai_client=client), **settings)
        for model in MODELS
    ]


@check
async def an_agent_answers(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, instructions="Be brief."):
        result = await Runner.run(agent, "Say hello.")
        assert result.final_output == "Answer 1: you said Say hello."


@check
async def an_agent_calls_its_tool_and_answers_with_the_result(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, tools=[get_weather]):
        result = await Runner.run(agent, "How is the weather in Paris?")
        assert result.final_output == "The result is 17 degrees in Paris."


@check
async def a_streamed_run_has_events_of_the_call_and_of_the_text(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, tools=[get_weather]):
        result = Runner.run_streamed(agent, "How is the weather in Paris?")
        names = [event.name async for event in result.stream_events() if hasattr(event, "name")]
        assert result.final_output == "The result is 17 degrees in Paris."
        assert names == ["tool_called", "tool_output", "message_output_created"], names


@check
async def an_agent_answers_with_a_type(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, output_type=Person):
        result = await Runner.run(agent, "Ada is 36 years old.")
        assert result.final_output == Person(name="Ada", age=36)


@check
async def an_agent_with_a_tool_answers_with_a_type(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, output_type=Person, tools=[get_weather]):
        result = await Runner.run(agent, "How is the weather at Ada?")
        assert result.final_output == Person(name="Ada", age=17)


@check
async def a_required_tool_is_called(endpoint: Endpoint) -> None:
    for agent in agents(
        endpoint,
        tools=[get_weather],
        model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False),
    ):
        result = await Runner.run(agent, "Hello from Rome.")
        assert result.final_output == "The result is 17 degrees in Rome."


@check
async def an_agent_hands_off_to_another(endpoint: Endpoint) -> None:
    for agent, other in zip(agents(endpoint), agents(endpoint), strict=True):
        other.name = "spanish"
        agent.handoffs = [other]
        result = await Runner.run(agent, "Please transfer this.")
        assert result.last_agent.name == "spanish"


@check
async def a_session_keeps_the_conversation(endpoint: Endpoint) -> None:
    for agent in agents(endpoint):
        session = SQLiteSession("one")
        await Runner.run(agent, "Say one.", session=session)
        result = await Runner.run(agent, "Say two.", session=session)
        assert result.final_output == "Answer 2: you said Say two."


@check
async def the_usage_of_all_turns_is_counted(endpoint: Endpoint) -> None:
    for agent in agents(endpoint, tools=[get_weather]):
        result = await Runner.run(agent, "How is the weather in Paris?")
        usage = result.context_wrapper.usage
        assert usage.requests == 2
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


@check
async def a_guardrail_stops_a_run(endpoint: Endpoint) -> None:
    async def refuse(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=True)

    for agent in agents(endpoint, input_guardrails=[InputGuardrail(refuse)]):
        try:
            await Runner.run(agent, "Say hello.")
        except InputGuardrailTripwireTriggered:
            continue
        raise AssertionError("the run went on")


if __name__ == "__main__":
    check.main()
