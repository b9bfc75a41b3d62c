"""A small language model that drafts for all sequences at once, each with its own gamma. Knows no target but the size of its vocabulary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specserve.drafters.draws import Drawn, Draws
from specserve.models.runner import Runner
from specserve.sampling.distribution import History
from specserve.types import DraftStep, Proposal, SparseRows, Step


@dataclass(slots=True)
class _Draft:
    """One sequence's proposal as it grows."""

    step: DraftStep
    tokens: list[int] = field(default_factory=list)
    q: list[SparseRows] = field(default_factory=list)  # a row for each token; empty when each was certain

    @property
    def stop(self) -> int:
        return self.step.start + len(self.step.tokens)

    def proposal(self, held: int) -> Proposal:
        q = None
        if self.q:
            q = SparseRows(np.concatenate([row.ids for row in self.q]), np.concatenate([row.probs for row in self.q]))
        return Proposal(self.step.seq_id, self.stop, tuple(self.tokens), q, held)


class NeuralDrafter:
    """Drafts token by token, one pass for all sequences that still want one."""

    def __init__(
        self, runner: Runner, *, vocab_size: int, target_vocab_size: int, context: int, support: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.runner, self.context, self.support, self.clock = runner, context, support, clock
        self.shared_vocab = min(vocab_size, target_vocab_size)  # padding of either embedding is never proposed
        self.lacks_tokens = vocab_size < target_vocab_size

    @torch.inference_mode()
    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """A sequence that does not fit, or whose step leaves a gap, gets an empty proposal that says what is held of it."""
        drafts = [_Draft(step) for step in steps]
        able = self._fitting(drafts)
        if able:
            self._draft(able, deadline)
        return [draft.proposal(self.runner.cache.length(draft.step.seq_id)) for draft in drafts]

    def release(self, seq_ids: Sequence[int]) -> None:
        self.runner.release(seq_ids)

    def _fitting(self, drafts: Sequence[_Draft]) -> list[_Draft]:
        """Those that leave no gap and fit into the context and, all together, into the pages."""
        cache, fitting = self.runner.cache, []
        free = cache.num_free
        for draft in drafts:
            step, room = draft.step, draft.stop + max(draft.step.gamma - 1, 0)
            pages = -(-room // cache.page_size) - step.start // cache.page_size  # counts a page that is copied on write
            if cache.length(step.seq_id) >= step.start and room <= self.context and pages <= free:
                free -= pages
                fitting.append(draft)
        return fitting

    def _draft(self, able: Sequence[_Draft], deadline: float) -> None:
        writes = [Step(draft.step.seq_id, draft.step.start, self._known(draft.step.tokens)) for draft in able]
        logits = self.runner.run(writes, [min(draft.step.gamma, 1) for draft in able])
        drafts = [draft for draft in able if draft.step.gamma]
        if not drafts:
            return
        draws = Draws([draft.step for draft in drafts], support=self.support, device=self.runner.device)
        drawing, depth = list(range(len(drafts))), 0
        while True:
            self._take(drafts, drawing, draws.draw(logits[:, : self.shared_vocab], drawing, depth, lambda i: self._history(drafts[i])))
            depth += 1
            drawing = [i for i in drawing if drafts[i].step.gamma > depth]
            if not drawing or self.clock() > deadline:
                return
            writes = [Step(drafts[i].step.seq_id, drafts[i].stop + depth - 1, (drafts[i].tokens[-1],)) for i in drawing]
            logits = self.runner.run(writes, [1] * len(drawing))

    def _take(self, drafts: Sequence[_Draft], drawing: Sequence[int], drawn: Drawn) -> None:
        for row, i in enumerate(drawing):
            draft = drafts[i]
            draft.tokens.append(drawn.tokens[row])
            if drawn.ids is not None and drawn.probs is not None and draft.step.policy.warp.temperature > 0:
                draft.q.append(SparseRows(drawn.ids[row : row + 1], drawn.probs[row : row + 1]))

    def _history(self, draft: _Draft) -> History:
        return History(self.runner.cache.tokens(draft.step.seq_id), draft.step.policy.prompt_length)

    def _known(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """A target with a larger padded embedding may, if hardly ever, commit an id that the draft has no row for."""
        return tuple(token if token < self.shared_vocab else 0 for token in tokens) if self.lacks_tokens else tokens
