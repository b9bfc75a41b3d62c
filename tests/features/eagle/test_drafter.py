"""EAGLE-3 heads beside their own formulas: q of each draft token, in round after round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specserve.config.tree import config_from_keys
from specserve.drafters.after_verify import DraftAfterVerify
from specserve.drafters.registry import OpenDrafter, open_local_drafter
from specserve.features.eagle.drafter import EagleDrafter
from specserve.models.cache import PagedCache
from specserve.models.hidden_taps import HiddenTaps
from specserve.types import (
    DraftStep,
    Policy,
    Proposal,
    SparseDistribution,
    TokenRule,
    Verdict,
    VerifyStep,
    Warp,
)
from tests.support import checkpoints
from tests.support.eagle_heads import HeadSizes, ReferenceHead, write_speculators
from tests.support.engines import load_target, model_options

SIZES = HeadSizes(vocab_size=checkpoints.VOCAB)
TEMPERATURE = 5.0
"""High enough that a random head's draft tokens are accepted now and then."""
POLICY = Policy(Warp(temperature=TEMPERATURE), "speculative", 5, prompt_length=3)
GAMMA = 4
TOLERANCE = 2e-6
TOLERANCES = {"float32": TOLERANCE, "bfloat16": 1e-3}
"""By the head's number format: in bf16 its layers read pages in place where the processor can."""


def library_model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager"
    )


class Pair:
    """A target with a head, and both by the library and by formulas."""

    def __init__(
        self,
        target: Path,
        head: Path,
        sizes: HeadSizes = SIZES,
        *,
        dtype: str = "float32",
        pages: int = 40,
    ) -> None:
        assert sizes.taps is not None
        self.taps, self.tolerance = sizes.taps, TOLERANCES[dtype]
        where = model_options(pages=pages)
        self.target = load_target(target, where, taps=HiddenTaps(sizes.taps))
        self.drafter = EagleDrafter.from_files(
            head, self.target, dtype=dtype, support=sizes.draft_vocab_size
        )
        self.library = library_model(target)
        self.reference = ReferenceHead(
            head, sizes, self.library.get_input_embeddings().weight.detach()
        )

    def verify(self, *steps: VerifyStep) -> Sequence[Verdict]:
        return self.target.verify(steps)

    def draft(self, step: DraftStep) -> Proposal:
        (proposal,) = self.drafter.propose([step], math.inf)
        return proposal

    @torch.inference_mode()
    def expected_q(self, text: Sequence[int], chain: Sequence[int]) -> Tensor:
        """Return q after a text and after each token of a chain, by formulas alone."""
        out = self.library(torch.tensor([text[:-1]]), output_hidden_states=True)
        # `hidden_states[i]` is the input of layer i; of the last one the output is normed.
        taps = torch.cat([out.hidden_states[i][0] for i in self.taps], dim=-1)
        return (self.reference.draft(text, taps, chain) / TEMPERATURE).softmax(-1)

    def check(self, proposal: Proposal, text: Sequence[int]) -> None:
        """Assert that q of the proposal after a text is the expected one."""
        assert len(proposal.tokens) == GAMMA
        assert proposal.q is not None
        expected = self.expected_q(text, proposal.tokens[:-1]).numpy()
        dense = np.zeros_like(expected)
        np.put_along_axis(dense, proposal.q.ids, proposal.q.probs, axis=1)
        np.testing.assert_allclose(dense, expected, atol=self.tolerance)


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four_layers("phi3", tmp_path_factory.mktemp("phi3"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four_layers("llama", tmp_path_factory.mktemp("llama"))


def four_layers(name: str, directory: Path) -> Path:
    """Write a checkpoint whose last tapped layer is not the last one.

    The library shows the last one's output after its norm.
    """
    config = checkpoints.CONFIGS[name]()
    config.num_hidden_layers = 4
    return checkpoints.write(config, directory / "target")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speculators(tmp_path_factory.mktemp("heads") / "head", SIZES)


def run_rounds(pair: Pair, seq_id: int, text: list[int], *, num: int = 5) -> int:
    """Run rounds, check q of each, and return how many draft tokens were accepted."""
    accepted = start = draft_start = 0
    drafts: tuple[int, ...] = ()
    q: SparseDistribution | None = None
    for _ in range(num):
        step = VerifyStep(seq_id, start, tuple(text[start:]), drafts, q, POLICY)
        (verdict,) = pair.verify(step)
        start = len(text) + verdict.accepted
        text += [*drafts[: verdict.accepted], verdict.next_token]
        accepted += verdict.accepted
        proposal = pair.draft(
            DraftStep(seq_id, draft_start, tuple(text[draft_start:]), GAMMA, POLICY)
        )
        pair.check(proposal, text)
        assert proposal.num_cached <= len(text), "rows from the head's own states were kept"
        drafts, q, draft_start = proposal.tokens, proposal.q, proposal.num_cached
    return accepted


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("phi3", "float32"), ("llama", "float32"), ("llama", "bfloat16")],
    ids=["library", "fused", "bf16"],
)
def test_q_is_the_heads_own_in_every_round(
    architecture: str, dtype: str, head: Path, request: pytest.FixtureRequest
) -> None:
    pair = Pair(request.getfixturevalue(architecture), head, dtype=dtype)
    accepted = sum(run_rounds(pair, i, [7 + i, 8, 9, *range(20, 40 + 3 * i)]) for i in range(4))
    assert accepted > 0, "no row of a draft token was computed again from the target's state"
    pair.drafter.release(range(4))
    assert pair.drafter.runner.cache.num_used == 0


