"""A simulated device of a draft pool: the real sharing and anticipation, on simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from lab.simulate.acceptance_model import AcceptanceModel
from lab.simulate.clock import DeviceClock
from lab.simulate.draft_model import SimulatedDraftModel
from lab.simulate.scenario import Scenario
from specserve.drafters.branches import Fanout
from specserve.features.draft_pools.drafter import EngineRound, PooledDrafter
from specserve.features.draft_pools.merged import MergedAnticipation
from specserve.features.draft_pools.shares import CacheShares, engine_of, seq_id_of
from specserve.types import DraftStep, Proposal


class EngineTexts:
    """The texts of all engines of a pool, by the ids that their sequences have there."""

    def __init__(self) -> None:
        self.models: dict[int, AcceptanceModel] = {}  # by engine

    def draft_tokens(self, seq_id: int, start: int, stop: int, *, depth: int) -> list[int]:
        model = self.models[engine_of(seq_id)]
        return model.draft_tokens(seq_id_of(seq_id), start, stop, depth=depth)

    def likeliest(
        self, seq_id: int, position: int, width: int, *, but: int | None
    ) -> tuple[int, ...]:
        model = self.models[engine_of(seq_id)]
        return model.likeliest(seq_id_of(seq_id), position, width, but=but)


@dataclass(slots=True)
class _Waiting:
    """A round that has arrived and waits for the device."""

    round: EngineRound
    answer: asyncio.Future[tuple[Sequence[Proposal], float]]  # and when it is sent


class SimulatedPool:
    """A draft device that takes rounds between its passes."""

    def __init__(self, scenario: Scenario) -> None:
        assert scenario.draft is not None
        self.clock, self.texts = DeviceClock(), EngineTexts()
        self.num_batches = self.num_rounds = 0
        self._link_s = scenario.draft.link_s
        speculation = scenario.config.speculation.anticipation
        self._prepares = speculation.enabled
        model = SimulatedDraftModel(
            self.texts,
            scenario.draft.pass_time,
            self.clock,
            pages=scenario.draft.pages,
            page_size=scenario.config.cache.page_size,
        )
        self.anticipation = MergedAnticipation(
            model, Fanout(per_position=speculation.fanout), clock=self.clock
        )
        shares = CacheShares(scenario.draft.pages, scenario.config.cache.page_size)
        self._pooled = PooledDrafter(
            self.anticipation, shares, max_places=scenario.config.limits.max_running
        )
        self._waiting: list[_Waiting] = []
        self._batches: asyncio.Task[None] | None = None  # while rounds wait

    async def propose(
        self, engine: int, steps: Sequence[DraftStep], released: Sequence[int], deadline: float
    ) -> Sequence[Proposal]:
        """Return the proposals of a round once they are back at its engine."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._link_s)
        asked = EngineRound(engine, tuple(steps), tuple(released), loop.time() + deadline)
        waiting = _Waiting(asked, loop.create_future())
        self._waiting.append(waiting)
        if self._batches is None:
            self._batches = loop.create_task(self._draft_all())
        proposals, sent_at = await waiting.answer
        await asyncio.sleep(sent_at + self._link_s - loop.time())
        return proposals

    async def _draft_all(self) -> None:
        """Draft until no round waits.

        What was prepared since the last batch is simulated when the first round arrives, as in
        `SimulatedDrafter`; a pass that is under way then is finished first. Rounds that arrive
        during a pass join the next one.
        """
        loop, clock = asyncio.get_running_loop(), self.clock
        open_rounds: dict[int, _Waiting] = {}
        try:
            self._prepare_until(loop.time())
            await asyncio.sleep(clock.now - loop.time())
            self.num_batches += 1
            while self._waiting or open_rounds:
                new, self._waiting = self._waiting, []
                open_rounds |= {each.round.engine: each for each in new}
                before = clock.busy
                answers = self._pooled.propose([each.round for each in new], lambda: True)
                clock.asked += clock.busy - before
                self.num_rounds += len(answers)
                for engine, proposals in answers.items():
                    open_rounds.pop(engine).answer.set_result((proposals, clock.now))
                if answers and open_rounds and self._prepares:
                    self.anticipation.fork()
                await asyncio.sleep(clock.now - loop.time())
        except Exception as error:
            for each in (*self._waiting, *open_rounds.values()):
                each.answer.set_exception(error)
            raise
        finally:
            self._batches = None

    def _prepare_until(self, arrival: float) -> None:
        clock = self.clock
        self.anticipation.prepare(lambda: not self._prepares or clock.now >= arrival)
        clock.now = max(clock.now, arrival)


class PooledSimulatedDrafter:
    """A drafter of one engine that is a device of a pool, as its coordinator sees it."""

    def __init__(self, pool: SimulatedPool, engine: int, model: AcceptanceModel) -> None:
        self._pool, self._engine, self._model = pool, engine, model
        pool.texts.models[engine] = model
        self._released: list[int] = []
        self.failure: Exception | None = None  # as in SimulatedDrafter

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        released, self._released = self._released, []
        self._model.release(released)
        return self._ask(steps, released, deadline)

    async def release(self, seq_ids: Sequence[int]) -> None:
        self._released += seq_ids

    async def _ask(
        self, steps: Sequence[DraftStep], released: Sequence[int], deadline: float
    ) -> Sequence[Proposal]:
        try:
            return await self._pool.propose(self._engine, steps, released, deadline)
        except Exception as failure:
            self.failure = failure
            raise
