"""`LLM`: the whole engine in this process, without Ray or HTTP.

It feeds prompts to a coordinator and gathers the chunks that it emits.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from reprlib import repr as shortened
from types import TracebackType
from typing import Any

from specserve.api.bad_words import bad_word_ids, forbid_words
from specserve.api.continuation import Continuation, OutputDelta
from specserve.api.tokenizer import Tokenizer
from specserve.checkpoint_files import Checkpoints
from specserve.config.tree import Config, config_from_keys
from specserve.engine import Coordinator
from specserve.engine.trace import TraceJournal
from specserve.errors import (
    BadRequest,
    BadValue,
    Displaced,
    Overloaded,
    SpecserveError,
    WorkerLost,
)
from specserve.inprocess import EngineParts, open_parts
from specserve.progress import ReportProgress, no_progress
from specserve.sampling_params import Sampling
from specserve.types import Chunk, FinishReason, Logprobs, Request, Stats

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Output:
    """One continuation, or the `error` that prevented it; `finish_reason` is "error" then."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[Logprobs, ...] | None = None
    stats: Stats | None = None
    prompt_token_ids: tuple[int, ...] = ()
    index: int = 0  # among the n of its prompt
    error: SpecserveError | None = None
    # One for each token of the prompt, None for the first, if they were asked for.
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None


