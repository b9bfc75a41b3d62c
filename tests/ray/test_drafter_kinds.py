"""Every kind of drafter on the cluster: its workers, and that texts equal plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from specserve import LLM, Sampling
from specserve.cluster.launch import deploy, handle
from specserve.cluster.placement import bundles
from specserve.cluster.ray_session import ray_session
from specserve.config.tree import DEMO, config_from_keys
from tests.support.checkpoints import ENCODER_DECODERS, add_tokenizer, perturb, write
from tests.support.ray_server import free_port

KEYS: dict[str, Any] = {
    "target.threads": 1,
    "draft.threads": 1,
    "cache.pages": 256,
    "speculation.gamma": 3,
}
PROMPTS = ["def add(a, b):\n", "class Stack:\n    def __init__(self):\n"]
TOKENS = 40
STAGES = [{"path": str(DEMO / "draft")}, {"path": str(DEMO / "small")}, {"kind": "max_gram"}]
APART, TOGETHER = {"draft.placement": "apart"}, {"draft.placement": "together"}
RANKS = {"target-0", "target-1"}
# They compute the bits of one rank, which the texts are compared with.
TWO_RANKS: dict[str, object] = {"target.tensor_parallel": 2, "target.degree_invariant": True}
T5: dict[str, Any] = {"target.dtype": "float32", "draft.dtype": "float32"}


def test_only_drafters_with_a_device_of_their_own_get_a_bundle() -> None:
    num_bundles = {}
    for kind in ("none", "heads", "layer_skip", "bigram"):
        config = config_from_keys({"draft.kind": kind, "draft.path": None})
        num_bundles[kind] = len(bundles(config, has_gpus=False))
    assert num_bundles == {"none": 2, "heads": 2, "layer_skip": 3, "bigram": 3}
    head = {"draft.kind": "eagle", "draft.path": "head"}
    placements = {
        placement: len(
            bundles(config_from_keys({**head, "draft.placement": placement}), has_gpus=False)
        )
        for placement in ("auto", "together", "apart")
    }
    assert placements == {"auto": 2, "together": 2, "apart": 3}


@pytest.fixture(scope="module")
def ray_with_a_port() -> Iterator[int]:
    """Start one Ray and one Serve for all kinds, which are deployed on it in turn."""
    port = free_port()
    with ray_session(config_from_keys({"http.port": port}), lambda line: None):
        yield port


@pytest.fixture(scope="module")
def t5_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("t5")
    target = write(ENCODER_DECODERS["t5"](), root / "target")
    add_tokenizer(target, ends=True)
    return target, perturb(target, root / "draft", 0.02)


def answers(
    port: int, keys: dict[str, object]
) -> tuple[list[str], list[dict[str, object]], set[str]]:
    """Return texts, statistics of speculation, and names of workers."""
    config = config_from_keys({"http.port": port, "model": "it", **keys})
    with deploy(config, lambda line: None) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        given = [
            client.completions.create(model="it", prompt=prompt, max_tokens=TOKENS, temperature=0)
            for prompt in PROMPTS
        ]
        places = set(handle(config, "Engine").places.remote().result())
    return (
        [one.choices[0].text for one in given],
        [(one.model_extra or {})["specserve"] for one in given],
        places,
    )


def expected(keys: dict[str, Any]) -> list[str]:
    with LLM(**{**KEYS, **keys, "draft.kind": "none"}) as plain:
        return [
            output.text
            for output in plain.generate(PROMPTS, Sampling(max_tokens=TOKENS, temperature=0))
        ]


@pytest.mark.parametrize(
    ("keys", "workers"),
    [
        ({"draft.kind": "heads"}, {"target-0"}),
        ({"draft.kind": "layer_skip", **APART}, {"target-0", "draft"}),
        ({"draft.kind": "layer_skip", **TOGETHER}, {"target-0"}),
        ({"draft.kind": "cascade", "draft.stages": STAGES, **APART}, {"target-0", "draft"}),
        ({"draft.kind": "cascade", "draft.stages": STAGES, **TOGETHER}, {"target-0"}),
        ({"draft.kind": "max_gram", **TOGETHER}, {"target-0"}),
        ({"draft.kind": "neural", **TWO_RANKS, **TOGETHER}, RANKS),
    ],
    ids=[
        "heads",
        "layer_skip apart",
        "layer_skip together",
        "cascade apart",
        "cascade together",
        "max_gram together",
        "neural together with the first of two ranks",
    ],
)
def test_served_texts_are_those_of_plain_decoding(
    ray_with_a_port: int, keys: dict[str, object], workers: set[str]
) -> None:
    texts, reports, places = answers(ray_with_a_port, {**KEYS, **keys})
    assert texts == expected({})
    assert places == workers
    assert all(one["lossless"] for one in reports)
    assert sum(int(str(one["accepted"])) for one in reports) > 0


def test_an_encoder_decoder_is_served_with_a_draft_of_its_kind(
    ray_with_a_port: int, t5_pair: tuple[Path, Path]
) -> None:
    target, draft = (str(path) for path in t5_pair)
    keys = {**KEYS, **T5, "target.path": target}
    texts, reports, _ = answers(ray_with_a_port, {**keys, "draft.path": draft, **APART})
    assert texts == expected(keys)
    assert all(one["lossless"] for one in reports)
