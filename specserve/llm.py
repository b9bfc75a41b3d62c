"""`LLM`: the whole engine in this process, without Ray or HTTP. Feeds prompts to a coordinator and gathers what it emits."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from reprlib import repr as shortened
from types import TracebackType
from typing import Any

from specserve.api.continuation import Continuation, Piece
from specserve.api.tokenizer import Text
from specserve.config.tree import Config, parse
from specserve.engine import Coordinator
from specserve.engine.trace import Journal
from specserve.errors import BadRequest, BadValue, Overloaded, SpecserveError, WorkerLost
from specserve.inprocess import Parts, open_parts
from specserve.progress import Tell, silent
from specserve.sampling_params import Sampling
from specserve.types import Chunk, Finish, Logprobs, Request, Stats

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Output:
    """One continuation. `error` says why there is none; `finish_reason` is "error" then."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[Logprobs, ...] | None = None
    stats: Stats | None = None
    prompt_token_ids: tuple[int, ...] = ()
    index: int = 0  # among the n of its prompt
    error: SpecserveError | None = None


class LLM:
    """A target, what drafts for it, and a coordinator. For one thread at a time; `close` it, or use it in a `with`."""

    def __init__(
        self,
        target: str | os.PathLike[str] | None = None,
        draft: str | os.PathLike[str] | None = None,
        **overrides: object,
    ) -> None:
        """Local directories or hub names; without any, the demo pair. `overrides` are keys of the config tree, dotted or nested."""
        paths = {"target.path": target, "draft.path": draft}
        config = parse(
            overrides, {key: os.fspath(path) for key, path in paths.items() if path is not None}
        )
        self._start(open_parts(config), config)

    @classmethod
    def of(cls, config: Config, journal: Journal | None = None, tell: Tell = silent) -> LLM:
        """An LLM by a config that is parsed already. The journal, if one is given, hears of all that happens; `tell` of how far opening has come."""
        return cls.over(
            open_parts(config, None if journal is None else journal.exchange, tell), config, journal
        )

    @classmethod
    def over(cls, parts: Parts, config: Config, journal: Journal | None = None) -> LLM:
        """An LLM over parts that are open already."""
        llm = cls.__new__(cls)
        llm._start(parts, config, journal)
        return llm

    def _start(self, parts: Parts, config: Config, journal: Journal | None = None) -> None:
        self._text = parts.text
        self._vocab_size = parts.info.vocab_size
        self._encodes = parts.info.decoder_start is not None
        self._live: dict[int, _Wanted] = {}
        self._coordinator: Coordinator | None = Coordinator.of(
            config,
            parts.target,
            parts.drafter,
            info=parts.info,
            emit=self._receive,
            draft_context=parts.draft_context,
            report=None if journal is None else journal.record,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> list[Output]:
        """Continues every prompt, all together: `n` outputs for the first, then for the second, and so on.

        A faulty prompt fails alone, with `error` in its output; if all are faulty, the first error is raised.
        """
        given = _prompts(prompts)
        asked = [
            continuation
            for prompt, wanted in zip(given, _samplings(sampling, len(given)), strict=True)
            for continuation in self._continuations(prompt, wanted)
        ]
        self._complete(asked)
        outputs = [continuation.output() for continuation in asked]
        errors = [output.error for output in outputs if output.error is not None]
        if errors and len(errors) == len(outputs):
            raise errors[0]
        return outputs

    def close(self) -> None:
        """Lets go of the models."""
        self._coordinator = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _continuations(self, prompt: object, sampling: Sampling) -> list[_Wanted]:
        try:
            ids = self._prompt_ids(prompt)
            sampling.check_ids(self._vocab_size)
            sampling.check_grammar()
            if self._encodes:
                sampling.check_source()
        except BadRequest as error:
            return [
                _Wanted(self._text, (), sampling, index=i, error=error) for i in range(sampling.n)
            ]
        echo = prompt if isinstance(prompt, str) else None
        before = () if self._encodes else ids
        return [
            _Wanted(self._text, ids, sampling, index=i, request=request, echo=echo, before=before)
            for i, request in enumerate(sampling.requests(ids))
        ]

    def _prompt_ids(self, prompt: object) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._text.encode(prompt)
        ids = _items(prompt)
        if ids is None or not all(map(_is_id, ids)):
            raise BadValue(
                f"a prompt is text or a list of token ids, not {shortened(prompt)}", param="prompt"
            )
        return tuple(int(token) for token in ids)

    def _complete(self, asked: Sequence[_Wanted]) -> None:
        """Rounds until all is said. When interrupted, the next call finds the engine free of this one's sequences."""
        if self._coordinator is None:
            raise Overloaded("this LLM is closed")
        waiting = deque(continuation for continuation in asked if continuation.error is None)
        try:
            while waiting or self._coordinator.has_work:
                self._submit(self._coordinator, waiting)
                _completed(self._coordinator.round())
        finally:
            for seq_id in self._live:
                self._coordinator.cancel(seq_id)
            self._live.clear()

    def _submit(self, coordinator: Coordinator, waiting: deque[_Wanted]) -> None:
        """As many as the queue takes; a request that it refuses for good keeps the refusal."""
        while waiting:
            try:
                request = waiting[0].request
                assert request is not None
                self._live[coordinator.submit(request)] = waiting[0]
            except Overloaded:
                return
            except BadRequest as error:
                waiting[0].error = error
            waiting.popleft()

    def _receive(self, chunks: Sequence[Chunk]) -> None:
        assert self._coordinator is not None
        for chunk in chunks:
            continuation = self._live.get(chunk.seq_id)
            if continuation is None:  # of a call that was interrupted
                continue
            continuation.take(chunk)
            if chunk.finish is not None:
                del self._live[chunk.seq_id]
            elif continuation.stopped:
                self._coordinator.cancel(chunk.seq_id)


class _Wanted:
    """One output in the making."""

    def __init__(
        self,
        text: Text,
        prompt: tuple[int, ...],
        sampling: Sampling,
        *,
        index: int,
        request: Request | None = None,
        echo: str | None = None,
        before: tuple[int, ...] | None = None,
        error: SpecserveError | None = None,
    ) -> None:
        self.request, self.error = request, error
        self._index = index
        self._continuation = Continuation(text, prompt, before=before, stop=sampling.stops)
        self._echo = "" if not sampling.echo else text.decode(prompt) if echo is None else echo
        self._pieces: list[Piece] = []

    @property
    def stopped(self) -> bool:
        """At a stop string."""
        return self._continuation.stopped

    def take(self, chunk: Chunk) -> None:
        if chunk.finish is Finish.ERROR and not self.stopped:
            self.error = WorkerLost(chunk.error or "the request failed")
        self._pieces.append(self._continuation.take(chunk))

    def output(self) -> Output:
        done = self._continuation
        if self.error is not None:
            return Output(
                "",
                (),
                "error",
                prompt_token_ids=done.prompt,
                index=self._index,
                stats=done.stats,
                error=self.error,
            )
        assert done.finish is not None, "every request gets a final chunk"
        piece = Piece.joined(self._pieces)
        return Output(
            text=self._echo + piece.text,
            token_ids=piece.token_ids,
            finish_reason=done.finish.value,
            logprobs=piece.logprobs,
            stats=done.stats,
            prompt_token_ids=done.prompt,
            index=self._index,
        )


def _completed(round_: Coroutine[Any, Any, None]) -> None:
    """Runs a round of workers that answer at once: it never waits, so it needs no event loop, and a notebook may have its own."""
    try:
        round_.send(None)
    except StopIteration:
        return
    raise AssertionError("a worker in this process has made the round wait")


def _prompts(prompts: object) -> Sequence[object]:
    """One text or one list of ids is one prompt; anything else is a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    given = _items(prompts)
    if given is None:
        raise BadValue(
            f"prompts are text, token ids, or a list of both, not {shortened(prompts)}",
            param="prompt",
        )
    return [given] if given and all(map(_is_id, given)) else given


def _samplings(sampling: object, count: int) -> Sequence[Sampling]:
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling()] * count
    given = _items(sampling)
    if given is None or not all(isinstance(one, Sampling) for one in given):
        raise BadValue(
            f"sampling is a Sampling or a list of them, not {shortened(sampling)}", param="sampling"
        )
    if len(given) != count:
        raise BadValue(f"there are {count} prompts and {len(given)} samplings", param="sampling")
    return given


def _items(value: object) -> list[Any] | None:
    """A list of what is in a list, a tuple or an array; None for what is no such thing."""
    return (
        list(value)
        if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
        else None
    )


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
