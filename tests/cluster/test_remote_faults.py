"""Links and workers that fail at random: no round wedges, no worker misses what a step builds on.

Real coordinator, RemoteTarget and RemoteDrafter, over links without sockets.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from specserve.cluster.engine.remote import RemoteDrafter, RemoteTarget
from specserve.engine import Coordinator
from specserve.errors import OutOfPages, WorkerLost
from specserve.types import (
    Chunk,
    FinishReason,
    PreparedProposal,
    Proposal,
    Request,
    Warp,
)
from specserve.wire.messages import (
    Failure,
    Message,
    PreparedProposals,
    Proposals,
    Propose,
    Verdicts,
    Verify,
)
from tests.support.fakes import (
    FakeDrafter,
    FakeTarget,
    model_info,
    next_token,
    open_coordinator,
    text,
)

INFO = model_info()
ANSWER_TURNS = 3
DEADLINE_TURNS = 12
RESTART_TURNS = 25
MAX_TURNS = 100_000
"""Turns of the event loop after which a run counts as wedged; it takes some 10,000."""
REMOTE_FAULTS = (
    "refuses",
    "fails",
    "answers with another type",
    "does not answer",
    "answers late",
    "takes no message",
    "cannot be sent the message",
    "dies",
    "falls silent between rounds",
)


@dataclass
class Faults:
    """Faults that calls meet; `rate` is the share of calls that meet one."""

    rng: random.Random
    rate: float
    num_met: int = 0

    def draw(self) -> str | None:
        if self.rng.random() >= self.rate:
            return None
        self.num_met += 1
        return self.rng.choice(REMOTE_FAULTS)


class TurnLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock counts its own turns, and which never sleeps."""

    _num_turns = 0.0

    def time(self) -> float:
        return self._num_turns

    def _run_once(self) -> None:
        self._num_turns += 1
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            next_turn = self._scheduled[0]._when  # type: ignore[attr-defined]
            self._num_turns = max(self._num_turns, next_turn)
        super()._run_once()  # type: ignore[misc]


def after(turns: int, action: Callable[[], object]) -> None:
    asyncio.get_running_loop().call_later(turns, action)


class Link:
    """Stands for a Client: one call at a time, deadlines, late answers, loss."""

    def __init__(
        self, role: Role, answer: Callable[[Message], Message], send_ahead: bool = False
    ) -> None:
        self.role, self._answer_of, self._send_ahead = role, answer, send_ahead
        self.on_prepared: Callable[[PreparedProposals], None] | None = None
        self.is_late = False
        self._call: asyncio.Future[Message] | None = None
        self._number = 0
        self._lost: WorkerLost | None = None

    def call(self, message: Propose | Verify, timeout_s: float) -> Awaitable[Message]:
        if self._call is not None:
            self.role.wedges.append("a call was under way")
        assert self._call is None
        if self._lost is not None:
            raise self._lost
        fault = self.role.fault_for(self)
        if fault == "takes no message":
            raise WorkerLost("the worker has long taken no messages")
        if fault == "cannot be sent the message":
            raise TypeError("cannot be packed")
        self._number, call = message.number, asyncio.get_running_loop().create_future()
        self._call = call
        self._begin(message, fault)
        after(DEADLINE_TURNS, lambda: self._on_deadline(call))
        return self._wait(call)

    def fail(self, error: WorkerLost) -> None:
        self._lost = error
        if self._call is not None and not self._call.done():
            self._call.set_exception(error)

    def _begin(self, message: Propose | Verify, fault: str | None) -> None:
        turns = ANSWER_TURNS
        answer: Message | None = None
        if fault == "refuses":
            answer = Failure.from_error(message.number, OutOfPages("no room"))
        elif fault == "fails":
            answer = Failure.from_error(message.number, ValueError("a hole in the cache"))
        elif fault == "answers with another type":
            proposals = isinstance(message, Verify)
            answer = (
                Proposals(message.number, (), 0.0, 0)
                if proposals
                else Verdicts(message.number, (), 0.0, 0)
            )
        elif fault == "answers late":
            turns = DEADLINE_TURNS + 5
        if fault == "does not answer":
            return
        if fault == "dies":
            after(1, lambda: self.role.lose("it was killed", self))
            return
        if answer is None:
            answer = self._answer_of(message)
        given = answer
        after(turns, lambda: self._deliver(given))
        if fault == "falls silent between rounds":
            after(turns + 2, lambda: self._fall_silent())
        if self._send_ahead and isinstance(message, Propose) and isinstance(answer, Proposals):
            ahead = PreparedProposals(message.number, tuple(_next_proposals(message, answer)))
            after(turns + 1, lambda: self.on_prepared and self.on_prepared(ahead))

    def _fall_silent(self) -> None:
        error = WorkerLost("it has fallen silent")
        self.fail(error)
        self.role.lose(str(error), self)

    def _deliver(self, answer: Any) -> None:
        if self._lost is not None:
            return
        self.is_late = False
        if self._call is not None and answer.number == self._number and not self._call.done():
            self._call.set_result(answer)

    def _on_deadline(self, call: asyncio.Future[Message]) -> None:
        if not call.done():
            self.is_late = True
            call.set_exception(WorkerLost("the worker has not answered in time"))

    async def _wait(self, call: asyncio.Future[Message]) -> Message:
        try:
            message = await call
        finally:
            self._call = None
        if isinstance(message, Failure):
            raise message.error()
        return message


