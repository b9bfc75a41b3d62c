"""Each request gets the target's own text, whole and once, and one final chunk.

That holds whatever is drafted, rejected, preempted, cancelled or broken.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.engine.batch import Batch
from specserve.engine.trace import Round
from specserve.errors import (
    BadValue,
    Displaced,
    EmptyPrompt,
    OutOfPages,
    Overloaded,
    TargetReplaced,
    TooLong,
    UnknownToken,
    WorkerLost,
)
from specserve.types import (
    Chunk,
    DraftStep,
    FinishReason,
    Origin,
    Proposal,
    Verdict,
    VerifyStep,
)
from tests.support.fakes import VOCAB, model_info, text
from tests.support.served import Served


def prompts(count: int, *, longest: int, seed: int = 0) -> list[tuple[int, ...]]:
    chance = random.Random(seed)
    return [
        tuple(chance.randrange(VOCAB) for _ in range(chance.randint(1, longest)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("alpha", [None, 0.0, 0.6, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 5, None])
def test_the_text_is_the_targets_own_for_any_drafter_and_any_gamma(
    alpha: float | None, gamma: int | None
) -> None:
    served = Served(alpha=alpha, gamma=gamma)
    made = {served.submit(*prompt, max_tokens=40): prompt for prompt in prompts(12, longest=60)}
    served.finish()
    for seq_id, prompt in made.items():
        assert served.tokens(seq_id) == text(prompt, 40)
        assert served.last(seq_id).finish is FinishReason.LENGTH


def test_the_text_is_the_targets_own_when_gamma_changes_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(alpha=0.7)
    chance = random.Random(1)

    def choose(sequences: Sequence[object]) -> list[int]:
        return [chance.randint(0, 6) for _ in sequences]

    monkeypatch.setattr(served.coordinator.pacer, "choose", choose)
    made = {served.submit(*prompt, max_tokens=60): prompt for prompt in prompts(12, longest=60)}
    served.finish()
    assert all(served.tokens(seq_id) == text(prompt, 60) for seq_id, prompt in made.items())


@pytest.mark.parametrize("budget", [1, 2, 7, 512])
def test_the_text_does_not_depend_on_how_prompts_are_cut_into_chunks(budget: int) -> None:
    served = Served(max_batch_tokens=budget, gamma=3)
    made = {served.submit(*prompt, max_tokens=10): prompt for prompt in prompts(6, longest=50)}
    served.finish()
    assert all(served.tokens(seq_id) == text(prompt, 10) for seq_id, prompt in made.items())


def test_preemption_changes_no_text_and_every_request_ends() -> None:
    served = Served(info=model_info(num_pages=24, page_size=4), gamma=4)
    made = {served.submit(*prompt, max_tokens=50): prompt for prompt in prompts(10, longest=30)}
    served.finish()
    assert served.coordinator.scheduler.num_preempted > 3
    assert all(served.tokens(seq_id) == text(prompt, 50) for seq_id, prompt in made.items())


def test_the_oldest_progresses_every_round_however_few_pages_there_are() -> None:
    served = Served(info=model_info(num_pages=16, page_size=4), gamma=0, max_batch_tokens=64)
    oldest, *_ = [served.submit(*range(1, 9), max_tokens=50) for _ in range(6)]
    for count in range(1, 51):
        served.rounds()
        assert len(served.tokens(oldest)) == count


def test_a_later_request_does_not_change_the_text_of_one_under_way() -> None:
    served = Served(gamma=3)
    made = {}
    for prompt in prompts(15, longest=40):
        made[served.submit(*prompt, max_tokens=25)] = prompt
        served.rounds()
    served.finish()
    assert all(served.tokens(seq_id) == text(prompt, 25) for seq_id, prompt in made.items())


@pytest.mark.parametrize("gamma", [0, 3, 6])
def test_eos_ends_the_text_where_the_target_writes_it_even_inside_an_accepted_prefix(
    gamma: int,
) -> None:
    prompt = (5, 6, 7)
    whole = text(prompt, 60)
    eos = whole[30]
    served = Served(alpha=1.0, gamma=gamma, info=model_info(end_ids=frozenset({eos})))
    stopped, ignoring = (
        served.submit(*prompt, max_tokens=60),
        served.submit(*prompt, max_tokens=60, ignore_eos=True),
    )
    served.finish()
    assert served.tokens(stopped) == whole[: whole.index(eos) + 1]
    assert served.last(stopped).finish is FinishReason.STOP
    assert served.tokens(ignoring) == whole


def test_the_context_length_ends_the_text_without_ever_being_passed_by_drafts() -> None:
    served = Served(alpha=1.0, gamma=6, info=model_info(max_context=30))
    seq_id = served.submit(*range(10), max_tokens=1000)
    served.finish()
    assert served.tokens(seq_id) == text(range(10), 20)
    ends = [step.stop + len(step.drafts) for steps in served.target.rounds for step in steps]
    assert max(ends) <= 29


def test_the_pages_bound_the_context_too() -> None:
    served = Served(alpha=1.0, gamma=6, info=model_info(num_pages=5, page_size=4))
    seq_id = served.submit(1, 2, 3, max_tokens=1000)
    served.finish()
    assert served.tokens(seq_id) == text((1, 2, 3), 17)


def test_a_drafter_with_a_shorter_context_stops_drafting_there() -> None:
    served = Served(alpha=1.0, gamma=6, draft_context=20)
    seq_id, long = served.submit(1, 2, 3, max_tokens=40), served.submit(*range(25), max_tokens=10)
    served.finish()
    assert served.tokens(seq_id) == text((1, 2, 3), 40)
    steps = [step for steps in served.drafter.rounds for step in steps]
    assert max(step.stop + step.gamma for step in steps) == 20
    assert all(step.seq_id != long for step in steps)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_origins_and_statistics_agree_with_the_tokens(alpha: float) -> None:
    served = Served(alpha=alpha, gamma=4)
    seq_id = served.submit(*range(50), max_tokens=41)
    served.finish()
    chunks, stats = served.chunks(seq_id), served.stats(seq_id)
    origins = [origin for chunk in chunks for origin in chunk.origins]
    assert all(len(chunk.origins) == len(chunk.tokens) for chunk in chunks)
    assert len(origins) == 41
    assert origins.count(Origin.ACCEPTED) == stats.accepted
    assert stats.rounds == len(chunks)
    assert stats.target_passes == len([step for steps in served.target.rounds for step in steps])
    assert stats.drafted == sum(
        len(step.drafts) for steps in served.target.rounds for step in steps
    )
    if alpha == 0:
        assert stats.accepted == 0
        assert origins.count(Origin.BONUS) == 0
    if alpha == 1:
        assert origins.count(Origin.CORRECTION) == 0
        assert stats.accepted == stats.drafted


def test_without_a_drafter_every_token_is_plain_and_one_round_brings_one() -> None:
    served = Served(alpha=None, gamma=5)
    seq_id = served.submit(1, 2, 3, max_tokens=9)
    served.finish()
    assert [chunk.origins for chunk in served.chunks(seq_id)] == [(Origin.PLAIN,)] * 9


def test_good_drafts_save_target_passes() -> None:
    served = Served(alpha=1.0, gamma=5)
    served.submit(1, 2, 3, max_tokens=61)
    served.finish()
    assert len(served.target.rounds) == 1 + 10  # the prompt brings one token, each round six


def test_a_request_may_ask_for_its_own_gamma_or_none_at_all() -> None:
    served = Served(alpha=1.0, gamma=5)
    off, two, usual = (served.submit(1, 2, 3, max_tokens=30, gamma=gamma) for gamma in (0, 2, None))
    served.finish()
    assert served.stats(off).drafted == 0
    assert {
        step.gamma
        for steps in served.drafter.rounds
        for step in steps
        if step.seq_id == two and step.start
    } <= {1, 2}
    assert (
        max(step.gamma for steps in served.drafter.rounds for step in steps if step.seq_id == usual)
        == 5
    )
    assert all(step.seq_id != off for steps in served.drafter.rounds for step in steps)


def test_the_verifier_is_the_requests_own_else_coupled_when_seeded_else_the_default() -> None:
    served = Served(verifier="speculative", lenience=2.0)
    ids = [
        served.submit(1),
        served.submit(1, seeded=True),
        served.submit(1, verifier="block", seeded=True),
        served.submit(1, verifier="lenient"),
    ]
    served.finish()
    stats = [served.stats(seq_id) for seq_id in ids]
    assert [(one.verifier, one.lossless) for one in stats] == [
        ("speculative", True),
        ("coupled", True),
        ("block", True),
        ("lenient", False),
    ]
    policies = {step.seq_id: step.policy for step in served.target.rounds[0]}
    assert [policies[seq_id].lenience for seq_id in ids] == [1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("prompt", "fields", "error"),
    [
        ((), {}, EmptyPrompt),
        ((1, VOCAB), {}, UnknownToken),
        ((1, -1), {}, UnknownToken),
        ((1,) * 40, {}, TooLong),
        ((1,), {"gamma": 7}, BadValue),
        ((1,), {"max_tokens": -1}, BadValue),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once_and_nothing_is_queued(
    prompt: tuple[int, ...], fields: dict[str, Any], error: type[Exception]
) -> None:
    served = Served(info=model_info(num_pages=10, page_size=4))
    with pytest.raises(error):
        served.submit(*prompt, **fields)
    assert not served.coordinator.has_work
    served.submit(*(1,) * 39, max_tokens=5)


def test_a_coordinator_with_impossible_options_is_an_error() -> None:
    with pytest.raises(BadValue, match="gamma"):
        Served(gamma=7, max_gamma=6)
    with pytest.raises(BadValue, match="verifier"):
        Served(verifier="none")


def test_a_full_queue_refuses_the_next_request_and_takes_one_again_later() -> None:
    served = Served(max_running=2, max_queued=3)
    for _ in range(5):
        served.submit(1, 2, max_tokens=2)
    with pytest.raises(Overloaded):
        served.submit(1, 2)
    served.finish()
    served.submit(1, 2, max_tokens=2)
    served.finish()
    assert sum(chunk.finish is not None for chunks in served.emitted for chunk in chunks) == 6


def test_all_chunks_of_a_round_come_in_one_emit() -> None:
    served = Served(alpha=None)
    for _ in range(5):
        served.submit(1, 2, max_tokens=3)
    served.finish()
    assert [len(chunks) for chunks in served.emitted] == [5, 5, 5]


def test_cancelling_frees_the_pages_and_ends_the_stream_once_running_or_waiting() -> None:
    served = Served(gamma=2, max_running=2)
    ids = [served.submit(*range(10), max_tokens=50) for _ in range(4)]
    served.rounds(3)
    for seq_id in (ids[0], ids[0], ids[3], 12345):
        served.coordinator.cancel(seq_id)
    served.rounds()
    assert ids[0] not in served.target.caches
    served.finish()
    assert [served.last(seq_id).finish for seq_id in ids] == [
        FinishReason.CANCELLED,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
    ]
    begun = served.tokens(ids[0])
    assert 0 < len(begun) < 50
    assert begun == text(range(10), len(begun))
    assert served.stats(ids[0]).rounds == len(served.chunks(ids[0])) - 1


def test_cancelling_finished_or_unknown_sequences_does_nothing() -> None:
    served = Served()
    seq_id = served.submit(1, max_tokens=1)
    served.finish()
    served.coordinator.cancel(seq_id)
    served.coordinator.cancel(99)
    assert not served.coordinator.has_work
    assert len(served.chunks(seq_id)) == 1


def test_cancelling_and_submitting_from_within_emit_works() -> None:
    served = Served(alpha=None)
    seq_id = served.submit(1, 2, max_tokens=50)

    def emit(chunks: Sequence[Chunk]) -> None:
        served.emitted.append(chunks)
        if len(served.emitted) == 3:
            served.coordinator.cancel(seq_id)
            served.submit(3, 4, max_tokens=2)

    served.coordinator._emit = emit
    served.finish()
    assert len(served.tokens(seq_id)) == 3
    assert served.last(seq_id).finish is FinishReason.CANCELLED
    assert served.tokens(seq_id + 1) == text((3, 4), 2)


@pytest.mark.parametrize("gamma", [0, 2])
def test_a_target_that_fails_and_comes_back_without_its_cache_changes_no_text(gamma: int) -> None:
    served = Served(max_running=3, gamma=gamma)
    ids = [served.submit(i, 2, 3, max_tokens=30) for i in range(4)]
    for rounds in (3, 1, 7):
        served.rounds(rounds)
        served.target.errors.append(RuntimeError("card fell off the bus"))
        served.target.caches.clear()
    served.finish()
    assert [served.tokens(seq_id) for seq_id in ids] == [text((i, 2, 3), 30) for i in range(4)]
    assert {served.last(seq_id).finish for seq_id in ids} == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("failure", "together", "alone"), [(RuntimeError, 1, 2), (WorkerLost, 2, 2)]
)
def test_a_request_that_crashes_every_batch_that_it_is_in_fails_alone(
    failure: type[Exception], together: int, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(gamma=2, max_running=8)
    ids = [served.submit(i, 2, 3, max_tokens=20) for i in range(6)]
    poison = ids[3]
    verify, crashes = served.target.verify, []

    async def fragile(steps: Sequence[VerifyStep]) -> list[Verdict]:
        if any(step.seq_id == poison and step.stop > 8 for step in steps):
            crashes.append(len(steps))
            served.target.caches.clear()
            raise failure("segmentation fault")
        return await verify(steps)

    monkeypatch.setattr(served.target, "verify", fragile)
    served.finish()
    assert served.last(poison).finish is FinishReason.ERROR
    error = served.last(poison).error
    assert error is not None
    assert f"{together + alone} times over this request: segmentation fault" in error
    assert [served.tokens(seq_id) for seq_id in ids if seq_id != poison] == [
        text((i, 2, 3), 20) for i in range(6) if ids[i] != poison
    ]
    assert [size > 1 for size in crashes] == [True] * together + [False] * alone


def test_after_the_first_loss_of_the_target_all_sequences_go_on_together() -> None:
    served = Served(gamma=2, max_running=8)
    ids = [served.submit(i, 2, 3, max_tokens=40) for i in range(6)]
    served.rounds(3)
    served.target.errors.append(WorkerLost("killed"))
    served.target.caches.clear()
    served.rounds(2)
    assert len(served.target.rounds[-1]) == len(ids)


def test_accidental_crashes_fail_no_request_however_many_there_are() -> None:
    served = Served(gamma=2)
    ids = [served.submit(i, 2, 3, max_tokens=40) for i in range(4)]
    for _ in range(12):
        served.target.errors.append(RuntimeError("killed"))
        served.target.caches.clear()
        served.rounds(3)
    served.finish()
    assert [served.tokens(seq_id) for seq_id in ids] == [text((i, 2, 3), 40) for i in range(4)]


def test_accidental_crashes_of_a_lone_request_do_not_fail_it_before_others_had_a_turn() -> None:
    served = Served(gamma=2, max_running=8)
    ids = [served.submit(i, 2, 3, max_tokens=40) for i in range(4)]
    served.rounds(3)
    for _ in range(6):  # as fast as the target comes back
        served.target.errors.append(WorkerLost("killed"))
        served.target.caches.clear()
        served.rounds(1)
    served.finish()
    assert [served.tokens(seq_id) for seq_id in ids] == [text((i, 2, 3), 40) for i in range(4)]


def test_an_engine_that_cannot_go_on_sends_its_requests_back_and_says_so() -> None:
    served = Served(gamma=2)
    ids = [served.submit(i, 2, 3, max_tokens=40) for i in range(3)]
    served.rounds(2)
    served.target.errors.append(Displaced("no card is left"))
    served.finish()
    assert served.coordinator.can_resume_elsewhere
    assert {served.last(seq_id).finish for seq_id in ids} == {FinishReason.ERROR}
    with pytest.raises(Displaced):
        served.submit(1, 2)


def test_a_target_that_fails_every_pass_makes_the_engine_give_up_after_three_rounds() -> None:
    served = Served(gamma=2)
    ids = [served.submit(i, 2, 3, max_tokens=40) for i in range(6)]
    served.rounds(3)
    served.target.errors += [OutOfPages(f"no page is free ({i})") for i in range(99)]
    before = len(served.target.rounds)
    asyncio.run(asyncio.wait_for(served.coordinator.run(), 60))
    assert len(served.target.rounds) - before == 3
    assert served.coordinator.trouble == "no progress in 3 rounds: no page is free (96)"
    assert served.coordinator.can_resume_elsewhere
    assert {served.last(seq_id).finish for seq_id in ids} == {FinishReason.ERROR}
    with pytest.raises(Displaced, match="no progress in 3 rounds"):
        served.submit(1, 2)


def test_only_one_request_is_failed_by_a_target_that_fails_every_pass_of_a_lone_request() -> None:
    served = Served(gamma=2)
    first = served.submit(1, 2, 3, max_tokens=40)
    served.target.errors += [RuntimeError("no kernel image")] * 99
    served.rounds(3)
    assert served.last(first).finish is FinishReason.ERROR
    assert served.coordinator.trouble is None, "the request may have been the cause"
    second = served.submit(4, 5, 6, max_tokens=40)
    served.rounds(4)
    assert served.last(second).finish is FinishReason.ERROR
    assert served.coordinator.can_resume_elsewhere, "the second one is not to blame"
    assert served.coordinator.trouble == "no progress in 3 rounds: no kernel image"


def test_bad_requests_one_after_the_other_do_not_bring_down_an_engine_that_serves_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(gamma=2)
    bad: set[int] = set()
    verify = served.target.verify

    async def fragile(steps: Sequence[VerifyStep]) -> list[Verdict]:
        if any(step.seq_id in bad for step in steps):
            raise RuntimeError("segmentation fault")
        return await verify(steps)

    monkeypatch.setattr(served.target, "verify", fragile)
    for i in range(5):
        bad.add(served.submit(i, 2, 3, max_tokens=20))
        good = served.submit(i, 4, 5, max_tokens=20)
        served.finish()
        assert served.tokens(good) == text((i, 4, 5), 20)
    assert all(served.last(seq_id).finish is FinishReason.ERROR for seq_id in bad)
    assert served.coordinator.trouble is None


def test_a_target_that_was_replaced_between_rounds_puts_no_blame_on_the_requests() -> None:
    served = Served(gamma=2)
    seq_id = served.submit(1, 2, 3, max_tokens=30)
    served.rounds(3)
    for _ in range(9):
        served.target.errors.append(TargetReplaced("lost between two rounds"))
        served.target.caches.clear()
        served.rounds()
    served.finish()
    assert served.tokens(seq_id) == text((1, 2, 3), 30)


def test_rounds_in_which_nothing_can_be_scheduled_are_not_repeated_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(gamma=2)
    seq_id = served.submit(1, 2, 3, max_tokens=30)
    served.rounds(2)
    monkeypatch.setattr(
        served.coordinator.scheduler, "next_batch", lambda *args, **options: Batch()
    )
    asyncio.run(asyncio.wait_for(served.coordinator.run(), 60))
    assert served.coordinator.trouble == "no progress in 3 rounds: nothing can be scheduled"
    assert served.last(seq_id).finish is FinishReason.ERROR
    assert served.coordinator.can_resume_elsewhere


@pytest.mark.parametrize("part", ["scheduler.select_running", "pacer.choose", "pacer.observe"])
def test_an_exception_of_the_coordinator_itself_ends_the_engine_and_sends_its_requests_back(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(gamma=2)
    ids = [served.submit(i, 2, 3, max_tokens=30) for i in range(3)]
    served.rounds(3)

    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError("division by zero")

    owner, name = part.split(".")
    monkeypatch.setattr(getattr(served.coordinator, owner), name, broken)
    asyncio.run(asyncio.wait_for(served.coordinator.run(), 60))
    assert served.coordinator.trouble == "the coordinator failed: division by zero"
    assert served.coordinator.can_resume_elsewhere
    assert [served.last(seq_id).finish for seq_id in ids] == [FinishReason.ERROR] * 3
    for i, seq_id in enumerate(ids):
        assert served.tokens(seq_id) == text((i, 2, 3), len(served.tokens(seq_id)))


def test_an_exception_while_chunks_are_emitted_leaves_no_call_to_the_target_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(gamma=2)
    seq_id = served.submit(1, 2, 3, max_tokens=30)
    num_open = 0
    verify, emit = served.target.verify, served.coordinator._emit

    def counting(steps: Sequence[VerifyStep]) -> Awaitable[list[Verdict]]:
        nonlocal num_open
        num_open += 1

        async def answer() -> list[Verdict]:
            nonlocal num_open
            num_open -= 1
            return await verify(steps)

        return answer()

    def failing_once(chunks: Sequence[Chunk]) -> None:
        served.coordinator._emit = emit
        raise OSError("no such gateway")

    monkeypatch.setattr(served.target, "verify", counting)
    served.coordinator._emit = failing_once
    asyncio.run(asyncio.wait_for(served.coordinator.run(), 60))
    assert num_open == 0
    assert served.coordinator.trouble == "the coordinator failed: no such gateway"
    assert served.tokens(seq_id) == (), "a text that lacks a chunk must not go on"
    assert served.last(seq_id).finish is FinishReason.ERROR


def test_a_round_that_cannot_be_reported_loses_no_chunk() -> None:
    def broken(done: Round) -> None:
        raise OSError("disk full")

    served = Served(gamma=2, report=broken)
    seq_id = served.submit(1, 2, 3, max_tokens=30)
    served.finish()
    assert served.tokens(seq_id) == text((1, 2, 3), 30)


@pytest.mark.parametrize("num_generated", [1, 7, 29])
def test_a_text_goes_on_behind_the_tokens_of_another_engine(num_generated: int) -> None:
    whole = text((1, 2, 3), 30)
    served = Served(gamma=3)
    seq_id = served.submit(1, 2, 3, max_tokens=30, generated=whole[:num_generated])
    served.finish()
    assert served.tokens(seq_id) == whole[num_generated:]
    assert served.last(seq_id).finish is FinishReason.LENGTH


def test_verdicts_that_do_not_fit_the_steps_are_a_failure_not_a_wrong_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(alpha=None)
    seq_id = served.submit(1, 2, 3, max_tokens=30)

    async def too_few(steps: Sequence[VerifyStep]) -> list[Verdict]:
        return []

    monkeypatch.setattr(served.target, "verify", too_few)
    served.finish()
    assert served.last(seq_id).finish is FinishReason.ERROR
    assert served.tokens(seq_id) == ()


@pytest.mark.parametrize("failures", [1, 5])
def test_a_failure_of_the_drafter_costs_speed_alone_and_its_cache_is_filled_again(
    failures: int,
) -> None:
    served = Served(alpha=1.0, gamma=3)
    ids = [served.submit(*range(20), max_tokens=40) for _ in range(2)]
    served.rounds(3)
    served.drafter.errors += [RuntimeError("out of memory")] * failures
    before = len(served.target.rounds)
    served.rounds(failures)
    assert all(not step.drafts for steps in served.target.rounds[before:] for step in steps)
    served.drafter.caches.clear()  # a restarted drafter has nothing cached
    served.finish()
    assert all(served.tokens(seq_id) == text(range(20), 40) for seq_id in ids)
    assert served.stats(ids[0]).drafted > 10


def test_a_drafter_that_keeps_failing_is_called_with_backoff(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(alpha=0.8, gamma=3)
    calls = 0

    async def broken(steps: Sequence[DraftStep], deadline: float) -> list[Proposal]:
        nonlocal calls
        calls += 1
        raise RuntimeError("gone")

    monkeypatch.setattr(served.drafter, "propose", broken)
    served.submit(1, 2, 3, max_tokens=200)
    served.rounds(150)
    assert 4 < calls < 16


def test_a_dead_drafter_does_not_keep_releases_from_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(alpha=None)
    num_steps = []
    verify = served.target.verify

    async def recording(steps: Sequence[VerifyStep]) -> list[Verdict]:
        num_steps.append(len(steps))
        return await verify(steps)

    class DeadDrafter:
        async def propose(self, steps: Sequence[DraftStep], deadline: float) -> list[Proposal]:
            raise RuntimeError("gone")

        async def release(self, seq_ids: Sequence[int]) -> None:
            raise RuntimeError("gone")

    monkeypatch.setattr(served.target, "verify", recording)
    monkeypatch.setattr(served.coordinator._workers, "drafter", DeadDrafter())
    served.submit(1, 2, 3, max_tokens=4)
    served.finish()
    assert num_steps[-1] == 0


def test_a_proposal_longer_than_gamma_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(alpha=1.0, gamma=2)
    seq_id = served.submit(1, 2, 3, max_tokens=10)
    draft = served.drafter.draft
    monkeypatch.setattr(
        served.drafter, "draft", lambda step: draft(replace(step, gamma=step.gamma + 3))
    )
    served.finish()
    assert served.tokens(seq_id) == text((1, 2, 3), 10)
    assert served.stats(seq_id).drafted == 0


def test_workers_that_cannot_release_do_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(gamma=2)

    async def broken(seq_ids: Sequence[int]) -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr(served.drafter, "release", broken)
    seq_id = served.submit(1, 2, max_tokens=5)
    served.rounds(20)
    assert served.tokens(seq_id) == text((1, 2), 5)
    assert served.target.caches == {}


def test_run_sleeps_without_work_wakes_for_it_and_ends_the_rest_when_closed() -> None:
    served = Served(gamma=2, alpha=1.0)

    async def play() -> None:
        running = asyncio.create_task(served.coordinator.run())
        await asyncio.sleep(0.01)
        assert not served.target.rounds
        first = served.submit(1, 2, max_tokens=5)
        while served.coordinator.has_work:
            await asyncio.sleep(0)
        assert served.tokens(first) == text((1, 2), 5)
        second = served.submit(3, 4, max_tokens=5000)
        while not served.tokens(second):
            await asyncio.sleep(0)
        served.coordinator.close()
        await asyncio.wait_for(running, 60)
        assert served.last(second).finish is FinishReason.ERROR
        with pytest.raises(Displaced):
            served.submit(1)

    asyncio.run(play())
    assert served.target.caches == {}


def test_stats_have_the_times_until_the_first_pass_and_from_there_to_the_first_token() -> None:
    served = Served(alpha=None, max_running=1, max_batch_tokens=32)
    first = served.submit(*[1] * 40, max_tokens=3)
    served.clock.now += 0.5
    second = served.submit(1, 2, 3)
    served.finish()
    begun = served.chunks(first)[0].stats
    assert begun is not None
    found = [
        (round(stats.queue_time_ms, 6), round(stats.prefill_time_ms, 6))
        for stats in (begun, served.stats(first), served.stats(second))
    ]
    assert found == [(500, 20), (500, 20), (40, 10)], "10 ms a pass; the first has a prompt of two"


def test_auto_gamma_follows_a_virtual_clock_up_and_down() -> None:
    good, bad = (
        Served(alpha=0.95, gamma=None, max_gamma=12),
        Served(alpha=0.05, gamma=None, max_gamma=12),
    )
    bad.drafter.seconds = 0.009
    for served in (good, bad):
        served.submit(1, 2, 3, max_tokens=900)
        served.rounds(100)
    assert good.coordinator.pacer.gamma >= 6
    assert bad.coordinator.pacer.gamma <= 1
    assert sum(len(step.drafts) for steps in bad.target.rounds[-40:] for step in steps) <= 8


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_workload_gives_every_request_its_own_text_and_one_final_chunk(
    data: st.DataObject,
) -> None:
    draw = data.draw
    page_size = draw(st.sampled_from([1, 4, 16]))
    served = Served(
        alpha=draw(st.sampled_from([None, 0.0, 0.5, 0.9, 1.0])),
        seed=draw(st.integers(0, 1000)),
        info=model_info(
            num_pages=draw(st.integers(-(-40 // page_size), 400 // page_size)),
            page_size=page_size,
            end_ids=frozenset({draw(st.integers(0, VOCAB))}),
        ),
        gamma=draw(st.sampled_from([None, 0, 1, 6])),
        max_batch_tokens=draw(st.integers(1, 100)),
        max_running=draw(st.integers(1, 8)),
        draft_context=draw(st.sampled_from([None, 10, 30])),
    )
    made: dict[int, tuple[tuple[int, ...], int, bool]] = {}
    cancelled: set[int] = set()
    for _ in range(draw(st.integers(1, 25))):
        action = draw(
            st.sampled_from(["submit", "submit", "round", "round", "cancel", "drafter fails"])
        )
        if action == "submit":
            prompt = tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=38)))
            max_tokens, ignore_eos = draw(st.integers(1, 40)), draw(st.booleans())
            gamma = draw(st.sampled_from([None, None, 0, 3]))
            made[
                served.submit(*prompt, max_tokens=max_tokens, ignore_eos=ignore_eos, gamma=gamma)
            ] = (prompt, max_tokens, ignore_eos)
        elif action == "round":
            served.rounds(draw(st.integers(1, 5)))
        elif action == "cancel" and made:
            seq_id = draw(st.sampled_from(sorted(made)))
            cancelled.add(seq_id)
            served.coordinator.cancel(seq_id)
        elif action == "drafter fails" and served.has_drafter:
            served.drafter.errors.append(RuntimeError("lost"))
    served.finish()
    context = min(served.info.max_context, served.info.num_pages * page_size)
    for seq_id, (prompt, max_tokens, ignore_eos) in made.items():
        whole = text(prompt, min(max_tokens, context - len(prompt)))
        end = next(
            (
                i + 1
                for i, token in enumerate(whole)
                if token in served.info.end_ids and not ignore_eos
            ),
            len(whole),
        )
        last, tokens = served.last(seq_id), served.tokens(seq_id)
        assert tokens == whole[: len(tokens)]
        assert seq_id in cancelled or last.finish is not FinishReason.CANCELLED
        assert last.finish is FinishReason.CANCELLED or tokens == whole[:end]
        assert served.stats(seq_id).accepted == sum(
            chunk.origins.count(Origin.ACCEPTED) for chunk in served.chunks(seq_id)
        )


@pytest.mark.parametrize("gamma", [0, 4])
def test_the_coordinators_own_time_is_small_and_does_not_grow_with_the_context(
    gamma: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure processor seconds a committed token outside the fakes: 3 to 19 us.

    256 sequences with long prompts run.
    """
    served = Served(
        alpha=0.7,
        gamma=gamma,
        max_running=256,
        max_batch_tokens=1_000_000,
        info=model_info(num_pages=1_000_000),
    )
    for seq_id in range(256):
        served.submit(*[(seq_id + i) % VOCAB for i in range(3000)], max_tokens=500)
    served.rounds(3)
    spent = 0.0
    for worker, name in ((served.target, "verify"), (served.drafter, "propose")):
        call = getattr(worker, name)

        async def timed(*args: object, call: Callable[..., Awaitable[object]] = call) -> object:
            nonlocal spent
            start = time.process_time()
            answer = await call(*args)
            spent += time.process_time() - start
            return answer

        monkeypatch.setattr(worker, name, timed)
    costs = []
    for _ in range(4):  # the garbage collector may run in one of them
        served.emitted.clear()
        start, spent = time.process_time(), 0.0
        served.rounds(10)
        own = time.process_time() - start - spent
        costs.append(own / sum(len(chunk.tokens) for chunks in served.emitted for chunk in chunks))
    assert min(costs) < 100e-6
