"""Hidden states of the target beside the served texts, for heads that draft from them.

Their memory is bounded: states of many windows of a wide target would fill a device. They stay on
the device where they arrive. Knows no network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specserve.drafters.learning.served_texts import (
    CONTEXT_TOKENS,
    HELD_OUT,
    MAX_COLLECTED_TEXTS,
    MAX_HELD_OUT,
    MAX_WINDOWS,
    NEW_TOKENS,
    ServedTexts,
    Window,
)
from specserve.models.hidden_taps import SERVED_STATES_BYTES, HiddenRows

RUNNING_SHARE = 0.25
"""Share of it for running texts."""
MIN_WINDOWS = 40
"""Windows that are kept however wide the states are: fewer are not enough to learn from."""
MAX_ROWS = CONTEXT_TOKENS + 2 * NEW_TOKENS
"""Positions at the end of a running text whose states are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class StatesWindow(Window):
    """A window with the target's states behind some of its tokens."""

    states: Tensor  # [rows, width]
    indices: tuple[int, ...]  # in `tokens`, of the token before each state, in order


@dataclass(frozen=True, slots=True)
class StateLimits:
    """How many windows, held-out windows and running texts have their states kept."""

    windows: int
    held_out: int
    texts: int

    @classmethod
    def from_row_bytes(cls, row_bytes: int, *, max_bytes: int = SERVED_STATES_BYTES) -> StateLimits:
        """Return the limits for states of so many bytes each."""
        running = int(max_bytes * RUNNING_SHARE)
        num = (max_bytes - running) // ((CONTEXT_TOKENS + NEW_TOKENS) * row_bytes)
        num = max(MIN_WINDOWS, num)
        held_out = min(MAX_HELD_OUT, max(HELD_OUT, num // HELD_OUT))
        texts = max(1, running // (MAX_ROWS * row_bytes))
        return cls(min(MAX_WINDOWS, num - held_out), held_out, min(MAX_COLLECTED_TEXTS, texts))


class ServedStates:
    """The newest states of running texts, which windows take with them.

    `complete` makes what a draft learns from of a window with its states, or returns None if they
    are too few.
    """

    def __init__(
        self, limits: StateLimits, complete: Callable[[StatesWindow], Window | None]
    ) -> None:
        self._limits, self._complete = limits, complete
        self._parts: dict[int, deque[HiddenRows]] = {}  # of each sequence, by position

    def texts(self, *, new_tokens: int = NEW_TOKENS) -> ServedTexts:
        """Return served texts whose windows have their states."""
        return ServedTexts(
            max_windows=self._limits.windows,
            max_held_out=self._limits.held_out,
            max_texts=self._limits.texts,
            new_tokens=new_tokens,
            states=self,
        )

    @property
    def num_rows(self) -> int:
        """Number of states of running texts in memory."""
        return sum(len(part.rows) for parts in self._parts.values() for part in parts)

    def receive(self, hidden: Sequence[HiddenRows]) -> None:
        """Keep copies of new states; they replace those of the same and of later positions."""
        for each in hidden:
            if not len(each.rows) or (
                each.seq_id not in self._parts and len(self._parts) >= self._limits.texts
            ):
                continue
            newest = each.between(each.stop - MAX_ROWS)
            newest = HiddenRows(each.seq_id, newest.start, newest.rows.clone())
            _append(self._parts.setdefault(each.seq_id, deque()), newest)

    def take(self, seq_id: int, window: Window) -> Window | None:
        """Return the window with its states, and drop those that no later window reads."""
        stop = window.start + len(window.tokens)
        known = self._parts.get(seq_id, ())
        parts = [part for one in known if len((part := one.between(window.start, stop)).rows)]
        if not parts:
            return None
        left = [one.between(stop - CONTEXT_TOKENS) for one in known]
        self._parts[seq_id] = deque(one for one in left if len(one.rows))
        first = window.start
        return self._complete(
            StatesWindow(
                first,
                window.tokens,
                window.first_new,
                window.temperature,
                torch.cat([one.rows for one in parts]),
                tuple(i - first for one in parts for i in range(one.start, one.stop)),
            )
        )

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._parts.pop(seq_id, None)


def _append(parts: deque[HiddenRows], newest: HiddenRows) -> None:
    """Append a part, which replaces later positions, and drop parts that are too far behind it."""
    while parts and parts[-1].start >= newest.start:
        parts.pop()
    if parts and parts[-1].stop > newest.start:
        parts[-1] = parts[-1].between(0, newest.start)
    parts.append(newest)
    while parts[0].stop <= newest.stop - MAX_ROWS:
        parts.popleft()
