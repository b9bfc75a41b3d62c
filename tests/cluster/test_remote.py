"""Target and drafter at the other end of links: one message each way a round, and what is known of a worker that does not answer."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specserve.cluster.remote import RemoteDrafter, RemoteTarget
from specserve.errors import Displaced, OutOfPages, WorkerLost
from specserve.types import (
    DraftStep,
    Foreseen,
    Policy,
    Proposal,
    SparseRows,
    Verdict,
    VerifyStep,
    Warp,
)
from specserve.wire.messages import Prepared, Proposals, Verdicts

POLICY = Policy(Warp(), "block", seed=1, prompt_length=2)
VERIFY = VerifyStep(3, 0, (1, 2), (), None, POLICY)
DRAFT = DraftStep(3, 0, (1, 2), 2, POLICY)


class Client:
    """Answers as it is told to; knows what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), []
        self.lost: Exception | None = None
        self.unasked: Any = None
        self.is_late = False

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


def attached(remote: Any, *clients: Client) -> Any:
    remote.attach(clients)
    return remote


def judged(*verdicts: Verdict) -> Verdicts:
    return Verdicts(1, verdicts, seconds=0.5, pages_used=7, prefix_queries=20, prefix_hits=16)


def test_all_ranks_get_the_message_and_the_first_has_the_verdicts() -> None:
    verdict = Verdict(3, 0, 9, None)
    first, second = Client(judged(verdict)), Client(judged())
    target = attached(RemoteTarget(deadline_s=5), first, second)
    assert asyncio.run(target.verify([VERIFY])) == (verdict,)
    assert first.asked == second.asked
    assert (target.busy_seconds, target.pages_used, target.prefix_queries, target.prefix_hits) == (
        0.5,
        7,
        20,
        16,
    )


def test_what_is_released_travels_once_with_the_next_round() -> None:
    client = Client(judged(), judged())

    async def rounds() -> None:
        target = attached(RemoteTarget(deadline_s=5), client)
        await target.release([4, 5])
        await target.release([6])
        await target.verify([])
        await target.verify([])

    asyncio.run(rounds())
    assert [message.released for message in client.asked] == [(4, 5, 6), ()]
    assert [message.number for message in client.asked] == [1, 2]


def test_a_rank_that_does_not_answer_is_lost_and_a_refusal_is_not() -> None:
    target, losses = (
        attached(RemoteTarget(deadline_s=5), Client(OutOfPages("no room"), WorkerLost("it hangs"))),
        [],
    )
    target.lose = losses.append
    with pytest.raises(OutOfPages):
        asyncio.run(target.verify([VERIFY]))
    assert losses == []
    with pytest.raises(WorkerLost):
        asyncio.run(target.verify([VERIFY]))
    assert losses == ["it hangs"]


def test_a_round_waits_for_ranks_that_come_back_and_reads_everything_anew() -> None:
    verdict = Verdict(3, 0, 9, None)
    fresh = Client(judged(verdict))

    async def main() -> None:
        target = attached(RemoteTarget(deadline_s=5), Client(judged(verdict)))
        assert await target.verify([VERIFY]) == (verdict,)
        target.detach()
        late, anew = (
            asyncio.ensure_future(target.verify([step]))
            for step in (replace(VERIFY, start=2), VERIFY)
        )
        await asyncio.sleep(0)
        assert not anew.done()
        target.attach([fresh])
        with pytest.raises(WorkerLost, match="between two rounds"):
            await late
        assert await anew == (verdict,)
        assert (target.prefix_queries, target.prefix_hits) == (40, 32), (
            "counters fell when the ranks were replaced"
        )

    asyncio.run(main())


def test_ranks_that_will_never_come_back_displace_every_round() -> None:
    async def main() -> None:
        target = attached(RemoteTarget(deadline_s=5), Client())
        target.detach()
        waiting = asyncio.ensure_future(target.verify([VERIFY]))
        await asyncio.sleep(0)
        target.give_up(Displaced("no card is left"))
        for call in (waiting, target.verify([VERIFY])):
            with pytest.raises(Displaced):
                await call

    asyncio.run(main())


def test_a_drafter_that_is_lost_or_away_has_no_proposals_and_holds_nothing() -> None:
    client, losses = Client(WorkerLost("it was killed")), []

    async def main() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), client)

        def lose(why: str) -> None:
            losses.append(why)
            drafter.detach()

        drafter.lose = lose
        for _ in range(3):
            assert await drafter.propose([DRAFT], math.inf) == [Proposal(3, 2, (), None, 0)]

    asyncio.run(main())
    assert losses == ["it was killed"]
    assert len(client.asked) == 1


