"""A draft model that is only counts, chances and seconds, with branches as `drafters.base.Forks` wants them. Knows no queue and no messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specserve.drafters.base import Outlook
from specserve.tools.simulate.acceptance_model import Truth
from specserve.tools.simulate.clock import DeviceClock
from specserve.tools.simulate.pass_times import PassTime
from specserve.types import DraftStep, Proposal


@dataclass(slots=True)
class Line:
    """A sequence or a branch of one, as the draft's cache has it."""

    root: int  # the sequence whose text it guesses
    length: int = 0  # positions held
    shared: int = 0  # whole pages that belong to the sequence it branched off
    start: int = -1  # length of the prefix that its drafts continue
    last: int = -1  # that prefix's last token
    drafts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Todo:
    line: Line
    rows: int  # to be read before the first new draft
    wanted: int  # new drafts


class SimulatedGuesser:
    """Draws its tokens from `truth`, and moves `clock` on by each pass. A step that leaves a gap or finds no page gets an empty proposal."""

    def __init__(
        self, truth: Truth, pass_time: PassTime, clock: DeviceClock, *, pages: int, page_size: int
    ) -> None:
        self._truth, self._pass_time, self._clock = truth, pass_time, clock
        self._page_size, self._free = page_size, pages
        self._lines: dict[int, Line] = {}

    def draft(self, steps: Sequence[DraftStep], enough: Callable[[], bool]) -> Sequence[Proposal]:
        todo = [one for step in steps if (one := self._todo(step)) is not None]
        if todo:
            self._pass(sum(one.rows for one in todo), todo)
            self._draw([one for one in todo if one.wanted], enough)
        return [self._proposal(step) for step in steps]

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            line = self._lines.pop(seq_id, None)
            if line is not None:
                self._free += self._own_pages(line)

    def outlooks(self, seq_ids: Sequence[int], width: int) -> Sequence[Outlook]:
        lines = [
            (seq_id, line)
            for seq_id in seq_ids
            if (line := self._lines.get(seq_id)) is not None and line.drafts
        ]
        lines = [
            (seq_id, line)
            for seq_id, line in lines
            if self._grow(line, line.start + len(line.drafts))
        ]
        if lines:
            self._pass(len(lines), [_Todo(line, 1, 0) for _, line in lines])
        return [self._outlook(seq_id, line, width) for seq_id, line in lines]

    def fork(self, seq_id: int, as_id: int, length: int) -> bool:
        line = Line(self._lines[seq_id].root, length, shared=length // self._page_size)
        need = self._own_pages(line)
        if need > self._free:
            return False
        self._free -= need
        self._lines[as_id] = line
        return True

    def become(self, seq_id: int, branch_id: int) -> None:
        """What the branch shared is its own now; what was only the sequence's is free."""
        branch = self._lines.pop(branch_id)
        self.release([seq_id])
        self._free -= branch.shared
        branch.shared = 0
        self._lines[seq_id] = branch

    def _todo(self, step: DraftStep) -> _Todo | None:
        """What the step takes; None where nothing is left to do, or nothing can be done."""
        line = self._lines.get(step.seq_id)
        if line is None:
            line = self._lines[step.seq_id] = Line(step.seq_id)
        stop = step.start + len(step.tokens)
        if line.drafts and line.start == stop and line.last == step.tokens[-1]:
            del line.drafts[step.gamma :]
            one = _Todo(line, 1, step.gamma - len(line.drafts))
            return one if one.wanted and self._grow(line, stop + step.gamma - 1) else None
        line.drafts = []
        if line.length < step.start:
            line.start = -1
            return None
        self._cut(line, step.start)
        line.start, line.last = stop, step.tokens[-1]
        return (
            _Todo(line, len(step.tokens), step.gamma)
            if self._grow(line, stop + max(0, step.gamma - 1))
            else None
        )

    def _draw(self, todo: Sequence[_Todo], enough: Callable[[], bool]) -> None:
        depth, deepest = 1, max((one.wanted for one in todo), default=0)
        while depth < deepest and not enough():
            going = [one for one in todo if one.wanted > depth]
            self._pass(len(going), going)
            depth += 1
        for one in todo:
            line, new = one.line, min(one.wanted, depth)
            begun = line.start + len(line.drafts)
            line.drafts += self._truth.guesses(
                line.root, begun, begun + new, depth=len(line.drafts)
            )
            self._cut(line, line.start + len(line.drafts) - 1)

    def _pass(self, rows: int, todo: Sequence[_Todo]) -> None:
        """Each attends to all that is reserved for it, a few positions more than it has at first."""
        self._clock.work(
            self._pass_time.seconds(rows, len(todo), sum(one.line.length for one in todo))
        )

    def _proposal(self, step: DraftStep) -> Proposal:
        line, stop = self._lines[step.seq_id], step.start + len(step.tokens)
        if not step.gamma or line.start != stop:
            return Proposal(step.seq_id, stop, (), None, line.length)
        tokens = tuple(line.drafts)
        return Proposal(
            step.seq_id, stop, tokens, None, min(line.length, stop + max(0, len(tokens) - 1))
        )

    def _outlook(self, seq_id: int, line: Line, width: int) -> Outlook:
        nexts = [
            self._truth.nexts(line.root, line.start + stop, width, but=draft)
            for stop, draft in enumerate((*line.drafts, None))
        ]
        return Outlook(seq_id, line.start, tuple(line.drafts), tuple(nexts))

    def _grow(self, line: Line, length: int) -> bool:
        """Reserves pages up to `length`; False, and nothing done, where there are none."""
        if length <= line.length:
            return True
        need = -(-length // self._page_size) - -(-line.length // self._page_size)
        if need > self._free:
            return False
        self._free -= need
        line.length = length
        return True

    def _cut(self, line: Line, length: int) -> None:
        """Whole pages that are no longer needed come free; shared ones are only no longer referred to."""
        before = self._own_pages(line)
        line.length = length
        line.shared = min(line.shared, length // self._page_size)
        self._free += before - self._own_pages(line)

    def _own_pages(self, line: Line) -> int:
        return -(-line.length // self._page_size) - line.shared
