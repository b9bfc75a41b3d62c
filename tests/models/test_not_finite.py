"""Logits that are not finite end their own sequence with an error, and give no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specserve import LLM, Sampling
from specserve.errors import ModelError, UnsupportedModel, WorkerLost
from specserve.models.checkpoints.library import read_config
from specserve.models.model import ModelOptions, open_model
from specserve.models.target import TargetModel
from specserve.sampling.distribution import NOT_FINITE_ERROR
from specserve.types import ModelInfo, Policy, Speculation, VerifyStep, Warp
from tests.support import checkpoints

PROMPT = tuple(range(20, 60))
BROKEN = 7
"""The token whose embedding has a number that is none: every row that has read it is broken."""
INFO = ModelInfo(checkpoints.VOCAB, checkpoints.CONTEXT, frozenset(), 16, 64)
KEYS: dict[str, Any] = {"cache.pages": 64, "target.threads": 1}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
POLICIES = [
    Policy(Warp(temperature=0.0), "block", 1, len(PROMPT)),
    Policy(Warp(temperature=0.0, presence_penalty=0.5), "block", 1, len(PROMPT)),
    Policy(Warp(temperature=0.0), "block", 1, len(PROMPT), logprobs=2),
    *(Policy(Warp(), verifier, 1, len(PROMPT)) for verifier in ("block", "speculative", "coupled")),
    Policy(Warp(temperature=0.5, top_p=0.9), "block", 1, len(PROMPT)),
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_broken(tmp_path_factory.mktemp("broken") / "target")


def make_broken(directory: Path, *, norm: float | None = None) -> Path:
    """Write a checkpoint in which BROKEN is broken, or with `norm` every token."""
    checkpoints.add_tokenizer(checkpoints.make("llama", directory))
    file = directory / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" in weights, "the head is not broken"
    if norm is None:
        weights["model.embed_tokens.weight"][BROKEN, 3] = float("nan")
    else:
        weights["model.norm.weight"][:] = norm
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
    with LLM(broken, **{**KEYS, "draft.kind": "none"}) as llm:
        good, bad = llm.generate([PROMPT, [*PROMPT, BROKEN]], Sampling(max_tokens=1))
    assert (good.error, good.finish_reason) == (None, "length")
    assert isinstance(bad.error, WorkerLost)
    assert NOT_FINITE_ERROR in str(bad.error)


@pytest.mark.parametrize("gamma", [3, "auto"])
def test_a_target_without_a_single_finite_logit_is_refused_at_the_start(
    tmp_path: Path, gamma: object
) -> None:
    directory = make_broken(tmp_path / "target", norm=float("nan"))
    with pytest.raises(ModelError, match="logits are not finite"):
        LLM(directory, **{**KEYS, "draft.kind": "none", "speculation.gamma": gamma})


@pytest.mark.parametrize("verifier", ["block", "speculative", "coupled", "lenient"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_draft_without_a_single_finite_logit_fails_no_request_and_changes_no_distribution(
    tmp_path: Path, verifier: str, number: float
) -> None:
    target = checkpoints.make("llama", tmp_path / "target")
    draft = make_broken(tmp_path / "draft", norm=number)
    checkpoints.add_tokenizer(target)
    sampling = Sampling(
        max_tokens=12, seed=3, ignore_eos=True, speculation=Speculation(verifier=verifier)
    )
    with LLM(target, draft, **{**KEYS, "speculation.gamma": 3}) as llm:
        (output,) = llm.generate([PROMPT], sampling)
    assert (output.error, len(output.token_ids)) == (None, 12)
    assert output.stats is not None
    assert output.stats.drafted > 20
    assert output.stats.accepted < 4, "as certain tokens of no worth they are seldom accepted"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rope_theta", {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}),
        ("rope_theta", {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}),
        ("rope_theta", {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}),
        ("factor", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0.0}}),
        ("beta_fast", {"rope_parameters": YARN | {"beta_fast": float("nan")}}),
        ("attention_factor", {"rope_parameters": YARN | {"attention_factor": float("nan")}}),
        ("high_freq_factor", {"rope_parameters": LLAMA3 | {"high_freq_factor": 0.0}}),
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
