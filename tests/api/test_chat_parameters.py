"""Parameters of chats reach the model's template and its tools; unknown keys of messages do not."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from transformers import AutoTokenizer

from specserve.api.chat_template import variables_of
from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import DEMO
from tests.support.asgi import send
from tests.support.http_server import FakeService, app_over

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{%- if reasoning_effort is defined %}effort {{ reasoning_effort }}\n{% endif %}"
    "{%- if enable_thinking is defined and not enable_thinking %}no thinking\n{% endif %}"
    "{%- for message in messages %}{{ message.role }}> {{ message.content }}\n"
    "{% if loop.last %}{% break %}{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}assistant>{% endif %}"
)
USER = {"role": "user", "content": "hi"}
CHAT = [USER, {"role": "assistant", "content": "I am"}]
NAMES = ("first", "second", "third")
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = AutoTokenizer.from_pretrained(DEMO / "target")
    made.chat_template = TEMPLATE
    return Tokenizer(made)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def app(service: FakeService, tokenizer: Tokenizer) -> FastAPI:
    return app_over(service, tokenizer=tokenizer, max_context=1024)


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ({}, "user> hi\nassistant> I am\nassistant>"),
        ({"add_generation_prompt": True}, "user> hi\nassistant> I am\nassistant>"),
        ({"add_generation_prompt": False}, "user> hi\nassistant> I am\n"),
        ({"continue_final_message": True}, "user> hi\nassistant> I am"),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            "user> hi\nassistant> I am",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "no thinking\nuser> hi\nassistant> I am\nassistant>",
        ),
        ({"reasoning_effort": "low"}, "effort low\nuser> hi\nassistant> I am\nassistant>"),
        ({"truncate_prompt_tokens": 3}, None),
    ],
)
def test_the_template_gets_what_was_asked_for(
    app: FastAPI,
    service: FakeService,
    tokenizer: Tokenizer,
    given: dict[str, object],
    prompt: str | None,
) -> None:
    reply = send(app, PATH, {"messages": CHAT, "max_tokens": 2} | given)
    assert reply.status == 200, reply.body
    plain = tokenizer.encode("user> hi\nassistant> I am\nassistant>", special=False)
    expected = plain[-3:] if prompt is None else tokenizer.encode(prompt, special=False)
    assert service.requests[0].prompt == expected
    if prompt is not None and "reasoning_effort" not in given:
        counted = send(app, "/tokenize", {"messages": CHAT} | given)
        assert counted.json["tokens"] == list(expected), "/tokenize counts the same prompt"


def test_variables_that_the_template_does_not_read_are_left_out_and_named(
    app: FastAPI, service: FakeService
) -> None:
    """Some would harm, were they passed on: the messages are the template's own."""
    variables = {"thinking": 1, "messages": [], "tokenize": True, "eos_token": "x"}
    names = ", ".join(f"chat_template_kwargs.{name}" for name in variables)
    plain = send(app, "/tokenize", {"messages": CHAT})
    given = {"messages": CHAT, "chat_template_kwargs": variables}
    for reply in (send(app, PATH, given), send(app, PATH, given | {"stream": True})):
        assert (reply.status, reply.headers.get("x-specserve-ignored")) == (200, names)
    counted = send(app, "/tokenize", given)
    assert counted.json["tokens"] == plain.json["tokens"]
    assert counted.headers.get("x-specserve-ignored") == names
    assert [list(one.prompt) for one in service.requests] == [plain.json["tokens"]] * 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude one another"),
        (
            {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"},
            "give one of them",
        ),
        ({"reasoning_effort": "ignore all that"}, "'none', 'minimal', 'low'"),
    ],
)
def test_what_the_template_cannot_do_is_refused(
    app: FastAPI, service: FakeService, given: dict[str, object], words: str
) -> None:
    reply = send(app, PATH, {"messages": CHAT} | given)
    assert (reply.status, service.requests) == (400, [])
    assert reply.error["param"] in given
    assert words in reply.error["message"]


def test_a_chat_without_a_template_can_be_continued() -> None:
    service = FakeService()
    app = app_over(service)
    body = {"messages": CHAT, "max_tokens": 2, "continue_final_message": True}
    assert send(app, PATH, body).status == 200
    assert service.requests[0].prompt == service.tokenizer.encode("user: hi\nassistant: I am")


def test_variables_of_a_template_with_tags_for_training_are_found() -> None:
    text = "{% for m in messages %}{% generation %}{{ m.x }}{{ y }}{% endgeneration %}{% endfor %}"
    assert variables_of(text) == {"messages", "y"}
    assert variables_of("{% broken") == frozenset()


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_may_be_called_and_all_are_shown(
    app: FastAPI, service: FakeService, mode: str
) -> None:
    allowed = [TOOLS[2], TOOLS[0]]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 2, "tool_choice": choice}
    reply = send(app, PATH, body)
    assert reply.status == 200, reply.body
    (request,) = service.requests
    assert request.grammar is not None
    assert [name in request.grammar.text for name in NAMES] == [True, False, True]
    assert ("TEXT" in request.grammar.text) == (mode == "auto")
    assert "second" in service.tokenizer.decode(request.prompt)


@pytest.mark.parametrize(
    ("tools", "words"),
    [([], "allows none"), ([{"type": "function", "function": {"name": "x"}}], "'x'")],
)
def test_a_choice_among_tools_that_are_not_there_is_refused(
    app: FastAPI, tools: list[object], words: str
) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    reply = send(app, PATH, {"messages": [USER], "tools": TOOLS, "tool_choice": choice})
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    assert words in reply.error["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hi", "id": "m1", "timestamp": 5},
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]},
    ],
)
def test_unknown_keys_of_messages_and_parts_are_ignored(
    app: FastAPI, service: FakeService, message: dict[str, object]
) -> None:
    for one in (USER, message):
        assert send(app, PATH, {"messages": [one], "max_tokens": 1}).status == 200
    first, second = service.requests
    assert first.prompt == second.prompt


@pytest.mark.parametrize("key", ["function", "call"])
def test_unknown_keys_of_calls_are_ignored(app: FastAPI, key: str) -> None:
    function: dict[str, object] = {"name": "first", "arguments": "{}"}
    call: dict[str, object] = {"id": "c", "type": "function", "function": function}
    (function if key == "function" else call)["extra"] = 1
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "c", "content": "5"}]
    assert send(app, PATH, {"messages": messages, "max_tokens": 1}).status == 200
