"""JSON under schemas, sampled from the demo pair: whatever finishes validates, with drafts and without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from benchmarks.schemas import LEVELS, made
from benchmarks.structured import PROMPT, run, schemas, under
from specserve import LLM
from specserve.errors import WorkerLost
from specserve.sampling_params import Sampling, fresh_seed
from specserve.types import Grammar, Request

COUNT = 3 * LEVELS


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        **{
            "speculation.gamma": 4,
            "cache.pages": 700,
            "target.dtype": "float32",
            "draft.dtype": "float32",
        }
    ) as opened:
        yield opened


def test_schemas_follow_from_their_numbers_and_grow_harder():
    assert made(17) == made(17) != made(27)
    sizes = [
        sum(len(json.dumps(made(number))) for number in range(level, 300, LEVELS))
        for level in range(LEVELS)
    ]
    assert sizes[-1] > 3 * sizes[0]
    text = json.dumps([made(number) for number in range(300)])
    keywords = (
        "enum",
        "const",
        "pattern",
        "format",
        "minItems",
        "anyOf",
        "oneOf",
        "$ref",
        "$defs",
        "prefixItems",
        "exclusiveMaximum",
        "null",
    )
    assert all(f'"{keyword}"' in text for keyword in keywords)


def test_all_schemas_that_are_measured_can_be_followed():
    assert len(schemas(300)) == 300


def test_what_finishes_validates_and_a_seed_gives_the_same_text_with_and_without_drafts(llm: LLM):
    numbered = schemas(COUNT)
    tally = run(llm, numbered, gamma=None, max_tokens=48)
    assert (tally.wrong, tally.failed) == ([], [])
    assert tally.finished > COUNT // 4
    assert tally.finished + tally.cut == COUNT
    assert tally.accepted > tally.drafted // 3


def test_the_text_of_a_schema_is_that_of_plain_decoding(llm: LLM):
    ways = [(0.0, 3), (1.0, 6)]
    for temperature, number in ways:
        prompt, wanted = (
            PROMPT.format(number=number),
            {"max_tokens": 40, "temperature": temperature, "seed": 5},
        )
        drafted, plain = llm.generate(
            [prompt] * 2,
            [
                under(made(number), **wanted),
                under(made(number), **wanted, speculation={"gamma": 0}),
            ],
        )
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats is not None
        assert drafted.stats.accepted > 0


class Unchecked(Sampling):
    """Under a grammar that would have been refused."""

    def requests(
        self, prompt: Sequence[int], fresh_seed: Callable[[], int] = fresh_seed
    ) -> list[Request]:
        broken = Grammar("lark", "start: <|no such token|>")
        return [
            replace(request, grammar=broken) for request in super().requests(prompt, fresh_seed)
        ]


def test_a_grammar_that_breaks_in_the_worker_is_the_error_of_its_output_alone(llm: LLM):
    bad, good = llm.generate(["a", "b"], [Unchecked(max_tokens=8), Sampling(max_tokens=4)])
    assert isinstance(bad.error, WorkerLost)
    assert good.error is None
    assert len(good.token_ids) > 0
