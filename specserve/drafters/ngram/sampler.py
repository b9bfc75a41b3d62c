"""Draw draft tokens from the rows of a table, for all sequences of a round.

Knows no texts: the last token of a sequence's step selects the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.drafters.ngram.tables import Table, TableRow
from specserve.sampling.distribution import WarpBatch, sample
from specserve.sampling.noise import Purpose, exponential, row_keys, seed_array, uniform
from specserve.types import DraftStep, Policy, SparseDistribution, Warp

_MAX_CACHED_WARPS = 16
_MAX_CACHED_ROWS = 1024
_PLAIN_WARP = Warp()


class SampledDraft:
    """The draft tokens of one sequence so far; there are no rows where each token was certain."""

    __slots__ = ("rows", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rows: list[TableRow] = []

    def append(self, token: int, row: TableRow) -> None:
        self.tokens.append(token)
        self.rows.append(row)

    def distribution(self) -> SparseDistribution | None:
        """Return q; None where each token was certain."""
        return SparseDistribution(*_arrays(self.rows)) if self.rows else None


class PendingDraft:
    """A sequence that wants tokens: the token before, the table under its warp, and its draft."""

    __slots__ = ("before", "draft", "start", "step", "table")

    def __init__(self, step: DraftStep, draft: SampledDraft, table: Table) -> None:
        self.step, self.draft, self.table = step, draft, table
        self.before, self.start = step.tokens[-1], step.stop

    def next_row(self, depth: int) -> TableRow | None:
        before = self.draft.tokens[-1] if depth else self.before
        return self.table.row(before, self.start + depth)


class WarpedTable:
    """A table under a warp, without the parts of the warp that depend on ids. It caches rows."""

    def __init__(self, table: Table, warp: Warp) -> None:
        self._table = table
        self._warp = replace(
            warp,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            logit_bias=(),
            rule=None,
        )
        self._warped: dict[TableRow, TableRow] = {}

    def row(self, token: int, position: int) -> TableRow | None:
        row = self._table.row(token, position)
        if row is None:
            return None
        if row not in self._warped:
            if len(self._warped) >= _MAX_CACHED_ROWS:
                self._warped.clear()
            self._warped[row] = self._warp_row(row)
        return self._warped[row]

    def _warp_row(self, row: TableRow) -> TableRow:
        logits = torch.from_numpy(row.probs[None, : row.support]).log()
        probs = WarpBatch([self._warp], [1]).probabilities(logits)[0].numpy()
        # Warps keep the order, so what they cut is at the end.
        return TableRow.from_weights(row.ids, probs[probs > 0], width=len(row.ids))


class TableSampler:
    """Sampler of a table's rows under each sequence's temperature, top-k, top-p and min-p.

    Penalties, biases and rules are left to the target, which is exact, too. Greedy sequences take
    the likeliest token. Coupled ones draw with the noise that the target will use, the others with
    their own.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._warped: dict[Warp, WarpedTable] = {}

    def draw(self, steps: Sequence[DraftStep]) -> list[SampledDraft]:
        """Return up to gamma tokens for each step, as far as the table knows what follows."""
        drafts = [SampledDraft() for _ in steps]
        pending = [
            PendingDraft(step, draft, self._table_under(step.policy.warp))
            for step, draft in zip(steps, drafts, strict=True)
        ]
        for each in pending:
            if each.step.policy.warp.temperature == 0:
                _take_likeliest(each)
        sampled = [each for each in pending if each.step.policy.warp.temperature > 0]
        _draw([each for each in sampled if each.step.policy.verifier != "coupled"])
        _draw_coupled([each for each in sampled if each.step.policy.verifier == "coupled"])
        return drafts

    def rank_next_tokens(
        self, policy: Policy, start: int, before: Sequence[int], width: int
    ) -> list[list[int]]:
        """Return up to `width` likely tokens to follow each of `before`.

        The first of `before` precedes the position `start`. Where the target's noise is shared, it
        is part of the ranking.
        """
        table = self._table_under(policy.warp)
        found = [table.row(token, start + i) for i, token in enumerate(before)]
        rows = [row for row in found if row is not None]
        if policy.verifier == "coupled" and policy.warp.temperature > 0 and len(rows) == len(found):
            return _rank_coupled(policy, start, rows, width)
        return [[] if row is None else row.ids[: min(width, row.support)].tolist() for row in found]

    def _table_under(self, warp: Warp) -> Table:
        """Return the table under the warp; greedy sequences use only the first of each row."""
        if warp == _PLAIN_WARP or warp.temperature == 0:
            return self._table
        if warp not in self._warped:
            if len(self._warped) >= _MAX_CACHED_WARPS:
                self._warped.clear()
            self._warped[warp] = WarpedTable(self._table, warp)
        return self._warped[warp]


