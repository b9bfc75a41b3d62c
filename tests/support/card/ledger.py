"""The ledger of emulated cards: kernels launched, waits of the host, graphs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from types import FrameType

from torch import Tensor

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

    def add_kernel(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.kernels[name] += 1

    def add_replayed(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Note a kernel of a captured graph, which the host does not launch by itself."""

    def add_replay(self) -> None:
        self.num_replays += 1

    def add_paged_attention(self, read_bytes: int, flops: int) -> None:
        """Note the work of a kernel on pages, which the shapes of its arguments do not show."""

    def add_wait(self, reason: str, place: str) -> None:
        self.waits[reason, place] += 1

    def clear(self) -> None:
        fresh = type(self)()
        for part in fields(self):
            setattr(self, part.name, getattr(fresh, part.name))

    def __str__(self) -> str:
        lines = [f"{self.num_kernels} kernels, {self.num_waits} waits:"]
        for (reason, place), number in self.waits.most_common():
            lines.append(f"  {number} x {reason} at {place}")
        return "\n".join(lines)


def place() -> str:
    """Return the innermost line of the code under test that is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:  # traceback.extract_stack looks up the text of each line, too
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if any(part in path for part in PLACES) and "/tests/" not in path:
            return f"{path.rpartition('/')[2]}:{frame.f_lineno}, {name}"
        frame = frame.f_back
    return "a test"
