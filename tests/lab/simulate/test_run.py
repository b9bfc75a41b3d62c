"""The simulation must follow the papers' formulas where they apply, and lose no request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lab.simulate import clock
from lab.simulate.acceptance_model import AcceptanceConfig, AcceptanceModel
from lab.simulate.deployment import Autoscaler
from lab.simulate.devices import HostConfig, SimulatedDrafter
from lab.simulate.load import Arrival
from lab.simulate.pass_times import LinearPassTime
from lab.simulate.run import SimulationResult, simulate
from lab.simulate.scenario import DeviceGroup, Mode, Scenario
from specserve.config.sections import ReplicasConfig
from specserve.config.tree import config_from_keys
from specserve.theory import tokens_per_round
from specserve.types import DraftStep, Proposal

VERIFY, DRAFT = 0.010, 0.001  # seconds per pass


def scenario(
    mode: Mode,
    gamma: int | None,
    *,
    clients: int = 1,
    tokens: int = 2000,
    requests: int = 1,
    **fields: Any,
) -> Scenario:
    """Return a scenario with prompts of one token, so that a prefill is a pass like any other.

    No request waits for another's prompt.
    """
    return Scenario(
        target=DeviceGroup(LinearPassTime(fixed=VERIFY)),
        draft=DeviceGroup(LinearPassTime(fixed=DRAFT)),
        arrivals=(Arrival(0.0, 1, tokens),) * requests,
        concurrency=clients,
        mode=mode,
        config=config_from_keys({"speculation.gamma": gamma}),
        **fields,
    )


def bursts(*, calm: float, rules: dict[str, object], startup_s: float = 5.0) -> Scenario:
    """Return sixty requests within six seconds, and four later ones `calm` seconds apart."""
    burst = [Arrival(0.1 * i, 8, 400) for i in range(60)]
    late = [Arrival(40.0 + calm * i, 8, 50) for i in range(4)]
    config = config_from_keys(
        {"speculation.gamma": 0, "replicas": {"target_ongoing_requests": 5, **rules}}
    )
    base = scenario(Mode.PLAIN, 0, startup_s=startup_s)
    return replace(base, arrivals=(*burst, *late), concurrency=None, config=config)


def all_finished(result: SimulationResult, count: int) -> bool:
    return (result.finished, result.refused, result.failed) == (count, 0, 0)


def test_simulated_time_passes_only_in_waits_and_takes_no_real_time() -> None:
    async def wait() -> list[tuple[float, str]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[float, str]] = []

        async def one(name: str, *seconds: float) -> None:
            for pause in seconds:
                await asyncio.sleep(pause)
                seen.append((round(loop.time(), 6), name))

        await asyncio.gather(one("a", 3600.0, 100.0), one("b", 3650.0, 1e6))
        return seen

    assert clock.run(wait()) == [(3600, "a"), (3650, "b"), (3700, "a"), (1003650, "b")]


def test_a_deadlock_is_an_error_instead_of_an_endless_wait() -> None:
    async def never() -> None:
        await asyncio.sleep(2.0)
        await asyncio.Event().wait()

    with pytest.raises(clock.Deadlock, match=r"at 2\.000000 s"):
        clock.run(never())


def test_simulated_texts_do_not_depend_on_the_order_of_calls() -> None:
    one, other = (AcceptanceModel(7, AcceptanceConfig(alpha=0.5)) for _ in range(2))
    late = one.draft_tokens(3, 500, 520, depth=0)
    other.draft_tokens(3, 40, 60, depth=0)
    assert other.draft_tokens(3, 500, 520, depth=0) == late
    assert one.verify(3, 40, [])[1] == other.verify(3, 40, [])[1]
    assert (
        AcceptanceModel(8, AcceptanceConfig(alpha=0.5)).draft_tokens(3, 500, 520, depth=0) != late
    )


def test_the_next_token_has_each_rank_by_the_profile_and_is_never_the_rejected_one() -> None:
    model, shares = AcceptanceModel(1, AcceptanceConfig(ranks=(0.5, 0.7))), (0.5, 0.2, 0.0)
    ranked = [model.likeliest(0, i, 3, but=None) for i in range(4000)]
    true = [model.verify(0, i, [])[1] for i in range(4000)]
    for rank, share in enumerate(shares):
        assert sum(
            row[rank] == token for row, token in zip(ranked, true, strict=True)
        ) / 4000 == pytest.approx(share, abs=0.03)
    assert all(len(set(row)) == 3 for row in ranked)
    assert all(token not in model.likeliest(0, i, 3, but=token) for i, token in enumerate(true))


@pytest.mark.parametrize("mode", list(Mode))
def test_the_same_scenario_gives_the_same_result_and_another_seed_another(mode: Mode) -> None:
    base_scenario = scenario(mode, None, clients=3, requests=6, tokens=150)
    assert simulate(base_scenario) == simulate(base_scenario)
    assert mode is Mode.PLAIN or simulate(replace(base_scenario, seed=1)) != simulate(base_scenario)


def test_plain_decoding_writes_a_token_a_pass() -> None:
    result = simulate(scenario(Mode.PLAIN, 0, tokens=500))
    assert result.tokens_per_second == pytest.approx(1 / VERIFY, rel=1e-6)
    assert result.target_busy == pytest.approx(1.0)
    assert result.time_per_token is not None
    assert result.time_per_token.p50 == pytest.approx(VERIFY)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.6, 2), (0.75, 4), (0.9, 7)])
def test_lockstep_is_theorem_3_8(alpha: float, gamma: int) -> None:
    result = simulate(
        scenario(
            Mode.LOCKSTEP, gamma, requests=2, tokens=8000, acceptance=AcceptanceConfig(alpha=alpha)
        )
    )
    assert result.tokens_per_second == pytest.approx(
        tokens_per_round(alpha, gamma) / (gamma * DRAFT + VERIFY), rel=0.02
    )
    assert result.round_seconds == pytest.approx(gamma * DRAFT + VERIFY, rel=0.01)
    assert result.draft_busy == pytest.approx(gamma * DRAFT / (gamma * DRAFT + VERIFY), rel=0.02)


def test_drafting_that_always_hits_costs_the_round_nothing() -> None:
    base_scenario = scenario(
        Mode.ANTICIPATED, 3, tokens=3000, acceptance=AcceptanceConfig(alpha=0.7, ranks=(1.0,))
    )
    result = simulate(base_scenario)
    assert result.hit_rate == pytest.approx(1.0, abs=0.01)
    assert result.tokens_per_second == pytest.approx(result.tokens_per_round / VERIFY, rel=0.002)
    assert result.tokens_per_round == pytest.approx(tokens_per_round(0.7, 3), rel=0.05)
    assert result.target_busy > 0.98


def test_drafting_that_never_hits_costs_what_lockstep_costs_and_no_more() -> None:
    never = AcceptanceConfig(alpha=0.7, ranks=())
    ahead, lockstep = (
        simulate(scenario(mode, 3, acceptance=never)) for mode in (Mode.ANTICIPATED, Mode.LOCKSTEP)
    )
    assert ahead.hit_rate == 0
    assert ahead.seconds == pytest.approx(lockstep.seconds, rel=0.02)


def test_a_pass_under_way_delays_the_answer_only_until_it_ends() -> None:
    """Passes take 4 ms: a message at 9 ms is answered at 12 ms, when the pass under way ends."""
    device = clock.DeviceClock()

    class AlwaysPreparing:
        def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
            return ()

        def prepare(self, waiting: Callable[[], bool]) -> None:
            while not waiting():
                device.work(0.004)

        def release(self, seq_ids: Sequence[int]) -> None:
            pass

    async def ask() -> list[float]:
        drafter, loop = (
            SimulatedDrafter(
                AlwaysPreparing(), device, AcceptanceModel(0, AcceptanceConfig()), link_s=0.0
            ),
            asyncio.get_running_loop(),
        )
        answered = []
        for pause in (0.0, 0.009, 0.004):
            await asyncio.sleep(pause)
            await drafter.propose((), 1.0)
            answered.append(loop.time())
        return answered

    assert clock.run(ask()) == pytest.approx([0.0, 0.012, 0.016])
    assert device.busy == pytest.approx(0.016)


def test_acceptance_may_fall_with_the_position_in_the_proposal() -> None:
    result = simulate(
        scenario(
            Mode.LOCKSTEP, 3, tokens=5000, acceptance=AcceptanceConfig(by_position=(1.0, 0.5, 0.0))
        )
    )
    assert result.mean_accepted == pytest.approx(1.5, rel=0.03)


def test_links_and_the_hosts_own_work_lengthen_the_round() -> None:
    base_scenario = scenario(
        Mode.LOCKSTEP,
        2,
        clients=2,
        requests=2,
        tokens=500,
        host=HostConfig(per_round=0.001, per_sequence=0.0005),
    )
    assert base_scenario.draft is not None
    base_scenario = replace(
        base_scenario,
        target=replace(base_scenario.target, link_s=0.0002),
        draft=replace(base_scenario.draft, link_s=0.0003),
    )
    assert simulate(base_scenario).round_seconds == pytest.approx(
        2 * DRAFT + VERIFY + 0.001 + 2 * 0.0005 + 2 * 0.0002 + 2 * 0.0003, rel=0.01
    )


def test_together_takes_turns_on_one_device_and_pays_one_link_a_round() -> None:
    """The draft's own link of 5 ms takes no time, and the device idles during the host's work."""
    base = scenario(
        Mode.TOGETHER,
        4,
        tokens=8000,
        acceptance=AcceptanceConfig(alpha=0.75),
        host=HostConfig(per_round=0.001),
    )
    assert base.draft is not None
    base = replace(
        base,
        target=replace(base.target, link_s=0.0002),
        draft=replace(base.draft, link_s=0.005),
    )
    result, seconds = simulate(base), 4 * DRAFT + VERIFY + 0.001 + 2 * 0.0002
    assert result.round_seconds == pytest.approx(seconds, rel=0.01)
    assert result.tokens_per_round == pytest.approx(tokens_per_round(0.75, 4), rel=0.03)
    assert result.tokens_per_second == pytest.approx(result.tokens_per_round / seconds, rel=0.01)
    assert result.target_busy + result.draft_busy == pytest.approx(
        (4 * DRAFT + VERIFY) / seconds, rel=0.01
    )
    assert result.hit_rate is None
    assert base.num_devices == 1


def test_together_a_later_prompt_waits_until_the_draft_has_prefilled_an_earlier_one() -> None:
    """The draft's prefill takes 0.5 s after the pass of 10 ms, when the first token is sent.

    The second request comes when all is idle. The third comes 50 ms later and waits for 463 ms,
    and for a round of the second.
    """
    base = scenario(Mode.TOGETHER, 3, tokens=1)
    prompts = tuple(Arrival(time, 500, 40) for time in (0.0, 30.0, 30.05))
    base = replace(
        base, draft=DeviceGroup(LinearPassTime(per_row=0.001)), arrivals=prompts, concurrency=None
    )
    result = simulate(base)
    assert all_finished(result, 3)
    assert result.time_to_first is not None
    alone = VERIFY
    assert result.time_to_first.p50 == pytest.approx(alone)
    assert result.time_to_first.p99 - alone == pytest.approx(0.463 + VERIFY, abs=0.01)


def test_together_a_prompt_of_several_chunks_is_drafted_for_in_the_end() -> None:
    base = scenario(Mode.TOGETHER, 3, clients=2)
    config = config_from_keys({"speculation.gamma": 3, "limits.max_batch_tokens": 64})
    result = simulate(replace(base, arrivals=(Arrival(0.0, 500, 200),) * 4, config=config))
    assert all_finished(result, 4)
    assert result.tokens_per_round == pytest.approx(tokens_per_round(0.75, 3), rel=0.1)


def test_a_draft_without_room_for_branches_still_drafts() -> None:
    base_scenario = scenario(Mode.ANTICIPATED, 3, tokens=300)
    pages = -(-(1 + 300 + 8) // base_scenario.config.cache.page_size)
    assert base_scenario.draft is not None
    few = simulate(replace(base_scenario, draft=replace(base_scenario.draft, pages=pages)))
    assert few.mean_accepted > 1
    assert all_finished(few, 1)


@pytest.mark.parametrize("mode", [Mode.ANTICIPATED, Mode.TOGETHER])
def test_a_target_with_few_pages_preempts_requests_and_answers_them_all(mode: Mode) -> None:
    base_scenario = scenario(mode, 4, clients=6, requests=12, tokens=200)
    result = simulate(replace(base_scenario, target=replace(base_scenario.target, pages=30)))
    assert all_finished(result, 12)
    assert result.tokens == 12 * 200


def test_replicas_share_the_load() -> None:
    base_scenario = scenario(Mode.PLAIN, 0, clients=16, requests=64, tokens=100)
    base_scenario = replace(base_scenario, target=DeviceGroup(LinearPassTime(per_sequence=0.01)))
    one, four = (
        simulate(
            replace(
                base_scenario,
                config=config_from_keys({"replicas.min": count, "replicas.max": count}),
            )
        )
        for count in (1, 4)
    )
    assert all_finished(four, 64)
    assert 2.5 < one.seconds / four.seconds <= 4.01


def test_replicas_come_under_load_and_go_after_it_and_no_request_is_lost() -> None:
    quick: dict[str, object] = {"min": 1, "max": 4, "upscale_delay_s": 2, "downscale_delay_s": 4}
    result = simulate(bursts(calm=10.0, rules=quick))
    assert all_finished(result, 64)
    assert result.tokens == 60 * 400 + 4 * 50
    assert result.replicas == 4
    assert result.device_seconds < 0.6 * 4 * result.seconds  # most of the time there are fewer


def test_requests_wait_for_the_first_replica_when_there_is_none() -> None:
    result = simulate(
        bursts(calm=30.0, rules={"min": 0, "max": 2, "upscale_delay_s": 0, "downscale_delay_s": 3})
    )
    assert all_finished(result, 64)
    assert result.time_to_first is not None
    assert result.time_to_first.p99 > 5.0  # its startup


def test_a_full_queue_refuses_and_the_result_says_so() -> None:
    config = config_from_keys({"limits": {"max_running": 2, "max_queued": 1}})
    result = simulate(
        replace(scenario(Mode.PLAIN, 0, clients=8, requests=8, tokens=50), config=config)
    )
    assert (result.finished, result.refused) == (3, 5)


def test_the_autoscaler_acts_after_an_unbroken_delay_of_its_direction() -> None:
    """The autoscaler averages over three seconds, the shorter delay."""
    scaler = Autoscaler(
        ReplicasConfig(
            min=1, max=10, target_ongoing_requests=2.0, upscale_delay_s=6.0, downscale_delay_s=3.0
        )
    )
    current, seen = 1, []
    for second, ongoing in enumerate([9] * 2 + [1] * 8 + [9] * 10 + [0] * 10):
        current = scaler.decide(float(second), current=current, ongoing=ongoing)
        seen.append(current)
    assert seen[:16] == [1] * 16  # neither a peak of two seconds suffices, nor one of five
    assert seen[16:23] == [5] * 7
    assert seen[23] < 5
    assert seen[-1] == 1


@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.TOGETHER])
def test_a_drafter_that_breaks_breaks_the_simulation(
    mode: Mode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(AcceptanceModel, "draft_tokens", lambda *_, **__: 1 / 0)
    with pytest.raises(ExceptionGroup) as broken:
        simulate(scenario(mode, 2, tokens=20))
    assert broken.group_contains(ZeroDivisionError)


def weighty(mode: Mode, gamma: int | None, *, clients: int, per_row: float = 0.0) -> Scenario:
    """Return a scenario whose draft takes four tenths of its target's time."""
    return replace(
        scenario(mode, gamma, clients=clients, tokens=300, requests=2 * clients),
        target=DeviceGroup(LinearPassTime(fixed=VERIFY, per_row=per_row)),
        draft=DeviceGroup(LinearPassTime(fixed=0.4 * VERIFY)),
    )


@pytest.mark.parametrize(("clients", "least"), [(1, 1.25), (8, 1.2)])
def test_where_drafting_weighs_no_round_waits_for_a_proposal_that_was_not_prepared(
    clients: int, least: float
) -> None:
    hidden, lockstep = (
        simulate(weighty(mode, None, clients=clients)) for mode in (Mode.ANTICIPATED, Mode.LOCKSTEP)
    )
    assert hidden.tokens_per_second > least * lockstep.tokens_per_second
    assert all_finished(hidden, 2 * clients)


@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.ANTICIPATED])
@pytest.mark.parametrize("per_row", [0.00005, 0.001])
def test_the_pacer_is_hardly_slower_than_the_best_fixed_gamma_and_than_plain_decoding(
    mode: Mode, per_row: float
) -> None:
    auto, plain, *fixed = (
        simulate(weighty(*setting, clients=8, per_row=per_row)).tokens_per_second
        for setting in ((mode, None), (Mode.PLAIN, 0), (mode, 1), (mode, 2), (mode, 3))
    )
    assert auto > 0.95 * max(plain, *fixed)
