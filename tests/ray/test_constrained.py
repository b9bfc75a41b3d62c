"""Grammars on a cluster: remote workers follow them, and so do their replacements in mid-text."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from jsonschema import validate

from lab.bench.structured import schema_sampling
from specserve import LLM
from specserve.cluster.engine.group import WorkerGroup
from specserve.cluster.placement import bundles
from specserve.config.tree import Config, config_from_keys
from specserve.engine import Coordinator
from specserve.grammar.request import schema_grammar
from specserve.types import Chunk, FinishReason, Request, Warp
from tests.support.ray_server import SharedServe

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
KEYS: dict[str, Any] = {
    "target.dtype": "float32",
    "draft.dtype": "float32",
    "target.threads": 1,
    "draft.threads": 1,
    "cache.pages": 128,
    "speculation.gamma": 4,
}
SEED, TOKENS = 11, 64


def plain() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[str]]:
    """Return prompts, generated ids and finished texts of one process without a drafter."""
    with LLM(**KEYS, **{"draft.kind": "none", "draft.path": None}) as llm:
        outputs = llm.generate(PROMPTS, schema_sampling(SCHEMA, max_tokens=TOKENS, seed=SEED))
    return (
        [output.prompt_token_ids for output in outputs],
        [output.token_ids for output in outputs],
        [output.text for output in outputs if output.finish_reason == FinishReason.STOP],
    )


async def run_requests(
    config: Config, requests: Sequence[Request], inject_fault: Callable[[WorkerGroup, int], None]
) -> tuple[list[tuple[int, ...]], int]:
    """Return the tokens of each request and the number of accepted draft tokens.

    `inject_fault` is called after each batch of chunks.
    """
    group = await WorkerGroup.start(config, bundles(config, has_gpus=False))
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
        inject_fault(group, emitted)

    coordinator = Coordinator(
        group.target,
        group.drafter,
        info=group.info,
        limits=config.limits,
        speculation=config.speculation,
        emit=emit,
        draft_context=group.draft_context,
        remote_workers=True,
    )
    for request in requests:
        texts[coordinator.submit(request)] = ()
    try:
        while coordinator.has_work:
            await coordinator.round()
    finally:
        await group.close()
    return list(texts.values()), accepted


def kill_none(group: WorkerGroup, emitted: int) -> None:
    """Inject no fault."""


def kill_drafter_and_target(group: WorkerGroup, emitted: int) -> None:
    for when, role in ((2, "draft"), (5, "target-0")):
        if emitted == when:
            os.kill(group.places[role].pid, signal.SIGKILL)


def test_constrained_texts_equal_those_of_one_process_when_workers_die(
    shared_serve: SharedServe,
) -> None:
    prompts, expected, finished = plain()
    assert finished
    for text in finished:
        validate(json.loads(text), SCHEMA)
    requests = [
        Request(ids, TOKENS, Warp(), SEED, True, grammar=schema_grammar("guided", SCHEMA))
        for ids in prompts
    ]
    with shared_serve.join():
        for inject_fault in (kill_none, kill_drafter_and_target):
            texts, accepted = asyncio.run(
                run_requests(
                    config_from_keys(KEYS | {"draft.placement": "apart"}), requests, inject_fault
                )
            )
            assert texts == expected
            assert accepted > 0
