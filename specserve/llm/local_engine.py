"""The engine of `LLM` and `AsyncLLM`: a coordinator over its workers, round by round.

It knows prompts and outputs, and no event loops. Threads take turns at its rounds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

from specserve.api.adapter_registry import AdapterRegistry
from specserve.api.bad_words import bad_word_ids, forbid_words
from specserve.api.continuation import Continuation, OutputDelta
from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import Config
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
from specserve.llm.fair_lock import FairLock
from specserve.sampling_params import Sampling
from specserve.types import Chunk, FinishReason, Logprobs, Request, Stats

if TYPE_CHECKING:
    from specserve.llm.inprocess import EngineParts  # which imports torch


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
    # One for each token of the prompt, None for the first, if they were requested.
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None


class LocalEngine:
    """A tokenizer and a coordinator.

    A round belongs to the thread that runs it, and serves the requests of all.
    """

    def __init__(
        self, parts: EngineParts, config: Config, journal: TraceJournal | None = None
    ) -> None:
        self.tokenizer = parts.tokenizer
        recommended: Mapping[str, Any] = parts.info.sampling_defaults
        self.default_sampling = Sampling(**recommended)
        """The parameters of calls without any."""
        self.adapters = AdapterRegistry.from_config(config.model, config.adapters)
        self._vocab_size = parts.info.vocab_size
        self._has_encoder = parts.info.decoder_start is not None
        self._live: dict[int, PendingOutput] = {}
        self.lock = FairLock()
        """Held in a round, and where what rounds bring is read."""
        self.tokenizer_lock = threading.Lock()
        """Held while a prompt becomes tokens, which waits for no round."""
        self._run_round, self._close_parts = parts.run_round, parts.close

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
                remote_workers=parts.remote_workers,
                drafts_prompts=parts.drafts_prompts,
            )

        self._open_coordinator: Callable[[], Coordinator] | None = open_coordinator
        self.coordinator: Coordinator | None = open_coordinator()

    @property
    def has_work(self) -> bool:
        """True if a round would do anything."""
        return self.coordinator is not None and self.coordinator.has_work

    @property
    def is_idle(self) -> bool:
        """True if no sequence is live."""
        return not self._live

    def reopen_after_trouble(self) -> None:
        """Open a new coordinator if the last one gave up all its requests."""
        with self.lock:
            if self.coordinator is None or self._open_coordinator is None or not self.is_idle:
                return
            if self.coordinator.trouble is not None:
                self.coordinator = self._open_coordinator()

    def step(self, waiting: deque[PendingOutput]) -> None:
        """Submit as many as the queue takes, and run one round if there is any work."""
        with self.lock:
            if self.coordinator is None or self._open_coordinator is None:
                raise Overloaded("this LLM is closed")
            self._submit(self.coordinator, waiting)
            if self.coordinator.has_work:  # another thread may have done it
                self._run_round(self.coordinator.round())

    def cancel(self, given_up: Sequence[PendingOutput]) -> None:
        """Cancel those that are live when the next round begins; their chunks are dropped."""
        with self.lock:
            for seq_id in [seq_id for seq_id, one in self._live.items() if one in given_up]:
                if self.coordinator is not None:
                    self.coordinator.cancel(seq_id)
                self._live.pop(seq_id).is_live = False

    def close(self) -> None:
        """Free the models, after the round under way."""
        with self.lock:
            self.coordinator = self._open_coordinator = None
            self._close_parts()

    def continuations(self, prompt: object, sampling: Sampling) -> list[PendingOutput]:
        """Return the `n` continuations of a prompt, with their error if it is faulty."""
        try:
            with self.tokenizer_lock:
                ids = self._prompt_ids(prompt)
                sampling.check_ids(self._vocab_size)
                sampling.check_grammar()
                if self._has_encoder:
                    sampling.check_encoder_input()
                words = bad_word_ids(self.tokenizer, sampling)
            adapter = None if sampling.adapter is None else self.adapters.find(sampling.adapter)
        except BadRequest as error:
            return [
                PendingOutput(self.tokenizer, (), sampling, index=i, error=error)
                for i in range(sampling.n)
            ]
        echo = prompt if isinstance(prompt, str) else None
        prefix_ids = () if self._has_encoder else ids
        return [
            PendingOutput(
                self.tokenizer,
                ids,
                sampling,
                index=i,
                request=request,
                echo=echo,
                prefix_ids=prefix_ids,
            )
            for i, request in enumerate(
                forbid_words(sampling.requests(ids, adapter=adapter), words)
            )
        ]

    def _prompt_ids(self, prompt: object) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        ids = items_of(prompt)
        if ids is None or not all(map(is_id, ids)):
            raise BadValue(
                f"a prompt is text or a list of token ids, not {shortened(prompt)}", param="prompt"
            )
        return tuple(int(token) for token in ids)

    def _submit(self, coordinator: Coordinator, waiting: deque[PendingOutput]) -> None:
        """Submit as many as the queue takes; a request that can never be served gets its error."""
        while waiting:
            try:
                request = waiting[0].request
                assert request is not None
                self._live[coordinator.submit(request)] = waiting[0]
                waiting[0].is_live = True
            except Overloaded:
                return
            except (BadRequest, Displaced) as error:  # Displaced: the engine gave up meanwhile
                waiting[0].error = error
            waiting.popleft()

    def _receive(self, chunks: Sequence[Chunk]) -> None:
        assert self.coordinator is not None
        for chunk in chunks:
            continuation = self._live.get(chunk.seq_id)
            if continuation is None:  # it belongs to a call that was interrupted
                continue
            continuation.add_chunk(chunk)
            if chunk.finish is not None:
                self._live.pop(chunk.seq_id).is_live = False
            elif continuation.hit_stop_string:
                self.coordinator.cancel(chunk.seq_id)


class PendingOutput:
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
            self._echo = tokenizer.decode_to_continue(prompt) if echo is None else echo
        self._pieces: list[OutputDelta] = []
        self._num_taken = 0
        self.is_live = False  # from the submission to the last chunk

    @property
    def hit_stop_string(self) -> bool:
        return self._continuation.hit_stop_string

    def add_chunk(self, chunk: Chunk) -> None:
        if chunk.finish is FinishReason.ERROR and not self.hit_stop_string:
            self.error = WorkerLost(chunk.error or "the request failed")
        self._pieces.append(self._continuation.add_chunk(chunk))

    def take(self) -> OutputDelta | None:
        """Return what came since the last call as one delta; None if nothing did."""
        # Empty pieces come after a stop string.
        pieces = [piece for piece in self._pieces[self._num_taken :] if piece != OutputDelta("")]
        if self._num_taken == 0 and self._echo and pieces:
            pieces = [OutputDelta(self._echo), *pieces]
        self._num_taken = len(self._pieces)
        return OutputDelta.merge(pieces) if pieces else None

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


def items_of(value: object) -> list[Any] | None:
    """Return the items of a list, a tuple, an array or a tensor; None for anything else."""
    if callable(to_list := getattr(value, "tolist", None)):
        value = to_list()
    others = (str, bytes, Mapping, Set)
    return list(value) if isinstance(value, Iterable) and not isinstance(value, others) else None


def is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
