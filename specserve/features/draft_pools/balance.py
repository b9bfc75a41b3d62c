"""Balance the engines of a draft pool over its devices: each gives up what is above its share.

One that is being removed gives up all. Knows numbers of engines, and seconds; no links and no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

SETTLED = 3
"""Reports in a row with too many engines before any is requested to move; counts may be older."""
ASK_AGAIN_S = 60.0
"""Time after which an engine that was requested to move, and has not, is requested again."""
UNCHECKED_S = 5.0
"""Time without a health check after which a device counts as being removed."""


class HealthChecks:
    """The times at which Serve has examined this replica.

    Serve examines the replicas that it keeps, once a second. It says nothing to one that it removes
    before the last call has ended, and an engine's call lasts as long as the engine stays.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None

    def note(self) -> None:
        """Note a health check."""
        self._last = self._clock()

    def have_ended(self) -> bool:
        """Return whether there were checks, and there are no more."""
        return self._last is not None and self._clock() - self._last > UNCHECKED_S


class PoolBalance:
    """The engines that one device of a pool asks to move to other devices."""

    def __init__(self, replica: str, clock: Callable[[], float]) -> None:
        self._replica, self._clock = replica, clock
        self._asked: dict[int, float] = {}  # when each engine that must move was notified
        self._num_uneven = 0  # reports in a row

    def engines_to_move(
        self, engines: Sequence[int], counts: Mapping[str, int], *, is_leaving: bool = False
    ) -> tuple[int, ...]:
        """Return which of the device's engines to ask, given the engines of all devices.

        Those that joined last move. One that moves is counted on both devices for a moment. All of
        a device that is leaving are requested to move at once, if there is another one.
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
        if is_leaving:
            excess = len(engines) - len(self._asked) if len(counts) > 1 else 0
        self._num_uneven = self._num_uneven + 1 if excess > 0 else 0
        if self._num_uneven < (1 if is_leaving else SETTLED):
            return ()
        self._num_uneven = 0
        chosen = tuple(engine for engine in engines if engine not in self._asked)[-excess:]
        self._asked |= dict.fromkeys(chosen, now)
        return chosen
