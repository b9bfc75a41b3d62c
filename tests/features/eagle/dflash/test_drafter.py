"""DFlash and DSpark drafts beside their own formulas: all tokens of a proposal from one pass."""

from __future__ import annotations

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
from specserve.config.tree import Config, config_from_keys
from specserve.drafters.registry import OpenDrafter, open_apart_drafter
from specserve.features.eagle.dflash.drafter import DFlashDrafter
from specserve.models.cache import PagedCache
from specserve.models.hidden_taps import HiddenTaps
from specserve.models.target import TargetModel
from specserve.types import (
    DraftStep,
    Policy,
    Proposal,
    SparseDistribution,
    Verdict,
    VerifyStep,
    Warp,
)
from tests.features.eagle.test_apart import requests_for
from tests.features.eagle.test_drafter import library_model
from tests.support import checkpoints
from tests.support.dflash_drafts import (
    DFlashSizes,
    ReferenceDraft,
    write_deepspec,
    write_speculators,
    write_z_lab,
)
from tests.support.engines import GREEDY, Engine, RandomPacer, load_target, model_options
from tests.support.local_worker import run_apart, run_together

TEMPERATURE = 5.0
POLICY = Policy(Warp(temperature=TEMPERATURE), "speculative", 5, prompt_length=3)
GAMMA, PAGES = 4, 60
TOLERANCES = {"float32": 2e-6, "bfloat16": 2e-3}
DFLASH = DFlashSizes()
DSPARK = DFlashSizes(markov_rank=16, from_newest=True)
VARIANTS: dict[str, tuple[Callable[..., Path], DFlashSizes]] = {
    "z-lab": (write_z_lab, DFLASH),
    "causal": (write_z_lab, replace(DFLASH, causal=True, draft_vocab_size=checkpoints.VOCAB)),
    "a window, causal": (write_z_lab, replace(DFLASH, window=12, causal_first=True)),
    "a window, both ways": (write_speculators, replace(DFLASH, window=12)),
    "fewer tokens": (write_speculators, replace(DFLASH, draft_vocab_size=120)),
    "narrower": (
        write_speculators,
        replace(DFLASH, hidden_size=32, num_heads=2, draft_vocab_size=120),
    ),
    "DeepSpec": (write_deepspec, DSPARK),
    "speculators' DSpark": (write_speculators, replace(DSPARK, draft_vocab_size=120)),
    "a Markov head, drawn as DFlash": (write_speculators, replace(DSPARK, from_newest=False)),
}


class DFlashPair:
    """A target with a draft, and both by the library and by formulas."""

    def __init__(
        self, target: Path, draft: Path, sizes: DFlashSizes, *, dtype: str = "float32"
    ) -> None:
        self.sizes, self.tolerance = sizes, TOLERANCES[dtype]
        self.target = open_target(target, sizes)
        self.drafter = DFlashDrafter.from_files(
            draft, self.target, dtype=dtype, support=sizes.draft_vocab_size or sizes.vocab_size
        )
        self.library = library_model(target)
        self.reference = ReferenceDraft(draft, sizes, self.library)
        self.num_passes = 0
        runner: Any = self.drafter.runner
        run = runner.network.logits

        def count(*arguments: Any) -> Tensor:
            self.num_passes += 1
            logits: Tensor = run(*arguments)
            return logits

        runner.network.logits = count

    def verify(self, *steps: VerifyStep) -> Sequence[Verdict]:
        return self.target.verify(steps)

    def draft(self, step: DraftStep) -> Proposal:
        (proposal,) = self.drafter.propose([step], math.inf)
        return proposal

    def prefill(self, seq_id: int, text: Sequence[int], policy: Policy = POLICY) -> list[int]:
        """Verify a prompt, and return it with the token after it."""
        (verdict,) = self.verify(VerifyStep(seq_id, 0, tuple(text), (), None, policy))
        return [*text, verdict.next_token]

    @torch.inference_mode()
    def logits(self, text: Sequence[int], chain: Sequence[int], *, first: int = 0) -> Tensor:
        out = self.library(torch.tensor([text[:-1]]), output_hidden_states=True)
        # `hidden_states[i]` is the input of layer i; of the last one the output is normed.
        taps = torch.cat([out.hidden_states[i][0] for i in self.sizes.taps], dim=-1)
        return self.reference.draft(text, taps[first:], chain, first=first)

    def check(self, proposal: Proposal, text: Sequence[int], *, first: int = 0) -> None:
        """Assert that q of the proposal after a text is the expected one."""
        assert proposal.q is not None
        logits = self.logits(text, proposal.tokens[:-1], first=first)
        expected = (logits / TEMPERATURE).softmax(-1).numpy()
        np.testing.assert_allclose(dense(proposal), expected, atol=self.tolerance)


def open_target(directory: Path, sizes: DFlashSizes, dtype: str = "float32") -> TargetModel:
    options = model_options(pages=PAGES, dtype=dtype)
    return load_target(directory, options, taps=HiddenTaps(sizes.taps))


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
def dflash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_z_lab(tmp_path_factory.mktemp("drafts") / "dflash", DFLASH)


