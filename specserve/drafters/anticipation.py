"""While the target verifies, the next proposals are prepared for its likely verdicts. Knows no model and no clock but the one it is given.

A verdict is how many drafts are accepted and which token comes next. For the likelier ones the sequence is forked and drafted from,
all branches in one pass a depth. The next step is itself the key: it fits a branch, which then takes the sequence's place, or none.
What is prepared is what would be drafted later, token for token: only when it is drafted changes, never what.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from specserve.drafters.base import Forks, Outlook
from specserve.drafters.branches import Branch, Fanout
from specserve.types import DraftStep, Foreseen, Proposal

BRANCHES = 2**61  # ids from here on are branches'; no request ever has one
FEWEST, MOST = 4, 128  # branches at once
WORTH_TELLING = 0.25  # chance that all sequences hit, from which on the coordinator is told in advance: it can skip the wait only if all do
BLEND = 0.1  # of the newest hit or miss into their running mean
ENOUGH = 0.75  # of the time between an answer and the next message is spent on preparing, so that the message seldom waits


@dataclass(slots=True)
class Expected:
    """What may become of one proposal, and the branches that go on from there."""

    outlook: Outlook
    branches: dict[tuple[int, int], Proposal] = field(
        default_factory=dict
    )  # (accepted, next token): what the branch has, under its own id

    def verdict(self, step: DraftStep) -> tuple[int, int] | None:
        """What the target made of it, by the step that follows; None if that goes on from elsewhere."""
        drafts, start = self.outlook.drafts, self.outlook.start
        accepted = step.start + len(step.tokens) - start - 1
        if not 0 <= accepted <= len(drafts) or step.start > start + accepted:
            return None
        if step.start >= start and step.tokens[:-1] != drafts[step.start - start : accepted]:
            return None
        return accepted, step.tokens[-1]


class Effort:
    """How many branches to follow at once: more while there is time to spare, fewer where a message found us still at work."""

    def __init__(self) -> None:
        self.branches = 16.0
        self._answered: float | None = None
        self._prepared: float | None = None  # None: the work was broken off

    def answered(self, now: float) -> None:
        self._answered, self._prepared = now, None

    def prepared(self, now: float) -> None:
        self._prepared = now

    def called(self, now: float) -> None:
        """The next message is here."""
        if self._answered is None:
            return
        spent = (
            1.0
            if self._prepared is None
            else (self._prepared - self._answered) / max(now - self._answered, 1e-9)
        )
        self.branches = min(MOST, max(FEWEST, self.branches * (1.1 if spent < ENOUGH else 0.9)))
        self._answered = None


class Anticipation:
    """A drafter that does not rest: call `prepare` after every answer. Forgetting is put off too, until it costs nobody time."""

    def __init__(self, drafter: Forks, fanout: Fanout, *, clock: Callable[[], float]) -> None:
        self._drafter, self._fanout, self._clock = drafter, fanout, clock
        self._effort = Effort()
        self._ids = itertools.count(BRANCHES)
        self._expected: dict[int, Expected] = {}
        self._answered: list[DraftStep] = []  # by the last answer, with drafts
        self._postponed: list[DraftStep] = []  # which want nothing but to be read
        self._stale: list[int] = []
        self._verdicts: list[tuple[Outlook, int, int]] = []  # to be learnt from, when there is time
        self.num_hits = self.num_misses = 0
        self._hit_rate = 0.0  # lately

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """A step that wants no drafts is promised to be read, and read afterwards. Past the deadline proposals come back shorter."""
        self._effort.called(self._clock())
        self._catch_up()
        hits = {step.seq_id: self._take_up(step) for step in steps}
        wanted = [step for step in steps if step.gamma]
        proposals = self._draft(wanted, lambda: self._clock() > deadline)
        self._answered = [step for step in wanted if proposals[step.seq_id].tokens]
        self._postponed = [step for step in steps if not step.gamma]
        if self._answered:
            self._effort.answered(self._clock())
        return [
            replace(proposals.get(step.seq_id) or _promised(step), anticipated=hits[step.seq_id])
            for step in steps
        ]

    def prepare(self, waiting: Callable[[], bool]) -> None:
        """Works ahead until there is nothing more to do, or a message is waiting, which is looked for between passes."""
        self._catch_up()
        self._forget()
        self._learn()
        steps = {step.seq_id: step for step in self._answered}
        self._answered = []
        if not steps or waiting():
            return
        outlooks = self._drafter.outlooks(list(steps), self._fanout.width)
        self._expected = {outlook.seq_id: Expected(outlook) for outlook in outlooks}
        if waiting():
            return
        self._follow(
            [
                (branch, steps[branch.seq_id])
                for branch in self._fanout.choose(outlooks, self._num_branches)
            ],
            waiting,
        )
        self._effort.prepared(self._clock())

    def foreseen(self) -> tuple[Foreseen, ...]:
        """What has been prepared, for whoever may look it up instead of asking; nothing where some sequence will probably have to ask."""
        if self._hit_rate ** len(self._expected) < WORTH_TELLING:
            return ()
        return tuple(
            Foreseen(token, replace(proposal, seq_id=seq_id, anticipated=True))
            for seq_id, expected in self._expected.items()
            for (_, token), proposal in expected.branches.items()
        )

    def release(self, seq_ids: Sequence[int]) -> None:
        self._postponed = [step for step in self._postponed if step.seq_id not in seq_ids]
        self._answered = [step for step in self._answered if step.seq_id not in seq_ids]
        for seq_id in seq_ids:
            self._drop(self._expected.pop(seq_id, None))
        self._drafter.release(seq_ids)

    def _take_up(self, step: DraftStep) -> bool | None:
        """Whether a branch is what the step asks for; it then takes the sequence's place. None if nothing was expected of it."""
        expected = self._expected.pop(step.seq_id, None)
        verdict = None if expected is None else expected.verdict(step)
        if expected is None or verdict is None:
            self._drop(expected)
            return None
        self._verdicts.append((expected.outlook, *verdict))
        branch = expected.branches.pop(verdict, None)
        self._hit_rate += BLEND * ((branch is not None) - self._hit_rate)
        self._drop(expected)
        if branch is None:
            self.num_misses += 1
            return False
        self._drafter.become(step.seq_id, branch.seq_id)
        self.num_hits += 1
        return True

    @property
    def _num_branches(self) -> int:
        """A fan-out that was asked for is kept, busy or not."""
        return int(self._effort.branches) if self._fanout.per_stop is None else MOST

    def _draft(self, steps: Sequence[DraftStep], enough: Callable[[], bool]) -> dict[int, Proposal]:
        """What is asked for comes first: where it lacks room, all that was prepared gives way."""
        proposals = {proposal.seq_id: proposal for proposal in self._drafter.draft(steps, enough)}
        lacking = [step for step in steps if not proposals[step.seq_id].tokens]
        if lacking and (self._stale or self._expected):
            self._forget()
            proposals |= {
                proposal.seq_id: proposal for proposal in self._drafter.draft(lacking, enough)
            }
        return proposals

    def _follow(
        self, branches: Sequence[tuple[Branch, DraftStep]], waiting: Callable[[], bool]
    ) -> None:
        """Forks for them, as far as there is room, and drafts from all at once."""
        ahead: dict[int, tuple[Branch, DraftStep]] = {}
        for branch, step in branches:
            branch_id, stop = (
                next(self._ids),
                self._expected[branch.seq_id].outlook.start + branch.accepted,
            )
            if not self._drafter.fork(branch.seq_id, branch_id, stop):
                break
            ahead[branch_id] = (
                branch,
                DraftStep(branch_id, stop, (branch.token,), step.gamma, step.policy),
            )
        if not ahead:
            return
        for proposal in self._drafter.draft([step for _, step in ahead.values()], waiting):
            branch, _ = ahead[proposal.seq_id]
            if proposal.tokens:
                self._expected[branch.seq_id].branches[branch.accepted, branch.token] = proposal
            else:
                self._stale.append(proposal.seq_id)

    def _catch_up(self) -> None:
        """Reads what was promised to be read."""
        postponed, self._postponed = self._postponed, []
        if postponed:
            self._drafter.draft(postponed, _never)

    def _learn(self) -> None:
        verdicts, self._verdicts = self._verdicts, []
        for outlook, accepted, token in verdicts:
            self._fanout.observe(outlook, accepted, token)

    def _drop(self, expected: Expected | None) -> None:
        if expected is not None:
            self._stale += [proposal.seq_id for proposal in expected.branches.values()]

    def _forget(self) -> None:
        for expected in self._expected.values():  # of sequences that sat a round out
            self._drop(expected)
        self._expected = {}
        stale, self._stale = self._stale, []
        self._drafter.release(stale)


def _never() -> bool:
    return False


def _promised(step: DraftStep) -> Proposal:
    stop = step.start + len(step.tokens)
    return Proposal(step.seq_id, stop, (), None, stop)
