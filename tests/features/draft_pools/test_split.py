"""An engine that drafts on several devices: which sequence goes where, what a loss costs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.cluster.engine.running_engine import RunningEngine
from specserve.cluster.gateway.prefix_affinity import REQUEST_COST
from specserve.errors import OutOfPages
from specserve.features.draft_pools.split import MAX_EXPECTED, SplitDrafter
from specserve.types import DraftStep, Policy, Proposal, Request, Warp

PREFIX = 4 * REQUEST_COST
"""Tokens of a prefix that take longer to read than a few texts take to draft."""


def begin(
    seq_id: int, tokens: Sequence[int], *, salt: bytes = b"", first: int | None = None
) -> DraftStep:
    """Return the first step of a sequence, with the first tokens of its prompt or all of them."""
    policy = Policy(Warp(), "block", 0, 0, cache_salt=salt)
    return DraftStep(seq_id, 0, tuple(tokens)[:first], 2, policy)


def request(tokens: Sequence[int]) -> Request:
    return Request(tuple(tokens), 8, Warp(), seed=0)


def continued(step: DraftStep) -> DraftStep:
    return DraftStep(step.seq_id, step.stop, (7,), 2, step.policy)


def prompt(number: int, *ending: int) -> list[int]:
    """Return a prompt that begins with a prefix of this number."""
    return [*range(number * PREFIX, (number + 1) * PREFIX), *ending]


class FakeDevice:
    """A device that answers in the event loop's next turn."""

    def __init__(self) -> None:
        self.is_away = False
        self.error: Exception | None = None
        self.rounds: list[list[int]] = []
        self.released: list[int] = []

    @property
    def last(self) -> list[int]:
        """Sequences of the last round; none before any."""
        return self.rounds[-1] if self.rounds else []

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[list[Proposal]]:
        self.rounds.append([step.seq_id for step in steps])
        return self._answer(steps)

    async def _answer(self, steps: Sequence[DraftStep]) -> list[Proposal]:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return [Proposal(step.seq_id, step.stop, (step.seq_id,), None, 0) for step in steps]

    async def release(self, seq_ids: Sequence[int]) -> None:
        self.released += seq_ids


def proposed(drafter: SplitDrafter, steps: Sequence[DraftStep]) -> list[int]:
    async def ask() -> list[int]:
        return [each.seq_id for each in await drafter.propose(steps, 1.0)]

    return asyncio.run(ask())


class Split:
    """A drafter over two devices, and where each of its sequences is drafted."""

    def __init__(self) -> None:
        self.devices = [FakeDevice(), FakeDevice()]
        self.drafter = SplitDrafter(self.devices)

    def device_of(self, step: DraftStep) -> int:
        """Return the device that drafts for a step."""
        proposed(self.drafter, [step])
        (number,) = [i for i, each in enumerate(self.devices) if step.seq_id in each.last]
        for device in self.devices:
            device.rounds.clear()
        return number

    def release(self, *seq_ids: int) -> None:
        asyncio.run(self.drafter.release(seq_ids))


def test_a_prefix_is_read_where_it_is_cached_and_others_go_to_the_shorter_queue() -> None:
    split = Split()
    here = split.device_of(begin(0, prompt(0)))
    assert split.device_of(begin(1, prompt(1))) == 1 - here
    assert split.device_of(begin(2, prompt(0, 5))) == here, "where the prefix is"
    assert split.device_of(begin(3, prompt(2))) == 1 - here, "the shorter queue"
    assert split.device_of(begin(4, prompt(0), salt=b"a")) in (0, 1), "another prefix"
    split.release(0, 1, 2, 3, 4)
    assert split.device_of(begin(5, prompt(0))) == here, "it is still cached"


def test_a_queue_that_is_shorter_by_more_than_a_prefix_saves_wins() -> None:
    split = Split()
    shared = prompt(0, 5)
    devices = [split.device_of(begin(seq_id, shared)) for seq_id in range(12)]
    here = devices[0]
    first = devices.index(1 - here)
    assert first > PREFIX // REQUEST_COST, "as many as take as long as reading it"
    assert devices.count(here) - devices.count(1 - here) <= first, "now both have it"


