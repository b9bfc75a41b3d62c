"""`AsyncLLM`: many concurrent requests of an event loop into one engine in a thread of its own.

It hands deltas from the thread to the loop; local_engine.py knows what a request is.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType

from specserve.api.continuation import OutputDelta
from specserve.errors import Overloaded, SpecserveError, WorkerLost, first_line
from specserve.llm.llm import LLM, Prompt, chat_prompts, single
from specserve.llm.local_engine import LocalEngine, Output, PendingOutput
from specserve.sampling_params import Sampling

Deliver = Callable[[OutputDelta | SpecserveError | None], None]
"""Called with each delta, or an error, and None at the end."""


class AsyncLLM:
    """An `LLM` for event loops. Requests that are under way together share rounds.

    Use it in an `async with` statement, or `close` it.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | None = None,
        draft: str | os.PathLike[str] | None = None,
        **overrides: object,
    ) -> None:
        """Open models as `LLM` does, with the keys of the config tree. Blocks while it loads."""
        self._start(LLM(target, draft, **overrides))

    @classmethod
    def from_llm(cls, llm: LLM) -> AsyncLLM:
        """Return an AsyncLLM over an LLM, which nothing else may use from then on."""
        opened = cls.__new__(cls)
        opened._start(llm)
        return opened

    def _start(self, llm: LLM) -> None:
        self._engine = llm.engine
        self._rounds = RoundThread(llm.engine)

    async def stream(
        self, prompt: Prompt, sampling: Sampling | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Yield the text of one continuation as it is written.

        Errors of this request are raised here and end no other. `aclose()` cancels it.
        """
        (pending,) = single(self._engine, prompt, sampling)
        async with aclosing(self._deltas(pending)) as deltas:
            async for delta in deltas:
                yield delta

    async def generate(self, prompt: Prompt, sampling: Sampling | None = None) -> Output:
        """Return one whole continuation. To cancel the task cancels the request."""
        (pending,) = single(self._engine, prompt, sampling)
        async with aclosing(self._deltas(pending)) as deltas:
            async for _ in deltas:
                pass
        return pending.output()

    async def chat(
        self, messages: Sequence[Mapping[str, object]], sampling: Sampling | None = None
    ) -> Output:
        """Answer one conversation by the model's chat template."""
        (prompt,) = chat_prompts(self._engine, messages)
        return await self.generate(prompt, sampling)

    async def close(self) -> None:
        """End what is under way with an error, and free the models."""
        await asyncio.to_thread(self._rounds.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _deltas(self, pending: PendingOutput) -> AsyncGenerator[OutputDelta, None]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[OutputDelta | SpecserveError | None] = asyncio.Queue()

        def deliver(item: OutputDelta | SpecserveError | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        self._rounds.add(pending, deliver)
        try:
            while (item := await arrived.get()) is not None:
                if isinstance(item, SpecserveError):
                    raise item
                yield item
        finally:
            self._rounds.cancel(pending)


class RoundThread:
    """A thread that runs the rounds of an engine, and alone touches it, while there is work."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[PendingOutput] = deque()
        self._readers: dict[PendingOutput, Deliver] = {}
        self._closed = False
        self._lock = threading.Lock()  # of `_closed` and the order of orders
        self._thread = threading.Thread(target=self._run, name="specserve-rounds", daemon=True)
        self._thread.start()

    def add(self, pending: PendingOutput, deliver: Deliver) -> None:
        """Queue a request. Raises Overloaded after `close`."""

        def begin() -> None:
            self._engine.reopen_after_trouble()
            self._waiting.append(pending)
            self._readers[pending] = deliver

        with self._lock:
            if self._closed:
                raise Overloaded("this AsyncLLM is closed")
            self._orders.put(begin)

    def cancel(self, pending: PendingOutput) -> None:
        """End a request whose reader has gone; one that has ended is left alone."""

        def end() -> None:
            if self._readers.pop(pending, None) is not None:
                self._engine.cancel([pending])
                if pending in self._waiting:
                    self._waiting.remove(pending)

        self._orders.put(end)

    def close(self) -> None:
        """Fail what is under way, free the models and wait for the thread."""
        with self._lock:
            self._closed = True
        self._orders.put(lambda: None)
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._follow_orders()
                if self._waiting or self._engine.has_work:
                    self._engine.step(self._waiting)
                self._deliver()
            except Exception as error:  # the edge of the thread: its readers would wait for ever
                self._closed = True
                self._fail(WorkerLost(f"the engine failed: {first_line(error)}"))
        self._follow_orders(waits=False)
        self._fail(Overloaded("this AsyncLLM was closed"))
        self._engine.close()

    def _follow_orders(self, *, waits: bool = True) -> None:
        """Follow the orders that came; without work, wait for one."""
        waits = waits and not (self._waiting or self._engine.has_work)
        while True:
            try:
                order = self._orders.get(block=waits)
            except queue.Empty:
                return
            order()
            waits = False

    def _deliver(self) -> None:
        """Hand every reader what the round brought for it."""
        for pending, deliver in list(self._readers.items()):
            if pending.error is not None:
                deliver(pending.error)
            elif (delta := pending.take()) is not None:
                deliver(delta)
            if pending.error is not None or not (pending.is_live or pending in self._waiting):
                deliver(None)
                del self._readers[pending]

    def _fail(self, error: SpecserveError) -> None:
        for pending, deliver in self._readers.items():
            self._engine.cancel([pending])
            deliver(error)
        self._readers.clear()
        self._waiting.clear()
