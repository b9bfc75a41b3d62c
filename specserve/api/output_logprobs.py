"""Logprobs of output tokens in the formats of completions and of chats."""

from __future__ import annotations

from specserve.api.continuation import OutputDelta
from specserve.api.detokenizer import IncrementalDetokenizer
from specserve.api.tokenizer import Tokenizer
from specserve.types import Logprobs

LOWEST_LOGPROB = -9999.0
"""Logprob of what is impossible. JSON has no infinity; OpenAI sends a very low number, too."""


class CompletionLogprobs:
    """Logprobs in the format of completions: four lists.

    It counts characters, since every token has its offset in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prefix_ids: tuple[int, ...],
        visible_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, prefix_ids, visible_ids=visible_ids)
        self._length = 0

    def first(self, token: int) -> dict[str, object]:
        """Return the lists of the first token of a prompt, which nothing predicts."""
        return {
            "tokens": [token_text(self._tokenizer, token)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._next_offset(token)],
        }

    def start_text(self, offset: int) -> None:
        """Count from the end of the prompt's text, which may differ from that of its tokens."""
        self._length = offset

    def render(self, delta: OutputDelta) -> dict[str, object] | None:
        if delta.logprobs is None:
            return None
        pairs = list(zip(delta.token_ids, delta.logprobs, strict=True))
        return {
            "tokens": [token_text(self._tokenizer, token) for token in delta.token_ids],
            "token_logprobs": [max(logprobs.token, LOWEST_LOGPROB) for logprobs in delta.logprobs],
            "top_logprobs": [self._top(token, logprobs) for token, logprobs in pairs],
            "text_offset": [self._next_offset(token) for token in delta.token_ids],
        }

    def _top(self, token: int, logprobs: Logprobs) -> dict[str, float]:
        """Return the top logprobs by text, the token's own always among them.

        Of two tokens with the same text, the likelier is kept.
        """
        ranked = {token: logprobs.token} | dict(zip(logprobs.top_ids, logprobs.top, strict=True))
        top: dict[str, float] = {}
        for ranked_token, logprob in sorted(ranked.items(), key=lambda pair: -pair[1]):
            top.setdefault(token_text(self._tokenizer, ranked_token), max(logprob, LOWEST_LOGPROB))
        return top

    def _next_offset(self, token: int) -> int:
        offset = self._length
        self._length += len(self._detokenizer.push((token,)))
        return offset


def chat_logprobs(tokenizer: Tokenizer, delta: OutputDelta) -> dict[str, object] | None:
    """Return logprobs in the format of chats: an object for each token."""
    if delta.logprobs is None:
        return None
    content = [
        _token_logprob(tokenizer, token, logprobs.token)
        | {
            "top_logprobs": [
                _token_logprob(tokenizer, other, logprob)
                for other, logprob in zip(logprobs.top_ids, logprobs.top, strict=True)
            ]
        }
        for token, logprobs in zip(delta.token_ids, delta.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _token_logprob(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, object]:
    return {
        "token": token_text(tokenizer, token),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return what a token adds to the text.

    It is `bytes:` with the bytes for a part of a character, and the name for a token without text.
    """
    token_bytes = tokenizer.token_bytes(token)
    if not token_bytes:
        return tokenizer.token_name(token)
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
