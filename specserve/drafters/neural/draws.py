"""Draw the tokens of one proposal, with each sequence's warp and noise prepared for all depths.

Knows no model and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.sampling.distribution import (
    WarpBatch,
    argmax,
    sample,
    truncate_to_support,
)
from specserve.sampling.noise import Purpose, row_keys, seed_array
from specserve.sampling.noise import exponential as exponential_noise
from specserve.sampling.penalties import History
from specserve.sampling.row_draws import draw_by_logits
from specserve.transfers import to_device, to_host
from specserve.types import Policy, Warp

COUPLED_SUPPORT = 1024
"""Support of draws on a GPU that share the target's noise.

Their distribution is not sent, so it need not be short. On a CPU they are from the whole row.
"""


@dataclass(frozen=True, slots=True)
class DrawSpec:
    """Parameters of one sequence's draws."""

    round: int
    """Committed length at the start of the round."""
    num_drawn: int
    """Draft tokens that exist already."""
    num_wanted: int
    policy: Policy
    history: History | None  # None without penalties and rule


@dataclass(frozen=True, slots=True)
class HostDraws:
    """One token for each row, with what it was drawn from.

    The arrays are on the host, where proposals are made; the logits stay on the device.
    """

    tokens: list[int]  # [rows]
    ids: NDArray[np.int64]  # [rows, support]
    probs: NDArray[np.float32] | None  # [rows, support]; None: each token was certain
    logits: Tensor  # [rows, vocab], penalties, biases and rules included


@dataclass(frozen=True, slots=True)
class DeviceDraws:
    """`HostDraws` while they are on the device."""

    tokens: Tensor
    ids: Tensor
    probs: Tensor | None
    logits: Tensor


def fetch(draws: Sequence[DeviceDraws]) -> list[HostDraws]:
    """Return draws on the host, after a single wait for the device."""
    parts = [(each.tokens, each.ids, each.probs) for each in draws]
    arrays = iter(to_host(*(part for each in parts for part in each if part is not None)))
    return [
        HostDraws(
            next(arrays).tolist(),
            next(arrays),
            None if each.probs is None else next(arrays),
            each.logits,
        )
        for each in draws
    ]


