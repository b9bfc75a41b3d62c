"""Compare systems: warm up every entry, choose its gamma in a short sweep, measure in turns.

Knows processes and rates; no particular system.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from benchmarks.peers.process import PeerFailed, SystemProcess
from benchmarks.peers.turn import TurnRequest

OURS = "specserve"
ONE, MANY = 1, 8
GAMMAS = (2, 3, 5, 7)
_log = logging.getLogger(__name__)

Prompts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """System with the mode that it runs in."""

    system: str
    name: str
    mode: str
    gammas: tuple[int | None, ...] = (None,)
    """Gammas of which the entry uses the best; None is the system's own choice."""
    streams: tuple[int, ...] = (ONE, MANY)


ENTRIES = (
    Entry(OURS, "plain", "plain"),
    Entry(OURS, "gamma auto", "auto"),
    Entry(OURS, "fixed gamma", "draft", GAMMAS),
    Entry("transformers", "plain", "plain"),
    # transformers refuses a batch with assisted generation and with prompt lookup
    Entry("transformers", "assisted", "draft", (None, *GAMMAS), (ONE,)),
    Entry("transformers", "prompt lookup", "lookup", GAMMAS, (ONE,)),
    Entry("openvino-genai", "plain", "plain"),
    Entry("openvino-genai", "draft model", "draft", GAMMAS),
    Entry("openvino-genai", "prompt lookup", "lookup", GAMMAS),
)


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """Amount of work. All prompts have the same length."""

    prompts: Prompts
    num_serial: int
    """Prompts that one stream runs one after the other; half of them for the choice of gamma."""
    max_tokens: int
    turns: int
    sweeps: int

    def request(self, row: ComparisonRow, *, gamma: int | None, short: bool = False) -> TurnRequest:
        together = row.streams == MANY
        num_serial = -(-self.num_serial // 2) if short else self.num_serial
        return TurnRequest(
            row.entry.mode,
            gamma,
            self.prompts if together else self.prompts[:num_serial],
            self.max_tokens,
            together,
        )


@dataclass(slots=True)
class ComparisonRow:
    """Results of an entry at one number of streams."""

    entry: Entry
    streams: int
    gamma: int | None = None
    rates: list[float] = field(default_factory=list)
    """Output tokens per second, by turn."""
    texts: tuple[str, ...] = ()
    error: str | None = None
    """Failure after which the entry is skipped."""

    @property
    def median_rate(self) -> float:
        return median(self.rates)

    def ratio_to(self, other: ComparisonRow) -> float:
        """Return the median of the turns' ratios."""
        return median(mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True))

    @contextmanager
    def record_failure(self) -> Iterator[None]:
        """Keep a PeerFailed as this row's error, so that the other rows continue."""
        try:
            yield
        except PeerFailed as error:
            self.error = str(error)


@dataclass(frozen=True, slots=True)
class PeerComparison:
    """Running systems, and the reasons why others are absent."""

    processes: Mapping[str, SystemProcess]
    absent: Mapping[str, str]
    plan: ComparisonPlan

    def run(self, entries: Sequence[Entry] = ENTRIES) -> list[ComparisonRow]:
        """Return a row for each entry and number of streams.

        The row of an absent system has the reason as its error.
        """
        rows = [
            ComparisonRow(
                entry, streams, gamma=entry.gammas[0], error=self.absent.get(entry.system)
            )
            for streams in (ONE, MANY)
            for entry in entries
            if streams in entry.streams
        ]
        _each(rows, self._warm_up, phase="warm-up")
        _each(rows, self._choose_gamma, phase="choice of gamma")
        for turn in range(self.plan.turns):
            _each(rows, self._measure, phase=f"turn {turn + 1} of {self.plan.turns}")
        _each(rows, self._fetch_texts, phase="texts")
        return rows

    def _warm_up(self, row: ComparisonRow) -> None:
        self._short_rate(row, row.gamma)

    def _choose_gamma(self, row: ComparisonRow) -> None:
        """Choose the gamma with the best median of the sweeps, in which gammas take turns."""
        gammas = row.entry.gammas
        if len(gammas) == 1:
            return
        swept: dict[int | None, list[float]] = {gamma: [] for gamma in gammas}
        for _ in range(self.plan.sweeps):
            for gamma in gammas:
                swept[gamma].append(self._short_rate(row, gamma))
        row.gamma = max(gammas, key=lambda gamma: median(swept[gamma]))

    def _measure(self, row: ComparisonRow) -> None:
        row.rates.append(self._process(row).rate(self.plan.request(row, gamma=row.gamma)))

    def _fetch_texts(self, row: ComparisonRow) -> None:
        row.texts = self._process(row).texts(self.plan.request(row, gamma=row.gamma))

    def _short_rate(self, row: ComparisonRow, gamma: int | None) -> float:
        return self._process(row).rate(self.plan.request(row, gamma=gamma, short=True))

    def _process(self, row: ComparisonRow) -> SystemProcess:
        return self.processes[row.entry.system]


def _each(
    rows: Sequence[ComparisonRow], step: Callable[[ComparisonRow], None], *, phase: str
) -> None:
    """Run `step` for every row that has not failed."""
    for row in rows:
        if row.error is None:
            _log.info("%s: %s, %s, %d", phase, row.entry.system, row.entry.name, row.streams)
            with row.record_failure():
                step(row)
