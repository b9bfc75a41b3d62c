"""Draft where some sequences have a grammar. Knows no target.

The grammar's masks apply to q, and the tokens that it forces are taken without a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from specserve.drafters.neural.draft_runner import DraftRunner
from specserve.drafters.neural.draft_state import DraftTask, one_hot_draws
from specserve.drafters.neural.draws import DraftSampler, DrawSpec, HostDraws, fetch
from specserve.grammar.mask import TokenMask
from specserve.grammar.matcher import GrammarMatcher
from specserve.grammar.sequences import GrammarStates
from specserve.sampling.penalties import History
from specserve.transfers import to_device
from specserve.types import Policy, Step


@dataclass(frozen=True, slots=True, eq=False)
class ConstrainedDraft:
    """A sequence that is to get `num_tokens` draft tokens in all.

    Its matcher, if it has a grammar, has consumed those that exist.
    """

    task: DraftTask
    matcher: GrammarMatcher | None
    num_tokens: int

    @property
    def num_missing(self) -> int:
        return self.num_tokens - len(self.task.state.tokens)

    def append(self, token: int, draws: HostDraws, row: int) -> None:
        self.task.state.append(token, draws, row)
        if self.matcher is not None:
            self.matcher.write(len(self.matcher.tokens), (token,))

    def first_step(self, *, draws: bool) -> Step:
        """Return the prefill, followed by the forced tokens where a draw follows them."""
        prefill, num_drafted = self.task.prefill, self.num_tokens - self.task.num_wanted
        return (
            replace(prefill, tokens=prefill.tokens + tuple(self.task.state.tokens[num_drafted:]))
            if draws
            else prefill
        )


class ConstrainedDrafting:
    """Token-by-token drafting, as without grammars, but with forced tokens.

    A pass writes several tokens of a sequence: those that were forced since the last pass.
    """

    def __init__(
        self,
        runner: DraftRunner,
        grammar_states: GrammarStates,
        history: Callable[[int, int, Policy], History | None],
        *,
        support: int,
        shared_vocab: int,
    ) -> None:
        drawable = runner.drawable
        self._drawable = np.ones(shared_vocab, np.bool_) if drawable is None else drawable
        self._runner, self._grammar_states, self._history = runner, grammar_states, history
        self._support, self._vocab = support, shared_vocab

    def draw(self, tasks: Sequence[DraftTask], should_stop: Callable[[], bool]) -> None:
        """Prefill, and draw the wanted tokens.

        The last token of a sequence, and forced ones before it, are not written to the cache.
        """
        drafts = self._drafts(tasks)
        drawing = self._take_forced(drafts)
        self._pass(
            [draft.first_step(draws=draft in drawing) for draft in drafts],
            [int(draft in drawing) for draft in drafts],
            drawing,
        )
        while drawing and not should_stop():
            drawing = self._take_forced(drawing)
            steps = [
                draft.task.state.missing_step(
                    draft.task.seq_id, self._runner.cache.length(draft.task.seq_id)
                )
                for draft in drawing
            ]
            self._pass(steps, [1] * len(drawing), drawing)

    def draw_from_rows(
        self,
        tasks: Sequence[DraftTask],
        logits: Tensor,
        added_after: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Draw the wanted tokens of new drafts from rows that exist already.

        `logits` [sum of num_wanted, vocab] has one row for each token. A forced token leaves its
        row unused. `added_after` returns what the tokens before add to their rows.
        """
        first_rows = np.cumsum([0, *(task.num_wanted for task in tasks)]).tolist()
        rows = dict(zip((task.seq_id for task in tasks), first_rows, strict=False))
        drawing = self._take_forced(self._drafts(tasks))
        while drawing:
            chosen = [rows[draft.task.seq_id] + len(draft.task.state.tokens) for draft in drawing]
            own = logits.index_select(0, to_device(np.array(chosen), logits.device))
            if added_after is not None:
                newest = np.array([draft.task.newest for draft in drawing])
                own = own + added_after(to_device(newest, logits.device))
            self._draw(own, drawing)
            drawing = self._take_forced(drawing)

    def mask_logits(
        self, matchers: Sequence[GrammarMatcher | None], logits: Tensor
    ) -> Tensor:  # [seqs, vocab]
        """Return the logits without the tokens that the grammars forbid next."""
        rows = [
            (row, matcher.bits()) for row, matcher in enumerate(matchers) if matcher is not None
        ]
        return TokenMask.from_rows(rows).apply(logits)

    def _drafts(self, tasks: Sequence[DraftTask]) -> list[ConstrainedDraft]:
        return [
            ConstrainedDraft(
                task,
                self._grammar_states.get(task.seq_id),
                len(task.state.tokens) + task.num_wanted,
            )
            for task in tasks
        ]

    def _take_forced(self, drafts: Sequence[ConstrainedDraft]) -> list[ConstrainedDraft]:
        """Append forced tokens, and return the sequences that have more tokens to draw."""
        for draft in drafts:
            self._force(draft)
        return [
            draft
            for draft in drafts
            if draft.num_missing > 0 and (draft.matcher is None or self._can_draw(draft.matcher))
        ]

    def _force(self, draft: ConstrainedDraft) -> None:
        while draft.matcher is not None and (
            tokens := draft.matcher.forced_tokens(draft.num_missing)
        ):
            for token in tokens:
                # The draft model has no such id; the target writes it.
                if token >= self._vocab:
                    return
                draws = one_hot_draws(
                    token,
                    width=min(self._support, self._vocab),
                    vocab=self._vocab,
                    device=self._runner.device,
                )
                draft.append(token, draws, 0)

    def _can_draw(self, matcher: GrammarMatcher) -> bool:
        """Return whether the grammar allows any token that the draft model can draw."""
        if matcher.is_terminated:
            return False
        bits = matcher.bits().view(np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab, bitorder="little")
        return bool(allowed[self._drawable].any())

    def _pass(
        self, steps: Sequence[Step], wanted: Sequence[int], drawing: Sequence[ConstrainedDraft]
    ) -> None:
        if not steps:
            return
        logits = self._runner.run(steps, wanted)[:, : self._vocab]
        if drawing:
            self._draw(logits, drawing)

    def _draw(self, logits: Tensor, drawing: Sequence[ConstrainedDraft]) -> None:
        """Draw one token of each of these sequences, [sequences, vocab]."""
        sampler = DraftSampler(
            [self._draw_spec(draft.task) for draft in drawing],
            support=self._support,
            device=self._runner.device,
        )
        sampler.draw(self.mask_logits([draft.matcher for draft in drawing], logits))
        draws = fetch(sampler.draws)[0]
        for row, draft in enumerate(drawing):
            draft.append(draws.tokens[row], draws, row)

    def _draw_spec(self, task: DraftTask) -> DrawSpec:
        state, num_cached = task.state, self._runner.cache.length(task.seq_id)
        history = self._history(task.seq_id, num_cached, state.policy)
        if history is not None and num_cached < state.stop:  # draft tokens of the same pass
            uncached = state.tokens[num_cached - state.start :]
            history = replace(history, tokens=np.append(history.tokens, uncached))
        return DrawSpec(state.start, len(state.tokens), 1, state.policy, history)