class LLM:
    """A target, its drafter if there is one, and a coordinator.

    It serves one thread at a time; `close` it, or use it in a `with` statement.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | None = None,
        draft: str | os.PathLike[str] | None = None,
        **overrides: object,
    ) -> None:
        """Open local directories or hub names; without any, the demo pair.

        `overrides` are keys of the config tree, dotted or nested.
        """
        paths = {"target.path": target, "draft.path": draft}
        config = config_from_keys(
            overrides, {key: os.fspath(path) for key, path in paths.items() if path is not None}
        )
        self._start(open_parts(config), config)

    @classmethod
    def from_config(
        cls,
        config: Config,
        journal: TraceJournal | None = None,
        report_progress: ReportProgress = no_progress,
        require: Callable[[Checkpoints], None] | None = None,
    ) -> LLM:
        """Open an LLM from a parsed config.

        The journal, if there is one, records all rounds and exchanges; `report_progress` is called
        while the models are loaded, and `require` with their files before.
        """
        report = None if journal is None else journal.record_exchange
        return cls.from_parts(open_parts(config, report, report_progress, require), config, journal)

    @classmethod
    def from_parts(
        cls, parts: EngineParts, config: Config, journal: TraceJournal | None = None
    ) -> LLM:
        """Return an LLM over loaded models."""
        llm = cls.__new__(cls)
        llm._start(parts, config, journal)
        return llm

    def _start(
        self, parts: EngineParts, config: Config, journal: TraceJournal | None = None
    ) -> None:
        self._tokenizer = parts.tokenizer
        self._vocab_size = parts.info.vocab_size
        self._has_encoder = parts.info.decoder_start is not None
        self._live: dict[int, _PendingOutput] = {}

        def open_coordinator() -> Coordinator:
            return Coordinator(
                parts.target,
                parts.drafter,
                info=parts.info,
                limits=config.limits,
                speculation=config.speculation,
                emit=self._receive,
                report=None if journal is None else journal.record_round,
                draft_context=parts.draft_context,
                drafts_prompts=False,  # the first token would wait for both
            )

        self._open_coordinator: Callable[[], Coordinator] | None = open_coordinator
        self._coordinator: Coordinator | None = open_coordinator()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> list[Output]:
        """Continue all prompts together: `n` outputs for the first, then for the second, and so on.

        A faulty prompt fails alone, with `error` in its output; if all are faulty, the first error
        is raised.
        """
        given = _prompt_list(prompts)
        pending = [
            continuation
            for prompt, own in zip(given, _sampling_list(sampling, len(given)), strict=True)
            for continuation in self._continuations(prompt, own)
        ]
        self._complete(pending)
        outputs = [continuation.output() for continuation in pending]
        errors = [output.error for output in outputs if output.error is not None]
        if errors and len(errors) == len(outputs):
            raise errors[0]
        return outputs

    def close(self) -> None:
        """Free the models."""
        self._coordinator = self._open_coordinator = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _continuations(self, prompt: object, sampling: Sampling) -> list[_PendingOutput]:
        try:
            ids = self._prompt_ids(prompt)
            sampling.check_ids(self._vocab_size)
            sampling.check_grammar()
            if self._has_encoder:
                sampling.check_encoder_input()
            words = bad_word_ids(self._tokenizer, sampling)
        except BadRequest as error:
            return [
                _PendingOutput(self._tokenizer, (), sampling, index=i, error=error)
                for i in range(sampling.n)
            ]
        echo = prompt if isinstance(prompt, str) else None
        prefix_ids = () if self._has_encoder else ids
        return [
            _PendingOutput(
                self._tokenizer,
                ids,
                sampling,
                index=i,
                request=request,
                echo=echo,
                prefix_ids=prefix_ids,
            )
            for i, request in enumerate(forbid_words(sampling.requests(ids), words))
        ]

    def _prompt_ids(self, prompt: object) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        ids = _items(prompt)
        if ids is None or not all(map(_is_id, ids)):
            raise BadValue(
                f"a prompt is text or a list of token ids, not {shortened(prompt)}", param="prompt"
            )
        return tuple(int(token) for token in ids)

    def _complete(self, pending: Sequence[_PendingOutput]) -> None:
        """Run rounds until all continuations have finished.

        If it is interrupted, their sequences are cancelled for the next call.
        """
        if self._coordinator is None or self._open_coordinator is None:
            raise Overloaded("this LLM is closed")
        if self._coordinator.trouble is not None:  # it gave up the requests of an earlier call
            self._coordinator = self._open_coordinator()
        waiting = deque(continuation for continuation in pending if continuation.error is None)
        try:
            while waiting or self._coordinator.has_work:
                self._submit(self._coordinator, waiting)
                _run_to_end(self._coordinator.round())
        finally:
            for seq_id in self._live:
                self._coordinator.cancel(seq_id)
            self._live.clear()

    def _submit(self, coordinator: Coordinator, waiting: deque[_PendingOutput]) -> None:
        """Submit as many as the queue takes; a request that can never be served gets its error."""
        while waiting:
            try:
                request = waiting[0].request
                assert request is not None
                self._live[coordinator.submit(request)] = waiting[0]
            except Overloaded:
                return
            except (BadRequest, Displaced) as error:  # Displaced: the engine gave up meanwhile
                waiting[0].error = error
            waiting.popleft()

    def _receive(self, chunks: Sequence[Chunk]) -> None:
        assert self._coordinator is not None
        for chunk in chunks:
            continuation = self._live.get(chunk.seq_id)
            if continuation is None:  # it belongs to a call that was interrupted
                continue
            continuation.add_chunk(chunk)
            if chunk.finish is not None:
                del self._live[chunk.seq_id]
            elif continuation.hit_stop_string:
                self._coordinator.cancel(chunk.seq_id)


class _PendingOutput:
    """One output while its chunks arrive."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: tuple[int, ...],
        sampling: Sampling,
        *,
        index: int,
        request: Request | None = None,
        echo: str | None = None,
        prefix_ids: tuple[int, ...] | None = None,
        error: SpecserveError | None = None,
    ) -> None:
        self.request, self.error = request, error
        self._index = index
        self._continuation = Continuation(
            tokenizer,
            prompt,
            prefix_ids=prefix_ids,
            stop=sampling.stops,
            min_tokens=sampling.min_tokens,
            includes_stop=sampling.include_stop_str_in_output,
            shows_special=not sampling.skip_special_tokens,
        )
        self._echo = ""
        if sampling.echo:
            self._echo = tokenizer.decode(prompt) if echo is None else echo
        self._pieces: list[OutputDelta] = []

    @property
    def hit_stop_string(self) -> bool:
        return self._continuation.hit_stop_string

    def add_chunk(self, chunk: Chunk) -> None:
        if chunk.finish is FinishReason.ERROR and not self.hit_stop_string:
            self.error = WorkerLost(chunk.error or "the request failed")
        self._pieces.append(self._continuation.add_chunk(chunk))

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
        piece = OutputDelta.merge(self._pieces)
        return Output(
            text=self._echo + piece.text,
            token_ids=piece.token_ids,
            finish_reason=done.finish.value,
            logprobs=piece.logprobs,
            stats=done.stats,
            prompt_token_ids=done.prompt,
            index=self._index,
            prompt_logprobs=_prompt_logprobs(piece),
        )


def _prompt_logprobs(delta: OutputDelta) -> tuple[Logprobs | None, ...] | None:
    """Return the prompt's logprobs one by one."""
    logprobs = delta.prompt_logprobs
    return None if logprobs is None else (None, *logprobs.rows(0, len(logprobs)))


def _run_to_end(round_: Coroutine[Any, Any, None]) -> None:
    """Run a round whose workers answer at once.

    It never waits, so it needs no event loop, and a notebook may have its own.
    """
    try:
        round_.send(None)
    except StopIteration:
        return
    raise AssertionError("a worker in this process has made the round wait")


def _prompt_list(prompts: object) -> Sequence[object]:
    """Return the prompts as a list; one text or one list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    given = _items(prompts)
    if given is None:
        raise BadValue(
            f"prompts are text, token ids, or a list of both, not {shortened(prompts)}",
            param="prompt",
        )
    return [given] if given and all(map(_is_id, given)) else given


def _sampling_list(sampling: object, count: int) -> Sequence[Sampling]:
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
    """Return the items of a list, a tuple or an array; None for anything else."""
    return (
        list(value)
        if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
        else None
    )


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
