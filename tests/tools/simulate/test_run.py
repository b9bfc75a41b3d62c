"""What the simulation says is what follows from its assumptions: the papers' formulas where they apply, and no request is ever lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specserve.config.tree import Replicas, parse
from specserve.theory import tokens_per_round
from specserve.tools.simulate import clock
from specserve.tools.simulate.acceptance_model import Acceptance, Truth
from specserve.tools.simulate.autoscaling import Autoscaler
from specserve.tools.simulate.devices import Host, SimulatedDrafter
from specserve.tools.simulate.load import Arrival
from specserve.tools.simulate.pass_times import Linear
from specserve.tools.simulate.run import Result, simulate
from specserve.tools.simulate.scenario import Mode, Scenario, Worker

VERIFY, DRAFT = 0.010, 0.001  # seconds a pass


def scenario(
    mode: Mode,
    gamma: int | None,
    *,
    clients: int = 1,
    tokens: int = 2000,
    requests: int = 1,
    **fields,
) -> Scenario:
    """Prompts of one token: they are read in a pass like any other, and no request waits for another's prompt."""
    return Scenario(
        target=Worker(Linear(fixed=VERIFY)),
        draft=Worker(Linear(fixed=DRAFT)),
        arrivals=(Arrival(0.0, 1, tokens),) * requests,
        concurrency=clients,
        mode=mode,
        config=parse({"speculation.gamma": gamma}),
        **fields,
    )


def bursts(*, calm: float, rules: dict[str, object], startup_s: float = 5.0) -> Scenario:
    """Sixty requests within six seconds, then a few stragglers, `calm` seconds apart."""
    burst = [Arrival(0.1 * i, 8, 400) for i in range(60)]
    stragglers = [Arrival(40.0 + calm * i, 8, 50) for i in range(4)]
    config = parse({"speculation.gamma": 0, "replicas": {"target_ongoing_requests": 5, **rules}})
    base = scenario(Mode.PLAIN, 0, startup_s=startup_s)
    return replace(base, arrivals=(*burst, *stragglers), concurrency=None, config=config)


def whole(result: Result, count: int) -> bool:
    return (result.finished, result.refused, result.failed) == (count, 0, 0)


def test_time_passes_only_where_somebody_waits_and_costs_none():
    async def wait() -> list[tuple[float, str]]:
        loop, seen = asyncio.get_running_loop(), []

        async def one(name: str, *seconds: float) -> None:
            for pause in seconds:
                await asyncio.sleep(pause)
                seen.append((round(loop.time(), 6), name))

        await asyncio.gather(one("a", 3600.0, 100.0), one("b", 3650.0, 1e6))
        return seen

    assert clock.run(wait()) == [(3600, "a"), (3650, "b"), (3700, "a"), (1003650, "b")]


def test_a_deadlock_is_told_instead_of_waited_out():
    async def never() -> None:
        await asyncio.sleep(2.0)
        await asyncio.Event().wait()

    with pytest.raises(clock.Stalled, match=r"at 2\.000000 s"):
        clock.run(never())


def test_the_truth_does_not_depend_on_who_asks_first():
    one, other = (Truth(7, Acceptance(alpha=0.5)) for _ in range(2))
    late = one.guesses(3, 500, 520, depth=0)
    other.guesses(3, 40, 60, depth=0)
    assert other.guesses(3, 500, 520, depth=0) == late
    assert one.judge(3, 40, [])[1] == other.judge(3, 40, [])[1]
    assert Truth(8, Acceptance(alpha=0.5)).guesses(3, 500, 520, depth=0) != late


def test_the_next_token_has_each_rank_as_often_as_the_profile_says_and_never_is_the_refused_one():
    truth, shares = Truth(1, Acceptance(ranks=(0.5, 0.7))), (0.5, 0.2, 0.0)
    nexts = [truth.nexts(0, i, 3, but=None) for i in range(4000)]
    true = [truth.judge(0, i, [])[1] for i in range(4000)]
    for rank, share in enumerate(shares):
        assert sum(
            row[rank] == token for row, token in zip(nexts, true, strict=True)
        ) / 4000 == pytest.approx(share, abs=0.03)
    assert all(len(set(row)) == 3 for row in nexts)
    assert all(token not in truth.nexts(0, i, 3, but=token) for i, token in enumerate(true))


