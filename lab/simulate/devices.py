"""The simulated target and drafter, as the coordinator sees its workers: they only take time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from lab.simulate.acceptance_model import AcceptanceModel
from lab.simulate.clock import DeviceClock
from lab.simulate.draft_model import SimulatedDraftModel
from lab.simulate.pass_times import PassTime
from specserve.config.fields import number, setting
from specserve.types import DraftStep, Proposal, Verdict, VerifyStep

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostConfig:
    """The coordinator's own work, in seconds per round and per sequence; no device hides it."""

    per_round: float = setting(0.0, number(0, 60))
    per_sequence: float = setting(0.0, number(0, 60))


class SimulatedTarget:
    """A group of devices that runs one pass at a time.

    The host's work of the round is added here, before the pass.
    """

    def __init__(
        self, model: AcceptanceModel, pass_time: PassTime, *, link_s: float, host: HostConfig
    ) -> None:
        self._model, self._pass_time, self._host = model, pass_time, host
        self._known: dict[int, int] = {}  # tokens of each text that the last verdicts left
        self.link_s = link_s
        self.free_at = 0.0
        self.busy = 0.0  # total seconds of its own passes
        self.num_proposals = self.num_drafted = self.num_accepted = 0

    def verify(self, steps: Sequence[VerifyStep]) -> Awaitable[Sequence[Verdict]]:
        now = asyncio.get_running_loop().time()
        verdicts = [self._verify(step) for step in steps if step.needs_verdict]
        if not steps:
            return _return_at(now, verdicts)
        arrival = now + self._host.per_round + self._host.per_sequence * len(steps) + self.link_s
        self.free_at = max(self.free_at, arrival) + self._work(steps)
        return _return_at(self.free_at + self.link_s, verdicts)

    async def release(self, seq_ids: Sequence[int]) -> None:
        self._model.release(seq_ids)
        for seq_id in seq_ids:
            self._known.pop(seq_id, None)

    def num_known(self, seq_id: int) -> int:
        """Return how many tokens of a text the target's worker knows after its last pass."""
        return self._known.get(seq_id, 0)

    def _work(self, steps: Sequence[VerifyStep]) -> float:
        rows = sum(len(step.tokens) + len(step.drafts) for step in steps)
        seconds = self._pass_time.seconds(
            rows, len(steps), rows + sum(step.start for step in steps)
        )
        self._known.update((step.seq_id, step.stop) for step in steps if not step.needs_verdict)
        self.busy += seconds
        return seconds

    def _verify(self, step: VerifyStep) -> Verdict:
        accepted, token = self._model.verify(step.seq_id, step.stop, step.drafts)
        self.num_proposals += bool(step.drafts)
        self.num_drafted += len(step.drafts)
        self.num_accepted += accepted
        self._known[step.seq_id] = step.stop + accepted + 1
        return Verdict(step.seq_id, accepted, token, None)


class PreparingDrafter(Protocol):
    """The synchronous code of a draft device: it proposes, and prepares until a message waits."""

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]: ...
    def prepare(self, waiting: Callable[[], bool]) -> None: ...
    def release(self, seq_ids: Sequence[int]) -> None: ...


class LockstepDrafter:
    """A drafter that prepares nothing in advance."""

    def __init__(self, model: SimulatedDraftModel, clock: DeviceClock) -> None:
        self._model, self._clock = model, clock

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        return self._model.draft(steps, lambda: self._clock() > deadline)

    def prepare(self, waiting: Callable[[], bool]) -> None:
        pass

    def release(self, seq_ids: Sequence[int]) -> None:
        self._model.release(seq_ids)


class SimulatedDrafter:
    """Runs the synchronous code of a drafter on a device clock.

    The preparation that follows an answer is simulated when the next message arrives: only then is
    it known how long the device was idle. A pass that is under way when the message arrives is
    finished first and delays the answer, as on a device.
    """

    def __init__(
        self,
        drafter: PreparingDrafter,
        clock: DeviceClock,
        model: AcceptanceModel,
        *,
        link_s: float,
    ) -> None:
        self._drafter, self._clock, self._model, self._link_s = drafter, clock, model, link_s
        self._released: list[int] = []  # sent to the drafter with its next steps
        # The coordinator would go on without a drafter; a simulation must not.
        self.failure: Exception | None = None

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        try:
            proposals = self._answer(steps, deadline)
        except Exception as failure:
            self.failure = failure
            raise
        return _return_at(self._clock.now + self._link_s, proposals)

    async def release(self, seq_ids: Sequence[int]) -> None:
        self._released += seq_ids

    def _answer(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        clock, arrival = self._clock, asyncio.get_running_loop().time() + self._link_s
        self._drafter.prepare(lambda: clock.now >= arrival)
        clock.now = max(clock.now, arrival)
        released, self._released = self._released, []
        self._drafter.release(released)
        self._model.release(released)
        prepared = clock.busy
        proposals = self._drafter.propose(steps, clock.now + deadline)
        clock.asked += clock.busy - prepared
        return proposals


class TogetherDrafter:
    """A drafter in the target's worker, which drafts on the target's device after each pass.

    Its worker knows the texts that the target has computed, so no message asks for the proposals;
    they are pushed after the verdicts. Later messages wait until the device is free again.
    """

    def __init__(
        self, model: SimulatedDraftModel, clock: DeviceClock, target: SimulatedTarget
    ) -> None:
        self._model, self._clock, self._target = model, clock, target
        self.failure: Exception | None = None  # as in SimulatedDrafter

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        """Return what was drafted at the end of the last pass, when it arrives.

        The worker has no deadline.
        """
        try:
            proposals = self._draft_after_pass(steps)
        except Exception as failure:
            self.failure = failure
            raise
        return _return_at(self._target.free_at + self._target.link_s, proposals)

    async def release(self, seq_ids: Sequence[int]) -> None:
        self._model.release(seq_ids)

    def _draft_after_pass(self, steps: Sequence[DraftStep]) -> Sequence[Proposal]:
        clock, target = self._clock, self._target
        # A chunk of a prompt that the target has not computed yet waits for a later pass.
        known = [step for step in steps if target.num_known(step.seq_id) >= step.stop]
        clock.now = target.free_at
        drafted = {one.seq_id: one for one in self._model.draft(known, lambda: False)}
        clock.asked = clock.busy
        target.free_at = clock.now
        return [
            drafted.get(step.seq_id) or Proposal(step.seq_id, step.stop, (), None, step.start)
            for step in steps
        ]


async def _return_at(time: float, answer: T) -> T:
    await asyncio.sleep(time - asyncio.get_running_loop().time())
    return answer
