"""A drafter that is right with a stated probability, at the cost of the drafter that it wraps.

It shows what speculation gives on weights that no draft was trained for. Greedy texts only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from specserve.types import Drafter, DraftStep, Proposal


class ForcedDrafter:
    """Drafter that computes what another one computes, and proposes known texts.

    Each draft token is the true one with probability `alpha`, by a draw that the prompt and the
    position fix. A sequence whose prompt has no text gets no draft tokens.
    """

    def __init__(self, drafter: Drafter, alpha: float, *, vocab_size: int) -> None:
        self._drafter, self._alpha, self._vocab_size = drafter, alpha, vocab_size
        self._texts: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._prefixes: dict[int, list[int]] = {}

    def learn(self, prompt: tuple[int, ...], text: tuple[int, ...]) -> None:
        """Propose `text` after `prompt` from now on."""
        self._texts[prompt] = text

    def knows(self, prompt: tuple[int, ...], length: int) -> bool:
        return len(self._texts.get(prompt, ())) >= length

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        proposals = await self._drafter.propose(steps, deadline)
        return [self._force(step, own) for step, own in zip(steps, proposals, strict=True)]

    async def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._prefixes.pop(seq_id, None)
        await self._drafter.release(seq_ids)

    def _force(self, step: DraftStep, own: Proposal) -> Proposal:
        prefix = self._prefixes.setdefault(step.seq_id, [])
        prefix[step.start :] = step.tokens
        prompt = tuple(prefix[: step.policy.prompt_length])
        start = step.stop - len(prompt)
        true = self._texts.get(prompt, ())[start : start + len(own.tokens)] if start >= 0 else ()
        drawn = (
            token if self._is_right(prompt, start + i) else (token + 1) % self._vocab_size
            for i, token in enumerate(true)
        )
        return replace(own, tokens=tuple(drawn), q=None)

    def _is_right(self, prompt: tuple[int, ...], position: int) -> bool:
        return random.Random(f"{prompt} {position}").random() < self._alpha