@pytest.mark.parametrize("mode", list(Mode))
def test_the_same_scenario_gives_the_same_result_and_another_seed_another(mode):
    asked = scenario(mode, None, clients=3, requests=6, tokens=150)
    assert simulate(asked) == simulate(asked)
    assert mode is Mode.PLAIN or simulate(replace(asked, seed=1)) != simulate(asked)


def test_plain_decoding_writes_a_token_a_pass():
    result = simulate(scenario(Mode.PLAIN, 0, tokens=500))
    assert result.tokens_per_second == pytest.approx(1 / VERIFY, rel=1e-6)
    assert result.target_busy == pytest.approx(1.0)
    assert result.time_per_token is not None
    assert result.time_per_token.p50 == pytest.approx(VERIFY)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.6, 2), (0.75, 4), (0.9, 7)])
def test_lockstep_is_theorem_3_8(alpha, gamma):
    result = simulate(
        scenario(Mode.LOCKSTEP, gamma, requests=2, tokens=8000, acceptance=Acceptance(alpha=alpha))
    )
    assert result.tokens_per_second == pytest.approx(
        tokens_per_round(alpha, gamma) / (gamma * DRAFT + VERIFY), rel=0.02
    )
    assert result.round_seconds == pytest.approx(gamma * DRAFT + VERIFY, rel=0.01)
    assert result.draft_busy == pytest.approx(gamma * DRAFT / (gamma * DRAFT + VERIFY), rel=0.02)


def test_drafting_that_always_hits_costs_the_round_nothing():
    asked = scenario(
        Mode.ANTICIPATED, 3, tokens=3000, acceptance=Acceptance(alpha=0.7, ranks=(1.0,))
    )
    result = simulate(asked)
    assert result.hit_rate == pytest.approx(1.0, abs=0.01)
    assert result.tokens_per_second == pytest.approx(result.tokens_per_round / VERIFY, rel=0.002)
    assert result.tokens_per_round == pytest.approx(tokens_per_round(0.7, 3), rel=0.05)
    assert result.target_busy > 0.98


def test_drafting_that_never_hits_costs_what_lockstep_costs_and_no_more():
    never = Acceptance(alpha=0.7, ranks=())
    ahead, lockstep = (
        simulate(scenario(mode, 3, acceptance=never)) for mode in (Mode.ANTICIPATED, Mode.LOCKSTEP)
    )
    assert ahead.hit_rate == 0
    assert ahead.seconds == pytest.approx(lockstep.seconds, rel=0.02)


