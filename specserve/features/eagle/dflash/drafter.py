"""Draft with a DFlash or DSpark draft: a whole proposal from one pass over a block of masks.

A mask's row sees the target's states of the text and the other rows of its block, and no token that
is drawn in the same pass. So q at each position is a function of the text and of the number of
masks alone; in DSpark a Markov head adds what the token before says, and tokens are drawn in turn.
Either way each token is drawn from the q that the proposal states, as verification needs it. Knows
no target but by its states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specserve.config.tree import Config
from specserve.drafters.neural.draft_state import DraftTask
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.neural.draws import DraftSampler, DrawSpec, fetch
from specserve.features.eagle.block_drafts import draw_rows, drop_short_drafts
from specserve.features.eagle.dflash.config import DFlashInfo
from specserve.features.eagle.dflash.network import KNOWN, LOST, DFlashNetwork, VocabularyEnds
from specserve.features.eagle.dflash.weights import DFlashWeights
from specserve.features.eagle.head_options import HeadOptions, find_head
from specserve.features.eagle.states import ArrivedStates
from specserve.grammar.matcher import GrammarCompiler
from specserve.grammar.sequences import GrammarStates
from specserve.models.checkpoints.embedding import load_embedding, load_head
from specserve.models.checkpoints.widened_copy import target_checkpoint
from specserve.models.device_formats import resolve_dtype
from specserve.models.hidden_taps import HiddenRows
from specserve.models.layers import PrivateWeights, leave_unrounded, linear_weights, make_linear
from specserve.models.layout import Writes
from specserve.models.network import ShareableNetwork
from specserve.models.runner import Runner
from specserve.models.target import TargetModel
from specserve.transfers import to_device
from specserve.types import DraftStep, ModelInfo, Proposal, Step

OpenEnds = Callable[[torch.dtype, torch.device], VocabularyEnds]
UNCHANGED = 0.0
"""What the Markov head adds to tokens that the draft does not know."""


class DFlashDrafter:
    """A drafter that runs a DFlash draft on the target's states, which `receive_hidden` brings.

    Nothing of a block stays: the next pass begins at the newest token again.
    """

    def __init__(
        self, runner: Runner, network: DFlashNetwork, info: DFlashInfo, **options: Any
    ) -> None:
        """Create a drafter; `options` are as for `NeuralDrafter`."""
        self.runner, self._network, self._info = runner, network, info
        self._arrived = ArrivedStates(network.project)
        self._drafter = NeuralDrafter(
            runner,
            begin=self._from_newest,
            draw_all=self._draw,
            among=network.drafted_ids,
            **options,
        )
        self.context, self._support = self._drafter.context, self._drafter.support
        # As `base.ForkableDrafter` has them, though without anticipation nothing is forked.
        self.forecast_outcomes, self.fork = self._drafter.forecast_outcomes, self._drafter.fork
        self.promote_branch = self._drafter.promote_branch
        # Positions of each sequence at whose end no state of the target is missing that may come.
        self._num_known: dict[int, int] = {}

    @classmethod
    def from_config(cls, config: Config, target: TargetModel) -> DFlashDrafter:
        """Open the draft of a config beside its target, which hands its hidden states over.

        Where ranks share the target's vocabulary head, the draft has a copy of the whole.
        """
        own = None if config.target.tensor_parallel == 1 else _ends_of_files(config)
        return cls.from_files(
            find_head(config),
            target,
            dtype=config.draft.dtype,
            support=config.draft.support,
            kernel=config.weights.kernel,
            ends=own,
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
        ends: OpenEnds | None = None,  # None: the target's
    ) -> DFlashDrafter:
        """Open a draft that has been checked to be of this target, in the target's process."""
        network = target.network
        assert network is not None, "the config has been checked"
        drafter = cls.open(
            directory,
            HeadOptions.beside(target, dtype=dtype, support=support, pages=pages, kernel=kernel),
            ends=ends or (lambda dtype, device: _ends_of(network)),
            grammar_compiler=target.grammar_states.grammar_compiler,
        )
        target.on_hidden = drafter.receive_hidden
        return drafter

    @classmethod
    def apart(
        cls, config: Config, target: ModelInfo, grammar_compiler: GrammarCompiler | None
    ) -> DFlashDrafter:
        """Open the draft of a config on a device of its own.

        Of the target's files it reads the embedding and the vocabulary head.
        """
        return cls.open(
            find_head(config),
            HeadOptions.apart(config, target),
            ends=_ends_of_files(config),
            grammar_compiler=grammar_compiler,
        )

    @classmethod
    def open(
        cls,
        directory: Path,
        options: HeadOptions,
        *,
        ends: OpenEnds,
        grammar_compiler: GrammarCompiler | None = None,
    ) -> DFlashDrafter:
        """Open a draft."""
        info = DFlashInfo.from_directory(directory)
        layer, dtype = info.layer, resolve_dtype(options.dtype, options.device)
        cache = options.make_cache(
            num_layers=info.num_layers,
            kv_heads=layer.num_key_value_heads,
            head_dim=layer.head_dim,
            v_head_dim=layer.head_dim,
            state_width=1,
            dtype=dtype,
        )
        with linear_weights(PrivateWeights(options.kernel)):
            network = DFlashNetwork(
                DFlashWeights(directory, info),
                cache,
                target=ends(dtype, options.device),
                attention=options.grouped_attention(),
                context=options.context,
            )
        return cls(
            Runner(network, cache, device=options.device),
            network,
            info,
            vocab_size=options.vocab_size,
            target_vocab_size=options.vocab_size,
            context=options.context,
            support=options.support,
            grammar_states=GrammarStates(grammar_compiler),
        )

    def receive_hidden(self, hidden: Sequence[HiddenRows]) -> None:
        """Keep new states of the target, until the steps that read them."""
        self._arrived.receive(hidden)

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """Return one proposal for each step, of as many tokens as a block has."""
        return self.draft(steps, lambda: self._drafter.clock() > deadline)

    def draft(
        self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]
    ) -> Sequence[Proposal]:
        most = self._info.max_drafted
        steps = [replace(step, gamma=min(step.gamma, most)) for step in steps]
        drop_short_drafts(self._drafter, steps)
        return [
            replace(proposal, num_cached=min(proposal.num_cached, step.stop))
            for step, proposal in zip(steps, self._drafter.draft(steps, should_stop), strict=True)
        ]

    def release(self, seq_ids: Sequence[int]) -> None:
        self._drafter.release(seq_ids)
        self._arrived.release(seq_ids)
        for seq_id in seq_ids:
            self._num_known.pop(seq_id, None)

    def _from_newest(self, task: DraftTask) -> DraftTask:
        """Return the task, begun at the first position whose state of the target may have come."""
        prefill, seq_id = task.prefill, task.seq_id
        start = min(self._num_known.get(seq_id, prefill.start), prefill.start)
        again: tuple[int, ...] = ()
        if start < prefill.start:
            again = tuple(self.runner.cache.tokens(seq_id, start, prefill.start).tolist())
        prefill = replace(prefill, start=start, tokens=again + prefill.tokens)
        # In DFlash a block has a row more than tokens that it draws.
        more = bool(task.num_wanted) and not self._info.samples_from_newest
        return replace(task, prefill=prefill, written=range(start, prefill.stop + more))

    def _draw(self, tasks: Sequence[DraftTask], constrained: bool) -> None:
        """Draw all tokens of tasks in falling order of `num_wanted`, from one pass."""
        logits = self._pass(tasks)
        drawing = [task for task in tasks if task.num_wanted]
        if not drawing:
            return
        added_after = None if self._network.markov is None else self._added_after
        if constrained or any(task.state.policy.warp.needs_history for task in drawing):
            self._drafter.constrained.draw_from_rows(drawing, logits, added_after)
        elif added_after is None:
            draw_rows(drawing, logits, support=self._support, among=self._network.drafted_ids)
        else:
            self._draw_in_turn(drawing, logits, added_after)

    def _draw_in_turn(
        self,
        tasks: Sequence[DraftTask],
        logits: Tensor,
        added_after: Callable[[Tensor], Tensor],
    ) -> None:
        """Draw the tokens at each depth of all tasks, given those drawn just before."""
        wanted, device = np.array([task.num_wanted for task in tasks]), logits.device
        firsts = np.cumsum(wanted) - wanted
        sampler = DraftSampler(
            [
                DrawSpec(task.state.start, 0, task.num_wanted, task.state.policy, None)
                for task in tasks
            ],
            support=self._support,
            device=device,
            among=self._network.drafted_ids,
        )
        tokens = to_device(np.array([task.newest for task in tasks]), device)
        for depth in range(int(wanted[0])):
            rows = to_device(firsts[wanted > depth] + depth, device)
            own = logits.index_select(0, rows)
            tokens = sampler.draw(own + added_after(tokens[: len(own)]))
        for draws in fetch(sampler.draws):
            for row, (task, token) in enumerate(zip(tasks, draws.tokens, strict=False)):
                task.state.append(token, draws, row)

    def _added_after(self, tokens: Tensor) -> Tensor:  # [rows] -> [rows, the target's vocabulary]
        assert self._network.markov is not None
        return self._network.to_target(self._network.markov(tokens), UNCHANGED)

    def _pass(self, tasks: Sequence[DraftTask]) -> Tensor:  # [sum of num_wanted, vocab]
        """Write what the target's states give, and return the logits of the blocks' rows."""
        runner, num_masks = self.runner, {task.seq_id: self._num_masks(task) for task in tasks}
        written = runner.write(
            [
                replace(
                    task.prefill,
                    tokens=task.prefill.tokens + (self._info.mask_token,) * num_masks[task.seq_id],
                )
                for task in tasks
            ],
            [num_masks[task.seq_id] + 1 for task in tasks],
            [0] * len(tasks),
        )
        self._write_context(written, num_masks)
        drawing = [task for task in tasks if task.num_wanted]
        logits = self._run_blocks(drawing, num_masks) if drawing else torch.empty(0)
        for task in tasks:
            known = self._num_known[task.seq_id]
            runner.cache.truncate(task.seq_id, task.prefill.stop, committed=known)
        return logits

    def _run_blocks(self, tasks: Sequence[DraftTask], num_masks: Mapping[int, int]) -> Tensor:
        seq_ids = [task.seq_id for task in tasks]
        starts = np.array([task.prefill.stop - 1 for task in tasks])
        counts = np.array([num_masks[seq_id] + 1 for seq_id in seq_ids])
        writes = Writes(
            starts, counts, self.runner.block_table(seq_ids, int((starts + counts).max()))
        )
        ids = chain.from_iterable(
            (task.newest, *(self._info.mask_token,) * num_masks[task.seq_id]) for task in tasks
        )
        device = self.runner.device
        rows = np.arange(int(counts.sum()))
        if not self._info.samples_from_newest:
            rows = np.delete(rows, np.cumsum(counts) - counts)
        return self._network.logits(
            to_device(np.fromiter(ids, np.int64, int(counts.sum())), device),
            self.runner.lay_out(seq_ids, writes)[0],
            to_device(rows, device),
        )

    def _num_masks(self, task: DraftTask) -> int:
        return max(task.num_wanted - self._info.samples_from_newest, 0)

    @torch.inference_mode()
    def _write_context(self, steps: Sequence[Step], num_masks: Mapping[int, int]) -> None:
        """Write the keys and values of all positions before the newest whose states are there."""
        cache, found, slots = self.runner.cache, [], []
        for step in steps:
            fresh = cache.slots(step.seq_id, step.start, step.stop)
            cache.states.index_fill_(0, fresh, LOST)
            newest = step.stop - num_masks[step.seq_id] - 1
            parts = self._arrived.read(step.seq_id, step.start, newest)
            self._num_known[step.seq_id] = parts[-1].stop if parts else step.start
            found += parts
            slots += [cache.slots(part.seq_id, part.start, part.stop) for part in parts]
        if not found:
            return
        where = torch.cat(slots)
        positions = np.concatenate([np.arange(part.start, part.stop) for part in found])
        states = torch.cat([part.rows for part in found])
        self._network.write_context(states, where, to_device(positions, cache.device))
        cache.states.index_fill_(0, where, KNOWN)


def _ends_of(network: ShareableNetwork) -> VocabularyEnds:
    """Return a target's own embedding and vocabulary head, for rows of any number format."""
    dtype = network.embedding.dtype
    return VocabularyEnds(network.embed, lambda hidden: network.head(hidden.to(dtype)))


def _ends_of_files(config: Config) -> OpenEnds:
    """Return a function that reads embedding and vocabulary head of a config's target."""

    def read(dtype: torch.dtype, device: torch.device) -> VocabularyEnds:
        checkpoint = target_checkpoint(config)
        embedding = load_embedding(checkpoint, dtype=dtype).to(device)
        head = make_linear(load_head(checkpoint, dtype=dtype).to(device))
        leave_unrounded(head)
        return VocabularyEnds(lambda ids: embedding.index_select(0, ids), head.forward)

    return read
