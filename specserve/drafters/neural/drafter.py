"""A small language model that drafts for all sequences at once, each with its own gamma. Knows no target but the size of its vocabulary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specserve.drafters.base import Outlook
from specserve.drafters.neural.constrained_drafts import Constrained
from specserve.drafters.neural.draft_state import Draft, Todo, pages_from, stop_of
from specserve.drafters.neural.draws import Draws, Place, Source
from specserve.drafters.ranking import ranked
from specserve.errors import OutOfPages
from specserve.grammar.sequences import Parses
from specserve.models.cache import Fork
from specserve.models.runner import Runner
from specserve.sampling.distribution import History
from specserve.types import DraftStep, Policy, Proposal, Step


class NeuralDrafter:
    """Drafts token by token, one pass for all sequences that still want one. A proposal that was begun is gone on with.

    Implements `base.Forks`: a sequence may have branches, whose proposals are begun before it is known which of them is wanted.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        vocab_size: int,
        target_vocab_size: int,
        context: int,
        support: int,
        clock: Callable[[], float] = time.perf_counter,
        parses: Parses | None = None,
    ) -> None:
        """Without `parses` that know grammars, drafts follow none, and the target refuses what it must."""
        self.runner, self.context, self.support, self.clock = runner, context, support, clock
        self.shared_vocab = min(
            vocab_size, target_vocab_size
        )  # padding of either embedding is never proposed
        self.lacks_tokens = vocab_size < target_vocab_size
        self.parses = parses or Parses(None)
        self._constrained = Constrained(
            runner, self.parses, self.history, support=support, shared_vocab=self.shared_vocab
        )
        self._drafts: dict[int, Draft] = {}
        self._forks: list[
            Fork
        ] = []  # asked for and not yet made; made together they cost little more than one

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """Past the deadline, by the clock, proposals come back shorter."""
        return self.draft(steps, lambda: self.clock() > deadline)

    @torch.inference_mode()
    def draft(self, steps: Sequence[DraftStep], enough: Callable[[], bool]) -> Sequence[Proposal]:
        """A sequence that does not fit, or whose step leaves a gap, gets an empty proposal that says what is held of it."""
        self._make_forks()
        self.parses.meet(steps)
        todo = sorted(
            self._fitting(steps), key=lambda one: -one.wanted
        )  # those who go on are always the first
        if self._follow(steps) and todo:
            self._constrained.draw(todo, enough)
        elif todo:
            logits = self._read(todo)
            drafting = [one for one in todo if one.wanted]
            if drafting:
                self._draw(drafting, logits, enough)
        return [self._proposal(step) for step in steps]

    def release(self, seq_ids: Sequence[int]) -> None:
        self._make_forks()
        self.runner.release(seq_ids)
        self.parses.release(seq_ids)
        self.forget(seq_ids)

    def forget(self, seq_ids: Sequence[int]) -> None:
        """What was drafted for them; the pages stay."""
        for seq_id in seq_ids:
            self._drafts.pop(seq_id, None)

    @torch.inference_mode()
    def outlooks(self, seq_ids: Sequence[int], width: int) -> Sequence[Outlook]:
        """One pass reads all last draft tokens. What does not fit, or has no drafts, has no outlook."""
        drafts = {
            seq_id: self._drafts[seq_id]
            for seq_id in seq_ids
            if seq_id in self._drafts and self._drafts[seq_id].tokens
        }
        todo = [
            one
            for seq_id, draft in drafts.items()
            if self._fits(
                one := self._last_read(seq_id, draft, wanted=1), self.runner.cache.num_free
            )
        ]
        if not todo:
            return []
        draws = self._draws(todo)
        draws.draw(
            self._constrained.masked(
                [self.parses.of(one.seq_id) for one in todo], self._shared(self._read(todo))
            )
        )
        sights = [
            sight
            for row, one in enumerate(todo)
            for sight in one.draft.sights(draws.drawn[0].logits[row])
        ]
        places = iter(ranked(sights, width))
        return [
            one.draft.outlook(one.seq_id, [next(places) for _ in range(len(one.draft.tokens) + 1)])
            for one in todo
        ]

    def fork(self, seq_id: int, as_id: int, length: int) -> bool:
        if (
            4 * len(self._forks) >= self.runner.cache.num_free
        ):  # each takes a page or two; half of the free ones are left alone
            return False
        self._forks.append(Fork(seq_id, as_id, length))
        self.parses.fork(seq_id, as_id, length)
        return True

    def become(self, seq_id: int, branch_id: int) -> None:
        self._make_forks()
        self.runner.become(seq_id, branch_id)
        self.parses.become(seq_id, branch_id)
        self._drafts.pop(seq_id, None)
        if branch_id in self._drafts:
            self._drafts[seq_id] = self._drafts.pop(branch_id)

    def held(self, seq_id: int) -> int:
        """Positions of it that are cached."""
        self._make_forks()
        return self.runner.cache.length(seq_id)

    def fitting(self, steps: Sequence[Step]) -> list[bool]:
        """Which of them leave no gap and fit into the context and, all together, into the pages."""
        self._make_forks()
        cache, free, fit = self.runner.cache, self.runner.cache.num_free, []
        for step in steps:
            pages = pages_from(step.start, step.stop, cache.page_size) + -(
                -len(step.source) // cache.page_size
            )
            fit.append(
                cache.length(step.seq_id) >= step.start
                and step.stop <= self.context
                and pages <= free
            )
            free -= pages * fit[-1]
        return fit

    @torch.inference_mode()
    def read(
        self, steps: Sequence[Step], wanted: Sequence[int]
    ) -> Tensor:  # [sum(wanted), shared vocabulary]
        """Logits behind the last `wanted` tokens of each step, all of which are fitting."""
        self._make_forks()
        return self._shared(
            self.runner.run(
                [replace(step, tokens=self._known(step.tokens)) for step in steps], wanted
            )
        )

    def history(self, seq_id: int, length: int, policy: Policy) -> History | None:
        """What penalties look at behind `length` tokens; all that is cached behind these are drafts. None without penalties."""
        if not policy.warp.has_penalties:
            return None
        tokens = self.runner.cache.tokens(seq_id)
        return History(tokens[:length], policy.prompt_length, tuple(tokens[length:].tolist()))

    def _make_forks(self) -> None:
        forks, self._forks = self._forks, []
        try:
            self.runner.fork_many(forks)
        except (
            OutOfPages
        ):  # nothing was forked; steps of the branches then leave a gap, and are answered so
            return

    def _fitting(self, steps: Sequence[DraftStep]) -> list[Todo]:
        """Those that have anything left to do, leave no gap, and fit into the context and, all together, into the pages."""
        fitting, free, page_size = [], self.runner.cache.num_free, self.runner.cache.page_size
        for step in steps:
            one = self._todo(step)
            if one is not None and self._fits(one, free):
                free -= one.num_pages(page_size)
                self._drafts[step.seq_id] = one.draft
                fitting.append(one)
        return fitting

    def _todo(self, step: DraftStep) -> Todo | None:
        begun = self._drafts.get(step.seq_id)
        if (
            begun is None
            or not begun.tokens
            or begun.start != stop_of(step)
            or begun.policy != step.policy  # in a cascade another round has another seed
            or not self.runner.cache.holds(step.seq_id, step.start, self._known(step.tokens))
        ):
            self._drafts.pop(step.seq_id, None)
            read = Step(step.seq_id, step.start, self._known(step.tokens), self._known(step.source))
            return Todo(step.seq_id, read, Draft(stop_of(step), step.policy), step.gamma)
        if step.gamma <= len(begun.tokens):
            del begun.tokens[step.gamma :], begun.rows[step.gamma :]
            return None
        return self._last_read(step.seq_id, begun, wanted=step.gamma - len(begun.tokens))

    def _last_read(self, seq_id: int, draft: Draft, *, wanted: int) -> Todo:
        """What is not written of a draft is, before the drafting goes on behind it."""
        return Todo(seq_id, draft.unread(seq_id, self.runner.cache.length(seq_id)), draft, wanted)

    def _follow(self, steps: Sequence[DraftStep]) -> bool:
        """Texts under grammars are read as far as their drafts; whether there are any."""
        if self.parses.grammars is None:
            return False
        drafted = [step for step in steps if step.gamma and step.seq_id in self._drafts]
        parses = [
            (step.seq_id, self.parses.follow(step, self.runner.cache.tokens)) for step in drafted
        ]
        for seq_id, parse in parses:
            if parse is not None:
                parse.write(len(parse.tokens), self._drafts[seq_id].tokens)
        return any(parse is not None for _, parse in parses)

    def _fits(self, one: Todo, free: int) -> bool:
        cache = self.runner.cache
        longest = max(one.room, len(one.read.source))
        return (
            cache.length(one.seq_id) >= one.read.start
            and longest <= self.context
            and one.num_pages(cache.page_size) <= free
        )

    def _read(self, todo: Sequence[Todo]) -> Tensor:  # [drafting, vocab]
        """Write the tokens that are committed, or were drawn last; logits behind them where drafts are wanted."""
        return self.runner.run([one.read for one in todo], [min(one.wanted, 1) for one in todo])

    def _draw(self, todo: Sequence[Todo], logits: Tensor, enough: Callable[[], bool]) -> None:
        """In falling order of what they want. The last token of each is drawn and not written."""
        draws = self._draws(todo)
        tokens = draws.draw(self._shared(logits))
        passes = self.runner.unroll([one.seq_id for one in todo], [one.wanted - 1 for one in todo])
        for depth in range(1, todo[0].wanted):
            if enough():
                break
            while todo[len(tokens) - 1].wanted <= depth:
                tokens = tokens[:-1]
            tokens = draws.draw(self._shared(passes.logits(tokens)))
        self._keep(todo, [drawn.fetched() for drawn in draws.drawn])

    def _draws(self, todo: Sequence[Todo]) -> Draws:
        places = [
            Place(
                one.draft.start,
                len(one.draft.tokens),
                one.wanted,
                one.draft.policy,
                self.history(one.seq_id, self.runner.cache.length(one.seq_id), one.draft.policy),
            )
            for one in todo
        ]
        return Draws(places, support=self.support, device=self.runner.device)

    def _keep(self, todo: Sequence[Todo], sources: Sequence[Source]) -> None:
        for row, one in enumerate(todo):
            own = [source for source in sources if row < len(source.tokens)]
            tokens = [source.tokens[row] for source in own]
            self.runner.cache.append(one.seq_id, tokens[:-1])
            for token, source in zip(tokens, own, strict=True):
                one.draft.add(token, source, row)

    def _proposal(self, step: DraftStep) -> Proposal:
        held = self.runner.cache.length(step.seq_id)
        draft = self._drafts.get(step.seq_id)
        if draft is None or not step.gamma:
            if not self.runner.cache.holds(step.seq_id, step.start, self._known(step.tokens)):
                held = min(
                    held, step.start
                )  # there was no room: behind it may lie drafts that were refused
            return Proposal(step.seq_id, stop_of(step), (), None, held)
        tokens = tuple(draft.tokens)
        return Proposal(
            step.seq_id,
            draft.start,
            tokens,
            draft.sources(),
            min(held, draft.start + max(0, len(tokens) - 1)),
        )

    def _shared(self, logits: Tensor) -> Tensor:  # [rows, shared vocabulary]
        return logits if logits.shape[1] == self.shared_vocab else logits[:, : self.shared_vocab]

    def _known(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """A target with a larger padded embedding may, if hardly ever, commit an id that the draft has no row for."""
        return (
            tuple(token if token < self.shared_vocab else 0 for token in tokens)
            if self.lacks_tokens
            else tokens
        )
