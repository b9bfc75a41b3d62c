"""The distribution that is sampled: p of a mixed batch in one pass, draws from it, logprobs.

It knows neither models nor rounds. Every step works row by row, so the bits of a row do not depend
on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.transfers import to_device, to_host
from specserve.types import Logprobs, SparseDistribution, Warp

Adjustment = tuple[int, int, Warp, "History | None"]
"""First row, row past the last, warp and, for penalties, history of one sequence."""
_COLDEST = 1e-30  # a temperature below it would underflow float32; the result is the same one-hot


@dataclass(frozen=True, slots=True)
class History:
    """Tokens that the penalties of one sequence count.

    Its last row counts all of `drafts`, the row before it all but the last, and so on.
    """

    tokens: NDArray[np.int64]  # committed, with the prompt
    prompt_length: int
    drafts: tuple[int, ...] = ()


class WarpBatch:
    """Warps of a batch of rows: each sequence has some consecutive rows, all under its own Warp.

    The order is that of transformers: penalties, bias, then greedy, or temperature, top-k, top-p
    and min-p. A step that no row needs is skipped.
    """

    def __init__(
        self,
        warps: Sequence[Warp],
        num_rows: Sequence[int],
        histories: Sequence[History | None] | None = None,
    ) -> None:
        self.all_greedy = all(warp.temperature == 0 for warp in warps)
        self._adjustments = _adjustments(warps, num_rows, histories or [None] * len(warps))
        self._has_penalties = any(history is not None for *_, history in self._adjustments)
        self._counts: PenaltyCounts | None = None  # on a GPU
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
        """Return the logits with penalties and bias; the same tensor if there are none.

        Tokens `drawn` [rows, n] since the histories count as drafts.
        """
        return self._apply_adjustments(logits, drawn) if self._adjustments else logits

    def probabilities(self, logits: Tensor, drawn: Tensor | None = None) -> Tensor:
        """Return p, float32, [rows, vocab]; the logits are not changed."""
        x = self._apply_adjustments(logits, drawn)
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

    def _apply_adjustments(self, logits: Tensor, drawn: Tensor | None) -> Tensor:
        """Return float32 logits with penalties and bias; a copy if anything changes."""
        x = logits.to(torch.float32, copy=bool(self._adjustments))
        if not x.is_cpu and self._has_penalties:
            if self._counts is None:
                self._counts = PenaltyCounts(self._adjustments, x)
            self._counts.apply(x, drawn)
        for first, last, warp, history in self._adjustments:
            if history is not None and x.is_cpu:
                newest = () if drawn is None else tuple(drawn[first].tolist())
                history = replace(history, drafts=history.drafts + newest)
                _apply_penalties(x[first:last], warp, history)
            if warp.logit_bias:
                ids, values = zip(*warp.logit_bias, strict=True)
                columns = to_device(np.array(ids, dtype=np.int64), x.device)
                x[first:last, columns] += to_device(np.array(values, dtype=np.float32), x.device)
        return x

    def _truncate(self, warped: Tensor) -> None:
        """Apply top-k, top-p and min-p in place. `warped` has its maximum at 0."""
        cut = ~self._greedy & ((self._top_k > 0) | (self._top_p < 1))
        if cut.any():
            rows = _indices(cut, warped)
            warped[rows] = _top_k_top_p(warped[rows], self._top_k[cut], self._top_p[cut])
        floored = ~self._greedy & (self._min_p > 0)
        if floored.any():
            with np.errstate(divide="ignore"):
                floor = np.where(floored, np.log(self._min_p), -np.inf)
            warped.masked_fill_(warped < self._column(floor, warped), -torch.inf)

    @staticmethod
    def _column(values: NDArray[np.float64], like: Tensor) -> Tensor:
        return to_device(values[:, None].astype(np.float32), like.device).to(like.dtype)


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
    """Return each row's logprobs: its token's and those of the `num_top` likeliest tokens.

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


class PenaltyCounts:
    """How often each token occurred before each row with penalties, on a GPU.

    There, counts of the whole vocabulary are cheaper than a wait for the tokens just drawn.
    """

    def __init__(self, adjustments: Sequence[Adjustment], like: Tensor) -> None:
        vocab, device = like.shape[-1], like.device
        given = [
            (first, last, warp, history)
            for first, last, warp, history in adjustments
            if history is not None
        ]
        num_rows = [last - first for first, last, _, _ in given]
        rows = np.concatenate([np.arange(first, last) for first, last, _, _ in given])
        texts = _padded([history.tokens for *_, history in given], vocab)
        prompts = np.array([history.prompt_length for *_, history in given])
        is_generated = np.arange(texts.shape[1]) >= prompts[:, None]
        # Row j of a sequence counts the drafts before it.
        drafts = _padded(
            [
                np.array(history.drafts[: len(history.drafts) + 1 - left], dtype=np.int64)
                for (*_, history), num in zip(given, num_rows, strict=True)
                for left in range(num, 0, -1)
            ],
            vocab,
        )
        penalties = [
            (warp.repetition_penalty, warp.presence_penalty, warp.frequency_penalty)
            for *_, warp, _ in given
        ]
        columns = to_device(np.array(penalties, np.float32).repeat(num_rows, axis=0), device)
        self._repetition, self._presence, self._frequency = columns[:, :, None].unbind(1)
        self._rows = to_device(rows, device)
        owners = to_device(np.repeat(np.arange(len(given)), num_rows), device)
        ids = to_device(texts, device)
        # The column past the vocabulary counts the padding.
        none = torch.zeros(len(given), vocab + 1, dtype=torch.int32, device=device)
        ones = torch.ones_like(ids, dtype=torch.int32)
        of_drafts = to_device(drafts, device)
        self._seen = _plus(none.scatter_add(1, ids, ones)[owners], of_drafts)
        flags = to_device(is_generated.astype(np.int32), device)
        self._generated = _plus(none.scatter_add(1, ids, flags)[owners], of_drafts)

    def apply(self, logits: Tensor, drawn: Tensor | None) -> None:
        """Apply the penalties in place, counting tokens `drawn` [rows, n] since."""
        seen, generated = self._seen, self._generated
        if drawn is not None:
            newest = drawn[self._rows]
            seen, generated = _plus(seen, newest), _plus(generated, newest)
        times_generated = generated[:, :-1].to(logits.dtype)
        x = logits[self._rows]
        repeated = torch.where(x < 0, x * self._repetition, x / self._repetition)
        x = torch.where(seen[:, :-1] > 0, repeated, x)
        x = x - self._presence * (times_generated > 0) - self._frequency * times_generated
        logits[self._rows] = x


