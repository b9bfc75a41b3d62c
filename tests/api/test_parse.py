"""Every parameter reaches the engine from the official client, and invalid ones are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from specserve.types import Request, Speculation, TokenRule, Warp
from tests.support.http_server import CONTEXT, RunningServer, demo_tokenizer, serving

CHAT: list[Any] = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    server.service.requests.clear()
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def engine_request(server: RunningServer, path: str, **body: object) -> Request:
    """Send a body and return the request that reaches the engine."""
    server.service.requests.clear()
    reply = server.ask(path, body)
    assert reply.status == 200, reply.body
    return server.service.requests[0]


EVERYTHING: dict[str, Any] = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 11,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.5,
    "user": "me",
}
EXTENSIONS: dict[str, object] = {
    "top_k": 7,
    "min_p": 0.1,
    "stop_token_ids": [9],
    "ignore_eos": True,
    "repetition_penalty": 1.5,
    "min_tokens": 2,
    "bad_words": ["world"],
    "allowed_token_ids": [5, 9, 50],
    "priority": -3,
    "speculation": {"gamma": 3, "verifier": "speculative"},
}


def test_every_parameter_reaches_the_engine_from_completions(
    client: openai.OpenAI, server: RunningServer
) -> None:
    client.completions.create(
        model="demo",
        prompt="hello",
        **EVERYTHING,
        n=1,
        stop=["a", "b"],
        logprobs=2,
        echo=False,
        logit_bias={"50": -100},
        extra_body=EXTENSIONS,
    )
    check_everything(server.service.requests[0])


def test_every_parameter_reaches_the_engine_from_chats(
    client: openai.OpenAI, server: RunningServer
) -> None:
    client.chat.completions.create(
        model="demo",
        messages=CHAT,
        **EVERYTHING,
        n=1,
        stop="a",
        logprobs=True,
        top_logprobs=2,
        logit_bias={"50": -100},
        response_format={"type": "text"},
        extra_body=EXTENSIONS,
    )
    check_everything(server.service.requests[0])


def check_everything(request: Request) -> None:
    warp = request.warp
    assert (warp.temperature, warp.top_p, warp.top_k, warp.min_p) == (0.5, 0.9, 7, 0.1)
    assert (
        warp.presence_penalty,
        warp.frequency_penalty,
        warp.repetition_penalty,
        warp.logit_bias,
    ) == (0.25, -0.5, 1.5, ((50, -100.0),))
    words = [demo_tokenizer().encode(word, special=False) for word in ("world", " world")]
    assert words[0] != words[1]
    assert warp.rule == TokenRule(2, (9,), tuple(words), (5, 9, 50))
    assert request.priority == -3
    assert (request.max_tokens, request.seed, request.seeded, request.logprobs) == (3, 11, True, 2)
    assert (request.stop_token_ids, request.ignore_eos, request.speculation) == (
        frozenset([9]),
        True,
        Speculation(3, "speculative"),
    )


def test_null_is_the_default_of_every_parameter(server: RunningServer) -> None:
    plain = engine_request(server, "/v1/chat/completions", messages=CHAT, seed=1)
    names = [
        *EVERYTHING,
        *EXTENSIONS,
        "n",
        "stop",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "response_format",
        "stream",
        "stream_options",
        "model",
    ]
    nulls = dict.fromkeys(
        [
            *names,
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "guided",
            "guided_regex",
            "audio",
            "max_completion_tokens",
        ]
    )
    assert (
        engine_request(server, "/v1/chat/completions", **(nulls | {"messages": CHAT, "seed": 1}))
        == plain
    )


@pytest.mark.parametrize(
    "prompt",
    [
        "hello",
        list(demo_tokenizer().encode("hello")),
        ["hello"],
        [list(demo_tokenizer().encode("hello"))],
    ],
)
def test_prompts_are_text_or_ids_alone_or_in_a_list(server: RunningServer, prompt: object) -> None:
    assert engine_request(
        server, "/v1/completions", prompt=prompt
    ).prompt == demo_tokenizer().encode("hello")


def test_a_long_prompt_is_tokenized_in_a_thread_to_the_same_ids(server: RunningServer) -> None:
    prompt = "x = 1\n" * 4000
    error = server.ask("/v1/completions", {"prompt": prompt}).error
    assert error["code"] == "context_length_exceeded"
    assert "this model's maximum context length is" in error["message"], "litellm looks for it"
    assert server.ask("/tokenize", {"prompt": prompt}).json["tokens"] == list(
        demo_tokenizer().encode(prompt)
    )


def test_contents_may_be_parts_and_developer_messages_are_system_messages(
    server: RunningServer,
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    given = engine_request(
        server,
        "/v1/chat/completions",
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}],
    )
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one\ntwo"}]
    assert given.prompt == demo_tokenizer().apply_chat_template(plain)
    roles = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "tool")]
    assert engine_request(
        server, "/v1/chat/completions", messages=roles
    ).prompt == demo_tokenizer().apply_chat_template(roles)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_max_tokens_has_two_names(server: RunningServer, path: str, name: str) -> None:
    what = {"prompt": "x"} if path == "/v1/completions" else {"messages": CHAT}
    assert engine_request(server, path, **what, **{name: 5}).max_tokens == 5
    assert server.ask(path, what | {name: 0}).error["param"] == name


def test_without_a_seed_every_request_has_its_own(server: RunningServer) -> None:
    seeds = {engine_request(server, "/v1/completions", prompt="x").seed for _ in range(3)}
    assert len(seeds) == 3


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "none", "ignore_eos": True},
        {"parallel_tool_calls": True},
        {"store": False},
        {"service_tier": "auto"},
        {"metadata": {"a": "b"}},
        {"modalities": ["text"]},
        {"functions": None},
        {"user": "me", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
)
def test_defaults_that_official_clients_send_are_taken(
    server: RunningServer, harmless: dict[str, object]
) -> None:
    assert engine_request(server, "/v1/chat/completions", messages=CHAT, **harmless).prompt


def test_top_k_of_minus_one_is_off(server: RunningServer) -> None:
    assert engine_request(server, "/v1/completions", prompt="x", top_k=-1).warp == Warp()


def test_a_chat_without_max_tokens_may_ask_for_a_least_number_of_tokens(
    server: RunningServer,
) -> None:
    rule = engine_request(server, "/v1/chat/completions", messages=CHAT, min_tokens=40).warp.rule
    assert rule == TokenRule(min_tokens=40)


def test_a_bad_word_counts_once_where_a_space_changes_nothing(server: RunningServer) -> None:
    given = {"bad_words": [" so so", "so so"]}
    rule = engine_request(server, "/v1/completions", prompt="x", **given).warp.rule
    assert rule is not None
    assert len(rule.bad_words) == 2
    assert {demo_tokenizer().decode(ids).strip() for ids in rule.bad_words} == {"so so"}


Faults = list[tuple[dict[str, object], str]]
BOTH: Faults = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 1.5}, "min_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"min_tokens": CONTEXT}, "min_tokens"),
    ({"bad_words": "word"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["  "]}, "bad_words"),
    ({"bad_words": [5]}, "bad_words[0]"),
    ({"bad_words": ["\ud800"]}, "bad_words"),
    ({"bad_words": [f"{i}" + "日" * 60 for i in range(12)]}, "bad_words"),  # too many tokens
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [4096]}, "allowed_token_ids"),
    ({"allowed_token_ids": ["5"]}, "allowed_token_ids[0]"),
    ({"priority": "high"}, "priority"),
    ({"priority": 2**31}, "priority"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1, "prompt_logprobs": 1}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5000": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
        "response_format.json_schema",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
        "response_format.json_schema.schema",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"not": {}}},
            }
        },
        "response_format",
    ),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {"type": "json_object"}, "guided": {"regex": "a"}}, "guided"),
    ({"guided": {}}, "guided"),
    ({"guided": {"regex": "a", "choice": ["b"]}}, "guided"),
    ({"guided": {"regex": "(a"}}, "guided"),
    ({"guided": {"regex": ""}}, "guided"),
    ({"guided": {"regex": "\ud800"}}, "guided"),
    ({"guided": {"regex": "a"}, "guided_choice": ["b"]}, "guided"),
    ({"guided": {"grammar": "foo: 1"}}, "guided"),
    ({"guided": {"choice": []}}, "guided"),
    ({"guided": {"json": "{"}}, "guided"),
    ({"guided": {"json": {"type": "strang"}}}, "guided"),
    ({"guided": {"patience": "long"}}, "patience"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    ({"response_format": "text"}, "response_format"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"else": 1}}, "else"),
    ({"speculation": {"gamma": 17}}, "speculation.gamma"),
    ({"speculation": {"gamma": -1}}, "speculation.gamma"),
    ({"speculation": {"gamma": "few"}}, "speculation.gamma"),
    ({"speculation": {"verifier": "best"}}, "speculation.verifier"),
    ({"speculation": {"depth": 1}}, "depth"),
    ({"temprature": 1}, "temprature"),
    ({"store": "yes"}, "store"),
    ({"user": 5}, "user"),
]
COMPLETIONS: Faults = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["x", ""]}, "prompt"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": [1] * CONTEXT}, "prompt"),
    ({"prompt": ["x"] * 10, "n": 100}, "n"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"guided_choice": ["a"], "echo": True}, "echo"),
    ({"messages": CHAT}, "messages"),
]
CHATS: Faults = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "messages",
    ),
    ({"messages": [{"role": "user", "content": "x " * 2000}]}, "messages"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].id",
    ),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "assistant", "content": "x", "function_call": {}}]}, "function_call"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "custom"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
            ]
        },
        "tools[0].function.parameters",
    ),
    (
        {
            "tools": [
                TOOL,
                {"type": "function", "function": {"name": "g", "parameters": {"not": {}}}},
            ]
        },
        "tools[1].function.parameters",
    ),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": [TOOL], "guided": {"regex": "a"}}, "guided"),
    ({"tools": [TOOL], "guided_choice": ["a"]}, "guided_choice"),
    ({"tools": [TOOL], "ignore_eos": True}, "ignore_eos"),
    ({"functions": [{}]}, "functions"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"logprobs": 2}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"prompt": "x"}, "prompt"),
]
FAULTS = [
    *(("/v1/completions", {"prompt": "x"} | fault, param) for fault, param in BOTH + COMPLETIONS),
    *(("/v1/chat/completions", {"messages": CHAT} | fault, param) for fault, param in BOTH + CHATS),
]


@pytest.mark.parametrize(("path", "body", "param"), FAULTS)
def test_an_invalid_parameter_is_refused_by_name(
    server: RunningServer, path: str, body: dict[str, object], param: str
) -> None:
    server.service.requests.clear()
    reply = server.ask(path, body)
    assert (reply.status, reply.error["type"], reply.error["param"]) == (
        400,
        "invalid_request_error",
        param,
    )
    assert 10 < len(reply.error["message"]) < 300
    assert server.service.requests == []


def test_the_error_for_an_unknown_parameter_names_the_nearest_known_one(
    server: RunningServer,
) -> None:
    assert (
        "did you mean temperature?"
        in server.ask("/v1/completions", {"prompt": "x", "temprature": 1}).error["message"]
    )
