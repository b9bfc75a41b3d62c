"""Whole engines on an emulated card write what they write on the CPU, and accept as many drafts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from specserve.demo.corpus import held_out_prompts
from specserve.llm.llm import LLM
from specserve.sampling import truncation
from specserve.sampling_params import Sampling
from tests.support.card import emulated_cards, flashinfer

PROMPTS = held_out_prompts(count=3, length=60)
IN_FP32 = {"target.dtype": "float32", "draft.dtype": "float32", "cache.pages": 400}
SAMPLINGS: Mapping[str, Sampling] = {
    "greedy": Sampling(max_tokens=20, temperature=0.0, ignore_eos=True),
    "seeded": Sampling(max_tokens=20, temperature=0.8, seed=7, ignore_eos=True),
    "warped": Sampling(
        max_tokens=20,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        presence_penalty=0.5,
        repetition_penalty=1.1,
        seed=7,
        ignore_eos=True,
    ),
}


def texts(device: str, sampling: Sampling, **keys: Any) -> list[tuple[tuple[int, ...], int]]:
    """Return the tokens of each prompt's text, and how many drafts were accepted."""
    keys = {**IN_FP32, "target.device": device, "draft.device": device, **keys}
    with LLM(None, None, **keys) as llm:
        outputs = llm.generate(list(PROMPTS), sampling)
    return [
        (tuple(output.token_ids), output.stats.accepted if output.stats else -1)
        for output in outputs
    ]


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_texts_are_those_of_the_cpu(sampling: str, gamma: int) -> None:
    keys = {"speculation.gamma": gamma}
    expected = texts("cpu", SAMPLINGS[sampling], **keys)
    with emulated_cards():
        assert texts("cuda", SAMPLINGS[sampling], **keys) == expected


@pytest.mark.parametrize("verifier", ["speculative", "block", "coupled"])
def test_verifiers_decide_as_on_the_cpu(verifier: str) -> None:
    keys = {"speculation.gamma": 4, "speculation.verifier": verifier}
    expected = texts("cpu", SAMPLINGS["seeded"], **keys)
    with emulated_cards():
        assert texts("cuda", SAMPLINGS["seeded"], **keys) == expected


def test_flashinfer_keeps_the_tokens_that_a_sort_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"speculation.gamma": 4}
    expected = texts("cpu", SAMPLINGS["warped"], **keys)
    monkeypatch.setattr(truncation, "SORTED_WIDTH", 0)
    with emulated_cards() as ledger, flashinfer.installed():
        assert texts("cuda", SAMPLINGS["warped"], **keys) == expected
        assert ledger.kernels["renormalised"] > 20


def test_kernels_that_are_not_compiled_hold_no_start_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"speculation.gamma": 4}
    expected = texts("cpu", SAMPLINGS["warped"], **keys)
    monkeypatch.setattr(truncation, "SORTED_WIDTH", 0)
    without = flashinfer.installed(sampling_is_compiled=False)
    with emulated_cards() as ledger, without, caplog.at_level(logging.INFO):
        assert texts("cuda", SAMPLINGS["warped"], **keys) == expected
        assert not ledger.kernels["renormalised"]
    assert "--only sampling" in caplog.text


def test_flashinfer_that_keeps_other_tokens_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"speculation.gamma": 4}
    expected = texts("cpu", SAMPLINGS["warped"], **keys)
    monkeypatch.setattr(truncation, "SORTED_WIDTH", 0)
    with emulated_cards(), flashinfer.installed():
        kernels = sys.modules["flashinfer.sampling"]
        monkeypatch.setattr(kernels, "top_p_renorm_probs", lambda p, _: p)
        assert texts("cuda", SAMPLINGS["warped"], **keys) == expected
    assert "by sorting: FlashInfer keeps" in caplog.text


@pytest.mark.parametrize("kind", ["layer_skip", "bigram"])
def test_other_drafters_draft_as_on_the_cpu(kind: str) -> None:
    keys = {"draft.kind": kind, "draft.path": None, "speculation.gamma": 3}
    expected = texts("cpu", SAMPLINGS["greedy"], **keys)
    with emulated_cards():
        assert texts("cuda", SAMPLINGS["greedy"], **keys) == expected


def test_target_and_draft_may_have_a_card_each() -> None:
    keys = {"speculation.gamma": 4}
    expected = texts("cpu", SAMPLINGS["seeded"], **keys)
    with emulated_cards(2) as ledger:
        found = texts("cuda:0", SAMPLINGS["seeded"], **keys, **{"draft.device": "cuda:1"})
        assert ledger.num_replays > 20
    assert found == expected
