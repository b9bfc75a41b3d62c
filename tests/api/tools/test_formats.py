"""Templates are recognised by the call format they teach, and conversations are rendered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specserve.api.chat_schema import Message
from specserve.api.tools.formats import DEFAULT_FORMAT, FORMATS, ModelCallFormat
from specserve.api.tools.messages import to_template_messages
from tests.support.templates import FAMILIES, TEMPLATES, call_format, family

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL: dict[str, Any] = {
    "id": "call_0123456789abcdef",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
TALK = [
    Message.model_validate(message)
    for message in (
        {"role": "user", "content": "How is Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": "17"},
    )
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_is_recognised_by_what_it_teaches(name: str) -> None:
    found = call_format(name)
    wanted = {
        "plain": "hermes",
        "mistral_tight": "mistral",
        "llama4_pythonic": "llama_pythonic",
    }.get(name, name)
    assert found.format.infix == FORMATS[wanted].infix
    assert found.in_template == (name != "plain")
    assert found.format.prefix == (
        '[TOOL_CALLS] [{"name": "' if name == "mistral" else FORMATS[wanted].prefix
    )


@pytest.mark.parametrize(
    "template",
    ["", "{{ messages }}", "{{ tools }} <tool_call><function=", "{{ tools }} nothing known"],
)
def test_an_unrecognised_template_gets_the_default_format(template: str) -> None:
    found = ModelCallFormat.from_template(template, family("plain"))
    assert (found.format, found.in_template) == (DEFAULT_FORMAT, False)


def test_only_special_tokens_are_written_by_their_ids() -> None:
    assert call_format("hermes").special_ids == {}
    assert call_format("mistral").special_ids == {
        "[TOOL_CALLS]": family("mistral").added_id("[TOOL_CALLS]")
    }
    assert set(call_format("mistral_named").special_ids) == {"[TOOL_CALLS]", "[ARGS]"}
    assert set(call_format("llama").special_ids) == {"<|python_tag|>"}


def rendered(name: str, messages: list[Message], tools: list[dict[str, object]]) -> str:
    tokenizer = family(name)
    ids = tokenizer.apply_chat_template(
        to_template_messages(messages, tools, call_format(name)), tools=tools
    )
    decoded: str = tokenizer._tokenizer.decode(ids, skip_special_tokens=False)
    return decoded


@pytest.mark.parametrize("name", ["plain", "hermes", "llama", "mistral", "mistral_tight"])
def test_a_conversation_with_a_call_is_rendered_with_tools_call_and_result(name: str) -> None:
    prompt = rendered(name, TALK, [TOOL])
    called = call_format(name).format.render([("weather", '{"city": "Paris"}')])
    at = [prompt.index(part) for part in ("Of a city.", "How is Paris?", called.rstrip("]}"), "17")]
    assert at[1:] == sorted(at[1:])
    assert ("You may call functions" in prompt) == (name == "plain")
    assert "None" not in prompt


def test_ids_fit_a_template_that_takes_short_ones_only_and_still_belong_together() -> None:
    messages: list[dict[str, Any]] = to_template_messages(TALK, [TOOL], call_format("mistral"))
    (call,) = messages[1]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"] == messages[2]["tool_call_id"]
    assert (
        to_template_messages(TALK, [TOOL], call_format("hermes"))[2]["tool_call_id"] == CALL["id"]
    )


def test_instructions_for_tools_join_an_existing_system_message() -> None:
    system = Message.model_validate({"role": "system", "content": "Be brief."})
    with_system = to_template_messages([system, *TALK], [TOOL], call_format("plain"))
    assert [message["role"] for message in with_system] == ["system", "user", "assistant", "tool"]
    assert str(with_system[0]["content"]).startswith("Be brief.\n\nYou may call")
    assert json.dumps(TOOL["function"]) in str(with_system[0]["content"])
    assert [
        message["role"] for message in to_template_messages(TALK, [TOOL], call_format("plain"))
    ][:2] == [
        "system",
        "user",
    ]
    assert to_template_messages(TALK, [], call_format("plain"))[0]["role"] == "user"


def test_arguments_that_were_cut_reach_the_template_as_they_are() -> None:
    cut = CALL | {"function": {"name": "weather", "arguments": '{"city": "Pa'}}
    messages = [TALK[0], Message.model_validate({"role": "assistant", "tool_calls": [cut]})]
    converted: list[dict[str, Any]] = to_template_messages(messages, [], call_format("hermes"))
    assert converted[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Pa'


def test_of_several_templates_the_one_that_renders_tools_is_used() -> None:
    text = family.__wrapped__("plain")
    text._tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": TEMPLATES["hermes"]}
    assert ModelCallFormat.from_template(text.tool_template, text).in_template


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31"])
def test_a_template_of_calls_that_shows_no_tools_gets_them_in_words(name: str) -> None:
    template = TEMPLATES[name].replace("{{ tools | tojson }}", "")
    found = ModelCallFormat.from_template(template, family(name))
    assert (found.format, found.in_template) == (FORMATS[name], False)
    messages = to_template_messages(TALK, [TOOL], found)
    assert "You may call functions" in str(messages[0]["content"])
    called = FORMATS[name].render([("weather", '{"city": "Paris"}')])
    assert messages[2]["content"] == called
