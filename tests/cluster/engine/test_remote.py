"""Target and drafter over links: one message each way per round, and workers that do not answer."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specserve.cluster.engine.pass_watch import DraftWatch
from specserve.cluster.engine.remote import PushedProposals, RemoteDrafter, RemoteTarget
from specserve.engine.stragglers import MIN_PASSES, NUM_RECENT
from specserve.errors import Displaced, OutOfPages, TargetReplaced, WorkerLost
from specserve.types import (
    DraftStep,
    Policy,
    PreparedProposal,
    Proposal,
    SparseDistribution,
    Verdict,
    VerifyStep,
    Warp,
)
from specserve.wire.messages import PreparedProposals, Proposals, Verdicts

POLICY = Policy(Warp(), "block", seed=1, prompt_length=2)
VERIFY = VerifyStep(3, 0, (1, 2), (), None, POLICY)
DRAFT = DraftStep(3, 0, (1, 2), 2, POLICY)


class Client:
    """Client with prepared answers, which records the messages that it received."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.lost: Exception | None = None
        self.on_prepared: Any = None
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


class SlowClient(Client):
    """Client that answers once its gate is open."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(*answers)
        self.gate = asyncio.Event()

    async def call(self, message: Any, timeout_s: float) -> Any:
        await self.gate.wait()
        return await super().call(message, timeout_s)


def attached(remote: Any, *clients: Client) -> Any:
    remote.attach(clients)
    return remote


def verdicts_of(*verdicts: Verdict) -> Verdicts:
    return Verdicts(1, verdicts, seconds=0.5, pages_used=7, prefix_queries=20, prefix_hits=16)


def test_all_ranks_get_the_message_and_the_first_has_the_verdicts() -> None:
    verdict = Verdict(3, 0, 9, None)
    first, second = Client(verdicts_of(verdict)), Client(verdicts_of())
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
    client = Client(verdicts_of(), verdicts_of())

    async def rounds() -> None:
        target = attached(RemoteTarget(deadline_s=5), client)
        await target.release([4, 5])
        await target.release([6])
        await target.verify([])
        await target.verify([])

    asyncio.run(rounds())
    assert [message.released for message in client.asked] == [(4, 5, 6), ()]
    assert [message.number for message in client.asked] == [1, 2]


def test_a_rank_that_does_not_answer_is_lost_and_one_that_raises_is_not() -> None:
    client = Client(OutOfPages("no room"), WorkerLost("it hangs"))
    target = attached(RemoteTarget(deadline_s=5), client)
    losses: list[str] = []
    target.on_lost = losses.append
    with pytest.raises(OutOfPages):
        asyncio.run(target.verify([VERIFY]))
    assert losses == []
    with pytest.raises(WorkerLost):
        asyncio.run(target.verify([VERIFY]))
    assert losses == ["it hangs"]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    "answer",
    [
        OutOfPages("no room"),
        WorkerLost("the worker failed: KeyError: 3"),
        TypeError("cannot be packed"),
        Proposals(1, (), 0.0, 0),
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_whatever_one_rank_answers_the_whole_group_is_lost_at_once_and_the_next_one_serves(
    failing: int, answer: Any
) -> None:
    """The other rank waits in a collective for the one that failed, and never answers."""
    verdict = Verdict(3, 0, 9, None)
    replacement = [Client(verdicts_of(verdict)), Client(verdicts_of())]
    ranks: list[Client] = [SlowClient(verdicts_of()), SlowClient(verdicts_of())]
    ranks[failing] = Client(answer)
    losses: list[str] = []

    async def main() -> None:
        target = attached(RemoteTarget(deadline_s=5), *ranks)
        target.on_lost = losses.append
        with pytest.raises(WorkerLost, match=f"rank {failing} of 2"):
            await asyncio.wait_for(target.verify([VERIFY]), 60)
        waiting = asyncio.ensure_future(target.verify([VERIFY]))
        await asyncio.sleep(0)
        assert not waiting.done(), "a round was sent to a group that is not in one state"
        target.attach(replacement)
        assert await waiting == (verdict,)

    asyncio.run(main())
    assert len(losses) == 1


def test_a_late_failure_of_earlier_ranks_does_not_cost_the_present_ones() -> None:
    verdict = Verdict(3, 0, 9, None)
    old = SlowClient(WorkerLost("killed")), SlowClient(WorkerLost("killed"))
    losses: list[str] = []

    async def main() -> None:
        target = attached(RemoteTarget(deadline_s=5), *old)
        target.on_lost = losses.append
        round_ = asyncio.ensure_future(target.verify([VERIFY]))
        await asyncio.sleep(0)
        target.detach()
        target.attach([Client(verdicts_of(verdict))])
        old[0].gate.set()
        with pytest.raises(WorkerLost):
            await round_
        assert await target.verify([VERIFY]) == (verdict,)

    asyncio.run(main())
    assert losses == []


def test_ranks_replaced_between_two_rounds_are_not_sent_steps_that_build_on_the_old_ones() -> None:
    verdict = Verdict(3, 0, 9, None)
    replacement = Client(verdicts_of(verdict))

    async def main() -> None:
        target = attached(RemoteTarget(deadline_s=5), Client(verdicts_of(verdict)))
        await target.verify([VERIFY])
        target.detach()
        target.attach([replacement])
        with pytest.raises(TargetReplaced, match="between two rounds"):
            await target.verify([replace(VERIFY, start=2)])
        assert replacement.asked == []
        assert await target.verify([VERIFY]) == (verdict,)

    asyncio.run(main())


def test_a_round_waits_for_new_ranks_and_verifies_only_steps_from_the_start() -> None:
    verdict = Verdict(3, 0, 9, None)
    replacement = Client(verdicts_of(verdict))

    async def main() -> None:
        target = attached(RemoteTarget(deadline_s=5), Client(verdicts_of(verdict)))
        assert await target.verify([VERIFY]) == (verdict,)
        target.detach()
        late, complete = (
            asyncio.ensure_future(target.verify([step]))
            for step in (replace(VERIFY, start=2), VERIFY)
        )
        await asyncio.sleep(0)
        assert not complete.done()
        target.attach([replacement])
        with pytest.raises(WorkerLost, match="between two rounds"):
            await late
        assert await complete == (verdict,)
        assert (target.prefix_queries, target.prefix_hits) == (40, 32), (
            "counters fell when the ranks were replaced"
        )

    asyncio.run(main())


def test_every_round_fails_once_the_ranks_are_given_up() -> None:
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


def test_a_drafter_that_is_lost_or_away_has_no_proposals_and_no_cache() -> None:
    client = Client(WorkerLost("it was killed"))
    losses: list[str] = []

    async def main() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), client)

        def on_lost(why: str) -> None:
            losses.append(why)
            drafter.detach()

        drafter.on_lost = on_lost
        for _ in range(3):
            assert await drafter.propose([DRAFT], math.inf) == [Proposal(3, 2, (), None, 0)]

    asyncio.run(main())
    assert losses == ["it was killed"]
    assert len(client.asked) == 1


def test_a_drafter_that_is_late_is_waited_for_once_and_asked_again_when_it_has_answered() -> None:
    proposal = Proposal(3, 2, (8, 9), None, 3)
    client = Client(
        Proposals(1, (proposal,), 0.1, 2),
        WorkerLost("no answer within 0.1 s"),
        Proposals(4, (proposal,), 0.1, 2),
    )
    losses: list[str] = []

    async def main() -> None:
        drafter = attached(RemoteDrafter(deadline_s=0.05), client)
        drafter.on_lost = losses.append
        await drafter.propose([DRAFT], math.inf)
        step = replace(DRAFT, start=1, tokens=(2,))
        asked = drafter.propose([step], math.inf)
        client.is_late = True
        assert await asked == [Proposal(3, 2, (), None, 1)], (
            "the cache that the step builds on is kept"
        )
        assert await drafter.propose([step], math.inf) == [Proposal(3, 2, (), None, 1)]
        assert len(client.asked) == 2
        client.is_late = False
        assert await drafter.propose([step], math.inf) == (proposal,)
        client.is_late = True
        await asyncio.sleep(0.1)
        assert losses == [], "it had answered in time, and was late again only now"
        client.is_late = False
        client.answers.append(WorkerLost("no answer within 0.1 s"))
        asked = drafter.propose([step], math.inf)
        client.is_late = True
        await asked
        while not losses:
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert losses == ["no answer within 0.1 s"], "it never came back"


def test_a_drafter_that_has_become_slow_is_lost_past_the_limit_and_its_last_answer_is_used() -> (
    None
):
    now, proposal = [0.0], Proposal(3, 2, (4, 5), None, 3)
    quick, slow = (Proposals(1, (proposal,), seconds, 2) for seconds in (0.01, 1.0))
    client = Client(*[quick] * MIN_PASSES, *[slow] * (NUM_RECENT + 1))
    watch = DraftWatch(max_slow_s=60.0, clock=lambda: now[0])
    losses: list[str] = []

    async def main() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5, watch=watch), client)
        drafter.on_lost = losses.append
        for _ in range(MIN_PASSES + NUM_RECENT):
            await drafter.propose([DRAFT], 1.0)
        assert losses == []
        now[0] = 61.0
        assert await drafter.propose([DRAFT], 1.0) == (proposal,)
        assert await drafter.propose([DRAFT], 1.0) == [Proposal(3, 2, (), None, 0)]

    asyncio.run(main())
    assert len(losses) == 1
    assert "times as long as usual" in losses[0]


def test_a_drafter_that_was_replaced_is_not_sent_steps_that_build_on_the_old_one() -> None:
    """A step after the end of its cache would make it fail and be replaced once more."""
    proposal = Proposal(3, 2, (8, 9), None, 3)
    replacement = Client(Proposals(2, (proposal,), 0.1, 2))

    async def main() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), Client(Proposals(1, (proposal,), 0.1, 2)))
        await drafter.propose([DRAFT], math.inf)
        drafter.detach()
        drafter.attach([replacement])
        step = replace(DRAFT, start=1, tokens=(2,))
        assert await drafter.propose([step], math.inf) == [Proposal(3, 2, (), None, 0)]
        assert replacement.asked == []
        assert await drafter.propose([DRAFT], math.inf) == (proposal,)

    asyncio.run(main())


def test_a_drafter_that_answers_with_another_type_is_lost() -> None:
    client = Client(verdicts_of())
    losses: list[str] = []

    async def main() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), client)
        drafter.on_lost = losses.append
        for _ in range(2):
            assert await drafter.propose([DRAFT], math.inf) == [Proposal(3, 2, (), None, 0)]

    asyncio.run(main())
    assert losses == ["the drafter answered a round with Verdicts"]


def test_what_is_released_reaches_a_drafter_even_if_the_next_round_does_not_ask_it() -> None:
    """Pages of ended sequences that it keeps would fill its cache up."""
    client = Client(Proposals(1, (), 0.0, 0), OutOfPages("no room"), Proposals(3, (), 0.0, 0))

    async def main() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), client)
        await drafter.propose([], 1.0)
        client.on_prepared(prepared_message())
        await drafter.propose([DRAFT], 1.0)  # prepared; the answer to come is an error
        await asyncio.sleep(0)
        await drafter.release([7])
        with pytest.raises(OutOfPages):
            await drafter.propose([DRAFT], 1.0)
        await drafter.propose([DRAFT], 1.0)

    asyncio.run(main())
    assert [message.released for message in client.asked] == [(), (), (7,)]


def test_what_a_late_drafter_prepares_is_not_used() -> None:
    """Proposals of a late round continue drafts that the round went on without."""
    client = Client(WorkerLost("no answer in time"), Proposals(3, (), 0.0, 0))

    async def main() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), client)
        asked = drafter.propose([DRAFT], 1.0)
        client.is_late = True
        await asked
        client.is_late = False
        client.on_prepared(prepared_message(number=1))
        assert await drafter.propose([DRAFT], 1.0) == ()

    asyncio.run(main())


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


def prepared_message(
    *, tokens: tuple[int, ...] = (8, 9), token: int = 2, number: int = 1
) -> PreparedProposals:
    q = SparseDistribution(
        np.arange(2 * len(tokens)).reshape(-1, 2), np.full((len(tokens), 2), 0.5, np.float32)
    )
    proposal = Proposal(3, 2, tokens, q, 3, anticipated=True)
    return PreparedProposals(number, (PreparedProposal(token, proposal),))


def test_a_prepared_step_is_answered_without_waiting_for_the_worker_which_is_asked_too() -> None:
    answer = Proposals(2, (Proposal(3, 2, (8, 9), None, 3),), seconds=0.1, pages_used=5)
    client = SlowClient(Proposals(1, (), 0.0, 0), answer, answer)

    async def rounds() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), client)
        client.gate.set()
        await drafter.propose([], 1.0)
        client.gate.clear()
        client.on_prepared(prepared_message())
        (proposal,) = await asyncio.wait_for(_awaited(drafter.propose([DRAFT], 1.0)), 60)
        assert (proposal.tokens, proposal.anticipated) == ((8, 9), True)
        third = asyncio.ensure_future(_awaited(drafter.propose([DRAFT], 1.0)))
        await asyncio.sleep(0.01)
        assert not third.done(), "a prepared proposal is for one round alone"
        client.gate.set()
        assert await third == answer.proposals

    asyncio.run(rounds())
    assert [message.number for message in client.asked] == [1, 2, 3]
    assert client.asked[1].steps == (DRAFT,)


async def _awaited(call: Any) -> Any:
    return await call


@pytest.mark.parametrize(
    "message",
    [prepared_message(tokens=(8,)), prepared_message(token=7), prepared_message(number=0)],
    ids=["prepared for a smaller gamma", "another token came", "of an earlier round"],
)
def test_a_prepared_proposal_that_does_not_fit_the_step_is_not_used(
    message: PreparedProposals,
) -> None:
    client = Client(
        Proposals(1, (), 0.0, 0), Proposals(2, (Proposal(3, 2, (5, 6), None, 3),), 0.0, 0)
    )

    async def rounds() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), client)
        await drafter.propose([], 1.0)
        client.on_prepared(message)
        (proposal,) = await drafter.propose([DRAFT], 1.0)
        assert proposal.tokens == (5, 6)

    asyncio.run(rounds())


def test_a_smaller_gamma_takes_the_beginning_of_the_prepared_proposal_and_of_its_q() -> None:
    client = Client(Proposals(1, (), 0.0, 0), Proposals(2, (), 0.0, 0))

    async def rounds() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), client)
        await drafter.propose([], 1.0)
        client.on_prepared(prepared_message(tokens=(8, 9, 10)))
        (proposal,) = await drafter.propose([DraftStep(3, 0, (1, 2), 1, POLICY)], 1.0)
        assert (proposal.tokens, proposal.num_cached, proposal.q.ids.shape) == ((8,), 2, (1, 2))

    asyncio.run(rounds())


def test_a_worker_lost_while_its_answer_is_pending_is_known_to_be_lost_in_the_next_round() -> None:
    client = Client(Proposals(1, (), 0.0, 0), WorkerLost("gone"))

    async def rounds() -> None:
        drafter = attached(RemoteDrafter(deadline_s=5), client)
        drafter.on_lost = lambda why: drafter.detach()
        await drafter.propose([], 1.0)
        client.on_prepared(prepared_message())
        (known,) = await drafter.propose([DRAFT], 1.0)
        assert known.tokens
        await asyncio.sleep(0.01)
        assert await drafter.propose([DRAFT], 1.0) == [Proposal(3, 2, (), None, 0)]

    asyncio.run(rounds())


WANTING = replace(VERIFY, gamma=2)
ASKED = DraftStep(3, 0, (1, 2, 8), 2, POLICY)
PUSHED = PreparedProposal(8, Proposal(3, 3, (5, 6), None, 4))


async def round_of(remote: RemoteTarget, step: VerifyStep) -> None:
    await remote.verify([step])


def pushing(*answers: Any) -> tuple[RemoteTarget, PushedProposals, Client]:
    """Return a target whose worker drafts, its drafter, and the worker's client."""
    remote, client = RemoteTarget(deadline_s=1.0), Client(*answers)
    pushed = PushedProposals(remote)
    attached(remote, client)
    return remote, pushed, client


