"""Logits that are not finite end their own sequence with an error, and give no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specserve import LLM, Sampling
from specserve.errors import UnsupportedModel, WorkerLost
from specserve.models.checkpoints.library import read_config
from specserve.models.model import ModelOptions, open_model
from specserve.models.target import TargetModel
from specserve.sampling.distribution import NOT_FINITE_ERROR
from specserve.types import ModelInfo, Policy, VerifyStep, Warp
from tests.support import checkpoints

PROMPT = tuple(range(20, 60))
BROKEN = 7
"""The token whose embedding has a number that is none: every row that has read it is broken."""
INFO = ModelInfo(checkpoints.VOCAB, checkpoints.CONTEXT, frozenset(), 16, 64)
POLICIES = [
    Policy(Warp(temperature=0.0), "block", 1, len(PROMPT)),
    Policy(Warp(temperature=0.0, presence_penalty=0.5), "block", 1, len(PROMPT)),
    Policy(Warp(temperature=0.0), "block", 1, len(PROMPT), logprobs=2),
    *(Policy(Warp(), verifier, 1, len(PROMPT)) for verifier in ("block", "speculative", "coupled")),
    Policy(Warp(temperature=0.5, top_p=0.9), "block", 1, len(PROMPT)),
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = checkpoints.make("llama", tmp_path_factory.mktemp("broken") / "target")
    checkpoints.add_tokenizer(directory)
    file = directory / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" in weights, "the head is not broken"
    weights["model.embed_tokens.weight"][BROKEN, 3] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def open_target_model(checkpoint: Path) -> TargetModel:
    options = ModelOptions(dtype="float32", device="cpu", pages=64)
    return TargetModel(open_model(checkpoint, options).runner, INFO)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_row_that_is_not_finite_fails_its_own_sequence(broken: Path, policy: Policy) -> None:
    model = open_target_model(broken)
    healthy = VerifyStep(0, 0, PROMPT, (4, 5), None, policy)
    (expected,) = open_target_model(broken).verify([healthy])
    one, other = model.verify([healthy, VerifyStep(1, 0, (*PROMPT, BROKEN), (4, 5), None, policy)])
    assert (one.error, one.accepted) == (None, expected.accepted)
    assert one.next_token == expected.next_token
    assert other.error == NOT_FINITE_ERROR


def test_an_accepted_draft_token_fails_its_sequence_when_its_row_decides(broken: Path) -> None:
    likeliest = Policy(Warp(temperature=0.0, logit_bias=((BROKEN, 100.0),)), "block", 1, 40)
    drafts = VerifyStep(0, 0, PROMPT, (BROKEN,), None, likeliest)
    assert [one.error for one in open_target_model(broken).verify([drafts])] == [NOT_FINITE_ERROR]


def test_a_prompt_that_is_not_finite_fails_alone(broken: Path) -> None:
    keys: dict[str, Any] = {"draft.kind": "none", "cache.pages": 64, "target.threads": 1}
    with LLM(broken, **keys) as llm:
        good, bad = llm.generate([PROMPT, [*PROMPT, BROKEN]], Sampling(max_tokens=1))
    assert (good.error, good.finish_reason) == (None, "length")
    assert isinstance(bad.error, WorkerLost)
    assert NOT_FINITE_ERROR in str(bad.error)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rope_theta", {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}),
        ("rope_theta", {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}),
        ("rope_theta", {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}),
        ("factor", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0.0}}),
        ("rms_norm_eps", {"rms_norm_eps": float("nan")}),
        ("rms_norm_eps", {"rms_norm_eps": -1e-5}),
        ("sliding_window", {"sliding_window": 0}),
    ],
)
def test_numbers_of_a_config_that_lead_there_are_refused_by_name(
    name: str, values: dict[str, Any], tmp_path: Path
) -> None:
    directory = checkpoints.make("llama", tmp_path / "target")
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    with pytest.raises(UnsupportedModel, match=f"has {name} .* in config.json, and it must be"):
        read_config(directory)
