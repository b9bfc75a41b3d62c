"""The paged KV cache against a model of plain lists: each sequence reads what it wrote.

That holds whatever is shared, copied or evicted.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Sequence
from itertools import count
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specserve.errors import OutOfPages, TooLittleMemory
from specserve.models.cache import Fork, PagedCache
from specserve.models.memory import num_pages_for, page_bytes

PAGE, LAYERS = 4, 2


def content(prefix: Sequence[int]) -> float:
    """Return a number that stands for the keys of a prefix's last position.

    Like real keys, it depends on the whole prefix. It is exact in float64.
    """
    return float(crc32(array("q", prefix).tobytes()))


def small_cache(num_pages: int = 24, *, prefix_caching: bool = True) -> PagedCache:
    return PagedCache(
        num_layers=LAYERS,
        kv_heads=1,
        head_dim=2,
        v_head_dim=3,
        num_pages=num_pages,
        page_size=PAGE,
        dtype=torch.float64,
        device="cpu",
        prefix_caching=prefix_caching,
    )


class CheckedCache:
    """A cache beside a plain dict of token lists.

    Every operation is done to both; `compare` reads the cache back.
    """

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self.texts: dict[int, list[int]] = {}
        self.num_refused = 0
        self.ids = count(1000)

    def write(self, seq_id: int, tokens: Sequence[int], *, match: bool = True) -> int:
        """Do a worker's step, and return how many tokens were attached from the prefix cache."""
        text = self.texts.get(seq_id, [])
        self.cache.truncate(seq_id, len(text))
        found = self.cache.attach_prefix(seq_id, tokens) if match else 0
        assert not found or (len(text) + found) % PAGE == 0
        assert found < len(tokens)
        if found:
            text = self.texts[seq_id] = text + list(tokens[:found])
        if not self._reserve(seq_id, len(text) + len(tokens) - found):
            return found
        self.cache.append(seq_id, tokens[found:])
        self.texts[seq_id] = text + list(tokens[found:])
        self._fill(seq_id, len(text))
        return found

    def truncate(self, seq_id: int, length: int) -> None:
        self.cache.truncate(seq_id, length)
        del self.texts[seq_id][length:]

    def release(self, seq_id: int) -> None:
        self.cache.release(seq_id)
        self.texts.pop(seq_id, None)

    def fork(self, forks: Sequence[Fork]) -> None:
        before = self.state()
        try:
            self.cache.fork_many(forks)
        except OutOfPages:
            self.num_refused += 1
            assert self.state() == before, "a refused fork changed something"
            return
        for fork in forks:
            self.texts[fork.branch_id] = self.texts[fork.seq_id][: fork.length]

    def _reserve(self, seq_id: int, length: int) -> bool:
        pages = sum(
            -(-len(text) // PAGE) for other, text in self.texts.items() if other != seq_id
        ) + -(-length // PAGE)
        before = self.state()
        try:
            self.cache.reserve(seq_id, length)
        except OutOfPages:
            self.num_refused += 1
            assert pages > self.cache.num_pages, (
                "sequences that fit without any sharing are refused"
            )
            assert self.state() == before, "a refused reservation changed something"
            return False
        return True

    def _fill(self, seq_id: int, start: int) -> None:
        text = self.texts[seq_id]
        slots = self.cache.slots(seq_id, start, len(text))
        fresh = torch.tensor(
            [content(text[: position + 1]) for position in range(start, len(text))],
            dtype=torch.float64,
        )
        for number, pool in self.pools():
            pool[slots] = (fresh + number)[:, None, None]

    def pools(self) -> list[tuple[int, torch.Tensor]]:
        return list(enumerate([*self.cache.keys, *self.cache.values]))

    def read(self, seq_id: int) -> torch.Tensor:  # [pools, length]
        slots = self.cache.slots(seq_id, 0, self.cache.length(seq_id))
        return torch.stack([pool[slots].amin((1, 2)) - number for number, pool in self.pools()])

    def state(self) -> object:
        lengths = {seq_id: self.cache.length(seq_id) for seq_id in self.texts}
        width = self.cache.num_pages
        return (
            self.cache.num_free,
            lengths,
            self.cache.block_table(list(self.texts), width).tolist(),
            [pool.numpy().tobytes() for _, pool in self.pools()],
        )

    def compare(self) -> None:
        self.cache.check()
        for seq_id, text in self.texts.items():
            assert self.cache.length(seq_id) == len(text)
            assert self.cache.tokens(seq_id).tolist() == text
            expected = [content(text[: position + 1]) for position in range(len(text))]
            assert self.read(seq_id).tolist() == [expected] * (2 * LAYERS), (
                f"sequence {seq_id} reads what it has not written"
            )
        assert self.cache.num_used <= sum(-(-len(text) // PAGE) for text in self.texts.values())


def random_operation(checked: CheckedCache, rng: random.Random) -> None:
    known = list(checked.texts)
    choice = rng.random()
    if len(known) < 2 or (choice < 0.15 and len(known) < 12):
        # Two tokens only: prefixes repeat.
        checked.write(next(checked.ids), rng.choices((0, 1), k=rng.randrange(1, 20)))
    elif choice < 0.55:
        checked.write(rng.choice(known), rng.choices((0, 1), k=rng.randrange(1, 8)))
    elif choice < 0.75:
        seq_id = rng.choice(known)
        checked.truncate(seq_id, rng.randint(0, len(checked.texts[seq_id])))
    elif choice < 0.85 and len(known) < 12:
        seq_ids = rng.choices(known, k=rng.randrange(1, 4))
        checked.fork(
            [
                Fork(seq_id, next(checked.ids), rng.randint(0, len(checked.texts[seq_id])))
                for seq_id in seq_ids
            ]
        )
    else:
        checked.release(rng.choice(known))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_ten_thousand_random_operations_leave_every_sequence_with_its_own_contents(
    prefix_caching: bool,
) -> None:
    checked, rng = CheckedCache(small_cache(prefix_caching=prefix_caching)), random.Random(11)
    for number in range(10_000):
        random_operation(checked, rng)
        if number % 5 == 0:
            checked.compare()
    assert checked.num_refused > 500, "the pages never ran out: the test is too easy"
    assert (checked.cache.prefix_hits > 1000) == prefix_caching
    for seq_id in list(checked.texts):
        checked.release(seq_id)
    checked.cache.check()
    assert checked.cache.num_free == checked.cache.num_pages
    assert checked.cache.num_used == 0


class Operations(RuleBasedStateMachine):
    """Random operations, found and shrunk by hypothesis: few sequences on few pages."""

    ids = st.integers(0, 5)
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)
    parts = st.integers(0, 12)

    def __init__(self) -> None:
        super().__init__()
        self.checked = CheckedCache(small_cache(8))

    @rule(seq_id=ids, tokens=tokens, match=st.booleans())
    def write(self, seq_id: int, tokens: list[int], match: bool) -> None:
        self.checked.write(seq_id, tokens, match=match)

    @rule(seq_id=ids, length=parts)
    def truncate(self, seq_id: int, length: int) -> None:
        if seq_id in self.checked.texts:
            self.checked.truncate(seq_id, min(length, len(self.checked.texts[seq_id])))

    @rule(seq_id=ids, branch_id=ids, length=parts)
    def fork(self, seq_id: int, branch_id: int, length: int) -> None:
        if seq_id in self.checked.texts and branch_id != seq_id:
            self.checked.release(branch_id)
            self.checked.fork(
                [Fork(seq_id, branch_id, min(length, len(self.checked.texts[seq_id])))]
            )

    @rule(seq_id=ids)
    def release(self, seq_id: int) -> None:
        self.checked.release(seq_id)

    @invariant()
    def contents_are_right(self) -> None:
        self.checked.compare()


Operations.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestOperations = Operations.TestCase


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def test_truncate_and_refill_equals_fresh() -> None:
    checked = CheckedCache(small_cache())
    checked.write(1, text(18))
    checked.truncate(1, 10)
    checked.write(1, text(7, seed=1))
    checked.write(2, text(10) + text(7, seed=1), match=False)
    assert checked.read(1).equal(checked.read(2))


def test_truncate_drops_whole_pages_at_once_and_only_those() -> None:
    cache = small_cache(8)
    cache.reserve(1, 4 * PAGE)
    cache.append(1, text(4 * PAGE))
    cache.truncate(1, 2 * PAGE + 1)
    assert cache.num_used == 3
    cache.truncate(1, 2 * PAGE)
    assert cache.num_used == 2
    cache.truncate(1, 2 * PAGE)
    assert cache.num_used == 2
    cache.truncate(1, 0)
    assert cache.num_used == 0


def test_truncate_gives_reserved_room_back_that_was_never_filled() -> None:
    cache = small_cache(8)
    cache.reserve(1, 4 * PAGE)
    cache.append(1, text(2))
    cache.truncate(1, 2)
    assert cache.num_used == 1
    cache.check()


@pytest.mark.parametrize(("seq_id", "length"), [(1, 7), (1, -1), (2, 1)])
def test_truncating_past_the_cached_length_raises_rather_than_leaving_a_hole(
    seq_id: int, length: int
) -> None:
    cache = small_cache()
    cache.reserve(1, 6)
    cache.append(1, text(6))
    with pytest.raises(ValueError, match="cannot be truncated"):
        cache.truncate(seq_id, length)
    assert cache.length(1) == 6


def test_appending_without_room_is_a_bug_of_the_caller() -> None:
    cache = small_cache()
    cache.reserve(1, 3)
    with pytest.raises(AssertionError, match="append without reserve"):
        cache.append(1, text(PAGE + 1))
    assert cache.length(1) == 0


def test_unknown_sequences_are_empty_and_may_be_released_and_truncated_to_nothing() -> None:
    cache = small_cache()
    cache.release(5)
    cache.truncate(5, 0)
    assert cache.length(5) == 0
    cache.check()


def test_a_fork_shares_full_pages_and_owns_its_last_one() -> None:
    checked = CheckedCache(small_cache())
    checked.write(1, text(2 * PAGE + 3))
    checked.fork([Fork(1, 2, 2 * PAGE + 1), Fork(1, 3, 2 * PAGE), Fork(1, 4, 0)])
    first, second, third, empty = checked.cache.block_table([1, 2, 3, 4], 3).tolist()
    assert first[:2] == second[:2] == third[:2]
    assert first[2] != second[2]
    assert third[2] == 0
    assert empty == [0, 0, 0]
    assert checked.cache.num_used == 4
    checked.compare()


def test_forks_do_not_disturb_one_another_after_cuts_into_shared_pages() -> None:
    checked = CheckedCache(small_cache(prefix_caching=False))
    checked.write(1, text(3 * PAGE))
    checked.fork([Fork(1, 2, 3 * PAGE), Fork(1, 3, 3 * PAGE)])
    for seed, seq_id in enumerate((1, 2, 3), 1):
        checked.truncate(seq_id, PAGE + 2)
        checked.write(seq_id, text(PAGE, seed=seed))
        checked.compare()
    # The first page is one; the last holder of the truncated one needs no copy.
    assert checked.cache.num_used == 4 + 3


def test_a_fork_outlives_the_sequence_that_it_came_from() -> None:
    checked = CheckedCache(small_cache())
    checked.write(1, text(11))
    checked.fork([Fork(1, 2, 9)])
    checked.release(1)
    checked.write(3, text(40, seed=3))
    checked.compare()


def test_forks_are_made_all_or_none() -> None:
    checked = CheckedCache(small_cache(4))
    checked.write(1, text(2 * PAGE + 1))
    checked.fork([Fork(1, 2, PAGE + 1), Fork(1, 3, PAGE + 1)])
    assert checked.num_refused == 1
    assert list(checked.texts) == [1]
    checked.fork([Fork(1, 2, PAGE + 1), Fork(1, 3, PAGE)])
    assert list(checked.texts) == [1, 2, 3]
    checked.compare()


@pytest.mark.parametrize(
    "forks",
    [
        [Fork(1, 1, 2)],
        [Fork(1, 2, 9)],
        [Fork(9, 2, 1)],
        [Fork(1, 2, 3), Fork(1, 2, 3)],
        [Fork(1, 2, 3), Fork(2, 3, 3)],
    ],
)
def test_a_fork_onto_a_living_sequence_or_past_the_end_is_refused(forks: list[Fork]) -> None:
    cache = small_cache()
    cache.reserve(1, 6)
    cache.append(1, text(6))
    with pytest.raises(ValueError, match="fork"):
        cache.fork_many(forks)
    cache.check()
    assert cache.num_used == 2


def test_sequences_that_fit_by_their_lengths_alone_never_run_out_of_pages() -> None:
    """A copy on write must not need one more page than the scheduler counts by length."""
    checked = CheckedCache(small_cache(2))
    checked.write(1, text(2 * PAGE))
    checked.truncate(1, 2 * PAGE)  # both pages are registered now, and none is free
    checked.truncate(1, PAGE + 1)
    checked.write(1, text(3, seed=1))
    assert checked.num_refused == 0
    checked.compare()


def test_a_reservation_beyond_the_whole_cache_changes_nothing() -> None:
    cache = small_cache(3)
    cache.reserve(1, 5)
    with pytest.raises(OutOfPages, match="2 more pages are needed"):
        cache.reserve(1, 3 * PAGE + 1)
    with pytest.raises(OutOfPages, match="2 more pages are needed"):
        cache.reserve(2, PAGE + 1)
    assert cache.num_free == 1
    cache.check()


def test_a_known_prompt_is_attached_but_for_its_last_token() -> None:
    checked = CheckedCache(small_cache())
    checked.write(1, text(3 * PAGE))
    checked.truncate(1, 3 * PAGE)
    assert checked.write(2, text(3 * PAGE)) == 2 * PAGE
    assert checked.write(3, [*text(3 * PAGE), 7]) == 3 * PAGE
    assert checked.write(4, [*text(2 * PAGE), *text(PAGE, seed=1)]) == 2 * PAGE
    assert checked.write(5, [8, *text(3 * PAGE)]) == 0
    assert (
        checked.cache.prefix_queries == 3 * PAGE + 3 * PAGE + 3 * PAGE + 1 + 3 * PAGE + 3 * PAGE + 1
    )
    assert checked.cache.prefix_hits == 2 * PAGE + 3 * PAGE + 2 * PAGE
    checked.compare()


def test_a_prompt_in_chunks_is_attached_chunk_by_chunk() -> None:
    checked = CheckedCache(small_cache())
    checked.write(1, text(5 * PAGE))
    checked.truncate(1, 5 * PAGE)
    assert checked.write(2, text(5 * PAGE)[: 2 * PAGE + 1]) == 2 * PAGE
    checked.truncate(2, 2 * PAGE)
    assert checked.write(2, text(5 * PAGE)[2 * PAGE :]) == 2 * PAGE
    checked.compare()


def test_a_page_that_a_chunk_has_begun_is_replaced_by_the_cached_one() -> None:
    checked = CheckedCache(small_cache())
    checked.write(1, text(5 * PAGE))
    checked.truncate(1, 5 * PAGE)
    assert checked.write(2, text(5 * PAGE)[: 2 * PAGE + 1]) == 2 * PAGE
    assert checked.write(2, text(5 * PAGE)[2 * PAGE + 1 :]) == 2 * PAGE - 1
    assert checked.cache.num_used == 5 + 1, "the page that was begun is free again"
    checked.compare()


def test_the_same_tokens_behind_another_prefix_are_not_a_hit() -> None:
    checked = CheckedCache(small_cache())
    checked.write(1, text(PAGE) + text(PAGE, seed=1))
    checked.truncate(1, 2 * PAGE)
    assert checked.write(2, text(PAGE, seed=2) + text(PAGE, seed=1) + [5]) == 0
    assert checked.write(3, [*text(PAGE, seed=1), 5]) == 0


def test_draft_tokens_that_may_be_rejected_are_never_found_by_others() -> None:
    cache = small_cache()
    cache.reserve(1, 2 * PAGE)
    cache.append(1, text(2 * PAGE))
    assert cache.attach_prefix(2, [*text(2 * PAGE), 1]) == 0, (
        "nothing of it is known to be committed"
    )
    cache.truncate(1, PAGE + 1)
    assert cache.attach_prefix(3, [*text(2 * PAGE), 1]) == PAGE, (
        "only what lay below the truncation is committed"
    )


def test_nothing_is_attached_within_a_page_or_behind_room_that_is_not_filled() -> None:
    cache = small_cache()
    cache.reserve(1, 2 * PAGE)
    cache.append(1, text(2 * PAGE))
    cache.truncate(1, 2 * PAGE)
    for seq_id, reserved in ((2, 1), (3, PAGE)):
        cache.reserve(seq_id, reserved)
        cache.append(seq_id, text(2 * PAGE)[:1] if reserved == 1 else [])
        assert cache.attach_prefix(seq_id, text(2 * PAGE)) == 0
    cache.check()


def test_released_pages_stay_until_room_is_needed_and_the_oldest_go_first() -> None:
    checked = CheckedCache(small_cache(6))
    for seq_id in (1, 2):
        checked.write(seq_id, text(2 * PAGE, seed=seq_id))
        checked.truncate(seq_id, 2 * PAGE)
        checked.release(seq_id)
    assert checked.cache.num_free == 6
    # Two fresh pages and one of the oldest prefix, from its end.
    checked.write(3, text(3 * PAGE, seed=3))
    checked.release(3)
    assert checked.write(4, [*text(2 * PAGE, seed=2), 9]) == 2 * PAGE
    assert checked.write(5, [*text(2 * PAGE, seed=1), 9]) == PAGE
    checked.compare()


def test_a_page_is_found_under_the_salt_of_its_sequence_only() -> None:
    cache = small_cache()

    def write(seq_id: int, salt: bytes) -> int:
        cache.begin(seq_id, salt)
        found = cache.attach_prefix(seq_id, [*text(2 * PAGE), 1])
        cache.reserve(seq_id, 2 * PAGE + 1)
        cache.append(seq_id, [*text(2 * PAGE), 1][found:])
        cache.truncate(seq_id, 2 * PAGE)
        return found

    assert [write(1, b"a"), write(2, b"b"), write(3, b""), write(4, b"a")] == [0, 0, 0, 2 * PAGE]
    cache.fork(2, 5, PAGE)
    cache.fork(2, 6, 0)
    cache.check()


def test_without_prefix_caching_nothing_is_kept_or_counted() -> None:
    checked = CheckedCache(small_cache(prefix_caching=False))
    checked.write(1, text(2 * PAGE))
    checked.truncate(1, 2 * PAGE)
    assert checked.write(2, [*text(2 * PAGE), 1]) == 0
    assert checked.cache.prefix_queries == 0


def test_the_table_pads_with_page_zero_however_wide_it_is_asked() -> None:
    checked = CheckedCache(small_cache(64))
    for seq_id in range(40):  # more rows than the first table has
        checked.write(seq_id, text(1 + seq_id % 5, seed=seq_id))
    block_table = checked.cache.block_table([39, 0, 3], 50)
    assert block_table.shape == (3, 50)
    assert block_table.dtype == np.int64
    for row, seq_id in zip(block_table, [39, 0, 3], strict=True):
        length = checked.cache.length(seq_id)
        slots = (row[: -(-length // PAGE), None] * PAGE + np.arange(PAGE)).reshape(-1)[:length]
        assert slots.tolist() == checked.cache.slots(seq_id, 0, length).tolist()
        assert not row[-(-length // PAGE) :].any()
    checked.compare()


def test_check_notices_a_page_that_is_lost_or_held_twice() -> None:
    for row, index in ((1, 0), (0, 1)):
        cache = small_cache()
        for seq_id in (1, 2):
            cache.reserve(seq_id, 2 * PAGE)
        cache._block_table.pages[row, index] = 0
        with pytest.raises(AssertionError):
            cache.check()


def test_pools_have_the_shapes_that_attention_writes_to() -> None:
    cache = small_cache(6)
    assert [tuple(pool.shape) for pool in cache.keys] == [(6 * PAGE, 1, 2)] * LAYERS
    assert [tuple(pool.shape) for pool in cache.values] == [(6 * PAGE, 1, 3)] * LAYERS
    assert all(pool.is_contiguous() and not pool.any() for pool in [*cache.keys, *cache.values])


def test_pages_for_a_budget_really_take_that_much() -> None:
    options: dict[str, Any] = {
        "num_layers": 3,
        "kv_heads": 2,
        "head_dim": 8,
        "page_size": 16,
        "v_head_dim": 4,
    }
    page = page_bytes(dtype=torch.bfloat16, **options)
    num_pages = num_pages_for(100_000, page, page_size=16)
    cache = PagedCache(num_pages=num_pages, dtype=torch.bfloat16, device="cpu", **options)
    taken = sum(pool.numel() * pool.element_size() for pool in [*cache.keys, *cache.values])
    assert taken <= 100_000 < taken * (num_pages + 1) / num_pages
    with pytest.raises(TooLittleMemory, match="does not hold a single page"):
        num_pages_for(taken // num_pages - 1, page, page_size=16)


def test_a_decode_step_costs_microseconds() -> None:
    cache = small_cache(4096)
    cache.reserve(1, 100)
    cache.append(1, range(100))
    best, start = float("inf"), 100
    for _ in range(10):
        start_s = time.process_time()
        for _ in range(500):
            cache.truncate(1, start)
            cache.reserve(1, start + 6)
            cache.append(1, (1, 2, 3, 4, 5, 6))
            start += 3
        best = min(best, (time.process_time() - start_s) / 500)
    assert best < 50e-6  # about 3 us when nothing else runs
