"""A small language model that drafts for all sequences at once, each with its own gamma.

Knows no target but the size of its vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specserve.drafters.base import OutcomeForecast
from specserve.drafters.neural.constrained_drafts import ConstrainedDrafting
from specserve.drafters.neural.draft_runner import DraftRunner
from specserve.drafters.neural.draft_state import DraftState, DraftTask, max_new_pages
from specserve.drafters.neural.draws import DraftSampler, DrawSpec, fetch
from specserve.drafters.ranking import rank_next_tokens
from specserve.errors import OutOfPages
from specserve.grammar.sequences import GrammarStates
from specserve.models.cache import Fork
from specserve.sampling.penalties import History
from specserve.types import DraftStep, Policy, Proposal, Step


class NeuralDrafter:
    """A drafter that runs a model: one pass a token, for all sequences that still want one.

    A proposal that was interrupted is resumed by the same step. Implements `base.ForkableDrafter`:
    branches of a sequence are drafted before it is known which of them is wanted.
    """

    def __init__(
        self,
        runner: DraftRunner,
        *,
        vocab_size: int,
        target_vocab_size: int,
        context: int,
        support: int,
        clock: Callable[[], float] = time.perf_counter,
        grammar_states: GrammarStates | None = None,
        begin: Callable[[DraftTask], DraftTask] | None = None,
        draw_all: Callable[[Sequence[DraftTask], bool], None] | None = None,
        among: Tensor | None = None,
    ) -> None:
        """Create a drafter that runs the model of `runner`, whose vocabulary has `vocab_size` ids.

        A model with another tokenizer comes with a runner that has the target's ids.
        Without `grammar_states` that know grammars, draft tokens follow none, and the target
        rejects those that it must. `begin` may let a task begin at an earlier row, and `draw_all`
        draws all tokens of tasks at once, constrained or not, in place of one pass a token. `among`
        are the ids that the model can draw, if they are few of its vocabulary.
        """
        if among is not None:  # so that each draw of a proposal is as wide, whatever is beside it
            support = min(support, len(among))
        self.runner, self.context, self.support, self.clock = runner, context, support, clock
        # Padding of either embedding is never proposed.
        self.shared_vocab = min(vocab_size, target_vocab_size)
        self.lacks_tokens = vocab_size < target_vocab_size
        self.grammar_states = grammar_states or GrammarStates(None)
        self._begin, self._draw_all, self._among = begin, draw_all, among
        self.constrained = ConstrainedDrafting(
            runner,
            self.grammar_states,
            self.history,
            support=support,
            shared_vocab=self.shared_vocab,
        )
        self._states: dict[int, DraftState] = {}
        # Forks that are requested and not made; made together they cost little more than one.
        self._forks: list[Fork] = []

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """Return one proposal for each step; past the deadline, by the clock, they are shorter."""
        return self.draft(steps, lambda: self.clock() > deadline)

    @torch.inference_mode()
    def draft(
        self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]
    ) -> Sequence[Proposal]:
        """Return one proposal for each step, as `base.ResumableDrafter` says.

        A sequence that does not fit, or whose step leaves a gap, gets an empty proposal with the
        number of its cached positions.
        """
        self._make_forks()
        self.grammar_states.register(steps)
        # The sequences that want most are first, so others drop out from the end.
        tasks = sorted(self._fitting_tasks(steps), key=lambda task: -task.num_wanted)
        constrained = self._advance_grammars(steps)
        if tasks:
            self._draw_tasks(tasks, should_stop, constrained=constrained)
        return [self._proposal(step) for step in steps]

    def release(self, seq_ids: Sequence[int]) -> None:
        self._make_forks()
        self.runner.release(seq_ids)
        self.grammar_states.release(seq_ids)
        self.drop_drafts(seq_ids)

    def drafted(self, seq_id: int) -> DraftState | None:
        """Return the draft tokens of a sequence, or None without any task of it."""
        return self._states.get(seq_id)

    def drop_drafts(self, seq_ids: Sequence[int]) -> None:
        """Drop the draft tokens of sequences; their pages stay."""
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)

    @torch.inference_mode()
    def forecast_outcomes(
        self,
        seq_ids: Sequence[int],
        width: int,
        undrafted: Sequence[DraftStep] = (),
        extra_steps: Sequence[DraftStep] = (),
    ) -> Sequence[OutcomeForecast]:
        """Return forecasts, after one pass that writes all last tokens.

        A sequence that does not fit, or has no draft tokens and no step, has no forecast. Extra
        steps under a grammar wait for their own pass.
        """
        tasks = [*self._undrafted_tasks(undrafted), *self._drafted_tasks(seq_ids)]
        if not tasks:
            return []
        extra = self._extra_tasks(extra_steps, beside=tasks)
        logits = self._shared(self._prefill([*tasks, *extra]))  # before the history is looked at
        sampler = self._sampler([*tasks, *extra])
        sampler.draw(
            self.constrained.mask_logits(
                [self.grammar_states.get(task.seq_id) for task in (*tasks, *extra)], logits
            )
        )
        if extra:
            self._store_draws(extra, sampler, first_row=len(tasks))
        rankings = rank_next_tokens(
            [
                task.state.position_logits(sampler.draws[0].logits[row])
                for row, task in enumerate(tasks)
            ],
            width,
        )
        return [
            one.forecast(task.seq_id, task.state.start, task.state.tokens, task.state.policy)
            for task, one in zip(tasks, rankings, strict=True)
        ]

    def fork(self, seq_id: int, branch_id: int, length: int) -> bool:
        # Each fork takes a page or two; half of the free ones are left alone.
        if 4 * len(self._forks) >= self.runner.cache.num_free:
            return False
        self._forks.append(Fork(seq_id, branch_id, length))
        self.grammar_states.fork(seq_id, branch_id, length)
        return True

    def promote_branch(self, seq_id: int, branch_id: int) -> None:
        self._make_forks()
        self.runner.promote_branch(seq_id, branch_id)
        self.grammar_states.promote_branch(seq_id, branch_id)
        self._states.pop(seq_id, None)
        if branch_id in self._states:
            self._states[seq_id] = self._states.pop(branch_id)

    def num_cached(self, seq_id: int) -> int:
        """Return the number of cached positions of the sequence."""
        self._make_forks()
        return self.runner.cache.length(seq_id)

    def which_fit(self, steps: Sequence[Step]) -> list[bool]:
        """Return which steps leave no gap and fit into the context and, together, the pages."""
        self._make_forks()
        cache, free, fit = self.runner.cache, self.runner.cache.num_free, []
        for step in steps:
            if cache.length(step.seq_id) < step.start:
                fit.append(False)
                continue
            written = self.runner.positions(step)
            pages = max_new_pages(written.start, written.stop, cache.page_size) + -(
                -len(step.encoder_input) // cache.page_size
            )
            fit.append(written.stop <= self.context and pages <= free)
            free -= pages * fit[-1]
        return fit

    @torch.inference_mode()
    def compute_logits(
        self, steps: Sequence[Step], wanted: Sequence[int]
    ) -> Tensor:  # [sum(wanted), shared vocabulary]
        """Return the logits after the last `wanted` tokens of each step; all steps must fit."""
        self._make_forks()
        return self._shared(
            self.runner.run(
                [replace(step, tokens=self._known_ids(step.tokens)) for step in steps], wanted
            )
        )

    def history(self, seq_id: int, length: int, policy: Policy) -> History | None:
        """Return what penalties and rules look at, or None without any.

        All that is cached after the first `length` tokens are draft tokens.
        """
        if not policy.warp.needs_history:
            return None
        tokens = self.runner.cache.tokens(seq_id)
        return History(tokens[:length], policy.prompt_length, tuple(tokens[length:].tolist()))

    def _make_forks(self) -> None:
        forks, self._forks = self._forks, []
        try:
            self.runner.fork_many(forks)
        except OutOfPages:
            # Nothing was forked. Steps of the branches leave a gap and get empty proposals.
            return

    def _extra_tasks(
        self, steps: Sequence[DraftStep], *, beside: Sequence[DraftTask]
    ) -> list[DraftTask]:
        """Return the tasks that get one draft token in the pass of others."""
        page_size = self.runner.cache.page_size
        fitting = self._fitting_tasks(
            [step for step in steps if not step.policy.constrained],
            num_reserved=sum(task.max_new_pages(page_size) for task in beside),
        )
        return [replace(task, num_wanted=1) for task in fitting if task.num_wanted]

    def _fitting_tasks(
        self, steps: Sequence[DraftStep], *, num_reserved: int = 0
    ) -> list[DraftTask]:
        """Return the tasks with work left that fit into context and the pages not reserved."""
        tasks, page_size = [], self.runner.cache.page_size
        free = self.runner.cache.num_free - num_reserved
        for step in steps:
            task = self._task(step)
            if task is not None and self._fits(task, free):
                free -= task.max_new_pages(page_size)
                self._states[step.seq_id] = task.state
                tasks.append(task)
        return tasks

    def _undrafted_tasks(self, steps: Sequence[DraftStep]) -> list[DraftTask]:
        """Return the tasks that prefill the steps and compute what follows them."""
        if not steps:
            return []
        self._make_forks()
        self.grammar_states.register(steps)
        steps = [replace(step, gamma=1) for step in steps]
        tasks = self._fitting_tasks(steps)
        self._advance_grammars(steps)
        return tasks

    def _drafted_tasks(self, seq_ids: Sequence[int]) -> list[DraftTask]:
        """Return the tasks that write the last draft tokens and compute what follows them."""
        states = {
            seq_id: self._states[seq_id]
            for seq_id in seq_ids
            if seq_id in self._states and self._states[seq_id].tokens
        }
        return [
            task
            for seq_id, state in states.items()
            if self._fits(
                task := self._resume_task(seq_id, state, num_wanted=1), self.runner.cache.num_free
            )
        ]

    def _task(self, step: DraftStep) -> DraftTask | None:
        """Return the work for the step, resuming its drafts.

        None: it has enough of them, or leaves a gap after what is cached.
        """
        state = self._states.get(step.seq_id)
        if (
            state is None
            or not state.tokens
            or state.start != step.stop
            or state.policy != step.policy  # in a cascade another round has another seed
            or not self.runner.cache.holds(step.seq_id, step.start, self._known_ids(step.tokens))
        ):
            self._states.pop(step.seq_id, None)
            if self.runner.cache.length(step.seq_id) < step.start:
                return None
            prefill = Step(
                step.seq_id,
                step.start,
                self._known_ids(step.tokens),
                self._known_ids(step.encoder_input),
                step.policy.cache_salt,
            )
            state = DraftState(step.stop, step.policy)
            return self._begun(step.seq_id, prefill, state, step.gamma)
        if step.gamma <= len(state.tokens):
            del state.tokens[step.gamma :], state.rows[step.gamma :]
            return None
        return self._resume_task(step.seq_id, state, num_wanted=step.gamma - len(state.tokens))

    def _resume_task(self, seq_id: int, state: DraftState, *, num_wanted: int) -> DraftTask:
        """Return the task that writes the uncached draft tokens and continues after them."""
        step = state.missing_step(seq_id, self.runner.cache.length(seq_id))
        return self._begun(seq_id, step, state, num_wanted)

    def _begun(self, seq_id: int, prefill: Step, state: DraftState, num_wanted: int) -> DraftTask:
        task = DraftTask(seq_id, prefill, state, num_wanted, self.runner.positions(prefill))
        return task if self._begin is None else self._begin(task)

    def _advance_grammars(self, steps: Sequence[DraftStep]) -> bool:
        """Move the grammar states to the end of the draft tokens, and return if there are any."""
        if self.grammar_states.grammar_compiler is None:
            return False
        drafted = [step for step in steps if step.gamma and step.seq_id in self._states]
        matchers = [
            (step.seq_id, self.grammar_states.advance(step, self.runner.cache.tokens))
            for step in drafted
        ]
        for seq_id, matcher in matchers:
            if matcher is not None:
                matcher.write(len(matcher.tokens), self._states[seq_id].tokens)
        return any(matcher is not None for _, matcher in matchers)

    def _fits(self, task: DraftTask, free: int) -> bool:
        cache = self.runner.cache
        longest = max(task.final_length, len(task.prefill.encoder_input))
        return longest <= self.context and task.max_new_pages(cache.page_size) <= free

    def _draw_tasks(
        self, tasks: Sequence[DraftTask], should_stop: Callable[[], bool], *, constrained: bool
    ) -> None:
        """Prefill, and draw for tasks in falling order of `num_wanted`."""
        if self._draw_all is not None:
            self._draw_all(tasks, constrained)
            return
        if constrained:
            self.constrained.draw(tasks, should_stop)
            return
        logits = self._prefill(tasks)
        drawing = [task for task in tasks if task.num_wanted]
        if drawing:
            self._draw(drawing, logits, should_stop)

    def _prefill(self, tasks: Sequence[DraftTask]) -> Tensor:  # [drawing, vocab]
        """Write committed or last drawn tokens; return logits where draft tokens are wanted."""
        return self.runner.run(
            [task.prefill for task in tasks], [min(task.num_wanted, 1) for task in tasks]
        )

    def _draw(
        self, tasks: Sequence[DraftTask], logits: Tensor, should_stop: Callable[[], bool]
    ) -> None:
        """Draw for tasks in falling order of `num_wanted`.

        The last token of each sequence is drawn and not written to the cache.
        """
        sampler = self._sampler(tasks)
        tokens = sampler.draw(self._shared(logits))
        passes = self.runner.decode_passes(
            [task.seq_id for task in tasks], [task.num_wanted - 1 for task in tasks]
        )
        for depth in range(1, tasks[0].num_wanted):
            if should_stop():
                break
            while tasks[len(tokens) - 1].num_wanted <= depth:
                tokens = tokens[:-1]
            tokens = sampler.draw(self._shared(passes.logits(tokens)))
        self._store_draws(tasks, sampler)

    def _sampler(self, tasks: Sequence[DraftTask]) -> DraftSampler:
        specs = [
            DrawSpec(
                task.state.start,
                len(task.state.tokens),
                task.num_wanted,
                task.state.policy,
                self.history(task.seq_id, self.runner.cache.length(task.seq_id), task.state.policy),
            )
            for task in tasks
        ]
        return DraftSampler(
            specs, support=self.support, device=self.runner.device, among=self._among
        )

    def _store_draws(
        self, tasks: Sequence[DraftTask], sampler: DraftSampler, *, first_row: int = 0
    ) -> None:
        fetched = fetch(sampler.draws)
        for row, task in enumerate(tasks, first_row):
            own = [draws for draws in fetched if row < len(draws.tokens)]
            tokens = [draws.tokens[row] for draws in own]
            self.runner.cache.append(task.seq_id, tokens[:-1])
            for token, draws in zip(tokens, own, strict=True):
                task.state.append(token, draws, row)

    def _proposal(self, step: DraftStep) -> Proposal:
        num_cached = self.runner.cache.length(step.seq_id)
        state = self._states.get(step.seq_id)
        if state is None or not step.gamma:
            if not self.runner.cache.holds(step.seq_id, step.start, self._known_ids(step.tokens)):
                # There was no room: rejected draft tokens may lie after the start.
                num_cached = min(num_cached, step.start)
            return Proposal(step.seq_id, step.stop, (), None, num_cached)
        tokens = tuple(state.tokens)
        return Proposal(
            step.seq_id,
            state.start,
            tokens,
            state.distribution(),
            min(num_cached, state.start + max(0, len(tokens) - 1)),
        )

    def _shared(self, logits: Tensor) -> Tensor:  # [rows, shared vocabulary]
        return logits if logits.shape[1] == self.shared_vocab else logits[:, : self.shared_vocab]

    def _known_ids(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Replace ids that the draft model lacks.

        A target with a larger padded embedding may commit one, however rarely.
        """
        return (
            tuple(token if token < self.shared_vocab else 0 for token in tokens)
            if self.lacks_tokens
            else tokens
        )
