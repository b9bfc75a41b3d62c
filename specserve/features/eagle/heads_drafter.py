"""Draft by heads on the hidden state of the target's last pass, in the target's process.

Exact as every drafter is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from specserve.config.tree import Config
from specserve.drafters.base import trim_to_grammar
from specserve.drafters.neural.draws import DraftSampler, DrawSpec, HostDraws, fetch
from specserve.drafters.together import cached_by_target, shareable_network
from specserve.features.eagle.heads import Heads, load_heads
from specserve.grammar.mask import TokenMask
from specserve.grammar.matcher import GrammarMatcher
from specserve.models.target import TargetModel
from specserve.sampling.penalties import History
from specserve.transfers import to_device
from specserve.types import DraftStep, Proposal, SparseDistribution


class HeadsDrafter:
    """A drafter of several heads, each of which predicts a token at its own distance.

    Each head draws independently, so q does not depend on the other draft tokens.
    """

    def __init__(self, target: TargetModel, heads: Heads, *, support: int) -> None:
        self._target, self._heads, self._network, self._support = (
            target,
            heads,
            shareable_network(target),
            support,
        )
        self.context = target.info.max_context

    @classmethod
    def from_config(cls, config: Config, target: TargetModel) -> HeadsDrafter:
        assert config.draft.path is not None, "the config has been checked"
        dtype = shareable_network(target).embedding.dtype
        heads = load_heads(Path(config.draft.path), dtype=dtype, device=target.runner.device)
        return cls(target, heads, support=config.draft.support)

    @property
    def num_heads(self) -> int:
        return self._heads.num_heads

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """Return proposals, by one pass of all heads for all sequences.

        The pass is too short to be worth interrupting at the deadline.
        """
        drafting = [step for step in steps if step.gamma and self._has_hidden(step)]
        drafted = (
            dict(zip([step.seq_id for step in drafting], self._draft(drafting), strict=True))
            if drafting
            else {}
        )
        return [cached_by_target(step, drafted.get(step.seq_id)) for step in steps]

    def release(self, seq_ids: Sequence[int]) -> None:
        """Do nothing: the target releases the hidden states."""

    def _has_hidden(self, step: DraftStep) -> bool:
        latest = self._target.latest_hidden.get(step.seq_id)
        return latest is not None and latest.stop == step.stop

    @torch.inference_mode()
    def _draft(self, steps: Sequence[DraftStep]) -> list[Proposal]:
        """Draft for all steps; every draft token is a row of one draw."""
        depths = [min(step.gamma, self.num_heads) for step in steps]
        hidden = torch.stack(
            [self._target.latest_hidden[step.seq_id].row for step in steps]
        )  # [seqs, hidden]
        ids = to_device(np.array([step.tokens[-1] for step in steps]), hidden.device)
        embedded = self._network.embed(ids)  # hidden states may lie beside logits in float32
        predicted = (
            self._heads(hidden.to(embedded.dtype), embedded).transpose(0, 1).flatten(0, 1)
        )  # [seqs * heads, hidden]
        chosen = [
            i * self.num_heads + depth for i, num in enumerate(depths) for depth in range(num)
        ]
        rows = to_device(np.array(chosen), hidden.device)
        logits = self._network.head(predicted.index_select(0, rows))[
            :, : self._target.info.vocab_size
        ]
        specs = [
            DrawSpec(step.stop, depth, 1, step.policy, self._history(step))
            for step, num in zip(steps, depths, strict=True)
            for depth in range(num)
        ]
        matchers = [
            self._target.grammar_states.advance(step, self._target.runner.cache.tokens)
            for step in steps
        ]
        ends = np.cumsum(depths).tolist()
        sampler = DraftSampler(specs, support=self._support, device=logits.device)
        sampler.draw(_mask_first_rows(matchers, depths).apply(logits))
        draws = fetch(sampler.draws)[0]
        return [
            _proposal(step, draws, slice(end - num, end), matcher)
            for step, num, end, matcher in zip(steps, depths, ends, matchers, strict=True)
        ]

    def _history(self, step: DraftStep) -> History | None:
        """Return what penalties and rules look at.

        Earlier draft tokens are left out: a head ignores them.
        """
        if not step.policy.warp.needs_history:
            return None
        cached = self._target.runner.cache.tokens(step.seq_id)[: step.stop - 1]
        return History(np.append(cached, step.tokens[-1]), step.policy.prompt_length)


def _mask_first_rows(matchers: Sequence[GrammarMatcher | None], depths: Sequence[int]) -> TokenMask:
    """Return a mask of each sequence's first row.

    A head sees no draft token before its own, so a grammar says nothing of the later rows.
    """
    starts = np.cumsum([0, *depths]).tolist()
    return TokenMask.from_rows(
        [
            (row, matcher.bits())
            for row, matcher in zip(starts, matchers, strict=False)
            if matcher is not None and matcher.bits().any()
        ]
    )


def _proposal(
    step: DraftStep, draws: HostDraws, rows: slice, matcher: GrammarMatcher | None
) -> Proposal:
    tokens, q = tuple(draws.tokens[rows]), None
    # Otherwise each token is certain, or q is not used.
    if step.policy.warp.temperature > 0 and step.policy.verifier != "coupled":
        assert draws.probs is not None, "a sampled token was drawn from probabilities"
        q = SparseDistribution(draws.ids[rows], draws.probs[rows])
    if matcher is not None:
        tokens, q = trim_to_grammar(matcher, step, tokens, q)
    return Proposal(step.seq_id, step.stop, tokens, q, step.stop)
