"""Generate all continuations of one HTTP request at once. Leaving a generation cancels the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType

from specserve.api.access import KeyUse
from specserve.api.bad_words import bad_word_ids, forbid_words
from specserve.api.continuation import Continuation, OutputDelta
from specserve.api.generation_request import GenerationRequest
from specserve.api.metering import RequestMetrics
from specserve.api.rates import Reservation
from specserve.api.service import Service
from specserve.api.tokenizer import Tokenizer
from specserve.errors import NotBegun, Overloaded, TimedOut, Unavailable, WorkerLost
from specserve.tracing import TraceContext
from specserve.types import FinishReason, Request

MAX_BEHIND = 200
"""Deltas of each continuation, on average, that wait for a client; beyond, none are made."""
READER_TURN_S = 0.05
UNBILLED_ERRORS = (NotBegun, Overloaded, Unavailable)
"""Errors that cost a client no tokens."""
LOST_FINISHES = (FinishReason.ERROR, FinishReason.CANCELLED)
"""Finish reasons of a request that the engine gave up; a cancelled one has no reader here."""


class Generation:
    """The running continuations of one HTTP request.

    Enter it with `async with` and iterate over (index, delta). The first failure of any
    continuation is raised and ends all of them. Unless it `shares_cache`, only requests of the
    same account can find the pages of its prompt.
    """

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        generation_request: GenerationRequest,
        *,
        timeout_s: float,
        metrics: RequestMetrics,
        start: float,
        key_use: KeyUse | None = None,
        shares_cache: bool = False,
        trace_context: TraceContext = (),
    ) -> None:
        self._service, self._metrics, self._start = service, metrics, start
        self.timeout_s = timeout_s
        self._generation_request, self._key_use = generation_request, key_use
        self._reservation: Reservation | None = None
        client = "" if key_use is None else key_use.client.name
        tenant = "" if shares_cache else client
        self._requests = [
            replace(request, client=client, trace_context=trace_context)
            for request in _engine_requests(tokenizer, generation_request, tenant)
        ]
        self.continuations = _empty_continuations(tokenizer, generation_request)
        self._queue: asyncio.Queue[tuple[int, OutputDelta] | Exception] = asyncio.Queue()
        self._num_running = len(self._requests)
        self._max_behind = MAX_BEHIND * len(self._requests)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopped = False
        self._failure: Exception | None = None  # that ends all, ahead of deltas that wait

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self._generation_request.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that were in the prefix cache before any continuation was begun."""
        n = self._generation_request.sampling.n
        cached = [0 if one.stats is None else one.stats.cached_tokens for one in self.continuations]
        return sum(min(cached[first : first + n]) for first in range(0, len(cached), n))

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(continuation.token_ids) for continuation in self.continuations)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of reasoning among them; None if the model's format of it is not known."""
        if self._generation_request.reasoning is None:
            return None
        return sum(continuation.num_reasoning_tokens for continuation in self.continuations)

    async def __aenter__(self) -> Generation:
        if self._key_use is not None:
            max_tokens = self._generation_request.sampling.max_tokens
            self._reservation = Reservation(
                self._key_use.accounts,
                self.num_prompt_tokens + len(self._requests) * max_tokens,
                self._requests[0].grammar,
            )
        self._metrics.count_prompt_tokens(self.num_prompt_tokens)
        self._deadline = asyncio.get_running_loop().call_later(self.timeout_s, self._time_out)
        self._tasks = [
            asyncio.create_task(self._run(index, request))
            for index, request in enumerate(self._requests)
        ]
        if self._key_use is not None:
            self._key_use.on_revoked(self._fail)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._cancel()
        if self._reservation is not None:
            billed = not isinstance(error, UNBILLED_ERRORS) or self.num_completion_tokens > 0
            self._reservation.settle(
                self.num_prompt_tokens + self.num_completion_tokens if billed else 0
            )

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> tuple[int, OutputDelta]:
        if not self._num_running:
            raise StopAsyncIteration
        item = self._failure or await self._queue.get()
        item = self._failure or item  # which may have come while it waited
        if isinstance(item, Exception):
            await self._cancel()  # before the error is sent: a client may be slow to read it
            raise item
        if item[1].finish is not None:
            self._num_running -= 1
        return item

    @property
    def is_last(self) -> bool:
        """True if every continuation has ended with the deltas that were returned."""
        return not self._num_running

    @property
    def _is_behind(self) -> bool:
        return self._queue.qsize() > self._max_behind

    def _time_out(self) -> None:
        self._queue.put_nowait(
            TimedOut(f"the request took longer than {self.timeout_s:g} s")
            if self.num_completion_tokens
            else NotBegun(f"the server had no token for the request within {self.timeout_s:g} s")
        )

    def _fail(self, error: Exception) -> None:
        """End all continuations now; the reader gets the error before any delta that waits."""
        self._failure = error
        self._stop()
        self._queue.put_nowait(error)

    def _stop(self) -> None:
        """Cancel what still runs, once: a second time would interrupt its cleaning up."""
        if not self._is_stopped:
            self._is_stopped = True
            for task in self._tasks:
                task.cancel()

    async def _cancel(self) -> None:
        """Cancel what still runs; return when everything it held is freed."""
        self._deadline.cancel()
        self._stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, index: int, request: Request) -> None:
        """Generate one continuation. Every exception goes to the reader of the deltas."""
        try:
            await self._generate(index, request)
        except Exception as error:
            self._queue.put_nowait(error)

    async def _generate(self, index: int, request: Request) -> None:
        """Generate one continuation and queue its deltas.

        The last delta is queued after the generator is closed. A reader that leaves on the last
        delta would otherwise interrupt the closing.
        """
        continuation = self.continuations[index]
        timer, last = self._metrics.start_timer(self._start), None
        # A request left at a stop string is cancelled by closing its generator.
        async with aclosing(self._service.generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.finish in LOST_FINISHES:
                    raise WorkerLost(chunk.error or "the engine gave the request up")
                delta = continuation.add_chunk(chunk)
                timer.add_tokens(len(delta.token_ids))
                if delta.finish is not None:
                    continuation.time_to_first_token = timer.time_to_first_token
                    last = delta
                    break
                if chunk.prompt_logprobs is None or not delta.is_empty:
                    self._queue.put_nowait((index, delta))
                if self._is_behind:
                    # A reader that takes its answer has not had its turn yet if the chunks came in
                    # a burst, as they do after a break of the network.
                    await asyncio.sleep(READER_TURN_S)
                    if self._is_behind:
                        raise TimedOut("the client does not take its answer")
        if last is None:
            raise WorkerLost("the engine ended the request without saying why")
        timer.finish(continuation)
        self._queue.put_nowait((index, last))


def _engine_requests(
    tokenizer: Tokenizer, generation_request: GenerationRequest, tenant: str
) -> Iterator[Request]:
    """Yield the engine's request for each continuation, without the words that are forbidden."""
    sampling = generation_request.sampling
    words = bad_word_ids(tokenizer, sampling)
    for prompt in generation_request.prompts:
        yield from forbid_words(
            sampling.requests(prompt.ids, tenant=tenant, adapter=generation_request.adapter), words
        )


def _empty_continuations(
    tokenizer: Tokenizer, generation_request: GenerationRequest
) -> list[Continuation]:
    """Return the continuations in the order of the engine's requests."""
    sampling = generation_request.sampling
    return [
        Continuation(
            tokenizer,
            prompt.ids,
            prefix_ids=prompt.prefix_ids,
            stop=sampling.stops,
            min_tokens=sampling.min_tokens,
            call_format=generation_request.call_format,
            reasoning=generation_request.reasoning,
            includes_stop=sampling.include_stop_str_in_output,
            shows_special=not sampling.skip_special_tokens,
        )
        for prompt in generation_request.prompts
        for _ in range(sampling.n)
    ]
