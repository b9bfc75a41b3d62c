"""Messages whose steps are drafted for in the same passes, which later messages may join.

Knows no model, and no clock but the one it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specserve.drafters.base import ResumableDrafter, never
from specserve.drafters.drafting_round import DraftingRound, steps_without_room
from specserve.types import DraftStep, Proposal


@dataclass(slots=True, eq=False)
class _RunningRound:
    """A message without an answer yet."""

    asked: DraftingRound
    num_ahead: int = 0
    """Passes of something else that have included it since."""

    @property
    def lacking(self) -> list[DraftStep]:
        """Steps that lack draft tokens. One that got none has no room, and gets none later."""
        return [
            step
            for step in self.asked.drafting
            if (found := self.asked.proposals.get(step.seq_id)) is None
            or 0 < len(found.tokens) < step.gamma
        ]

    @property
    def num_passes(self) -> int:
        """Number of passes until no step lacks a draft token.

        Passes that included it may have been more than it needs: it is answered after its own next.
        """
        proposals = self.asked.proposals
        wanted = [
            step.gamma - len(found.tokens if (found := proposals.get(step.seq_id)) else ())
            for step in self.lacking
        ]
        return max(0, max(wanted, default=0) - self.num_ahead)


class DraftingRounds:
    """The messages that are drafted for; each is done when its own draft tokens are.

    `make_room` is called when some sequence has no room, and returns whether it has made any.
    """

    def __init__(
        self,
        drafter: ResumableDrafter,
        *,
        clock: Callable[[], float],
        make_room: Callable[[], bool] = never,
    ) -> None:
        self._drafter, self._clock, self._make_room = drafter, clock, make_room
        self._rounds: list[_RunningRound] = []

    @property
    def num_passes(self) -> int:
        """Number of passes until all are done."""
        return max((each.num_passes for each in self._rounds), default=0)

    def begin(self, steps: Sequence[DraftStep], deadline: float) -> DraftingRound:
        """Take a message all of whose steps are to be drafted for."""
        return self.add(DraftingRound(tuple(steps), list(steps), deadline))

    def add(self, new: DraftingRound) -> DraftingRound:
        self._rounds.append(_RunningRound(new))
        return new

    def advance(
        self, should_stop: Callable[[], bool], extra_steps: Sequence[DraftStep] = ()
    ) -> tuple[list[DraftingRound], Sequence[Proposal]]:
        """Draft for all messages until one is past its deadline, or `should_stop`.

        Returns those that are done, past their deadlines, too, and the proposals of `extra_steps`:
        steps of no message that get draft tokens in the same passes. Where some are done already,
        there is no pass. After an exception no message is left.
        """
        done = [each for each in self._rounds if not each.lacking]
        if done or not self._rounds:
            return self._end(done), ()
        try:
            return self._draft(should_stop, extra_steps)
        except Exception:
            self._rounds.clear()
            raise

    def include_in_pass(self) -> list[DraftStep]:
        """Count another pass, which gives one token to each step returned: those that lack some."""
        for each in self._rounds:
            each.num_ahead += 1
        return [step for each in self._rounds for step in each.lacking]

    def drop(self, is_dropped: Callable[[int], bool]) -> None:
        """Draft no further for these sequences."""
        for each in self._rounds:
            each.asked.drafting = [
                step for step in each.asked.drafting if not is_dropped(step.seq_id)
            ]

    def _draft(
        self, should_stop: Callable[[], bool], extra_steps: Sequence[DraftStep]
    ) -> tuple[list[DraftingRound], Sequence[Proposal]]:
        steps = [step for each in self._rounds for step in each.lacking]
        deadline = min(each.asked.deadline for each in self._rounds)
        # The first that is done is answered before the others go on.
        counts = {each.num_passes for each in self._rounds} if len(self._rounds) > 1 else {0}
        num_passes, was_stopped = 0, False

        def must_stop() -> bool:
            nonlocal num_passes, was_stopped
            num_passes += 1
            is_first_done = min(counts) <= num_passes < max(counts)
            was_stopped = was_stopped or is_first_done or should_stop()
            return was_stopped or self._clock() > deadline

        drafted = list(self._drafter.draft([*steps, *extra_steps], must_stop))
        proposals = {one.seq_id: one for one in drafted[: len(steps)]}
        without_room = steps_without_room(steps, drafted[: len(steps)])
        if without_room and self._make_room():
            proposals |= {one.seq_id: one for one in self._drafter.draft(without_room, must_stop)}
        for each in self._rounds:
            each.num_ahead = 0
            each.asked.add(
                [proposals[step.seq_id] for step in each.asked.drafting if step.seq_id in proposals]
            )
        now = self._clock()
        is_over = not was_stopped and now <= deadline
        return (
            self._end(
                each
                for each in self._rounds
                if is_over or now > each.asked.deadline or not each.lacking
            ),
            drafted[len(steps) :],
        )

    def _end(self, rounds: Iterable[_RunningRound]) -> list[DraftingRound]:
        ended = list(rounds)
        self._rounds = [each for each in self._rounds if each not in ended]
        return [each.asked for each in ended]
