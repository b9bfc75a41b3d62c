"""Drafts drawn from the rows of a table, for all sequences of a round. Knows no texts: a sequence is its step, whose last token says the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.drafters.ngram.tables import Row, Table
from specserve.sampling.distribution import WarpBatch, sample
from specserve.sampling.noise import Purpose, exponential, row_keys, seed_array, uniform
from specserve.types import DraftStep, Policy, SparseRows, Warp

_MOST_WARPS, _MOST_ROWS = 16, 1024  # that are remembered
_PLAIN = Warp()


class Guess:
    """What was drawn for one sequence, growing; no rows where each token was certain."""

    __slots__ = ("rows", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rows: list[Row] = []

    def add(self, token: int, row: Row) -> None:
        self.tokens.append(token)
        self.rows.append(row)

    def q(self) -> SparseRows | None:
        return SparseRows(*_arrays(self.rows)) if self.rows else None


class Drawing:
    """A sequence that wants tokens: behind which, from what table, and those that it has."""

    __slots__ = ("before", "guess", "start", "step", "table")

    def __init__(self, step: DraftStep, guess: Guess, table: Table) -> None:
        self.step, self.guess, self.table = step, guess, table
        self.before, self.start = step.tokens[-1], step.start + len(step.tokens)

    def next_row(self, depth: int) -> Row | None:
        return self.table.row(self.guess.tokens[-1] if depth else self.before, self.start + depth)


class Warped:
    """A table under a warp, as far as that looks at no ids; what was warped before is remembered."""

    def __init__(self, table: Table, warp: Warp) -> None:
        self._table = table
        self._warp = replace(
            warp, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, logit_bias=()
        )
        self._done: dict[Row, Row] = {}

    def row(self, token: int, position: int) -> Row | None:
        row = self._table.row(token, position)
        if row is None:
            return None
        if row not in self._done:
            if len(self._done) >= _MOST_ROWS:
                self._done.clear()
            self._done[row] = self._warped(row)
        return self._done[row]

    def _warped(self, row: Row) -> Row:
        logits = torch.from_numpy(row.probs[None, : row.support]).log()
        probs = WarpBatch([self._warp], [1]).probabilities(logits)[0].numpy()
        return Row.of(
            row.ids, probs[probs > 0], width=len(row.ids)
        )  # warps keep the order, so what they cut is at the end


class Sampler:
    """A sequence's temperature, top-k, top-p and min-p apply to the rows; penalties and biases are left to the target, which is exact, too.

    Greedy sequences take what is likeliest. Coupled ones draw with the noise that the target will use, the others with their own.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._warped: dict[Warp, Warped] = {}

    def guesses(self, steps: Sequence[DraftStep]) -> list[Guess]:
        """Up to gamma tokens each: as far as the table knows what follows."""
        guesses = [Guess() for _ in steps]
        draws = [
            Drawing(step, guess, self._under(step.policy.warp))
            for step, guess in zip(steps, guesses, strict=True)
        ]
        for draw in draws:
            if draw.step.policy.warp.temperature == 0:
                _take(draw)
        sampled = [draw for draw in draws if draw.step.policy.warp.temperature > 0]
        _draw([draw for draw in sampled if draw.step.policy.verifier != "coupled"])
        _draw_coupled([draw for draw in sampled if draw.step.policy.verifier == "coupled"])
        return guesses

    def likely(
        self, policy: Policy, start: int, before: Sequence[int], width: int
    ) -> list[list[int]]:
        """Up to `width` tokens that may come after each of these, of which the first stands before `start`; by the noise too, if the target's."""
        table = self._under(policy.warp)
        found = [table.row(token, start + i) for i, token in enumerate(before)]
        rows = [row for row in found if row is not None]
        if policy.verifier == "coupled" and policy.warp.temperature > 0 and len(rows) == len(found):
            return _ranked(policy, start, rows, width)
        return [[] if row is None else row.ids[: min(width, row.support)].tolist() for row in found]

    def _under(self, warp: Warp) -> Table:
        """Greedy ones look at the first of a row alone."""
        if warp == _PLAIN or warp.temperature == 0:
            return self._table
        if warp not in self._warped:
            if len(self._warped) >= _MOST_WARPS:
                self._warped.clear()
            self._warped[warp] = Warped(self._table, warp)
        return self._warped[warp]


def _take(draw: Drawing) -> None:
    token, tokens = draw.before, draw.guess.tokens
    for position in range(draw.start, draw.start + draw.step.gamma):
        row = draw.table.row(token, position)
        if row is None:
            return
        token = row.first
        tokens.append(token)


def _draw(draws: Sequence[Drawing]) -> None:
    """One number a token is enough where nobody else draws with it: it falls between two of the row's running sums."""
    if not draws:
        return
    noise = uniform(_keys(draws, Purpose.DRAFT)).tolist()
    for draw, own in zip(draws, noise, strict=True):
        token = draw.before
        for i in range(draw.step.gamma):
            row = draw.table.row(token, draw.start + i)
            if row is None:
                break
            token = row.at(own[i])
            draw.guess.add(token, row)


def _draw_coupled(draws: Sequence[Drawing]) -> None:
    """Depth by depth for all sequences at once: which ids want noise is known with the row, and that with the token before."""
    if not draws:
        return
    keys, going = _keys(draws, Purpose.COUPLED), list(range(len(draws)))
    for depth in range(keys.shape[1]):
        found = {i: draws[i].next_row(depth) for i in going if draws[i].step.gamma > depth}
        rows = {i: row for i, row in found.items() if row is not None}
        going = list(rows)
        if not going:
            return
        ids, probs = _stacked(list(rows.values()))
        places = sample(probs, exponential(keys[going, depth], ids)).tolist()
        for (i, row), place in zip(rows.items(), places, strict=True):
            draws[i].guess.add(int(row.ids[place]), row)


def _ranked(policy: Policy, start: int, rows: Sequence[Row], width: int) -> list[list[int]]:
    """By the score that decides when the target draws with the same noise."""
    keys = row_keys([policy.seed], [0], np.arange(start, start + len(rows)), Purpose.COUPLED)
    ids, probs = _stacked(rows)
    order = np.argsort(-(probs / exponential(keys, ids)).numpy(), axis=1, kind="stable")
    return [
        row.ids[best[: min(width, row.support)]].tolist()
        for row, best in zip(rows, order, strict=True)
    ]


def _keys(draws: Sequence[Drawing], purpose: Purpose) -> Tensor:  # [draws, max gamma, 2]
    rounds = np.array([draw.start for draw in draws])[:, None]
    seeds = seed_array([draw.step.policy.seed for draw in draws])[:, None]
    return row_keys(
        seeds, rounds, rounds + np.arange(max(draw.step.gamma for draw in draws)), purpose
    )


def _stacked(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    ids, probs = _arrays(rows)
    return torch.from_numpy(ids), torch.from_numpy(probs)


def _arrays(rows: Sequence[Row]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """ids and probs, both [rows, widest support]."""
    width = max([row.support for row in rows])
    return np.array([row.ids[:width] for row in rows]), np.array(
        [row.probs[:width] for row in rows]
    )