def test_a_round_waits_for_the_proposals_that_follow_the_verdicts() -> None:
    async def main() -> None:
        remote, pushed, client = pushing(verdicts_of(Verdict(3, 0, 8, None)))
        await round_of(remote, WANTING)
        asked = asyncio.ensure_future(_awaited(pushed.propose([ASKED], math.inf)))
        await asyncio.sleep(0)
        assert not asked.done()
        client.on_prepared(PreparedProposals(1, (PUSHED,)))
        (proposal,) = await asked
        assert (proposal.tokens, proposal.num_cached) == ((5, 6), 5)
        assert proposal.anticipated is None, "it was drafted when it was wanted"
        (shorter,) = await pushed.propose([replace(ASKED, gamma=1)], math.inf)
        assert shorter.tokens == (5,)

    asyncio.run(main())


def test_a_round_without_draft_tokens_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specserve.cluster.engine.remote.MIN_PUSH_WAIT_S", 3600)

    async def main() -> None:
        remote, pushed, _ = pushing(verdicts_of(Verdict(3, 0, 8, None)))
        (first,) = await asyncio.wait_for(pushed.propose([ASKED], math.inf), 60)
        await round_of(remote, VERIFY)
        (second,) = await asyncio.wait_for(pushed.propose([ASKED], math.inf), 60)
        assert (first.tokens, second.tokens) == ((), ())

    asyncio.run(main())


