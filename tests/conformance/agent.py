"""`python -m tests.conformance.agent`: an agent's session through each protocol, over one engine.

The same session is held in chats, responses and messages: a request with tools, two calls in one
answer, their results, an answer, and the next request. Each protocol must send the engine the same
prompts and return the same texts, and find more of the prompt cached in each turn.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.conformance.agent_engine import DROPPED, KEPT, AgentEngine, agent_tokenizer
from tests.conformance.scripted_engine import CONTEXT
from tests.support.http_server import RunningServer, serving

SYSTEM = "You are an agent. " + "Read before you answer. " * 8
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
TOOLS = [(name, f"{name} a file", SCHEMA) for name in ("read", "write", "list")]
LIMIT = 200  # tokens of an answer
TURNS = 200


@dataclass(frozen=True, slots=True)
class Turn:
    """Content of one answer, and the counts of its prompt by its usage."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]  # names and arguments
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of a session in one protocol, and the prompts that the engine was sent."""

    protocol: str
    turns: tuple[Turn, ...]
    prompts: tuple[tuple[int, ...], ...]


class Talk(ABC):
    """A conversation in the terms of one protocol."""

    path: str

    def __init__(self) -> None:
        self.items: list[Any] = []

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the body of the next request, without what all protocols have."""

    @abstractmethod
    def take(self, answer: Any) -> tuple[Turn, list[str]]:
        """Add an answer to the conversation; return it with the ids of its calls."""

    @abstractmethod
    def add_result(self, call_id: str, result: str) -> None: ...

    def add_request(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def send(self, server: RunningServer) -> tuple[Turn, list[str]]:
        shared = {"model": "demo", "temperature": 0, "cache_salt": self.path}
        reply = server.ask(self.path, self.body() | shared)
        assert reply.status == 200, reply.body
        return self.take(reply.json)


class ChatTalk(Talk):
    path = "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        tools = [
            {"type": "function", "function": {"name": n, "description": d, "parameters": s}}
            for n, d, s in TOOLS
        ]
        system = {"role": "system", "content": SYSTEM}
        return {"messages": [system, *self.items], "tools": tools, "max_tokens": LIMIT}

    def take(self, answer: Any) -> tuple[Turn, list[str]]:
        message, usage = answer["choices"][0]["message"], answer["usage"]
        self.items.append(message)
        calls = message.get("tool_calls") or []
        turn = Turn(
            message.get("reasoning_content") or "",
            message["content"] or "",
            tuple((one["function"]["name"], one["function"]["arguments"]) for one in calls),
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
        )
        return turn, [one["id"] for one in calls]

    def add_result(self, call_id: str, result: str) -> None:
        self.items.append({"role": "tool", "tool_call_id": call_id, "content": result})


class ResponsesTalk(Talk):
    path = "/v1/responses"

    def body(self) -> dict[str, Any]:
        tools = [
            {"type": "function", "name": n, "description": d, "parameters": s} for n, d, s in TOOLS
        ]
        body = {"input": self.items, "tools": tools, "max_output_tokens": LIMIT}
        return body | {"instructions": SYSTEM}

    def take(self, answer: Any) -> tuple[Turn, list[str]]:
        items, usage = answer["output"], answer["usage"]
        self.items += items
        texts = {
            kind: "".join(
                part["text"] for item in items if item["type"] == kind for part in item["content"]
            )
            for kind in ("reasoning", "message")
        }
        calls = [item for item in items if item["type"] == "function_call"]
        turn = Turn(
            texts["reasoning"],
            texts["message"],
            tuple((one["name"], one["arguments"]) for one in calls),
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
        )
        return turn, [one["call_id"] for one in calls]

    def add_result(self, call_id: str, result: str) -> None:
        self.items.append({"type": "function_call_output", "call_id": call_id, "output": result})


