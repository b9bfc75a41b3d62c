"""Outcomes of faults at gateways: what the engine and the streams of others saw, as table rows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from lab.chaos.report import percentile_of
from specserve.tools.bench.streams import Stream

HEAD = (
    "| fault | number | sequences of the gateway | gone from the engine: median | p99 | most "
    "| its streams broken | streams of others | broken | their longest gap since: p50 | p99 | most "
    "| any gap p99 | not begun | engines or workers restarted | pages leaked |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(slots=True)
class Request:
    """One stream of a client, and the gateway that served it."""

    seed: int
    stream: Stream = field(default_factory=Stream)
    port: int | None = None  # of the gateway's link; None until the engine has run it
    over: float = math.inf  # when its connection ended
    is_broken: bool = False
    connection_error: str = ""

    @property
    def failure(self) -> str:
        """Say how the stream broke, and whether the engine had run it."""
        begun = "not begun" if self.port is None else "begun"
        what = self.connection_error or self.stream.error or self.stream.body[:100]
        return f"{begun}, {self.stream.status} {what!r}"

    def gap_after(self, moment: float) -> float | None:
        """Return the longest gap that ends after a moment of this stream, if there is one."""
        gaps = [later - sooner for sooner, later in pairwise(self.stream.times) if later > moment]
        return max(gaps, default=None)


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault at a gateway."""

    at: float
    port: int
    num_sequences: int
    gone: float  # seconds until the engine ran none of them


@dataclass(slots=True)
class Outcome:
    """Faults of one kind, and what they did."""

    gone: list[float] = field(default_factory=list)
    num_sequences: int = 0  # of the gateways that were struck
    num_own_broken: int = 0
    num_others: int = 0  # streams under way at other gateways, at each fault
    num_others_broken: int = 0
    num_not_begun: int = 0  # requests that failed before an engine ran them
    pauses: list[float] = field(default_factory=list)  # of the streams of others, the longest each
    # Between any two events of streams whose gateway was never struck.
    gaps: list[float] = field(default_factory=list)
    num_restarts: int = 0
    num_leaked: int = 0

    @classmethod
    def from_strikes(cls, strikes: Sequence[Strike], requests: Sequence[Request]) -> Outcome:
        struck = {strike.port for strike in strikes}
        broken = [request for request in requests if request.is_broken]
        others = [one for one in requests if one.port is not None and one.port not in struck]
        beside = [
            (strike, request)
            for strike in strikes
            for request in requests
            if request.port not in (None, strike.port) and not request.is_broken
            if request.stream.sent < strike.at < request.over
        ]
        pauses = [request.gap_after(strike.at) for strike, request in beside]
        return cls(
            [strike.gone for strike in strikes],
            sum(strike.num_sequences for strike in strikes),
            sum(request.port in struck for request in broken),
            len(beside) + sum(request.is_broken for request in others),
            sum(request.is_broken for request in others),
            sum(request.port is None for request in broken),
            [round(pause, 4) for pause in pauses if pause is not None],
            [
                round(later - sooner, 3)
                for request in others
                for sooner, later in pairwise(request.stream.times)
            ],
        )

    @property
    def is_harmless(self) -> bool:
        """True if no stream of another gateway broke, and nothing else died or stayed behind."""
        return not (self.num_others_broken or self.num_restarts or self.num_leaked)

    def row(self, kind: str) -> str:
        cells: list[object] = [
            kind,
            len(self.gone),
            self.num_sequences,
            *(f"{percentile_of(self.gone, percent):.2f} s" for percent in (50, 99, 100)),
            self.num_own_broken,
            self.num_others,
            self.num_others_broken,
            *(f"{percentile_of(self.pauses, percent):.2f} s" for percent in (50, 99, 100)),
            f"{percentile_of(self.gaps, 99):.2f} s" if self.gaps else "-",
            self.num_not_begun,
            self.num_restarts,
            self.num_leaked,
        ]
        return f"| {' | '.join(map(str, cells))} |"

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def added(file: Path | None, outcomes: Sequence[tuple[str, Outcome]]) -> dict[str, Outcome]:
    """Return the outcomes of this run, with those that a file has of earlier ones."""
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            for kind, outcome in outcomes:
                lines.write(json.dumps({"kind": kind, **asdict(outcome)}) + "\n")
        kept = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        outcomes = [(fields.pop("kind"), Outcome(**fields)) for fields in kept]
    sums: dict[str, Outcome] = {}
    for kind, outcome in outcomes:
        sums[kind] = sums.get(kind, Outcome()) + outcome
    return sums
