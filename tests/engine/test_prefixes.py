"""The index of prompts' pages: who has computed which, and who is to be waited for."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from specserve.engine.prefixes import IN_DRAFTER, PrefixIndex
from specserve.engine.sequence import Sequence
from specserve.types import FinishReason, Policy, Request, Warp

PAGE = 4


def sequence(
    seq_id: int, prompt: Tokens[int], salt: bytes = b"", prompt_logprobs: int | None = None
) -> Sequence:
    return Sequence(
        seq_id,
        Request(tuple(prompt), 10, Warp(), seed=1, prompt_logprobs=prompt_logprobs),
        Policy(Warp(), "block", 1, len(prompt), cache_salt=salt),
        context=1000,
        draft_limit=1000,
        end_ids=frozenset(),
    )


def computed(index: PrefixIndex, seq: Sequence, stop: int) -> Sequence:
    index.claim(seq, stop)
    seq.target_cached = stop
    return seq


def test_a_page_is_shared_once_its_owner_has_computed_it() -> None:
    index, first, second = PrefixIndex(PAGE), sequence(0, range(20)), sequence(1, range(20))
    index.claim(first, 10)
    assert index.num_shared(second) == 0
    first.target_cached = 10
    assert index.num_shared(second) == 8
    assert index.num_shared(first) == 0, "its own pages are no gain"


def test_sharing_ends_where_the_prompts_differ_and_before_the_last_token() -> None:
    index = PrefixIndex(PAGE)
    computed(index, sequence(0, range(20)), 20)
    assert index.num_shared(sequence(1, [*range(9), 50, *range(10, 20)])) == 8
    assert index.num_shared(sequence(2, range(12))) == 8, "the last token gives the logits"
    assert index.num_shared(sequence(3, range(1, 20))) == 0


def test_pages_are_shared_under_one_salt_only() -> None:
    index = PrefixIndex(PAGE)
    computed(index, sequence(0, range(20), b"alice"), 20)
    assert index.num_shared(sequence(1, range(20), b"bob")) == 0
    assert index.num_shared(sequence(2, range(20))) == 0
    assert index.num_shared(sequence(3, range(20), b"alice")) == 16


def test_a_sequence_inside_a_page_shares_nothing() -> None:
    index, other = PrefixIndex(PAGE), sequence(1, range(20))
    computed(index, sequence(0, range(20)), 20)
    other.target_cached = 6
    assert index.num_shared(other) == 0
    other.target_cached = 8
    assert index.num_shared(other) == 8


def test_the_drafter_has_pages_of_its_own() -> None:
    index, owner = PrefixIndex(PAGE), sequence(0, range(20))
    computed(index, owner, 20)
    assert index.num_shared(sequence(1, range(20)), IN_DRAFTER) == 0
    owner.draft_cached = 9
    assert index.num_shared(sequence(2, range(20)), IN_DRAFTER) == 8


def test_pages_of_a_sequence_that_lost_its_caches_are_not_shared() -> None:
    index, owner = PrefixIndex(PAGE), sequence(0, range(20))
    computed(index, owner, 20).reset_caches()
    assert index.num_shared(sequence(1, range(20))) == 0


def test_pages_of_a_finished_sequence_are_handed_on_to_one_that_attaches_them() -> None:
    index, first, second = PrefixIndex(PAGE), sequence(0, range(20)), sequence(1, range(20))
    computed(index, first, 20).finish = FinishReason.LENGTH
    index.drop_later(first)
    assert index.num_shared(second) == 16
    computed(index, second, 20)
    index.drop_finished()
    assert index.num_shared(sequence(2, range(20))) == 16


def test_nothing_is_kept_of_sequences_that_are_dropped() -> None:
    index = PrefixIndex(PAGE)
    for seq_id in range(50):
        one = computed(index, sequence(seq_id, [seq_id] * 30), 30)
        index.drop_later(one) if seq_id % 2 else index.drop(one)
        index.drop_finished()
    assert len(index) == 0
    assert not index._hashes


def test_a_prompt_that_is_scored_shares_nothing_in_the_target_and_others_share_its_pages() -> None:
    index, scored = PrefixIndex(PAGE), sequence(1, range(20), prompt_logprobs=2)
    assert index.num_shared(computed(index, scored, 8)) == 0
    assert index.num_shared(sequence(2, range(20))) == 8
    computed(index, sequence(0, range(20)), 20)
    assert index.num_shared(scored) == 0
    assert index.must_compute(scored)