def _padded(texts: Sequence[NDArray[np.int64]], padding: int) -> NDArray[np.int64]:
    """Return texts of any lengths as rows of one array."""
    padded = np.full((len(texts), max(map(len, texts))), padding, dtype=np.int64)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return padded


def _plus(counts: Tensor, ids: Tensor) -> Tensor:
    """Return counts [rows, vocab + 1] with one more for each of ids [rows, n]."""
    return counts.scatter_add(1, ids, torch.ones_like(ids, dtype=counts.dtype))


def _adjustments(
    warps: Sequence[Warp], num_rows: Sequence[int], histories: Sequence[History | None]
) -> list[Adjustment]:
    """Return first row, row past the last, warp and history of each sequence with changed logits.

    These are the sequences with penalties or bias; the history is None without penalties.
    """
    found = []
    stop = 0
    for warp, rows, history in zip(warps, num_rows, histories, strict=True):
        start, stop = stop, stop + rows
        assert not warp.has_penalties or history is not None, "penalties need a history"
        if warp.has_penalties or warp.logit_bias:
            found.append((start, stop, warp, history if warp.has_penalties else None))
    return found


def _apply_penalties(rows: Tensor, warp: Warp, history: History) -> None:
    """Apply the penalties in place to the tokens that occurred: [rows, vocab].

    Repetition counts prompt and text; presence and frequency count the text alone.
    """
    num_rows, vocab = rows.shape
    seen = np.bincount(history.tokens, minlength=vocab)
    generated = np.bincount(history.tokens[history.prompt_length :], minlength=vocab)
    drafts = np.array(history.drafts, dtype=np.int64)
    ids = np.union1d(np.flatnonzero(seen), drafts)  # [m]
    drafted = np.zeros((len(drafts) + 1, len(ids)), dtype=np.int64)
    np.cumsum(drafts[:, None] == ids, axis=0, out=drafted[1:])  # row j counts drafts[:j]
    drafted = drafted[len(drafted) - num_rows :]  # [rows, m]

    times_generated = to_device(generated[ids] + drafted, rows.device).to(rows.dtype)
    ever_seen = to_device(seen[ids] + drafted > 0, rows.device)
    columns = to_device(ids, rows.device)
    x = rows[:, columns]
    repeated = torch.where(x < 0, x * warp.repetition_penalty, x / warp.repetition_penalty)
    x = torch.where(ever_seen, repeated, x)
    rows[:, columns] = (
        x - warp.presence_penalty * (times_generated > 0) - warp.frequency_penalty * times_generated
    )


def _top_k_top_p(x: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """Return each row with -inf for the tokens that top-k and then top-p exclude.

    x has its maximum at 0. Top-k keeps ties, as transformers does. Top-p keeps the smallest set
    that reaches its mass, the lowest ids of a tie.
    """
    vocab = x.shape[-1]
    ranked = _descending(x)
    last = to_device(np.where(top_k > 0, top_k.clip(max=vocab), vocab) - 1, x.device)
    mass = torch.where(ranked >= ranked.gather(1, last[:, None]), ranked.exp(), 0).double()
    reached = mass.cumsum(-1)
    before = reached - mass  # [rows, vocab]: of the likelier ones
    wanted = to_device(np.where(top_p < 1, top_p, np.inf)[:, None], x.device) * reached[:, -1:]
    num_kept = ((before < wanted) & (mass > 0)).sum(-1, keepdim=True).clamp_(min=1)
    cutoff = ranked.gather(1, num_kept - 1)
    above, tied = x > cutoff, x == cutoff
    num_tied = num_kept - above.sum(-1, keepdim=True)
    return x.masked_fill(~(above | (tied & (tied.cumsum(-1) <= num_tied))), -torch.inf)


def _descending(x: Tensor) -> Tensor:
    """Return each row's values in falling order.

    numpy's sort is vectorised; torch's carries the indices along and takes 30 times as long.
    """
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
    return x.sort(dim=-1, descending=True).values


def _one_hot(logits: Tensor) -> Tensor:
    p = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    return p.scatter_(1, argmax(logits)[:, None], 1.0)


def _indices(rows: NDArray[np.bool_], like: Tensor) -> Tensor:
    return to_device(np.flatnonzero(rows), like.device)
