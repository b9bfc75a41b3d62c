"""P-EAGLE heads beside their own formulas: all draft tokens of a proposal come from one pass."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve import LLM, Sampling
from specserve.drafters.registry import OpenDrafter
from specserve.features.eagle.drafter import EagleDrafter
from specserve.types import DraftStep, Policy, Proposal, VerifyStep, Warp
from tests.features.eagle.test_apart import PAGES, open_apart, open_target, requests_for
from tests.features.eagle.test_drafter import (
    GAMMA,
    POLICY,
    TEMPERATURE,
    TOLERANCE,
    Pair,
    run_rounds,
)
from tests.support import checkpoints
from tests.support.eagle_heads import HeadSizes, write_specforge, write_speculators
from tests.support.engines import GREEDY, Engine, RandomPacer
from tests.support.local_worker import run_apart, run_together

MASK = 35
"""The mask's token, which also stands in texts below."""
SIZES = HeadSizes(vocab_size=checkpoints.VOCAB, num_layers=3, mask_token=MASK)


class BlockPair(Pair):
    """A target with a P-EAGLE head, and both by the library and by formulas."""

    def __init__(self, target: Path, head: Path, sizes: HeadSizes = SIZES) -> None:
        super().__init__(target, head, sizes)
        self.num_passes = 0
        runner: Any = self.drafter.runner
        network = runner.network
        run = network.logits

        def count(*arguments: Any) -> Tensor:
            self.num_passes += 1
            logits: Tensor = run(*arguments)
            return logits

        network.logits = count

    @torch.inference_mode()
    def block_logits(self, text: Sequence[int], num_drafted: int) -> Tensor:
        out = self.library(torch.tensor([text[:-1]]), output_hidden_states=True)
        taps = torch.cat([out.hidden_states[i][0] for i in self.taps], dim=-1)
        return self.reference.draft_block(text, taps, num_drafted=num_drafted)

    def expected_q(self, text: Sequence[int], chain: Sequence[int]) -> Tensor:
        return (self.block_logits(text, len(chain) + 1) / TEMPERATURE).softmax(-1)

    def prefill(self, seq_id: int, text: Sequence[int], policy: Policy = POLICY) -> list[int]:
        """Verify a prompt, and return it with the token after it."""
        (verdict,) = self.verify(VerifyStep(seq_id, 0, tuple(text), (), None, policy))
        return [*text, verdict.next_token]


def dense(proposal: Proposal) -> Any:
    """Return q as [tokens, vocab]."""
    assert proposal.q is not None
    q = np.zeros((len(proposal.tokens), checkpoints.VOCAB))
    np.put_along_axis(q, proposal.q.ids, proposal.q.probs, axis=1)
    return q


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = checkpoints.CONFIGS["llama"]()
    settings.num_hidden_layers = 4
    target = checkpoints.write(settings, tmp_path_factory.mktemp("llama") / "target")
    checkpoints.add_tokenizer(target)
    return target


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speculators(tmp_path_factory.mktemp("heads") / "head", SIZES)


@pytest.mark.parametrize("write", [write_specforge, write_speculators])
@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        replace(SIZES, num_layers=1, norm_before_residual=True),
        replace(SIZES, has_embedding=False, draft_vocab_size=checkpoints.VOCAB),
    ],
    ids=["three layers", "norm before the residual", "the target's embedding"],
)
def test_q_of_every_token_is_that_of_one_pass_over_masks(
    llama: Path, tmp_path: Path, write: Callable[..., Path], sizes: HeadSizes
) -> None:
    """Check round after round: keys or states that a mask left behind would change the next."""
    keys = {"norm_before_residual": True} if sizes.norm_before_residual else {}
    pair = BlockPair(llama, write(tmp_path / "head", sizes, **keys), sizes)
    texts = [[7 + i, MASK, 9, *range(20, 40 + 3 * i), MASK] for i in range(3)]
    accepted = sum(run_rounds(pair, i, text) for i, text in enumerate(texts))
    assert accepted > 0
    assert pair.num_passes == 15, "a proposal takes one pass"
    pair.drafter.release(range(3))
    assert pair.drafter.runner.cache.num_used == 0


