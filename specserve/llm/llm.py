"""`LLM`: the whole engine in this process, without Ray or HTTP.

It feeds prompts to the engine of local_engine.py until all have their outputs.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from reprlib import repr as shortened
from types import TracebackType
from typing import TYPE_CHECKING

from specserve.api.continuation import OutputDelta
from specserve.config.tree import Config, config_from_keys
from specserve.engine.trace import TraceJournal
from specserve.errors import BadValue
from specserve.llm.local_engine import LocalEngine, Output, PendingOutput, is_id, items_of
from specserve.progress import ProgressBar, ReportProgress, no_progress
from specserve.sampling_params import Sampling

if TYPE_CHECKING:
    from specserve.checkpoint_files import Checkpoints
    from specserve.llm.inprocess import EngineParts

__all__ = ["LLM", "Output", "Prompt"]

Prompt = str | Sequence[int]


class LLM:
    """A target, its drafter if there is one, and a coordinator.

    Threads may call it at once: their prompts share its rounds. `close` it, or use it in a `with`
    statement.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | None = None,
        draft: str | os.PathLike[str] | None = None,
        **overrides: object,
    ) -> None:
        """Open local directories, GGUF files or hub names; without any, the demo pair.

        `overrides` are keys of the config tree, dotted or nested.
        """
        paths = {"target.path": target, "draft.path": draft}
        config = config_from_keys(
            overrides, {key: os.fspath(path) for key, path in paths.items() if path is not None}
        )
        self.engine: LocalEngine = self.from_config(config).engine

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
        # Late: it imports torch and transformers, several seconds that importing LLM does not need.
        from specserve.llm.inprocess import open_parts

        report = None if journal is None else journal.record_exchange
        return cls.from_parts(open_parts(config, report, report_progress, require), config, journal)

    @classmethod
    def from_parts(
        cls, parts: EngineParts, config: Config, journal: TraceJournal | None = None
    ) -> LLM:
        """Return an LLM over loaded models."""
        llm = cls.__new__(cls)
        llm.engine = LocalEngine(parts, config, journal)
        return llm

    @property
    def default_sampling(self) -> Sampling:
        """The parameters of calls without any: what the target's checkpoint recommends."""
        return self.engine.default_sampling

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """Continue all prompts together: `n` outputs for the first, then for the second, and so on.

        A faulty prompt fails alone, with `error` in its output; if all are faulty, the first error
        is raised. `progress` draws a bar on stderr.
        """
        given = _prompt_list(prompts)
        samplings = _sampling_list(self.engine, sampling, len(given))
        pending = [
            continuation
            for prompt, own in zip(given, samplings, strict=True)
            for continuation in self.engine.continuations(prompt, own)
        ]
        with ProgressBar(sys.stderr, keeps=True) if progress else nullcontext(no_progress) as bar:
            for num_done in self._rounds(pending):
                bar("prompts", num_done / len(pending), f"{num_done} of {len(pending)}")
        outputs = [continuation.output() for continuation in pending]
        errors = [output.error for output in outputs if output.error is not None]
        if errors and len(errors) == len(outputs):
            raise errors[0]
        return outputs

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None
    ) -> Generator[OutputDelta, None, Output]:
        """Yield the text of one continuation as its rounds commit it, and return the whole.

        Errors are raised. To leave the iterator early cancels the request. Other calls may be made
        between two deltas; they carry the stream on.
        """
        (pending,) = single(self.engine, prompt, sampling)
        for _ in self._rounds([pending]):
            with self.engine.lock:
                delta = pending.take()
            if delta is not None:
                yield delta
        if (rest := pending.take()) is not None:  # which rounds of other calls have brought
            yield rest
        if pending.error is not None:
            raise pending.error
        return pending.output()

    def chat(
        self,
        messages: Sequence[Mapping[str, object]] | Sequence[Sequence[Mapping[str, object]]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """Answer one conversation, or each of several, by the model's chat template."""
        return self.generate(chat_prompts(self.engine, messages), sampling, progress=progress)

    def close(self) -> None:
        """Free the models."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _rounds(self, pending: Sequence[PendingOutput]) -> Iterator[int]:
        """Run rounds until these have finished; yield the number of those after each.

        Left early, or interrupted, their sequences are cancelled for the next call.
        """
        engine = self.engine
        waiting = deque(one for one in pending if one.error is None)
        engine.reopen_after_trouble()
        try:
            while waiting or any(one.is_live for one in pending):
                engine.step(waiting)
                num_live = sum(one.is_live for one in pending)
                yield len(pending) - num_live - len(waiting)
            while engine.is_idle and engine.has_work:  # pages to release
                engine.step(waiting)
        finally:
            engine.cancel(pending)


def _prompt_list(prompts: object) -> Sequence[object]:
    """Return the prompts as a list; one text or one list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    given = items_of(prompts)
    if given is None:
        raise BadValue(
            f"prompts are text, token ids, or a list of both, not {shortened(prompts)}",
            param="prompt",
        )
    return [given] if given and all(map(is_id, given)) else given


def _sampling_list(engine: LocalEngine, sampling: object, count: int) -> Sequence[Sampling]:
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or engine.default_sampling] * count
    given = items_of(sampling)
    if given is None or not all(isinstance(one, Sampling) for one in given):
        raise BadValue(
            f"sampling is a Sampling or a list of them, not {shortened(sampling)}", param="sampling"
        )
    if len(given) != count:
        raise BadValue(f"there are {count} prompts and {len(given)} samplings", param="sampling")
    return given


def single(engine: LocalEngine, prompt: Prompt, sampling: Sampling | None) -> list[PendingOutput]:
    """Return the one continuation of a stream. Raises for a faulty prompt, and for `n` above 1."""
    own = _sampling_list(engine, sampling, 1)[0]
    if own.n != 1:
        raise BadValue(f"a stream is one continuation, and n is {own.n}", param="n")
    pending = engine.continuations(prompt, own)
    if pending[0].error is not None:
        raise pending[0].error
    return pending


def chat_prompts(engine: LocalEngine, messages: object) -> list[tuple[int, ...]]:
    """Return the token ids of one conversation, or of each of several."""
    given = items_of(messages) or []
    chats = [given] if given and isinstance(given[0], Mapping) else [items_of(one) for one in given]
    if not chats or not all(chats):
        raise BadValue(
            f"messages are a conversation or a list of them, not {shortened(messages)}",
            param="messages",
        )
    with engine.tokenizer_lock:
        return [engine.tokenizer.apply_chat_template(chat or []) for chat in chats]
