"""Choose where the draft lives, by expected tokens a second: apart, or together with the target.

Apart it has a device of its own and drafts while the target verifies. Together both take turns on
all that the two devices would have had. Knows seconds of passes; no models and no workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.engine.pacer import Pacer
from specserve.types import Curve

APART, TOGETHER = "apart", "together"
ALPHA = 0.7
"""Acceptance that is assumed before any request was served."""
HIT_RATE = 0.75
"""Share of proposals that a draft apart is assumed to have prepared in advance."""


@dataclass(frozen=True, slots=True)
class PlacementCosts:
    """Seconds of passes in one of the placements."""

    target: Curve  # by rows
    draft: Curve  # of one token for each sequence, by sequences


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """The placement that promises more, and the tokens a second of both at the given loads."""

    placement: str
    loads: tuple[int, ...]  # streams
    together: tuple[float, ...]  # tokens a second, by load
    apart: tuple[float, ...]

    @property
    def reason(self) -> str:
        """Say what either placement promises."""
        streams = _listed([str(load) for load in self.loads])
        rates = {TOGETHER: self.together, APART: self.apart}
        (better, worse) = sorted(rates, key=lambda name: name != self.placement)
        return (
            f"{better}, expected to reach {_rounded(rates[better])} tokens/s at {streams} "
            f"stream{'' if self.loads == (1,) else 's'}, {worse} {_rounded(rates[worse])}"
        )


def choose_placement(
    together: PlacementCosts,
    apart: PlacementCosts,
    *,
    loads: Sequence[int],
    max_gamma: int,
    alpha: float = ALPHA,
    hit_rate: float = HIT_RATE,
) -> PlacementChoice:
    """Return the placement with more tokens a second, in the geometric mean over the loads."""
    rates_together = tuple(
        expected_rate(together, load, max_gamma=max_gamma, alpha=alpha, hit_rate=0.0)
        for load in loads
    )
    # A draft apart may also be called and waited for.
    rates_apart = tuple(
        max(
            expected_rate(apart, load, max_gamma=max_gamma, alpha=alpha, hit_rate=rate)
            for rate in (0.0, hit_rate)
        )
        for load in loads
    )
    ratio = 1.0
    for one, other in zip(rates_together, rates_apart, strict=True):
        ratio *= one / other
    return PlacementChoice(
        TOGETHER if ratio >= 1 else APART, tuple(loads), rates_together, rates_apart
    )


def expected_rate(
    costs: PlacementCosts, num_sequences: int, *, max_gamma: int, alpha: float, hit_rate: float
) -> float:
    """Return the tokens a second that the pacer expects of its best gamma."""
    pacer = Pacer(None, max_gamma=max_gamma, curve=costs.target)
    pacer.acceptance.assume(alpha)
    pacer.costs.assume(_at(costs.draft, num_sequences), count=num_sequences, hit_rate=hit_rate)
    return pacer.expected_rate(num_sequences)


def _at(curve: Curve, count: int) -> float:
    """Return the seconds at the nearest count that was measured, none of which is far."""
    return min(curve, key=lambda point: abs(point[0] - count))[1]


def _rounded(rates: Sequence[float]) -> str:
    return _listed([f"{rate:.0f}" for rate in rates])


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