def test_uneven_gammas_share_the_pass_and_the_masks_leave_the_cache(
    llama: Path, head: Path
) -> None:
    pair, gammas = BlockPair(llama, head), (2, 5, 0, 1)
    texts = [pair.prefill(i, range(20 + i, 50 + 4 * i)) for i in range(4)]
    steps = [
        DraftStep(i, 0, tuple(text), gamma, POLICY)
        for i, (text, gamma) in enumerate(zip(texts, gammas, strict=True))
    ]
    proposals, cache = pair.drafter.propose(steps, math.inf), pair.drafter.runner.cache
    assert pair.num_passes == 1
    assert tuple(len(each.tokens) for each in proposals) == gammas
    for text, gamma, proposal in zip(texts, gammas, proposals, strict=True):
        assert proposal.num_cached == cache.length(proposal.seq_id) == len(text)
        if gamma:
            expected = (pair.block_logits(text, gamma) / TEMPERATURE).softmax(-1).numpy()
            np.testing.assert_allclose(dense(proposal), expected, atol=TOLERANCE)
    cache.check()
    assert cache.num_used == sum(-(-len(text) // cache.page_size) for text in texts)
    # Another gamma draws the same tokens, as many as are wanted.
    longer = pair.drafter.propose([replace(steps[0], gamma=4)], math.inf)[0]
    assert longer.tokens[:2] == proposals[0].tokens
    expected = (pair.block_logits(texts[0], 4) / TEMPERATURE).softmax(-1).numpy()
    np.testing.assert_allclose(dense(longer), expected, atol=TOLERANCE)
    shorter = pair.drafter.propose([replace(steps[0], gamma=3)], math.inf)[0]
    assert shorter.tokens == longer.tokens[:3]
    assert pair.num_passes == 2, "what is there is not drawn again"


def test_penalties_see_the_tokens_drawn_before_in_the_same_pass(llama: Path, head: Path) -> None:
    pair = BlockPair(llama, head)
    policy = Policy(Warp(temperature=0.3, presence_penalty=1.5), "speculative", 8, prompt_length=30)
    text = pair.prefill(0, range(20, 50), policy)
    proposal = pair.draft(DraftStep(0, 0, tuple(text), GAMMA, policy))
    logits = pair.block_logits(text, GAMMA).numpy().copy()
    for depth in range(GAMMA):
        logits[depth, sorted({text[-1], *proposal.tokens[:depth]})] -= 1.5
    expected = torch.from_numpy(logits / 0.3).softmax(-1).numpy()
    np.testing.assert_allclose(dense(proposal), expected, atol=1e-5)
    assert pair.num_passes == 1


LLM_KEYS: dict[str, Any] = {
    "target.dtype": "float32",
    "target.threads": 1,
    "draft.dtype": "float32",
    "cache.pages": 60,
    "speculation.gamma": 3,
}


def test_grammars_mask_each_row_and_the_text_is_the_targets_own(llama: Path, head: Path) -> None:
    pattern = "(ab|cde|f){3}-[0-9]{4}-(xyz|w)+"
    wanted = [
        Sampling(max_tokens=24, temperature=0, guided={"regex": pattern}),
        Sampling(max_tokens=24, temperature=0, ignore_eos=True),
        Sampling(max_tokens=24, temperature=1, seed=3, guided={"regex": pattern}),
    ]
    prompts = [tuple(range(20, 50 + i)) for i in range(3)]
    with LLM(llama, **LLM_KEYS | {"draft.kind": "none"}) as plain:
        expected = [output.token_ids for output in plain.generate(prompts, wanted)]
    with LLM(llama, **LLM_KEYS | {"draft.kind": "eagle", "draft.path": str(head)}) as llm:
        outputs = llm.generate(prompts, wanted)
    assert [output.token_ids for output in outputs] == expected
    stats = [output.stats for output in outputs]
    assert all(each is not None and each.drafted for each in stats)
    constrained = stats[0]
    assert constrained is not None
    assert constrained.accepted >= 3, "dashes are forced, and cost no acceptance"


def test_apart_it_drafts_what_it_drafts_together_and_says_that_it_does_not_anticipate(
    llama: Path, head: Path, caplog: pytest.LogCaptureFixture
) -> None:
    requests = requests_for(warp=Warp(temperature=3.0))
    together = open_target(llama)
    beside = EagleDrafter.from_files(head, together, dtype="float32")
    own = OpenDrafter(beside, context=beside.context, runners=(beside.runner,), fanout=None)
    expected = run_together(together, own, requests, gamma=4, max_gamma=4)
    model = open_target(llama)
    with caplog.at_level(logging.INFO, "specserve.features.eagle.opening"):
        apart = open_apart(llama, head, model)
    assert "drafts in one pass and does not anticipate" in caplog.text
    run, _ = run_apart(model, apart, requests, gamma=4, max_gamma=4)
    assert run.texts == expected.texts
    assert run.accepted > 0
    assert not any(answer.stats.anticipated for answer in run.answers if answer.stats)


@pytest.mark.parametrize("verifier", ["speculative", "block", "coupled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_are_the_targets_own(llama: Path, head: Path, verifier: str, dtype: str) -> None:
    requests = requests_for(warp=Warp() if verifier == "coupled" else GREEDY, verifier=verifier)
    plain = Engine(llama, pages=PAGES, dtype=dtype).run(requests, gamma=0)
    model = open_target(llama, dtype)
    drafter = EagleDrafter.from_files(head, model, dtype=dtype)
    own = OpenDrafter(drafter, context=drafter.context, runners=(drafter.runner,), fanout=None)
    run = run_together(
        model,
        own,
        requests,
        pacer=RandomPacer(max_gamma=5, seed=1),
        gamma=None,
        max_gamma=5,
    )
    assert run.texts == plain.texts
    assert run.drafted > 0
    assert own.num_pages_used == model.runner.cache.num_used == 0
