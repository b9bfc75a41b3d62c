"""How many replicas a load needs, and which split of devices needs the fewest of them: asked of the simulation, one scenario after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from specserve.errors import ConfigError
from specserve.progress import Tell
from specserve.tools.simulate.run import Result, simulate
from specserve.tools.simulate.scenario import Scenario
from specserve.tools.simulate.study import Find, Split, Study, scenario, with_replicas


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one split: the fewest replicas that keep the limits, or why there are none."""

    split: str
    replicas: int | None
    devices: int  # of one replica
    result: Result | None  # with that many, or with as many as were allowed
    why: str = ""

    @property
    def total_devices(self) -> int | None:
        return None if self.replicas is None else self.replicas * self.devices


def find(study: Study, *, directory: Path, tell: Tell) -> list[Answer]:
    """The cheapest first, those without an answer last. `tell` hears what is being tried."""
    assert study.find is not None
    answers = [
        _of(study, study.find, split, directory, tell) for split in study.find.splits or (None,)
    ]
    return sorted(
        answers, key=lambda answer: (answer.total_devices is None, answer.total_devices or 0)
    )


def keeps(limits: Find, result: Result) -> bool:
    """Nobody is turned away, and nine in ten wait no longer than the limits for the first token and for each further one."""
    first, further = result.time_to_first, result.time_per_token
    in_time = (first is None or first.p90 <= limits.ttft_p90_s) and (
        further is None or further.p90 <= limits.tpot_p90_s
    )
    return in_time and not result.refused and not result.failed


def _of(study: Study, limits: Find, split: Split | None, directory: Path, tell: Tell) -> Answer:
    try:
        base = scenario(study, directory=directory, split=split)
    except ConfigError as error:  # a split that is too small is an answer
        if split is None:
            raise
        return Answer(
            _named(split.target, split.draft),
            None,
            split.target + split.draft,
            None,
            why=str(error),
        )
    name = _named(base.target.num_devices, base.num_devices - base.target.num_devices)
    replicas, result = _fewest(
        base, limits, lambda count: tell("trying how many replicas do", note=f"{name}: {count}")
    )
    why = "" if replicas else f"{limits.max_replicas} replicas are too few"
    return Answer(name, replicas, base.num_devices, result, why=why)


def _fewest(base: Scenario, limits: Find, tell: Callable[[int], None]) -> tuple[int | None, Result]:
    """Doubles until the limits are kept, then halves the gap: more replicas never make it worse, but for chance."""
    too_few, enough, found = 0, 1, None
    while found is None:
        result = _with(base, enough, tell)
        if keeps(limits, result):
            found = result
        elif enough == limits.max_replicas:
            return None, result
        else:
            too_few, enough = enough, min(2 * enough, limits.max_replicas)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        result = _with(base, middle, tell)
        if keeps(limits, result):
            enough, found = middle, result
        else:
            too_few = middle
    return enough, found


def _with(base: Scenario, replicas: int, tell: Callable[[int], None]) -> Result:
    tell(replicas)
    return simulate(replace(base, config=with_replicas(base.config, replicas)))


def _named(target: int, draft: int) -> str:
    return f"target {target}, draft {draft}" if draft else f"target {target}, plain"