def test_a_pass_under_way_when_a_message_comes_delays_the_answer_by_its_rest_alone():
    """Passes of 4 ms, begun as long as no message waits: asked 9 ms after its last answer, the worker answers at 12 ms and not before."""
    device = clock.DeviceClock()

    class Eager:
        def propose(self, steps, deadline):
            return ()

        def prepare(self, waiting):
            while not waiting():
                device.work(0.004)

        def release(self, seq_ids):
            pass

    async def ask() -> list[float]:
        drafter, loop = (
            SimulatedDrafter(Eager(), device, Truth(0, Acceptance()), link_s=0.0),
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


def test_acceptance_may_fall_with_the_place_in_the_proposal():
    result = simulate(
        scenario(Mode.LOCKSTEP, 3, tokens=5000, acceptance=Acceptance(by_position=(1.0, 0.5, 0.0)))
    )
    assert result.mean_accepted == pytest.approx(1.5, rel=0.03)


def test_links_and_the_hosts_own_work_lengthen_the_round():
    asked = scenario(
        Mode.LOCKSTEP,
        2,
        clients=2,
        requests=2,
        tokens=500,
        host=Host(per_round=0.001, per_sequence=0.0005),
    )
    asked = replace(
        asked,
        target=replace(asked.target, link_s=0.0002),
        draft=replace(asked.draft, link_s=0.0003),
    )
    assert simulate(asked).round_seconds == pytest.approx(
        2 * DRAFT + VERIFY + 0.001 + 2 * 0.0005 + 2 * 0.0002 + 2 * 0.0003, rel=0.01
    )


def test_a_draft_without_room_for_branches_still_drafts():
    asked = scenario(Mode.ANTICIPATED, 3, tokens=300)
    pages = -(-(1 + 300 + 8) // asked.config.cache.page_size)
    few = simulate(replace(asked, draft=replace(asked.draft, pages=pages)))
    assert few.mean_accepted > 1
    assert whole(few, 1)


def test_a_target_with_few_pages_sets_requests_back_and_answers_them_all():
    asked = scenario(Mode.ANTICIPATED, 4, clients=6, requests=12, tokens=200)
    result = simulate(replace(asked, target=replace(asked.target, pages=30)))
    assert whole(result, 12)
    assert result.tokens == 12 * 200


def test_replicas_share_the_load():
    asked = scenario(Mode.PLAIN, 0, clients=16, requests=64, tokens=100)
    asked = replace(asked, target=Worker(Linear(per_sequence=0.01)))
    one, four = (
        simulate(replace(asked, config=parse({"replicas.min": count, "replicas.max": count})))
        for count in (1, 4)
    )
    assert whole(four, 64)
    assert 2.5 < one.seconds / four.seconds <= 4.01


def test_replicas_come_under_load_and_go_after_it_and_no_request_is_lost():
    quick = {"min": 1, "max": 4, "upscale_delay_s": 2, "downscale_delay_s": 4}
    result = simulate(bursts(calm=10.0, rules=quick))
    assert whole(result, 64)
    assert result.tokens == 60 * 400 + 4 * 50
    assert result.replicas == 4
    assert result.device_seconds < 0.6 * 4 * result.seconds  # most of the time there were fewer


def test_requests_wait_for_the_first_replica_when_there_is_none():
    result = simulate(
        bursts(calm=30.0, rules={"min": 0, "max": 2, "upscale_delay_s": 0, "downscale_delay_s": 3})
    )
    assert whole(result, 64)
    assert result.time_to_first is not None
    assert result.time_to_first.p99 > 5.0  # its start


def test_a_full_queue_refuses_and_the_result_says_so():
    config = parse({"limits": {"max_running": 2, "max_queued": 1}})
    result = simulate(
        replace(scenario(Mode.PLAIN, 0, clients=8, requests=8, tokens=50), config=config)
    )
    assert (result.finished, result.refused) == (3, 5)


def test_the_autoscaler_waits_for_the_delay_of_the_direction_without_a_break():
    """It looks back over three seconds, the shorter delay."""
    scaler = Autoscaler(
        Replicas(
            min=1, max=10, target_ongoing_requests=2.0, upscale_delay_s=6.0, downscale_delay_s=3.0
        )
    )
    current, seen = 1, []
    for second, ongoing in enumerate([9] * 2 + [1] * 8 + [9] * 10 + [0] * 10):
        current = scaler.decide(float(second), current=current, ongoing=ongoing)
        seen.append(current)
    assert seen[:16] == [1] * 16  # a peak of two seconds is no reason, nor is one of five
    assert seen[16:23] == [5] * 7
    assert seen[23] < 5
    assert seen[-1] == 1


def test_a_drafter_that_breaks_breaks_the_simulation(monkeypatch, caplog):
    monkeypatch.setattr(Truth, "guesses", lambda *_, **__: 1 / 0)
    with pytest.raises(ExceptionGroup) as broken:
        simulate(scenario(Mode.LOCKSTEP, 2, tokens=20))
    assert broken.group_contains(ZeroDivisionError)


def test_two_cohorts_take_turns_where_a_pass_for_half_costs_less_and_one_where_it_does_not(
    monkeypatch,
):
    """By arithmetic: 58 ms a round for eight in one cohort; 44 ms for two turns of four, with the drafting of 16 ms hidden."""
    base = replace(
        scenario(Mode.LOCKSTEP, 4, clients=8, tokens=300, requests=16),
        draft=Worker(Linear(fixed=0.004)),
    )
    steep = replace(base, target=Worker(Linear(fixed=0.002, per_row=0.001)))
    two, flat = simulate(steep), simulate(base)
    monkeypatch.setattr("specserve.engine.pacer._WORTH_TWO", 1e9)
    one, flat_one = simulate(steep), simulate(base)
    assert (
        1.15 < two.tokens_per_second / one.tokens_per_second < 58 / 44
    )  # the first rounds are spent on learning what passes cost
    assert two.target_busy > 0.85
    assert flat.tokens_per_second == flat_one.tokens_per_second
    assert whole(two, 16)


def test_two_cohorts_that_run_out_of_pages_lose_nothing():
    base = scenario(Mode.LOCKSTEP, 4, clients=8, tokens=300, requests=16)
    steep = replace(
        base,
        draft=Worker(Linear(fixed=0.004)),
        target=Worker(Linear(fixed=0.002, per_row=0.001), pages=60),
    )
    assert whole(simulate(steep), 16), "eight texts take 150 pages"
