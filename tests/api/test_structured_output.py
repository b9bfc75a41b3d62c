"""Structured output and tools through the real engine.

The demo pair was trained for neither, so that only the grammar makes its texts valid.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import jsonschema
import openai
import pytest

from specserve import LLM, Sampling
from specserve.api.tools.formats import DEFAULT_FORMAT, ModelCallFormat
from specserve.api.tools.grammar import CallGrammar
from specserve.api.tools.offer import SEPARATORS
from specserve.api.tools.parse import CallParser, merge_deltas
from specserve.errors import BadValue
from specserve.types import Chunk, Grammar, Request, Warp
from tests.support import pages as guide
from tests.support.http_server import FakeService, demo_tokenizer, serving

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "is": {"type": "boolean"},
    },
    "required": ["kind", "count", "is"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "count", "parameters": SCHEMA, "strict": True},
}
CHAT: Any = [{"role": "user", "content": "count"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0, 1])
def test_every_text_obeys_its_response_format(llm: LLM, temperature: float) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    outputs = llm.generate(
        "data = ",
        Sampling(response_format=wanted, n=6, max_tokens=300, temperature=temperature, seed=3),
    )
    for output in outputs:
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), SCHEMA)


@pytest.mark.parametrize(
    ("guided", "allowed"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "a{2,3}"}, {"aa", "aaa"}),
        ({"grammar": 'start: "x" | "y" "z"'}, {"x", "yz"}),
    ],
)
def test_every_text_obeys_its_guided_constraint(
    llm: LLM, guided: dict[str, object], allowed: set[str]
) -> None:
    assert {
        output.text
        for output in llm.generate("x", Sampling(guided=guided, n=8, max_tokens=20, seed=5))
    } <= allowed


def test_a_grammar_that_cannot_be_obeyed_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(BadValue, match="not"):
        llm.generate("x", Sampling(guided={"json": {"not": {}}}))


class LLMService(FakeService):
    """A service over the engine in this process, for one request at a time."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self._llm = llm

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        for chunk in run(self._llm, request):
            yield chunk


def run(llm: LLM, request: Request) -> list[Chunk]:
    coordinator = llm.engine.coordinator
    assert coordinator is not None
    chunks: list[Chunk] = []
    coordinator._emit, before = chunks.extend, coordinator._emit
    try:
        coordinator.submit(request)
        while coordinator.has_work:
            # A round of workers in this process never waits.
            with contextlib.suppress(StopIteration):
                coordinator.round().send(None)
    finally:
        coordinator._emit = before
    return chunks


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "count"}}]
)
def test_a_required_call_has_arguments_that_validate(llm: LLM, choice: Any) -> None:
    options: dict[str, Any] = {
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "seed": 1,
    }
    with (
        serving(LLMService(llm), max_context=1024) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        answer: Any = client.chat.completions.create(model="demo", messages=CHAT, **options)
        whole = answer.choices[0]
        stream = client.chat.completions.create(model="demo", messages=CHAT, stream=True, **options)
        pieces = [piece for chunk in stream for piece in chunk.choices[0].delta.tool_calls or []]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments, (
        "the same seed writes the same"
    )


@pytest.mark.parametrize("before", ["", "Let me count.\n"])
def test_an_optional_call_is_forced_from_its_trigger_on(llm: LLM, before: str) -> None:
    """Text that was generated earlier is a part of the text under the grammar.

    So it is for a request that moves from one engine to another.
    """
    tokenizer, call_format = demo_tokenizer(), ModelCallFormat.from_template("", demo_tokenizer())
    grammar = CallGrammar(
        call_format, [("count", json.dumps({**SCHEMA, **SEPARATORS}))], parallel=False
    ).calls_or_text()
    generated = tokenizer.encode(before + DEFAULT_FORMAT.trigger)
    request = Request(
        tokenizer.encode("count"),
        300,
        Warp(),
        seed=7,
        grammar=Grammar("lark", grammar),
        generated=generated,
    )
    tokens = [token for chunk in run(llm, request) for token in chunk.tokens]
    parser = CallParser(DEFAULT_FORMAT)
    content, deltas = parser.push(tokenizer.decode([*generated, *tokens]))
    assert (content, parser.has_complete_calls, [call.name for call in merge_deltas(deltas)]) == (
        before,
        True,
        ["count"],
    )
    jsonschema.validate(json.loads(merge_deltas(deltas)[0].arguments), SCHEMA)


def test_the_examples_of_the_docs_run(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    name = "structured-output.md"
    (program,) = guide.programs(
        [one for one in guide.blocks() if one.page.name == name and one.language == "python"]
    )
    with serving(LLMService(llm), max_context=1024) as server:
        code = compile(program.filled(server.url), name, "exec", dont_inherit=True)
        names: dict[str, Any] = {"__name__": "docs"}
        exec(code, names)
        names["client"].close()
    event, choice, *others = capsys.readouterr().out.splitlines()
    assert event.startswith("kind=")
    assert choice in ("True", "False")
    assert any(line.startswith("get_weather {") for line in others)
