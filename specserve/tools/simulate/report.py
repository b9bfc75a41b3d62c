"""What `specserve simulate` says: every case as JSON, and a table of the best gamma of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from specserve.progress import Tell, silent
from specserve.tools.simulate.run import Quantiles, Result, simulate
from specserve.tools.simulate.scenario import Mode
from specserve.tools.simulate.search import Answer, find
from specserve.tools.simulate.study import Case, cases, load_study


@dataclass(frozen=True, slots=True)
class Played:
    """A case and what came of it."""

    case: Case
    result: Result

    @property
    def place(self) -> tuple[str, str]:
        return self.case.load, self.case.replicas


@dataclass(frozen=True, slots=True)
class Report:
    """All that was simulated."""

    played: list[Played]
    answers: list[Answer]

    def text(self) -> str:
        parts = []
        if self.played:
            parts.append(_table(_HEAD, [_row(best, self._factors(best)) for best in self._best()]))
        if self.answers:
            parts.append(_table(_FOUND, [_found(answer) for answer in self.answers]))
        return "\n\n".join(parts)

    def json(self) -> Mapping[str, object]:
        return {
            "simulated": [
                {
                    "mode": one.case.mode,
                    "load": one.case.load,
                    "replicas": one.case.replicas,
                    "gamma": _gamma(one.case),
                    "result": asdict(one.result),
                }
                for one in self.played
            ],
            "found": [
                asdict(answer) | {"total_devices": answer.total_devices} for answer in self.answers
            ],
        }

    def _best(self) -> list[Played]:
        """Of each load, number of replicas and mode the gamma with the most tokens a second."""
        best: dict[tuple[str, str, Mode], Played] = {}
        for one in self.played:
            key = (*one.place, one.case.mode)
            if key not in best or one.result.tokens_per_second > best[key].result.tokens_per_second:
                best[key] = one
        return list(best.values())

    def _factors(self, one: Played) -> list[str]:
        """How many times the tokens a second of the best plain and of the best lockstep run under the same load."""
        same = {
            other.case.mode: other.result.tokens_per_second
            for other in self._best()
            if other.place == one.place
        }
        return [
            f"{one.result.tokens_per_second / same[mode]:.2f}" if same.get(mode) else ""
            for mode in (Mode.PLAIN, Mode.LOCKSTEP)
        ]


def study(file: Path, *, tell: Tell = silent) -> Report:
    """Reads the file and simulates all that it asks for."""
    asked, directory, played = load_study(file), file.parent, []
    wanted = list(cases(asked, directory=directory))
    for number, case in enumerate(wanted):
        tell(
            "simulating",
            number / len(wanted),
            f"{case.load}, {case.replicas} replicas, {case.mode}, gamma {_gamma(case)}",
        )
        played.append(Played(case, simulate(case.scenario)))
    return Report(
        played, find(asked, directory=directory, tell=tell) if asked.find is not None else []
    )


_HEAD = (
    "load", "replicas", "mode", "gamma", "tokens/s", "x plain", "x lockstep", "round ms", "tokens a round", "hit rate",
    "target busy", "draft busy", "TTFT p50, p90 s", "TPOT p50, p90 ms",
)  # fmt: skip
_FOUND = (
    "devices of a replica",
    "replicas",
    "devices",
    "tokens/s",
    "TTFT p90 s",
    "TPOT p90 ms",
    "target busy",
    "draft busy",
)


def _row(one: Played, factors: Sequence[str]) -> list[str]:
    case, done = one.case, one.result
    return [
        case.load, case.replicas, str(case.mode), _gamma(case), f"{done.tokens_per_second:.1f}", *factors, f"{1e3 * done.round_seconds:.2f}",
        f"{done.tokens_per_round:.2f}", "" if done.hit_rate is None else f"{done.hit_rate:.2f}", f"{done.target_busy:.0%}",
        f"{done.draft_busy:.0%}", _two(done.time_to_first, unit=1), _two(done.time_per_token, unit=1e3),
    ]  # fmt: skip


def _found(answer: Answer) -> list[str]:
    done = answer.result
    if done is None:
        return [answer.split, answer.why, *[""] * 6]
    first, further = (
        f"{unit * times.p90:.3g}" if times else ""
        for times, unit in ((done.time_to_first, 1), (done.time_per_token, 1e3))
    )
    number, devices = (
        (answer.why, "")
        if answer.replicas is None
        else (str(answer.replicas), str(answer.total_devices))
    )
    return [
        answer.split,
        number,
        devices,
        f"{done.tokens_per_second:.1f}",
        first,
        further,
        f"{done.target_busy:.0%}",
        f"{done.draft_busy:.0%}",
    ]


def _gamma(case: Case) -> str:
    return "auto" if case.gamma is None else str(case.gamma)


def _two(times: Quantiles | None, *, unit: float) -> str:
    return "" if times is None else f"{unit * times.p50:.3g}, {unit * times.p90:.3g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, which a terminal shows as well."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (head, *rows)
    ]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)
