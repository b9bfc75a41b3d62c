"""The distribution that is sampled: p of a mixed batch in one pass, draws from it, logprobs.

It knows neither models nor rounds. Every step works row by row, so the bits of a row do not depend
on the other rows of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.sampling.few_tokens import FewTokens
from specserve.sampling.penalties import History, PenaltyCells, PenaltyCounts, adjustments_of
from specserve.sampling.token_rule import apply_rule
from specserve.sampling.truncation import SORTED_WIDTH, select, top_k_top_p
from specserve.transfers import to_device, to_host
from specserve.types import Logprobs, PromptLogprobs, SparseDistribution, Warp

NOT_FINITE = -1
"""Stands for the token of a row whose logits are not finite: there is none."""
NOT_FINITE_ERROR = (
    "the target's logits are not finite: its weights or its config are broken, "
    "or its type of numbers is too narrow for them"
)
_COLDEST = 1e-30  # a temperature below it would underflow float32; the result is the same one-hot


class WarpBatch:
    """Warps of a batch of rows: each sequence has some consecutive rows, all under its own Warp.

    The order is that of transformers: penalties, bias, token rule, then greedy, or temperature,
    top-k, top-p and min-p. A step that no row needs is skipped.
    """

    def __init__(
        self,
        warps: Sequence[Warp],
        num_rows: Sequence[int],
        histories: Sequence[History | None] | None = None,
    ) -> None:
        self.all_greedy = all(warp.temperature == 0 for warp in warps)
        self._adjustments = adjustments_of(warps, num_rows, histories or [None] * len(warps))
        self._has_penalties = any(warp.has_penalties for *_, warp, _ in self._adjustments)
        self._counts: PenaltyCells | PenaltyCounts | None = None
        if self.all_greedy:  # greedy rows need no more
            return
        knobs = np.array(
            [(warp.temperature, warp.top_k, warp.top_p, warp.min_p) for warp in warps],
            dtype=np.float64,
        )
        self._temperature, top_k, self._top_p, self._min_p = knobs.repeat(num_rows, axis=0).T
        self._top_k = top_k.astype(np.int64)
        self._greedy = self._temperature == 0

    def greedy_tokens(self, logits: Tensor) -> Tensor:
        """Return the likeliest token of each row, the lowest id of a tie: [rows, vocab] -> [rows].

        With `all_greedy` this replaces `probabilities`.
        """
        return argmax(self.adjust(logits))

    def adjust(self, logits: Tensor, drawn: Tensor | None = None) -> Tensor:
        """Return the logits with penalties, bias and rule; the same tensor if there are none.

        Tokens `drawn` [rows, n] since the histories count as drafts.
        """
        return self._apply_adjustments(logits, drawn) if self._adjustments else logits

    def probabilities(
        self,
        logits: Tensor,
        drawn: Tensor | None = None,
        *,
        as_weights: NDArray[np.bool_] | None = None,
    ) -> Tensor:
        """Return p, float32, [rows, vocab]; the logits are not changed.

        Rows `as_weights` [rows] have weights in proportion to p, which suffice for a draw: those
        that `weights` returns.
        """
        if self.all_greedy:
            return _one_hot(self._apply_adjustments(logits, drawn))
        x = self._warped(logits, drawn)
        p = _normalise(self._truncate(x), as_weights)
        if self._greedy.any():
            rows = _indices(self._greedy, x)
            p[rows] = _one_hot(x[rows])
        return p

    def few_weights(
        self, logits: Tensor, drawn: Tensor | None = None
    ) -> tuple[FewTokens, Tensor] | None:
        """Return the tokens that top-k or top-p leave in each row, and a table of their weights.

        `drawn` is as `adjust` has it; the weights are the same as in `probabilities`. None if a row
        keeps all tokens, or on a GPU.
        """
        if self.all_greedy or not logits.is_cpu or logits.shape[-1] <= SORTED_WIDTH:
            return None
        if not (~self._greedy & ((self._top_k > 0) | (self._top_p < 1))).all():
            return None
        few, kept = select(self._warped(logits, drawn), self._top_k, self._top_p)
        return few, self._apply_floor(kept).exp_()

    def weights(self, logits: Tensor, highest: Tensor) -> Tensor:
        """Return weights in proportion to p, float32, of a part of the vocabulary.

        `highest` [rows, 1] are the highest logits of the whole rows, whose weight is 1. A weight
        depends on these and its own logit alone, so that its bits are as in the whole row. For
        warps that neither adjust nor truncate, and are not greedy.
        """
        return self._divide(logits.float() - highest).exp_()

    def _warped(self, logits: Tensor, drawn: Tensor | None = None) -> Tensor:
        """Return the adjusted logits with their maximum at 0, divided by the temperatures."""
        x = self._apply_adjustments(logits, drawn)
        highest = x.amax(-1, keepdim=True)
        return self._divide(x - highest if x is logits else x.sub_(highest))

    def _divide(self, x: Tensor) -> Tensor:
        """Divide by the temperatures, in place."""
        if (self._temperature != 1).any():
            x.div_(self._column(np.where(self._greedy, 1.0, self._temperature.clip(_COLDEST)), x))
        return x

    def _apply_adjustments(self, logits: Tensor, drawn: Tensor | None) -> Tensor:
        """Return float32 logits with penalties, bias and rule; a copy if anything changes."""
        x = logits.to(torch.float32, copy=bool(self._adjustments))
        if self._has_penalties:
            if self._counts is None:
                self._counts = (PenaltyCells if x.is_cpu else PenaltyCounts)(self._adjustments, x)
            self._counts.apply(x, drawn)
        for first, last, warp, history in self._adjustments:
            # A draft's vocabulary may be smaller than the target's.
            biases = [one for one in warp.logit_bias if one[0] < x.shape[-1]]
            if biases:
                ids, values = zip(*biases, strict=True)
                columns = to_device(np.array(ids, dtype=np.int64), x.device)
                x[first:last, columns] += to_device(np.array(values, dtype=np.float32), x.device)
            if history is not None and warp.rule is not None:
                if drawn is not None:
                    history = replace(history, drafts=history.drafts + _newest(drawn[first], warp))
                apply_rule(x[first:last], warp.rule, history)
        return x

    def _truncate(self, warped: Tensor) -> Tensor:
        """Apply top-k, top-p and min-p. `warped` has its maximum at 0, and may be lost."""
        cut = ~self._greedy & ((self._top_k > 0) | (self._top_p < 1))
        if cut.all():
            warped = top_k_top_p(warped, self._top_k, self._top_p)
        elif cut.any():
            rows = _indices(cut, warped)
            warped[rows] = top_k_top_p(warped[rows], self._top_k[cut], self._top_p[cut])
        return self._apply_floor(warped)

    def _apply_floor(self, warped: Tensor) -> Tensor:
        """Apply min-p, in place."""
        floored = ~self._greedy & (self._min_p > 0)
        if floored.any():
            with np.errstate(divide="ignore"):
                floor = np.where(floored, np.log(self._min_p), -np.inf)
            warped.masked_fill_(warped < self._column(floor, warped), -torch.inf)
        return warped

    @staticmethod
    def _column(values: NDArray[np.float64], like: Tensor) -> Tensor:
        return to_device(values[:, None].astype(np.float32), like.device).to(like.dtype)


def _newest(drawn: Tensor, warp: Warp) -> tuple[int, ...]:
    """Return drawn tokens as draft tokens of a history: [n] -> n tokens.

    Where only their number counts, they are zeros, so that a GPU is not waited for.
    """
    if drawn.is_cpu or (warp.rule is not None and warp.rule.bad_words):
        return tuple(drawn.tolist())
    return (0,) * len(drawn)


def sample(weights: Tensor, noise: Tensor) -> Tensor:
    """Draw from each row of weights with exponential noise: [rows, n], [rows, n] -> [rows].

    The weights need not sum to 1.
    """
    return argmax(weights / noise)


def argmax(x: Tensor) -> Tensor:
    """Return the index of the first maximum of each row: [rows, n] -> [rows].

    numpy's is vectorised; torch's takes 7 times as long on a CPU.
    """
    if x.device.type == "cpu":
        return torch.from_numpy((x.float() if x.dtype == torch.bfloat16 else x).numpy().argmax(-1))
    return x.max(dim=-1).indices


def where_finite(tokens: Tensor, highest: Tensor) -> Tensor:
    """Return the tokens of the rows whose highest logits are finite, else NOT_FINITE, on a CPU.

    What is not a number counts as the highest of its row.
    """
    if all(map(math.isfinite, highest.tolist())):
        return tokens
    return tokens.where(highest.isfinite(), NOT_FINITE)


def truncate_to_support(q: Tensor, support: int) -> tuple[Tensor, Tensor]:
    """Return the `support` likeliest tokens of each row, renormalised.

    [rows, vocab] -> ids and probs, both [rows, support].
    """
    probs, ids = q.topk(min(support, q.shape[-1]), dim=-1)
    return ids, probs / probs.sum(-1, keepdim=True)


def to_sparse_distribution(ids: Tensor, probs: Tensor) -> SparseDistribution:
    """Return ids and probs as the arrays that are sent between processes."""
    on_host = to_host(ids, probs)
    return SparseDistribution(ids=on_host[0], probs=on_host[1])


def from_sparse_distribution(
    rows: SparseDistribution, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return ids and probs as tensors, both [rows, support]."""
    return torch.from_numpy(rows.ids).to(device), torch.from_numpy(rows.probs).to(device)


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> list[Logprobs]:
    """Return each row's logprobs: its token's and the `num_top` likeliest tokens'.

    They are of the unwarped distribution. logits [rows, vocab], tokens [rows].
    """
    x = logits.float()
    total = x.logsumexp(-1, keepdim=True)
    top, top_ids = x.topk(min(num_top, x.shape[-1]), dim=-1)
    arrays = to_host(x.gather(1, tokens[:, None]) - total, top_ids, top - total)
    own, ids, values = (array.tolist() for array in arrays)
    return [
        Logprobs(token=of_token, top_ids=tuple(row), top=tuple(of_row))
        for (of_token,), row, of_row in zip(own, ids, values, strict=True)
    ]


