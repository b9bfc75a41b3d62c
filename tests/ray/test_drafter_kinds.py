"""Every kind of drafter on the cluster: its workers, and that texts equal plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from specserve import LLM, Sampling
from specserve.cluster.launch import handle
from specserve.cluster.placement import bundles, engine_deployments
from specserve.config.tree import DEMO, Config, config_from_keys
from tests.support.checkpoints import ENCODER_DECODERS, add_tokenizer, perturb, write
from tests.support.dflash_drafts import DFlashSizes, write_z_lab
from tests.support.ray_server import SharedServe

KEYS: dict[str, Any] = {"cache.pages": 64, "speculation.gamma": 3}
PROMPTS = ["def add(a, b):\n", "class Stack:\n    def __init__(self):\n"]
TOKENS = 24
STAGES = [{"path": str(DEMO / "draft")}, {"path": str(DEMO / "small")}, {"kind": "max_gram"}]
RANKS = {"target-0", "target-1"}
# They compute the bits of one rank, which the texts are compared with.
TWO_RANKS: dict[str, object] = {"tensor_parallel": 2, "degree_invariant": True}
T5 = "encoder-decoder-apart"
DFLASH = "dflash-together-with-the-first-of-two-ranks"
DFLASH_SIZES = DFlashSizes(
    hidden_size=256, target_hidden_size=256, vocab_size=4096, taps=(4, 6), mask_token=1
)


@dataclass(frozen=True)
class Kind:
    """A model of the server: sections of its config that are its own, and its workers."""

    draft: Mapping[str, object]
    workers: set[str]
    target: Mapping[str, object] = field(default_factory=dict)


CASCADE: dict[str, object] = {"kind": "cascade", "stages": STAGES}
KINDS = {
    "heads": Kind({"kind": "heads"}, {"target-0"}),
    "layer_skip-apart": Kind({"kind": "layer_skip", "placement": "apart"}, {"target-0", "draft"}),
    "layer_skip-together": Kind({"kind": "layer_skip", "placement": "together"}, {"target-0"}),
    "cascade-apart": Kind({**CASCADE, "placement": "apart"}, {"target-0", "draft"}),
    "cascade-together": Kind({**CASCADE, "placement": "together"}, {"target-0"}),
    "max_gram-together": Kind({"kind": "max_gram", "placement": "together"}, {"target-0"}),
    "neural-together-with-the-first-of-two-ranks": Kind(
        {"kind": "neural", "placement": "together"}, RANKS, TWO_RANKS
    ),
}


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
def t5_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("t5")
    target = write(ENCODER_DECODERS["t5"](), root / "target")
    add_tokenizer(target, ends=True)
    return target, perturb(target, root / "draft", 0.02)


@pytest.fixture(scope="module")
def dflash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a draft of the demo target, with random weights and the target's embedding and head."""
    return write_z_lab(tmp_path_factory.mktemp("dflash") / "draft", DFLASH_SIZES)


@dataclass(frozen=True)
class Server:
    """One application with a model for each kind of drafter."""

    client: openai.OpenAI
    config: Config

    def answers(self, model: str) -> tuple[list[str], list[dict[str, object]]]:
        """Return texts and statistics of speculation."""
        given = [
            self.client.completions.create(
                model=model, prompt=prompt, max_tokens=TOKENS, temperature=0
            )
            for prompt in PROMPTS
        ]
        return (
            [one.choices[0].text for one in given],
            [(one.model_extra or {})["specserve"] for one in given],
        )

    def workers(self, model: str) -> set[str]:
        (name,) = (
            name for name, part in engine_deployments(self.config).items() if part.model == model
        )
        return set(handle(self.config, name).places.remote().result())


@pytest.fixture(scope="module")
def server(shared_serve: SharedServe, t5_pair: tuple[Path, Path], dflash: Path) -> Iterator[Server]:
    target, draft = ({"path": str(path), "dtype": "float32"} for path in t5_pair)
    kinds = {
        **KINDS,
        T5: Kind({**draft, "placement": "apart"}, {"target-0", "draft"}, target),
        DFLASH: Kind({"kind": "dflash", "path": str(dflash)}, RANKS, TWO_RANKS),
    }
    models = [
        {
            "name": name,
            "target": {"threads": 1, **kind.target},
            "draft": {"threads": 1, **kind.draft},
        }
        for name, kind in kinds.items()
    ]
    with (
        shared_serve.served({**KEYS, "models": models}) as (url, config),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield Server(client, config)


def plain_texts(keys: dict[str, object]) -> list[str]:
    """Return the texts of one process without a drafter."""
    given: dict[str, Any] = {**KEYS, **keys, "target.threads": 1, "draft.kind": "none"}
    with LLM(**given) as plain:
        return [
            output.text
            for output in plain.generate(PROMPTS, Sampling(max_tokens=TOKENS, temperature=0))
        ]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    return plain_texts({})


@pytest.mark.parametrize("name", KINDS)
def test_served_texts_are_those_of_plain_decoding(
    server: Server, expected: list[str], name: str
) -> None:
    texts, reports = server.answers(name)
    assert texts == expected
    assert server.workers(name) == KINDS[name].workers
    assert all(one["lossless"] for one in reports)
    assert sum(int(str(one["accepted"])) for one in reports) > 0


def test_an_encoder_decoder_is_served_with_a_draft_of_its_kind(
    server: Server, t5_pair: tuple[Path, Path]
) -> None:
    texts, reports = server.answers(T5)
    assert texts == plain_texts({"target.path": str(t5_pair[0]), "target.dtype": "float32"})
    assert all(one["lossless"] for one in reports)


def test_a_dflash_draft_beside_two_ranks_has_the_whole_vocabulary_head(
    server: Server, expected: list[str]
) -> None:
    """Check that it drafts, though what random weights draft is not accepted."""
    texts, reports = server.answers(DFLASH)
    assert texts == expected
    assert server.workers(DFLASH) == RANKS
    assert all(int(str(one["drafted"])) > 0 for one in reports)
