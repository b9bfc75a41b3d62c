"""Draft all tokens of a proposal in one pass of a P-EAGLE head (arXiv 2602.01469).

Mask tokens follow the newest token, one for each further draft token. Knows no target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specserve.drafters.neural.constrained_drafts import ConstrainedDrafting
from specserve.drafters.neural.draft_state import DraftTask
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.neural.draws import DraftSampler, DrawSpec, fetch
from specserve.features.eagle.states import TargetStates
from specserve.models.runner import Runner
from specserve.types import DraftStep, Step


@dataclass(frozen=True, slots=True, eq=False)
class MaskRow:
    """The row that stands for a draft token: its token, and the state that it reads."""

    token: int
    state: Tensor  # [hidden]


class BlockDrafting:
    """Drafting of gamma tokens from gamma rows of one pass: the newest token, then masks.

    The row of a mask attends to the text and to the masks before it, and sees no token that is
    drawn in the same pass. So position i's q is a function of the text and of i alone, and its
    token is drawn from that q independently of the draft tokens before it. Verification stays
    exact: the acceptance tests and residuals of Algorithm 1 (2211.17192) and of block verification
    (2403.10444) need for each position the q from which its token was drawn, given the prefix and
    the draft tokens before it, and a q that ignores the latter is such a one. Only acceptance
    suffers, where two tokens are likely one by one and not together.

    Keys and values of the masks are dropped with the pass.
    """

    def __init__(
        self,
        runner: Runner,
        states: TargetStates,
        mask: MaskRow,
        constrained: ConstrainedDrafting,
        *,
        support: int,
    ) -> None:
        self._runner, self._states, self._mask = runner, states, mask
        self._constrained, self._support = constrained, support
        self._num_masks: dict[int, int] = {}  # of each sequence in the pass under way

    def draw(self, tasks: Sequence[DraftTask], *, constrained: bool) -> None:
        """Prefill, and draw all wanted tokens.

        With `constrained` they are drawn one after another from the rows, so that grammars,
        penalties and rules apply to each given the tokens before it.
        """
        logits = self._pass(tasks)
        drawing = [task for task in tasks if task.num_wanted]
        if constrained:
            self._constrained.draw_from_rows(drawing, logits)
        elif drawing:
            draw_rows(drawing, logits, support=self._support)

    def write_states(self, steps: Sequence[Step]) -> None:
        """Write the states that the rows of a pass read: the target's and the masks'."""
        stops = [step.stop - self._num_masks.get(step.seq_id, 0) for step in steps]
        self._states.store(
            [
                replace(step, tokens=step.tokens[: stop - step.start])
                for step, stop in zip(steps, stops, strict=True)
            ]
        )
        # Each row reads the state after the position before it.
        self._states.fill(
            [
                (step.seq_id, range(stop - 1, step.stop - 1))
                for step, stop in zip(steps, stops, strict=True)
            ],
            self._mask.state,
        )

    def _pass(self, tasks: Sequence[DraftTask]) -> Tensor:  # [sum of num_wanted, vocab]
        """Write committed tokens, and return the logits of the newest and of the masks."""
        self._num_masks = {task.seq_id: max(task.num_wanted - 1, 0) for task in tasks}
        logits = self._runner.run(
            [
                replace(
                    task.prefill,
                    tokens=task.prefill.tokens + (self._mask.token,) * self._num_masks[task.seq_id],
                )
                for task in tasks
            ],
            [task.num_wanted for task in tasks],
        )
        for task in tasks:
            self._runner.cache.truncate(task.seq_id, task.prefill.stop)
        return logits


def draw_rows(
    tasks: Sequence[DraftTask], logits: Tensor, *, support: int, among: Tensor | None = None
) -> None:
    """Draw the tokens of all rows at once: `num_wanted` rows of each task."""
    owners = [task for task in tasks for _ in range(task.num_wanted)]
    depths = [depth for task in tasks for depth in range(task.num_wanted)]
    sampler = DraftSampler(
        [
            DrawSpec(task.state.start, depth, 1, task.state.policy, None)
            for task, depth in zip(owners, depths, strict=True)
        ],
        support=support,
        device=logits.device,
        among=among,
    )
    sampler.draw(logits)
    draws = fetch(sampler.draws)[0]
    for row, task in enumerate(owners):
        task.state.append(draws.tokens[row], draws, row)


def drop_short_drafts(drafter: NeuralDrafter, steps: Sequence[DraftStep]) -> None:
    """Drop drafts that are shorter than is wanted now.

    A pass begins at the newest token; it draws the same again.
    """
    drafter.drop_drafts(
        [
            step.seq_id
            for step in steps
            if (state := drafter.drafted(step.seq_id)) is not None
            and len(state.tokens) < step.gamma
        ]
    )


@torch.inference_mode()
def mask_row(token: int, hidden: Tensor, states: TargetStates) -> MaskRow:
    """Return the mask row of a head whose `mask_hidden` stands for three states of the target."""
    return MaskRow(token, states.project(hidden.reshape(1, -1))[0])
