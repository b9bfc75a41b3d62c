"""Logprobs in OpenAI's two formats. JSON has no infinity, so what is impossible gets a very low number, as OpenAI's has."""

from __future__ import annotations

from specserve.api.continuation import Piece
from specserve.api.tokenizer import Text, TextStream
from specserve.types import Logprobs

LOWEST = -9999.0


class CompletionLogprobs:
    """Of completions: four lists. Counts characters, since each token says where in the text it begins."""

    def __init__(self, text: Text, prompt: tuple[int, ...]) -> None:
        self._text = text
        self._stream = TextStream(text, prompt)
        self._length = 0

    def of(self, piece: Piece) -> dict[str, object] | None:
        if piece.logprobs is None:
            return None
        pairs = list(zip(piece.token_ids, piece.logprobs, strict=True))
        return {
            "tokens": [_label(self._text, token) for token in piece.token_ids],
            "token_logprobs": [max(logprobs.token, LOWEST) for logprobs in piece.logprobs],
            "top_logprobs": [self._top(token, logprobs) for token, logprobs in pairs],
            "text_offset": [self._offset(token) for token in piece.token_ids],
        }

    def _top(self, token: int, logprobs: Logprobs) -> dict[str, float]:
        """The token itself is always among them. Of two that read the same, the likelier stays."""
        ranked = {token: logprobs.token} | dict(zip(logprobs.top_ids, logprobs.top, strict=True))
        top: dict[str, float] = {}
        for ranked_token, logprob in sorted(ranked.items(), key=lambda pair: -pair[1]):
            top.setdefault(_label(self._text, ranked_token), max(logprob, LOWEST))
        return top

    def _offset(self, token: int) -> int:
        offset = self._length
        self._length += len(self._stream.push((token,)))
        return offset


def chat_logprobs(text: Text, piece: Piece) -> dict[str, object] | None:
    """Of chats: an object for each token."""
    if piece.logprobs is None:
        return None
    content = [
        _scored(text, token, logprobs.token)
        | {
            "top_logprobs": [
                _scored(text, other, logprob)
                for other, logprob in zip(logprobs.top_ids, logprobs.top, strict=True)
            ]
        }
        for token, logprobs in zip(piece.token_ids, piece.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _scored(text: Text, token: int, logprob: float) -> dict[str, object]:
    return {
        "token": _label(text, token),
        "logprob": max(logprob, LOWEST),
        "bytes": list(text.piece(token)),
    }


def _label(text: Text, token: int) -> str:
    """What the token adds to the text; of half a character its bytes, of a token without text its name."""
    piece = text.piece(token)
    if not piece:
        return text.name(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