def score(logits: Tensor, tokens: Tensor, num_top: int) -> PromptLogprobs:
    """Return each row's logprobs, like `logprobs`, with the rank of its token, as arrays.

    logits [rows, vocab], tokens [rows]. The likeliest token has rank 1.
    """
    x = logits.float()
    total, own = x.logsumexp(-1, keepdim=True), x.gather(1, tokens[:, None])
    rank = (x > own).sum(-1) + 1
    top, top_ids = x.topk(min(num_top, x.shape[-1]), dim=-1)
    arrays = to_host((own - total)[:, 0], rank, top_ids, top - total)
    return PromptLogprobs(
        1, arrays[0], arrays[1].astype(np.uint32), arrays[2].astype(np.uint32), arrays[3]
    )


def _normalise(x: Tensor, as_weights: NDArray[np.bool_] | None) -> Tensor:
    """Return p of rows with their maximum at 0, or unnormalised weights; `x` may be lost."""
    if as_weights is None or not as_weights.any():
        return torch.softmax(x, -1)
    if as_weights.all():
        return x.exp_()
    p, rows = torch.softmax(x, -1), _indices(as_weights, x)
    p[rows] = x[rows].exp_()
    return p


def _one_hot(logits: Tensor) -> Tensor:
    p = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    return p.scatter_(1, argmax(logits)[:, None], 1.0)


def _indices(rows: NDArray[np.bool_], like: Tensor) -> Tensor:
    return to_device(np.flatnonzero(rows), like.device)
