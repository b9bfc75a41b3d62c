"""Draft with an EAGLE-3 head: layers over the target's hidden states, with a cache of its own.

It drafts as a model does, token by token, or in one pass if it is a P-EAGLE head. What is added is
where its rows get their states from, and that rows of draft tokens are computed again once the
target's own states are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.config.tree import Config
from specserve.drafters.neural.draft_state import DraftTask
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.ngram.drafter import NgramDrafter
from specserve.features.eagle.block_drafts import (
    BlockDrafting,
    MaskRow,
    drop_short_drafts,
    mask_row,
)
from specserve.features.eagle.checkpoint import MASK_HIDDEN, EagleWeights
from specserve.features.eagle.head_config import EagleInfo
from specserve.features.eagle.head_options import HeadOptions, find_head
from specserve.features.eagle.layer import KEY_PADDING
from specserve.features.eagle.network import EagleNetwork, EagleProjection
from specserve.features.eagle.states import TargetStates
from specserve.grammar.matcher import GrammarCompiler
from specserve.grammar.sequences import GrammarStates
from specserve.models.attention import Attention
from specserve.models.attention_choice import open_compiled
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.embedding import load_embedding
from specserve.models.checkpoints.widened_copy import target_checkpoint
from specserve.models.device_formats import resolve_dtype, runs_compiled
from specserve.models.hidden_taps import HiddenRows
from specserve.models.layers import PrivateWeights, linear_weights
from specserve.models.runner import Runner
from specserve.models.target import TargetModel
from specserve.types import DraftStep, ModelInfo, Proposal, Step


class EagleDrafter:
    """A drafter that runs a head on the states of a target, which `receive_hidden` brings.

    Implements `base.ForkableDrafter` by a `NeuralDrafter`.
    """

    def __init__(
        self, runner: Runner, states: TargetStates, mask: MaskRow | None = None, **options: Any
    ) -> None:
        """Create a drafter; `options` are as for `NeuralDrafter`.

        With a mask row it drafts all tokens in one pass.
        """
        self.runner, self._target_states = runner, states
        # Drafts where it finds a match, in place of the head. Its outcomes are not forecast.
        self.copies: NgramDrafter | None = None
        self._drafter = NeuralDrafter(
            runner,
            begin=self._with_loose_rows,
            draw_all=None if mask is None else self._draw_block,
            **options,
        )
        self.context, self.support = self._drafter.context, self._drafter.support
        self.forecast_outcomes, self.fork = self._drafter.forecast_outcomes, self._drafter.fork
        self._block = (
            None
            if mask is None
            else BlockDrafting(
                runner, states, mask, self._drafter.constrained, support=self.support
            )
        )
        # Rows of each sequence that were computed when it had all states that they read.
        self._num_certain: dict[int, int] = {}
        runner.on_written = self._on_written

    @classmethod
    def from_config(cls, config: Config, target: TargetModel) -> EagleDrafter:
        """Open the head of a config beside its target, which hands its hidden states over."""
        return cls.from_files(
            find_head(config),
            target,
            dtype=config.draft.dtype,
            support=config.draft.support,
            kernel=config.weights.kernel,
        )

    @classmethod
    def from_files(
        cls,
        directory: Path,
        target: TargetModel,
        *,
        dtype: str = "auto",
        support: int = 64,
        pages: int | None = None,  # None: as many as the target's
        kernel: str = "auto",
    ) -> EagleDrafter:
        """Open a head that has been checked to be of this target, in the target's process."""
        network = target.network
        assert network is not None, "the config has been checked"
        drafter = cls.open(
            directory,
            HeadOptions.beside(target, dtype=dtype, support=support, pages=pages, kernel=kernel),
            target_embedding=lambda dtype: network.embedding,
            grammar_compiler=target.grammar_states.grammar_compiler,
        )
        target.on_hidden = drafter.receive_hidden
        return drafter

    @classmethod
    def apart(
        cls, config: Config, target: ModelInfo, grammar_compiler: GrammarCompiler | None
    ) -> EagleDrafter:
        """Open the head of a config on a device of its own.

        Of the target's files it reads the embedding, if the head has none of its own.
        """
        return cls.open(
            find_head(config),
            HeadOptions.apart(config, target),
            target_embedding=lambda dtype: load_embedding(target_checkpoint(config), dtype=dtype),
            grammar_compiler=grammar_compiler,
        )

    @classmethod
    def open(
        cls,
        directory: Path,
        options: HeadOptions,
        *,
        target_embedding: Callable[[torch.dtype], Tensor],
        grammar_compiler: GrammarCompiler | None = None,
    ) -> EagleDrafter:
        """Open a head; it asks for the target's embedding only if it has none of its own."""
        info, device = EagleInfo.from_directory(directory), options.device
        weights, dtype = EagleWeights(directory, info), resolve_dtype(options.dtype, device)
        cache = _make_cache(options, info, dtype)
        embedding = (
            weights.read("embed_tokens.weight").to(device, dtype)
            if "embed_tokens.weight" in weights
            else target_embedding(dtype).to(device)
        )
        with linear_weights(PrivateWeights(options.kernel)):
            network = EagleNetwork(
                weights,
                cache,
                embedding=embedding,
                attention=_open_attention(options, info, dtype),
                context=options.context,
            )
            projection = EagleProjection(weights, dtype=dtype, device=device)
        states, mask = TargetStates(cache, projection), None
        if info.mask_token is not None:
            mask = mask_row(info.mask_token, weights.read(MASK_HIDDEN), states)
        return cls(
            Runner(network, cache, device=device),
            states,
            mask,
            vocab_size=options.vocab_size,
            target_vocab_size=options.vocab_size,
            context=options.context,
            support=options.support,
            among=network.drafted_ids,
            grammar_states=GrammarStates(grammar_compiler),
        )

    @property
    def can_anticipate(self) -> bool:
        """True if it can go on after its own draft tokens.

        A P-EAGLE head cannot: it was trained on draft tokens whose states are the target's, or on
        masks, and has no states of its own.
        """
        return self._block is None

    def receive_hidden(self, hidden: Sequence[HiddenRows]) -> None:
        """Keep new states of the target, until the steps that read them."""
        self._target_states.arrived.receive(hidden)

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """Return one proposal for each step; past the deadline, by the clock, they are shorter."""
        return self.draft(steps, lambda: self._drafter.clock() > deadline)

    def draft(
        self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]
    ) -> Sequence[Proposal]:
        """Return one proposal for each step: copied tokens where there are any, or else the head's.

        Where tokens are copied the head only computes the rows that it lacks. It drafts alone where
        the text is constrained, since copies know no grammar.
        """
        if self.copies is None:
            return self._draft(steps, should_stop)
        free = [step for step in steps if not step.policy.constrained]
        copied = {
            proposal.seq_id: proposal.tokens
            for proposal in self.copies.draft(free, should_stop)
            if proposal.tokens
        }
        drafted = self._draft(
            [replace(step, gamma=0) if step.seq_id in copied else step for step in steps],
            should_stop,
        )
        return [
            replace(proposal, tokens=copied[proposal.seq_id], q=None)
            if proposal.seq_id in copied
            else proposal
            for proposal in drafted
        ]

    def _draft(
        self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]
    ) -> Sequence[Proposal]:
        """Return the head's proposals, with the rows of their draft tokens not counted as cached.

        They were computed from the head's own states, so the next step repeats those accepted.
        """
        if self._block is not None:
            drop_short_drafts(self._drafter, steps)
        return [
            replace(proposal, num_cached=min(proposal.num_cached, step.stop))
            for step, proposal in zip(steps, self._drafter.draft(steps, should_stop), strict=True)
        ]

    def release(self, seq_ids: Sequence[int]) -> None:
        self._drafter.release(seq_ids)
        self._target_states.release(seq_ids)
        if self.copies is not None:
            self.copies.release(seq_ids)
        for seq_id in seq_ids:
            self._num_certain.pop(seq_id, None)

    def promote_branch(self, seq_id: int, branch_id: int) -> None:
        """Replace the sequence; the branch's rows after its own certain ones are computed again."""
        self._drafter.promote_branch(seq_id, branch_id)
        self._num_certain.pop(branch_id, None)

    def _on_written(self, steps: Sequence[Step]) -> None:
        if self._block is not None:
            self._block.write_states(steps)
            return
        self._target_states.store(steps)
        for step in steps:
            state = self._drafter.drafted(step.seq_id)
            assert state is not None, "a pass has tasks"
            self._num_certain[step.seq_id] = state.start

    def _draw_block(self, tasks: Sequence[DraftTask], constrained: bool) -> None:
        assert self._block is not None
        looks_back = any(task.state.policy.warp.needs_history for task in tasks)
        self._block.draw(tasks, constrained=constrained or looks_back)

    def _with_loose_rows(self, task: DraftTask) -> DraftTask:
        """Return the task, begun at the first row that the head computed from its own states.

        These are rows of a promoted branch, whose states of the target are there now. Rows of its
        draft tokens are computed again with them, from the states that they were drafted from.
        """
        prefill, seq_id = task.prefill, task.seq_id
        start = self._num_certain.get(seq_id, prefill.start)
        if start >= min(prefill.start, task.state.start):
            return task
        self._target_states.keep_own(seq_id, start)
        tokens = tuple(self.runner.cache.tokens(seq_id, start, prefill.start).tolist())
        prefill = replace(prefill, start=start, tokens=tokens + prefill.tokens)
        return replace(task, prefill=prefill, written=self.runner.positions(prefill))


def _make_cache(options: HeadOptions, info: EagleInfo, dtype: torch.dtype) -> PagedCache:
    """Return the cache of a head, whose rows also keep a state and their keys' padding."""
    layer = info.layer
    return options.make_cache(
        num_layers=info.num_layers,
        kv_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim + KEY_PADDING,
        v_head_dim=layer.head_dim,
        state_width=layer.hidden_size + 1,
        dtype=dtype,
    )


def _open_attention(options: HeadOptions, info: EagleInfo, dtype: torch.dtype) -> Attention:
    """Return the attention of a head's layers over that cache."""
    layer = info.layer
    if runs_compiled(options.kernel, dtype, options.device):
        return open_compiled(
            options.kernel,
            layer.head_dim + KEY_PADDING,
            layer.head_dim,
            shared=layer.num_attention_heads // layer.num_key_value_heads,
            page_size=options.page_size,
        )
    return options.grouped_attention()
