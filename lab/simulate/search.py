"""The search for the fewest replicas that keep a load's limits, and the cheapest device split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lab.simulate.run import SimulationResult, simulate
from lab.simulate.scenario import Mode
from lab.simulate.study import (
    FindConfig,
    SplitConfig,
    StudyConfig,
    scenario,
    with_replicas,
)
from specserve.errors import ConfigError
from specserve.progress import ReportProgress


@dataclass(frozen=True, slots=True)
class SplitResult:
    """The fewest replicas of one split that keep the limits, or why there are none."""

    split: str
    replicas: int | None
    devices: int  # per replica
    result: SimulationResult | None  # with that many replicas, or with as many as were allowed
    why: str = ""

    @property
    def total_devices(self) -> int | None:
        return None if self.replicas is None else self.replicas * self.devices


def search(
    study: StudyConfig, *, directory: Path, report_progress: ReportProgress
) -> list[SplitResult]:
    """Return the splits of `find`, cheapest first and those that do not suffice last."""
    limits = study.find
    assert limits is not None
    results = [
        _search_split(study, limits, split, directory, report_progress)
        for split in limits.splits or (None,)
    ]
    return sorted(results, key=lambda one: (one.total_devices is None, one.total_devices or 0))


def keeps_limits(limits: FindConfig, result: SimulationResult) -> bool:
    """Return whether no request was refused and the p90 latencies are within the limits."""
    first, further = result.time_to_first, result.time_per_token
    in_time = (first is None or first.p90 <= limits.ttft_p90_s) and (
        further is None or further.p90 <= limits.tpot_p90_s
    )
    return in_time and not result.refused and not result.failed


def _search_split(
    study: StudyConfig,
    limits: FindConfig,
    split: SplitConfig | None,
    directory: Path,
    report_progress: ReportProgress,
) -> SplitResult:
    try:
        base = scenario(study, directory=directory, split=split)
    except ConfigError as error:  # a split that is too small is a result, too
        if split is None:
            raise
        return SplitResult(
            _split_name(split.target, split.draft),
            None,
            split.target + (split.draft or 0),
            None,
            why=str(error),
        )
    num_target = base.target.num_devices
    num_draft = None if base.mode is Mode.TOGETHER else base.num_devices - num_target
    name = _split_name(num_target, num_draft)

    def simulate_with(replicas: int) -> SimulationResult:
        report_progress("trying how many replicas do", note=f"{name}: {replicas}")
        return simulate(replace(base, config=with_replicas(base.config, replicas)))

    replicas, result = _fewest_replicas(limits, simulate_with)
    why = "" if replicas else f"{limits.max_replicas} replicas are too few"
    return SplitResult(name, replicas, base.num_devices, result, why=why)


def _fewest_replicas(
    limits: FindConfig, simulate_with: Callable[[int], SimulationResult]
) -> tuple[int | None, SimulationResult]:
    """Double the replicas until the limits are kept, then bisect.

    This relies on more replicas never being worse, except by chance.
    """
    too_few, enough, found = 0, 1, None
    while found is None:
        result = simulate_with(enough)
        if keeps_limits(limits, result):
            found = result
        elif enough == limits.max_replicas:
            return None, result
        else:
            too_few, enough = enough, min(2 * enough, limits.max_replicas)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        result = simulate_with(middle)
        if keeps_limits(limits, result):
            enough, found = middle, result
        else:
            too_few = middle
    return enough, found


def _split_name(target: int, draft: int | None) -> str:
    if draft is None:
        return f"target {target}, together"
    return f"target {target}, draft {draft}" if draft else f"target {target}, plain"
