"""Templates are recognised by what they teach, and conversations with calls are rendered by them, or in words."""

from __future__ import annotations

import json

import pytest

from specserve.api.schema import Message
from specserve.api.tools.formats import FORMATS, PLAIN, Spelling
from specserve.api.tools.messages import for_template
from tests.support.templates import FAMILIES, TEMPLATES, family, spelling

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = {
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
def test_a_template_is_recognised_by_what_it_teaches(name):
    found = spelling(name)
    wanted = {"plain": "hermes", "mistral_tight": "mistral"}.get(name, name)
    assert found.format.middle == FORMATS[wanted].middle
    assert found.taught == (name != "plain")
    assert found.format.first == (
        '[TOOL_CALLS] [{"name": "' if name == "mistral" else FORMATS[wanted].first
    )


@pytest.mark.parametrize(
    "template",
    ["", "{{ messages }}", "{{ tools }} <tool_call><function=", "{{ tools }} nothing known"],
)
def test_what_is_not_recognised_is_told_the_plain_format(template):
    found = Spelling.of(template, family("plain"))
    assert (found.format, found.taught) == (PLAIN, False)


def test_only_tokens_without_a_text_are_spelt_by_their_ids():
    assert spelling("hermes").special == {}
    assert spelling("mistral").special == {
        "[TOOL_CALLS]": family("mistral").special_id("[TOOL_CALLS]")
    }
    assert set(spelling("mistral_named").special) == {"[TOOL_CALLS]", "[ARGS]"}
    assert set(spelling("llama").special) == {"<|python_tag|>"}


def rendered(name: str, messages: list[Message], tools: list[dict[str, object]]) -> str:
    text = family(name)
    ids = text.apply_chat(for_template(messages, tools, spelling(name)), tools=tools)
    return text._tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["plain", "hermes", "llama", "mistral", "mistral_tight"])
def test_a_conversation_with_a_call_is_rendered_with_tools_call_and_result(name):
    prompt = rendered(name, TALK, [TOOL])
    called = spelling(name).format.written([("weather", '{"city": "Paris"}')])
    at = [prompt.index(part) for part in ("Of a city.", "How is Paris?", called.rstrip("]}"), "17")]
    assert at[1:] == sorted(at[1:])
    assert ("You may call functions" in prompt) == (name == "plain")
    assert "None" not in prompt


def test_ids_fit_a_template_that_takes_short_ones_only_and_still_belong_together():
    messages = for_template(TALK, [TOOL], spelling("mistral"))
    (call,) = messages[1]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"] == messages[2]["tool_call_id"]
    assert for_template(TALK, [TOOL], spelling("hermes"))[2]["tool_call_id"] == CALL["id"]


def test_in_words_tools_join_the_system_message_that_there_is():
    system = Message(role="system", content="Be brief.")
    with_system = for_template([system, *TALK], [TOOL], spelling("plain"))
    assert [message["role"] for message in with_system] == ["system", "user", "assistant", "tool"]
    assert str(with_system[0]["content"]).startswith("Be brief.\n\nYou may call")
    assert json.dumps(TOOL["function"]) in str(with_system[0]["content"])
    assert [message["role"] for message in for_template(TALK, [TOOL], spelling("plain"))][:2] == [
        "system",
        "user",
    ]
    assert for_template(TALK, [], spelling("plain"))[0]["role"] == "user"


def test_arguments_that_were_cut_reach_the_template_as_they_are():
    cut = CALL | {"function": {"name": "weather", "arguments": '{"city": "Pa'}}
    messages = [TALK[0], Message.model_validate({"role": "assistant", "tool_calls": [cut]})]
    assert (
        for_template(messages, [], spelling("hermes"))[1]["tool_calls"][0]["function"]["arguments"]
        == '{"city": "Pa'
    )


def test_of_several_templates_the_one_that_shows_tools_is_looked_at():
    text = family.__wrapped__("plain")
    text._tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": TEMPLATES["hermes"]}
    assert Spelling.of(text.tool_template, text).taught
