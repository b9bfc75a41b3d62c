"""All continuations of one HTTP request, generated at once: pieces come out as they arrive, and leaving it cancels whatever is left."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import TracebackType

from specserve.api.continuation import Continuation, Piece
from specserve.api.metering import Meter
from specserve.api.parse import Asked
from specserve.api.rates import Account
from specserve.api.service import Service
from specserve.api.tokenizer import Text
from specserve.errors import Overloaded, TimedOut, Unavailable, WorkerLost
from specserve.types import Finish, Request

UNSERVED = (Overloaded, Unavailable)  # what was refused so has cost nothing
LOST = (Finish.ERROR, Finish.CANCELLED)  # nobody here cancels a request and goes on to listen


class Run:
    """`async with` it, and iterate over (index, piece). The first failure of any continuation is raised, and ends all."""

    def __init__(
        self,
        service: Service,
        text: Text,
        asked: Asked,
        *,
        timeout_s: float,
        meter: Meter,
        begun: float,
        account: Account | None = None,
    ) -> None:
        self._service, self._meter, self._begun, self._timeout_s = service, meter, begun, timeout_s
        self._asked, self._account, self._reserved = asked, account, 0.0
        self._requests = [
            request for prompt in asked.prompts for request in asked.sampling.requests(prompt.ids)
        ]
        before = [prompt.before for prompt in asked.prompts for _ in range(asked.sampling.n)]
        self.continuations = [
            Continuation(
                text, request.prompt, before=own, stop=asked.sampling.stops, spelling=asked.spelling
            )
            for request, own in zip(self._requests, before, strict=True)
        ]
        self._queue: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue()
        self._live = len(self._requests)
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self._asked.prompts)

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(continuation.token_ids) for continuation in self.continuations)

    async def __aenter__(self) -> Run:
        if self._account is not None:
            self._reserved = self._account.reserve(
                self.num_prompt_tokens + len(self._requests) * self._asked.sampling.max_tokens
            )
        self._meter.asked(self.num_prompt_tokens)
        late = TimedOut(f"the request took longer than {self._timeout_s:g} s")
        self._deadline = asyncio.get_running_loop().call_later(
            self._timeout_s, self._queue.put_nowait, late
        )
        self._pumps = [
            asyncio.create_task(self._pump(index, request))
            for index, request in enumerate(self._requests)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._cancel()
        if self._account is not None:
            served = not isinstance(error, UNSERVED) or self.num_completion_tokens > 0
            self._account.settle(
                self._reserved,
                used=self.num_prompt_tokens + self.num_completion_tokens if served else 0,
            )

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> tuple[int, Piece]:
        if not self._live:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Exception):
            await self._cancel()  # before it is told: a client may be slow to listen
            raise item
        if item[1].finish is not None:
            self._live -= 1
        return item

    @property
    def is_last(self) -> bool:
        """Whether every continuation has ended with the pieces that were taken."""
        return not self._live

    async def _cancel(self) -> None:
        """Returns when everything is given back."""
        self._deadline.cancel()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, index: int, request: Request) -> None:
        """Whatever goes wrong goes to whoever waits for the pieces: no request ends without a reply."""
        try:
            await self._generate(index, request)
        except Exception as error:
            self._queue.put_nowait(error)

    async def _generate(self, index: int, request: Request) -> None:
        """The last piece is told once the generator is closed, lest whoever reads it leave and interrupt that."""
        continuation, watch, last = self.continuations[index], self._meter.watch(self._begun), None
        async with aclosing(
            self._service.generate(request)
        ) as chunks:  # left at a stop string, it is cancelled there
            async for chunk in chunks:
                if chunk.finish in LOST:
                    raise WorkerLost(chunk.error or "the engine gave the request up")
                piece = continuation.take(chunk)
                watch.tokens(len(piece.token_ids))
                if piece.finish is not None:
                    last = piece
                    break
                self._queue.put_nowait((index, piece))
        if last is None:
            raise WorkerLost("the engine ended the request without saying why")
        watch.end(continuation)
        self._queue.put_nowait((index, last))
