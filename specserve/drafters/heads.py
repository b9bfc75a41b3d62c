"""Drafters tied to the target: they use its weights, and what it knows of each sequence, in its own process. Both are exact as all are.

`layer_skip` runs some of the target's own layers on the target's own pages. A round's drafts are written where the target will write
the same positions in a moment: its step begins at the newest token, drops whatever lies there, and writes all of its layers. So nothing
that was drafted is ever attended to by a whole pass, none of it is named for others to find, and no prompt is read twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from specserve.config.tree import Config
from specserve.drafters.grammar_trim import lawful
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.neural.draws import Draws, Place, Source
from specserve.errors import UnsupportedModel
from specserve.grammar.mask import Allowed
from specserve.grammar.matcher import Parse
from specserve.models.heads import Heads, load_heads
from specserve.models.network import Lending
from specserve.models.runner import Runner
from specserve.models.skip import skipped
from specserve.models.target import TargetModel
from specserve.sampling.distribution import History
from specserve.types import DraftStep, Foreseen, Proposal, SparseRows, Verdict, VerifyStep

LONGEST_REST = 32  # passes


class SkippingDrafter:
    """Drafts on the target's pages. What a sequence's prefix holds is the whole model's, which is better than what fewer layers would have made."""

    def __init__(self, target: TargetModel, skip: Sequence[int], *, support: int) -> None:
        shared, self.context = target.runner, target.info.max_context
        runner = Runner(
            _lending(target).without(skip),
            shared.cache,
            device=shared.device,
            round_up=shared.round_up,
        )
        size = target.info.vocab_size
        self._drafter = NeuralDrafter(
            runner,
            vocab_size=size,
            target_vocab_size=size,
            context=self.context,
            support=support,
            parses=target.parses,
        )

    @classmethod
    def of(cls, config: Config, target: TargetModel) -> SkippingDrafter:
        return cls(
            target, skipped(target.num_layers, config.draft.skip), support=config.draft.support
        )

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """For sequences whose last pass was the target's, up to the newest token. All that was drafted is forgotten at once: the target
        drops it from the pages, and to go on with it later would declare it committed.
        """
        wanted = [_newest(step) for step in steps if step.gamma and self._is_held(step)]
        drafted = {
            proposal.seq_id: proposal for proposal in self._drafter.propose(wanted, deadline)
        }
        self._drafter.forget([step.seq_id for step in wanted])
        return [_held_by_target(step, drafted.get(step.seq_id)) for step in steps]

    def release(self, seq_ids: Sequence[int]) -> None:
        """The pages are the target's to release."""

    def _is_held(self, step: DraftStep) -> bool:
        """Whether the target has read all but the newest token."""
        cache = self._drafter.runner.cache
        return cache.length(step.seq_id) >= _stop(step) - 1 and cache.holds(
            step.seq_id, step.start, step.tokens[:-1]
        )


class HeadsDrafter:
    """Guesses by heads on the rows that the target kept of its last pass. Each head draws by itself, so q does not depend on the other drafts."""

    def __init__(self, target: TargetModel, heads: Heads, *, support: int) -> None:
        self._target, self._heads, self._network, self._support = (
            target,
            heads,
            _lending(target),
            support,
        )
        self.context = target.info.max_context

    @classmethod
    def of(cls, config: Config, target: TargetModel) -> HeadsDrafter:
        assert config.draft.path is not None, "the config has been checked"
        cache = target.runner.cache
        heads = load_heads(
            Path(config.draft.path), dtype=cache.keys[0].dtype, device=target.runner.device
        )
        return cls(target, heads, support=config.draft.support)

    @property
    def num_heads(self) -> int:
        return self._heads.num_heads

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """One pass of all heads for all sequences; it is too short to be worth breaking off."""
        able = [step for step in steps if step.gamma and self._is_kept(step)]
        drafted = (
            dict(zip([step.seq_id for step in able], self._drafted(able), strict=True))
            if able
            else {}
        )
        return [_held_by_target(step, drafted.get(step.seq_id)) for step in steps]

    def release(self, seq_ids: Sequence[int]) -> None:
        """The rows are the target's to release."""

    def _is_kept(self, step: DraftStep) -> bool:
        newest = self._target.newest.get(step.seq_id)
        return newest is not None and newest.stop == _stop(step)

    @torch.inference_mode()
    def _drafted(self, steps: Sequence[DraftStep]) -> list[Proposal]:
        """Every place of every sequence is a row of one draw."""
        depths = [min(step.gamma, self.num_heads) for step in steps]
        hidden = torch.stack(
            [self._target.newest[step.seq_id].row for step in steps]
        )  # [seqs, hidden]
        ids = torch.tensor([step.tokens[-1] for step in steps], device=hidden.device)
        guesses = (
            self._heads(hidden, self._network.embed(ids)).transpose(0, 1).flatten(0, 1)
        )  # [seqs * heads, hidden]
        rows = torch.tensor(
            [i * self.num_heads + depth for i, num in enumerate(depths) for depth in range(num)],
            device=hidden.device,
        )
        logits = self._network.head(guesses.index_select(0, rows))[
            :, : self._target.info.vocab_size
        ]
        places = [
            self._place(step, depth)
            for step, num in zip(steps, depths, strict=True)
            for depth in range(num)
        ]
        parses = [
            self._target.parses.follow(step, self._target.runner.cache.tokens) for step in steps
        ]
        ends = np.cumsum(depths).tolist()
        draws = Draws(places, support=self._support, device=logits.device)
        draws.draw(_firsts(parses, depths).applied(logits))
        source = draws.drawn[0].fetched()
        return [
            _proposal(step, source, slice(end - num, end), parse)
            for step, num, end, parse in zip(steps, depths, ends, parses, strict=True)
        ]

    def _place(self, step: DraftStep, depth: int) -> Place:
        return Place(_stop(step), depth, 1, step.policy, self._history(step))

    def _history(self, step: DraftStep) -> History | None:
        """Without the drafts before: a head does not know them."""
        if not step.policy.warp.has_penalties:
            return None
        read = self._target.runner.cache.tokens(step.seq_id)[: _stop(step) - 1]
        return History(np.append(read, step.tokens[-1]), step.policy.prompt_length)


