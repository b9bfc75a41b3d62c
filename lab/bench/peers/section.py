"""Results of the systems that run in one way on one pair, and who is compared with whom.

Knows rows and rates; neither pages nor processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.bench.peers.comparison import ComparisonRow


@dataclass(slots=True)
class SystemState:
    """Version and settings of a system by its own account, and figures beside its turns."""

    about: Mapping[str, str]
    memory: int = 0
    """Bytes of all its processes after the last turn."""
    busy_when_idle: float = 0.0
    """Share of the machine that is busy while it alone is awake without a question."""


@dataclass(frozen=True, slots=True)
class ComparisonSection:
    """Rows of one pair and one interface, with the systems that made them."""

    pair: str
    interface: str
    rows: Sequence[ComparisonRow]
    systems: Mapping[str, SystemState]
    absent: Mapping[str, str]
    """Reasons why other systems could not run."""
    weight_bytes: int = 0
    """Bytes of the target's weights."""

    @property
    def loads(self) -> list[str]:
        return list(dict.fromkeys(row.load for row in self.rows))

    def rows_of(self, load: str) -> list[ComparisonRow]:
        return [row for row in self.rows if row.load == load]

    def best_peer(self, load: str) -> ComparisonRow | None:
        """Return the fastest row that is not ours, or None if no peer ran."""
        peers = [row for row in self.rows_of(load) if not row.entry.is_ours and row.error is None]
        return max(peers, key=lambda row: row.median_rate, default=None)

    def compared_rows(self, load: str) -> list[ComparisonRow]:
        """Return our rows that are compared with the best peer.

        They are those that speculate, or plain ones where nothing speculates with drafts that the
        peers have too.
        """
        ours = [
            row for row in self.rows_of(load) if row.entry.is_ours and row.entry.mode != "forced"
        ]
        return [row for row in ours if row.entry.mode != "plain"] or ours

    def forced_rows(self, load: str) -> list[ComparisonRow]:
        """Return our rows with a forced acceptance, which are compared with our plain ones."""
        return [row for row in self.rows_of(load) if row.entry.mode == "forced"]

    def own_plain(self, load: str) -> ComparisonRow | None:
        rows = (row for row in self.rows_of(load) if row.entry.is_ours)
        return next((row for row in rows if row.entry.mode == "plain" and not row.error), None)
