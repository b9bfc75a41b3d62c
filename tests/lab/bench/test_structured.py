"""JSON texts under schemas, sampled from the demo pair with and without draft tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from lab.bench.schemas import LEVELS, make_schema
from lab.bench.structured import PROMPT, accepted_schemas, generate_texts, schema_sampling
from specserve import LLM
from specserve.errors import WorkerLost
from specserve.sampling_params import Sampling, random_seed
from specserve.types import Adapter, Grammar, Request

COUNT = 3 * LEVELS


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    keys: dict[str, object] = {
        "speculation.gamma": 4,
        "cache.pages": 700,
        "target.dtype": "float32",
        "draft.dtype": "float32",
    }
    with LLM(None, None, **keys) as opened:
        yield opened


def test_schemas_depend_on_their_number_alone_and_grow_with_the_level() -> None:
    assert make_schema(17) == make_schema(17) != make_schema(27)
    sizes = [
        sum(len(json.dumps(make_schema(number))) for number in range(level, 300, LEVELS))
        for level in range(LEVELS)
    ]
    assert sizes[-1] > 3 * sizes[0]
    text = json.dumps([make_schema(number) for number in range(300)])
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


def test_library_accepts_all_measured_schemas() -> None:
    assert len(accepted_schemas(map(make_schema, range(300)))) == 300


def test_finished_texts_are_valid(llm: LLM) -> None:
    numbered = accepted_schemas(map(make_schema, range(COUNT)))
    counts = generate_texts(llm, numbered, gamma=None, max_tokens=48)
    assert (counts.wrong, counts.failed) == ([], [])
    assert counts.finished > COUNT // 4
    assert counts.finished + counts.cut == COUNT
    assert counts.accepted > counts.drafted // 3


def test_text_under_a_schema_is_that_of_plain_decoding(llm: LLM) -> None:
    for temperature, number in [(0.0, 3), (1.0, 6)]:
        prompt = PROMPT.format(number=number)
        options = {"max_tokens": 40, "temperature": temperature, "seed": 5}
        drafted, plain = llm.generate(
            [prompt] * 2,
            [
                schema_sampling(make_schema(number), **options),
                schema_sampling(make_schema(number), **options, speculation={"gamma": 0}),
            ],
        )
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats is not None
        assert drafted.stats.accepted > 0


class UncheckedSampling(Sampling):
    """Sampling under a grammar that validation would have refused."""

    def requests(
        self,
        prompt: Sequence[int],
        random_seed: Callable[[], int] = random_seed,
        *,
        tenant: str = "",
        adapter: Adapter | None = None,
    ) -> list[Request]:
        broken = Grammar("lark", "start: <|no such token|>")
        requests = super().requests(prompt, random_seed, tenant=tenant, adapter=adapter)
        return [replace(request, grammar=broken) for request in requests]


def test_grammar_that_fails_in_the_worker_is_the_error_of_its_output_alone(llm: LLM) -> None:
    bad, good = llm.generate(["a", "b"], [UncheckedSampling(max_tokens=8), Sampling(max_tokens=4)])
    assert isinstance(bad.error, WorkerLost)
    assert good.error is None
    assert len(good.token_ids) > 0
