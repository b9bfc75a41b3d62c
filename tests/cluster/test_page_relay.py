"""Pages go to the ranks in parts, as many in a message as its round may wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from specserve.cluster import page_relay
from specserve.cluster.import_budget import FIRST_BYTES
from specserve.cluster.page_relay import PageRelay, PendingTransfer
from specserve.errors import WorkerLost
from specserve.page_transfers import HASH_BYTES, PageAnswer, PageData, PageQuery

PAGE_BYTES = FIRST_BYTES // 2
"""So large that the first import has two pages."""
NUM_PAGES = 7
HASHES = tuple(bytes([number]) * HASH_BYTES for number in range(NUM_PAGES))
PATIENCE_S = 60.0


def pages_of(rank: int) -> PageData:
    return PageData(HASHES, b"".join(bytes([rank, page]) * (PAGE_BYTES // 2) for page in range(7)))


def put(relay: PageRelay, num_ranks: int = 1, timeout_s: float = PATIENCE_S) -> asyncio.Task[int]:
    pages = [pages_of(rank) for rank in range(num_ranks)]
    return asyncio.create_task(relay.put(pages, timeout_s=timeout_s))


def answer(taken: list[PendingTransfer], num_ranks: int = 1, room: int = NUM_PAGES) -> None:
    for transfer in taken:
        found = PageAnswer(min(room, transfer.num_hashes))
        transfer.resolve((found,) * num_ranks)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, PATIENCE_S))


def test_a_round_without_sequences_takes_all_and_one_with_them_the_budget() -> None:
    async def main() -> None:
        relay = PageRelay()
        putting = put(relay)
        await asyncio.sleep(0)
        first = relay.take(delays_sequences=True)
        assert [each.num_bytes for each in first] == [FIRST_BYTES]
        rest = relay.take(delays_sequences=False)
        assert sum(each.num_bytes for each in rest) == (NUM_PAGES - 2) * PAGE_BYTES
        answer([*first, *rest])
        assert await putting == NUM_PAGES

    run(main())


def test_measured_rounds_take_more_and_a_slow_one_less() -> None:
    async def main() -> None:
        relay, sizes = PageRelay(), []
        for overhead_s in (0.0, 0.0, 100.0, 100.0):
            putting = put(relay)
            await asyncio.sleep(0)
            taken = relay.take(delays_sequences=True)
            sizes.append(sum(each.num_bytes for each in taken) // PAGE_BYTES)
            relay.observe(taken, pass_s=0.01, overhead_s=overhead_s)
            putting.cancel()
            await asyncio.gather(putting, return_exceptions=True)
            relay.take(delays_sequences=False)
        assert sizes == [2, 4, 7, 1]

    run(main())


def test_a_message_has_a_bound_whatever_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_relay, "MAX_MESSAGE_BYTES", 3 * PAGE_BYTES)

    async def main() -> None:
        relay, rounds = PageRelay(), list[int]()
        relay.on_waiting = lambda: rounds.append(1)
        putting = put(relay)
        await asyncio.sleep(0)
        rounds.clear()
        taken = relay.take(delays_sequences=False)
        assert sum(each.num_bytes for each in taken) <= 3 * PAGE_BYTES
        assert rounds, "the rest waits for a round"
        while taken:
            answer(taken)
            taken = relay.take(delays_sequences=False)
        assert await putting == NUM_PAGES

    run(main())


def test_each_rank_gets_its_own_pages_in_their_order() -> None:
    async def main() -> None:
        relay, sent, hashes = PageRelay(), [b"", b""], list[bytes]()
        putting = put(relay, num_ranks=2)
        await asyncio.sleep(0)
        while taken := relay.take(delays_sequences=True):
            for transfer in taken:
                for rank in range(2):
                    part = transfer.of_rank(rank)
                    assert isinstance(part, PageData)
                    sent[rank] += part.data
                hashes += part.hashes
            answer(taken, num_ranks=2)
        assert await putting == NUM_PAGES
        assert tuple(hashes) == HASHES
        assert sent == [pages_of(rank).data for rank in range(2)]

    run(main())


def test_after_a_part_without_room_no_further_one_is_sent() -> None:
    async def main() -> None:
        relay = PageRelay()
        putting = put(relay)
        await asyncio.sleep(0)
        answer(relay.take(delays_sequences=True))
        answer(relay.take(delays_sequences=True), room=1)
        assert await putting == 3
        assert relay.take(delays_sequences=True) == []

    run(main())


def test_a_lost_round_fails_the_pages_and_leaves_none_behind() -> None:
    async def main() -> None:
        relay = PageRelay()
        putting = put(relay)
        await asyncio.sleep(0)
        for transfer in relay.take(delays_sequences=False):
            transfer.fail(WorkerLost("gone"))
        with pytest.raises(WorkerLost, match="gone"):
            await putting
        assert relay.take(delays_sequences=False) == []

    run(main())


def test_a_part_that_is_not_answered_is_given_up_with_those_behind_it() -> None:
    async def main() -> None:
        relay = PageRelay()
        putting = put(relay, timeout_s=0.01)
        with pytest.raises(TimeoutError):
            await putting
        assert relay.take(delays_sequences=False) == []

    run(main())


def test_a_question_waits_for_no_budget() -> None:
    async def main() -> None:
        relay = PageRelay()
        asking = asyncio.create_task(relay.ask(PageQuery(HASHES)))
        await asyncio.sleep(0)
        (taken,) = relay.take(delays_sequences=True)
        taken.resolve((PageAnswer(2),))
        assert (await asking)[0].num_pages == 2

    run(main())
