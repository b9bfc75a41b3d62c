"""Fair shares of a full engine: who runs next, and who gives a place up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specserve.engine.budget import TokenBudget
from specserve.engine.scheduler import Scheduler
from specserve.engine.sequence import Sequence
from specserve.errors import Overloaded
from specserve.types import Chunk, FinishReason, Policy, Request, Warp
from tests.support.fakes import FakeTarget, model_info, open_coordinator, text

REQUEST = Request((1, 2, 3), 4, Warp(), seed=1)


class Shares:
    """A scheduler whose sequences run as long as the test wants them to."""

    def __init__(self, *, max_running: int = 2, num_pages: int = 1000) -> None:
        self.scheduler = Scheduler(
            model_info(num_pages=num_pages),
            max_running=max_running,
            max_queued=100,
            budget=TokenBudget(64),
            max_gamma=0,
        )
        self._num_queued = 0

    def queue(self, clients: str, *, length: int = 3, priority: int = 0) -> None:
        for client in clients:
            request = Request((1,) * length, 100, Warp(), seed=1, client=client, priority=priority)
            policy = Policy(Warp(), "block", 1, length)
            self.scheduler.queue(
                Sequence(
                    self._num_queued,
                    request,
                    policy,
                    context=10_000,
                    draft_limit=0,
                    end_ids=frozenset(),
                )
            )
            self._num_queued += 1

    def running(self) -> str:
        self.scheduler.select_running()
        return "".join(sequence.client for sequence in self.scheduler.running)

    def ids(self) -> list[int]:
        """Return the running sequences."""
        self.scheduler.select_running()
        return [sequence.seq_id for sequence in self.scheduler.running]

    def end(self, client: str) -> None:
        """End the oldest running sequence of a client."""
        running = self.scheduler.running
        next(one for one in running if one.client == client).finish = FinishReason.STOP
        self.scheduler.remove_finished()


def test_a_client_with_one_request_does_not_wait_behind_the_many_of_another() -> None:
    engine = Shares()
    engine.queue("aaaaaa")
    assert engine.running() == "aa"
    engine.queue("b")
    engine.end("a")
    assert engine.running() == "ab"


def test_places_go_to_the_client_with_the_fewest_until_all_have_the_same() -> None:
    engine = Shares(max_running=6)
    engine.queue("aaaaaaaaaabbbbbbc")
    assert sorted(engine.running()) == list("aaabbc")
    engine.end("c")
    assert sorted(engine.running()) == list("aaabbb"), "nothing is kept free for a share"
    engine.queue("c")
    engine.end("b")
    assert sorted(engine.running()) == list("aaabbc")


def test_one_client_s_requests_run_in_order_of_arrival() -> None:
    engine = Shares(max_running=3)
    engine.queue("aaaaa")
    engine.running()
    assert [sequence.seq_id for sequence in engine.scheduler.running] == [0, 1, 2]
    assert [sequence.seq_id for sequence in engine.scheduler.waiting] == [3, 4]


def test_a_lower_priority_number_runs_first_and_equal_ones_in_order_of_arrival() -> None:
    engine = Shares(max_running=1)
    order = []
    for priority in (0, 1, -1, 1, -1, 0):
        engine.queue("a", priority=priority)
    while engine.scheduler.num_sequences:
        order += engine.ids()
        engine.end("a")
    assert order == [2, 4, 0, 5, 1, 3]


def test_a_priority_takes_nothing_from_the_share_of_another_client() -> None:
    engine = Shares(max_running=2)
    engine.queue("aaa", priority=-5)
    engine.queue("b", priority=5)
    assert sorted(engine.running()) == ["a", "b"]
    engine.queue("b")
    engine.end("b")
    assert engine.ids() == [0, 4], "the client with fewer is next, whatever the priorities"


def test_the_highest_priority_number_of_a_client_is_preempted_and_comes_back_first() -> None:
    engine = Shares(max_running=3, num_pages=20)
    engine.queue("a", length=14, priority=3)
    engine.queue("aa", length=14)
    assert engine.ids() == [1, 2, 0]
    engine.scheduler.running[0].committed += [1] * 36
    engine.queue("a", length=2, priority=-1)
    assert engine.ids() == [1, 2], "its pages are taken, and wait for its return"
    engine.scheduler.running[0].committed += [1] * 16
    assert engine.ids() == [1]
    assert [sequence.seq_id for sequence in engine.scheduler.waiting] == [2, 0, 3]
    engine.end("a")
    assert engine.ids() == [2, 0, 3]


def test_preemption_takes_the_pages_of_the_youngest_client_whatever_its_priority() -> None:
    engine = Shares(max_running=2, num_pages=10)
    engine.queue("a", length=14, priority=9)
    engine.queue("b", length=14, priority=-9)
    assert engine.ids() == [0, 1]
    engine.scheduler.running[0].committed += [1] * 14
    assert engine.ids() == [0]


def test_a_preempted_sequence_runs_again_before_a_new_one_of_any_client() -> None:
    """Some sequence would otherwise be preempted again and again, and never end."""
    engine = Shares(max_running=2, num_pages=10)
    engine.queue("aa", length=14)
    assert engine.running() == "aa"
    first, second = engine.scheduler.running
    first.committed += [1] * 14
    engine.queue("b", length=2)
    assert engine.running() == "a", "the second one's pages are taken, and wait for their return"
    assert next(iter(engine.scheduler.waiting)) is second
    first.finish = FinishReason.STOP
    engine.scheduler.remove_finished()
    assert engine.running() == "ab"
    assert engine.scheduler.running[0] is second


def test_decoding_in_turns_reaches_everyone_also_when_a_later_arrival_runs_first() -> None:
    engine = Shares(max_running=4)
    engine.queue("aaab")
    assert engine.running() == "abaa"
    for sequence in engine.scheduler.running:
        sequence.target_cached = sequence.length - 1
    pairs = [(sequence, 0) for sequence in engine.scheduler.running]
    turns = [engine.scheduler._take_turns(pairs, 2) for _ in range(4)]
    seen = [sequence.seq_id for turn in turns for sequence, _ in turn]
    assert {seq_id: seen.count(seq_id) for seq_id in range(4)} == dict.fromkeys(range(4), 2)


@pytest.mark.parametrize(
    ("queued", "asks", "displaced"),
    [
        ("aaaa", "b", 3),
        ("abab", "b", None),
        ("aaab", "b", 2),
        ("aab", "b", None),  # an exchange would only turn the inequality round
        ("aaaab", "b", 3),
        ("aaaab", "a", None),
        ("aabbb", "c", 4),
        ("aa", "b", None),  # both run already
    ],
)
def test_a_place_is_taken_from_the_newest_of_the_client_that_has_most(
    queued: str, asks: str, displaced: int | None
) -> None:
    engine = Shares(max_running=2)
    engine.queue(queued)
    engine.running()
    found = engine.scheduler.displace_for(asks)
    assert (None if found is None else found.seq_id) == displaced
    assert found not in list(engine.scheduler.waiting)


def test_a_full_engine_serves_a_second_client_and_texts_stay_the_same() -> None:
    displaced: list[int] = []
    emitted: list[Chunk] = []
    coordinator = open_coordinator(
        FakeTarget(info := model_info()),
        None,
        info=info,
        emit=emitted.extend,
        max_running=1,
        max_queued=2,
        max_gamma=0,
        on_displaced=displaced.append,
    )

    async def main() -> None:
        greedy = [coordinator.submit(replace(REQUEST, client="greedy")) for _ in range(3)]
        with pytest.raises(Overloaded):
            coordinator.submit(replace(REQUEST, client="greedy"))
        await coordinator.round()
        modest = coordinator.submit(replace(REQUEST, client="modest"))
        assert displaced == [greedy[2]]
        with pytest.raises(Overloaded):
            coordinator.submit(replace(REQUEST, client="modest"))
        while coordinator.has_work:
            await coordinator.round()
        ends = [chunk.seq_id for chunk in emitted if chunk.finish]
        assert ends == [greedy[0], greedy[1], modest] or ends == [greedy[0], modest, greedy[1]]
        for seq_id in ends:
            tokens = [t for chunk in emitted if chunk.seq_id == seq_id for t in chunk.tokens]
            assert tuple(tokens) == text(REQUEST.prompt, 4)
        assert not any(chunk.seq_id == greedy[2] for chunk in emitted)

    asyncio.run(main())


def test_without_a_way_to_answer_it_no_request_is_displaced() -> None:
    info = model_info()
    coordinator = open_coordinator(
        FakeTarget(info), None, info=info, emit=lambda _: None, max_running=1, max_queued=2
    )
    for _ in range(3):
        coordinator.submit(replace(REQUEST, client="greedy"))
    with pytest.raises(Overloaded):
        coordinator.submit(replace(REQUEST, client="modest"))
