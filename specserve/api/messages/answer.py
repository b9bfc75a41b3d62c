"""Send a generation as Anthropic's message, or as the events in which it grows."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from specserve.api.choices import ChatChoice, ResponseKind
from specserve.api.event_response import Event, EventResponse
from specserve.api.generation import Generation
from specserve.api.generation_request import GenerationRequest
from specserve.api.messages.content import MessageContent
from specserve.api.messages.errors import messages_error
from specserve.api.metering import RequestMetrics
from specserve.api.refusal import Refusal
from specserve.api.responses import ResponseHead
from specserve.api.tokenizer import Tokenizer
from specserve.types import FinishReason

MESSAGE = ResponseKind("msg_", "message", "message", ChatChoice)
STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


class MessageResponse(EventResponse):
    """A response of content blocks."""

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
        super().__init__(
            generation, tokenizer, generation_request, head, metrics, log_prompts=log_prompts
        )
        self._content = MessageContent()
        self._end: dict[str, object] = {"stop_reason": None, "stop_sequence": None}

    async def _events(self, generation: Generation) -> AsyncGenerator[Event, None]:
        has_begun = False
        async for _, delta in generation:
            if not has_begun:
                has_begun = True
                yield {"type": "message_start", "message": self._message(num_written=0)}
            for event in self._content.add(delta):
                yield event
        for event in self._content.finish():
            yield event
        self._end = self._stop_members()
        usage = self._message_usage(generation.num_completion_tokens)
        yield {"type": "message_delta", "delta": self._end, "usage": usage, **self._speculation()}
        yield {"type": "message_stop"}

    def _whole(self) -> dict[str, object]:
        return self._message(self._generation.num_completion_tokens) | self._speculation()

    def _failure(self, refusal: Refusal) -> Event:
        kind = refusal.kind
        _, error = messages_error(
            kind.status, kind.type, kind.code, refusal.message, self._head.request_id
        )
        return error

    def _message(self, num_written: int) -> dict[str, object]:
        return {
            "id": self._head.kind.id_prefix + self._head.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": self._content.finished,
            **self._end,
            "usage": self._message_usage(num_written),
        }

    def _message_usage(self, num_written: int) -> dict[str, object]:
        """Return the counts; tokens of the prompt that were cached are no input tokens."""
        cached = self._generation.num_cached_tokens
        usage: dict[str, object] = {
            "input_tokens": self._generation.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": num_written,
        }
        if num_written and (thinking := self._generation.num_reasoning_tokens) is not None:
            usage["output_tokens_details"] = {"thinking_tokens": thinking}
        return usage

    def _stop_members(self) -> dict[str, object]:
        (continuation,) = self._generation.continuations
        assert continuation.finish is not None
        sequence = continuation.stop_string if continuation.finish is FinishReason.STOP else None
        reason = STOP_REASONS[continuation.finish] if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}
