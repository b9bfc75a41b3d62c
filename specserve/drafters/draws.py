"""How the tokens of one proposal are drawn: each sequence's warp and noise, prepared once for all depths. Knows no model and no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specserve.sampling.distribution import History, WarpBatch, sample, truncate
from specserve.sampling.noise import Purpose, row_keys, seed_array
from specserve.sampling.noise import exponential as exponential_noise
from specserve.types import DraftStep, Policy, SparseRows


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each sequence that still drafts, and the rows that they were drawn from (None: each was certain)."""

    tokens: Tensor  # [drawing]
    ids: Tensor | None  # [drawing, support]
    probs: Tensor | None


@dataclass(frozen=True, slots=True)
class Guess:
    """All that was drawn for one sequence, and what from (None: each token was certain)."""

    tokens: tuple[int, ...]
    q: SparseRows | None


class Draws:
    """Samples from each row's `support` likeliest tokens, renormalised under the sequence's warp: that is then q by definition.

    Sequences drop out from the end. What is drawn stays on the device until all of it is asked for.
    """

    def __init__(self, steps: Sequence[DraftStep], histories: Sequence[History | None], *, support: int, device: torch.device) -> None:
        self.policies, self.histories = [step.policy for step in steps], histories  # a history where there are penalties
        self.support = support
        self.plain = not any(policy.warp.has_penalties or policy.warp.logit_bias for policy in self.policies)
        self.certain = all(policy.warp.temperature == 0 for policy in self.policies)
        self.keys = None if self.certain else _keys(steps, device)  # [seqs, max gamma, 2]
        self.drawn: list[Drawn] = []
        self._warps: tuple[int, WarpBatch] | None = None

    def draw(self, logits: Tensor) -> Tensor:  # [drawing, vocab] -> [drawing]
        """The next token of each of the first sequences, as many as there are rows."""
        drawn = self._drawn(logits, self._warp_batch(len(logits)))
        self.drawn.append(drawn)
        return drawn.tokens

    def guesses(self) -> list[Guess]:
        """Of every sequence, in their order."""
        tokens = torch.cat([drawn.tokens for drawn in self.drawn]).tolist()
        firsts = [0, *accumulate(len(drawn.tokens) for drawn in self.drawn)]
        rows = [[first + i for first, drawn in zip(firsts, self.drawn, strict=False) if i < len(drawn.tokens)] for i in range(len(self.policies))]
        return [Guess(tuple(tokens[row] for row in own), q) for own, q in zip(rows, self._sources(rows), strict=True)]

    def _sources(self, rows: Sequence[list[int]]) -> list[SparseRows | None]:
        if self.certain:
            return [None] * len(rows)
        ids = torch.cat([drawn.ids for drawn in self.drawn if drawn.ids is not None]).cpu().numpy()
        probs = torch.cat([drawn.probs for drawn in self.drawn if drawn.probs is not None]).cpu().numpy()
        return [SparseRows(ids[own], probs[own]) if policy.warp.temperature > 0 else None for own, policy in zip(rows, self.policies, strict=True)]

    def _drawn(self, logits: Tensor, warps: WarpBatch) -> Drawn:
        if self.certain:
            return Drawn(warps.greedy_tokens(logits), None, None)
        ids, probs = self._likeliest(logits, warps)
        assert self.keys is not None
        places = sample(probs, exponential_noise(self.keys[: len(logits), len(self.drawn)], ids))
        return Drawn(ids.gather(1, places[:, None])[:, 0], ids, probs)

    def _likeliest(self, logits: Tensor, warps: WarpBatch) -> tuple[Tensor, Tensor]:  # [drawing, support] both
        """Where no warp looks at ids, the support is that of the logits, and the rest of the vocabulary need not be warped."""
        if not self.plain:
            return truncate(warps.probabilities(logits), self.support)
        top, ids = logits.topk(min(self.support, logits.shape[-1]), dim=-1)
        return ids, warps.probabilities(top)

    def _warp_batch(self, drawing: int) -> WarpBatch:
        if self._warps is not None and self._warps[0] == drawing and self.plain:
            return self._warps[1]
        histories = [None if history is None else self._continued(history, i) for i, history in enumerate(self.histories[:drawing])]
        warps = WarpBatch([policy.warp for policy in self.policies[:drawing]], [1] * drawing, histories)
        self._warps = (drawing, warps)
        return warps

    def _continued(self, history: History, i: int) -> History:
        return replace(history, drafts=tuple(int(drawn.tokens[i]) for drawn in self.drawn))


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
