"""Compare systems: warm up every entry, choose its gamma in a short sweep, measure in turns.

Knows processes, loads and rates; no particular system.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from lab.bench.peers.process import PeerFailed, SystemProcess
from lab.bench.peers.turn import TurnRequest

OURS = "specserve"
"""Beginning of the names of our systems."""
GAMMAS = (2, 3, 5, 7)
WARMING_LOADS = 2
_log = logging.getLogger(__name__)

Prompts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of one length, all of them at once or one after the other.

    With one new token each, the rate is that of the prompts' tokens.
    """

    name: str
    prompts: Prompts
    max_tokens: int
    together: bool

    @property
    def unit(self) -> str:
        return "prompt tokens a second" if self.max_tokens == 1 else "output tokens a second"

    def request(self, mode: str, gamma: int | None, *, short: bool = False) -> TurnRequest:
        """Return the request for one turn, or for one of half the tokens that chooses a gamma."""
        max_tokens = -(-self.max_tokens // 2) if short else self.max_tokens
        return TurnRequest(mode, gamma, self.prompts, max_tokens, self.together)


@dataclass(frozen=True, slots=True)
class Entry:
    """System with the mode that it runs in."""

    system: str
    name: str
    mode: str
    gammas: tuple[int | None, ...] = (None,)
    """Gammas of which the entry uses the best; None is the system's own choice."""
    loads: tuple[str, ...] = ()
    """Names of the loads that it is measured under."""

    @property
    def is_ours(self) -> bool:
        return self.system.startswith(OURS)


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """Amount of work."""

    loads: tuple[Load, ...]
    turns: int
    sweeps: int


@dataclass(slots=True)
class ComparisonRow:
    """Results of an entry under one load."""

    entry: Entry
    load: str
    gamma: int | None = None
    rates: list[float] = field(default_factory=list)
    """Tokens per second, by turn."""
    texts: tuple[str, ...] = ()
    error: str | None = None
    """Failure after which the entry is skipped."""

    @property
    def median_rate(self) -> float:
        return median(self.rates)

    def ratios_to(self, other: ComparisonRow) -> list[float]:
        """Return the ratio of each turn."""
        return [mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True)]

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
    observe: Callable[[str], None] | None = None
    """Called for each system after its last answer, while it is awake."""

    def run(self, entries: Sequence[Entry]) -> list[ComparisonRow]:
        """Return a row for each load and each entry that is measured under it.

        The row of an absent system has the reason as its error.
        """
        rows = [
            ComparisonRow(
                entry, load.name, gamma=entry.gammas[0], error=self.absent.get(entry.system)
            )
            for load in self.plan.loads
            for entry in entries
            if load.name in entry.loads
        ]
        # an entry's loads one after the other: some systems start a server for each gamma
        by_entry = [row for entry in entries for row in rows if row.entry == entry]
        self._blocks(by_entry, self._choose_gamma, phase="warm-up and choice of gamma")
        for turn in range(self.plan.turns):
            phase = f"turn {turn + 1} of {self.plan.turns}"
            self._blocks(by_entry, self._measure, phase=phase, needs_warmth=True)
        self._blocks(by_entry, self._fetch_texts, phase="texts", at_end=self.observe)
        return rows

    def _blocks(
        self,
        rows: Sequence[ComparisonRow],
        step: Callable[[ComparisonRow], None],
        *,
        phase: str,
        needs_warmth: bool = False,
        at_end: Callable[[str], None] | None = None,
    ) -> None:
        """Run `step` for every row that has not failed, one system after the other.

        The other systems rest. A system that was restarted runs the first loads once before.
        """
        for name, process in self.processes.items():
            block = [row for row in rows if row.entry.system == name and row.error is None]
            if not block:
                continue
            if process.wake() and needs_warmth:
                warming = [load.name for load in self.plan.loads[:WARMING_LOADS]]
                _each([row for row in block if row.load in warming], self._warm_up, phase="warm-up")
            _each(block, step, phase=phase)
            if at_end is not None:
                at_end(name)
            process.rest()

    def _choose_gamma(self, row: ComparisonRow) -> None:
        """Warm up, and choose the gamma with the best median of sweeps, in which gammas alternate.

        The first run of a gamma is the warm-up; that of the whole load is the first one's.
        """
        gammas = row.entry.gammas
        self._rate(row, gammas[0])
        if len(gammas) == 1:
            return
        swept: dict[int | None, list[float]] = {gamma: [] for gamma in gammas}
        for sweep in range(-1, self.plan.sweeps):
            for gamma in gammas:
                rate = self._rate(row, gamma, short=True)
                if sweep >= 0:
                    swept[gamma].append(rate)
        row.gamma = max(gammas, key=lambda gamma: median(swept[gamma]))

    def _warm_up(self, row: ComparisonRow) -> None:
        self._rate(row, row.gamma, short=True)

    def _measure(self, row: ComparisonRow) -> None:
        row.rates.append(self._rate(row, row.gamma))

    def _fetch_texts(self, row: ComparisonRow) -> None:
        row.texts = self._process(row).texts(self._request(row, row.gamma))

    def _rate(self, row: ComparisonRow, gamma: int | None, *, short: bool = False) -> float:
        return self._process(row).rate(self._request(row, gamma, short=short))

    def _request(
        self, row: ComparisonRow, gamma: int | None, *, short: bool = False
    ) -> TurnRequest:
        load = next(load for load in self.plan.loads if load.name == row.load)
        return load.request(row.entry.mode, gamma, short=short)

    def _process(self, row: ComparisonRow) -> SystemProcess:
        return self.processes[row.entry.system]


def _each(
    rows: Sequence[ComparisonRow], step: Callable[[ComparisonRow], None], *, phase: str
) -> None:
    """Run `step` for every row that has not failed."""
    for row in rows:
        if row.error is None:
            _log.info("%s: %s, %s, %s", phase, row.entry.system, row.entry.name, row.load)
            with row.record_failure():
                step(row)
