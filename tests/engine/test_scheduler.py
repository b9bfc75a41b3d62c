"""Scheduling by tokens, pages and slots: what fits into a round, and which sequences wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.config.sections import MAX_CATCH_UP
from specserve.engine.batch import Batch
from specserve.engine.budget import TokenBudget
from specserve.engine.prefill import share
from specserve.engine.scheduler import Scheduler
from specserve.engine.sequence import Sequence
from specserve.types import Grammar, Policy, Proposal, Request, Verdict, Warp
from tests.support.fakes import model_info


def scheduler(
    *,
    num_pages: int = 1000,
    page_size: int = 4,
    max_running: int = 8,
    max_queued: int = 100,
    max_batch_tokens: int = 64,
    max_gamma: int = 4,
    budget: TokenBudget | None = None,
    prefix_caching: bool = False,
    drafts_prompts: bool = True,
) -> Scheduler:
    info = model_info(num_pages=num_pages, page_size=page_size, prefix_caching=prefix_caching)
    return Scheduler(
        info,
        max_running=max_running,
        max_queued=max_queued,
        budget=budget or TokenBudget(max_batch_tokens),
        max_gamma=max_gamma,
        drafts_prompts=drafts_prompts,
    )


def queue(
    schedule: Scheduler,
    *lengths: int,
    max_tokens: int = 100,
    draft_limit: int = 10_000,
    grammar: Grammar | None = None,
) -> list[Sequence]:
    made = []
    alive = [*schedule.running, *schedule.waiting]
    first_id = 1 + max((sequence.seq_id for sequence in alive), default=-1)
    for seq_id, length in enumerate(lengths, first_id):
        request, policy = (
            Request((1,) * length, max_tokens, Warp(), seed=1, grammar=grammar),
            Policy(Warp(), "block", 1, length),
        )
        made.append(
            Sequence(
                seq_id,
                request,
                policy,
                context=10_000,
                draft_limit=draft_limit,
                end_ids=frozenset(),
            )
        )
        schedule.queue(made[-1])
    return made


def plan(schedule: Scheduler, gamma: int = 0) -> Batch:
    schedule.select_running()
    return schedule.next_batch([gamma] * len(schedule.running))


def play(batch: Batch) -> None:
    """Let a round succeed: one token for each entry that needs a verdict, no draft accepted."""
    batch.verify_steps(
        [
            Proposal(entry.sequence.seq_id, entry.stop, (1,) * entry.gamma, None, entry.draft_stop)
            for entry in batch.entries
            if entry.draft_stop
        ]
    )
    batch.commit(
        [
            Verdict(entry.sequence.seq_id, 0, 2, None)
            for entry in batch.entries
            if entry.needs_verdict
        ]
    )


def decoding(schedule: Scheduler, *lengths: int) -> list[Sequence]:
    """Queue prompts and play rounds until each has its first token, so that all decode."""
    made = queue(schedule, *(length - 1 for length in lengths))
    for _ in range(1000):
        waiting = [
            sequence
            for sequence, length in zip(made, lengths, strict=True)
            if sequence.length < length
        ]
        if not waiting:
            return made
        play(plan(schedule))
    raise AssertionError("some prompt was never prefilled")


def tokens(batch: Batch) -> dict[int, int]:
    return {
        entry.sequence.seq_id: entry.stop - entry.sequence.target_cached for entry in batch.entries
    }


def test_a_round_never_has_more_tokens_than_its_budget() -> None:
    schedule = scheduler(max_batch_tokens=20)
    queue(schedule, 30, 5, 5, 70, 1)
    for _ in range(30):
        batch = plan(schedule, gamma=4)
        assert sum(tokens(batch).values()) + sum(entry.gamma for entry in batch.entries) <= 20
        play(batch)


def test_a_round_uses_the_whole_budget_while_prompts_wait() -> None:
    schedule = scheduler(max_batch_tokens=20)
    queue(schedule, 30, 5, 5, 70)
    for _ in range(4):
        batch = plan(schedule)
        assert sum(tokens(batch).values()) == 20
        play(batch)


def test_prompts_progress_even_when_decoding_takes_the_whole_budget() -> None:
    schedule = scheduler(max_batch_tokens=4)
    decoding(schedule, 2, 2, 2, 2, 2)
    (prompt,) = queue(schedule, 10)
    for _ in range(10):
        play(plan(schedule, gamma=4))
    assert prompt.length == 11


def test_drafts_leave_prompts_half_of_the_round() -> None:
    schedule = scheduler(max_batch_tokens=16, max_gamma=16)
    decoding(schedule, 5, 5)
    queue(schedule, 100)
    batch = plan(schedule, gamma=16)
    assert [entry.gamma for entry in batch.entries] == [3, 3, 0]
    assert tokens(batch)[2] == 8


def test_all_drafts_shrink_equally_when_the_round_is_full() -> None:
    schedule = scheduler(max_batch_tokens=16, max_gamma=16)
    decoding(schedule, 5, 5, 5, 5)
    assert [entry.gamma for entry in plan(schedule, gamma=16).entries] == [3, 3, 3, 3]


def test_a_short_prompt_does_not_wait_for_all_chunks_of_long_ones() -> None:
    schedule = scheduler(max_batch_tokens=64, max_running=16, num_pages=100_000)
    *_, short = queue(schedule, *[10_000] * 5, 20)
    rounds = 0
    while short.length == 20:
        play(plan(schedule))
        rounds += 1
    assert rounds <= 4


def test_a_long_prompt_is_prefilled_at_half_speed_at_least_whatever_arrives_behind_it() -> None:
    schedule = scheduler(max_batch_tokens=64, max_running=1000)
    (long,) = queue(schedule, 640)
    for _ in range(20):
        queue(schedule, 30, 30, 30, max_tokens=1)
        play(plan(schedule))
        schedule.remove_finished()
    assert long.length > 640


def test_prompts_of_one_length_finish_in_order_of_arrival() -> None:
    schedule = scheduler(max_batch_tokens=32)
    made = queue(schedule, *[50] * 6)
    finished: list[int] = []
    for _ in range(100):
        play(plan(schedule))
        finished += [
            sequence.seq_id
            for sequence in made
            if sequence.length > 50 and sequence.seq_id not in finished
        ]
    assert finished == [0, 1, 2, 3, 4, 5]


def test_short_prompts_do_not_wait_for_a_long_one_however_many_they_are() -> None:
    schedule = scheduler(max_batch_tokens=64, max_running=400, num_pages=100_000)
    long, *short = queue(schedule, 10_000, *[20] * 300, max_tokens=1)
    rounds = 0
    while any(not sequence.finish for sequence in short):
        play(plan(schedule))
        schedule.remove_finished()
        rounds += 1
    assert rounds <= 1.1 * 300 * 20 / 32
    assert long.target_cached >= 32 * rounds, "nor does the long one for them"


@pytest.mark.parametrize("count", [64, 256, 600])
@pytest.mark.parametrize(
    ("budget", "rounds"), [(TokenBudget(512), 3), (TokenBudget(512, is_fixed=False), 2)]
)
def test_a_prompt_is_prefilled_soon_beside_any_number_of_running_sequences(
    count: int, budget: TokenBudget, rounds: int
) -> None:
    schedule = scheduler(budget=budget, max_running=count + 1, num_pages=100_000)
    decoding(schedule, *[3] * count)
    (prompt,) = queue(schedule, 300)
    for _ in range(rounds):
        play(plan(schedule))
    assert prompt.length > 300


def test_decoding_sequences_beyond_a_fixed_budget_take_turns() -> None:
    schedule = scheduler(max_batch_tokens=16, max_running=51)
    made = decoding(schedule, *[3] * 50)
    for count in range(1, 8):
        for _ in range(4):
            batch = plan(schedule, gamma=4)
            assert len(batch.entries) == sum(tokens(batch).values()) == 16
            assert not any(entry.gamma for entry in batch.entries)
            assert list(tokens(batch)) == sorted(tokens(batch)), "in order of arrival"
            play(batch)
        assert all(sequence.length >= 3 + count for sequence in made)


def test_turns_go_on_when_sequences_come_and_go() -> None:
    schedule = scheduler(max_batch_tokens=8, max_running=40, num_pages=100_000)
    made = decoding(schedule, *[3] * 20)
    for i in range(40):
        before = [(sequence, sequence.length) for sequence in made if not sequence.finish]
        for _ in range(-(-40 // 6)):
            if i % 3 == 0:
                made += queue(schedule, 2, max_tokens=3 + i % 7)
            play(plan(schedule))
            schedule.remove_finished()
        for sequence, length in before:
            assert sequence.finish or sequence.length > length


def test_all_decoding_sequences_take_part_in_every_round_of_the_hardware_s_budget() -> None:
    schedule = scheduler(budget=TokenBudget(64, is_fixed=False), max_running=301, num_pages=100_000)
    decoding(schedule, *[3] * 300)
    assert len(plan(schedule, gamma=4).entries) == 300
    queue(schedule, 5000)
    batch = plan(schedule, gamma=4)
    assert len(batch.entries) == 301
    assert batch.num_prompt_tokens == 300, "as many positions as decoding, so at most twice as long"


@given(st.lists(st.integers(2, 300), min_size=1, max_size=20), st.integers(1, 600))
def test_sharing_uses_the_whole_budget_and_gives_each_its_part(
    pending: list[int], budget: int
) -> None:
    chunks = share(pending, budget=budget)
    assert sum(chunks) == min(budget, sum(pending))
    for chunk, tokens in zip(chunks, pending, strict=True):
        assert min(tokens, budget // (2 * len(pending))) <= chunk <= tokens
    assert chunks[0] >= min(pending[0], budget // 2)


def test_admission_is_in_order_even_when_a_later_one_would_fit() -> None:
    schedule = scheduler(num_pages=20, page_size=4, max_gamma=0)
    queue(schedule, 60, 40, 4)
    schedule.select_running()
    assert [sequence.seq_id for sequence in schedule.running] == [0]
    assert [sequence.seq_id for sequence in schedule.waiting] == [1, 2]


def test_admission_leaves_room_for_one_more_round_of_every_sequence() -> None:
    schedule = scheduler(num_pages=4, page_size=4, max_gamma=4)
    queue(schedule, 7, 4)  # 2 pages now, 3 after a round; 1 page now, 3 after a round
    schedule.select_running()
    assert len(schedule.running) == 1


def test_admission_leaves_room_for_one_more_round_of_the_running_sequences_too() -> None:
    schedule = scheduler(num_pages=5, page_size=4, max_gamma=4)
    decoding(schedule, 8)  # 2 pages, 4 after a round
    queue(schedule, 3)  # 1 page, 2 after a round
    schedule.select_running()
    assert len(schedule.running) == 1


def test_a_sequence_alone_is_admitted_even_without_room_for_drafts() -> None:
    schedule = scheduler(num_pages=2, page_size=4, max_gamma=16)
    queue(schedule, 7)
    schedule.select_running()
    assert len(schedule.running) == 1


def test_max_running_is_never_exceeded() -> None:
    schedule = scheduler(max_running=3)
    queue(schedule, *[4] * 7)
    plan(schedule)
    assert (len(schedule.running), len(schedule.waiting)) == (3, 4)


def test_when_pages_run_short_the_youngest_lose_their_drafts_first() -> None:
    schedule = scheduler(num_pages=10, page_size=4, max_gamma=4)
    decoding(schedule, 8, 8, 8)  # 2 pages each; all 4 drafts take one more page
    schedule._num_pages = 8
    batch = plan(schedule, gamma=4)
    assert [entry.gamma for entry in batch.entries] == [4, 4, 0]
    assert schedule.num_preempted == 0


def test_drafts_that_fit_into_pages_already_counted_are_kept() -> None:
    schedule = scheduler(num_pages=10, page_size=4, max_gamma=4)
    decoding(schedule, 6, 6)
    schedule._num_pages = 4
    assert [entry.gamma for entry in plan(schedule, gamma=4).entries] == [2, 2]


def test_when_committed_tokens_do_not_fit_the_youngest_is_preempted_and_comes_back_first() -> None:
    schedule = scheduler(num_pages=10, page_size=4, max_gamma=0, max_running=3)
    made = decoding(schedule, 8, 8, 8)
    made[2].draft_cached = 7
    queue(schedule, 4)
    schedule._num_pages = 5
    batch = plan(schedule)
    assert [entry.sequence.seq_id for entry in batch.entries] == [0, 1]
    assert [sequence.seq_id for sequence in schedule.waiting] == [2, 3]
    assert (schedule.released, schedule.num_preempted) == ([2], 1)
    assert (made[2].target_cached, made[2].draft_cached) == (0, 0)
    assert schedule.num_used_pages == 4


def test_several_preempted_sequences_keep_their_order() -> None:
    schedule = scheduler(num_pages=10, page_size=4, max_gamma=0)
    decoding(schedule, 8, 8, 8)
    schedule._num_pages = 2
    schedule.select_running()
    assert [sequence.seq_id for sequence in schedule.waiting] == [1, 2]


def test_the_drafter_prefills_the_prompt_along_with_the_target() -> None:
    schedule = scheduler(max_batch_tokens=16)
    queue(schedule, 40)
    batch = plan(schedule, gamma=4)
    assert [(entry.stop, entry.draft_stop, entry.gamma) for entry in batch.entries] == [(16, 16, 0)]


def test_a_drafter_in_the_target_s_process_reads_a_prompt_after_its_first_token() -> None:
    schedule = scheduler(max_batch_tokens=64, drafts_prompts=False)
    (sequence,) = queue(schedule, 40)
    first = plan(schedule, gamma=4)
    assert [(entry.stop, entry.draft_stop) for entry in first.entries] == [(40, None)]
    play(first)
    (entry,) = plan(schedule, gamma=4).entries
    assert entry.draft_stop == sequence.length == 41
    assert entry.gamma == 4


@pytest.mark.parametrize(("gamma", "draft_limit"), [(0, 10_000), (4, 40), (4, 0)])
def test_the_drafter_gets_no_step_when_it_will_not_draft(gamma: int, draft_limit: int) -> None:
    schedule = scheduler(max_batch_tokens=16)
    queue(schedule, 40, draft_limit=draft_limit)
    assert plan(schedule, gamma=gamma).draft_steps() == []


def test_a_drafter_that_lost_everything_catches_up_over_several_rounds_and_drafts_again_then() -> (
    None
):
    schedule = scheduler(max_batch_tokens=16, num_pages=1000)
    decoding(schedule, 40)  # with gamma 0: the drafter has nothing cached
    seen = []
    for _ in range(4):
        batch = plan(schedule, gamma=4)
        seen.append([(len(step.tokens), step.gamma) for step in batch.draft_steps()])
        play(batch)
    assert seen == [[(17, 0)], [(17, 0)], [(8, 4)], [(1, 4)]]


def test_a_drafter_that_reads_after_the_target_does_not_read_in_the_target_s_pieces() -> None:
    schedule = scheduler(max_batch_tokens=16, num_pages=1000, drafts_prompts=False)
    decoding(schedule, MAX_CATCH_UP + 40)
    seen = []
    for _ in range(2):
        batch = plan(schedule, gamma=4)
        seen.append([(len(step.tokens), step.gamma) for step in batch.draft_steps()])
        play(batch)
    assert seen == [[(MAX_CATCH_UP + 1, 0)], [(40, 4)]]


def test_catching_up_is_shared_so_that_no_draft_pass_grows_beyond_a_rounds_budget() -> None:
    schedule = scheduler(max_batch_tokens=16, num_pages=1000)
    decoding(schedule, 10, 20, 30)
    assert [(len(step.tokens), step.gamma) for step in plan(schedule, gamma=3).draft_steps()] == [
        (13, 3),
        (5, 0),
        (1, 0),
    ]
