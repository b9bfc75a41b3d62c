"""Fleets: the GPUs of every arrangement, its costs, and decisions that do not grow with it."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from lab.bench import decision_times, fleet
from lab.bench.fleet_parts import ARRANGEMENTS, GPUS, PAIRS, PARTS, PLAIN, POOLS, mean_output
from lab.simulate.period import PeriodResult
from specserve.cluster.gateway.prefix_affinity import MAX_COMPARED, EngineState, PrefixAffinity


def test_every_arrangement_fits_the_gpus_and_wastes_less_than_an_engine_of_each_part() -> None:
    for size in fleet.SIZES:
        for arrangement in ARRANGEMENTS:
            used = [
                arrangement.devices(part) * arrangement.num_engines(part, size) for part in PARTS
            ]
            assert size - 5 * len(PARTS) < sum(used) <= size
    assert [PLAIN.num_engines(part, 1000) for part in PARTS] == [120, 80, 120, 80]
    assert [PAIRS.num_engines(part, 1000) for part in PARTS] == [96, 64, 60, 40]
    assert POOLS[1].num_engines(PARTS[2], 1000) == 96  # and 24 devices for them


def test_a_fleet_costs_what_its_gpus_cost_for_the_tokens_of_all_engines() -> None:
    tokens = 400 * mean_output()
    result = PeriodResult(1000.0, 0.5, 0.0, 0.0, ())
    runs = [
        fleet.PartRun(part, PLAIN, 4, engines=4, rate=1.0, result=result, wall_s=0.0)
        for part in PARTS
    ]
    row = next(iter(fleet.fleet_rows(runs, dict.fromkeys(GPUS, 3.6)))).split("|")
    assert [cell.strip() for cell in row[4:8]] == ["400", "1,000", "0", f"{tokens:,.0f}"]
    assert [cell.strip() for cell in row[-3:-1]] == ["3,600", f"{1e6 / tokens:.2f}"]


def test_a_price_is_of_a_known_type() -> None:
    assert fleet.price("H100=6.88") == ("H100", 6.88)
    for text in ("H100", "H100=", "B900=1", "H100=-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="USD"):
            fleet.price(text)


def test_the_timed_router_compares_no_more_than_a_bounded_number_of_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    rank = PrefixAffinity.rank

    def counted(
        affinity: PrefixAffinity, tokens: object, salt: bytes, engines: dict[str, EngineState]
    ) -> list[str]:
        compared.append(len(engines))
        return rank(affinity, tokens, salt, engines)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefixAffinity, "rank", counted)
    monkeypatch.setattr(decision_times, "ONGOING", 1)
    times = asyncio.run(decision_times._router(3 * MAX_COMPARED, 20))
    assert [len(one.seconds) for one in times] == [20, 5]
    assert max(compared) <= MAX_COMPARED