class Role:
    """The workers of one role, which are replaced all together as by a supervisor."""

    def __init__(
        self, remote: Any, start: Callable[[Role], Sequence[Link]], faults: Faults
    ) -> None:
        self.remote, self._start, self._faults = remote, start, faults
        self.wedges: list[str] = []
        self.num_lost = 0
        self._is_lost = False
        self._round_fault: tuple[int, str | None, bool] = (0, None, False)
        self._num_asked = 0
        remote.on_lost = self.lose
        self.attach()

    def attach(self) -> None:
        self._is_lost = False
        self.links = list(self._start(self))
        self._num_asked = 0
        self.remote.attach(self.links)

    def lose(self, reason: str, link: Link | None = None) -> None:
        """Replace the workers; a link of earlier workers is ignored."""
        if self._is_lost or (link is not None and link not in self.links):
            return
        self._is_lost = True
        self.num_lost += 1
        self.remote.detach()
        for each in self.links:
            each.fail(WorkerLost(reason))
        after(RESTART_TURNS, self.attach)

    def fault_for(self, link: Link) -> str | None:
        """Return the fault of this call.

        One rank meets it. If it comes before the collective, the others wait there for ever.
        """
        rank = self.links.index(link)
        if rank == 0:
            rng = self._faults.rng
            self._round_fault = (
                rng.randrange(len(self.links)),
                self._faults.draw(),
                rng.random() < 0.5,
            )
        culprit, fault, blocks_others = self._round_fault
        if rank == culprit:
            return fault
        return "does not answer" if fault is not None and blocks_others else None


def target_links(num_ranks: int) -> Callable[[Role], Sequence[Link]]:
    def start(role: Role) -> Sequence[Link]:
        return [Link(role, rank_answer(FakeTarget(INFO), rank)) for rank in range(num_ranks)]

    return start


def rank_answer(model: FakeTarget, rank: int) -> Callable[[Message], Message]:
    def answer(message: Message) -> Message:
        assert isinstance(message, Verify)
        finished(model.release(message.released))
        verdicts = finished(model.verify(message.steps))
        return Verdicts(message.number, tuple(verdicts) if rank == 0 else (), 0.0, 0)

    return answer


def draft_links(role: Role) -> Sequence[Link]:
    model = FakeDrafter(0.8)

    def answer(message: Message) -> Message:
        assert isinstance(message, Propose)
        finished(model.release(message.released))
        return Proposals(message.number, tuple(finished(model.propose(message.steps, 1.0))), 0.0, 0)

    return [Link(role, answer, send_ahead=True)]


