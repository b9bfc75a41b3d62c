"""Workers without a model: a text that follows from its prefix, caches of plain lists, and a clock that moves when told to."""

from __future__ import annotations

import random
from collections.abc import Sequence

from specserve.types import DraftStep, ModelInfo, Proposal, Verdict, VerifyStep

VOCAB = 97


def next_token(prefix: Sequence[int]) -> int:
    """Depends on the length and the last three tokens, so that one wrong, missing or repeated token spoils all that follow."""
    return hash((len(prefix), *prefix[-3:])) % VOCAB


def text(prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """What the target writes after the prompt."""
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
) -> ModelInfo:
    return ModelInfo(
        vocab_size=VOCAB,
        max_context=max_context,
        end_ids=end_ids,
        page_size=page_size,
        num_pages=num_pages,
    )


class Misused(BaseException):
    """A step that no worker could follow. No `Exception`, lest the coordinator take it for a worker's failure and go on."""


def demand(condition: bool) -> None:
    if not condition:
        raise Misused


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeTarget:
    """Judges greedily from what its cache holds; refuses steps that leave a hole, and more pages than it has."""

    def __init__(
        self, info: ModelInfo, *, clock: VirtualClock | None = None, seconds: float = 0.0
    ) -> None:
        self.info, self.clock, self.seconds = info, clock or VirtualClock(), seconds
        self.caches: dict[int, list[int]] = {}
        self.rounds: list[Sequence[VerifyStep]] = []
        self.errors: list[Exception] = []  # each fails one call

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
        demand(
            sum(-(-len(cache) // self.info.page_size) for cache in self.caches.values())
            <= self.info.num_pages
        )
        return [self._judge(step) for step in steps if step.decide]

    def _judge(self, step: VerifyStep) -> Verdict:
        prefix = self.caches[step.seq_id][: step.start + len(step.tokens)]
        for accepted, draft in enumerate(step.drafts):
            if draft != next_token(prefix):
                return Verdict(step.seq_id, accepted, next_token(prefix), None)
            prefix.append(draft)
        return Verdict(step.seq_id, len(step.drafts), next_token(prefix), None)

    async def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self.caches.pop(seq_id, None)


class FakeDrafter:
    """Right with probability alpha at each position; `held` ends before the last draft, which it never reads itself."""

    def __init__(
        self,
        alpha: float,
        *,
        seed: int = 0,
        clock: VirtualClock | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.alpha, self.random = alpha, random.Random(seed)
        self.clock, self.seconds = clock or VirtualClock(), seconds
        self.caches: dict[int, list[int]] = {}
        self.rounds: list[Sequence[DraftStep]] = []
        self.errors: list[Exception] = []

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> list[Proposal]:
        self.clock.now += self.seconds * max((step.gamma for step in steps), default=0)
        if steps:
            self.rounds.append(steps)
        if self.errors:
            raise self.errors.pop()
        return [self._draft(step) for step in steps]

    def _draft(self, step: DraftStep) -> Proposal:
        cache = self.caches.setdefault(step.seq_id, [])
        demand(bool(step.tokens) and step.start <= len(cache))
        cache[step.start :] = step.tokens
        start = len(cache)
        for _ in range(step.gamma):
            right = next_token(cache)
            cache.append(right if self.random.random() < self.alpha else (right + 1) % VOCAB)
        drafts = tuple(cache[start:])
        del cache[max(start, len(cache) - 1) :]
        return Proposal(step.seq_id, start, drafts, None, held=len(cache))

    async def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self.caches.pop(seq_id, None)
