"""One continuation in the making: chunks in, pieces of text out. Knows neither who sends the chunks nor who reads the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specserve.api.tokenizer import Text, TextStream
from specserve.api.tools.formats import Spelling
from specserve.api.tools.parse import CallPiece, Calls
from specserve.types import Chunk, Finish, Logprobs, Origin, Stats


@dataclass(frozen=True, slots=True)
class Piece:
    """What one chunk adds: its tokens, up to a stop string, and the text that may be shown by now. `finish` comes with the last."""

    text: str
    token_ids: tuple[int, ...] = ()
    origins: tuple[Origin, ...] = ()
    logprobs: tuple[Logprobs, ...] | None = None
    finish: Finish | None = None
    calls: tuple[CallPiece, ...] | None = None  # None: in this answer there can be none

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Piece:
        """All of them as one."""
        logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        return cls(
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            origins=tuple(origin for piece in pieces for origin in piece.origins),
            logprobs=tuple(logprob for some in logprobs for logprob in some) if logprobs else None,
            finish=pieces[-1].finish if pieces else None,
            calls=tuple(call for piece in pieces for call in piece.calls or ())
            if any(piece.calls is not None for piece in pieces)
            else None,
        )


class Continuation:
    """Holds the tokens that were committed: a request that moves to another engine goes on from `prompt` and `token_ids`."""

    __slots__ = ("_calls", "_stream", "finish", "prompt", "stats", "token_ids")

    def __init__(
        self,
        text: Text,
        prompt: tuple[int, ...],
        *,
        before: tuple[int, ...] | None = None,
        stop: Iterable[str] = (),
        spelling: Spelling | None = None,
    ) -> None:
        """`before` is what the text goes on from, where that is not the prompt; `spelling` is how it calls functions, where it may."""
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.finish: Finish | None = None
        self.stats: Stats | None = None  # the latest that came
        shown = () if spelling is None else spelling.special.values()
        self._stream = TextStream(
            text, prompt if before is None else before, stop=tuple(stop), shown=shown
        )
        self._calls = None if spelling is None else Calls(spelling.format)

    @property
    def stopped(self) -> bool:
        """At a stop string: what may still come is not a part of it, and need not be computed."""
        return self._stream.stopped

    def take(self, chunk: Chunk) -> Piece:
        """The token that ends a text is one of its tokens, and no part of the text."""
        self.stats = chunk.stats or self.stats
        if self.stopped:
            return Piece("")
        before = self._stream.num_tokens
        shown = self._stream.push(
            chunk.tokens[:-1] if chunk.finish is Finish.STOP else chunk.tokens
        )
        if chunk.finish is not None:
            shown += self._stream.finish()
        end = self._stream.num_tokens - before if self.stopped else len(chunk.tokens)
        self.finish = Finish.STOP if self.stopped else chunk.finish
        self.token_ids += chunk.tokens[:end]
        logprobs = None if chunk.logprobs is None else chunk.logprobs[:end]
        content, calls = self._read(shown)
        return Piece(content, chunk.tokens[:end], chunk.origins[:end], logprobs, self.finish, calls)

    def _read(self, text: str) -> tuple[str, tuple[CallPiece, ...] | None]:
        """What of the text is content, and what calls. An answer that has called, and has ended by itself, ended with its calls."""
        if self._calls is None:
            return text, None
        content, calls = self._calls.push(text)
        if self.finish is not None:
            content += self._calls.finish()
            self.finish = (
                Finish.TOOL_CALLS
                if self.finish is Finish.STOP and self._calls.called
                else self.finish
            )
        return content, calls