def finished(call: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        call.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


def _next_proposals(message: Propose, answer: Proposals) -> list[PreparedProposal]:
    """Return what follows if each proposal is accepted whole; only the drafts' last tokens count.

    The fake's text depends on three tokens, so drafts of two and more are continued rightly.
    """
    prepared = []
    for step, proposal in zip(message.steps, answer.proposals, strict=True):
        if len(proposal.tokens) >= 3:
            start = proposal.start + len(proposal.tokens)
            tail = [0] * (start - 3) + list(proposal.tokens[-3:])
            token = next_token(tail)
            tail.append(token)
            drafts = []
            for _ in range(step.gamma):
                drafts.append(next_token(tail))
                tail.append(drafts[-1])
            gamma = len(drafts)
            prepared.append(
                PreparedProposal(
                    token,
                    Proposal(
                        step.seq_id,
                        start + 1,
                        tuple(drafts),
                        None,
                        start + gamma,
                        anticipated=True,
                    ),
                )
            )
    return prepared


class Run:
    """Requests served one after the other by an engine whose links fail."""

    def __init__(self, seed: int, *, num_ranks: int, rate: float) -> None:
        self.rng = random.Random(seed)
        self.faults = Faults(self.rng, rate)
        self.target, self.drafter = (
            RemoteTarget(deadline_s=DEADLINE_TURNS),
            RemoteDrafter(deadline_s=DEADLINE_TURNS),
        )
        self.roles = (
            Role(self.target, target_links(num_ranks), self.faults),
            Role(self.drafter, draft_links, self.faults),
        )
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.texts: dict[int, tuple[int, ...]] = {}
        self.ends: dict[int, Chunk] = {}
        self.num_rounds = 0

    def coordinator(self) -> Coordinator:
        return open_coordinator(
            self.target,
            self.drafter,
            info=INFO,
            emit=self.receive,
            gamma=4,
            max_running=6,
            remote_workers=True,
            clock=asyncio.get_running_loop().time,
        )

    def receive(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            assert chunk.start == len(self.texts[chunk.seq_id]), "a token was lost or repeated"
            self.texts[chunk.seq_id] += chunk.tokens
            if chunk.finish is not None:
                self.ends[chunk.seq_id] = chunk

    async def serve(self, num_rounds: int) -> None:
        """Run rounds with faults, and then without, until all requests have ended."""
        coordinator = self.coordinator()
        while self.num_rounds < num_rounds and coordinator.trouble is None:
            if coordinator.scheduler.num_sequences < 6:
                self.submit(coordinator)
            await self.round(coordinator)
        self.faults.rate = 0.0
        if coordinator.trouble is None:
            self.submit(coordinator)
        while coordinator.has_work:
            await self.round(coordinator)
        self.check()

    def submit(self, coordinator: Coordinator) -> None:
        prompt = tuple(self.rng.randrange(90) for _ in range(self.rng.randint(1, 30)))
        request = Request(prompt, 40, Warp(), seed=1)
        seq_id = coordinator.submit(request)
        self.prompts[seq_id], self.texts[seq_id] = prompt, ()

    async def round(self, coordinator: Coordinator) -> None:
        self.num_rounds += 1
        await coordinator.round()
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)

    def check(self) -> None:
        assert [role.wedges for role in self.roles] == [[], []]
        assert self.ends.keys() == self.texts.keys()
        for seq_id, tokens in self.texts.items():
            assert tokens == text(self.prompts[seq_id], len(tokens))
            assert self.ends[seq_id].finish is FinishReason.ERROR or len(tokens) == 40


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_whatever_workers_answer_every_round_ends_and_texts_are_right_once_faults_stop(
    num_ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # a traceback for each fault takes longer than the rounds
    num_met = 0
    for seed in range(4):
        run = Run(seed, num_ranks=num_ranks, rate=0.06)
        with asyncio.Runner(loop_factory=TurnLoop) as runner:
            runner.run(asyncio.wait_for(run.serve(400), MAX_TURNS))
        num_met += run.faults.num_met
    assert num_met > 40, "the test has lost its faults"
