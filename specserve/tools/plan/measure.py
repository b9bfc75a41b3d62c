"""alpha and c of models at hand: how much p and q overlap on a text, and what single passes take. Knows no rounds."""

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
from specserve.models.model import Opened
from specserve.progress import Tell, silent
from specserve.sampling.distribution import truncate
from specserve.types import Step

TEMPERATURES = (0.0, 1.0)
SEQUENCE = 2**61  # no request ever has this id
WINDOW, REACH = 256, 1024  # positions that are judged at once; how far they look back at most
BEHIND, TIMES = 128, 15  # positions that a timed pass looks back on; passes of each model, in turns


@dataclass(frozen=True, slots=True)
class Support:
    """Rows of a q on the tokens that it can draw."""

    ids: Tensor  # [rows, support]
    probs: Tensor  # [rows, support]


class Guesser(Protocol):
    """What drafts, as a distribution behind every token of a text."""

    context: int

    def q(self, start: int, tokens: Sequence[int]) -> Mapping[float, Support]:
        """By temperature; greedy is a one-hot. What came before `start` was asked for before."""
        ...


class Reader:
    """A model that reads."""

    def __init__(self, opened: Opened, *, support: int) -> None:
        self.runner, self.spec, self.support, self.context = (
            opened.runner,
            opened.spec,
            support,
            opened.max_context,
        )

    def logits(self, start: int, tokens: Sequence[int]) -> Tensor:  # [tokens, vocab]
        """Behind every token of a window; a step at 0 forgets the windows before."""
        return self.runner.run([Step(SEQUENCE, start, tuple(tokens))], [len(tokens)]).float()

    def p(self, start: int, tokens: Sequence[int]) -> dict[float, Tensor]:  # [tokens, vocab]
        """By temperature."""
        logits = self.logits(start, tokens)
        return {temperature: _warped(logits, temperature) for temperature in TEMPERATURES}

    def q(self, start: int, tokens: Sequence[int]) -> dict[float, Support]:
        """What the engine's drafter would draw from."""
        return {
            temperature: Support(*truncate(p, self.support if temperature else 1))
            for temperature, p in self.p(start, tokens).items()
        }

    def pass_seconds(self, rows: int) -> Callable[[], float]:
        """To be called again and again: the seconds of a pass of so many rows. A step may be repeated, so nothing is undone."""
        self.runner.run([Step(SEQUENCE, 0, (0,) * BEHIND)], [1])
        step = Step(SEQUENCE, BEHIND, (0,) * rows)

        def timed() -> float:
            begun = time.perf_counter()
            self.runner.run([step], [rows])
            return time.perf_counter() - begun

        return timed


class Tabled:
    """Counted tables."""

    def __init__(self, table: Table) -> None:
        self._table, self.context = table, REACH

    def q(self, start: int, tokens: Sequence[int]) -> dict[float, Support]:
        rows = [
            self._table.row(token, position) for position, token in enumerate(tokens, start + 1)
        ]
        ids = torch.tensor(np.stack([row.ids for row in rows if row is not None]))
        probs = torch.tensor(np.stack([row.probs for row in rows if row is not None]))
        assert len(ids) == len(tokens), "counted tables know something everywhere"
        return {0.0: Support(ids[:, :1], torch.ones_like(probs[:, :1])), 1.0: Support(ids, probs)}


@dataclass(frozen=True, slots=True)
class Overlap:
    """alpha = E[sum min(p, q)] by temperature (2211.17192, Corollary 3.6), on prefixes of a text."""

    alphas: Mapping[float, float]
    num_tokens: int


@torch.inference_mode()
def overlaps(
    target: Reader, guessers: Mapping[str, Guesser], text: Sequence[int], *, tell: Tell = silent
) -> dict[str, Overlap]:
    """Of each guesser with the target, on the same prefixes."""
    sums = {name: dict.fromkeys(TEMPERATURES, 0.0) for name in guessers}
    reach = min(REACH, target.context, *(guesser.context for guesser in guessers.values()))
    done = 0
    for start, window in _windows(text, reach):
        tell("measuring alpha", done / len(text))
        done += len(window)
        p = target.p(start, window)
        for name, guesser in guessers.items():
            for temperature, q in guesser.q(start, window).items():
                sums[name][temperature] += _overlap(p[temperature], q)
    return {
        name: Overlap({t: total / len(text) for t, total in own.items()}, len(text))
        for name, own in sums.items()
    }


def seconds(
    passes: Mapping[str, Callable[[], float]], *, times: int = TIMES, tell: Tell = silent
) -> dict[str, float]:
    """The median of each, taken in turns, so that every pass finds the caches as the others left them."""
    taken: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(times + 2):
        tell("timing passes", turn / (times + 2))
        for name, timed in passes.items():
            value = timed()
            if turn >= 2:
                taken[name].append(value)
    return {name: median(values) for name, values in taken.items()}


def _warped(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.softmax(logits / temperature, -1)


def _overlap(p: Tensor, q: Support) -> float:
    """sum_x min(p, q), added up over the rows."""
    known = q.ids < p.shape[1]  # a draft's padded embedding may be larger than the target's
    at_ids = p.gather(1, q.ids.where(known, torch.zeros_like(q.ids)))
    return float(torch.minimum(at_ids * known, q.probs).sum())


def _windows(text: Sequence[int], reach: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Each with how much of the text before it is looked back on."""
    for first in range(0, len(text), reach):
        stretch = text[first : first + reach]
        for start in range(0, len(stretch), WINDOW):
            yield start, stretch[start : start + WINDOW]
