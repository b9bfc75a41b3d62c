"""Send a generation as OpenAI's response object, or as the events in which it grows."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator, Mapping

from starlette.types import Receive, Scope, Send

from specserve.api.choices import ChatChoice, ResponseKind
from specserve.api.generation import Generation
from specserve.api.generation_request import GenerationRequest
from specserve.api.metering import RequestMetrics
from specserve.api.prompt_logprobs import to_json
from specserve.api.refusal import INTERNAL, Refusal, log_redacted
from specserve.api.response_items.body import ResponsesBody
from specserve.api.response_items.items import Event, OutputItems
from specserve.api.responses import GenerationResponse, ResponseHead
from specserve.api.streamed_response import STREAM_HEADERS, send_event
from specserve.api.tokenizer import Tokenizer
from specserve.types import FinishReason

log = logging.getLogger(__name__)

RESPONSE = ResponseKind("resp_", "response", "response", ChatChoice)


class ItemsResponse(GenerationResponse):
    """A response of items."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        generation_request: GenerationRequest,
        head: ResponseHead,
        metrics: RequestMetrics,
        *,
        body: ResponsesBody,
        log_prompts: bool,
    ) -> None:
        super().__init__(generation, tokenizer, generation_request, head, metrics)
        self._stream, self._log_prompts = generation_request.stream, log_prompts
        self._items = OutputItems(head.request_id)
        self._members = _echo(body, head)
        self._number = 0  # of the next event

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation as generation:
            events = self._events(generation)
            if not self._stream:
                async for event in events:
                    final = event
                await self._send_json(send, final["response"])
                return
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            await send_event(send, self._line(first))
            try:
                async for event in events:
                    await send_event(send, self._line(event))
            except Exception as error:  # the status is sent; in mid-stream the error is an event
                await send_event(send, self._line(self._failure(error)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Yield events; the last one has the whole response."""
        has_begun = False
        finish = None
        async for _, delta in generation:
            if not has_begun:
                has_begun = True
                for kind in ("created", "in_progress"):
                    yield {"type": f"response.{kind}", "response": self._object("in_progress")}
            for event in self._items.add(delta):
                yield event
            finish = delta.finish
        status = "incomplete" if finish is FinishReason.LENGTH else "completed"
        for event in self._items.finish(status):
            yield event
        yield {"type": f"response.{status}", "response": self._object(status)}

    def _object(self, status: str, error: Mapping[str, object] | None = None) -> dict[str, object]:
        ended = status in ("completed", "incomplete")
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._members,
            "status": status,
            "error": error,
            "incomplete_details": reason,
            "output": self._items.finished,
            "usage": self._token_usage() if ended else None,
            **(self._speculation() if ended else {}),
        }

    def _token_usage(self) -> dict[str, object]:
        """Return the counts. How much of the prompt was cached is not known here."""
        read = self._generation.num_prompt_tokens
        written = self._generation.num_completion_tokens
        reasoning = self._generation.num_reasoning_tokens or 0
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": read + written,
        }

    def _line(self, event: Event) -> str:
        number, self._number = self._number, self._number + 1
        return f"event: {event['type']}\ndata: {to_json({**event, 'sequence_number': number})}\n\n"

    def _failure(self, error: Exception) -> Event:
        refusal = Refusal.from_error(error)
        self._metrics.count_failure(refusal.status)
        request_id, words = self._head.request_id, "%s failed in mid-stream with %d: %s"
        log.error(words, request_id, refusal.status, refusal.message)
        if refusal.kind is INTERNAL:
            log_redacted(log, request_id, error, log_prompts=self._log_prompts)
        failure = {"code": "server_error", "message": refusal.message}
        return {"type": "response.failed", "response": self._object("failed", failure)}

    async def _send_json(self, send: Send, content: object) -> None:
        body = to_json(content).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _echo(body: ResponsesBody, head: ResponseHead) -> dict[str, object]:
    """Return the members of a response that repeat its request."""
    text = {} if body.text is None else _given(body.text.model_dump(by_alias=True))
    choice = body.tool_choice
    return {
        "id": head.kind.id_prefix + head.request_id,
        "object": head.kind.object_name,
        "created_at": head.created,
        "model": head.model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "text": {"format": {"type": "text"}, **text},
        "tools": [{"strict": None, "parameters": None} | _tool(tool) for tool in _dumps(body)],
        "tool_choice": choice
        if isinstance(choice, str)
        else "auto"
        if choice is None
        else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None},
        "truncation": "disabled",
        "metadata": body.metadata or {},
        "user": body.user,
        "previous_response_id": None,
        "background": False,
        "store": False,  # whatever was requested: nothing is stored
    }


def _dumps(body: ResponsesBody) -> Iterator[dict[str, object]]:
    return (tool.model_dump() for tool in body.tools or ())


def _tool(members: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in members.items() if value is not None}


def _given(members: dict[str, object]) -> dict[str, object]:
    """Return members without those that are null, in objects inside as well."""
    return {
        name: _given(value) if name == "format" and isinstance(value, dict) else value
        for name, value in members.items()
        if value is not None
    }
