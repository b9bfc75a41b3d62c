"""A target and a drafter in the form in which the coordinator knows its workers; what they do takes time and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from specserve.config.fields import number, setting
from specserve.tools.simulate.acceptance_model import Truth
from specserve.tools.simulate.clock import DeviceClock
from specserve.tools.simulate.draft_model import SimulatedGuesser
from specserve.tools.simulate.pass_times import PassTime
from specserve.types import DraftStep, Proposal, Verdict, VerifyStep

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Host:
    """The coordinator's own work, which no device hides: seconds a round and for each sequence in it."""

    per_round: float = setting(0.0, number(0, 60))
    per_sequence: float = setting(0.0, number(0, 60))


class SimulatedTarget:
    """One group of devices that makes one pass at a time. The host's work of the round is waited for here, before the pass."""

    def __init__(self, truth: Truth, pass_time: PassTime, *, link_s: float, host: Host) -> None:
        self._truth, self._pass_time, self._link_s, self._host = truth, pass_time, link_s, host
        self._free_at = 0.0
        self.busy = 0.0
        self.num_proposals = self.num_drafted = self.num_accepted = 0

    def verify(self, steps: Sequence[VerifyStep]) -> Awaitable[Sequence[Verdict]]:
        now = asyncio.get_running_loop().time()
        verdicts = [self._judge(step) for step in steps if step.decide]
        if not steps:
            return _at(now, verdicts)
        arrival = now + self._host.per_round + self._host.per_sequence * len(steps) + self._link_s
        self._free_at = max(self._free_at, arrival) + self._work(steps)
        return _at(self._free_at + self._link_s, verdicts)

    async def release(self, seq_ids: Sequence[int]) -> None:
        self._truth.forget(seq_ids)

    def _work(self, steps: Sequence[VerifyStep]) -> float:
        rows = sum(len(step.tokens) + len(step.drafts) for step in steps)
        seconds = self._pass_time.seconds(
            rows, len(steps), rows + sum(step.start for step in steps)
        )
        self.busy += seconds
        return seconds

    def _judge(self, step: VerifyStep) -> Verdict:
        accepted, token = self._truth.judge(step.seq_id, step.start + len(step.tokens), step.drafts)
        self.num_proposals += bool(step.drafts)
        self.num_drafted += len(step.drafts)
        self.num_accepted += accepted
        return Verdict(step.seq_id, accepted, token, None)


class Worker(Protocol):
    """What the draft device runs: it answers, works ahead until a message waits, and forgets."""

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]: ...
    def prepare(self, waiting: Callable[[], bool]) -> None: ...
    def release(self, seq_ids: Sequence[int]) -> None: ...


class Lockstep:
    """A worker that waits to be asked."""

    def __init__(self, guesser: SimulatedGuesser, clock: DeviceClock) -> None:
        self._guesser, self._clock = guesser, clock

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        return self._guesser.draft(steps, lambda: self._clock() > deadline)

    def prepare(self, waiting: Callable[[], bool]) -> None:
        pass

    def release(self, seq_ids: Sequence[int]) -> None:
        self._guesser.release(seq_ids)


class SimulatedDrafter:
    """Runs a worker's own, synchronous code on a device clock.

    What the worker does after an answer is played when the next message is there: only then is it known for how long it had nothing
    else to do. A pass that is under way when the message arrives ends first, and the answer is later by that, as on a device.
    """

    def __init__(self, worker: Worker, clock: DeviceClock, truth: Truth, *, link_s: float) -> None:
        self._worker, self._clock, self._truth, self._link_s = worker, clock, truth, link_s
        self._released: list[int] = []  # the worker hears of them with its next steps
        self.failure: Exception | None = (
            None  # the coordinator would go on without a drafter; a simulation must not
        )

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        try:
            proposals = self._answer(steps, deadline)
        except Exception as failure:
            self.failure = failure
            raise
        return _at(self._clock.now + self._link_s, proposals)

    async def release(self, seq_ids: Sequence[int]) -> None:
        self._released += seq_ids

    def _answer(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        clock, arrival = self._clock, asyncio.get_running_loop().time() + self._link_s
        self._worker.prepare(lambda: clock.now >= arrival)
        clock.now = max(clock.now, arrival)
        self._forget()
        return self._worker.propose(steps, clock.now + deadline)

    def _forget(self) -> None:
        released, self._released = self._released, []
        self._worker.release(released)
        self._truth.forget(released)


async def _at(time: float, answer: T) -> T:
    await asyncio.sleep(time - asyncio.get_running_loop().time())
    return answer
