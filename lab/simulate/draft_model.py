"""The simulated draft model: a `drafters.base.ForkableDrafter` of counts, chances and seconds.

Knows no queue and no messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lab.simulate.clock import DeviceClock
from lab.simulate.pass_times import PassTime
from specserve.drafters.base import OutcomeForecast, never
from specserve.types import DraftStep, Proposal


@dataclass(slots=True)
class DraftSequence:
    """A sequence or a branch of one in the draft's KV cache."""

    root_id: int  # the sequence whose text it predicts
    length: int = 0  # cached positions
    shared: int = 0  # whole pages that belong to the sequence from which it was forked
    start: int = -1  # length of the prefix that its draft tokens continue
    last: int = -1  # last token of that prefix
    drafts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Task:
    sequence: DraftSequence
    rows: int  # tokens of the pass that gives the first new draft token
    num_new: int  # draft tokens


class DraftedTexts(Protocol):
    """The texts that are drafted: an `AcceptanceModel`, or the texts of a pool's engines."""

    def draft_tokens(self, seq_id: int, start: int, stop: int, *, depth: int) -> list[int]: ...
    def likeliest(
        self, seq_id: int, position: int, width: int, *, but: int | None
    ) -> tuple[int, ...]: ...


class SimulatedDraftModel:
    """Draws draft tokens from an acceptance model, and advances `clock` by each pass.

    A step that leaves a gap in the cache or finds no free page gets an empty proposal.
    """

    def __init__(
        self,
        model: DraftedTexts,
        pass_time: PassTime,
        clock: DeviceClock,
        *,
        pages: int,
        page_size: int,
    ) -> None:
        self._model, self._pass_time, self._clock = model, pass_time, clock
        self._page_size, self._free = page_size, pages
        self._sequences: dict[int, DraftSequence] = {}

    def draft(
        self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]
    ) -> Sequence[Proposal]:
        tasks = [task for step in steps if (task := self._start_task(step)) is not None]
        if tasks:
            self._pass(sum(task.rows for task in tasks), tasks)
            self._draw([task for task in tasks if task.num_new], should_stop)
        return [self._proposal(step) for step in steps]

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            sequence = self._sequences.pop(seq_id, None)
            if sequence is not None:
                self._free += self._own_pages(sequence)

    def forecast_outcomes(
        self,
        seq_ids: Sequence[int],
        width: int,
        undrafted: Sequence[DraftStep] = (),
        extra_steps: Sequence[DraftStep] = (),
    ) -> Sequence[OutcomeForecast]:
        tasks = [  # by sequence
            (step.seq_id, task)
            for step in undrafted
            if (task := self._start_task(replace(step, gamma=0))) is not None
        ]
        drafted = [
            (seq_id, sequence)
            for seq_id in seq_ids
            if (sequence := self._sequences.get(seq_id)) is not None and sequence.drafts
        ]
        fitting = [
            (seq_id, sequence)
            for seq_id, sequence in drafted
            if self._extend(sequence, sequence.start + len(sequence.drafts))
        ]
        tasks += [(seq_id, _Task(sequence, 1, 0)) for seq_id, sequence in fitting]
        if tasks:
            extra = [
                task for step in extra_steps if (task := self._start_task(step)) and task.num_new
            ]
            self._pass(
                sum(task.rows for _, task in tasks) + sum(task.rows for task in extra),
                [task for _, task in tasks],
            )
            self._draw([replace(task, num_new=1) for task in extra], never)
        return [self._forecast(seq_id, task.sequence, width) for seq_id, task in tasks]

    def fork(self, seq_id: int, branch_id: int, length: int) -> bool:
        root_id = self._sequences[seq_id].root_id
        branch = DraftSequence(root_id, length, shared=length // self._page_size)
        num_pages = self._own_pages(branch)
        if num_pages > self._free:
            return False
        self._free -= num_pages
        self._sequences[branch_id] = branch
        return True

    def promote_branch(self, seq_id: int, branch_id: int) -> None:
        """Replace a sequence by its branch.

        The branch takes over the pages that it shared; the sequence's other pages become free.
        """
        branch = self._sequences.pop(branch_id)
        self.release([seq_id])
        self._free -= branch.shared
        branch.shared = 0
        self._sequences[seq_id] = branch

    def _start_task(self, step: DraftStep) -> _Task | None:
        """Return the work of a step, or None if it needs none or cannot be done."""
        sequence = self._sequences.get(step.seq_id)
        if sequence is None:
            sequence = self._sequences[step.seq_id] = DraftSequence(step.seq_id)
        stop = step.stop
        if sequence.drafts and sequence.start == stop and sequence.last == step.tokens[-1]:
            del sequence.drafts[step.gamma :]
            task = _Task(sequence, 1, step.gamma - len(sequence.drafts))
            return task if task.num_new and self._extend(sequence, stop + step.gamma - 1) else None
        sequence.drafts = []
        if sequence.length < step.start:
            sequence.start = -1
            return None
        self._truncate(sequence, step.start)
        sequence.start, sequence.last = stop, step.tokens[-1]
        return (
            _Task(sequence, len(step.tokens), step.gamma)
            if self._extend(sequence, stop + max(0, step.gamma - 1))
            else None
        )

    def _draw(self, tasks: Sequence[_Task], should_stop: Callable[[], bool]) -> None:
        depth, deepest = 1, max((task.num_new for task in tasks), default=0)
        while depth < deepest and not should_stop():
            going_on = [task for task in tasks if task.num_new > depth]
            self._pass(len(going_on), going_on)
            depth += 1
        for task in tasks:
            sequence, num_new = task.sequence, min(task.num_new, depth)
            first = sequence.start + len(sequence.drafts)
            sequence.drafts += self._model.draft_tokens(
                sequence.root_id, first, first + num_new, depth=len(sequence.drafts)
            )
            self._truncate(sequence, sequence.start + len(sequence.drafts) - 1)

    def _pass(self, rows: int, tasks: Sequence[_Task]) -> None:
        """Advance the clock by a pass.

        A sequence attends to all its reserved positions, a few more than are filled at first.
        """
        positions = sum(task.sequence.length for task in tasks)
        self._clock.work(self._pass_time.seconds(rows, len(tasks), positions))

    def _proposal(self, step: DraftStep) -> Proposal:
        sequence, stop = self._sequences[step.seq_id], step.stop
        if not step.gamma or sequence.start != stop:
            return Proposal(step.seq_id, stop, (), None, sequence.length)
        tokens = tuple(sequence.drafts)
        num_cached = min(sequence.length, stop + max(0, len(tokens) - 1))
        return Proposal(step.seq_id, stop, tokens, None, num_cached)

    def _forecast(self, seq_id: int, sequence: DraftSequence, width: int) -> OutcomeForecast:
        next_tokens = [
            self._model.likeliest(
                sequence.root_id, sequence.start + num_accepted, width, but=rejected
            )
            for num_accepted, rejected in enumerate((*sequence.drafts, None))
        ]
        drafts = tuple(sequence.drafts)
        return OutcomeForecast(seq_id, sequence.start, drafts, tuple(next_tokens))

    def _extend(self, sequence: DraftSequence, length: int) -> bool:
        """Reserve pages up to `length`, or return False if there are too few."""
        if length <= sequence.length:
            return True
        num_pages = -(-length // self._page_size) - -(-sequence.length // self._page_size)
        if num_pages > self._free:
            return False
        self._free -= num_pages
        sequence.length = length
        return True

    def _truncate(self, sequence: DraftSequence, length: int) -> None:
        """Free the whole pages past `length`. Shared pages are not freed, only given up."""
        before = self._own_pages(sequence)
        sequence.length = length
        sequence.shared = min(sequence.shared, length // self._page_size)
        self._free += before - self._own_pages(sequence)

    def _own_pages(self, sequence: DraftSequence) -> int:
        return -(-sequence.length // self._page_size) - sequence.shared