def _take_likeliest(pending: PendingDraft) -> None:
    token, tokens = pending.before, pending.draft.tokens
    for position in range(pending.start, pending.start + pending.step.gamma):
        row = pending.table.row(token, position)
        if row is None:
            return
        token = row.top_token
        tokens.append(token)


def _draw(pending: Sequence[PendingDraft]) -> None:
    """Draw with one number a token, which falls between two of the row's running sums.

    That is enough where the noise is not shared.
    """
    if not pending:
        return
    noise = uniform(_keys(pending, Purpose.DRAFT)).tolist()
    for each, u in zip(pending, noise, strict=True):
        token = each.before
        for i in range(each.step.gamma):
            row = each.table.row(token, each.start + i)
            if row is None:
                break
            token = row.token_at(u[i])
            each.draft.append(token, row)


def _draw_coupled(pending: Sequence[PendingDraft]) -> None:
    """Draw depth by depth for all sequences at once.

    The ids that need noise are known with the row, and the row with the token before.
    """
    if not pending:
        return
    keys, going = _keys(pending, Purpose.COUPLED), list(range(len(pending)))
    for depth in range(keys.shape[1]):
        found = {i: pending[i].next_row(depth) for i in going if pending[i].step.gamma > depth}
        rows = {i: row for i, row in found.items() if row is not None}
        going = list(rows)
        if not going:
            return
        ids, probs = _stack(list(rows.values()))
        indices = sample(probs, exponential(keys[going, depth], ids)).tolist()
        for (i, row), index in zip(rows.items(), indices, strict=True):
            pending[i].draft.append(int(row.ids[index]), row)


def _rank_coupled(
    policy: Policy, start: int, rows: Sequence[TableRow], width: int
) -> list[list[int]]:
    """Rank by the score that decides when the target draws with the same noise."""
    keys = row_keys([policy.seed], [0], np.arange(start, start + len(rows)), Purpose.COUPLED)
    ids, probs = _stack(rows)
    order = np.argsort(-(probs / exponential(keys, ids)).numpy(), axis=1, kind="stable")
    return [
        row.ids[best[: min(width, row.support)]].tolist()
        for row, best in zip(rows, order, strict=True)
    ]


def _keys(pending: Sequence[PendingDraft], purpose: Purpose) -> Tensor:  # [sequences, max gamma, 2]
    rounds = np.array([each.start for each in pending])[:, None]
    seeds = seed_array([each.step.policy.seed for each in pending])[:, None]
    return row_keys(
        seeds, rounds, rounds + np.arange(max(each.step.gamma for each in pending)), purpose
    )


def _stack(rows: Sequence[TableRow]) -> tuple[Tensor, Tensor]:
    ids, probs = _arrays(rows)
    return torch.from_numpy(ids), torch.from_numpy(probs)


def _arrays(rows: Sequence[TableRow]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return ids and probabilities, both [rows, widest support]."""
    width = max([row.support for row in rows])
    return np.array([row.ids[:width] for row in rows]), np.array(
        [row.probs[:width] for row in rows]
    )
