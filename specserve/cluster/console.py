"""The screen of `specserve serve`: what runs, how fast, and what went wrong, on one page that is drawn again every second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from specserve.api.service import Status
from specserve.cluster.figures import Figures, Window
from specserve.terminal import BOLD, DIM, GREEN, RED, YELLOW, Terminal, bar

_BAR = 20  # characters
_POSITIONS = 8  # that are shown
_KEPT = 5  # of the last errors
Line = tuple[str, int]  # with its colour


class Screen:
    """`title` says what is served where; `hints` stand at the bottom."""

    def __init__(self, terminal: Terminal, *, title: str, hints: Sequence[str]) -> None:
        self._terminal, self._title, self._hints = terminal, title, hints
        self._window, self._begun = Window(), time.monotonic()
        self._troubles: deque[Line] = deque(maxlen=_KEPT)
        self._last: frozenset[str] = frozenset()
        self._figures: Figures | None = None

    def draw(self, status: Status | None, *, missing: str = "") -> None:
        """`missing` says why there is no status; then the figures are the last ones."""
        now = time.monotonic()
        if status is not None:
            self._figures = self._window.look(status, now)
        self._remember(
            [missing]
            if status is None
            else [*status.troubles, *([status.why] if status.why else [])]
        )
        self._terminal.redraw_page([*self._lines(status, missing, now)])

    def _remember(self, troubles: Sequence[str]) -> None:
        """Each when it comes up, not as long as it lasts."""
        for trouble in troubles:
            if trouble not in self._last:
                self._troubles.append(
                    (f"{time.strftime('%H:%M:%S')}  {' '.join(trouble.split())}", RED)
                )
        self._last = frozenset(troubles)

    def _lines(self, status: Status | None, missing: str, now: float) -> Iterator[Line]:
        yield f"{self._title}   up {_duration(now - self._begun)}", BOLD
        yield _health(status, missing)
        yield "", 0
        if self._figures is not None:
            yield from ((line, 0) for line in _rows(self._figures))
        if self._troubles:
            yield "", 0
            yield "last errors", BOLD
            yield from self._troubles
        yield "", 0
        yield from ((hint, DIM) for hint in self._hints)


def _health(status: Status | None, missing: str) -> Line:
    if status is None:
        return f"no status: {missing}", YELLOW
    if not status.healthy:
        return f"not healthy: {status.why}", RED
    return (
        ("healthy, one engine or more in trouble", YELLOW)
        if status.troubles
        else ("healthy", GREEN)
    )


def _rows(figures: Figures) -> Iterator[str]:
    yield _row("engines", f"{figures.replicas}")
    yield _row(
        "requests",
        f"{figures.running} running, {figures.waiting} waiting, {figures.succeeded} done{_failed(figures.failures)}",
    )
    yield _row("tokens/s", f"{figures.tokens_per_second:.0f}")
    yield _row("accepted", _accepted(figures))
    yield _row(
        "by position", " ".join(f"{share:.2f}" for share in figures.by_position[:_POSITIONS]) or "-"
    )
    yield _row(
        "lay ready", "-" if figures.hit_rate is None else f"{figures.hit_rate:.0%} of proposals"
    )
    for name, shares in (("busy", figures.busy), ("cache", figures.cache)):
        yield from (
            _row(f"{name}, {role}", f"{bar(share, width=_BAR)} {share:4.0%}")
            for role, share in shares.items()
        )
    yield _row("restarts", _joined(figures.restarts) or "none")
    yield _row("resumed", f"{figures.resumed} requests; {figures.preempted} sequences set back")


def _row(name: str, value: str) -> str:
    return f"{name:<16}{value}"


def _accepted(figures: Figures) -> str:
    if figures.accepted is None or figures.mean_accepted is None:
        return f"- (gamma {figures.gamma:.1f})"
    return f"{figures.accepted:.0%} of drafts, {figures.mean_accepted:.2f} a proposal (gamma {figures.gamma:.1f})"


def _failed(failures: Mapping[str, int]) -> str:
    return f", {sum(failures.values())} failed ({_joined(failures)})" if failures else ""


def _joined(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