class MessagesTalk(Talk):
    path = "/v1/messages"

    def body(self) -> dict[str, Any]:
        tools = [{"name": n, "description": d, "input_schema": s} for n, d, s in TOOLS]
        body = {"messages": self.items, "tools": tools, "max_tokens": LIMIT}
        return body | {"system": [{"type": "text", "text": SYSTEM}]}

    def take(self, answer: Any) -> tuple[Turn, list[str]]:
        blocks, usage = answer["content"], answer["usage"]
        self.items.append({"role": "assistant", "content": blocks})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        turn = Turn(
            "".join(block.get("thinking", "") for block in blocks),
            "".join(block.get("text", "") for block in blocks),
            tuple((one["name"], json.dumps(one["input"])) for one in calls),
            usage["input_tokens"] + usage["cache_read_input_tokens"],
            usage["cache_read_input_tokens"],
        )
        return turn, [one["id"] for one in calls]

    def add_result(self, call_id: str, result: str) -> None:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": result}
        if self.items[-1]["role"] == "user":
            self.items[-1]["content"].append(block)
        else:
            self.items.append({"role": "user", "content": [block]})


TALKS = (ChatTalk, ResponsesTalk, MessagesTalk)


def hold(talk: Talk, server: RunningServer, num_turns: int) -> Session:
    """Hold a session with that number of answers."""
    requests, turns = server.service.requests, list[Turn]()
    first = len(requests)
    while len(turns) < num_turns:
        if not turns or not turns[-1].calls:
            talk.add_request(f"Compare the files of turn {len(turns)}.")
        turn, call_ids = talk.send(server)
        turns.append(turn)
        for call_id, (_, arguments) in zip(call_ids, turn.calls, strict=True):
            talk.add_result(call_id, f"{json.loads(arguments)['path']} has 3 lines")
    prompts = tuple(request.prompt for request in requests[first:])
    return Session(talk.path, tuple(turns), prompts)


def hold_all(reasoning: str, num_turns: int) -> list[Session]:
    """Hold the session in each protocol, with a template that keeps or drops reasoning."""
    tokenizer = agent_tokenizer(reasoning)
    with tempfile.TemporaryDirectory() as directory:
        engine = AgentEngine(Path(directory), tokenizer)
        with serving(
            engine, tokenizer=tokenizer, max_context=CONTEXT, vocab_size=tokenizer.vocab_size
        ) as server:
            return [hold(talk(), server, num_turns) for talk in TALKS]


def check(sessions: Sequence[Session]) -> None:
    """Raise AssertionError unless all sessions are equal, and each turn has more cached."""
    first = sessions[0]
    for session in sessions:
        assert session.prompts == first.prompts, session.protocol
        assert session.turns == first.turns, session.protocol
        cached = [turn.cached_tokens for turn in session.turns]
        assert cached[0] == 0
        assert all(one < next_ for one, next_ in pairwise(cached)), cached


def rows(reasoning: str, sessions: Sequence[Session]) -> list[str]:
    """Return a row of the table for each session."""
    return [
        f"| {reasoning} | {one.protocol} | {len(one.turns)} | {one.turns[-1].prompt_tokens} "
        f"| {one.turns[-1].cached_tokens} "
        f"| {sum(t.cached_tokens for t in one.turns) / sum(t.prompt_tokens for t in one.turns):.1%}"
        " |"
        for one in sessions
    ]


def table(num_turns: int) -> Iterator[str]:
    """Hold and check all sessions, and yield the lines of their table."""
    yield "| reasoning | protocol | turns | tokens of the last prompt | cached | of all prompts |"
    yield "|---|---|---|---|---|---|"
    for reasoning in (KEPT, DROPPED):
        sessions = hold_all(reasoning, num_turns)
        check(sessions)
        yield from rows(reasoning, sessions)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="answers of a session")
    for line in table(parser.parse_args().turns):
        print(line, flush=True)


if __name__ == "__main__":
    main()
