"""Grammars on a cluster: workers elsewhere follow them, and so do those that take their places in mid-text."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence

import pytest
from jsonschema import validate

from benchmarks.structured import of, under
from specserve import LLM
from specserve.cluster.group import Group
from specserve.cluster.placement import bundles
from specserve.cluster.ray_session import own_ray
from specserve.config.tree import Config, parse
from specserve.engine import Coordinator
from specserve.types import Chunk, Finish, Request, Warp

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "tags": {"type": "array", "items": {"enum": ["alpha", "beta"]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
PROMPTS = ["def f(x):\n", "import json\nx = ", "data = ", "class A:\n"]
KEYS: dict[str, object] = {
    "target.dtype": "float32",
    "draft.dtype": "float32",
    "target.threads": 1,
    "draft.threads": 1,
    "cache.pages": 128,
    "speculation.gamma": 4,
}
SEED, TOKENS = 11, 64


def plain() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[str]]:
    """Prompts, and what is written in one process without drafts: as ids, and as texts that ended."""
    with LLM(**KEYS, **{"draft.kind": "none", "draft.path": None}) as llm:
        outputs = llm.generate(PROMPTS, under(SCHEMA, max_tokens=TOKENS, seed=SEED))
    return (
        [output.prompt_token_ids for output in outputs],
        [output.token_ids for output in outputs],
        [output.text for output in outputs if output.finish_reason == Finish.STOP],
    )


async def completed(
    config: Config, requests: Sequence[Request], strike: Callable[[Group, int], None]
) -> tuple[list[tuple[int, ...]], int]:
    """What each request got, and how many drafts were accepted. `strike` is called with each batch of chunks."""
    group = await Group.start(config, bundles(config, has_gpus=False))
    texts: dict[int, tuple[int, ...]] = {}
    accepted, emitted = 0, 0

    def emit(chunks: Sequence[Chunk]) -> None:
        nonlocal accepted, emitted
        for chunk in chunks:
            assert chunk.error is None
            texts[chunk.seq_id] += chunk.tokens
            if chunk.finish is not None and chunk.stats is not None:
                accepted += chunk.stats.accepted
        emitted += 1
        strike(group, emitted)

    coordinator = Coordinator.of(
        config,
        group.target,
        group.drafter,
        info=group.info,
        emit=emit,
        draft_context=group.draft_context,
        overlaps=True,
    )
    for request in requests:
        texts[coordinator.submit(request)] = ()
    try:
        while coordinator.has_work:
            await coordinator.round()
    finally:
        await group.close()
    return list(texts.values()), accepted


def nobody(group: Group, emitted: int) -> None:
    """Is struck."""


def drafter_and_target(group: Group, emitted: int) -> None:
    for when, role in ((2, "draft"), (5, "target-0")):
        if emitted == when:
            os.kill(group.places[role].pid, signal.SIGKILL)


@pytest.mark.ray
@pytest.mark.slow
def test_texts_under_a_grammar_are_those_of_one_process_whoever_dies_meanwhile():
    prompts, expected, finished = plain()
    assert finished
    for text in finished:
        validate(json.loads(text), SCHEMA)
    requests = [Request(ids, TOKENS, Warp(), SEED, True, grammar=of(SCHEMA)) for ids in prompts]
    with own_ray(num_cpus=8):
        for strike in (nobody, drafter_and_target):
            texts, accepted = asyncio.run(completed(parse(KEYS), requests, strike))
            assert texts == expected
            assert accepted > 0
