"""The output of `python -m lab.simulate`: every case as JSON, and tables of the best gammas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.simulate.placement import SimulatedPlacements
from lab.simulate.run import SimulationResult, simulate
from lab.simulate.scenario import Mode
from lab.simulate.search import SplitResult, search
from lab.simulate.statistics import Quantiles
from lab.simulate.study import Case, cases, load_study
from specserve.progress import ReportProgress, no_progress


@dataclass(frozen=True, slots=True)
class SimulatedCase:
    """A case and its result."""

    case: Case
    result: SimulationResult

    @property
    def setting(self) -> tuple[str, str]:
        """Load and replicas, which the compared modes have in common."""
        return self.case.load, self.case.replicas


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """All results of a study: the cases of its sweep, and the splits of its search."""

    cases: list[SimulatedCase]
    splits: list[SplitResult]

    def text(self) -> str:
        """Return Markdown tables, which a terminal shows as well, and the draft's placement."""
        parts = []
        if self.cases:
            rows = [_case_row(best, self._factors(best)) for best in self._best()]
            parts.append(_table(_CASE_HEAD, rows))
        if self.splits:
            parts.append(_table(_SPLIT_HEAD, [_split_row(split) for split in self.splits]))
        if self.placements is not None:
            parts.append(self.placements.text())
        return "\n\n".join(parts)

    def json(self) -> Mapping[str, object]:
        """Return all results as JSON values."""
        placements = self.placements
        return {
            "simulated": [
                {
                    "mode": one.case.mode,
                    "load": one.case.load,
                    "replicas": one.case.replicas,
                    "gamma": _gamma(one.case),
                    "result": asdict(one.result),
                }
                for one in self.cases
            ],
            "found": [
                asdict(split) | {"total_devices": split.total_devices} for split in self.splits
            ],
            "placement": None if placements is None else placements.json(),
        }

    @property
    def placements(self) -> SimulatedPlacements | None:
        """Both placements of the draft, where the sweep has simulated both."""
        return SimulatedPlacements.from_runs(
            (one.case.scenario, one.result.tokens_per_second) for one in self.cases
        )

    def _best(self) -> list[SimulatedCase]:
        """Return the gamma with the most tokens/s, for each load, number of replicas and mode."""
        best: dict[tuple[str, str, Mode], SimulatedCase] = {}
        for one in self.cases:
            key = (*one.setting, one.case.mode)
            if key not in best or one.result.tokens_per_second > best[key].result.tokens_per_second:
                best[key] = one
        return list(best.values())

    def _factors(self, one: SimulatedCase) -> list[str]:
        """Return the speedups over the best plain and best lockstep cases of the same setting."""
        tokens_per_second = {
            other.case.mode: other.result.tokens_per_second
            for other in self._best()
            if other.setting == one.setting
        }
        return [
            f"{one.result.tokens_per_second / tokens_per_second[mode]:.2f}"
            if tokens_per_second.get(mode)
            else ""
            for mode in (Mode.PLAIN, Mode.LOCKSTEP)
        ]


def run_study(file: Path, *, report_progress: ReportProgress = no_progress) -> SimulationReport:
    """Read a study, and simulate its sweep and its search."""
    study, directory, simulated = load_study(file), file.parent, []
    all_cases = list(cases(study, directory=directory))
    for number, case in enumerate(all_cases):
        report_progress(
            "simulating",
            number / len(all_cases),
            f"{case.load}, {case.replicas} replicas, {case.mode}, gamma {_gamma(case)}",
        )
        simulated.append(SimulatedCase(case, simulate(case.scenario)))
    splits = (
        search(study, directory=directory, report_progress=report_progress)
        if study.find is not None
        else []
    )
    return SimulationReport(simulated, splits)


_CASE_HEAD = (
    "load", "replicas", "mode", "gamma", "tokens/s", "x plain", "x lockstep",
    "round ms", "tokens a round", "hit rate", "target busy", "draft busy",
    "TTFT p50, p90 s", "TPOT p50, p90 ms",
)  # fmt: skip
_SPLIT_HEAD = (
    "devices of a replica",
    "replicas",
    "devices",
    "tokens/s",
    "TTFT p90 s",
    "TPOT p90 ms",
    "target busy",
    "draft busy",
)


def _case_row(one: SimulatedCase, factors: Sequence[str]) -> list[str]:
    case, result = one.case, one.result
    return [
        case.load,
        case.replicas,
        str(case.mode),
        _gamma(case),
        f"{result.tokens_per_second:.1f}",
        *factors,
        f"{1e3 * result.round_seconds:.2f}",
        f"{result.tokens_per_round:.2f}",
        "" if result.hit_rate is None else f"{result.hit_rate:.2f}",
        f"{result.target_busy:.0%}",
        f"{result.draft_busy:.0%}",
        _p50_p90(result.time_to_first, unit=1),
        _p50_p90(result.time_per_token, unit=1e3),
    ]


def _split_row(split: SplitResult) -> list[str]:
    result = split.result
    if result is None:
        return [split.split, split.why, *[""] * 6]
    first, further = (
        f"{unit * times.p90:.3g}" if times else ""
        for times, unit in ((result.time_to_first, 1), (result.time_per_token, 1e3))
    )
    number, devices = (
        (split.why, "")
        if split.replicas is None
        else (str(split.replicas), str(split.total_devices))
    )
    return [
        split.split,
        number,
        devices,
        f"{result.tokens_per_second:.1f}",
        first,
        further,
        f"{result.target_busy:.0%}",
        f"{result.draft_busy:.0%}",
    ]


def _gamma(case: Case) -> str:
    return "auto" if case.gamma is None else str(case.gamma)


def _p50_p90(times: Quantiles | None, *, unit: float) -> str:
    return "" if times is None else f"{unit * times.p50:.3g}, {unit * times.p90:.3g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (head, *rows)
    ]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)
