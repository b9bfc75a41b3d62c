"""How the tokens of one proposal are drawn: each sequence's warp and noise, prepared once for all depths. Knows no model and no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.sampling.distribution import History, WarpBatch, argmax, sample, truncate
from specserve.sampling.noise import Purpose, row_keys, seed_array
from specserve.sampling.noise import exponential as exponential_noise
from specserve.types import Policy, Warp

COUPLED_SUPPORT = 1024  # of draws that share the target's noise: their distribution does not travel, so it need not be short


@dataclass(frozen=True, slots=True)
class Place:
    """Where one sequence's draws begin, how many there may be, and how they are made."""

    round: int  # the committed length that the round starts from
    drawn: int  # tokens drawn behind it before
    wanted: int
    policy: Policy
    history: History | None  # where there are penalties


@dataclass(frozen=True, slots=True)
class Source:
    """What some tokens were drawn from, one of each row: arrays on the host, where proposals are made, and the logits where they were."""

    tokens: list[int]  # [rows]
    ids: NDArray[np.int64]  # [rows, support]
    probs: NDArray[np.float32] | None  # likewise; None: each token was certain
    logits: Tensor  # [rows, vocab] penalties and biases included


@dataclass(frozen=True, slots=True)
class Drawn:
    """The same while it is on the device."""

    tokens: Tensor
    ids: Tensor
    probs: Tensor | None
    logits: Tensor

    def fetched(self) -> Source:
        return Source(
            self.tokens.tolist(),
            self.ids.cpu().numpy(),
            None if self.probs is None else self.probs.cpu().numpy(),
            self.logits,
        )


class Draws:
    """Samples from each row's `support` likeliest tokens, renormalised under the sequence's warp: that is then q by definition.

    Coupled sequences draw from more: nobody asks for their q.

    Sequences drop out from the end. What is drawn stays on the device until all of it is asked for.
    """

    def __init__(self, places: Sequence[Place], *, support: int, device: torch.device) -> None:
        self.places, self.support = places, support
        warps = [place.policy.warp for place in places]
        self.plain = are_plain(warps)
        self.certain = all(warp.temperature == 0 for warp in warps)
        self.coupled = [place.policy.verifier == "coupled" for place in places]
        self.keys = None if self.certain else _keys(places, device)  # [seqs, max wanted, 2]
        self.drawn: list[Drawn] = []
        self._warps: tuple[int, WarpBatch] | None = None

    def draw(self, logits: Tensor) -> Tensor:  # [drawing, vocab] -> [drawing]
        """The next token of each of the first sequences, as many as there are rows."""
        drawn = self._drawn(logits, self._warp_batch(len(logits)))
        self.drawn.append(drawn)
        return drawn.tokens

    def _drawn(self, logits: Tensor, warps: WarpBatch) -> Drawn:
        adjusted = warps.adjusted(logits)
        if self.certain:
            tokens = argmax(adjusted)
            return Drawn(tokens, tokens[:, None], None, adjusted)
        coupled = self.coupled[: len(logits)]
        if all(coupled):
            tokens, _, _ = self._sampled(logits, warps, COUPLED_SUPPORT)
            return Drawn(tokens, tokens[:, None], None, adjusted)
        tokens, ids, probs = self._sampled(logits, warps, self.support)
        if any(coupled):
            wide, _, _ = self._sampled(logits, warps, COUPLED_SUPPORT)
            tokens = torch.where(torch.tensor(coupled, device=tokens.device), wide, tokens)
        return Drawn(tokens, ids, probs, adjusted)

    def _sampled(
        self, logits: Tensor, warps: WarpBatch, support: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A token of each row, and the support that it was drawn from."""
        ids, probs = likeliest(logits, warps, support, plain=self.plain)
        assert self.keys is not None
        places = sample(probs, exponential_noise(self.keys[: len(logits), len(self.drawn)], ids))
        return ids.gather(1, places[:, None])[:, 0], ids, probs

    def _warp_batch(self, drawing: int) -> WarpBatch:
        if self._warps is not None and self._warps[0] == drawing and self.plain:
            return self._warps[1]
        histories = [
            None if place.history is None else self._continued(place.history, i)
            for i, place in enumerate(self.places[:drawing])
        ]
        warps = WarpBatch(
            [place.policy.warp for place in self.places[:drawing]], [1] * drawing, histories
        )
        self._warps = (drawing, warps)
        return warps

    def _continued(self, history: History, i: int) -> History:
        return replace(history, drafts=tuple(int(drawn.tokens[i]) for drawn in self.drawn))


def are_plain(warps: Sequence[Warp]) -> bool:
    """Whether none of them looks at ids."""
    return not any(warp.has_penalties or warp.logit_bias for warp in warps)


def likeliest(
    logits: Tensor, warps: WarpBatch, support: int, *, plain: bool
) -> tuple[Tensor, Tensor]:  # ids, probs: [rows, support] both
    """Where no warp looks at ids, the support is that of the logits, and the rest of the vocabulary need not be warped."""
    if not plain:
        return truncate(warps.probabilities(logits), support)
    top, ids = logits.topk(min(support, logits.shape[-1]), dim=-1)
    return ids, warps.probabilities(top)


def _keys(places: Sequence[Place], device: torch.device) -> Tensor:
    """Coupled sequences draw with the noise that the target will use; the others with noise that nothing else uses."""
    seeds = seed_array([place.policy.seed for place in places])[:, None]
    rounds = np.array([place.round for place in places])[:, None]
    positions = np.array([place.round + place.drawn for place in places])[:, None] + np.arange(
        max(place.wanted for place in places)
    )
    coupled = [place.policy.verifier == "coupled" for place in places]
    if all(coupled):
        return row_keys(seeds, rounds, positions, Purpose.COUPLED, device=device)
    keys = row_keys(seeds, rounds, positions, Purpose.DRAFT, device=device)
    if any(coupled):
        shared = row_keys(seeds, rounds, positions, Purpose.COUPLED, device=device)
        keys = torch.where(torch.tensor(coupled, device=device)[:, None, None], shared, keys)
    return keys
