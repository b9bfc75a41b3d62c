"""Turn the chunks of one continuation into text, tokens and tool calls. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specserve.api.detokenizer import IncrementalDetokenizer
from specserve.api.reasoning.formats import PromptReasoning
from specserve.api.reasoning.parse import new_parser
from specserve.api.tokenizer import Tokenizer
from specserve.api.tools.formats import ModelCallFormat
from specserve.api.tools.parse import CallDelta, CallParser
from specserve.types import Chunk, FinishReason, Logprobs, Origin, PromptLogprobs, Stats


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """The tokens of one chunk, up to a stop string, and the text that can be emitted by now.

    `finish` is set in the last delta of a continuation.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    origins: tuple[Origin, ...] = ()
    logprobs: tuple[Logprobs, ...] | None = None
    finish: FinishReason | None = None
    calls: tuple[CallDelta, ...] | None = None  # None: this continuation cannot call tools
    reasoning: str = ""
    prompt_logprobs: PromptLogprobs | None = None  # of all of the prompt, in the first delta

    @property
    def is_empty(self) -> bool:
        """True for a chunk that had only logprobs of a part of the prompt."""
        return not self.token_ids and not self.text and self.finish is None

    @classmethod
    def merge(cls, deltas: Sequence[OutputDelta]) -> OutputDelta:
        """Return successive deltas as one."""
        logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
        return cls(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            origins=tuple(origin for delta in deltas for origin in delta.origins),
            logprobs=tuple(logprob for some in logprobs for logprob in some) if logprobs else None,
            finish=deltas[-1].finish if deltas else None,
            calls=tuple(call for delta in deltas for call in delta.calls or ())
            if any(delta.calls is not None for delta in deltas)
            else None,
            prompt_logprobs=next(
                (one.prompt_logprobs for one in deltas if one.prompt_logprobs is not None), None
            ),
            reasoning="".join(delta.reasoning for delta in deltas),
        )


class Continuation:
    """One continuation of a prompt: its committed tokens, text and finish reason.

    A request that moves to another engine is resumed from `prompt` and `token_ids`.
    """

    __slots__ = (
        "_call_parser",
        "_detokenizer",
        "_includes_stop",
        "_prompt_parts",
        "_reasoning_parser",
        "finish",
        "num_reasoning_tokens",
        "prompt",
        "stats",
        "time_to_first_token",
        "token_ids",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: tuple[int, ...],
        *,
        prefix_ids: tuple[int, ...] | None = None,
        stop: Iterable[str] = (),
        min_tokens: int = 0,
        call_format: ModelCallFormat | None = None,
        reasoning: PromptReasoning | None = None,
        includes_stop: bool = False,
        shows_special: bool = False,
    ) -> None:
        """Start an empty continuation.

        `prefix_ids` are the tokens before the text where these are not the prompt, as for an
        encoder-decoder. No stop string ends the first `min_tokens` tokens. `call_format` is how
        the text calls tools, if it may, and `reasoning` how it begins with reasoning. If it
        `includes_stop`, the text ends with what stopped it; `shows_special` is for the names of
        special tokens.
        """
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.finish: FinishReason | None = None
        self.stats: Stats | None = None  # the latest received
        self.time_to_first_token: float | None = None  # seconds from the HTTP request's arrival
        self._prompt_parts: list[PromptLogprobs] = []  # up to the first tokens
        self._includes_stop = includes_stop
        visible_ids = {
            *(() if call_format is None else call_format.special_ids.values()),
            *(() if reasoning is None else reasoning.model.marker_ids.values()),
            *(tokenizer.special_ids if shows_special else ()),
        }
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt if prefix_ids is None else prefix_ids,
            stop=tuple(stop),
            min_tokens=min_tokens,
            visible_ids=visible_ids,
            includes_stop=includes_stop,
        )
        self._call_parser = (
            None if call_format is None else CallParser(call_format.format, kinds=call_format.kinds)
        )
        has_calls = call_format is not None and call_format.format.is_channel
        self._reasoning_parser = (
            None if reasoning is None else new_parser(reasoning, has_calls=has_calls)
        )
        self.num_reasoning_tokens = 0  # up to the one that ends the reasoning

    @property
    def hit_stop_string(self) -> bool:
        """True after a stop string. Tokens that follow are dropped and need not be computed."""
        return self._detokenizer.hit_stop_string

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._detokenizer.stop_string

    def add_chunk(self, chunk: Chunk) -> OutputDelta:
        """Add a chunk and return what it adds.

        The token that ends a text counts as one of its tokens and adds no text, unless the text
        includes what stopped it.
        """
        self.stats = chunk.stats or self.stats
        self._add_prompt_logprobs(chunk.prompt_logprobs)
        detokenizer = self._detokenizer
        if detokenizer.hit_stop_string:
            return OutputDelta("")
        num_before = detokenizer.num_tokens
        is_hidden = chunk.finish is FinishReason.STOP and not self._includes_stop
        shown = chunk.tokens[:-1] if is_hidden else chunk.tokens
        reasoning, text = self._split_reasoning(shown, is_last=chunk.finish is not None)
        self.finish, end = chunk.finish, len(chunk.tokens)
        if detokenizer.hit_stop_string:
            self.finish, end = FinishReason.STOP, detokenizer.num_tokens - num_before
        self.token_ids += chunk.tokens[:end]
        logprobs = None if chunk.logprobs is None else chunk.logprobs[:end]
        content, calls = self._parse_calls(text)
        return OutputDelta(
            content,
            chunk.tokens[:end],
            chunk.origins[:end],
            logprobs,
            self.finish,
            calls,
            reasoning,
            self._take_prompt_logprobs() if chunk.tokens or chunk.finish else None,
        )

    def _add_prompt_logprobs(self, part: PromptLogprobs | None) -> None:
        """Keep a part, and drop what it repeats: a preempted prompt is computed from its start."""
        if part is not None:
            self._prompt_parts = [one for one in self._prompt_parts if one.start < part.start]
            assert part.start == (self._prompt_parts[-1].stop if self._prompt_parts else 1)
            self._prompt_parts.append(part)

    def _take_prompt_logprobs(self) -> PromptLogprobs | None:
        parts, self._prompt_parts = self._prompt_parts, []
        return PromptLogprobs.join(parts) if parts else None

    def _split_reasoning(self, tokens: Sequence[int], *, is_last: bool) -> tuple[str, str]:
        """Return what tokens add to the reasoning, and to the text after it."""
        parser = self._reasoning_parser
        if parser is None:
            text = self._detokenizer.push(tokens)
            return "", text + (self._detokenizer.finish() if is_last else "")
        parts = []
        for token in tokens:  # one by one, so that the reasoning's can be counted
            if self._detokenizer.hit_stop_string:
                break
            self.num_reasoning_tokens += parser.is_reasoning
            parts.append(parser.push(self._detokenizer.push((token,))))
        if is_last or self._detokenizer.hit_stop_string:
            parts += [parser.push(self._detokenizer.finish()), parser.finish()]
        return "".join(part[0] for part in parts), "".join(part[1] for part in parts)

    def _parse_calls(self, text: str) -> tuple[str, tuple[CallDelta, ...] | None]:
        """Split text into content and calls.

        A continuation that stopped by itself after complete calls has the finish reason
        `tool_calls`.
        """
        if self._call_parser is None:
            return text, None
        content, calls = self._call_parser.push(text)
        if self.finish is not None:
            content += self._call_parser.finish()
            self.finish = (
                FinishReason.TOOL_CALLS
                if self.finish is FinishReason.STOP and self._call_parser.has_complete_calls
                else self.finish
            )
        return content, calls
