"""How one continuation reads to a client: as a completion, or as the assistant's message in a chat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from specserve.api.continuation import Piece
from specserve.api.logprobs import CompletionLogprobs, chat_logprobs
from specserve.api.parse import Prompt
from specserve.api.tokenizer import Text
from specserve.api.tools.parse import CallPiece, joined
from specserve.api.wording import dumps


class Choice(Protocol):
    """One of a response's `choices`, without its index and finish_reason."""

    def members(
        self, piece: Piece
    ) -> str: ...  # of a streamed chunk: JSON without braces, called once for each piece in turn
    def whole(self, piece: Piece) -> dict[str, object]: ...  # of an answer in one piece


class CompletionChoice:
    def __init__(self, text: Text, prompt: Prompt) -> None:
        self._echo = prompt.echo
        self._logprobs = CompletionLogprobs(text, prompt.before)

    def members(self, piece: Piece) -> str:
        shown, self._echo = self._echo + piece.text, ""
        logprobs = "null" if piece.logprobs is None else dumps(self._logprobs.of(piece))
        return f'"text":{dumps(shown)},"logprobs":{logprobs}'

    def whole(self, piece: Piece) -> dict[str, object]:
        return {"text": self._echo + piece.text, "logprobs": self._logprobs.of(piece)}


class ChatChoice:
    def __init__(self, text: Text, prompt: Prompt) -> None:
        self._text = text
        self._begun: dict[str, object] = {"role": "assistant"}  # in the first chunk

    def members(self, piece: Piece) -> str:
        delta, self._begun = self._begun, {}
        logprobs = "null" if piece.logprobs is None else dumps(chat_logprobs(self._text, piece))
        if piece.text or piece.calls is None or delta:
            delta["content"] = piece.text if piece.text or piece.calls is None else None
        if piece.calls:
            delta["tool_calls"] = [_delta(call) for call in piece.calls]
        return f'"delta":{dumps(delta)},"logprobs":{logprobs}'

    def whole(self, piece: Piece) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message |= {
                "content": piece.text or None,
                "tool_calls": [_called(call) for call in joined(piece.calls)],
            }
        return {"message": message, "logprobs": chat_logprobs(self._text, piece)}


def _called(call: CallPiece) -> dict[str, object]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _delta(call: CallPiece) -> dict[str, object]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_called(call)}


@dataclass(frozen=True, slots=True)
class Form:
    """One of the two ways of asking, as the answer shows it."""

    prefix: str  # of ids
    whole: str  # `object` of an answer in one piece
    chunk: str  # and of a streamed chunk
    choice: Callable[[Text, Prompt], Choice]


COMPLETION = Form("cmpl-", "text_completion", "text_completion", CompletionChoice)
CHAT = Form("chatcmpl-", "chat.completion", "chat.completion.chunk", ChatChoice)
