"""Logits that stay on the ranks that computed them: tokens are chosen by maxima over the shares.

An argmax splits over parts of the vocabulary, and with noise by key so does a draw. Rows of which
more is needed are gathered on rank 0. All ranks make the same calls with the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.models.runner import Runner
from specserve.models.shard import GatheredHead
from specserve.sampling.distribution import WarpBatch, argmax, where_finite
from specserve.sampling.noise import Purpose, row_keys, seed_array
from specserve.sampling.row_draws import best_of_rows
from specserve.transfers import to_device
from specserve.types import VerifyStep


def chosen_on_shares(steps: Sequence[VerifyStep]) -> frozenset[int]:
    """Return the sequences whose verdicts need the target's own tokens and nothing else of p.

    Scored prompts are read from whole rows, and so is all else of their pass.
    """
    if any(step.scoring is not None for step in steps):
        return frozenset()
    return frozenset(step.seq_id for step in steps if _is_chosen_on_shares(step))


def _is_chosen_on_shares(step: VerifyStep) -> bool:
    policy, warp = step.policy, step.policy.warp
    if not step.needs_verdict or policy.logprobs is not None or policy.constrained:
        return False
    if warp.depends_on_ids:
        return False
    return warp.temperature == 0 or (policy.verifier == "coupled" and not warp.truncates)


@dataclass(frozen=True, slots=True)
class PassLogits:
    """The rows of logits that rank 0 has of a pass, and the target's own tokens of other rows."""

    rows: Tensor  # [rows, vocab] of all steps but the chosen ones
    own: Tensor | None = None  # [rows] of these
    chosen: frozenset[int] = frozenset()
    """Sequences whose tokens were chosen on shares."""


class VocabularyShares:
    """The choice of tokens from the logits that each rank has of its share of the vocabulary."""

    def __init__(self, head: GatheredHead) -> None:
        self._head, self._shard = head, head.shard

    @classmethod
    def of_runner(cls, runner: Runner) -> VocabularyShares | None:
        """Return the shares of a model that several ranks have; None: one rank has it alone."""
        return None if runner.sharded_head is None else cls(runner.sharded_head)

    def kept(self) -> AbstractContextManager[None]:
        """Let passes return each rank's own share meanwhile."""
        return self._head.keeping_shares()

    @torch.inference_mode()
    def exchange(self, part: Tensor, steps: Sequence[VerifyStep]) -> PassLogits:
        """Return what the verdicts of these steps need; on other ranks than 0 it means nothing.

        `part` [rows, own share] has a row for each draft token of a step and one more.
        """
        if not steps:  # chunks of prompts, of whose logits nothing is needed
            return PassLogits(part)
        chosen = chosen_on_shares(steps)
        of_row = np.repeat([step.seq_id in chosen for step in steps], _num_rows(steps))
        whole, own = np.flatnonzero(~of_row), np.flatnonzero(of_row)
        tokens = None
        if len(own):
            alone = [step for step in steps if step.seq_id in chosen]
            tokens = self._choose(_select(part, own), alone)
        rows = self._head.gather(_select(part, whole)) if len(whole) else part[:0]
        return PassLogits(rows, tokens, chosen)

    def _choose(self, part: Tensor, steps: Sequence[VerifyStep]) -> Tensor | None:  # [rows]
        """Return the target's own token of each row on rank 0; None on other ranks."""
        part = self._head.padded(part)
        is_greedy = np.repeat(
            [step.policy.warp.temperature == 0 for step in steps], _num_rows(steps)
        )
        if is_greedy.all():
            return self._best_of_ranks(*self._highest(part))
        if not is_greedy.any():
            return self._best_of_ranks(*self._draw(part, steps))
        greedy, drawn = np.flatnonzero(is_greedy), np.flatnonzero(~is_greedy)
        others = [step for step in steps if step.policy.warp.temperature > 0]
        found = zip(
            self._highest(_select(part, greedy)),
            self._draw(_select(part, drawn), others),
            strict=True,
        )
        back = to_device(np.argsort(np.concatenate([greedy, drawn])), part.device)
        scores, tokens = (torch.cat(both)[back] for both in found)
        return self._best_of_ranks(scores, tokens)

    def _highest(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Return the highest logit of each row's share, and its token: the lowest id of a tie."""
        if part.is_cpu:
            ids = argmax(part)
            scores = part.gather(1, ids[:, None])[:, 0]
        else:
            scores, ids = part.max(dim=-1)
        return scores.float(), ids + self._first_id

    def _draw(self, part: Tensor, steps: Sequence[VerifyStep]) -> tuple[Tensor, Tensor]:
        """Return the best score of each row's share under coupled noise, and its token."""
        counts = _num_rows(steps)
        own = part.float().amax(-1, keepdim=True)
        highest = self._shard.maximum(own)
        warps = WarpBatch([step.policy.warp for step in steps], counts)
        weights = warps.weights(part, highest)
        keys = _coupled_keys(steps, part.device)
        scores, tokens = best_of_rows(weights, keys, first_id=self._first_id)
        if part.is_cpu:  # a maximum over ranks, and over what is not a number, may be a number
            scores = torch.where(own[:, 0] < torch.inf, scores, torch.nan)
        return scores, tokens

    def _best_of_ranks(self, scores: Tensor, tokens: Tensor) -> Tensor | None:
        """Return each row's token of the rank with the best score, the lowest rank of a tie.

        Its tokens have the lowest ids, so this is the tie's token of the whole row. On a CPU,
        NOT_FINITE stands for the token of a row whose best score is not a finite number.
        """
        own = torch.stack([scores.view(torch.int32), tokens.to(torch.int32)])  # [2, rows]
        parts = self._shard.gather(own)
        if parts is None:
            return None
        of_ranks = torch.stack(parts, dim=1)  # [2, ranks, rows]
        all_scores = of_ranks[0].view(torch.float32)
        best = argmax(all_scores.t())[None]
        found = of_ranks[1].gather(0, best)[0].to(torch.int64)
        return where_finite(found, all_scores.gather(0, best)[0]) if scores.is_cpu else found

    @property
    def _first_id(self) -> int:
        return self._shard.rank * self._head.share


def _coupled_keys(steps: Sequence[VerifyStep], device: torch.device) -> Tensor:  # [rows, 2]
    counts = _num_rows(steps)
    seeds = seed_array([step.policy.seed for step in steps]).repeat(counts)
    positions = np.concatenate(
        [np.arange(step.stop, step.stop + n) for step, n in zip(steps, counts, strict=True)]
    )
    return row_keys(seeds, positions, positions, Purpose.COUPLED, device=device)


def _num_rows(steps: Sequence[VerifyStep]) -> list[int]:
    return [len(step.drafts) + 1 for step in steps]


def _select(part: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Return some of the rows, in order."""
    return part if len(rows) == len(part) else part[to_device(rows, part.device)]
