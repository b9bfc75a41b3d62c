"""Send a generation as OpenAI's response object, or as the events in which it grows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping

from specserve.api.choices import ChatChoice, ResponseKind
from specserve.api.event_response import Event, EventResponse
from specserve.api.generation import Generation
from specserve.api.generation_request import GenerationRequest
from specserve.api.metering import RequestMetrics
from specserve.api.refusal import Refusal
from specserve.api.response_items.body import ResponsesBody
from specserve.api.response_items.items import OutputItems
from specserve.api.responses import ResponseHead
from specserve.api.tokenizer import Tokenizer
from specserve.sampling_params import Sampling
from specserve.types import FinishReason

RESPONSE = ResponseKind("resp_", "response", "response", ChatChoice)


class ItemsResponse(EventResponse):
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
        super().__init__(
            generation, tokenizer, generation_request, head, metrics, log_prompts=log_prompts
        )
        self._items = OutputItems(head.request_id)
        self._members = _echo(body, generation_request.sampling, head)
        self._status = "in_progress"
        self._number = 0  # of the next event

    async def _events(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Yield events; the last one has the whole response."""
        has_begun = False
        finish = None
        async for _, delta in generation:
            if not has_begun:
                has_begun = True
                for kind in ("created", "in_progress"):
                    yield {"type": f"response.{kind}", "response": self._object(self._status)}
            for event in self._items.add(delta):
                yield event
            finish = delta.finish
        self._status = "incomplete" if finish is FinishReason.LENGTH else "completed"
        for event in self._items.finish(self._status):
            yield event
        yield {"type": f"response.{self._status}", "response": self._object(self._status)}

    def _whole(self) -> dict[str, object]:
        return self._object(self._status)

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
        cached = self._generation.num_cached_tokens
        read = self._generation.num_prompt_tokens
        written = self._generation.num_completion_tokens
        reasoning = self._generation.num_reasoning_tokens or 0
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": read + written,
        }

    def _line(self, event: Event) -> str:
        number, self._number = self._number, self._number + 1
        return super()._line({**event, "sequence_number": number})

    def _failure(self, refusal: Refusal) -> Event:
        failure = {"code": "server_error", "message": refusal.message}
        return {"type": "response.failed", "response": self._object("failed", failure)}


def _echo(body: ResponsesBody, sampling: Sampling, head: ResponseHead) -> dict[str, object]:
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
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
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
