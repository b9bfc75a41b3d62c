"""Balance the engines of a draft pool over its devices: each gives up what is above its share.

Knows numbers of engines, and seconds; no links and no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

SETTLED = 3
"""Reports in a row with too many engines before any is asked to move; counts may be older."""
ASK_AGAIN_S = 60.0
"""Time after which an engine that was asked to move, and has not, is asked again."""


class PoolBalance:
    """The engines that one device of a pool asks to move to other devices."""

    def __init__(self, replica: str, clock: Callable[[], float]) -> None:
        self._replica, self._clock = replica, clock
        self._asked: dict[int, float] = {}  # engines that have not moved yet: when they were asked
        self._num_uneven = 0  # reports in a row

    def engines_to_move(self, engines: Sequence[int], counts: Mapping[str, int]) -> tuple[int, ...]:
        """Return which of the device's engines to ask, given the engines of all devices.

        Those that joined last move. One that moves is counted on both devices for a moment.
        """
        now = self._clock()
        self._asked = {
            engine: when
            for engine, when in self._asked.items()
            if engine in engines and now - when < ASK_AGAIN_S
        }
        counts = {**counts, self._replica: len(engines)}
        share = -(-sum(counts.values()) // len(counts))
        excess = len(engines) - share - len(self._asked)
        self._num_uneven = self._num_uneven + 1 if excess > 0 else 0
        if self._num_uneven < SETTLED:
            return ()
        self._num_uneven = 0
        chosen = tuple(engine for engine in engines if engine not in self._asked)[-excess:]
        self._asked |= dict.fromkeys(chosen, now)
        return chosen
