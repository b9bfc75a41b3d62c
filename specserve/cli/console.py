"""Show the state of the running engines: a screen on a terminal, a line elsewhere.

Reads the status that the status board returns; knows neither Ray nor the engines.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from specserve.api.service import PoolStatus, Status
from specserve.metrics import Snapshot, merge

WINDOW_S = 10.0
"""Seconds over which rates are taken. Replicas report once a second; fewer seconds are noisy."""
_BAR_COLUMNS = 20
_SHOWN_POSITIONS = 8
_SHOWN_ERRORS = 5


@dataclass(frozen=True, slots=True)
class StatusFigures:
    """Figures of one status and the seconds before it. None marks what was not counted."""

    replicas: int
    running: int
    waiting: int
    tokens_per_second: float
    accepted: float | None
    """Share of draft tokens."""
    mean_accepted: float | None
    """Tokens of a proposal."""
    by_position: tuple[float, ...]
    """Share of proposals accepted up to each position."""
    hit_rate: float | None
    """Share of proposals that anticipation had prepared."""
    gamma: float
    cache: Mapping[str, float]
    """Shares, by role."""
    busy: Mapping[str, float]
    """Shares, by role."""
    restarts: Mapping[str, int]
    """Restarts since the start, by role."""
    losses: Sequence[str]
    """Why workers were last lost, by role."""
    succeeded: int
    failures: Mapping[str, int]
    """Failed requests by HTTP status."""
    resumed: int
    preempted: int


class StatusWindow:
    """Snapshots of the last seconds, from which rates are taken."""

    def __init__(self) -> None:
        self._snapshots: deque[tuple[float, Snapshot]] = deque()

    def add(self, status: Status, now: float) -> StatusFigures:
        """Add a status and return the figures of the window that ends with it."""
        merged = merge(status.metrics).over_models()
        self._snapshots.append((now, merged))
        while len(self._snapshots) > 2 and now - self._snapshots[1][0] >= WINDOW_S:
            self._snapshots.popleft()
        then, before = self._snapshots[0]
        growth = _growth(before, merged)
        drafts = growth("spec_decode_num_drafts_total")
        drafted = growth("spec_decode_num_draft_tokens_total")
        accepted = growth("spec_decode_num_accepted_tokens_total")
        hits = growth("anticipation_hits_total")
        tokens = growth("generation_tokens_total")
        return StatusFigures(
            replicas=status.replicas,
            running=int(total(merged, "num_requests_running")),
            waiting=int(total(merged, "num_requests_waiting")),
            tokens_per_second=tokens / (now - then) if now > then else 0.0,
            accepted=_share(accepted, drafted),
            mean_accepted=_share(accepted, drafts),
            by_position=_by_position(before, merged, drafts),
            hit_rate=_share(hits, hits + growth("anticipation_misses_total")),
            gamma=_averages(merged, "gamma").get("", 0.0),
            cache=_averages(merged, "kv_cache_usage_perc"),
            busy=_averages(merged, "device_busy_fraction"),
            restarts=_counts(merged, "worker_restarts_total"),
            losses=status.losses,
            succeeded=int(total(merged, "request_success_total")),
            failures=_counts(merged, "request_failure_total"),
            resumed=int(total(merged, "requests_resumed_total")),
            preempted=int(total(merged, "preemptions_total")),
        )


class StatusScreen:
    """Page that is redrawn every second. `title` says what is served; `hints` end the page."""

    def __init__(self, *, title: str, hints: Sequence[str]) -> None:
        self._title, self._hints = title, hints
        self._window, self._start = StatusWindow(), time.monotonic()
        self._errors: deque[str] = deque(maxlen=_SHOWN_ERRORS)
        self._current: frozenset[str] = frozenset()
        self._figures: StatusFigures | None = None

    def render(self, status: Status | None, *, missing: str = "") -> Text:
        """Return the page. Without a status it shows the last figures, and `missing` as reason."""
        now = time.monotonic()
        if status is None:
            self._record_errors([missing])
        else:
            self._figures = self._window.add(status, now)
            self._record_errors([*status.troubles, *([status.why] if status.why else [])])
        lines = self._lines(status, missing, now)
        return Text("\n", no_wrap=True, overflow="crop").join(lines)

    def _record_errors(self, errors: Sequence[str]) -> None:
        """Keep each error once, when it first appears."""
        for error in errors:
            if error not in self._current:
                self._errors.append(f"{time.strftime('%H:%M:%S')}  {' '.join(error.split())}")
        self._current = frozenset(errors)

    def _lines(self, status: Status | None, missing: str, now: float) -> Iterator[Text]:
        yield Text(f"{self._title}   up {_duration(now - self._start)}", "bold")
        yield _health(status, missing)
        if status is not None:
            yield from (Text(f"draft {where}", "dim") for where in _placements(status))
            yield from (Text(_pool_line(pool), "dim") for pool in status.pools)
        yield Text()
        if self._figures is not None:
            yield from map(Text, _rows(self._figures))
        if self._errors:
            yield Text()
            yield Text("last errors", "bold")
            yield from (Text(error, "red") for error in self._errors)
        yield Text()
        yield from (Text(hint, "dim") for hint in self._hints)


class StatusLine:
    """A line about what the engines did since the line before."""

    def __init__(self) -> None:
        self._before: Snapshot | None = None
        self._when = 0.0
        self._line: str | None = None
        self._placements: tuple[str, ...] = ()

    def next(self, status: Status, now: float) -> str | None:
        """Return the line, or None if it is the same as the last one."""
        line = self._work(status, now) if status.healthy else f"not healthy: {status.why}"
        if line == self._line:
            return None
        self._line = line
        if (placements := _placements(status)) != self._placements:
            self._placements = placements
            return f"{line}; draft {'; '.join(self._placements)}"
        return line

    def _work(self, status: Status, now: float) -> str:
        merged = merge(status.metrics).over_models()
        growth = _growth(self._before or Snapshot({}), merged)
        generated = growth("generation_tokens_total")
        drafted = growth("spec_decode_num_draft_tokens_total")
        accepted = growth("spec_decode_num_accepted_tokens_total")
        seconds = 0.0 if self._before is None else now - self._when
        self._before, self._when = merged, now
        running = f"{total(merged, 'num_requests_running'):.0f} running"
        waiting = f"{total(merged, 'num_requests_waiting'):.0f} waiting"
        parts = [running, f"{waiting} on {status.replicas} engines"]
        if generated and seconds:
            parts.append(f"{generated / seconds:.0f} tokens/s")
        if drafted:
            parts.append(f"{accepted / drafted:.0%} of drafts accepted")
        return ", ".join(parts)


def _placements(status: Status) -> tuple[str, ...]:
    """Return where the drafts live, without the rates for which it was chosen (`/health`)."""
    return tuple(where.partition(", expected")[0] for where in status.draft_placements)


def total(merged: Snapshot, name: str) -> float:
    """Return the sum over all labels."""
    return sum(sample[0] for sample in merged.samples.get(name, {}).values())


def _growth(before: Snapshot, after: Snapshot) -> Callable[[str], float]:
    """Return the increase of a counter; 0 if the status board was restarted meanwhile."""
    return lambda name: max(0.0, total(after, name) - total(before, name))


def _by_position(before: Snapshot, after: Snapshot, drafts: float) -> tuple[float, ...]:
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    old, new = before.samples.get(name, {}), after.samples.get(name, {})
    labels_in_order = sorted(new, key=lambda labels: int(labels[0]))
    counts = [new[labels][0] - old.get(labels, (0.0,))[0] for labels in labels_in_order]
    while counts and counts[-1] <= 0:
        counts.pop()
    return tuple(max(0.0, count) / drafts for count in counts) if drafts else ()


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _averages(merged: Snapshot, name: str) -> dict[str, float]:
    """Return gauges by their label, averaged over the replicas that reported them."""
    return {
        "".join(labels): value / reported
        for labels, (value, reported) in sorted(merged.samples.get(name, {}).items())
        if reported
    }


def _counts(merged: Snapshot, name: str) -> dict[str, int]:
    return {
        "".join(labels): int(sample[0])
        for labels, sample in sorted(merged.samples.get(name, {}).items())
        if sample[0]
    }


def _health(status: Status | None, missing: str) -> Text:
    if status is None:
        return Text(f"no status: {missing}", "yellow")
    if not status.healthy:
        return Text(f"not healthy: {status.why}", "red")
    if status.troubles:
        return Text("healthy, one engine or more in trouble", "yellow")
    return Text("healthy", "green")


def _rows(figures: StatusFigures) -> Iterator[str]:
    failed = sum(figures.failures.values())
    failures = f", {failed} failed ({_joined(figures.failures)})" if failed else ""
    requests = f"{figures.running} running, {figures.waiting} waiting, {figures.succeeded} done"
    positions = " ".join(f"{share:.2f}" for share in figures.by_position[:_SHOWN_POSITIONS])
    hits = "-" if figures.hit_rate is None else f"{figures.hit_rate:.0%} of proposals"
    yield _row("engines", f"{figures.replicas}")
    yield _row("requests", f"{requests}{failures}")
    yield _row("tokens/s", f"{figures.tokens_per_second:.0f}")
    yield _row("accepted", _accepted(figures))
    yield _row("by position", positions or "-")
    yield _row("anticipated", hits)
    for name, shares in (("busy", figures.busy), ("cache", figures.cache)):
        for role, share in shares.items():
            yield _row(f"{name}, {role}", f"{_bar(share)} {share:4.0%}")
    yield _row("restarts", _joined(figures.restarts) or "none")
    for loss in figures.losses:
        yield _row("  last of", " ".join(loss.split()))
    yield _row("resumed", f"{figures.resumed} requests; {figures.preempted} sequences preempted")


def _row(name: str, value: str) -> str:
    return f"{name:<16}{value}"


def _bar(share: float) -> str:
    full = round(_BAR_COLUMNS * min(1.0, max(0.0, share)))
    return "[" + "#" * full + "." * (_BAR_COLUMNS - full) + "]"


def _accepted(figures: StatusFigures) -> str:
    if figures.accepted is None or figures.mean_accepted is None:
        return f"- (gamma {figures.gamma:.2g})"
    return (
        f"{figures.accepted:.0%} of drafts, {figures.mean_accepted:.2f} a proposal "
        f"(gamma {figures.gamma:.2g})"
    )


def _joined(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _pool_line(pool: PoolStatus) -> str:
    devices = f"{pool.devices} device{'' if pool.devices == 1 else 's'}"
    engines = f"{pool.engines} engine{'' if pool.engines == 1 else 's'}"
    return f"draft pool {pool.name}: {devices} for {engines}, {pool.busy:.0%} busy"
