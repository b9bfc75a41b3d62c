"""Send a generation in a protocol whose streams are named events, or as one object.

Knows neither protocol: what the events and the object hold is a subclass's.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator

from starlette.types import Receive, Scope, Send

from specserve.api.generation import Generation
from specserve.api.generation_request import GenerationRequest
from specserve.api.metering import RequestMetrics
from specserve.api.prompt_logprobs import to_json
from specserve.api.refusal import INTERNAL, Refusal, log_redacted
from specserve.api.responses import GenerationResponse, ResponseHead
from specserve.api.streamed_response import STREAM_HEADERS, send_event
from specserve.api.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Event = dict[str, object]


class EventResponse(GenerationResponse):
    """A response of events that have a `type`, or of the object that they add up to."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        generation_request: GenerationRequest,
        head: ResponseHead,
        metrics: RequestMetrics,
        *,
        log_prompts: bool,
    ) -> None:
        super().__init__(generation, tokenizer, generation_request, head, metrics)
        self._stream, self._log_prompts = generation_request.stream, log_prompts

    @abstractmethod
    def _events(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Yield events; the first one follows the first delta."""
        ...

    @abstractmethod
    def _whole(self) -> dict[str, object]:
        """Return the object, when all events have been yielded."""
        ...

    @abstractmethod
    def _failure(self, refusal: Refusal) -> Event:
        """Return the event of a failure in mid-stream."""
        ...

    def _line(self, event: Event) -> str:
        return f"event: {event['type']}\ndata: {to_json(event)}\n\n"

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation as generation:
            events = self._events(generation)
            if not self._stream:
                async for _ in events:
                    pass
                await _send_json(send, self._whole(), self._figure_headers())
                return
            first = await anext(events)
            headers = STREAM_HEADERS + self._start_headers()
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send_event(send, self._line(first))
            try:
                async for event in events:
                    await send_event(send, self._line(event))
            except Exception as error:  # the status is sent; in mid-stream the error is an event
                await send_event(send, self._line(self._failure(self._log_failure(error))))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _log_failure(self, error: Exception) -> Refusal:
        refusal = Refusal.from_error(error)
        self._metrics.count_failure(refusal.status)
        request_id, words = self._head.request_id, "%s failed in mid-stream with %d: %s"
        log.error(words, request_id, refusal.status, refusal.message)
        if refusal.kind is INTERNAL:
            log_redacted(log, request_id, error, log_prompts=self._log_prompts)
        return refusal


async def _send_json(send: Send, content: object, figures: list[tuple[bytes, bytes]]) -> None:
    body = to_json(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *figures,
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
