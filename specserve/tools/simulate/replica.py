"""One engine replica: a real coordinator over simulated devices, and the requests that it answers."""

from __future__ import annotations

import asyncio
from collections import abc

from specserve.drafters.anticipation import Anticipation
from specserve.drafters.branches import Fanout
from specserve.engine import Coordinator
from specserve.models.warmup import ROWS
from specserve.tools.simulate.acceptance_model import VOCAB, Truth
from specserve.tools.simulate.clock import DeviceClock
from specserve.tools.simulate.devices import Lockstep, SimulatedDrafter, SimulatedTarget
from specserve.tools.simulate.draft_model import SimulatedGuesser
from specserve.tools.simulate.load import Arrival
from specserve.tools.simulate.scenario import Mode, Scenario, Worker
from specserve.tools.simulate.statistics import Asked, Tally
from specserve.types import Chunk, Drafter, ModelInfo, Request, Warp


class Replica:
    """Takes requests from when it is `ready`; `begun` is when its devices were taken."""

    def __init__(self, scenario: Scenario, number: int, tally: Tally) -> None:
        loop = asyncio.get_running_loop()
        self.begun, self.ready, self.ended = loop.time(), False, False
        self.clock = DeviceClock()
        self.anticipation: Anticipation | None = None
        self._scenario, self._tally = scenario, tally
        self._truth = Truth(scenario.seed * 2**20 + number, scenario.acceptance)
        self.target = SimulatedTarget(
            self._truth,
            scenario.target.pass_time,
            link_s=scenario.target.link_s,
            host=scenario.host,
        )
        self.drafter = (
            None
            if scenario.mode is Mode.PLAIN or scenario.draft is None
            else self._drafter(scenario.draft)
        )
        self.coordinator = self._coordinator(loop.time, self.drafter)
        self._asked: dict[int, tuple[Asked, asyncio.Future[None]]] = {}

    @property
    def ongoing(self) -> int:
        return len(self._asked)

    async def answer(self, arrival: Arrival, asked: Asked) -> None:
        """Until the last token. Raises Overloaded when the queue is full."""
        request = Request(
            (0,) * arrival.prompt_tokens,
            arrival.output_tokens,
            Warp(temperature=0.0),
            seed=0,
            ignore_eos=True,
        )
        seq_id = self.coordinator.submit(request)
        self._asked[seq_id] = asked, asyncio.get_running_loop().create_future()
        await self._asked[seq_id][1]

    def end(self) -> None:
        """Gives its devices back; nothing may be under way."""
        assert not self._asked
        self.ended = True
        self.coordinator.close()

    def _drafter(self, draft: Worker) -> SimulatedDrafter:
        guesser = SimulatedGuesser(
            self._truth,
            draft.pass_time,
            self.clock,
            pages=draft.pages,
            page_size=self._scenario.config.cache.page_size,
        )
        if self._scenario.mode is Mode.LOCKSTEP:
            return SimulatedDrafter(
                Lockstep(guesser, self.clock), self.clock, self._truth, link_s=draft.link_s
            )
        fanout = Fanout(per_stop=self._scenario.config.speculation.anticipation.fanout)
        self.anticipation = Anticipation(guesser, fanout, clock=self.clock)
        return SimulatedDrafter(self.anticipation, self.clock, self._truth, link_s=draft.link_s)

    def _coordinator(self, clock: abc.Callable[[], float], drafter: Drafter | None) -> Coordinator:
        scenario, config = self._scenario, self._scenario.config
        info = ModelInfo(
            vocab_size=VOCAB,
            max_context=config.limits.max_context or scenario.context,
            end_ids=frozenset(),
            page_size=config.cache.page_size,
            num_pages=scenario.target.pages,
            curve=tuple(
                (rows, scenario.target.pass_time.seconds(rows, 1, rows)) for rows in ROWS
            ),  # as its warm-up would find
        )
        return Coordinator(
            self.target,
            drafter,
            info=info,
            emit=self._emit,
            clock=clock,
            max_running=config.limits.max_running,
            max_queued=config.limits.max_queued,
            max_batch_tokens=scenario.batch_tokens,
            gamma=config.speculation.gamma,
            max_gamma=config.speculation.max_gamma,
            report=self._tally.take,
            overlaps=drafter is not None,
        )

    def _emit(self, chunks: abc.Sequence[Chunk]) -> None:
        now = asyncio.get_running_loop().time()
        for chunk in chunks:
            asked, done = self._asked[chunk.seq_id]
            asked.had(len(chunk.tokens), now)
            if chunk.finish is not None:
                assert chunk.error is None or asked.failed is None
                asked.failed = chunk.error
                del self._asked[chunk.seq_id]
                done.set_result(None)
