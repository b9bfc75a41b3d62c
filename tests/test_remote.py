"""Target and drafter at the other end of links: one message each way a round, and what is known of a worker that does not answer."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from specserve.cluster.remote import RemoteDrafter, RemoteTarget
from specserve.errors import OutOfPages, WorkerLost
from specserve.types import DraftStep, Policy, Proposal, Verdict, VerifyStep, Warp
from specserve.wire import Proposals, Verdicts

POLICY = Policy(Warp(), "block", seed=1, prompt_length=2)
VERIFY = VerifyStep(3, 0, (1, 2), (), None, POLICY)
DRAFT = DraftStep(3, 0, (1, 2), 2, POLICY)


class Client:
    """Answers as it is told to; knows what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), []
        self.lost: Exception | None = None

    async def call(self, message: Any, timeout_s: float) -> Any:
        if self.lost is not None:
            raise self.lost
        self.asked.append(message)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def fail(self, error: Exception) -> None:
        self.lost = error


def judged(*verdicts: Verdict) -> Verdicts:
    return Verdicts(1, verdicts, seconds=0.5, pages_used=7, prefix_queries=20, prefix_hits=16)


def test_all_ranks_get_the_message_and_the_first_has_the_verdicts() -> None:
    verdict = Verdict(3, 0, 9, None)
    first, second = Client(judged(verdict)), Client(judged())
    target = RemoteTarget([first, second], deadline_s=5)
    assert asyncio.run(target.verify([VERIFY])) == (verdict,)
    assert first.asked == second.asked
    assert (target.busy_seconds, target.pages_used, target.prefix_queries, target.prefix_hits) == (0.5, 7, 20, 16)


def test_what_is_released_travels_once_with_the_next_round() -> None:
    client = Client(judged(), judged())

    async def rounds() -> None:
        target = RemoteTarget([client], deadline_s=5)
        await target.release([4, 5])
        await target.release([6])
        await target.verify([])
        await target.verify([])

    asyncio.run(rounds())
    assert [message.released for message in client.asked] == [(4, 5, 6), ()]
    assert [message.number for message in client.asked] == [1, 2]


def test_a_rank_that_does_not_answer_is_remembered_and_a_refusal_is_not() -> None:
    target = RemoteTarget([Client(OutOfPages("no room"), WorkerLost("it hangs"))], deadline_s=5)
    with pytest.raises(OutOfPages):
        asyncio.run(target.verify([VERIFY]))
    assert target.lost is None
    with pytest.raises(WorkerLost):
        asyncio.run(target.verify([VERIFY]))
    assert target.lost == "it hangs"


def test_a_drafter_that_hangs_is_waited_for_once() -> None:
    client = Client(WorkerLost("no answer within 5 s"))
    drafter = RemoteDrafter(client, deadline_s=5)
    for _ in range(3):
        with pytest.raises(WorkerLost):
            asyncio.run(drafter.propose([DRAFT], math.inf))
    assert len(client.asked) == 1


def test_proposals_come_back_as_they_were_sent() -> None:
    proposal = Proposal(3, 2, (8, 9), None, 3)
    client = Client(Proposals(1, (proposal,), seconds=0.25, pages_used=2))
    drafter = RemoteDrafter(client, deadline_s=5)
    assert asyncio.run(drafter.propose([DRAFT], 0.5)) == (proposal,)
    assert (client.asked[0].deadline, drafter.busy_seconds, drafter.pages_used) == (0.5, 0.25, 2)


def test_an_answer_of_another_kind_is_no_answer() -> None:
    with pytest.raises(WorkerLost):
        asyncio.run(RemoteTarget([Client(Proposals(1, (), 0.0, 0))], deadline_s=5).verify([VERIFY]))
