"""Everything that a request can make grow has a limit, and more is refused by name.

The rows are from the table in docs/guides/security.md.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Mapping

import pytest

from specserve.api.chat_schema import MAX_MESSAGES, MAX_PARTS
from specserve.api.field_types import MAX_LABEL
from specserve.api.parse import MAX_CONTINUATIONS, MAX_TOKENIZE_CHARS
from specserve.api.schema import MAX_METADATA
from specserve.api.tokenizer import Tokenizer
from specserve.grammar.request import MAX_DEPTH, MAX_SIZE
from specserve.sampling_params import MAX_COUNT, MAX_LOGPROBS, MAX_N, MAX_PRIORITY
from specserve.sampling_values import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
)
from specserve.types import Policy, VerifyStep
from specserve.wire.messages import Verify, pack
from tests.support.http_server import CONTEXT, RunningServer, demo_tokenizer, serving

CHAT = {"role": "user", "content": "x"}
MOST = CONTEXT * demo_tokenizer().max_token_length

NESTED: list[dict[str, object]] = [{}]
for _ in range(MAX_DEPTH + 1):
    NESTED.append({"items": NESTED[-1]})

# A parameter, the most that it may be, and a little more. With None for the most, it cannot be
# served in the 256 positions of the fake engine.
LIMITS = [
    ("n", None, MAX_N + 1),
    ("best_of", MAX_N, MAX_N + 1),
    ("max_tokens", MAX_COUNT, MAX_COUNT + 1),
    ("top_k", MAX_COUNT, MAX_COUNT + 1),
    ("top_k", MAX_COUNT, 10**30),
    ("logprobs", MAX_LOGPROBS, MAX_LOGPROBS + 1),
    ("stop", ["x"] * MAX_STOPS, ["x"] * (MAX_STOPS + 1)),
    ("stop", "x" * MAX_STOP_LENGTH, "x" * (MAX_STOP_LENGTH + 1)),
    ("stop_token_ids", [1] * MAX_STOP_IDS, [1] * (MAX_STOP_IDS + 1)),
    ("min_tokens", 16, 17),  # the default of max_tokens
    ("bad_words", ["x"] * MAX_BAD_WORDS, ["x"] * (MAX_BAD_WORDS + 1)),
    ("bad_words", ["x" * MAX_BAD_WORD_LENGTH], ["x" * (MAX_BAD_WORD_LENGTH + 1)]),
    ("allowed_token_ids", [1] * MAX_ALLOWED_IDS, [1] * (MAX_ALLOWED_IDS + 1)),
    ("priority", MAX_PRIORITY, MAX_PRIORITY + 1),
    ("priority", -MAX_PRIORITY, -MAX_PRIORITY - 1),
    (
        "logit_bias",
        {str(token): 1 for token in range(MAX_BIASES)},
        {str(token): 1 for token in range(MAX_BIASES + 1)},
    ),
    ("seed", 2**64 - 1, 2**64),
    ("speculation", {"gamma": 16}, {"gamma": 17}),
    ("user", "x" * MAX_LABEL, "x" * (MAX_LABEL + 1)),
    ("safety_identifier", "x" * MAX_LABEL, "x" * (MAX_LABEL + 1)),
    ("prompt_cache_key", "x" * MAX_LABEL, "x" * (MAX_LABEL + 1)),
    ("cache_salt", "x" * MAX_LABEL, "x" * (MAX_LABEL + 1)),
    ("cache_salt", "x", ""),
    (
        "metadata",
        {f"k{i}": "v" for i in range(MAX_METADATA)},
        {f"k{i}": "v" for i in range(MAX_METADATA + 1)},
    ),
    ("metadata", {"k": "x" * MAX_LABEL}, {"k": "x" * (MAX_LABEL + 1)}),
    ("metadata", {"x" * MAX_LABEL: "v"}, {"x" * (MAX_LABEL + 1): "v"}),
    ("guided", {"regex": "a" * MAX_SIZE}, {"regex": "a" * (MAX_SIZE + 1)}),
    ("guided", {"json": NESTED[MAX_DEPTH - 1]}, {"json": NESTED[MAX_DEPTH]}),
    ("guided_json", NESTED[MAX_DEPTH - 1], NESTED[MAX_DEPTH]),
    ("prompt", ["x"] * 16, ["x"] * (MAX_CONTINUATIONS + 1)),
    ("prompt", "x", "x" * (MOST + 1)),
    ("prompt", [5] * (CONTEXT - 1), [5] * CONTEXT),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


@pytest.mark.parametrize(("param", "most", "more"), LIMITS)
def test_the_most_is_taken_and_more_is_refused_by_name(
    server: RunningServer, param: str, most: object, more: object
) -> None:
    if most is not None:
        assert server.ask("/v1/completions", {"prompt": "x", param: most}).status == 200
    refused = server.ask("/v1/completions", {"prompt": "x", param: more})
    assert refused.status == 400
    assert (refused.error["param"] or "").split("[")[0].split(".")[0] in (param, "n")
    assert len(refused.body) < 1000


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": ""}] * (MAX_MESSAGES + 1), "messages"),
        (
            [{"role": "user", "content": [{"type": "text", "text": ""}] * (MAX_PARTS + 1)}],
            "messages",
        ),
        ([CHAT | {"name": "x" * (MAX_LABEL + 1)}], "messages"),
        ([CHAT | {"content": "x" * (MOST + 1)}], "messages"),
        ([CHAT | {"content": "x", "name": "x" * MAX_LABEL}] * (MOST // MAX_LABEL + 1), "messages"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_chats_have_limits_too(
    server: RunningServer, path: str, messages: list[object], param: str
) -> None:
    refused = server.ask(path, {"messages": messages})
    assert refused.status == 400
    assert (refused.error["param"] or "").startswith(param)


def test_tokenize_and_detokenize_have_limits(server: RunningServer) -> None:
    assert server.ask("/tokenize", {"prompt": "x" * max(MAX_TOKENIZE_CHARS, MOST)}).status == 200
    assert (
        server.ask("/tokenize", {"prompt": "x" * (max(MAX_TOKENIZE_CHARS, MOST) + 1)}).error["code"]
        == "context_length_exceeded"
    )
    assert server.ask("/detokenize", {"tokens": [5] * CONTEXT}).status == 200
    assert server.ask("/detokenize", {"tokens": [5] * (CONTEXT + 1)}).error["param"] == "tokens"


OVERSIZED: Mapping[str, bytes] = {
    "biases": b'{"prompt": "x", "logit_bias": {'
    + b",".join(b'"k%d":"v"' % i for i in range(30_000))
    + b"}}",
    "metadata": b'{"prompt": "x", "metadata": {'
    + b",".join(b'"k%d":1' % i for i in range(30_000))
    + b"}}",
    "messages": b'{"messages": ['
    + b",".join([b'{"role": "user", "content": ""}'] * 15_000)
    + b"]}",
    "parts": b'{"messages": [{"role": "user", "content": ['
    + b",".join([b'{"type": "text", "text": ""}'] * 15_000)
    + b"]}]}",
    "prompts": b'{"prompt": [' + b",".join([b'""'] * 100_000) + b"]}",
    "ids": b'{"tokens": [' + b",".join([b"1"] * 200_000) + b"]}",
}


@pytest.mark.parametrize("name", OVERSIZED)
def test_refusing_a_body_takes_no_more_memory_than_50_times_its_size(name: str) -> None:
    path = {
        "messages": "/v1/chat/completions",
        "parts": "/v1/chat/completions",
        "ids": "/detokenize",
    }.get(name, "/v1/completions")
    with serving() as server:
        server.ask(path, b"{}")
        tracemalloc.start()
        try:
            assert server.ask(path, OVERSIZED[name]).status == 400
            assert tracemalloc.get_traced_memory()[1] < 50 * len(OVERSIZED[name])
        finally:
            tracemalloc.stop()


def test_the_largest_numbers_that_are_taken_fit_the_messages_between_processes(
    server: RunningServer,
) -> None:
    server.service.requests.clear()
    server.ask(
        "/v1/completions",
        {
            "prompt": "x",
            "top_k": MAX_COUNT,
            "max_tokens": MAX_COUNT,
            "seed": 2**64 - 1,
            "logit_bias": {"4095": 100},
            "min_tokens": MAX_COUNT,
            "allowed_token_ids": [4095],
            "stop_token_ids": [2**31],
        },
    )
    (request,) = server.service.requests
    policy = Policy(request.warp, "block", seed=request.seed, prompt_length=len(request.prompt))
    assert pack(Verify(1, (VerifyStep(1, 0, request.prompt, (), None, policy, True),)))


def test_large_chats_do_not_hold_up_others(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large chat is refused before a template or tokenizer works on it in the event loop."""
    worked: list[str] = []
    for name in ("encode", "apply_chat_template"):
        monkeypatch.setattr(Tokenizer, name, lambda *args, name=name, **_: worked.append(name))
    body = {"messages": [CHAT | {"content": "x" * 500_000}]}
    assert server.ask("/v1/chat/completions", body).status == 400
    assert worked == []
