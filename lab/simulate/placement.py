"""The two placements of the draft in a study: as expected from pass times, and as simulated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from lab.simulate.scenario import Mode, Scenario
from specserve.engine.draft_placement import (
    APART,
    TOGETHER,
    PlacementChoice,
    PlacementCosts,
    choose_placement,
)


@dataclass(frozen=True, slots=True)
class SimulatedPlacements:
    """The choice by pass times alone, and the simulated tokens a second at its loads.

    Only the simulation knows links, prompts and the coordinator's own work.
    """

    choice: PlacementChoice
    simulated: Mapping[str, tuple[float, ...]]  # by placement
    devices: Mapping[str, int]

    @classmethod
    def from_runs(cls, runs: Iterable[tuple[Scenario, float]]) -> SimulatedPlacements | None:
        """Return the best of the runs, given with their tokens a second, for each placement.

        None where no load was simulated with both. Only closed loops on one replica count: their
        streams are known.
        """
        scenarios: dict[str, Scenario] = {}
        rates: dict[str, dict[int, float]] = {TOGETHER: {}, APART: {}}
        for scenario, rate in runs:
            streams, replicas = scenario.concurrency, scenario.config.replicas
            if scenario.mode in (Mode.PLAIN, Mode.POOLED) or streams is None or replicas.max > 1:
                continue
            placement = TOGETHER if scenario.mode is Mode.TOGETHER else APART
            scenarios[placement] = scenario
            rates[placement][streams] = max(rate, rates[placement].get(streams, 0.0))
        loads = sorted(rates[TOGETHER].keys() & rates[APART].keys())
        if not loads:
            return None
        choice = choose_placement(
            _pass_costs(scenarios[TOGETHER], loads),
            _pass_costs(scenarios[APART], loads),
            loads=loads,
            max_gamma=scenarios[APART].config.speculation.max_gamma,
            alpha=scenarios[APART].acceptance.at(0),
        )
        return cls(
            choice,
            {name: tuple(own[load] for load in loads) for name, own in rates.items()},
            {name: scenario.num_devices for name, scenario in scenarios.items()},
        )

    def text(self) -> str:
        together, apart = (
            f"{name} {', '.join(f'{rate:.0f}' for rate in self.simulated[name])} "
            f"(devices: {self.devices[name]})"
            for name in (TOGETHER, APART)
        )
        return (
            f"By its pass times the draft belongs {self.choice.reason}.\n"
            f"Simulated tokens/s at these loads: {together}; {apart}."
        )

    def json(self) -> dict[str, object]:
        return {
            **asdict(self.choice),
            "simulated": dict(self.simulated),
            "devices": dict(self.devices),
        }


def _pass_costs(scenario: Scenario, loads: Sequence[int]) -> PlacementCosts:
    assert scenario.draft is not None, "every mode but plain has a draft"
    draft = scenario.draft.pass_time
    return PlacementCosts(
        scenario.target.curve, tuple((load, draft.seconds(load, load, load)) for load in loads)
    )
