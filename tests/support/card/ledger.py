"""The ledger of emulated cards: kernels launched, waits of the host, graphs."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field, fields

PLACES = ("/specserve/", "/transformers/models/")
"""Parts of the paths of code that a wait is attributed to."""


class CardError(RuntimeError):
    """An operation that a card refuses."""


@dataclass(slots=True)
class Ledger:
    """Everything that was counted since the last `clear`."""

    kernels: Counter[str] = field(default_factory=Counter)  # by operation
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # by reason and place
    num_graphs: int = 0
    num_replays: int = 0

    @property
    def num_kernels(self) -> int:
        return self.kernels.total()

    @property
    def num_waits(self) -> int:
        return self.waits.total()

    def clear(self) -> None:
        fresh = Ledger()
        for part in fields(self):
            setattr(self, part.name, getattr(fresh, part.name))

    def __str__(self) -> str:
        lines = [f"{self.num_kernels} kernels, {self.num_waits} waits:"]
        for (reason, place), number in self.waits.most_common():
            lines.append(f"  {number} x {reason} at {place}")
        return "\n".join(lines)


def place() -> str:
    """Return the innermost line of the code under test that is running."""
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename
        if any(part in path for part in PLACES) and "/tests/" not in path:
            return f"{path.rpartition('/')[2]}:{frame.lineno}, {frame.name}"
    return "a test"
