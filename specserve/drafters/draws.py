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
from specserve.types import Policy


@dataclass(frozen=True, slots=True)
class Place:
    """Where one sequence's draws begin, how many there may be, and how they are made."""

    round: int  # the committed length that the round starts from
    drawn: int  # tokens drawn behind it before
    wanted: int
    policy: Policy
    history: History | None  # where there are penalties

    @property
    def is_coupled(self) -> bool:
        return self.policy.verifier == "coupled" and self.policy.warp.temperature > 0


@dataclass(frozen=True, slots=True)
class Source:
    """The likeliest tokens of some rows, and what was drawn from them: arrays on the host, where proposals are made."""

    tokens: list[int]  # [rows] that were drawn
    ids: NDArray[np.int64]  # [rows, support]
    probs: NDArray[np.float32] | None  # likewise; None: each token was certain, and the ids are in falling order
    noise: NDArray[np.float32] | None  # where the target will draw with the same

    def ranked(self, rows: list[int], width: int) -> list[list[int]]:
        """The `width` likeliest tokens of these rows, the drawn ones among them: by the noise too, where there is any."""
        ids = self.ids[rows]
        if self.probs is None:
            return ids[:, :width].tolist()  # type: ignore[no-any-return]
        scores = self.probs[rows] if self.noise is None else self.probs[rows] / self.noise[rows]
        order = np.argsort(-scores, axis=-1, kind="stable")[:, :width]
        return np.take_along_axis(ids, order, axis=-1).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The same while it is on the device."""

    tokens: Tensor
    ids: Tensor
    probs: Tensor | None
    noise: Tensor | None

    def fetched(self) -> Source:
        probs, noise = (None if tensor is None else tensor.cpu().numpy() for tensor in (self.probs, self.noise))
        return Source(self.tokens.tolist(), self.ids.cpu().numpy(), probs, noise)


class Draws:
    """Samples from each row's `support` likeliest tokens, renormalised under the sequence's warp: that is then q by definition.

    Sequences drop out from the end. What is drawn stays on the device until all of it is asked for.
    """

    def __init__(self, places: Sequence[Place], *, support: int, width: int, device: torch.device) -> None:
        self.places, self.support, self.width = places, support, width  # width: how many likely tokens to keep of rows that are certain
        warps = [place.policy.warp for place in places]
        self.plain = not any(warp.has_penalties or warp.logit_bias for warp in warps)
        self.certain = all(warp.temperature == 0 for warp in warps)
        self.keys = None if self.certain else _keys(places, device)  # [seqs, max wanted, 2]
        coupled = [place.is_coupled for place in places]
        self.coupled = torch.tensor(coupled, device=device)[:, None] if any(coupled) and not all(coupled) else None
        self.is_coupled = any(coupled)
        self.drawn: list[Drawn] = []
        self._warps: tuple[int, WarpBatch] | None = None

    def draw(self, logits: Tensor) -> Tensor:  # [drawing, vocab] -> [drawing]
        """The next token of each of the first sequences, as many as there are rows."""
        drawn = self._drawn(logits, self._warp_batch(len(logits)))
        self.drawn.append(drawn)
        return drawn.tokens

    def _drawn(self, logits: Tensor, warps: WarpBatch) -> Drawn:
        if self.certain:
            return self._likely(logits, warps)
        ids, probs = self._likeliest(logits, warps)
        assert self.keys is not None
        noise = exponential_noise(self.keys[: len(logits), len(self.drawn)], ids)
        places = sample(probs, noise)
        shared = None if not self.is_coupled else noise if self.coupled is None else torch.where(self.coupled[: len(logits)], noise, 1.0)
        return Drawn(ids.gather(1, places[:, None])[:, 0], ids, probs, shared)

    def _likely(self, logits: Tensor, warps: WarpBatch) -> Drawn:
        logits = warps.adjusted(logits)
        tokens = argmax(logits)
        ids = tokens[:, None] if self.width <= 1 else logits.topk(min(self.width, logits.shape[-1]), dim=-1).indices
        return Drawn(tokens, ids, None, None)

    def _likeliest(self, logits: Tensor, warps: WarpBatch) -> tuple[Tensor, Tensor]:  # [drawing, support] both
        """Where no warp looks at ids, the support is that of the logits, and the rest of the vocabulary need not be warped."""
        if not self.plain:
            return truncate(warps.probabilities(logits), self.support)
        top, ids = logits.topk(min(self.support, logits.shape[-1]), dim=-1)
        return ids, warps.probabilities(top)

    def _warp_batch(self, drawing: int) -> WarpBatch:
        if self._warps is not None and self._warps[0] == drawing and self.plain:
            return self._warps[1]
        histories = [None if place.history is None else self._continued(place.history, i) for i, place in enumerate(self.places[:drawing])]
        warps = WarpBatch([place.policy.warp for place in self.places[:drawing]], [1] * drawing, histories)
        self._warps = (drawing, warps)
        return warps

    def _continued(self, history: History, i: int) -> History:
        return replace(history, drafts=tuple(int(drawn.tokens[i]) for drawn in self.drawn))


def _keys(places: Sequence[Place], device: torch.device) -> Tensor:
    """Coupled sequences draw with the noise that the target will use; the others with noise that nothing else uses."""
    seeds = seed_array([place.policy.seed for place in places])[:, None]
    rounds = np.array([place.round for place in places])[:, None]
    positions = np.array([place.round + place.drawn for place in places])[:, None] + np.arange(max(place.wanted for place in places))
    coupled = [place.policy.verifier == "coupled" for place in places]
    if all(coupled):
        return row_keys(seeds, rounds, positions, Purpose.COUPLED, device=device)
    keys = row_keys(seeds, rounds, positions, Purpose.DRAFT, device=device)
    if any(coupled):
        shared = row_keys(seeds, rounds, positions, Purpose.COUPLED, device=device)
        keys = torch.where(torch.tensor(coupled, device=device)[:, None, None], shared, keys)
    return keys