@pytest.mark.parametrize(
    "sizes",
    [
        HeadSizes(vocab_size=checkpoints.VOCAB, norm_before_residual=True, taps=(0, 2, 3)),
        HeadSizes(vocab_size=checkpoints.VOCAB, draft_vocab_size=checkpoints.VOCAB, taps=(3, 1, 2)),
        HeadSizes(vocab_size=checkpoints.VOCAB, has_embedding=False, kv_heads=4),
        HeadSizes(vocab_size=checkpoints.VOCAB, hidden_size=32, intermediate_size=64, num_heads=2),
        HeadSizes(vocab_size=checkpoints.VOCAB, num_layers=3),
    ],
    ids=[
        "norm before the residual",
        "whole vocabulary",
        "the target's embedding",
        "narrower",
        "three layers",
    ],
)
def test_every_variant_computes_what_its_formulas_say(
    llama: Path, tmp_path: Path, sizes: HeadSizes
) -> None:
    pair = Pair(llama, write_speculators(tmp_path / "head", sizes), sizes)
    run_rounds(pair, 1, list(range(30, 60)), num=3)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_prompts_in_chunks_and_in_company_give_the_same_q(
    llama: Path, head: Path, dtype: str
) -> None:
    """Verify two prompts together, one in chunks, and draft for both at once."""
    pair = Pair(llama, head, dtype=dtype)
    texts = [list(range(20, 70)), list(range(90, 125))]
    pair.verify(
        VerifyStep(0, 0, tuple(texts[0][:33]), (), None, POLICY, needs_verdict=False),
        VerifyStep(1, 0, tuple(texts[1][:5]), (), None, POLICY, needs_verdict=False),
    )
    pair.draft(DraftStep(0, 0, tuple(texts[0][:20]), 0, POLICY))
    verdicts = pair.verify(
        VerifyStep(0, 33, tuple(texts[0][33:]), (), None, POLICY),
        VerifyStep(1, 5, tuple(texts[1][5:]), (), None, POLICY),
    )
    for text, verdict in zip(texts, verdicts, strict=True):
        text.append(verdict.next_token)
    proposals = pair.drafter.propose(
        [
            DraftStep(0, 20, tuple(texts[0][20:]), GAMMA, POLICY),
            DraftStep(1, 0, tuple(texts[1]), GAMMA, POLICY),
        ],
        math.inf,
    )
    for text, proposal in zip(texts, proposals, strict=True):
        pair.check(proposal, text)


def prefill(pair: Pair, seq_id: int, text: Sequence[int]) -> tuple[list[int], Proposal]:
    (verdict,) = pair.verify(VerifyStep(seq_id, 0, tuple(text), (), None, POLICY))
    whole = [*text, verdict.next_token]
    return whole, pair.draft(DraftStep(seq_id, 0, tuple(whole), GAMMA, POLICY))


def test_a_prompt_that_both_prefix_caches_have_costs_no_acceptance(llama: Path, head: Path) -> None:
    pair = Pair(llama, head)
    text = list(range(20, 60))
    prefill(pair, 0, text)
    whole, proposal = prefill(pair, 1, [*text, 7, 8])
    assert pair.target.runner.cache.prefix_hits == 32
    pair.check(proposal, whole)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_positions_whose_states_never_arrive_are_not_attended_to(
    llama: Path, head: Path, dtype: str
) -> None:
    """Lose the head's pages of a prompt that the target still has.

    The head then sees the text from the first position that the target computes, and no other.
    """
    pair = Pair(llama, head, dtype=dtype)
    text = list(range(20, 60))
    prefill(pair, 0, text)
    cache = pair.drafter.runner.cache
    pair.drafter.release([0])
    assert isinstance(cache, PagedCache)
    cache.resize(cache.num_pages)
    whole, proposal = prefill(pair, 1, [*text, 7, 8])
    assert pair.target.runner.cache.prefix_hits == 32
    assert proposal.q is not None
    out = pair.library(torch.tensor([whole[:-1]]), output_hidden_states=True)
    taps = torch.cat([out.hidden_states[i][0] for i in pair.taps], dim=-1).detach()
    logits = pair.reference.draft(whole[32:], taps[32:], proposal.tokens[:-1])
    dense = np.zeros(logits.shape)
    np.put_along_axis(dense, proposal.q.ids, proposal.q.probs, axis=1)
    expected = (logits / TEMPERATURE).softmax(-1).numpy()
    np.testing.assert_allclose(dense, expected, atol=pair.tolerance)


