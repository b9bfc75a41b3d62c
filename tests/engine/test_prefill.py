"""Equal prompts are prefilled once, and none waits for a sequence that has gone."""

from __future__ import annotations

import random

import pytest

from specserve.engine.prefill import distinct_prompts
from specserve.engine.prefixes import PrefixIndex
from specserve.types import FinishReason
from tests.engine.test_scheduler import plan, play, queue, scheduler, tokens
from tests.support.fakes import (
    VOCAB,
    model_info,
    text,
)
from tests.support.served import Served


def shares(*lengths: int) -> tuple[list[int], list[int]]:
    """Return the chunks in each round of equal prompts, and the tokens that the target computes.

    The target attaches what the first sequence had computed before the round.
    """
    schedule = scheduler(max_batch_tokens=64, prefix_caching=True)
    made = queue(schedule, *lengths)
    charged, computed = [], []
    while any(sequence.length == length for sequence, length in zip(made, lengths, strict=True)):
        held = max(sequence.target_cached for sequence in made) // 4 * 4
        batch = plan(schedule)
        chunks = [entry for entry in batch.entries if entry.sequence.num_pending > 1]
        charged.append(len(chunks))
        computed.append(
            sum(
                entry.stop
                - (
                    entry.sequence.target_cached
                    if entry.sequence.target_cached % 4
                    else max(entry.sequence.target_cached, min(held, (entry.stop - 1) // 4 * 4))
                )
                for entry in chunks
            )
        )
        play(batch)
    return charged, computed


def test_of_equal_prompts_one_is_prefilled_and_the_others_follow_in_the_next_round() -> None:
    entries, computed = shares(*[30] * 8)
    assert entries == [1, 7]
    assert computed == [30, 7 * 2]


def test_equal_prompts_longer_than_a_round_are_computed_once() -> None:
    entries, computed = shares(*[200] * 8)
    assert sum(computed) <= 200 + 7 * 4 + 8 * 4
    assert len(entries) <= 6


def test_prompts_with_one_beginning_share_it_and_go_on_by_themselves() -> None:
    schedule = scheduler(max_batch_tokens=64, prefix_caching=True)
    made = queue(schedule, 30, 30, 30)
    for i, sequence in enumerate(made):
        sequence.committed[16:] = [i] * 14
    first = plan(schedule)
    assert tokens(first) == {0: 30}
    play(first)
    second = plan(schedule)
    assert {
        entry.sequence.seq_id: entry.stop
        for entry in second.entries
        if entry.sequence.num_pending > 1
    } == {1: 30, 2: 30}


def test_without_prefix_caching_equal_prompts_are_prefilled_side_by_side() -> None:
    schedule = scheduler(max_batch_tokens=300)
    queue(schedule, *[30] * 8)
    assert tokens(plan(schedule)) == dict.fromkeys(range(8), 30)


def test_the_shortest_of_those_that_wait_for_a_page_computes_it_in_the_place_of_the_oldest() -> (
    None
):
    schedule = scheduler(max_batch_tokens=64, prefix_caching=True)
    long, other, short = queue(schedule, 1000, 500, 20)
    other.committed[:] = [5] * 500
    schedule.select_running()
    prompts = distinct_prompts([(one, 0) for one in (long, other, short)], PrefixIndex(4))
    assert [prompt.sequence for prompt in prompts] == [short, other]


@pytest.mark.parametrize("when", range(4))
@pytest.mark.parametrize("loss", ["cancelled", "preempted", "crashed"])
def test_no_sequence_waits_for_a_leader_that_has_gone(loss: str, when: int) -> None:
    schedule = scheduler(max_batch_tokens=16, num_pages=200, prefix_caching=True)
    leader, *others = queue(schedule, *[50] * 4)
    for _ in range(when):
        play(plan(schedule))
    schedule.select_running()
    if loss == "cancelled":
        leader.end(FinishReason.CANCELLED)
        schedule.remove_finished()
    elif loss == "preempted":
        while leader in schedule.running[1:] or len(schedule.running) > 1:
            schedule._preempt()
    else:
        for sequence in schedule.running:
            sequence.reset_caches()
    for _ in range(30):
        play(plan(schedule))
    assert all(sequence.length > 50 for sequence in others)


def test_the_drafter_is_not_held_to_its_budget_by_pages_that_it_finds() -> None:
    schedule = scheduler(max_batch_tokens=64, prefix_caching=True)
    queue(schedule, *[50] * 8)
    play(plan(schedule, gamma=4))
    batch = plan(schedule, gamma=4)
    assert len(batch.entries) == 8
    assert all(entry.draft_stop == entry.stop for entry in batch.entries)
    assert batch.num_caught_up <= 64


def serve(rng: random.Random) -> Served:
    return Served(
        alpha=0.7 if rng.random() < 0.5 else None,
        info=model_info(
            num_pages=rng.choice([60, 1000]), page_size=4, prefix_caching=True, max_context=240
        ),
        max_running=rng.choice([3, 30]),
        max_batch_tokens=rng.choice([None, 5, 20, 100]),
        gamma=rng.choice([None, 0, 3]),
        max_gamma=16,
    )


@pytest.mark.parametrize("seed", range(20))
def test_every_request_ends_with_its_own_text_whatever_it_shares_or_loses(
    seed: int,
) -> None:
    rng = random.Random(seed)
    served = serve(rng)
    beginnings = [
        tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 90))) for _ in range(3)
    ]
    made: dict[int, tuple[tuple[int, ...], int]] = {}
    cancelled = set()
    for turn in range(15):
        prompt = (*rng.choice(beginnings), *range(rng.choice([0, 0, 1, 20])))
        max_tokens = rng.choice([1, 1, 5, 30])
        for _ in range(rng.choice([1, 1, 4])):
            made[served.submit(*prompt, max_tokens=max_tokens)] = prompt, max_tokens
        if rng.random() < 0.3:
            cancelled.add(rng.choice(list(made)))
            served.coordinator.cancel(max(cancelled))
        if turn == 10:
            served.target.caches.clear()
            served.target.errors.append(RuntimeError("lost"))
        served.rounds(rng.randrange(4))
    served.finish()
    for seq_id, (prompt, max_tokens) in made.items():
        got = served.tokens(seq_id)
        last = served.last(seq_id)
        assert last.finish is FinishReason.LENGTH or seq_id in cancelled
        assert got == text(prompt, max_tokens)[: len(got)]
        assert last.finish is not FinishReason.LENGTH or len(got) == max_tokens
    prefixes = served.coordinator.scheduler._prefixes
    assert prefixes is not None
    prefixes.drop_finished()
    assert len(prefixes) == 0, "nothing is kept of what has ended"