@dataclass(slots=True)
class _Use:
    """Whether a sequence's proposals are any use to whoever gets them."""

    unused: int = 0  # in a row
    rest: int = 0  # passes until the next is made


class Unasked:
    """Drafts after every pass of the target, for whoever may want it. A sequence whose proposals go unused gets them ever more seldom."""

    def __init__(self, drafter: HeadsDrafter) -> None:
        self._drafter = drafter
        self._uses: dict[int, _Use] = {}

    def after(
        self, steps: Sequence[VerifyStep], verdicts: Sequence[Verdict]
    ) -> tuple[Foreseen, ...]:
        """As many tokens as there are heads, behind what each verdict makes of its sequence."""
        decided = [step for step in steps if step.decide]
        wanted = [pair for pair in zip(decided, verdicts, strict=True) if self._is_wanted(pair[0])]
        asked = [self._step(step, verdict) for step, verdict in wanted]
        proposals = self._drafter.propose(asked, math.inf)
        return tuple(
            Foreseen(step.tokens[-1], replace(one, anticipated=True))
            for step, one in zip(asked, proposals, strict=True)
            if one.tokens
        )

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._uses.pop(seq_id, None)

    def _step(self, step: VerifyStep, verdict: Verdict) -> DraftStep:
        start = step.start + len(step.tokens) + verdict.accepted
        return DraftStep(
            step.seq_id, start, (verdict.next_token,), self._drafter.num_heads, step.policy
        )

    def _is_wanted(self, step: VerifyStep) -> bool:
        use = self._uses.setdefault(step.seq_id, _Use())
        if step.drafts:
            use.unused = use.rest = 0
            return True
        if use.rest:
            use.rest -= 1
            return False
        use.rest = min(2**use.unused, LONGEST_REST) - 1
        use.unused += 1
        return True


def _lending(target: TargetModel) -> Lending:
    if target.network is None:
        raise UnsupportedModel("draft.kind layer_skip and heads need a decoder-only target")
    return target.network


def _stop(step: DraftStep) -> int:
    return step.start + len(step.tokens)


def _newest(step: DraftStep) -> DraftStep:
    return replace(step, start=_stop(step) - 1, tokens=step.tokens[-1:])


def _held_by_target(step: DraftStep, proposal: Proposal | None) -> Proposal:
    """Whatever the target holds, the drafter does: its next step need not repeat it."""
    if proposal is None or not proposal.tokens:
        return Proposal(step.seq_id, _stop(step), (), None, _stop(step))
    return replace(proposal, held=_stop(step) + len(proposal.tokens))


def _firsts(parses: Sequence[Parse | None], depths: Sequence[int]) -> Allowed:
    """A head knows no drafts but the newest token, so of each sequence's rows a grammar says something of the first alone."""
    starts = np.cumsum([0, *depths]).tolist()
    return Allowed.of(
        [
            (row, parse.bits())
            for row, parse in zip(starts, parses, strict=False)
            if parse is not None and parse.bits().any()
        ]
    )


def _proposal(step: DraftStep, source: Source, rows: slice, parse: Parse | None) -> Proposal:
    tokens, start, q = tuple(source.tokens[rows]), _stop(step), None
    if (
        step.policy.warp.temperature > 0 and step.policy.verifier != "coupled"
    ):  # else certain, or nobody asks
        assert source.probs is not None, "a sampled token was drawn from probabilities"
        q = SparseRows(source.ids[rows], source.probs[rows])
    if parse is not None:
        tokens, q = lawful(parse, step, tokens, q)
    return Proposal(step.seq_id, start, tokens, q, start)
