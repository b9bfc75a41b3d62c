"""Checks with bfcl-eval: calls of functions that its questions are about, by its own handler.

Not its score, which is the model's: each call must be one of the functions with arguments that
obey its schema, and the same with draft tokens and without.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import bfcl_eval
from bfcl_eval.constants.enums import Language
from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler
from jsonschema import Draft202012Validator

from tests.conformance.checks import CheckList, Endpoint

check = CheckList(("bfcl-eval", "openai"))
KINDS = ("simple_python", "live_multiple", "parallel")
PER_KIND = 100
STREAMS = 8
MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Answer:
    """The calls that answered a question, as the handler reads them, and how they ended."""

    calls: Sequence[dict[str, str]]
    finish: str
    tools: Sequence[Any]


class Handler(OpenAICompletionsHandler):
    """The handler of models that call functions, which must call one here.

    A small model goes on calling where it may, so only questions for several calls allow them.
    """

    def __init__(
        self, model: str, number: int, gamma: int | None, *, parallel: bool = False
    ) -> None:
        super().__init__(model, float(number % 2), model, True)
        own = {} if gamma is None else {"speculation": {"gamma": gamma}}
        self.added = {"seed": number, "max_tokens": MAX_TOKENS, "extra_body": own}
        self.added |= {"tool_choice": "required", "parallel_tool_calls": parallel}
        self.finish, self.tools = "", list[Any]()

    def generate_with_backoff(self, **given: Any) -> Any:
        self.tools = given["tools"]
        reply = self.client.chat.completions.create(**given, **self.added)
        self.finish = reply.choices[0].finish_reason
        return reply, 0.0


def questions() -> list[dict[str, Any]]:
    data, found = Path(bfcl_eval.__file__).parent / "data", list[dict[str, Any]]()
    for kind in KINDS:
        lines = (data / f"BFCL_v4_{kind}.json").read_text(encoding="utf-8").splitlines()
        found += map(json.loads, lines[:PER_KIND])
    return found


def ask(model: str, gamma: int | None, number: int, question: dict[str, Any]) -> Answer:
    handler = Handler(model, number, gamma, parallel=question["id"].startswith("parallel"))
    calls, _ = handler.inference_single_turn_FC(question, include_input_log=False)
    return Answer(calls, handler.finish, handler.tools)


@cache
def answers(endpoint: Endpoint, gamma: int | None) -> Sequence[Answer]:
    """Return the answers to all questions, half of them greedy and half drawn at T = 1."""
    os.environ["OPENAI_BASE_URL"] = endpoint.url
    with urllib.request.urlopen(f"{endpoint.url}/models", timeout=60) as reply:
        model = json.load(reply)["data"][0]["id"]
    with ThreadPoolExecutor(STREAMS) as pool:
        given = questions()
        return list(pool.map(partial(ask, model, gamma), range(len(given)), given))


@check
def most_questions_are_answered_by_whole_calls(endpoint: Endpoint) -> None:
    found = answers(endpoint, None)
    ends = {end: sum(one.finish == end for one in found) for end in ("tool_calls", "length")}
    print(f"{len(found)} answers, by how they ended: {ends}")
    assert sum(ends.values()) == len(found), ends
    assert ends["tool_calls"] > len(found) / 2, ends


@check
def each_whole_call_obeys_the_schema_of_its_function(endpoint: Endpoint) -> None:
    found, handler = answers(endpoint, None), Handler("any", 0, None)
    for answer in found:
        if answer.finish != "tool_calls":
            continue
        schemas = {tool["function"]["name"]: tool["function"] for tool in answer.tools}
        decoded = handler.decode_ast(answer.calls, Language.PYTHON, has_tool_call_tag=False)
        assert decoded, answer
        for call in decoded:
            ((name, arguments),) = call.items()
            Draft202012Validator(schemas[name]["parameters"]).validate(arguments)


@check
def calls_are_the_same_without_draft_tokens(endpoint: Endpoint) -> None:
    pairs = zip(answers(endpoint, None), answers(endpoint, 0), strict=True)
    differing = [
        number
        for number, (one, other) in enumerate(pairs)
        if (one.calls, one.finish) != (other.calls, other.finish)
    ]
    assert not differing, differing


if __name__ == "__main__":
    check.main()