def test_states_are_dropped_with_their_sequences(llama: Path, head: Path) -> None:
    pair = Pair(llama, head)
    prefill(pair, 3, list(range(20, 60)))
    pair.drafter.release([3])
    pair.target.release([3])
    assert 3 not in pair.drafter._target_states.arrived
    assert pair.drafter.runner.cache.num_used == 0


def test_a_grammars_tokens_are_drafted_though_the_head_does_not_know_them(
    llama: Path, head: Path
) -> None:
    """Allow only tokens that the head lacks: q is finite, and the tokens are among them."""
    pair = Pair(llama, head)
    known = set(pair.reference.target_ids.tolist())
    lacking = tuple(token for token in range(checkpoints.VOCAB) if token not in known)[:5]
    policy = Policy(Warp(rule=TokenRule(0, (), (), lacking)), "speculative", 5, prompt_length=3)
    (verdict,) = pair.verify(VerifyStep(0, 0, (20, 21, 22), (), None, policy))
    proposal = pair.draft(DraftStep(0, 0, (20, 21, 22, verdict.next_token), GAMMA, policy))
    assert set(proposal.tokens) <= set(lacking)
    assert proposal.q is not None
    np.testing.assert_allclose(proposal.q.probs.sum(1), 1, rtol=1e-5)


def test_drafting_after_each_pass_gives_the_same_q(
    llama: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft as a worker does, which catches up with a long prompt over several passes."""
    monkeypatch.setattr("specserve.drafters.after_verify.MAX_CATCH_UP", 24)
    pair = Pair(llama, head)
    after_verify = DraftAfterVerify(pair.drafter, pair.target.runner.cache)
    text, start, checked = list(range(20, 90)), 0, 0
    drafts: tuple[int, ...] = ()
    q: SparseDistribution | None = None
    for _ in range(8):
        step = VerifyStep(3, start, tuple(text[start:]), drafts, q, POLICY, gamma=GAMMA)
        verdicts = pair.verify(step)
        start = len(text) + verdicts[0].accepted
        text += [*drafts[: verdicts[0].accepted], verdicts[0].next_token]
        drafts, q = (), None
        for prepared in after_verify.draft_after([step], verdicts):
            pair.check(prepared.proposal, text)
            drafts, q, checked = prepared.proposal.tokens, prepared.proposal.q, checked + 1
    assert 3 <= checked < 8, "it drafted before it had caught up, or never did"
    after_verify.release([3])
    assert pair.drafter.runner.cache.num_used == 0


def test_opened_beside_its_target_it_copies_where_a_text_repeats_itself(
    llama: Path, head: Path
) -> None:
    """End a text as it ended before, and then as it never did: the head goes on."""
    pair = Pair(llama, head)
    keys = {"draft.dtype": "float32", "draft.support": SIZES.draft_vocab_size}
    config = {"target.path": str(llama), "draft.kind": "eagle", "draft.path": str(head), **keys}
    opened = open_local_drafter(config_from_keys(config), pair.target)
    assert isinstance(opened, OpenDrafter)
    assert isinstance(opened.drafter, EagleDrafter)
    pair.drafter = opened.drafter
    text = [*range(20, 60), 24, 25]
    pair.verify(VerifyStep(0, 0, tuple(text), (), None, POLICY))
    proposal = pair.draft(DraftStep(0, 0, tuple(text), GAMMA, POLICY))
    assert proposal.tokens == (26, 27, 28, 29)
    assert proposal.q is None, "copies are certain"
    assert proposal.num_cached == len(text)
    text += [26, 27, 7]
    pair.verify(VerifyStep(0, 42, tuple(text[42:]), (), None, POLICY))
    pair.check(pair.draft(DraftStep(0, 42, tuple(text[42:]), GAMMA, POLICY)), text)
    pair.drafter.release([0])
    repeated, constrained = [*range(20, 60), 24, 25], replace(POLICY, constrained=True)
    pair.verify(VerifyStep(1, 0, tuple(repeated), (), None, POLICY))
    pair.check(pair.draft(DraftStep(1, 0, tuple(repeated), GAMMA, constrained)), repeated)
    pair.drafter.release([1])
    assert pair.drafter.copies is not None
    assert pair.drafter.copies.num_cached(0) == 0
    assert pair.drafter.runner.cache.num_used == 0
