"""Hand hidden states of a target over to the drafter that reads them, as bytes.

They come with verdicts and leave with the next request for proposals, so no message is added.
Knows no tensors and no sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from specserve.hidden_states import HiddenStates

MAX_SENT_BYTES = 2**27
"""Bytes of states in one message, half of what a link takes. Older ones are left out.

A head does not attend to the positions of these; its drafts are accepted less often.
"""


class HiddenRelay:
    """States that have arrived with verdicts and are not sent on yet."""

    def __init__(self) -> None:
        self._waiting = deque[HiddenStates]()
        self._num_bytes = 0

    def add(self, hidden: Sequence[HiddenStates]) -> None:
        """Keep the newest states, of which one message can bring all."""
        for each in hidden:
            self._waiting.append(each)
            self._num_bytes += each.num_bytes
        while self._num_bytes > MAX_SENT_BYTES:
            self._num_bytes -= self._waiting.popleft().num_bytes

    def take(self) -> tuple[HiddenStates, ...]:
        """Return what waits, the oldest first; it is dropped here."""
        taken = tuple(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        return taken

    def release(self, seq_ids: Sequence[int]) -> None:
        kept = [each for each in self._waiting if each.seq_id not in seq_ids]
        self._waiting.clear()
        self._num_bytes = 0
        self.add(kept)


def newest_states(hidden: Sequence[HiddenStates], max_bytes: int) -> tuple[HiddenStates, ...]:
    """Return the last of these states that take no more bytes together, in their order."""
    first, num_bytes = len(hidden), 0
    while first and num_bytes + hidden[first - 1].num_bytes <= max_bytes:
        first -= 1
        num_bytes += hidden[first].num_bytes
    return tuple(hidden[first:])
