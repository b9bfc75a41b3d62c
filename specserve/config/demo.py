"""The demo pair that ships with the package, and the size that its target is served with.

The target is so small that drafts hardly pay for it. Widened, it writes the same texts at the cost
of a larger model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from specserve.config.fields import FieldRule, none_as, setting

WIDENED = "200M"
"""The size of the demo's target on the command line, unless it says another."""
BYTES_A_PARAMETER = 2
"""Bytes that a parameter of the widened target takes on the disk, and in memory at least."""
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)([KMBT]?)", re.IGNORECASE)
_LEAST, _MOST = 10**7, 10**11  # the target has 6.6M itself


def parse_parameters(text: str) -> int:
    """Parse a number of parameters such as 200M, 1.5B or 8e9. Raises ValueError."""
    match = _COUNT.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(text)
    return round(float(match[1]) * UNITS[match[2].upper()])


def format_parameters(parameters: int) -> str:
    """Return the shortest spelling of a number of parameters in millions, such as 200M."""
    return f"{parameters / 10**6:g}M"


def _size() -> FieldRule:
    def read(value: object, key: str) -> int:
        parameters = parse_parameters(str(value))
        if _LEAST <= parameters <= _MOST:
            return parameters
        raise ValueError

    return FieldRule("a number of parameters from 10M on, such as 200M", read)


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """The target of the demo pair, where that is served."""

    # parameters, to which it is widened; none: as it ships
    size: int | None = setting(None, none_as("none", _size()))

    @property
    def note(self) -> str | None:
        """Line that clients and operators must know of the model; None as it ships."""
        if self.size is None:
            return None
        return (
            f"the demo pair, its target widened to {format_parameters(self.size)} parameters: "
            "the same texts at the cost of a model of that size"
        )
