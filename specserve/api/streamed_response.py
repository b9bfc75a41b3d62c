"""Send a generation to the client as a stream of server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

from starlette.types import Receive, Scope, Send

from specserve.api.continuation import OutputDelta
from specserve.api.generation import Generation
from specserve.api.generation_request import GenerationRequest
from specserve.api.metering import RequestMetrics
from specserve.api.prompt_logprobs import to_json
from specserve.api.refusal import INTERNAL, Refusal, log_redacted
from specserve.api.responses import GenerationResponse, ResponseHead
from specserve.api.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would wait for more
]


class StreamedResponse(GenerationResponse):
    """A response of server-sent events.

    The JSON of a chunk is concatenated from a constant head and a few small values.
    """

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        generation_request: GenerationRequest,
        head: ResponseHead,
        metrics: RequestMetrics,
        *,
        origins: bool,
        log_prompts: bool,
    ) -> None:
        super().__init__(generation, tokenizer, generation_request, head, metrics)
        self._origins, self._log_prompts = origins, log_prompts
        head_json = to_json(head.members(head.kind.chunk_object_name))
        self._event_head = "data: " + head_json[:-1] + ',"choices":['
        self._choice_heads = [
            self._event_head + f'{{"index":{index},' for index in range(len(self._choices))
        ]
        self._has_sent = [False] * len(self._choices)
        self._num_sent = 0  # tokens of all continuations
        self._event_tail = ',"usage":null' if self._include_usage else ""

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation as generation:
            events = self._events(generation)
            first = await anext(events)
            headers = STREAM_HEADERS + self._start_headers()
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send_event(send, first)
            try:
                async for event in events:
                    await send_event(send, event)
            except Exception as error:  # the status is sent; in mid-stream the error is an event
                await send_event(send, self._error_event(error))
            await send({"type": "http.response.body", "body": DONE.encode(), "more_body": False})

    async def _events(self, generation: Generation) -> AsyncGenerator[str, None]:
        async for index, delta in generation:
            await self._add_prompt_logprobs(index, delta)
            self._num_sent += len(delta.token_ids)
            if self._is_worth_sending(index, delta):
                yield self._chunk(index, delta, last=generation.is_last)
        if self._include_usage:
            yield (
                self._event_head
                + "],"
                + to_json({"usage": self._usage(), **self._speculation()})[1:]
                + "\n\n"
            )

    def _is_worth_sending(self, index: int, delta: OutputDelta) -> bool:
        """Return True if a delta shows something; a round that ends inside a character may not."""
        return bool(
            delta.text
            or delta.calls
            or delta.reasoning
            or delta.finish
            or delta.logprobs
            or not self._has_sent[index]
            or (self._origins and delta.origins)
            or (self._returns_ids and delta.token_ids)
        )

    def _chunk(self, index: int, delta: OutputDelta, *, last: bool) -> str:
        is_first, self._has_sent[index] = not self._has_sent[index], True
        finish = "null" if delta.finish is None else f'"{delta.finish.value}"'
        extras = self._event_tail
        if self._continuous_usage:
            extras = f',"usage":{to_json(self._usage(self._num_sent))}'
        if is_first:
            extras += self._prompt_ids()
        if self._origins:
            extras += f',"origins":{to_json(delta.origins)}'
        if last and (speculation := self._speculation()):
            extras += "," + to_json(speculation)[1:-1]
        choice = self._choice_heads[index] + self._choices[index].delta_json(delta)
        choice += self._choice_ids(index, delta.token_ids, with_prompt=is_first)
        return f'{choice},"finish_reason":{finish}}}]{extras}}}\n\n'

    def _error_event(self, error: Exception) -> str:
        refusal = Refusal.from_error(error)
        self._metrics.count_failure(refusal.status)
        log.error(
            "%s failed in mid-stream with %d: %s",
            self._head.request_id,
            refusal.status,
            refusal.message,
        )
        if refusal.kind is INTERNAL:
            log_redacted(log, self._head.request_id, error, log_prompts=self._log_prompts)
        return f"data: {refusal.json}\n\n"


async def send_event(send: Send, event: str) -> None:
    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