@pytest.fixture(scope="module")
def dspark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepspec(tmp_path_factory.mktemp("drafts") / "dspark", DSPARK)


def run_rounds(pair: DFlashPair, seq_id: int, text: list[int], *, num: int = 5) -> int:
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
        assert len(proposal.tokens) == GAMMA
        pair.check(proposal, text)
        drafts, q, draft_start = proposal.tokens, proposal.q, proposal.num_cached
    return accepted


@pytest.mark.parametrize("name", VARIANTS)
def test_q_of_every_token_is_that_of_one_pass_over_a_block(
    llama: Path, tmp_path: Path, name: str
) -> None:
    """Check round after round: keys or values that a block left behind would change the next."""
    write, sizes = VARIANTS[name]
    pair = DFlashPair(llama, write(tmp_path / "draft", sizes), sizes)
    texts = [[7 + i, sizes.mask_token, 9, *range(20, 40 + 3 * i)] for i in range(3)]
    accepted = sum(run_rounds(pair, i, text) for i, text in enumerate(texts))
    assert accepted > 0
    assert pair.num_passes == 15, "a proposal takes one pass"
    pair.drafter.release(range(3))
    assert pair.drafter.runner.cache.num_used == 0


def test_in_bf16_q_is_the_drafts_own_within_its_roundings(llama: Path, dflash: Path) -> None:
    pair = DFlashPair(llama, dflash, DFLASH, dtype="bfloat16")
    run_rounds(pair, 1, list(range(30, 60)), num=3)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_uneven_gammas_share_the_pass_and_no_mask_stays_in_the_cache(
    llama: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    sizes = DFLASH if kind == "dflash" else DSPARK
    pair, gammas = DFlashPair(llama, request.getfixturevalue(kind), sizes), (2, 5, 0, 1)
    texts = [pair.prefill(i, range(20 + i, 50 + 4 * i)) for i in range(4)]
    steps = [
        DraftStep(i, 0, tuple(text), gamma, POLICY)
        for i, (text, gamma) in enumerate(zip(texts, gammas, strict=True))
    ]
    proposals, cache = pair.drafter.propose(steps, math.inf), pair.drafter.runner.cache
    assert pair.num_passes == 1
    assert tuple(len(each.tokens) for each in proposals) == gammas
    for text, gamma, proposal in zip(texts, gammas, proposals, strict=True):
        assert proposal.num_cached == len(text)
        if gamma:
            pair.check(proposal, text)
    assert isinstance(cache, PagedCache)
    cache.check()
    assert cache.num_used == sum(-(-len(text) // cache.page_size) for text in texts)
    longer = pair.draft(replace(steps[0], gamma=4))  # another block, drawn from the newest again
    pair.check(longer, texts[0])
    shorter = pair.draft(replace(steps[0], gamma=3))
    assert shorter.tokens == longer.tokens[:3]
    assert pair.num_passes == 2, "what is there is not drawn again"


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_no_more_tokens_are_drafted_than_a_block_has(
    llama: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    sizes = DFLASH if kind == "dflash" else DSPARK
    pair = DFlashPair(llama, request.getfixturevalue(kind), sizes)
    text = pair.prefill(0, range(20, 50))
    proposal = pair.draft(DraftStep(0, 0, tuple(text), 20, POLICY))
    assert len(proposal.tokens) == (7 if kind == "dflash" else 8)
    pair.check(proposal, text)


def test_prompts_in_chunks_and_in_company_give_the_same_q(llama: Path, dflash: Path) -> None:
    """Verify two prompts together, one in chunks, and draft for both at once."""
    pair = DFlashPair(llama, dflash, DFLASH)
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


def test_a_prompt_that_both_prefix_caches_have_costs_no_acceptance(
    llama: Path, dflash: Path
) -> None:
    pair = DFlashPair(llama, dflash, DFLASH)
    text = list(range(20, 60))
    whole = pair.prefill(0, text)
    pair.draft(DraftStep(0, 0, tuple(whole), GAMMA, POLICY))
    whole = pair.prefill(1, [*text, 7, 8])
    proposal = pair.draft(DraftStep(1, 0, tuple(whole), GAMMA, POLICY))
    assert pair.target.runner.cache.prefix_hits == 32
    pair.check(proposal, whole)


def test_positions_whose_states_never_arrive_are_not_seen(llama: Path, dflash: Path) -> None:
    """Lose the draft's pages of a prompt that the target still has."""
    pair = DFlashPair(llama, dflash, DFLASH)
    text = list(range(20, 60))
    whole = pair.prefill(0, text)
    pair.draft(DraftStep(0, 0, tuple(whole), GAMMA, POLICY))
    cache = pair.drafter.runner.cache
    pair.drafter.release([0])
    assert isinstance(cache, PagedCache)
    cache.resize(cache.num_pages)
    whole = pair.prefill(1, [*text, 7, 8])
    proposal = pair.draft(DraftStep(1, 0, tuple(whole), GAMMA, POLICY))
    assert pair.target.runner.cache.prefix_hits == 32
    pair.check(proposal, whole, first=32)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_penalties_see_the_tokens_drawn_before_in_the_same_pass(
    llama: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    sizes = DFLASH if kind == "dflash" else DSPARK
    pair = DFlashPair(llama, request.getfixturevalue(kind), sizes)
    policy = Policy(Warp(temperature=0.3, presence_penalty=1.5), "speculative", 8, prompt_length=30)
    text = pair.prefill(0, range(20, 50), policy)
    proposal = pair.draft(DraftStep(0, 0, tuple(text), GAMMA, policy))
    logits = pair.logits(text, proposal.tokens[:-1]).numpy().copy()
    for depth in range(GAMMA):
        logits[depth, sorted({text[-1], *proposal.tokens[:depth]})] -= 1.5
    expected = torch.from_numpy(logits / 0.3).softmax(-1).numpy()
    np.testing.assert_allclose(dense(proposal), expected, atol=1e-5)
    assert pair.num_passes == 1


def test_states_are_dropped_with_their_sequences(llama: Path, dflash: Path) -> None:
    pair = DFlashPair(llama, dflash, DFLASH)
    text = pair.prefill(3, range(20, 60))
    pair.draft(DraftStep(3, 0, tuple(text), GAMMA, POLICY))
    pair.drafter.release([3])
    assert 3 not in pair.drafter._arrived
    assert not pair.drafter._num_known
    assert pair.drafter.runner.cache.num_used == 0


LLM_KEYS: dict[str, Any] = {
    "target.dtype": "float32",
    "target.threads": 1,
    "draft.dtype": "float32",
    "cache.pages": 60,
    "speculation.gamma": 3,
}


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_grammars_mask_each_row_and_the_text_is_the_targets_own(
    llama: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    draft, pattern = request.getfixturevalue(kind), "(ab|cde|f){3}-[0-9]{4}-(xyz|w)+"
    wanted = [
        Sampling(max_tokens=24, temperature=0, guided={"regex": pattern}),
        Sampling(max_tokens=24, temperature=0, ignore_eos=True),
        Sampling(max_tokens=24, temperature=1, seed=3, guided={"regex": pattern}),
    ]
    prompts = [tuple(range(20, 50 + i)) for i in range(3)]
    with LLM(llama, **LLM_KEYS | {"draft.kind": "none"}) as plain:
        expected = [output.token_ids for output in plain.generate(prompts, wanted)]
    with LLM(llama, **LLM_KEYS | {"draft.kind": "dflash", "draft.path": str(draft)}) as llm:
        outputs = llm.generate(prompts, wanted)
    assert [output.token_ids for output in outputs] == expected
    stats = [output.stats for output in outputs]
    assert all(each is not None and each.drafted for each in stats)
    constrained = stats[0]
    assert constrained is not None
    assert constrained.accepted >= 3, "dashes are forced, and cost no acceptance"


def config(target: Path, draft: Path) -> Config:
    return config_from_keys(
        {
            "target.path": str(target),
            "draft.kind": "dflash",
            "draft.path": str(draft),
            "draft.placement": "apart",
            "draft.dtype": "float32",
            "draft.device": "cpu",
        }
    )


def test_apart_it_drafts_what_it_drafts_together_and_says_that_it_does_not_anticipate(
    llama: Path, dflash: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Read the target's embedding and vocabulary head from its files."""
    requests = requests_for(warp=Warp(temperature=3.0))
    together = open_target(llama, DFLASH)
    beside = DFlashDrafter.from_files(dflash, together, dtype="float32")
    own = OpenDrafter(beside, context=beside.context, runners=(beside.runner,), fanout=None)
    expected = run_together(together, own, requests, gamma=4, max_gamma=4)
    model = open_target(llama, DFLASH)
    with caplog.at_level("INFO", "specserve.features.eagle.opening"):
        apart = open_apart_drafter(
            config(llama, dflash), model.info, grammar_compiler=None, translation=None
        )
    assert "the DFlash draft at" in caplog.text
    assert "does not anticipate" in caplog.text
    run, _ = run_apart(model, apart, requests, gamma=4, max_gamma=4)
    assert run.texts == expected.texts
    assert run.accepted > 0
    assert not any(answer.stats.anticipated for answer in run.answers if answer.stats)


@pytest.mark.parametrize("verifier", ["speculative", "block", "coupled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_texts_are_the_targets_own(
    llama: Path, kind: str, verifier: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    draft, sizes = request.getfixturevalue(kind), DFLASH if kind == "dflash" else DSPARK
    requests = requests_for(warp=Warp() if verifier == "coupled" else GREEDY, verifier=verifier)
    plain = Engine(llama, pages=PAGES, dtype=dtype).run(requests, gamma=0)
    model = open_target(llama, sizes, dtype)
    drafter = DFlashDrafter.from_files(draft, model, dtype=dtype)
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
