"""Send a generation to the client; here as one JSON object, in streamed_response.py as events.

Both notice at any time that the client has left, and cancel the generation.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from specserve.api.choices import Choice, ResponseKind
from specserve.api.continuation import Continuation, OutputDelta
from specserve.api.generation import Generation
from specserve.api.generation_request import GenerationRequest
from specserve.api.metering import RequestMetrics
from specserve.api.prompt_logprobs import to_json
from specserve.api.tokenizer import Tokenizer
from specserve.request_stats import sum_positions
from specserve.types import Stats

log = logging.getLogger(__name__)

DELIVERY_S = 10.0
"""Seconds that a client has to take what is left of its answer at the end of its request's time."""
FIGURES_AT_START = ("cached_tokens", "queue_time_ms", "prefill_time_ms")
FIGURES_AT_END = ("time_to_first_token_ms", "drafts", "drafted", "accepted", "accepted_by_position")
FIGURE_HEADERS = {
    name: f"x-specserve-{name}".replace("_", "-") for name in FIGURES_AT_START + FIGURES_AT_END
}
"""Headers with the figures of a request. A stream has those that its start knows."""
SLICE = 64 * 1024  # characters of a response that are encoded at once


def json_response(content: object) -> Response:
    """Return a response with JSON in UTF-8."""
    return Response(to_json(content), media_type="application/json")


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The members that a response and all chunks of a stream begin with."""

    kind: ResponseKind
    request_id: str
    created: int
    model: str

    def members(self, object_name: str) -> dict[str, object]:
        return {
            "id": self.kind.id_prefix + self.request_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }


class GenerationResponse(Response):
    """A response that runs a generation.

    What fails before the first byte is sent is raised, and so gets a status of its own.
    """

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        generation_request: GenerationRequest,
        head: ResponseHead,
        metrics: RequestMetrics,
    ) -> None:
        self.status_code, self.background = 200, None
        self._generation, self._head, self._metrics = generation, head, metrics
        self._include_usage = generation_request.include_usage
        self._continuous_usage = generation_request.continuous_usage
        self._returns_ids = generation_request.return_token_ids
        self._best_of = generation_request.best_of
        n = generation_request.sampling.n
        self._prompts = [prompt for prompt in generation_request.prompts for _ in range(n)]
        self._choices: list[Choice] = [
            head.kind.choice(tokenizer, prompt, generation_request.sampling)
            for prompt in self._prompts
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and hang up on a client that does not take its answer in time."""
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            async with asyncio.timeout(self._generation.timeout_s + DELIVERY_S) as delivery:
                await _while_connected(receive, self._respond(scope, receive, watched_send))
        except TimeoutError:
            if not delivery.expired() or not has_started:
                raise  # as an error of the server: the client has no reply yet
            log.warning("%s: the client did not take its answer in time", self._head.request_id)

    @abstractmethod
    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def _add_prompt_logprobs(self, index: int, delta: OutputDelta) -> None:
        """Render the prompt's logprobs, if the delta has them, between other requests."""
        if delta.prompt_logprobs is not None:
            for _ in self._choices[index].add_prompt_logprobs(delta.prompt_logprobs):
                await asyncio.sleep(0)

    def _usage(self, num_sent: int | None = None) -> dict[str, object]:
        """Return the usage until now, or until `num_sent` tokens had been sent."""
        prompt_tokens = self._generation.num_prompt_tokens
        completion_tokens = self._generation.num_completion_tokens if num_sent is None else num_sent
        reasoning_tokens = self._generation.num_reasoning_tokens
        usage: dict[str, object] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._generation.num_cached_tokens},
        }
        if reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return usage

    def _choice_ids(self, index: int, ids: Sequence[int], *, with_prompt: bool = True) -> str:
        """Return the members with the ids of a choice's tokens, which may have been requested."""
        if not self._returns_ids:
            return ""
        prompt = (
            self._prompts[index].ids if with_prompt and self._head.kind.has_prompt_ids else None
        )
        prompt_ids = "" if prompt is None else f',"prompt_token_ids":{to_json(prompt)}'
        return f',"token_ids":{to_json(ids)}{prompt_ids}'

    def _prompt_ids(self) -> str:
        """Return the member of a response, or of a first chunk, with the ids of its prompt."""
        if not self._returns_ids or self._head.kind.has_prompt_ids:
            return ""
        return f',"prompt_token_ids":{to_json(self._prompts[0].ids)}'

    def _speculation(self) -> dict[str, object]:
        """Return the member `specserve`; it is left out when the engine sent no stats."""
        figures = self._figures()
        return {"specserve": figures} if figures else {}

    def _figure_headers(self, names: Iterable[str] = FIGURE_HEADERS) -> list[tuple[bytes, bytes]]:
        """Return headers with the figures of these names, as far as the engine sent them."""
        figures = self._figures()
        if figures:
            figures["cached_tokens"] = self._generation.num_cached_tokens
        return [
            (FIGURE_HEADERS[name].encode(), to_json(figures[name]).strip("[]").encode())
            for name in names
            if figures.get(name) is not None
        ]

    def _start_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of figures that are known at the start of a stream of one text."""
        has_one = len(self._generation.continuations) == 1
        return self._figure_headers(FIGURES_AT_START) if has_one else []

    def _figures(self) -> dict[str, object]:
        continuations = self._generation.continuations
        stats = [one.stats for one in continuations if one.stats is not None]
        if not stats:
            return {}
        # The times belong to one text; an answer with several has none.
        times = _times_json(continuations[0], stats[0]) if len(continuations) == 1 else {}
        return _speculation_json(stats) | times


class FullResponse(GenerationResponse):
    """A response that is one JSON object. It is put together in slices, between other requests."""

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas: list[list[OutputDelta]] = [[] for _ in self._choices]
        logprobs: list[list[float]] = [[] for _ in self._choices]
        async with self._generation as generation:
            async for index, delta in generation:
                await self._add_prompt_logprobs(index, delta)
                if self._best_of is not None:
                    logprobs[index] += [one.token for one in delta.logprobs or ()]
                if self._best_of is None or self._best_of.shows_logprobs:
                    self._choices[index].add_logprobs(delta)
                deltas[index].append(replace(delta, logprobs=None, prompt_logprobs=None))
        sent = range(len(deltas)) if self._best_of is None else self._best_of.choose(logprobs)
        slices = [part.encode() async for part in _slices(self._json(deltas, sent))]
        length = str(sum(map(len, slices))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        headers += self._figure_headers()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, body in enumerate(slices, 1):
            more = number < len(slices)
            await send({"type": "http.response.body", "body": body, "more_body": more})

    def _json(self, deltas: Sequence[Sequence[OutputDelta]], sent: Iterable[int]) -> Iterator[str]:
        """Yield the object in parts; `sent` are the continuations that it has."""
        head = self._head.members(self._head.kind.object_name)
        yield to_json(head)[:-1] + self._prompt_ids() + ',"choices":['
        for number, index in enumerate(sent):
            delta = OutputDelta.merge(deltas[index])
            assert delta.finish is not None
            yield f'{"," if number else ""}{{"index":{number},'
            yield from self._choices[index].full_json(delta)
            yield self._choice_ids(index, delta.token_ids)
            yield f',"finish_reason":"{delta.finish.value}"}}'
        yield "]"
        if self._head.kind.repeats_prompt_logprobs:
            yield self._choices[0].prompt_logprobs.member()
        yield "," + to_json({"usage": self._usage()} | self._speculation())[1:]


def _speculation_json(stats: Sequence[Stats]) -> dict[str, object]:
    """Return the `specserve` object: what speculation did for all continuations together.

    The continuations of a request share one verifier.
    """
    rounds, accepted = sum(one.rounds for one in stats), sum(one.accepted for one in stats)
    reasons = {one.irreproducible: None for one in stats if one.irreproducible is not None}
    return {
        "verifier": stats[0].verifier,
        "lossless": all(one.lossless for one in stats),
        "rounds": rounds,
        "drafts": sum(one.drafts for one in stats),
        "drafted": sum(one.drafted for one in stats),
        "accepted": accepted,
        "accepted_by_position": sum_positions(one.accepted_by_position for one in stats),
        "mean_accepted_length": accepted / rounds if rounds else 0.0,
        "target_passes": sum(one.target_passes for one in stats),
        "anticipated": sum(one.anticipated for one in stats),
        "resumed": sum(one.resumed for one in stats),
        **reproducible_members(tuple(reasons)),
    }


def _times_json(continuation: Continuation, stats: Stats) -> dict[str, object]:
    first_token = continuation.time_to_first_token
    return {
        "queue_time_ms": round(stats.queue_time_ms, 3),
        "prefill_time_ms": round(stats.prefill_time_ms, 3),
        "time_to_first_token_ms": None if first_token is None else round(1e3 * first_token, 3),
    }


def reproducible_members(reasons: Sequence[str]) -> dict[str, object]:
    """Return whether texts depend on what else is served, given all reasons why they may."""
    if not reasons:
        return {"reproducible": True}
    return {"reproducible": False, "irreproducible": "; ".join(reasons)}


async def _slices(parts: Iterator[str]) -> AsyncIterator[str]:
    """Yield the text of the parts in slices of some size; others run between them."""
    held: list[str] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= SLICE:
            yield "".join(held)
            held, size = [], 0
            await asyncio.sleep(0)
    yield "".join(held)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it when the client leaves, and wait until it has cleaned up."""
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (work_task, disconnect_task):
            task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)
    if not work_task.cancelled():
        work_task.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
