"""Logprobs of prompts through a whole engine: in batches, under preemption, after a crash."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specserve.errors import BadValue
from specserve.models.target import TargetModel
from specserve.types import PromptLogprobs, Request
from tests.support import checkpoints
from tests.support.engines import Answer, Engine, finish, greedy
from tests.support.fakes import FakeTarget, model_info, open_coordinator

TOLERANCE = 1e-4
RNG = np.random.default_rng(3)
SHARED = RNG.integers(3, checkpoints.VOCAB, 48).tolist()
PROMPTS = [
    (*SHARED, *RNG.integers(3, checkpoints.VOCAB, length).tolist()) for length in (40, 40, 7, 60)
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("engine") / "target")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[np.ndarray[Any, Any]]:
    """Return the library's logprob of each token of the prompts but the first."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    found = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt]), use_cache=False).logits[0, :-1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])
        found.append(own[:, 0].numpy())
    return found


def requests(*, max_tokens: int = 12) -> list[Request]:
    """Return requests that score their prompts, but for the second, which begins as they do."""
    plain = greedy(PROMPTS, max_tokens=max_tokens)
    return [
        one if i == 1 else replace(one, prompt_logprobs=2 if i else 0)
        for i, one in enumerate(plain)
    ]


def assert_scored(answers: list[Answer], expected: list[np.ndarray[Any, Any]]) -> None:
    for i, (answer, own) in enumerate(zip(answers, expected, strict=True)):
        if i == 1:
            assert not answer.prompt_parts
            continue
        scores = PromptLogprobs.join(answer.prompt_parts)
        assert scores.top.shape == (len(own), 2 if i else 0)
        np.testing.assert_allclose(scores.token, own, atol=TOLERANCE)


@pytest.mark.parametrize("max_batch_tokens", [None, 37])
def test_prompts_are_scored_among_others_that_share_pages_and_draft(
    checkpoint: Path, expected: list[np.ndarray[Any, Any]], max_batch_tokens: int | None
) -> None:
    engine = Engine(checkpoint, checkpoint)
    plain = engine.run(greedy(PROMPTS, max_tokens=12), gamma=3, max_batch_tokens=max_batch_tokens)
    run = engine.run(requests(), gamma=3, max_batch_tokens=max_batch_tokens)
    assert run.texts == plain.texts
    assert run.accepted > 0
    assert_scored(run.answers, expected)


def test_preempted_prompts_are_scored_once(
    checkpoint: Path, expected: list[np.ndarray[Any, Any]]
) -> None:
    engine = Engine(checkpoint, pages=18)
    run = engine.run(requests(max_tokens=60), max_batch_tokens=24, max_gamma=0)
    assert run.num_preempted > 0
    assert run.texts == engine.run(greedy(PROMPTS, max_tokens=60)).texts
    assert_scored(run.answers, expected)


def test_a_target_that_fails_in_the_middle_of_a_prompt_scores_it_again(
    checkpoint: Path, expected: list[np.ndarray[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, verify, num_passes = Engine(checkpoint), TargetModel.verify, 0

    def fail_at_times(target: TargetModel, steps: Any) -> Any:
        nonlocal num_passes
        verdicts = verify(target, steps)
        num_passes += bool(steps)
        if num_passes in (2, 5):
            raise RuntimeError("the card fell out")
        return verdicts

    monkeypatch.setattr(TargetModel, "verify", fail_at_times)
    run = engine.run(requests(), max_batch_tokens=50)
    assert [answer.error for answer in run.answers] == [None] * 4
    assert_scored(run.answers, expected)


def test_max_tokens_0_computes_the_prompt_and_ends_with_length(
    checkpoint: Path, expected: list[np.ndarray[Any, Any]]
) -> None:
    run = Engine(checkpoint, checkpoint).run(requests(max_tokens=0), gamma=3)
    assert run.texts == [()] * 4
    assert [answer.finish for answer in run.answers] == ["length"] * 4
    assert all(answer.stats is not None and not answer.stats.rounds for answer in run.answers)
    assert_scored(run.answers, expected)


def test_a_request_that_goes_on_elsewhere_scores_no_prompt_that_was_sent(checkpoint: Path) -> None:
    (first, *_) = requests()
    (answer,) = Engine(checkpoint).run([replace(first, generated=(5, 6))]).answers
    assert len(answer.tokens) == 10
    assert not answer.prompt_parts


def test_an_encoder_decoder_refuses_to_score_its_input() -> None:
    info = replace(model_info(), decoder_start=0)
    coordinator = open_coordinator(FakeTarget(info), None, info=info, emit=lambda chunks: None)
    (request,) = greedy([(1, 2)], max_tokens=3)
    with pytest.raises(BadValue, match="encoder-decoders"):
        coordinator.submit(replace(request, prompt_logprobs=1))


def test_an_answer_without_the_logprobs_of_the_step_is_a_failure_of_the_target() -> None:
    info = model_info()
    chunks: list[Any] = []
    coordinator = open_coordinator(FakeTarget(info), None, info=info, emit=chunks.extend)
    (request,) = greedy([(1, 2)], max_tokens=3)
    coordinator.submit(replace(request, prompt_logprobs=1))
    asyncio.run(finish(coordinator))
    assert chunks[-1].finish == "error"
    assert "are not of its step's tokens" in chunks[-1].error
