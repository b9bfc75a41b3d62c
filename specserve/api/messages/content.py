"""The content blocks of one message, and the events that announce them as they grow.

Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic_core import from_json

from specserve.api.continuation import OutputDelta
from specserve.api.event_response import Event
from specserve.api.tools.parse import CallDelta

Block = dict[str, object]
EMPTY_BLOCKS: dict[str, Block] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessageContent:
    """Blocks of one message: thinking, text, calls. One of them grows at a time."""

    def __init__(self) -> None:
        self.finished: list[Block] = []
        self._block: Block | None = None  # that grows
        self._text = ""  # of it, so far
        self._call_index = -1

    def add(self, delta: OutputDelta) -> Iterator[Event]:
        """Yield the events of a delta."""
        for kind, text in (("thinking", delta.reasoning), ("text", delta.text)):
            if text:
                yield from self._add_text(kind, text)
        for call in delta.calls or ():
            yield from self._add_call(call)

    def finish(self) -> Iterator[Event]:
        """Yield the event that ends the last block."""
        block = self._block
        if block is None:
            return
        kind = str(block["type"])
        if kind == "tool_use":
            block["input"] = _parse_input(self._text)
        else:
            block[kind] = self._text
        yield {"type": "content_block_stop", "index": len(self.finished)}
        self.finished.append(block)
        self._block = None

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._block is None or self._block["type"] != kind:
            yield from self._begin(dict(EMPTY_BLOCKS[kind]))
        yield self._delta(f"{kind}_delta", kind, text)

    def _add_call(self, call: CallDelta) -> Iterator[Event]:
        if call.index != self._call_index:
            self._call_index = call.index
            block: Block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._begin(block)
        if call.arguments:
            yield self._delta("input_json_delta", "partial_json", call.arguments)

    def _begin(self, block: Block) -> Iterator[Event]:
        yield from self.finish()
        self._block, self._text = block, ""
        yield {
            "type": "content_block_start",
            "index": len(self.finished),
            "content_block": dict(block),
        }

    def _delta(self, kind: str, member: str, text: str) -> Event:
        self._text += text
        delta = {"type": kind, member: text}
        return {"type": "content_block_delta", "index": len(self.finished), "delta": delta}


def _parse_input(arguments: str) -> object:
    """Return a call's arguments; of a call that was cut, those that are whole."""
    try:
        parsed = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