def test_a_drafter_that_is_late_is_waited_for_once_and_asked_again_when_it_has_answered() -> None:
    proposal = Proposal(3, 2, (8, 9), None, 3)
    client, losses = (
        Client(WorkerLost("no answer within 0.1 s"), Proposals(2, (proposal,), 0.1, 2)),
        [],
    )

    async def main() -> None:
        drafter = attached(RemoteDrafter(deadline_s=0.05), client)
        drafter.lose = losses.append
        step = replace(DRAFT, start=1, tokens=(2,))
        asked = drafter.propose([step], math.inf)
        client.is_late = True
        assert await asked == [Proposal(3, 2, (), None, 1)], "what the step built on is held still"
        assert await drafter.propose([step], math.inf) == [Proposal(3, 2, (), None, 1)]
        assert len(client.asked) == 1
        client.is_late = False
        assert await drafter.propose([step], math.inf) == (proposal,)
        client.is_late = True
        await asyncio.sleep(0.1)

    asyncio.run(main())
    assert losses == ["no answer within 0.1 s"], "it never came back"


def test_proposals_come_back_as_they_were_sent() -> None:
    proposal = Proposal(3, 2, (8, 9), None, 3)
    client = Client(Proposals(1, (proposal,), seconds=0.25, pages_used=2))
    drafter = attached(RemoteDrafter(deadline_s=5), client)
    assert asyncio.run(drafter.propose([DRAFT], 0.5)) == (proposal,)
    assert (client.asked[0].deadline, drafter.busy_seconds, drafter.pages_used) == (0.5, 0.25, 2)


def test_an_answer_of_another_kind_is_no_answer() -> None:
    with pytest.raises(WorkerLost):
        asyncio.run(
            attached(RemoteTarget(deadline_s=5), Client(Proposals(1, (), 0.0, 0))).verify([VERIFY])
        )


class SlowClient(Client):
    """Answers when it is let."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(*answers)
        self.may = asyncio.Event()

    async def call(self, message: Any, timeout_s: float) -> Any:
        await self.may.wait()
        return await super().call(message, timeout_s)


def foreseen(*, tokens: tuple[int, ...] = (8, 9), token: int = 2, number: int = 1) -> Prepared:
    q = SparseRows(
        np.arange(2 * len(tokens)).reshape(-1, 2), np.full((len(tokens), 2), 0.5, np.float32)
    )
    return Prepared(number, (Foreseen(token, Proposal(3, 2, tokens, q, 3, anticipated=True)),))


def test_a_step_that_was_foreseen_is_answered_without_waiting_for_the_worker_which_hears_of_it_all_the_same() -> (
    None
):
    answer = Proposals(2, (Proposal(3, 2, (8, 9), None, 3),), seconds=0.1, pages_used=5)
    client = SlowClient(Proposals(1, (), 0.0, 0), answer, answer)

    async def rounds() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), client)
        client.may.set()
        await drafter.propose([], 1.0)
        client.may.clear()
        client.unasked(foreseen())
        (proposal,) = await asyncio.wait_for(_awaited(drafter.propose([DRAFT], 1.0)), 0.5)
        assert (proposal.tokens, proposal.anticipated) == ((8, 9), True)
        third = asyncio.ensure_future(_awaited(drafter.propose([DRAFT], 1.0)))
        await asyncio.sleep(0.01)
        assert not third.done(), "what was foreseen is for one round alone"
        client.may.set()
        assert await third == answer.proposals

    asyncio.run(rounds())
    assert [message.number for message in client.asked] == [1, 2, 3]
    assert client.asked[1].steps == (DRAFT,)


async def _awaited(call: Any) -> Any:
    return await call


@pytest.mark.parametrize(
    "message",
    [foreseen(tokens=(8,)), foreseen(token=7), foreseen(number=0)],
    ids=["prepared for a smaller gamma", "another token came", "of an earlier round"],
)
def test_what_does_not_fit_the_step_is_asked_for(message: Prepared) -> None:
    client = Client(
        Proposals(1, (), 0.0, 0), Proposals(2, (Proposal(3, 2, (5, 6), None, 3),), 0.0, 0)
    )

    async def rounds() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), client)
        await drafter.propose([], 1.0)
        client.unasked(message)
        (proposal,) = await drafter.propose([DRAFT], 1.0)
        assert proposal.tokens == (5, 6)

    asyncio.run(rounds())


def test_a_smaller_gamma_than_was_prepared_for_takes_the_beginning_of_the_proposal_and_of_its_q() -> (
    None
):
    client = Client(Proposals(1, (), 0.0, 0), Proposals(2, (), 0.0, 0))

    async def rounds() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), client)
        await drafter.propose([], 1.0)
        client.unasked(foreseen(tokens=(8, 9, 10)))
        (proposal,) = await drafter.propose([DraftStep(3, 0, (1, 2), 1, POLICY)], 1.0)
        assert (proposal.tokens, proposal.held, proposal.q.ids.shape) == ((8,), 2, (1, 2))

    asyncio.run(rounds())


def test_a_worker_that_is_lost_while_nobody_waits_for_it_is_known_to_be_lost_in_the_next_round() -> (
    None
):
    client = Client(Proposals(1, (), 0.0, 0), WorkerLost("gone"))

    async def rounds() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), client)
        drafter.lose = lambda why: drafter.detach()
        await drafter.propose([], 1.0)
        client.unasked(foreseen())
        (known,) = await drafter.propose([DRAFT], 1.0)
        assert known.tokens
        await asyncio.sleep(0.01)
        assert await drafter.propose([DRAFT], 1.0) == [Proposal(3, 2, (), None, 0)]

    asyncio.run(rounds())
