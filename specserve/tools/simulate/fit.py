"""Pass times from what was measured: the trace of a running engine (`GET /trace`), by least squares without negative coefficients.

The coordinator's spans "verify" and "propose" say in `args` what was asked for; the worker's own span within, "verify" or "draft", says how
long the work alone took. A trace without such spans is read as if nothing lay between the two.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from specserve.errors import ConfigError
from specserve.tools.simulate.pass_times import Linear

_COEFFICIENTS = ("fixed", "per_row", "per_sequence")
_BETTER = 0.999  # of the squared error: what more coefficients must at least bring
_SAME_US = 1.0


@dataclass(frozen=True, slots=True)
class Pass:
    """One that was measured."""

    rows: float
    sequences: float
    seconds: float


def fit(passes: Sequence[Pass]) -> Linear:
    """Of each shape the median counts, as often as the shape was seen: a hiccup says nothing about passes.

    With three coefficients all sets of them can be tried: the best one whose least squares come out non-negative is the solution.
    """
    by_shape = defaultdict(list)
    for one in passes:
        by_shape[one.rows, one.sequences].append(one.seconds)
    shapes = np.array(
        [(1.0, rows, sequences) for rows, sequences in by_shape]
    )  # [shapes, coefficients]
    times = np.array([median(seconds) for seconds in by_shape.values()])
    weights = np.sqrt([len(seconds) for seconds in by_shape.values()])
    best, least = np.zeros(3), float("inf")
    for size in (1, 2, 3):
        for kept in map(list, combinations(range(3), size)):
            found = np.zeros(3)
            found[kept] = np.linalg.lstsq(
                shapes[:, kept] * weights[:, None], times * weights, rcond=None
            )[0]
            error = float((((shapes @ found - times) * weights) ** 2).sum())
            if (found >= 0).all() and error < _BETTER * least - 1e-18:
                best, least = found, error
    return Linear(**dict(zip(_COEFFICIENTS, best.tolist(), strict=True)))


def from_trace(file: Path, role: str) -> Linear:
    """The pass times of the target or of the draft."""
    asking, working, shape = _ROLES[role]
    try:
        spans = [
            event
            for event in json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
            if event.get("ph") == "X"
        ]
        work = sorted(
            (span["ts"], span["dur"])
            for span in spans
            if span["name"] == working and "sequences" not in span["args"]
        )
        asked = [
            span
            for span in spans
            if span["name"] == asking
            and "sequences" in span["args"]
            and not span["args"]["prompt_tokens"]
        ]
        passes = [
            one for span in asked if (one := shape(span["args"], _seconds(span, work))) is not None
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"the trace {file} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not passes:
        raise ConfigError(
            f"the trace {file} has no rounds of decoding alone from which the {role}'s pass times follow"
        )
    return fit(passes)


def _seconds(span: Mapping[str, Any], work: Sequence[tuple[float, float]]) -> float:
    """Of the work within the span; times are microseconds."""
    begun, ended = span["ts"], span["ts"] + span["dur"]
    within = bisect_left(work, (begun - _SAME_US,))
    if within < len(work) and sum(work[within]) <= ended + _SAME_US:
        return work[within][1] * 1e-6
    return float(span["dur"]) * 1e-6


def _verified(done: Mapping[str, Any], seconds: float) -> Pass:
    return Pass(float(done["rows"]), float(done["sequences"]), seconds)


def _drafted(done: Mapping[str, Any], seconds: float) -> Pass | None:
    """One of as many passes as each sequence got drafts. Where some had more than others, or were prepared, nobody knows how many those were."""
    gamma, rest = divmod(done["drafted"], done["sequences"])
    if not gamma or rest or done.get("hits"):
        return None
    return Pass(float(done["sequences"]), float(done["sequences"]), seconds / gamma)


_ROLES: dict[str, tuple[str, str, Callable[[Mapping[str, Any], float], Pass | None]]] = {
    "target": ("verify", "verify", _verified),
    "draft": ("propose", "draft", _drafted),
}
