"""Draft heads that learn from what they draft for."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.drafters.heads import HeadsDrafter
from specserve.drafters.learning.learner import DraftLearner
from specserve.drafters.learning.served_states import ServedStates
from specserve.types import DraftStep, Proposal


class LearningHeads:
    """A `HeadsDrafter` with a learner, which gets the states that the heads draft from."""

    def __init__(self, drafter: HeadsDrafter, learner: DraftLearner, states: ServedStates) -> None:
        self._drafter, self.learner, self._states = drafter, learner, states
        self.context = drafter.context

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """Return the proposals of the heads."""
        hidden = [self._drafter.latest_hidden(step) for step in steps]
        self._states.receive([each for each in hidden if each is not None])
        self.learner.on_steps(steps)
        proposals = self._drafter.propose(steps, deadline)
        self.learner.on_proposals(proposals)
        return proposals

    def release(self, seq_ids: Sequence[int]) -> None:
        self._drafter.release(seq_ids)
        self.learner.release(seq_ids)
