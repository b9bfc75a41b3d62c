"""Logprobs of prompts over HTTP: vLLM's list, OpenAI's echo, lm-evaluation-harness' requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from specserve.api import generation_request
from specserve.api.prompt_logprobs import BLOCK, blocks
from specserve.types import PromptLogprobs
from tests.support.http_server import TEXT, RunningServer, demo_tokenizer, serving

PROMPT = "Grüße, hello there"
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


def answer(server: RunningServer, path: str, **body: object) -> Any:
    reply = server.ask(path, body)
    assert reply.status == 200, reply.body
    return reply.json


def name(token: int) -> str:
    return demo_tokenizer().token_bytes(token).decode()


def assert_listed(listed: list[Any], ids: tuple[int, ...], num_top: int) -> None:
    """Check the list against the logprobs that the fake engine makes up."""
    assert listed[0] is None
    assert len(listed) == len(ids)
    for i, (token, entry) in enumerate(zip(ids[1:], listed[1:], strict=True), 1):
        assert list(entry) == [str(token), *(str(300 + j) for j in range(num_top))]
        assert entry[str(token)]["logprob"] == -i
        assert entry[str(token)]["rank"] == 3
        assert [entry[str(300 + j)]["rank"] for j in range(num_top)] == [*range(1, num_top + 1)]
        for j in range(num_top):
            assert entry[str(300 + j)]["logprob"] == pytest.approx(-i / 10 - j)


@pytest.mark.parametrize("num_top", [0, 2])
def test_a_completion_lists_the_prompt_s_logprobs_in_each_choice(
    server: RunningServer, num_top: int
) -> None:
    body = {"prompt": PROMPT, "prompt_logprobs": num_top, "n": 2, "max_tokens": 3}
    choices = answer(server, "/v1/completions", **body)["choices"]
    assert len(choices) == 2
    for choice in choices:
        assert choice["logprobs"] is None
        assert_listed(choice["prompt_logprobs"], demo_tokenizer().encode(PROMPT), num_top)


def test_a_token_of_the_prompt_has_its_text(server: RunningServer) -> None:
    ids = demo_tokenizer().encode("hello there")
    body = {"prompt": list(ids), "prompt_logprobs": 0, "max_tokens": 0}
    (choice,) = answer(server, "/v1/completions", **body)["choices"]
    texts = [
        entry[str(token)]["decoded_token"]
        for token, entry in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
    ]
    assert texts == [name(token) for token in ids[1:]]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")


def test_a_chat_lists_them_in_its_choices_and_beside_them_as_vllm_does(
    server: RunningServer,
) -> None:
    ids = demo_tokenizer().apply_chat_template(CHAT)
    for more in ({"max_tokens": 2}, {"max_tokens": 0}, {"max_completion_tokens": 0}):
        whole = answer(server, "/v1/chat/completions", messages=CHAT, prompt_logprobs=1, **more)
        assert_listed(whole["prompt_logprobs"], ids, 1)
        assert whole["choices"][0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["usage"]["completion_tokens"] == 0


def test_without_the_wish_no_answer_has_the_member(server: RunningServer) -> None:
    assert "prompt_logprobs" not in answer(server, "/v1/chat/completions", messages=CHAT)
    (choice,) = answer(server, "/v1/completions", prompt=PROMPT, echo=True, logprobs=1)["choices"]
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": CHAT})],
)
def test_a_stream_has_them_in_the_first_chunk_of_each_choice_only(
    server: RunningServer, path: str, prompt: Mapping[str, object]
) -> None:
    body = {**prompt, "prompt_logprobs": 1, "n": 2, "max_tokens": 6}
    whole = answer(server, path, **body)
    events = server.ask(path, {**body, "stream": True}).events
    for index in range(2):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert own[0]["prompt_logprobs"] == whole["choices"][index]["prompt_logprobs"]
        assert not any("prompt_logprobs" in chunk for chunk in own[1:])


def test_an_echo_with_logprobs_has_lists_over_prompt_and_text(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 4}
    (choice,) = answer(server, "/v1/completions", **body)["choices"]
    ids, lists = demo_tokenizer().encode(PROMPT), choice["logprobs"]
    own = answer(server, "/v1/completions", **{**body, "echo": False})["choices"][0]
    assert choice["text"] == PROMPT + own["text"]
    assert {len(values) for values in lists.values()} == {len(ids) + 4}
    assert lists["token_logprobs"] == [None, *(-i for i in range(1, len(ids))), *([-0.5] * 4)]
    assert lists["top_logprobs"][0] is None
    assert all(len(top) == 3 for top in lists["top_logprobs"][1 : len(ids)])
    assert lists["tokens"][len(ids) :] == own["logprobs"]["tokens"]
    assert lists["text_offset"][: len(ids)] == sorted(lists["text_offset"][: len(ids)])
    assert lists["text_offset"][0] == 0
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<")):
            assert choice["text"][offset:].startswith(token)
    assert lists["text_offset"][len(ids)] == len(PROMPT)


def test_a_streamed_echo_has_the_lists_of_the_prompt_in_its_first_chunk(
    server: RunningServer,
) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 7}
    (whole,) = answer(server, "/v1/completions", **body)["choices"]
    choices = [
        event["choices"][0]
        for event in server.ask("/v1/completions", {**body, "stream": True}).events
    ]
    assert choices[0]["text"].startswith(PROMPT)
    for member, values in whole["logprobs"].items():
        parts = [choice["logprobs"][member] for choice in choices if choice["logprobs"]]
        assert [value for part in parts for value in part] == values
        assert len(parts[0]) > len(demo_tokenizer().encode(PROMPT))


def test_an_echo_alone_can_be_all_of_the_answer(server: RunningServer) -> None:
    (choice,) = answer(server, "/v1/completions", prompt=PROMPT, echo=True, max_tokens=0)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert server.service.requests[-1].prompt_logprobs is None


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_lm_evaluation_harness_gets_the_loglikelihoods_of_a_batch(
    server: RunningServer, max_tokens: int
) -> None:
    """Send what its `local-completions` model sends, and read the answer as it does."""
    prompts = [demo_tokenizer().encode(text) for text in (TEXT, "hello there", PROMPT)]
    context_lengths = [3, 1, 2]
    body = {
        "model": "demo",
        "prompt": [list(prompt) for prompt in prompts],
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    choices = answer(server, "/v1/completions", **body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for prompt, length, choice in zip(prompts, context_lengths, choices, strict=True):
        stop = -1 if max_tokens else None
        own = choice["logprobs"]["token_logprobs"][length:stop]
        tops = choice["logprobs"]["top_logprobs"][length:stop]
        assert sum(own) == -sum(range(length, len(prompt)))
        assert not any(value == max(top.values()) for value, top in zip(own, tops, strict=True))


def test_a_response_of_too_many_prompt_logprobs_is_refused_streamed_or_not(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_request, "MAX_LOGPROBS", 100)
    prompt = [5] * 10
    fits = {"prompt": prompt, "prompt_logprobs": 9, "max_tokens": 0}
    assert server.ask("/v1/completions", fits).status == 200
    faults: list[tuple[dict[str, object], str]] = [
        ({**fits, "prompt_logprobs": 10}, "prompt_logprobs"),
        ({**fits, "n": 2}, "prompt_logprobs"),
        ({**fits, "prompt": [prompt, prompt]}, "prompt_logprobs"),
        ({**fits, "echo": True, "logprobs": 0}, "prompt_logprobs"),
        ({"prompt": prompt, "echo": True, "logprobs": 10, "max_tokens": 0}, "logprobs"),
    ]
    for body, param in faults:
        for stream in (False, True):
            reply = server.ask("/v1/completions", {**body, "stream": stream})
            assert (reply.status, reply.error["param"]) == (400, param)
            assert "is the most in one response" in str(reply.error["message"])


def test_nothing_to_write_and_nothing_to_say_is_refused(server: RunningServer) -> None:
    reply = server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "logprobs": 1})
    assert (reply.status, reply.error["param"]) == (400, "max_tokens")
    assert "0 with echo or prompt_logprobs" in str(reply.error["message"])


def test_a_long_prompt_is_rendered_in_blocks() -> None:
    count = 2 * BLOCK + 5
    logprobs = PromptLogprobs(
        1,
        np.arange(count, dtype=np.float32),
        np.ones(count, np.uint32),
        np.zeros((count, 3), np.uint32),
        np.zeros((count, 3), np.float32),
    )
    found = list(blocks(range(count + 1), logprobs, 2))
    assert [len(ids) for ids, _ in found] == [BLOCK, BLOCK, 5]
    assert [token for ids, _ in found for token in ids] == [*range(1, count + 1)]
    assert [row.token for _, rows in found for row in rows] == [*range(count)]
    assert all(len(row.top) == 2 for _, rows in found for row in rows)
