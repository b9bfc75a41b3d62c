"""A small language model that drafts for all sequences at once, each with its own gamma. Knows no target but the size of its vocabulary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specserve.models.runner import Runner
from specserve.sampling.distribution import History, WarpBatch, sample, to_sparse_rows, truncate
from specserve.sampling.noise import Purpose, exponential, row_keys, seed_array
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
    """Drafts token by token. It samples from its `support` likeliest tokens, renormalised: that is then q by definition."""

    def __init__(
        self, runner: Runner, *, vocab_size: int, target_vocab_size: int, context: int, support: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.runner, self.context, self.support, self.clock = runner, context, support, clock
        self.shared_vocab = min(vocab_size, target_vocab_size)  # padding of either embedding is never proposed
        self.lacks_tokens = vocab_size < target_vocab_size

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
        drawing = [draft for draft in able if draft.step.gamma]
        depth = 0
        while drawing:
            self._draw(drawing, logits, depth)
            depth += 1
            drawing = [draft for draft in drawing if draft.step.gamma > depth]
            if not drawing or self.clock() > deadline:
                return
            logits = self.runner.run([Step(draft.step.seq_id, draft.stop + depth - 1, (draft.tokens[-1],)) for draft in drawing], [1] * len(drawing))

    @torch.inference_mode()
    def _draw(self, drawing: Sequence[_Draft], logits: Tensor, depth: int) -> None:
        """One more token for each sequence from its row of logits [drawing, vocab]."""
        logits = logits[:, : self.shared_vocab]
        warps = WarpBatch([draft.step.policy.warp for draft in drawing], [1] * len(drawing), [self._history(draft) for draft in drawing])
        if warps.all_greedy:
            for draft, token in zip(drawing, warps.greedy_tokens(logits).tolist(), strict=True):
                draft.tokens.append(token)
            return
        ids, probs = truncate(warps.probabilities(logits), self.support)  # [drawing, support]
        places = sample(probs, exponential(_keys(drawing, depth, device=logits.device), ids))
        tokens = ids.gather(1, places[:, None])[:, 0].tolist()
        rows = to_sparse_rows(ids, probs)
        for i, draft in enumerate(drawing):
            draft.tokens.append(tokens[i])
            if draft.step.policy.warp.temperature > 0:
                draft.q.append(SparseRows(rows.ids[i : i + 1], rows.probs[i : i + 1]))

    def _history(self, draft: _Draft) -> History | None:
        policy = draft.step.policy
        if not policy.warp.has_penalties:
            return None
        return History(self.runner.cache.tokens(draft.step.seq_id), policy.prompt_length)

    def _known(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """A target with a larger padded embedding may, if hardly ever, commit an id that the draft has no row for."""
        return tuple(token if token < self.shared_vocab else 0 for token in tokens) if self.lacks_tokens else tokens


def _keys(drawing: Sequence[_Draft], depth: int, *, device: torch.device) -> Tensor:
    """Coupled sequences draw with the noise that the target will use; the others with noise that nothing else uses."""
    seeds = seed_array([draft.step.policy.seed for draft in drawing])
    rounds = np.fromiter((draft.stop for draft in drawing), np.int64, len(drawing))
    coupled = [draft.step.policy.verifier == "coupled" for draft in drawing]
    if all(coupled):
        return row_keys(seeds, rounds, rounds + depth, Purpose.COUPLED, device=device)
    keys = row_keys(seeds, rounds, rounds + depth, Purpose.DRAFT, device=device)
    if any(coupled):
        shared = row_keys(seeds, rounds, rounds + depth, Purpose.COUPLED, device=device)
        keys = torch.where(torch.tensor(coupled, device=device)[:, None], shared, keys)
    return keys
