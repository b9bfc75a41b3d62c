"""Whole engines over tiny checkpoints, in this process, for the tests of generated texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from specserve.drafters.anticipation import Anticipation
from specserve.drafters.base import ForkableDrafter
from specserve.drafters.branches import Fanout
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.engine import Coordinator
from specserve.engine.batch import Batch, Outcome
from specserve.engine.sequence import Sequence as Running
from specserve.llm.inprocess import LocalDrafter, LocalTarget, SyncDrafter
from specserve.models.hidden_taps import HiddenTaps
from specserve.models.model import Model, ModelOptions, open_model
from specserve.models.shard import Shard
from specserve.models.target import TargetModel
from specserve.types import (
    Chunk,
    DraftStep,
    FinishReason,
    ModelInfo,
    Origin,
    PromptLogprobs,
    Proposal,
    Request,
    Stats,
    Warp,
)
from tests.support.clock import counting_clock
from tests.support.fakes import open_coordinator

if TYPE_CHECKING:
    from specserve.features.other_tokenizer.translation import TokenTranslation

PAGE_SIZE = 16
GREEDY = Warp(temperature=0)


@dataclass(slots=True)
class Answer:
    """The chunks of one request, joined."""

    tokens: tuple[int, ...] = ()
    origins: tuple[Origin, ...] = ()
    finish: FinishReason | None = None
    stats: Stats | None = None
    error: str | None = None
    prompt_parts: list[PromptLogprobs] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        assert self.finish is None, "a chunk came after the last"
        self.tokens += chunk.tokens
        self.origins += chunk.origins
        self.finish, self.stats, self.error = chunk.finish, chunk.stats, chunk.error
        if (part := chunk.prompt_logprobs) is not None:
            assert len(self.tokens) == len(chunk.tokens), "logprobs of a prompt behind its text"
            self.prompt_parts = [one for one in self.prompt_parts if one.start < part.start]
            assert part.start == (self.prompt_parts[-1].stop if self.prompt_parts else 1)
            self.prompt_parts.append(part)


@dataclass(slots=True)
class Run:
    """The answers of one run of an engine, in the order of the requests."""

    answers: list[Answer]
    num_preempted: int = 0
    num_rounds: int = 0
    texts: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = [answer.tokens for answer in self.answers]

    @property
    def drafted(self) -> int:
        return sum(answer.stats.drafted for answer in self.answers if answer.stats)

    @property
    def accepted(self) -> int:
        return sum(answer.stats.accepted for answer in self.answers if answer.stats)


class PacerLike(Protocol):
    """The part of a pacer that a coordinator uses."""

    deadline: float

    def choose(self, sequences: Sequence[Running]) -> list[int]: ...
    def observe(
        self,
        batch: Batch,
        outcomes: Sequence[Outcome],
        *,
        draft_seconds: float,
        verify_seconds: float,
        round_seconds: float | None = None,
    ) -> None: ...


class RandomPacer:
    """A pacer that picks a random gamma for each sequence in each round, 0 included."""

    deadline = float("inf")

    def __init__(self, *, max_gamma: int, seed: int = 0) -> None:
        self.max_gamma, self.rng = max_gamma, np.random.default_rng(seed)

    def choose(self, sequences: Sequence[Running]) -> list[int]:
        gammas: list[int] = self.rng.integers(0, self.max_gamma + 1, len(sequences)).tolist()
        return gammas

    def observe(
        self,
        batch: Batch,
        outcomes: Sequence[Outcome],
        *,
        draft_seconds: float,
        verify_seconds: float,
        round_seconds: float | None = None,
    ) -> None:
        pass


class AnticipatingDrafter:
    """A drafter that anticipates after every answer, in the same process.

    The next message interrupts it after a random number of passes. Some leave no time for proposals
    that were not prepared.
    """

    def __init__(self, drafter: ForkableDrafter, fanout: int | None) -> None:
        self.anticipation = Anticipation(
            drafter, Fanout(per_position=fanout), clock=counting_clock()
        )
        self.rng = np.random.default_rng(0)

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        is_late = self.rng.random() < 0.3
        proposals = self.anticipation.propose(steps, 0.0 if is_late else deadline)
        looks = int(self.rng.integers(1, 12))
        self.anticipation.prepare(lambda: self._interrupted_after(looks))
        return proposals

    def release(self, seq_ids: Sequence[int]) -> None:
        self.anticipation.release(seq_ids)

    def _interrupted_after(self, looks: int) -> bool:
        return bool(self.rng.random() < 1 / looks)


class Engine:
    """A target, and perhaps a draft, opened once for many runs.

    Each run has a coordinator of its own and leaves no page behind.
    """

    drafts_prompts: ClassVar[bool] = True
    """False where the drafter reads states that the target sends, as `WorkerGroup` has it."""

    def __init__(
        self,
        target: Path,
        draft: Path | None = None,
        *,
        pages: int = 400,
        draft_pages: int | None = None,  # None: as many as the target's
        dtype: str = "float32",
        support: int = 64,
        prefix_caching: bool = True,
        shard: Shard | None = None,  # of the target
        ahead: bool = False,  # the drafter anticipates, and is interrupted at random
        fanout: int | None = None,
        page_size: int = PAGE_SIZE,
        translation: TokenTranslation | None = None,  # of a draft with another tokenizer
        adapter_bytes: int = 0,
    ) -> None:
        self.target = load_target(
            target,
            model_options(
                dtype=dtype,
                pages=pages,
                prefix_caching=prefix_caching,
                page_size=page_size,
                adapter_bytes=adapter_bytes,
            ),
            shard=shard,
        )
        self.drafter: NeuralDrafter | None = None
        if draft is not None:
            where = model_options(
                dtype=dtype,
                pages=draft_pages or pages,
                prefix_caching=prefix_caching,
                page_size=page_size,
            )
            opened = open_model(draft, where)
            self.drafter = load_drafter(
                opened, self.target.info, support=support, translation=translation
            )
        self.ahead = (
            AnticipatingDrafter(self.drafter, fanout)
            if ahead and self.drafter is not None
            else None
        )

    def run(
        self,
        requests: Sequence[Request],
        *,
        pacer: PacerLike | None = None,
        drafts: bool = True,
        with_drafter: SyncDrafter | None = None,
        **options: Any,
    ) -> Run:
        """Generate all requests at once. `options` are as for `open_coordinator`.

        With `drafts` False there is no drafter.
        """
        own = with_drafter or self.ahead or self.drafter
        drafter = LocalDrafter(own) if drafts and own is not None else None
        answers: dict[int, Answer] = {}

        def emit(chunks: Sequence[Chunk]) -> None:
            for chunk in chunks:
                answers[chunk.seq_id].add(chunk)

        coordinator = open_coordinator(
            LocalTarget(self.target),
            drafter,
            info=self.target.info,
            emit=emit,
            **({"drafts_prompts": self.drafts_prompts} | options),
        )
        if pacer is not None:
            coordinator.pacer = pacer  # type: ignore[assignment]
        for request in requests:
            answers[coordinator.submit(request)] = Answer()
        run = Run(
            list(answers.values()),
            num_rounds=asyncio.run(finish(coordinator)),
            num_preempted=coordinator.scheduler.num_preempted,
        )
        self.check_idle()
        return run

    def check_idle(self) -> None:
        if self.ahead is not None:
            self.ahead.anticipation.prepare(lambda: True)  # it drops what is stale
        for model in (self.target, self.drafter):
            if model is not None:
                model.runner.cache.check()
                assert model.runner.cache.num_used == 0


async def finish(coordinator: Coordinator) -> int:
    """Run rounds until nothing is left to do, and return how many they were."""
    num_rounds = 0
    while coordinator.has_work:
        await coordinator.round()
        num_rounds += 1
    return num_rounds


def model_options(
    *,
    dtype: str = "float32",
    pages: int = 400,
    prefix_caching: bool = True,
    page_size: int = PAGE_SIZE,
    adapter_bytes: int = 0,
) -> ModelOptions:
    return ModelOptions(
        dtype=dtype,
        device="cpu",
        page_size=page_size,
        pages=pages,
        prefix_caching=prefix_caching,
        adapter_bytes=adapter_bytes,
    )


def load_target(
    directory: Path,
    where: ModelOptions,
    *,
    shard: Shard | None = None,
    returns_hidden: bool = False,
    taps: HiddenTaps | None = None,
) -> TargetModel:
    opened = open_model(directory, where, shard=shard, returns_hidden=returns_hidden, taps=taps)
    spec, cache = opened.spec, opened.runner.cache
    info = ModelInfo(
        spec.vocab_size,
        opened.max_context,
        spec.end_ids,
        page_size=cache.page_size,
        num_pages=cache.num_pages,
        prefix_caching=cache.prefix_caching,
    )
    info = replace(info, decoder_start=spec.decoder_start)
    return TargetModel(
        opened.runner,
        info,
        network=opened.network,
        returns_hidden=returns_hidden,
        taps=taps,
        adapters=opened.adapters,
    )


def load_drafter(
    opened: Model,
    info: ModelInfo,
    *,
    support: int,
    translation: TokenTranslation | None = None,
) -> NeuralDrafter:
    vocab_size = opened.spec.vocab_size
    if translation is not None:
        from specserve.features.other_tokenizer.runner import TranslatedRunner

        return NeuralDrafter(
            TranslatedRunner(opened.runner, translation, target_vocab=info.vocab_size),
            vocab_size=info.vocab_size,
            target_vocab_size=info.vocab_size,
            context=opened.max_context,
            support=support,
        )
    return NeuralDrafter(
        opened.runner,
        vocab_size=vocab_size,
        target_vocab_size=info.vocab_size,
        context=opened.max_context,
        support=support,
    )


def greedy(prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Request]:
    return [Request(tuple(prompt), max_tokens, GREEDY, seed) for seed, prompt in enumerate(prompts)]


def library_greedy(
    directory: Path, prompts: Sequence[Sequence[int]], *, max_tokens: int
) -> list[tuple[int, ...]]:
    """Return what the library's own generate() writes, one prompt after the other."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return [_continued(model, torch.tensor([prompt]), max_tokens) for prompt in prompts]


def library_greedy_encoder_decoder(
    directory: Path, inputs: Sequence[Sequence[int]], *, max_tokens: int
) -> list[tuple[int, ...]]:
    """Return what the library's generate() writes for an encoder-decoder, input by input."""
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    texts = [
        model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False)
        for ids in inputs
    ]
    return [tuple(text[0, 1:].tolist()) for text in texts]


def _continued(model: Any, ids: torch.Tensor, max_tokens: int) -> tuple[int, ...]:
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return tuple(out[0, ids.shape[1] :].tolist())
