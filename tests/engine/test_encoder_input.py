"""The prompt of an encoder-decoder: the steps that carry it, its pages, and its limits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specserve.config.sections import SpeculationConfig
from specserve.drafters.ngram.build import open_ngram_drafter
from specserve.engine.admission import Admission
from specserve.engine.batch import Batch
from specserve.engine.budget import TokenBudget
from specserve.engine.scheduler import Scheduler
from specserve.engine.sequence import Sequence as Running
from specserve.errors import TooLong
from specserve.types import DraftStep, ModelInfo, Policy, Proposal, Request, Verdict, Warp

START = 0
GREEDY = Policy(Warp(temperature=0), "block", seed=0, prompt_length=1)


def info(*, num_pages: int = 100, max_context: int = 64) -> ModelInfo:
    return ModelInfo(
        vocab_size=97,
        max_context=max_context,
        end_ids=frozenset(),
        page_size=4,
        num_pages=num_pages,
        decoder_start=START,
    )


def request(length: int, *, max_tokens: int = 8) -> Request:
    return Request(tuple(range(1, 1 + length)), max_tokens, Warp(), seed=7)


def sequence(
    length: int = 5, *, seq_id: int = 0, draft_limit: int = 64, max_tokens: int = 8
) -> Running:
    return Running(
        seq_id,
        request(length, max_tokens=max_tokens),
        GREEDY,
        context=64,
        draft_limit=draft_limit,
        end_ids=frozenset(),
        decoder_start=START,
    )


def write(one: Running, *tokens: int) -> None:
    for token in tokens:
        one.commit(Verdict(one.seq_id, 0, token, None), None)


def test_encoder_input_goes_only_with_steps_that_start_at_0() -> None:
    one = sequence()
    assert (one.committed, one.num_pending) == ([START], 6)
    first = one.verify_step(stop=1, proposal=None)
    assert (first.start, first.tokens, first.encoder_input, first.needs_verdict) == (
        0,
        (START,),
        (1, 2, 3, 4, 5),
        True,
    )
    write(one, 40)
    later = one.verify_step(stop=2, proposal=None)
    assert (later.start, later.tokens, later.encoder_input, one.num_pending) == (1, (40,), (), 1)
    assert one.draft_step(stop=2, gamma=3).encoder_input == (1, 2, 3, 4, 5)
    one.commit(Verdict(0, 1, 42, None), Proposal(0, 2, (41,), None, num_cached=2))
    assert one.draft_step(stop=4, gamma=3).encoder_input == ()


def test_a_preempted_text_is_recomputed_with_its_encoder_input() -> None:
    one = sequence()
    write(one, 40, 41)
    one.reset_caches()
    again = one.verify_step(stop=3, proposal=None)
    assert (again.start, again.tokens, again.encoder_input) == (0, (START, 40, 41), (1, 2, 3, 4, 5))
    assert one.num_pending == 8


def test_max_tokens_counts_generated_tokens_only() -> None:
    one = sequence(length=50, max_tokens=3)
    write(one, 40, 41, 42)
    assert one.finish == "length"
    assert one.length == 4


def test_an_encoder_input_too_long_for_the_drafter_is_not_sent_to_it() -> None:
    assert sequence(length=20, draft_limit=16).max_drafts < 1
    assert sequence(length=16, draft_limit=16).max_drafts > 1


def scheduler(**options: int) -> Scheduler:
    options = {"num_pages": 100, "max_batch_tokens": 32, "max_gamma": 4} | options
    return Scheduler(
        info(num_pages=options["num_pages"]),
        max_running=8,
        max_queued=8,
        budget=TokenBudget(options["max_batch_tokens"]),
        max_gamma=options["max_gamma"],
    )


def planned(schedule: Scheduler, gamma: int = 2) -> Batch:
    schedule.select_running()
    return schedule.next_batch([gamma] * len(schedule.running))


def queue(schedule: Scheduler, lengths: Sequence[int], **options: int) -> list[Running]:
    made = [sequence(length, seq_id=seq_id, **options) for seq_id, length in enumerate(lengths)]
    for one in made:
        schedule.queue(one)
    return made


def test_encoder_inputs_are_not_chunked_and_the_oldest_is_always_scheduled() -> None:
    schedule = scheduler()
    long, *short = queue(schedule, [50, 10, 10, 10])
    batch = planned(schedule)
    assert [entry.sequence for entry in batch.entries] == [long]
    assert (
        batch.entries[0].stop,
        batch.entries[0].needs_verdict,
        batch.entries[0].gamma,
        batch.num_prompt_tokens,
    ) == (1, True, 0, 51)
    write(long, 40)
    batch = planned(schedule)
    assert [entry.sequence for entry in batch.entries] == [long, *short[:2]]


def test_a_drafter_reads_no_more_encoder_input_in_a_round_than_the_target() -> None:
    schedule = scheduler()
    made = queue(schedule, [20, 20, 40])
    for one in made:
        schedule.select_running()
        one.target_cached, one.committed = 1, [START, 9]
    entries = planned(schedule).entries
    assert [(entry.draft_stop, entry.gamma) for entry in entries] == [(2, 2), (None, 0), (None, 0)]
    made[0].draft_cached = made[1].draft_cached = 1
    entries = planned(schedule).entries
    assert [(entry.draft_stop, entry.gamma) for entry in entries] == [
        (2, 2),
        (2, 2),
        (1, 0),
    ]  # too long for any round: it is read alone


def test_the_pages_of_encoder_inputs_count_and_the_youngest_is_preempted() -> None:
    schedule = scheduler(num_pages=12, max_gamma=0)
    first, second = queue(schedule, [16, 14])
    schedule.select_running()
    assert schedule.num_used_pages == (4 + 1) + (4 + 1)
    for one in (first, second):
        write(one, *range(40, 48))
        one.finish = None
    schedule.select_running()
    assert schedule.running == [first]
    assert schedule.num_preempted == 1


def admission(**options: int) -> Admission:
    return Admission(info(**options), SpeculationConfig(max_gamma=4))


def test_an_encoder_input_too_long_for_the_encoder_or_for_the_cache_is_an_error() -> None:
    admission().check(request(64))
    with pytest.raises(TooLong, match="the prompt has 65 tokens, but the encoder reads at most 64"):
        admission().check(request(65))
    with pytest.raises(
        TooLong, match="the prompt has 40 tokens, next to which the cache has no room"
    ):
        admission(num_pages=10).check(request(40))
    assert admission(num_pages=12).max_length(request(40)) == 8
    assert admission().max_length(request(40)) == 64


def test_penalties_ignore_the_encoder_input() -> None:
    assert admission().policy(request(40)).prompt_length == 1


def draft(
    start: int,
    tokens: tuple[int, ...],
    *,
    encoder_input: tuple[int, ...] = (),
    gamma: int = 4,
    seq_id: int = 0,
) -> DraftStep:
    return DraftStep(seq_id, start, tokens, gamma, GREEDY, encoder_input)


@pytest.mark.parametrize("kind", ["prompt_copy", "max_gram"])
def test_drafts_are_copied_from_the_encoder_input_and_from_generated_tokens(kind: str) -> None:
    drafter = open_ngram_drafter(kind, path=None, learn=False, support=8, vocab_size=97)
    encoder_input = (5, 6, 7, 8, 9, 2)
    (first,) = drafter.draft([draft(0, (START, 5, 6), encoder_input=encoder_input)], bool)
    assert (first.start, first.tokens, first.num_cached) == (3, (7, 8, 9, 2), 7)
    (second,) = drafter.draft(
        [draft(5, (30, 31, 5, 6, 7, 8, 30, 31))], bool
    )  # two drafts were accepted; the latest match is in the generated tokens
    assert (second.start, second.tokens) == (13, (5, 6, 7, 8))
    drafter.release([0])
    (again,) = drafter.draft([draft(0, (START, 8, 9), encoder_input=encoder_input, gamma=1)], bool)
    assert again.tokens == (2,)


def test_branches_copy_from_the_encoder_input_too() -> None:
    drafter = open_ngram_drafter("prompt_copy", path=None, learn=None, support=8, vocab_size=97)
    drafter.draft([draft(0, (START, 5, 6), encoder_input=(5, 6, 7, 8, 9, 2))], bool)
    (forecast,) = drafter.forecast_outcomes([0], 2)
    assert (forecast.start, forecast.drafts) == (3, (7, 8, 9, 2))
    assert drafter.fork(0, 1, 4)
    (branch,) = drafter.draft([draft(4, (8,), seq_id=1, gamma=2)], bool)
    assert (branch.start, branch.tokens) == (5, (9, 2))
    drafter.promote_branch(0, 1)
    (after,) = drafter.draft([draft(4, (8,), gamma=2)], bool)
    assert (after.start, after.tokens) == (5, (9, 2))
