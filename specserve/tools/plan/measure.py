"""Measure alpha and c: the overlap of p and q on a text, and the time of single passes.

Knows no rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specserve.drafters.ngram.tables import Table
from specserve.models.model import Model
from specserve.progress import ReportProgress, no_progress
from specserve.sampling.distribution import truncate_to_support
from specserve.types import Step

TEMPERATURES = (0.0, 1.0)
SEQUENCE_ID = 2**61
"""Id that no request has."""
WINDOW = 256
"""Positions in one pass."""
MAX_CONTEXT = 1024
"""Longest context of a position."""
TIMED_CONTEXT = 128
"""Context of a timed pass."""
TIMES = 15
"""Timed passes of each model, in turns."""


@dataclass(frozen=True, slots=True)
class DraftSupport:
    """Rows of q on its support."""

    ids: Tensor  # [rows, support]
    probs: Tensor  # [rows, support]


class TextDrafter(Protocol):
    """Source of q at every position of a text."""

    context: int

    def q(self, start: int, tokens: Sequence[int]) -> Mapping[float, DraftSupport]:
        """Return q by temperature. The positions before `start` were requested before."""
        ...


class ModelReader:
    """Model that computes p, q and the time of its passes."""

    def __init__(self, opened: Model, *, support: int) -> None:
        self.runner, self.spec, self.support, self.context = (
            opened.runner,
            opened.spec,
            support,
            opened.max_context,
        )

    def logits(self, start: int, tokens: Sequence[int]) -> Tensor:
        """Return logits [tokens, vocab] after every token; a step at 0 drops earlier windows."""
        return self.runner.run([Step(SEQUENCE_ID, start, tuple(tokens))], [len(tokens)]).float()

    def p(self, start: int, tokens: Sequence[int]) -> dict[float, Tensor]:
        """Return p [tokens, vocab] by temperature."""
        logits = self.logits(start, tokens)
        return {temperature: _warped(logits, temperature) for temperature in TEMPERATURES}

    def q(self, start: int, tokens: Sequence[int]) -> dict[float, DraftSupport]:
        """Return q as the engine's drafter samples from it."""
        return {
            temperature: DraftSupport(*truncate_to_support(p, self.support if temperature else 1))
            for temperature, p in self.p(start, tokens).items()
        }

    def pass_seconds(self, rows: int, *, sequences: int = 1) -> Callable[[], float]:
        """Return a function that times a pass of `rows` rows of each of 1, 2, 4, ... sequences.

        The same steps are repeated. The sequences share the timed context.
        """
        context = TIMED_CONTEXT // sequences
        # No other number of sequences has the same ids, so that passes may take turns.
        ids = [SEQUENCE_ID + i for i in range(sequences - 1, 2 * sequences - 1)]
        self.runner.run([Step(seq_id, 0, (0,) * context) for seq_id in ids], [1] * sequences)
        steps = [Step(seq_id, context, (0,) * rows) for seq_id in ids]

        def timed() -> float:
            start = time.perf_counter()
            self.runner.run(steps, [rows] * sequences)
            return time.perf_counter() - start

        return timed


class TableDrafter:
    """Drafter that takes q from counted tables."""

    def __init__(self, table: Table) -> None:
        self._table, self.context = table, MAX_CONTEXT

    def q(self, start: int, tokens: Sequence[int]) -> dict[float, DraftSupport]:
        rows = [
            self._table.row(token, position) for position, token in enumerate(tokens, start + 1)
        ]
        ids = torch.tensor(np.stack([row.ids for row in rows if row is not None]))
        probs = torch.tensor(np.stack([row.probs for row in rows if row is not None]))
        assert len(ids) == len(tokens), "counted tables have a row for every token"
        return {
            0.0: DraftSupport(ids[:, :1], torch.ones_like(probs[:, :1])),
            1.0: DraftSupport(ids, probs),
        }


@dataclass(frozen=True, slots=True)
class Overlap:
    """alpha = E[sum min(p, q)] by temperature on prefixes of a text (2211.17192, Corollary 3.6)."""

    alphas: Mapping[float, float]
    num_tokens: int


@torch.inference_mode()
def overlaps(
    target: ModelReader,
    drafters: Mapping[str, TextDrafter],
    text: Sequence[int],
    *,
    report_progress: ReportProgress = no_progress,
) -> dict[str, Overlap]:
    """Return the overlap of each drafter with the target on the same prefixes."""
    sums = {name: dict.fromkeys(TEMPERATURES, 0.0) for name in drafters}
    context = min(MAX_CONTEXT, target.context, *(drafter.context for drafter in drafters.values()))
    done = 0
    for start, window in _windows(text, context):
        report_progress("measuring alpha", done / len(text))
        done += len(window)
        p = target.p(start, window)
        for name, drafter in drafters.items():
            for temperature, q in drafter.q(start, window).items():
                sums[name][temperature] += _overlap(p[temperature], q)
    return {
        name: Overlap({t: total / len(text) for t, total in own.items()}, len(text))
        for name, own in sums.items()
    }


def seconds(
    passes: Mapping[str, Callable[[], float]],
    *,
    times: int = TIMES,
    report_progress: ReportProgress = no_progress,
) -> dict[str, float]:
    """Return the median time of each pass, in turns so that none profits from warm caches."""
    taken: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(times + 2):
        report_progress("timing passes", turn / (times + 2))
        for name, timed in passes.items():
            value = timed()
            if turn >= 2:
                taken[name].append(value)
    return {name: median(values) for name, values in taken.items()}


def _warped(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.softmax(logits / temperature, -1)


def _overlap(p: Tensor, q: DraftSupport) -> float:
    """Return sum_x min(p, q), summed over the rows."""
    # A draft's padded vocabulary may be larger than the target's.
    known = q.ids < p.shape[1]
    at_ids = p.gather(1, q.ids.where(known, torch.zeros_like(q.ids)))
    return float(torch.minimum(at_ids * known, q.probs).sum())


def _windows(text: Sequence[int], context: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield windows of the text, each with the length of its context."""
    for first in range(0, len(text), context):
        stretch = text[first : first + context]
        for start in range(0, len(stretch), WINDOW):
            yield start, stretch[start : start + WINDOW]
