"""Pass times fitted to the trace of a running engine (`GET /trace`) by non-negative least squares.

The coordinator's spans "verify" and "propose" hold the size of a request in `args`; the worker's
own span within, "verify" or "draft", is the time of the work alone. Without such spans, the whole
span of the coordinator counts as work.
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

from lab.simulate.pass_times import LinearPassTime
from specserve.errors import ConfigError

_COEFFICIENTS = ("fixed", "per_row", "per_sequence")
# Factor by which the squared error must fall for a fit with more coefficients.
_BETTER = 0.999
_TOLERANCE_US = 1.0


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """Size and duration of a pass."""

    rows: float
    sequences: float
    seconds: float


def fit_pass_time(passes: Sequence[MeasuredPass]) -> LinearPassTime:
    """Fit the coefficients to the median of each shape, weighted by how often it occurred.

    The median discards hiccups. There are only three coefficients, so all subsets of them are
    tried: the best one whose least squares come out non-negative is the solution.
    """
    by_shape = defaultdict(list)
    for one in passes:
        by_shape[one.rows, one.sequences].append(one.seconds)
    # [shapes, coefficients]
    shapes = np.array([(1.0, rows, sequences) for rows, sequences in by_shape])
    times = np.array([median(seconds) for seconds in by_shape.values()])
    weights = np.sqrt([len(seconds) for seconds in by_shape.values()])
    best, least = np.zeros(3), float("inf")
    for size in (1, 2, 3):
        for kept in map(list, combinations(range(3), size)):
            solution = np.zeros(3)
            solution[kept] = np.linalg.lstsq(
                shapes[:, kept] * weights[:, None], times * weights, rcond=None
            )[0]
            error = float((((shapes @ solution - times) * weights) ** 2).sum())
            if (solution >= 0).all() and error < _BETTER * least - 1e-18:
                best, least = solution, error
    return LinearPassTime(**dict(zip(_COEFFICIENTS, best.tolist(), strict=True)))


def pass_time_from_trace(file: Path, role: str) -> LinearPassTime:
    """Return the pass times of the target or of the draft. Raises ConfigError."""
    request_name, work_name, make_pass = _ROLES[role]
    try:
        spans = [
            event
            for event in json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
            if event.get("ph") == "X"
        ]
        work = sorted(
            (span["ts"], span["dur"])
            for span in spans
            if span["name"] == work_name and "sequences" not in span["args"]
        )
        requests = [
            span
            for span in spans
            if span["name"] == request_name
            and "sequences" in span["args"]
            and not span["args"]["prompt_tokens"]
        ]
        passes = [
            one
            for span in requests
            if (one := make_pass(span["args"], _work_seconds(span, work))) is not None
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"the trace {file} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not passes:
        raise ConfigError(
            f"the trace {file} has no rounds of decoding alone "
            f"from which the {role}'s pass times follow"
        )
    return fit_pass_time(passes)


def _work_seconds(span: Mapping[str, Any], work: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of the work within a span, whose times are microseconds."""
    start, end = span["ts"], span["ts"] + span["dur"]
    within = bisect_left(work, (start - _TOLERANCE_US,))
    if within < len(work) and sum(work[within]) <= end + _TOLERANCE_US:
        return work[within][1] * 1e-6
    return float(span["dur"]) * 1e-6


def _verify_pass(args: Mapping[str, Any], seconds: float) -> MeasuredPass:
    return MeasuredPass(float(args["rows"]), float(args["sequences"]), seconds)


def _draft_pass(args: Mapping[str, Any], seconds: float) -> MeasuredPass | None:
    """Return one of the passes of a proposal: there are as many as draft tokens per sequence.

    The number is unknown, and None is returned, where sequences got different numbers of draft
    tokens or some proposals were prepared in advance.
    """
    gamma, rest = divmod(args["drafted"], args["sequences"])
    if not gamma or rest or args.get("hits"):
        return None
    return MeasuredPass(float(args["sequences"]), float(args["sequences"]), seconds / gamma)


_ROLES: dict[str, tuple[str, str, Callable[[Mapping[str, Any], float], MeasuredPass | None]]] = {
    "target": ("verify", "verify", _verify_pass),
    "draft": ("propose", "draft", _draft_pass),
}