def test_proposals_that_were_lost_on_their_way_cost_a_pause_and_late_ones_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specserve.cluster.engine.remote.MIN_PUSH_WAIT_S", 0.01)

    async def main() -> None:
        answers = [verdicts_of(Verdict(3, 0, 8, None)) for _ in range(2)]
        remote, pushed, client = pushing(*answers)
        await round_of(remote, WANTING)
        (nothing,) = await pushed.propose([ASKED], math.inf)
        assert (nothing.tokens, nothing.num_cached) == ((), 3)
        await round_of(remote, replace(WANTING, start=2, tokens=(8,)))
        client.on_prepared(PreparedProposals(1, (PUSHED,)))
        (late,) = await pushed.propose([replace(ASKED, tokens=(1, 2, 8, 9))], math.inf)
        assert not late.tokens

    asyncio.run(main())


def test_a_target_that_failed_or_is_gone_leaves_no_round_waiting_for_its_proposals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specserve.cluster.engine.remote.MIN_PUSH_WAIT_S", 3600)

    async def main() -> None:
        remote, pushed, _ = pushing(OutOfPages("no room"))
        with pytest.raises(OutOfPages):
            await round_of(remote, WANTING)
        (nothing,) = await asyncio.wait_for(pushed.propose([ASKED], math.inf), 60)
        assert not nothing.tokens
        remote.pushing_round = 7
        remote.detach()
        await asyncio.wait_for(pushed.propose([ASKED], math.inf), 60)

    asyncio.run(main())
