"""The line that `specserve serve` prints now and then: what the engines did since the last one."""

from __future__ import annotations

from specserve.api.service import Status
from specserve.cluster.figures import total
from specserve.metrics import Snapshot, merge


class Pulse:
    """Compares each status with the one before."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._when: float | None = None
        self._line: str | None = None

    def line(self, status: Status, now: float) -> str | None:
        """None when nothing has happened that was not said before."""
        line = self._trouble(status) or self._work(status, now)
        if line == self._line:
            return None
        self._line = line
        return line

    def _trouble(self, status: Status) -> str | None:
        return None if status.healthy else f"not healthy: {status.why}"

    def _work(self, status: Status, now: float) -> str:
        merged = merge(status.metrics)
        written, drafted = (
            self._grown("generation_tokens_total", merged),
            self._grown("spec_decode_num_draft_tokens_total", merged),
        )
        accepted = self._grown("spec_decode_num_accepted_tokens_total", merged)
        seconds, self._when = (now - self._when if self._when is not None else 0.0), now
        parts = [
            f"{total(merged, 'num_requests_running'):.0f} running, {total(merged, 'num_requests_waiting'):.0f} waiting on {status.replicas} engines"
        ]
        if written and seconds:
            parts.append(f"{written / seconds:.0f} tokens/s")
        if drafted:
            parts.append(f"{accepted / drafted:.0%} of drafts accepted")
        return ", ".join(parts)

    def _grown(self, name: str, merged: Snapshot) -> float:
        before, self._counts[name] = self._counts.get(name, 0.0), total(merged, name)
        return self._counts[name] - before
