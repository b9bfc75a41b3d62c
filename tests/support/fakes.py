"""Workers without a model, a virtual clock, and coordinators with a configuration by keyword.

The fake target's text follows from its prefix; the caches are plain lists.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from specserve.config.sections import LimitsConfig, SpeculationConfig
from specserve.engine import Coordinator
from specserve.engine.trace import Round
from specserve.types import (
    Chunk,
    Curve,
    Drafter,
    DraftStep,
    Grammar,
    ModelInfo,
    Proposal,
    Target,
    Verdict,
    VerifyStep,
)
from tests.support.clock import Clock

VOCAB = 97


def next_token(prefix: Sequence[int]) -> int:
    """Return a token that depends on the length and the last three tokens.

    One wrong, missing or repeated token thus spoils all that follow.
    """
    return hash((len(prefix), *prefix[-3:])) % VOCAB


def text(prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Return what the target generates after the prompt."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


def model_info(
    *,
    num_pages: int = 10_000,
    page_size: int = 4,
    max_context: int = 10_000,
    end_ids: frozenset[int] = frozenset(),
    curve: Curve = (),
    prefix_caching: bool = False,
) -> ModelInfo:
    return ModelInfo(
        vocab_size=VOCAB,
        max_context=max_context,
        end_ids=end_ids,
        page_size=page_size,
        num_pages=num_pages,
        curve=curve,
        prefix_caching=prefix_caching,
    )


def open_coordinator(
    target: Target,
    drafter: Drafter | None,
    *,
    info: ModelInfo,
    emit: Callable[[Sequence[Chunk]], None],
    clock: Callable[[], float] = time.perf_counter,
    max_running: int = 64,
    max_queued: int = 1024,
    gamma: int | None = None,
    max_gamma: int = 16,
    verifier: str | None = None,
    lenience: float = 1.0,
    draft_context: int | None = None,
    max_batch_tokens: int | None = None,
    remote_workers: bool = False,
    drafts_prompts: bool = True,
    report: Callable[[Round], None] | None = None,
    on_displaced: Callable[[int], None] | None = None,
) -> Coordinator:
    return Coordinator(
        target,
        drafter,
        info=info,
        limits=LimitsConfig(
            max_running=max_running, max_queued=max_queued, max_batch_tokens=max_batch_tokens
        ),
        speculation=SpeculationConfig(
            gamma=gamma, max_gamma=max_gamma, verifier=verifier, lenience=lenience
        ),
        emit=emit,
        clock=clock,
        draft_context=draft_context,
        remote_workers=remote_workers,
        drafts_prompts=drafts_prompts,
        report=report,
        on_displaced=on_displaced,
    )


class MisuseError(BaseException):
    """A step that no worker could follow.

    It is no `Exception`: the coordinator would take it for a worker's failure and go on.
    """


def demand(condition: bool) -> None:
    if not condition:
        raise MisuseError


class FakeTarget:
    """A target that verifies greedily from what its cache holds.

    It raises for steps that leave a hole, and for more pages than it has.
    """

    def __init__(
        self, info: ModelInfo, *, clock: Clock | None = None, seconds: float = 0.0
    ) -> None:
        self.info, self.clock, self.seconds = info, clock or Clock(), seconds
        self.caches: dict[int, list[int]] = {}
        self.rounds: list[Sequence[VerifyStep]] = []
        self.errors: list[Exception] = []  # each fails one call
        self.uncompiled: set[Grammar] = set()
        self._grammars: dict[int, Grammar] = {}

    async def verify(self, steps: Sequence[VerifyStep]) -> list[Verdict]:
        self.clock.now += self.seconds
        if steps:
            self.rounds.append(steps)
        if self.errors:
            raise self.errors.pop()
        for step in steps:
            cache = self.caches.setdefault(step.seq_id, [])
            demand(bool(step.tokens) and step.start <= len(cache))
            cache[step.start :] = [*step.tokens, *step.drafts]
            if step.grammar is not None:
                self._grammars[step.seq_id] = step.grammar
        demand(
            sum(-(-len(cache) // self.info.page_size) for cache in self.caches.values())
            <= self.info.num_pages
        )
        return [self._verdict(step) for step in steps if step.needs_verdict]

    def _verdict(self, step: VerifyStep) -> Verdict:
        if self._grammars.get(step.seq_id) in self.uncompiled:
            return Verdict(step.seq_id, 0, 0, None, is_decision=False)
        prefix = self.caches[step.seq_id][: step.stop]
        for accepted, draft in enumerate(step.drafts):
            if draft != next_token(prefix):
                return Verdict(step.seq_id, accepted, next_token(prefix), None)
            prefix.append(draft)
        return Verdict(step.seq_id, len(step.drafts), next_token(prefix), None)

    async def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self.caches.pop(seq_id, None)
            self._grammars.pop(seq_id, None)


class FakeDrafter:
    """A drafter that is right with probability alpha at each position.

    The last draft token is not cached: a real drafter never computes it either.
    """

    def __init__(
        self,
        alpha: float,
        *,
        seed: int = 0,
        clock: Clock | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.alpha, self.random = alpha, random.Random(seed)
        self.clock, self.seconds = clock or Clock(), seconds
        self.caches: dict[int, list[int]] = {}
        self.rounds: list[Sequence[DraftStep]] = []
        self.errors: list[Exception] = []

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> list[Proposal]:
        self.clock.now += self.seconds * max((step.gamma for step in steps), default=0)
        if steps:
            self.rounds.append(steps)
        if self.errors:
            raise self.errors.pop()
        return [self.draft(step) for step in steps]

    def draft(self, step: DraftStep) -> Proposal:
        cache = self.caches.setdefault(step.seq_id, [])
        demand(bool(step.tokens) and step.start <= len(cache))
        cache[step.start :] = step.tokens
        start = len(cache)
        for _ in range(step.gamma):
            right = next_token(cache)
            cache.append(right if self.random.random() < self.alpha else (right + 1) % VOCAB)
        drafts = tuple(cache[start:])
        del cache[max(start, len(cache) - 1) :]
        return Proposal(step.seq_id, start, drafts, None, num_cached=len(cache))

    async def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self.caches.pop(seq_id, None)