def test_a_prompt_that_is_read_in_pieces_goes_where_its_whole_prefix_is() -> None:
    """Check with prompts of one beginning, as agents send: the first piece says too little."""
    split = Split()
    begun = [split.device_of(begin(seq_id, prompt(0))) for seq_id in range(16)]
    split.release(*range(16))
    assert sorted(set(begun)) == [0, 1], "both devices have the beginning"
    turns = {}
    for seq_id in range(16, 24):
        text = prompt(0, *prompt(seq_id))
        split.drafter.expect(seq_id, request(text))
        turns[seq_id] = split.device_of(begin(seq_id, text, first=100))
    split.release(*turns)
    assert sorted(set(turns.values())) == [0, 1]
    for seq_id, device in turns.items():
        text = prompt(0, *prompt(seq_id), 5, 6)
        split.drafter.expect(100 + seq_id, request(text))
        assert split.device_of(begin(100 + seq_id, text, first=100)) == device
        split.release(100 + seq_id)


def test_prompts_of_requests_that_never_begin_are_not_kept_for_ever() -> None:
    split = Split()
    for seq_id in range(MAX_EXPECTED + 10):
        split.drafter.expect(seq_id, request([seq_id]))
    split.release(MAX_EXPECTED)
    assert len(split.drafter._prompts) == MAX_EXPECTED - 1


def test_all_devices_draft_at_once_and_their_proposals_come_in_the_order_of_the_steps() -> None:
    devices = [FakeDevice(), FakeDevice()]
    drafter = SplitDrafter(devices)
    steps = [begin(seq_id, [seq_id]) for seq_id in range(4)]
    assert proposed(drafter, steps) == [0, 1, 2, 3]
    shares = [each.last for each in devices]
    assert sorted(map(len, shares)) == [2, 2]
    assert proposed(drafter, [continued(step) for step in reversed(steps)]) == [3, 2, 1, 0]
    assert [each.last for each in devices] == [share[::-1] for share in shares], "they stay"
    assert proposed(drafter, [continued(steps[1])]) == [1]
    assert sorted(len(each.rounds) for each in devices) == [2, 3], "no message without steps"
    assert proposed(drafter, []) == []
    assert [each.rounds[-1] for each in devices] == [[], []], "but to send what is held"


def test_sequences_are_released_where_they_were_drafted_for() -> None:
    devices = [FakeDevice(), FakeDevice()]
    drafter = SplitDrafter(devices)
    proposed(drafter, [begin(seq_id, [seq_id]) for seq_id in range(4)])
    shares = [each.last for each in devices]
    asyncio.run(drafter.release([3, 2, 0, 99]))
    for device, share in zip(devices, shares, strict=True):
        assert device.released == [seq_id for seq_id in (3, 2, 0) if seq_id in share]


def test_sequences_of_a_lost_device_move_once_they_begin_again() -> None:
    devices = [FakeDevice(), FakeDevice()]
    drafter = SplitDrafter(devices)
    step = begin(0, [1])
    proposed(drafter, [step])
    lost, other = sorted(devices, key=lambda each: not each.rounds)
    lost.is_away = True
    proposed(drafter, [continued(step)])
    assert (lost.last, len(lost.rounds)) == ([0], 2), "it says that it has nothing cached"
    proposed(drafter, [begin(0, [1, 7])])
    assert other.last == [0]
    lost.is_away = False
    proposed(drafter, [begin(0, [1, 7])])
    assert (len(lost.rounds), len(other.rounds)) == (2, 2), "it stays where it is"
    for device in devices:
        device.is_away = True
    assert proposed(drafter, [begin(5, [3])]) == [5], "one of them answers without drafts"


def test_a_device_that_fails_a_round_fails_it_once_all_have_ended() -> None:
    devices = [FakeDevice(), FakeDevice()]
    drafter = SplitDrafter(devices)
    devices[0].error = OutOfPages("no room")
    with pytest.raises(OutOfPages):
        proposed(drafter, [begin(0, [1]), begin(1, [2])])
    devices[0].error = None
    assert proposed(drafter, [begin(0, [1]), begin(1, [2])]) == [0, 1]


def test_an_engine_says_what_the_prompts_of_new_requests_are() -> None:
    expected: list[tuple[int, Request]] = []
    engine: Any = SimpleNamespace(
        coordinator=SimpleNamespace(
            submit=lambda new: 7, scheduler=SimpleNamespace(num_sequences=1)
        ),
        group=SimpleNamespace(expect=lambda *new: expected.append(new)),
        records=SimpleNamespace(begin=lambda *new, load: None),
    )
    assert RunningEngine.submit(engine, request([1, 2])) == 7
    assert expected == [(7, request([1, 2]))]