class DraftSampler:
    """Sampler of each row's `support` likeliest tokens, renormalised under the sequence's warp.

    That is q by definition. Coupled sequences draw from more, because their q is not used.

    Sequences drop out from the end. Draws stay on the device until all of them are fetched.
    """

    def __init__(
        self,
        specs: Sequence[DrawSpec],
        *,
        support: int,
        device: torch.device,
        among: Tensor | None = None,
    ) -> None:
        """Create a sampler; `among` are the ids that a model with few of its own can draw."""
        self.specs, self.support, self._among = specs, support, among
        warps = [spec.policy.warp for spec in specs]
        self.ignores_ids = ignore_ids(warps)
        self.greedy = all(warp.temperature == 0 for warp in warps)
        self.coupled = [spec.policy.verifier == "coupled" for spec in specs]
        self.keys = None if self.greedy else _keys(specs, device)  # [seqs, max wanted, 2]
        self.draws: list[DeviceDraws] = []
        self._warps: tuple[int, WarpBatch] | None = None

    def draw(self, logits: Tensor) -> Tensor:  # [drawing, vocab] -> [drawing]
        """Return the next token of each of the first sequences, as many as there are rows."""
        draws = self._draw(logits, self._warp_batch(len(logits)))
        self.draws.append(draws)
        return draws.tokens

    def _draw(self, logits: Tensor, warps: WarpBatch) -> DeviceDraws:
        drawn = self._drawn(len(logits))
        adjusted = warps.adjust(logits, drawn)
        if self.greedy:
            tokens = argmax(adjusted)
            return DeviceDraws(tokens, tokens[:, None], None, adjusted)
        coupled = self.coupled[: len(logits)]
        if all(coupled):
            tokens = self._draw_coupled(logits, drawn, warps)
            return DeviceDraws(tokens, tokens[:, None], None, adjusted)
        tokens, ids, probs = self._sample(logits, drawn, warps, self.support)
        if any(coupled):
            own = self._draw_coupled(logits, drawn, warps)
            tokens = torch.where(to_device(np.array(coupled), tokens.device), own, tokens)
        return DeviceDraws(tokens, ids, probs, adjusted)

    def _draw_coupled(self, logits: Tensor, drawn: Tensor | None, warps: WarpBatch) -> Tensor:
        """Return a token of each row, drawn with the target's noise."""
        if not logits.is_cpu:
            return self._sample(logits, drawn, warps, COUPLED_SUPPORT)[0]
        assert self.keys is not None
        return draw_by_logits(warps, logits, self.keys[: len(logits), len(self.draws)], drawn)

    def _sample(
        self, logits: Tensor, drawn: Tensor | None, warps: WarpBatch, support: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a token of each row, and the ids and probabilities that it was drawn from."""
        ids, probs = top_support(
            logits, warps, support, ignores_ids=self.ignores_ids, drawn=drawn, among=self._among
        )
        assert self.keys is not None
        indices = sample(probs, exponential_noise(self.keys[: len(logits), len(self.draws)], ids))
        return ids.gather(1, indices[:, None])[:, 0], ids, probs

    def _warp_batch(self, drawing: int) -> WarpBatch:
        if self._warps is not None and self._warps[0] == drawing:
            return self._warps[1]
        specs = self.specs[:drawing]
        warps = WarpBatch(
            [spec.policy.warp for spec in specs],
            [1] * drawing,
            [None if spec.history is None else replace(spec.history, drafts=()) for spec in specs],
        )
        self._warps = (drawing, warps)
        return warps

    def _drawn(self, drawing: int) -> Tensor | None:  # [drawing, depths]
        """Return the tokens that were drawn so far, if penalties or rules look at them."""
        if not self.draws or all(spec.history is None for spec in self.specs):
            return None
        return torch.stack([draws.tokens[:drawing] for draws in self.draws], dim=1)


def ignore_ids(warps: Sequence[Warp]) -> bool:
    """Return whether none of the warps depends on token ids."""
    return not any(warp.depends_on_ids for warp in warps)


def top_support(
    logits: Tensor,
    warps: WarpBatch,
    support: int,
    *,
    ignores_ids: bool,
    drawn: Tensor | None = None,
    among: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # ids, probs: [rows, support] both
    """Return the ids and warped probabilities of each row's `support` likeliest tokens.

    Where no warp depends on ids, the support is that of the logits, and the rest of the vocabulary
    need not be warped, nor looked at beyond the ids `among`. `drawn` is as `WarpBatch.adjust` has
    it.
    """
    if not ignores_ids:
        return truncate_to_support(warps.probabilities(logits, drawn), support)
    if among is not None:
        logits = logits.index_select(-1, among)
    top, ids = logits.topk(min(support, logits.shape[-1]), dim=-1)
    return ids if among is None else among[ids], warps.probabilities(top)


def _keys(specs: Sequence[DrawSpec], device: torch.device) -> Tensor:
    """Return the keys of each sequence's noise, [seqs, max wanted, 2].

    Coupled sequences use the target's noise, the others noise that nothing else uses.
    """
    seeds = seed_array([spec.policy.seed for spec in specs])[:, None]
    rounds = np.array([spec.round for spec in specs])[:, None]
    positions = np.array([spec.round + spec.num_drawn for spec in specs])[:, None] + np.arange(
        max(spec.num_wanted for spec in specs)
    )
    coupled = [spec.policy.verifier == "coupled" for spec in specs]
    if all(coupled):
        return row_keys(seeds, rounds, positions, Purpose.COUPLED, device=device)
    keys = row_keys(seeds, rounds, positions, Purpose.DRAFT, device=device)
    if any(coupled):
        shared = row_keys(seeds, rounds, positions, Purpose.COUPLED, device=device)
        keys = torch.where(to_device(np.array(coupled), device)[:, None, None], shared, keys)
    return keys
