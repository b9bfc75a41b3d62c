"""The contest: every entry warmed up, let choose its gamma in a short sweep, then measured in turns. Knows no system."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from benchmarks.peers.process import PeerFailed, Process
from benchmarks.peers.turn import Ask

OURS = "specserve"
ONE, MANY = 1, 8
GAMMAS = (2, 3, 5, 7)
_log = logging.getLogger(__name__)

Prompts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A way of running a system."""

    system: str
    name: str
    mode: str
    gammas: tuple[int | None, ...] = (
        None,
    )  # it may take the best of them; None: what it does by itself
    streams: tuple[int, ...] = (ONE, MANY)


ENTRIES = (
    Entry(OURS, "plain", "plain"),
    Entry(OURS, "gamma auto", "auto"),
    Entry(OURS, "fixed gamma", "draft", GAMMAS),
    Entry("transformers", "plain", "plain"),
    Entry("transformers", "assisted", "draft", (None, *GAMMAS), (ONE,)),  # it refuses a batch
    Entry("transformers", "prompt lookup", "lookup", GAMMAS, (ONE,)),  # likewise
    Entry("openvino-genai", "plain", "plain"),
    Entry("openvino-genai", "draft model", "draft", GAMMAS),
    Entry("openvino-genai", "prompt lookup", "lookup", GAMMAS),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run. The prompts are equally long."""

    prompts: Prompts
    alone: int  # how many of them come at one stream, one after the other; half of those for the choice of gamma
    max_tokens: int
    turns: int
    sweeps: int

    def ask(self, row: Row, *, gamma: int | None, short: bool = False) -> Ask:
        together = row.streams == MANY
        alone = -(-self.alone // 2) if short else self.alone
        return Ask(
            row.entry.mode,
            gamma,
            self.prompts if together else self.prompts[:alone],
            self.max_tokens,
            together,
        )


@dataclass(slots=True)
class Row:
    """What came of an entry at some number of streams."""

    entry: Entry
    streams: int
    gamma: int | None = None
    rates: list[float] = field(default_factory=list)  # output tokens a second, turn by turn
    texts: tuple[str, ...] = ()
    error: str | None = None  # it takes part no more

    @property
    def middle(self) -> float:
        return median(self.rates)

    def against(self, other: Row) -> float:
        """The ratio, turn by turn."""
        return median(mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True))

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What fails here leaves the others be."""
        try:
            yield
        except PeerFailed as error:
            self.error = str(error)


@dataclass(frozen=True, slots=True)
class Contest:
    """Systems that are up, and why others are not."""

    processes: Mapping[str, Process]
    absent: Mapping[str, str]
    plan: Plan

    def run(self, entries: Sequence[Entry] = ENTRIES) -> list[Row]:
        """A row for each entry and number of streams; one of a system that is absent says why."""
        rows = [
            Row(entry, streams, gamma=entry.gammas[0], error=self.absent.get(entry.system))
            for streams in (ONE, MANY)
            for entry in entries
            if streams in entry.streams
        ]
        _each(rows, self._warm_up, phase="warm-up")
        _each(rows, self._choose, phase="choice of gamma")
        for turn in range(self.plan.turns):
            _each(rows, self._measure, phase=f"turn {turn + 1} of {self.plan.turns}")
        _each(rows, self._read, phase="texts")
        return rows

    def _warm_up(self, row: Row) -> None:
        self._short_rate(row, row.gamma)

    def _choose(self, row: Row) -> None:
        """The fastest gamma by the median of the sweeps, in which they take turns as well."""
        gammas = row.entry.gammas
        if len(gammas) == 1:
            return
        swept: dict[int | None, list[float]] = {gamma: [] for gamma in gammas}
        for _ in range(self.plan.sweeps):
            for gamma in gammas:
                swept[gamma].append(self._short_rate(row, gamma))
        row.gamma = max(gammas, key=lambda gamma: median(swept[gamma]))

    def _measure(self, row: Row) -> None:
        row.rates.append(self._process(row).rate(self.plan.ask(row, gamma=row.gamma)))

    def _read(self, row: Row) -> None:
        row.texts = self._process(row).texts(self.plan.ask(row, gamma=row.gamma))

    def _short_rate(self, row: Row, gamma: int | None) -> float:
        return self._process(row).rate(self.plan.ask(row, gamma=gamma, short=True))

    def _process(self, row: Row) -> Process:
        return self.processes[row.entry.system]


def _each(rows: Sequence[Row], step: Callable[[Row], None], *, phase: str) -> None:
    for row in rows:
        if row.error is None:
            _log.info("%s: %s, %s, %d", phase, row.entry.system, row.entry.name, row.streams)
            with row.failing():
                step(row)
