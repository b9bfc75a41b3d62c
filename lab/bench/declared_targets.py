"""Make passes of targets take PASS_S, most of it slept, in the processes that import this."""

from __future__ import annotations

import time
from collections.abc import Sequence

from specserve.models.target import TargetModel
from specserve.types import Verdict, VerifyStep

PASS_S = 0.1

_verify = TargetModel.verify


def _verify_slowly(self: TargetModel, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
    start = time.perf_counter()
    verdicts = _verify(self, steps)
    time.sleep(max(0.0, start + PASS_S - time.perf_counter()))
    return verdicts


TargetModel.verify = _verify_slowly  # type: ignore[method-assign]
