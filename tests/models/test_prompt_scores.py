"""Logprobs of a prompt equal the library's log_softmax, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specserve.models.network import LibraryNetwork
from specserve.models.target import TargetModel
from specserve.sampling.distribution import score
from specserve.types import Policy, PromptLogprobs, PromptScoring, Verdict, VerifyStep, Warp
from tests.support import checkpoints
from tests.support.engines import load_target, model_options

TOLERANCE = 1e-4
"""Of a logprob at fp32, as everywhere where our passes are compared with the library's."""
PROMPT = tuple(np.random.default_rng(1).integers(3, checkpoints.VOCAB, 70).tolist())


def own_policy(prompt: Sequence[int]) -> Policy:
    return Policy(Warp(temperature=0.3, top_k=1), "block", 1, len(prompt))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scores")


def checkpoint(root: Path, name: str) -> Path:
    return root / name if (root / name).exists() else checkpoints.make(name, root / name)


def library_logprobs(directory: Path, prompt: Sequence[int]) -> Tensor:  # [tokens - 1, vocab]
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1)


def step(
    seq_id: int, prompt: Sequence[int], start: int, stop: int, *, num_top: int = 3
) -> VerifyStep:
    """Return the step that computes a chunk of a prompt and asks for its logprobs."""
    after = prompt[stop] if stop < len(prompt) else None
    return VerifyStep(
        seq_id,
        start,
        tuple(prompt[start:stop]),
        (),
        None,
        own_policy(prompt),
        needs_verdict=after is None,
        scoring=PromptScoring(num_top, after),
    )


def scores_of(verdicts: Sequence[Verdict]) -> PromptLogprobs:
    parts = [verdict.prompt_logprobs for verdict in verdicts]
    return PromptLogprobs.join([part for part in parts if part is not None])


def in_chunks(model: TargetModel, ends: Sequence[int], *, seq_id: int = 0) -> PromptLogprobs:
    bounds = pairwise((0, *ends, len(PROMPT)))
    verdicts = [model.verify([step(seq_id, PROMPT, *bound)])[0] for bound in bounds]
    assert [verdict.is_decision for verdict in verdicts] == [False] * len(ends) + [True]
    model.release([seq_id])
    return scores_of(verdicts)


def assert_equal(scores: PromptLogprobs, expected: Tensor, prompt: Sequence[int]) -> None:
    """Check tokens, ranks and alternatives against rows of log_softmax."""
    tokens = torch.tensor(prompt[1:])
    own = expected.gather(1, tokens[:, None])
    assert (scores.start, scores.stop) == (1, len(prompt))
    np.testing.assert_allclose(scores.token, own[:, 0].numpy(), atol=TOLERANCE)
    top, _ = expected.topk(scores.top.shape[1])
    np.testing.assert_allclose(scores.top, top.numpy(), atol=TOLERANCE)
    named = expected.gather(1, torch.from_numpy(scores.top_ids.astype(np.int64)))
    np.testing.assert_allclose(scores.top, named.numpy(), atol=TOLERANCE)
    # A rank lies between the counts of tokens that are likelier beyond doubt, and perhaps.
    ranks = scores.rank.astype(np.int64)
    assert ((expected > own + TOLERANCE).sum(-1).numpy() + 1 <= ranks).all()
    assert ((expected > own - TOLERANCE).sum(-1).numpy() >= ranks).all()


@pytest.mark.parametrize("ends", [(), (16, 32), (1, 17, 69), (23,)])
def test_a_prompt_in_any_chunks_has_the_library_s_logprobs(root: Path, ends: Sequence[int]) -> None:
    directory = checkpoint(root, "llama")
    model = load_target(directory, model_options())
    assert_equal(in_chunks(model, ends), library_logprobs(directory, PROMPT), PROMPT)


@pytest.mark.parametrize("name", checkpoints.ARCHITECTURES)
def test_every_architecture_has_the_library_s_logprobs_slice_by_slice(
    root: Path, name: str
) -> None:
    directory = checkpoint(root, name)
    model, sizes = load_target(directory, model_options()), []

    def score_slice(logits: Tensor, tokens: Tensor, num_top: int) -> PromptLogprobs:
        sizes.append(len(logits))
        return score(logits, tokens, num_top)

    with (
        patch("specserve.models.runner.MAX_READ_ROWS", 13),
        patch("specserve.models.prompt_scores.score", score_slice),
    ):
        assert_equal(in_chunks(model, (40,)), library_logprobs(directory, PROMPT), PROMPT)
    assert sizes == [13, 13, 13, 1, 13, 13, 3]


def test_the_layers_of_a_library_s_model_run_once_however_many_slices_there_are(
    root: Path,
) -> None:
    model, passes = load_target(checkpoint(root, "gpt2"), model_options()), []
    network = model.runner.network
    assert isinstance(network, LibraryNetwork)
    network.module.transformer.h[0].register_forward_hook(lambda *call: passes.append(1))
    with patch("specserve.models.runner.MAX_READ_ROWS", 13):
        in_chunks(model, ())
    assert len(passes) == 1


def test_cached_pages_are_not_used_for_a_scored_prompt_and_its_own_are_found_by_others(
    root: Path,
) -> None:
    directory = checkpoint(root, "llama")
    model = load_target(directory, model_options())
    cache = model.runner.cache
    plain = VerifyStep(0, 0, PROMPT, (), None, own_policy(PROMPT))
    (expected,) = model.verify([plain])
    scores = in_chunks(model, (32,), seq_id=1)
    assert cache.prefix_hits == 0
    assert_equal(scores, library_logprobs(directory, PROMPT), PROMPT)
    model.release([0, 1])
    fresh = load_target(directory, model_options())
    in_chunks(fresh, (), seq_id=2)
    (found,) = fresh.verify([VerifyStep(3, 0, PROMPT, (), None, own_policy(PROMPT))])
    assert fresh.runner.cache.prefix_hits == 64
    assert found.next_token == expected.next_token


def test_scored_prompts_and_others_share_a_pass_and_change_nothing_for_one_another(
    root: Path,
) -> None:
    directory = checkpoint(root, "llama")
    prompts = [PROMPT[first:stop] for first, stop in ((0, 40), (5, 36), (9, 10), (20, 70))]
    plain = [VerifyStep(i, 0, one, (), None, own_policy(one)) for i, one in enumerate(prompts)]
    drafted = VerifyStep(1, 0, prompts[1], (5, 6), None, own_policy(prompts[1]))
    alone = load_target(directory, model_options()).verify([plain[0], drafted, *plain[2:]])
    model = load_target(directory, model_options())
    together = list(
        model.verify(
            [
                step(0, prompts[0], 0, 40, num_top=2),
                drafted,
                step(2, prompts[2], 0, 1, num_top=5),
                step(3, prompts[3], 0, 30, num_top=0),
            ]
        )
    )
    assert [verdict.next_token for verdict in together[:3]] == [
        verdict.next_token for verdict in alone[:3]
    ]
    assert together[1].prompt_logprobs is None
    assert not together[3].is_decision
    together[3:] = [together[3], *model.verify([step(3, prompts[3], 30, 50, num_top=0)])]
    for i, verdicts, num_top in ((0, together[:1], 2), (3, together[3:], 0)):
        scores = scores_of(verdicts)
        assert scores.top.shape[1] == num_top
        assert_equal(scores, library_logprobs(directory, prompts[i]), prompts[i])
    single = together[2].prompt_logprobs
    assert single is not None
    assert single.top.shape == (0, 5)
