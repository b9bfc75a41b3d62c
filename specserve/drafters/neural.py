"""A small language model that drafts for all sequences at once, each with its own gamma. Knows no target but the size of its vocabulary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specserve.drafters.draws import Draws, Guess
from specserve.models.runner import Runner
from specserve.sampling.distribution import History
from specserve.types import DraftStep, Proposal, Step

NOTHING = Guess((), None)


class NeuralDrafter:
    """Drafts token by token, one pass for all sequences that still want one."""

    def __init__(
        self, runner: Runner, *, vocab_size: int, target_vocab_size: int, context: int, support: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.runner, self.context, self.support, self.clock = runner, context, support, clock
        self.shared_vocab = min(vocab_size, target_vocab_size)  # padding of either embedding is never proposed
        self.lacks_tokens = vocab_size < target_vocab_size

    @torch.inference_mode()
    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """A sequence that does not fit, or whose step leaves a gap, gets an empty proposal that says what is held of it."""
        able = self._fitting(steps)
        drafting = sorted((step for step in able if step.gamma), key=lambda step: -step.gamma)  # those who go on are always the first
        guesses: dict[int, Guess] = {}
        if able:
            logits = self._read([*drafting, *(step for step in able if not step.gamma)])
            if drafting:
                guesses = self._draft(drafting, logits, deadline)
        return [self._proposal(step, guesses.get(step.seq_id, NOTHING)) for step in steps]

    def release(self, seq_ids: Sequence[int]) -> None:
        self.runner.release(seq_ids)

    def _fitting(self, steps: Sequence[DraftStep]) -> list[DraftStep]:
        """Those that leave no gap and fit into the context and, all together, into the pages."""
        cache, fitting = self.runner.cache, []
        free = cache.num_free
        for step in steps:
            room = _stop(step) + max(step.gamma - 1, 0)
            pages = -(-room // cache.page_size) - step.start // cache.page_size  # counts a page that is copied on write
            if cache.length(step.seq_id) >= step.start and room <= self.context and pages <= free:
                free -= pages
                fitting.append(step)
        return fitting

    def _read(self, steps: Sequence[DraftStep]) -> Tensor:  # [drafting, vocab]
        """Write the committed tokens; logits behind them where drafts are wanted."""
        writes = [Step(step.seq_id, step.start, self._known(step.tokens)) for step in steps]
        return self.runner.run(writes, [min(step.gamma, 1) for step in steps])

    def _draft(self, steps: Sequence[DraftStep], logits: Tensor, deadline: float) -> dict[int, Guess]:
        """Steps in falling order of gamma. The last token of each is drawn and not written."""
        draws = Draws(steps, [self._history(step) for step in steps], support=self.support, device=self.runner.device)
        tokens = draws.draw(self._shared(logits))
        passes = self.runner.unroll([step.seq_id for step in steps], [step.gamma - 1 for step in steps])
        for depth in range(1, steps[0].gamma):
            if self.clock() > deadline:
                break
            while steps[len(tokens) - 1].gamma <= depth:
                tokens = tokens[:-1]
            tokens = draws.draw(self._shared(passes.logits(tokens)))
        guesses = {step.seq_id: guess for step, guess in zip(steps, draws.guesses(), strict=True)}
        for seq_id, guess in guesses.items():
            self.runner.cache.append(seq_id, guess.tokens[:-1])
        return guesses

    def _proposal(self, step: DraftStep, guess: Guess) -> Proposal:
        return Proposal(step.seq_id, _stop(step), guess.tokens, guess.q, self.runner.cache.length(step.seq_id))

    def _history(self, step: DraftStep) -> History | None:
        if not step.policy.warp.has_penalties:
            return None
        return History(self.runner.cache.tokens(step.seq_id), step.policy.prompt_length)

    def _shared(self, logits: Tensor) -> Tensor:  # [rows, shared vocabulary]
        return logits if logits.shape[1] == self.shared_vocab else logits[:, : self.shared_vocab]

    def _known(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """A target with a larger padded embedding may, if hardly ever, commit an id that the draft has no row for."""
        return tuple(token if token < self.shared_vocab else 0 for token in tokens) if self.lacks_tokens else tokens


def _stop(step: DraftStep) -> int:
    return step.start + len(step.tokens)
