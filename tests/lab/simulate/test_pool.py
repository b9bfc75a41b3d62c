"""Draft pools beside pairs in the simulation: what is shared, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.simulate.load import Arrival
from lab.simulate.pass_times import LinearPassTime
from lab.simulate.run import SimulationResult, simulate
from lab.simulate.scenario import DeviceGroup, Mode, Scenario
from lab.simulate.study import load_study
from specserve.config.tree import config_from_keys
from specserve.errors import ConfigError

VERIFY = 0.020  # seconds a pass


def scenario(mode: Mode, *, engines: int, draft_s: float, devices: int = 1) -> Scenario:
    """Return two streams an engine; gamma 4, as pacers would choose different ones."""
    config = config_from_keys(
        {
            "speculation.gamma": 4,
            "replicas.min": engines,
            "replicas.max": engines,
            "draft.pool.name": "shared",
            "draft.pool.devices": devices,
        }
    )
    return Scenario(
        target=DeviceGroup(LinearPassTime(fixed=VERIFY)),
        draft=DeviceGroup(LinearPassTime(fixed=draft_s)),
        arrivals=(Arrival(0.0, 4, 300),) * (4 * engines),
        concurrency=2 * engines,
        mode=mode,
        config=config,
    )


def rates(engines: int, draft_s: float) -> tuple[SimulationResult, SimulationResult]:
    """Return the results of a pool of one draft, and of pairs."""
    pooled, pairs = (
        simulate(scenario(mode, engines=engines, draft_s=draft_s))
        for mode in (Mode.POOLED, Mode.ANTICIPATED)
    )
    assert pooled.finished == pairs.finished == 4 * engines
    assert pooled.tokens == pairs.tokens
    return pooled, pairs


@pytest.mark.parametrize("engines", [2, 4])
def test_a_pool_that_is_seldom_busy_serves_engines_almost_as_fast_as_a_draft_each(
    engines: int,
) -> None:
    pooled, pairs = rates(engines, draft_s=0.0002)
    assert pooled.tokens_per_second >= 0.95 * pairs.tokens_per_second
    assert pooled.device_seconds < 0.8 * pairs.device_seconds


def test_a_pool_that_is_too_small_slows_its_engines_and_a_second_device_helps() -> None:
    pooled, pairs = rates(4, draft_s=0.004)
    assert pooled.tokens_per_second < 0.95 * pairs.tokens_per_second
    two = simulate(scenario(Mode.POOLED, engines=4, draft_s=0.004, devices=2))
    assert two.tokens_per_second > pooled.tokens_per_second
    assert two.draft_busy <= 1.0


def test_a_pool_of_one_engine_is_a_pair() -> None:
    one = replace(scenario(Mode.POOLED, engines=1, draft_s=0.002))
    pooled, pair = simulate(one), simulate(replace(one, mode=Mode.ANTICIPATED))
    assert pooled.tokens_per_second == pytest.approx(pair.tokens_per_second, rel=0.02)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("sweep: {modes: [pooled]}", "sweep.modes pooled needs config.draft.pool"),
        ("config: {draft: {pool: {name: shared}}}\nfind: {}", "compare pools by sweep.replicas"),
        (
            "config: {replicas: {max: 2}, draft: {pool: {name: shared, max_devices: 2}}}",
            "a simulated pool keeps config.draft.pool.devices",
        ),
        (
            "config: {draft: {pool: {name: shared, devices: 2, devices_per_engine: 2}}}",
            "a simulated engine drafts on one device",
        ),
    ],
)
def test_a_study_of_pools_that_lacks_one_says_what_to_write(
    tmp_path: Path, keys: str, message: str
) -> None:
    file = tmp_path / "study.yaml"
    devices = "{target: {seconds: {fixed: 0.02}}, draft: {seconds: {fixed: 0.001}}}"
    file.write_text(f"devices: {devices}\n{keys}\n")
    with pytest.raises(ConfigError, match=message):
        load_study(file)
