"""One engine replica: the real coordinator over simulated devices, and its requests."""

from __future__ import annotations

import asyncio
from collections import abc

from lab.simulate.acceptance_model import VOCAB, AcceptanceModel
from lab.simulate.clock import DeviceClock
from lab.simulate.devices import (
    LockstepDrafter,
    SimulatedDrafter,
    SimulatedTarget,
    TogetherDrafter,
)
from lab.simulate.draft_model import SimulatedDraftModel
from lab.simulate.load import Arrival
from lab.simulate.pool import PooledSimulatedDrafter, SimulatedPool
from lab.simulate.scenario import DeviceGroup, Mode, Scenario
from lab.simulate.statistics import RequestTimes, RoundTotals
from specserve.cluster.board.autoscaling import autoscaling_stats
from specserve.drafters.anticipation import Anticipation
from specserve.drafters.branches import Fanout
from specserve.engine import Coordinator
from specserve.engine.first_tokens import FirstTokenRecord
from specserve.types import Chunk, Drafter, ModelInfo, Request, Warp


class SimulatedReplica:
    """A replica that takes requests once it is `ready`.

    Its devices are occupied from `started` on.
    """

    def __init__(
        self,
        scenario: Scenario,
        number: int,
        round_totals: RoundTotals,
        pool: SimulatedPool | None = None,
    ) -> None:
        """Create a replica, which drafts on the device of a `pool` if there is one."""
        loop = asyncio.get_running_loop()
        self.started, self.ready, self.ended = loop.time(), False, False
        self.clock = DeviceClock()
        self.anticipation: Anticipation | None = None
        self._scenario, self._round_totals = scenario, round_totals
        self._model = AcceptanceModel(scenario.seed * 2**20 + number, scenario.acceptance)
        self.target = SimulatedTarget(
            self._model,
            scenario.target.pass_time,
            link_s=scenario.target.link_s,
            host=scenario.host,
        )
        self.drafter = (
            None
            if scenario.mode is Mode.PLAIN or scenario.draft is None
            else self._drafter(scenario.draft)
            if pool is None
            else PooledSimulatedDrafter(pool, number + 1, self._model)
        )
        self.coordinator = self._coordinator(loop.time, self.drafter)
        target_s = scenario.config.replicas.target_ttft_s
        self._first_tokens = (
            None
            if target_s is None
            else FirstTokenRecord(target_s, scenario.target.curve, clock=loop.time)
        )
        self._requests: dict[int, tuple[RequestTimes, asyncio.Future[None]]] = {}

    @property
    def ongoing(self) -> int:
        return len(self._requests)

    async def answer(self, arrival: Arrival, times: RequestTimes) -> None:
        """Answer a request up to its last token. Raises Overloaded when the queue is full."""
        request = Request(
            (0,) * arrival.prompt_tokens,
            arrival.output_tokens,
            Warp(temperature=0.0),
            seed=0,
            ignore_eos=True,
        )
        seq_id = self.coordinator.submit(request)
        if self._first_tokens is not None:
            load = self.coordinator.scheduler.num_sequences
            self._first_tokens.begin(seq_id, request, load=load)
        done = asyncio.get_running_loop().create_future()
        self._requests[seq_id] = times, done
        await done

    def autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics that a replica of Serve reports to the autoscaler."""
        return autoscaling_stats(
            self.coordinator,
            num_pages=self._scenario.target.pages,
            first_tokens=self._first_tokens,
            start_seconds=self._scenario.startup_s,
        )

    def end(self) -> None:
        """Free the devices. No request may be under way."""
        assert not self._requests
        self.ended = True
        self.coordinator.close()

    def _drafter(self, draft: DeviceGroup) -> SimulatedDrafter | TogetherDrafter:
        draft_model = SimulatedDraftModel(
            self._model,
            draft.pass_time,
            self.clock,
            pages=draft.pages,
            page_size=self._scenario.config.cache.page_size,
        )
        if self._scenario.mode is Mode.TOGETHER:
            return TogetherDrafter(draft_model, self.clock, self.target)
        if self._scenario.mode is Mode.LOCKSTEP:
            return SimulatedDrafter(
                LockstepDrafter(draft_model, self.clock),
                self.clock,
                self._model,
                link_s=draft.link_s,
            )
        fanout = Fanout(per_position=self._scenario.config.speculation.anticipation.fanout)
        self.anticipation = Anticipation(draft_model, fanout, clock=self.clock)
        return SimulatedDrafter(self.anticipation, self.clock, self._model, link_s=draft.link_s)

    def _coordinator(self, clock: abc.Callable[[], float], drafter: Drafter | None) -> Coordinator:
        scenario, config = self._scenario, self._scenario.config
        info = ModelInfo(
            vocab_size=VOCAB,
            max_context=config.limits.max_context or scenario.context,
            end_ids=frozenset(),
            page_size=config.cache.page_size,
            num_pages=scenario.target.pages,
            curve=scenario.target.curve,
        )
        return Coordinator(
            self.target,
            drafter,
            info=info,
            emit=self._emit,
            clock=clock,
            limits=config.limits,
            speculation=config.speculation,
            report=self._round_totals.add,
            remote_workers=drafter is not None and scenario.mode is not Mode.TOGETHER,
        )

    def _emit(self, chunks: abc.Sequence[Chunk]) -> None:
        now = asyncio.get_running_loop().time()
        if self._first_tokens is not None:
            self._first_tokens.observe(chunks)
        for chunk in chunks:
            times, done = self._requests[chunk.seq_id]
            times.add_tokens(len(chunk.tokens), now)
            if chunk.finish is not None:
                assert chunk.error is None or times.failed is None
                times.failed = chunk.error
                del self._requests[chunk.seq_id]
                done.set_result(None)
