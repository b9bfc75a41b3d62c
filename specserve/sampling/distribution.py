"""From logits to the distribution that is sampled: p of a mixed batch in one pass, draws from it, its truncation, logprobs.

Knows neither models nor rounds. Every step works row by row, so a row's bits do not depend on its company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.types import Logprobs, SparseRows, Warp

_COLDEST = 1e-30  # a temperature below it would underflow float32; the result is the same one-hot


@dataclass(frozen=True, slots=True)
class History:
    """What the penalties of one sequence look at. Its last row sees all of `drafts`, the row before it all but the last, and so on."""

    tokens: NDArray[np.int64]  # committed, with the prompt
    prompt_length: int
    drafts: tuple[int, ...] = ()


class WarpBatch:
    """The warps of one batch of rows: each sequence has some consecutive rows, all under its own Warp.

    The order is that of transformers: penalties, bias, then greedy, or temperature, top-k, top-p and min-p. What no row needs is skipped.
    """

    def __init__(
        self,
        warps: Sequence[Warp],
        num_rows: Sequence[int],
        histories: Sequence[History | None] | None = None,
    ) -> None:
        self.all_greedy = all(warp.temperature == 0 for warp in warps)
        self._adjustments = _adjustments(warps, num_rows, histories or [None] * len(warps))
        if self.all_greedy:  # nothing else will be asked
            return
        knobs = np.array(
            [(warp.temperature, warp.top_k, warp.top_p, warp.min_p) for warp in warps],
            dtype=np.float64,
        )
        self._temperature, top_k, self._top_p, self._min_p = knobs.repeat(num_rows, axis=0).T
        self._top_k = top_k.astype(np.int64)
        self._greedy = self._temperature == 0

    def greedy_tokens(self, logits: Tensor) -> Tensor:
        """The likeliest token of each row, ties to the lowest id; all there is to do when `all_greedy`. [rows, vocab] -> [rows]."""
        return argmax(self.adjusted(logits))

    def adjusted(self, logits: Tensor) -> Tensor:
        """With penalties and bias, where there are any; else as they are."""
        return self._adjusted(logits) if self._adjustments else logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """p, float32, [rows, vocab]; the logits stay as they are."""
        x = self._adjusted(logits)
        if self.all_greedy:
            return _one_hot(x)
        highest = x.amax(-1, keepdim=True)
        x = x - highest if x is logits else x.sub_(highest)
        if (self._temperature != 1).any():
            x.div_(self._column(np.where(self._greedy, 1.0, self._temperature.clip(_COLDEST)), x))
        self._truncate(x)
        p = torch.softmax(x, -1)
        if self._greedy.any():
            rows = _indices(self._greedy, x)
            p[rows] = _one_hot(x[rows])
        return p

    def _adjusted(self, logits: Tensor) -> Tensor:
        """Logits in float32 with penalties and bias; a copy, unless there is nothing to change."""
        x = logits.to(torch.float32, copy=bool(self._adjustments))
        for first, last, warp, history in self._adjustments:
            if history is not None:
                _penalise(x[first:last], warp, history)
            if warp.logit_bias:
                ids, values = zip(*warp.logit_bias, strict=True)
                x[first:last, list(ids)] += torch.tensor(values, dtype=x.dtype, device=x.device)
        return x

    def _truncate(self, warped: Tensor) -> None:
        """Top-k, top-p and min-p, in place. `warped` has its maximum at 0."""
        cut = ~self._greedy & ((self._top_k > 0) | (self._top_p < 1))
        if cut.any():
            rows = _indices(cut, warped)
            warped[rows] = _nucleus(warped[rows], self._top_k[cut], self._top_p[cut])
        floored = ~self._greedy & (self._min_p > 0)
        if floored.any():
            with np.errstate(divide="ignore"):
                floor = np.where(floored, np.log(self._min_p), -np.inf)
            warped.masked_fill_(warped < self._column(floor, warped), -torch.inf)

    @staticmethod
    def _column(values: NDArray[np.float64], like: Tensor) -> Tensor:
        return torch.from_numpy(values[:, None]).to(like)


def sample(weights: Tensor, noise: Tensor) -> Tensor:
    """A draw from each row of weights (they need not sum to 1), given exponential noise: [rows, n], [rows, n] -> [rows]."""
    return argmax(weights / noise)


def argmax(x: Tensor) -> Tensor:
    """The first of the greatest of each row: [rows, n] -> [rows]. numpy's is vectorised; torch's takes 7 times as long on a CPU."""
    if x.device.type == "cpu":
        return torch.from_numpy((x.float() if x.dtype == torch.bfloat16 else x).numpy().argmax(-1))
    return x.max(dim=-1).indices


def truncate(q: Tensor, support: int) -> tuple[Tensor, Tensor]:
    """The `support` likeliest tokens of each row, renormalised: [rows, vocab] -> ids and probs, both [rows, support]."""
    probs, ids = q.topk(min(support, q.shape[-1]), dim=-1)
    return ids, probs / probs.sum(-1, keepdim=True)


def to_sparse_rows(ids: Tensor, probs: Tensor) -> SparseRows:
    """Tensors of a support as the arrays that travel."""
    return SparseRows(ids=ids.cpu().numpy(), probs=probs.cpu().numpy())


def from_sparse_rows(rows: SparseRows, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """The arrays that travel as tensors: ids and probs, both [rows, support]."""
    return torch.from_numpy(rows.ids).to(device), torch.from_numpy(rows.probs).to(device)


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> list[Logprobs]:
    """Under the unwarped distribution, for each row: of its token, and of the `num_top` likeliest. [rows, vocab], [rows]."""
    x = logits.float()
    total = x.logsumexp(-1, keepdim=True)
    own = (x.gather(1, tokens[:, None]) - total)[:, 0].tolist()
    top, top_ids = x.topk(min(num_top, x.shape[-1]), dim=-1)
    ranked = zip(own, top_ids.tolist(), (top - total).tolist(), strict=True)
    return [
        Logprobs(token=token, top_ids=tuple(ids), top=tuple(values))
        for token, ids, values in ranked
    ]


def _adjustments(
    warps: Sequence[Warp], num_rows: Sequence[int], histories: Sequence[History | None]
) -> list[tuple[int, int, Warp, History | None]]:
    """Of the sequences with penalties or bias alone: first row, row past the last, warp, history (None: no penalties)."""
    found = []
    stop = 0
    for warp, rows, history in zip(warps, num_rows, histories, strict=True):
        start, stop = stop, stop + rows
        assert not warp.has_penalties or history is not None, "penalties need a history"
        if warp.has_penalties or warp.logit_bias:
            found.append((start, stop, warp, history if warp.has_penalties else None))
    return found


def _penalise(rows: Tensor, warp: Warp, history: History) -> None:
    """Repetition (of prompt and text), then presence and frequency (of text alone), in place on the tokens that occurred: [rows, vocab]."""
    num_rows, vocab = rows.shape
    seen = np.bincount(history.tokens, minlength=vocab)
    written = np.bincount(history.tokens[history.prompt_length :], minlength=vocab)
    drafts = np.array(history.drafts, dtype=np.int64)
    ids = np.union1d(np.flatnonzero(seen), drafts)  # [m]
    drafted = np.zeros((len(drafts) + 1, len(ids)), dtype=np.int64)
    np.cumsum(drafts[:, None] == ids, axis=0, out=drafted[1:])  # row j counts drafts[:j]
    drafted = drafted[len(drafted) - num_rows :]  # [rows, m]

    times_written = torch.from_numpy(written[ids] + drafted).to(rows)
    ever_seen = torch.from_numpy(seen[ids] + drafted > 0).to(rows.device)
    columns = torch.from_numpy(ids).to(rows.device)
    x = rows[:, columns]
    repeated = torch.where(x < 0, x * warp.repetition_penalty, x / warp.repetition_penalty)
    x = torch.where(ever_seen, repeated, x)
    rows[:, columns] = (
        x - warp.presence_penalty * (times_written > 0) - warp.frequency_penalty * times_written
    )


def _nucleus(x: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """What top-k and then top-p leave of each row, the rest -inf. x has its maximum at 0. Top-k keeps ties, as transformers does;

    top-p keeps the smallest set that reaches its mass, the lowest ids of a tie.
    """
    vocab = x.shape[-1]
    ranked = _descending(x)
    last = torch.from_numpy(np.where(top_k > 0, top_k.clip(max=vocab), vocab) - 1).to(x.device)
    mass = torch.where(ranked >= ranked.gather(1, last[:, None]), ranked.exp(), 0).double()
    reached = mass.cumsum(-1)
    before = reached - mass  # [rows, vocab]: of the likelier ones
    wanted = (
        torch.from_numpy(np.where(top_p < 1, top_p, np.inf)[:, None]).to(x.device) * reached[:, -1:]
    )
    num_kept = ((before < wanted) & (mass > 0)).sum(-1, keepdim=True).clamp_(min=1)
    cutoff = ranked.gather(1, num_kept - 1)
    above, tied = x > cutoff, x == cutoff
    num_tied = num_kept - above.sum(-1, keepdim=True)
    return x.masked_fill(~(above | (tied & (tied.cumsum(-1) <= num_tied))), -torch.inf)


def _descending(x: Tensor) -> Tensor:
    """Each row's values in falling order. numpy's sort is vectorised; torch's carries the indices along and takes 30 times as long."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
    return x.sort(dim=-1, descending=True).values


def _one_hot(logits: Tensor) -> Tensor:
    p = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    return p.scatter_(1, argmax(logits)[:, None], 1.0)


def _indices(rows: NDArray[np.bool_], like: Tensor) -> Tensor:
    return torch.from_numpy(np.flatnonzero(rows)).to(like.device)
