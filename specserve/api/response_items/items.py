"""The output items of one response, and the events that announce them as they grow.

Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator

from specserve.api.continuation import OutputDelta
from specserve.api.event_response import Event
from specserve.api.tools.parse import CallDelta

PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


class OutputItems:
    """Items of one response: reasoning, a message, calls. One of them grows at a time."""

    def __init__(self, response_id: str) -> None:
        self.finished: list[dict[str, object]] = []
        self._response_id = response_id
        self._kind: str | None = None  # of the item that grows
        self._item: dict[str, object] = {}
        self._text = ""  # of it, so far
        self._call_index = -1

    def add(self, delta: OutputDelta) -> Iterator[Event]:
        """Yield the events of a delta."""
        if delta.reasoning:
            yield from self._add_text("reasoning", delta.reasoning)
        if delta.text:
            yield from self._add_text("message", delta.text)
        for call in delta.calls or ():
            yield from self._add_call(call)

    def finish(self, status: str) -> Iterator[Event]:
        """Yield the events that end the last item; without any, there is an empty message."""
        if self._kind is None and not self.finished:
            yield from self._begin("message", {"role": "assistant", "content": []})
        yield from self._end(status)

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._kind != kind:
            yield from self._end("completed")
            members: dict[str, object] = (
                {"summary": [], "content": []}
                if kind == "reasoning"
                else {"role": "assistant", "content": []}
            )
            yield from self._begin(kind, members)
        self._text += text
        event: Event = {"type": f"response.{_text_type(kind)}.delta", "delta": text}
        yield event | self._place() | _logprobs(kind)

    def _add_call(self, call: CallDelta) -> Iterator[Event]:
        if call.index != self._call_index:
            yield from self._end("completed")
            self._call_index = call.index
            members: dict[str, object] = {"call_id": call.id, "name": call.name, "arguments": ""}
            yield from self._begin("function_call", members)
        if call.arguments:
            self._text += call.arguments
            yield {
                "type": "response.function_call_arguments.delta",
                "delta": call.arguments,
                **self._item_place(),
            }

    def _begin(self, kind: str, members: dict[str, object]) -> Iterator[Event]:
        number = len(self.finished)
        self._kind, self._text = kind, ""
        item_id = f"{PREFIXES[kind]}{self._response_id}_{number}"
        self._item = {"id": item_id, "type": kind, "status": "in_progress", **members}
        yield {
            "type": "response.output_item.added",
            "output_index": number,
            "item": dict(self._item),
        }
        if kind != "function_call":
            yield {
                "type": "response.content_part.added",
                **self._place(),
                "part": _part(kind, ""),
            }

    def _end(self, status: str) -> Iterator[Event]:
        kind, text, place = self._kind, self._text, self._item_place()
        if kind is None:
            return
        if kind == "function_call":
            yield {
                "type": "response.function_call_arguments.done",
                "name": self._item["name"],
                "arguments": text,
                **place,
            }
            members: dict[str, object] = {"arguments": text}
        else:
            part = _part(kind, text)
            done: Event = {"type": f"response.{_text_type(kind)}.done", "text": text}
            yield done | self._place() | _logprobs(kind)
            yield {"type": "response.content_part.done", "part": part, **self._place()}
            members = {"content": [part]}
        item = {**self._item, **members, "status": status}
        number = len(self.finished)
        self.finished.append(item)
        self._kind = None
        yield {"type": "response.output_item.done", "output_index": number, "item": item}

    def _item_place(self) -> Event:
        return {"item_id": self._item.get("id"), "output_index": len(self.finished)}

    def _place(self) -> Event:
        return {**self._item_place(), "content_index": 0}


def _text_type(kind: str) -> str:
    return "reasoning_text" if kind == "reasoning" else "output_text"


def _part(kind: str, text: str) -> dict[str, object]:
    part: dict[str, object] = {"type": _text_type(kind), "text": text}
    return part if kind == "reasoning" else {**part, "annotations": [], "logprobs": []}


def _logprobs(kind: str) -> Event:
    """Return the member that events of messages must have; it is always empty here."""
    return {} if kind == "reasoning" else {"logprobs": []}
