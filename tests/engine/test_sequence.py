"""A sequence grows by verdicts alone, stops in time, and sends workers what their caches lack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from specserve.engine.sequence import Sequence
from specserve.types import (
    Chunk,
    FinishReason,
    Grammar,
    Logprobs,
    Origin,
    Policy,
    Proposal,
    Request,
    Speculation,
    Verdict,
    Warp,
)

EOS, STOP = 90, 91
A, C, B, P = Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS, Origin.PLAIN


def make(
    prompt: Iterable[int] = (1, 2, 3),
    *,
    max_tokens: int = 20,
    context: int = 100,
    draft_limit: int = 100,
    verifier: str = "block",
    **fields: Any,
) -> Sequence:
    prompt = tuple(prompt)
    request = Request(prompt, max_tokens, Warp(), seed=7, **fields)
    policy = Policy(Warp(), verifier, 7, len(prompt))
    return Sequence(
        5, request, policy, context=context, draft_limit=draft_limit, end_ids=frozenset({EOS})
    )


def commit(
    sequence: Sequence,
    drafts: tuple[int, ...],
    *,
    accepted: int,
    next_token: int,
    logprobs: tuple[Logprobs, ...] | None = None,
) -> Chunk:
    start = sequence.length
    proposal = (
        Proposal(5, start, drafts, None, num_cached=start + max(0, len(drafts) - 1))
        if drafts
        else None
    )
    return sequence.commit(Verdict(5, accepted, next_token, logprobs), proposal)


def counts(chunk: Chunk) -> tuple[int, int, int]:
    assert chunk.stats is not None
    return chunk.stats.rounds, chunk.stats.drafted, chunk.stats.accepted


@pytest.mark.parametrize(
    ("drafts", "accepted", "tokens", "origins"),
    [
        ((), 0, (40,), (P,)),
        ((10, 11, 12), 0, (40,), (C,)),
        ((10, 11, 12), 2, (10, 11, 40), (A, A, C)),
        ((10, 11, 12), 3, (10, 11, 12, 40), (A, A, A, B)),
    ],
)
def test_a_round_commits_the_accepted_drafts_and_the_next_token_and_says_where_each_came_from(
    drafts: tuple[int, ...], accepted: int, tokens: tuple[int, ...], origins: tuple[Origin, ...]
) -> None:
    sequence = make()
    chunk = commit(sequence, drafts, accepted=accepted, next_token=40)
    assert (chunk.tokens, chunk.origins, chunk.finish) == (tokens, origins, None)
    assert counts(chunk) == (
        1,
        len(drafts),
        accepted,
    )
    assert sequence.committed == [1, 2, 3, *tokens]


@pytest.mark.parametrize(
    ("drafts", "accepted", "next_token", "tokens", "origins"),
    [
        ((10, EOS, 12), 3, 40, (10, EOS), (A, A)),
        ((10, 11), 1, EOS, (10, EOS), (A, C)),
        ((10, STOP, EOS), 3, EOS, (10, STOP), (A, A)),
        ((EOS, 11), 0, 40, (40,), (C,)),
    ],
)
def test_the_first_committed_stop_ends_the_text_and_a_rejected_one_does_not(
    drafts: tuple[int, ...],
    accepted: int,
    next_token: int,
    tokens: tuple[int, ...],
    origins: tuple[Origin, ...],
) -> None:
    sequence = make(stop_token_ids=frozenset({STOP}))
    chunk = commit(sequence, drafts, accepted=accepted, next_token=next_token)
    assert (chunk.tokens, chunk.origins) == (tokens, origins)
    assert chunk.finish is (FinishReason.STOP if {EOS, STOP} & set(tokens) else None)
    assert chunk.stats == sequence.stats


def test_accepted_draft_tokens_are_counted_by_their_position() -> None:
    sequence = make()
    commit(sequence, (), accepted=0, next_token=1)
    for accepted in (2, 0, 1):
        chunk = commit(sequence, (10, 11, 12), accepted=accepted, next_token=1)
    assert counts(chunk) == (4, 9, 3)
    assert chunk.stats is not None
    assert (chunk.stats.drafts, chunk.stats.accepted_by_position) == (3, (2, 1))


@pytest.mark.parametrize(("resets_at", "cached"), [(None, 16), (0, 0), (1, 16)])
def test_pages_that_a_sequence_finds_after_a_preemption_are_not_counted(
    resets_at: int | None, cached: int
) -> None:
    sequence = make(range(40))
    sequence.started_at = 0.0
    for number, found in enumerate((16, 32)):
        if number == resets_at:
            sequence.reset_caches()
        sequence.commit(Verdict(5, 0, 7, None, cached_tokens=found), None)
    assert sequence.stats.cached_tokens == cached


def test_ignore_eos_ignores_the_models_end_but_not_the_requests_own_stops() -> None:
    sequence = make(ignore_eos=True, stop_token_ids=frozenset({STOP}))
    assert commit(sequence, (10, EOS), accepted=2, next_token=EOS).finish is None
    assert commit(sequence, (10, STOP), accepted=2, next_token=3).tokens == (10, STOP)
    assert sequence.finish is FinishReason.STOP


def test_max_tokens_cuts_inside_an_accepted_prefix_and_the_cut_tokens_are_not_counted() -> None:
    sequence = make(max_tokens=2)
    chunk = commit(sequence, (10, 11, 12), accepted=3, next_token=40)
    assert (chunk.tokens, chunk.origins, chunk.finish) == ((10, 11), (A, A), FinishReason.LENGTH)
    assert counts(chunk) == (1, 3, 2)


def test_a_stop_on_the_last_allowed_token_is_a_stop_and_one_behind_it_is_not() -> None:
    assert (
        commit(make(max_tokens=2), (10, EOS), accepted=2, next_token=1).finish is FinishReason.STOP
    )
    assert (
        commit(make(max_tokens=1), (10, EOS), accepted=2, next_token=1).finish
        is FinishReason.LENGTH
    )


def test_the_context_length_ends_the_text() -> None:
    chunk = commit(make(context=5), (10, 11, 12), accepted=3, next_token=40)
    assert (chunk.tokens, chunk.finish) == ((10, 11), FinishReason.LENGTH)


def test_logprobs_are_cut_with_their_tokens() -> None:
    logprobs = tuple(Logprobs(-float(i), (), ()) for i in range(4))
    assert (
        commit(
            make(max_tokens=2), (10, 11, 12), accepted=3, next_token=40, logprobs=logprobs
        ).logprobs
        == logprobs[:2]
    )


def test_after_a_verdict_the_accepted_part_is_cached_and_the_next_steps_carry_the_rest() -> None:
    sequence = make()
    commit(sequence, (10, 11, 12), accepted=1, next_token=40)  # 1 2 3 10 40
    assert (sequence.target_cached, sequence.draft_cached) == (4, 4)
    verify, draft = (
        sequence.verify_step(stop=5, proposal=None),
        sequence.draft_step(stop=5, gamma=2),
    )
    assert (verify.start, verify.tokens, verify.drafts, verify.needs_verdict) == (
        4,
        (40,),
        (),
        True,
    )
    assert (draft.start, draft.tokens, draft.gamma) == (4, (40,), 2)


def test_the_drafter_computes_the_last_draft_of_a_fully_accepted_proposal_in_the_next_step() -> (
    None
):
    sequence = make()
    commit(sequence, (10, 11, 12), accepted=3, next_token=40)
    assert (sequence.target_cached, sequence.draft_cached) == (6, 5)
    assert sequence.draft_step(stop=7, gamma=1).tokens == (12, 40)


def test_a_grammar_goes_only_with_steps_that_start_at_0() -> None:
    grammar = Grammar("regex", "a+")
    sequence = make(grammar=grammar)
    steps = sequence.verify_step(stop=2, proposal=None), sequence.draft_step(stop=2, gamma=0)
    assert [step.grammar for step in steps] == [grammar, grammar]
    sequence.advance(stop=2, proposal=Proposal(5, 2, (), None, num_cached=2))
    steps = sequence.verify_step(stop=3, proposal=None), sequence.draft_step(stop=3, gamma=1)
    assert [step.grammar for step in steps] == [None, None]
    sequence.reset_caches()
    assert sequence.verify_step(stop=3, proposal=None).grammar == grammar


def test_a_verdict_that_is_an_error_ends_the_sequence_without_a_token() -> None:
    sequence = make()
    chunk = sequence.commit(Verdict(5, 0, 7, None, "its grammar takes too much"), None)
    assert (chunk.tokens, chunk.finish, chunk.error) == (
        (),
        FinishReason.ERROR,
        "its grammar takes too much",
    )
    assert sequence.committed == [1, 2, 3]


def test_rounds_without_drafts_leave_a_hole_that_the_next_draft_step_fills() -> None:
    sequence = make()
    commit(sequence, (10,), accepted=1, next_token=20)
    for token in (21, 22, 23):
        commit(sequence, (), accepted=0, next_token=token)
    step = sequence.draft_step(stop=sequence.length, gamma=4)
    assert (step.start, step.tokens) == (3, (10, 20, 21, 22, 23))


def test_a_chunk_of_the_prompt_advances_the_caches_and_commits_nothing() -> None:
    sequence = make(prompt=range(10))
    step = sequence.verify_step(stop=4, proposal=None)
    assert (step.tokens, step.needs_verdict) == ((0, 1, 2, 3), False)
    sequence.advance(stop=4, proposal=Proposal(5, 4, (), None, num_cached=4))
    assert (
        sequence.target_cached,
        sequence.draft_cached,
        sequence.num_pending,
        sequence.length,
    ) == (
        4,
        4,
        6,
        10,
    )
    assert sequence.stats.target_passes == 1
    assert sequence.stats.rounds == 0


def test_no_more_is_drafted_than_can_be_used() -> None:
    assert make(max_tokens=6).max_drafts == 5
    assert make(max_tokens=50, context=10).max_drafts == 6
    assert make(draft_limit=5).max_drafts == 2
    assert make(max_tokens=1).max_drafts == 0
    assert make(draft_limit=0).max_drafts < 0


def test_only_lenient_is_reported_as_lossy() -> None:
    assert [
        make(verifier=name).stats.lossless
        for name in ("speculative", "block", "coupled", "lenient")
    ] == [True, True, True, False]


def test_a_sequence_ended_from_outside_reports_its_statistics_and_brings_no_token() -> None:
    sequence = make(speculation=Speculation(gamma=3))
    commit(sequence, (10, 11), accepted=1, next_token=40)
    chunk = sequence.end(FinishReason.ERROR, error="lost")
    assert (chunk.tokens, chunk.origins, chunk.finish, chunk.error) == (
        (),
        (),
        FinishReason.ERROR,
        "lost",
    )
    assert counts(chunk) == (1, 2, 1)
