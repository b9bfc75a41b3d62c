"""How the tokens of one proposal are drawn: each sequence's warp and noise, prepared once for all depths. Knows no model and no cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.sampling.distribution import History, WarpBatch, sample, truncate
from specserve.sampling.noise import Purpose, row_keys, seed_array
from specserve.sampling.noise import exponential as exponential_noise
from specserve.types import DraftStep, Policy


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each sequence that still drafts, and the rows that they were drawn from (None: each was certain)."""

    tokens: list[int]
    ids: NDArray[np.int64] | None  # [drawing, support]
    probs: NDArray[np.float32] | None


class Draws:
    """Samples from each row's `support` likeliest tokens, renormalised under the sequence's warp: that is then q by definition."""

    def __init__(self, steps: Sequence[DraftStep], *, support: int, device: torch.device) -> None:
        self.policies = [step.policy for step in steps]
        self.support = support
        self.plain = not any(policy.warp.has_penalties or policy.warp.logit_bias for policy in self.policies)
        self.certain = all(policy.warp.temperature == 0 for policy in self.policies)
        self.keys = None if self.certain else _keys(steps, device)  # [seqs, max gamma, 2]
        self._warps: tuple[int, WarpBatch] | None = None

    def draw(self, logits: Tensor, drawing: Sequence[int], depth: int, history: Callable[[int], History]) -> Drawn:
        """logits [drawing, vocab]: a row for each sequence that still drafts, by its number."""
        warps = self._warp_batch(drawing, history)
        if self.certain:
            return Drawn(warps.greedy_tokens(logits).tolist(), None, None)
        ids, probs = self._likeliest(logits, warps)
        assert self.keys is not None
        keys = self.keys[:, depth] if len(drawing) == len(self.policies) else self.keys[list(drawing), depth]
        places = sample(probs, exponential_noise(keys, ids))
        return Drawn(ids.gather(1, places[:, None])[:, 0].tolist(), ids.cpu().numpy(), probs.cpu().numpy())

    def _likeliest(self, logits: Tensor, warps: WarpBatch) -> tuple[Tensor, Tensor]:  # [drawing, support] both
        """Where no warp looks at ids, the support is that of the logits, and the rest of the vocabulary need not be warped."""
        if not self.plain:
            return truncate(warps.probabilities(logits), self.support)
        top, ids = logits.topk(min(self.support, logits.shape[-1]), dim=-1)
        return ids, warps.probabilities(top)

    def _warp_batch(self, drawing: Sequence[int], history: Callable[[int], History]) -> WarpBatch:
        if self._warps is not None and self._warps[0] == len(drawing) and self.plain:
            return self._warps[1]  # sequences only ever drop out, so the same number is the same sequences
        policies = [self.policies[i] for i in drawing]
        histories = [history(i) if self.policies[i].warp.has_penalties else None for i in drawing]
        warps = WarpBatch([policy.warp for policy in policies], [1] * len(policies), histories)
        self._warps = (len(drawing), warps)
        return warps


def _keys(steps: Sequence[DraftStep], device: torch.device) -> Tensor:
    """Coupled sequences draw with the noise that the target will use; the others with noise that nothing else uses."""
    policies: list[Policy] = [step.policy for step in steps]
    seeds = seed_array([policy.seed for policy in policies])[:, None]
    rounds = np.array([step.start + len(step.tokens) for step in steps])[:, None]
    positions = rounds + np.arange(max(step.gamma for step in steps))
    coupled = [policy.verifier == "coupled" for policy in policies]
    if all(coupled):
        return row_keys(seeds, rounds, positions, Purpose.COUPLED, device=device)
    keys = row_keys(seeds, rounds, positions, Purpose.DRAFT, device=device)
    if any(coupled):
        shared = row_keys(seeds, rounds, positions, Purpose.COUPLED, device=device)
        keys = torch.where(torch.tensor(coupled, device=device)[:, None, None], shared, keys)
    return keys
